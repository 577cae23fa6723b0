"""What the Triton and the Hopper kernels have in common: scores in base 2, and which of them the mask shows."""

import jax
import jax.numpy as jnp

from xsa_kernels import spec
from xsa_kernels.gpu.spans import BlockGrid
from xsa_kernels.request import Settings
from xsa_kernels.spec import LOG2E


def base2_scores(settings: Settings, qk: jax.Array) -> tuple[jax.Array, float]:
    """(scores, factor), whose product is the scores times log2(e), for the hardware's power of 2.

    The exponential multiplies by the factor at no cost. It is positive, so that it can be taken out of a maximum.
    """
    if settings.softcap is not None:
        return jnp.tanh(qk * (settings.scale / settings.softcap)), settings.softcap * LOG2E
    return (qk if settings.scale >= 0 else -qk), abs(settings.scale) * LOG2E


def visible(grid: BlockGrid, query_position: jax.Array, key_position: jax.Array) -> jax.Array:
    """Whether a query sees a key, by position; what pads the keys is seen by none."""
    is_key = key_position < grid.S
    shown = spec.visible(grid.settings, query_position, key_position)
    return is_key if shown is None else shown & is_key
