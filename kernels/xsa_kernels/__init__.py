"""Attention with Exclusive Self Attention (XSA) inside, for any JAX program: this package imports jax and nothing else.

Names of arrays end in the letters of their axes: B batch, T query time, S key time, H query heads, K KV heads, G = H / K,
E head dim.
"""

from xsa_kernels.api import attention, check, weights
from xsa_kernels.decode import project
from xsa_kernels.spec import MaskSpec, Projection

__all__ = ["MaskSpec", "Projection", "attention", "check", "project", "weights"]
