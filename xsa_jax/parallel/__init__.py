"""The device mesh, and the sharding of each logical axis on it."""
