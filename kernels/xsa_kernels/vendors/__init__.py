"""Attention kernels of other makers, with the projection behind them."""
