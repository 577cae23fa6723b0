"""Fused attention kernels for NVIDIA GPUs: `triton` for every one since Ampere, `hopper` for the H100 and H200."""
