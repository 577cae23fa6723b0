"""How runs differ, from the files that training and evaluation left: tables and pictures. Nothing in this package imports jax."""
