"""Comparison of runs by tables and plots, from the files of training and evaluation. Nothing in this package imports jax."""
