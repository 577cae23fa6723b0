"""Devices: the mesh, and where each logical axis lives on it."""
