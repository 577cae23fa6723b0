"""Attention with Exclusive Self Attention (XSA) inside, for any JAX program: this package imports jax and nothing else.

Names of arrays end in the letters of their axes: B batch, T query time, S key time, H query heads, K KV heads, G = H / K,
E head dim.
"""

from kernels.api import attention, check, weights
from kernels.decode import project
from kernels.spec import MaskSpec, Projection

__all__ = ["MaskSpec", "Projection", "attention", "check", "project", "weights"]

# transformers looks for another package of this name and compares its version. This one is below every version that it accepts,
# so that it goes on without that package; with none it would fail to parse "N/A".
__version__ = "0.1.0"
