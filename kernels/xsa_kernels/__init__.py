"""Attention with Exclusive Self Attention (XSA) inside, for any JAX program. Importing this package does not import jax.

Names of arrays end in the letters of their axes: B batch, T query time, S key time, H query heads, K KV heads, G = H / K,
E head dim.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsa_kernels.api import attention, check, weights
    from xsa_kernels.projection import project
    from xsa_kernels.registry import Features
    from xsa_kernels.spec import MaskSpec, Projection, Sharding

# The module of each public name, imported when the name is first used.
_HOMES = {
    "Features": "registry",
    "MaskSpec": "spec",
    "Projection": "spec",
    "Sharding": "spec",
    "attention": "api",
    "check": "api",
    "project": "projection",
    "weights": "api",
}
__all__ = ["Features", "MaskSpec", "Projection", "Sharding", "attention", "check", "project", "weights"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
