"""Attention in plain XLA, for every backend that XLA compiles for."""
