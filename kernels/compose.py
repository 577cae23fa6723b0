"""Any attention that returns y, and the XSA projection in float32 behind it."""

import jax
import jax.numpy as jnp

from kernels import reference
from kernels.spec import MaskSpec, Projection


def xla(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """Plain XLA."""
    return reference.attention(q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, mask, xsa, sinks_H, softcap, scale)


def cudnn(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """NVIDIA's cuDNN flash attention as jax ships it. `api.check` has refused what it cannot honour."""
    window = None if mask.window is None else (mask.window - 1, 0)
    y_BTHE = jax.nn.dot_product_attention(
        q_BTHE, k_BSKE, v_BSKE, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
    )
    if xsa is None:
        return y_BTHE
    y_BTKGE = reference.group(y_BTHE, k_BSKE.shape[2]).astype(jnp.float32)
    return reference.project(y_BTKGE, v_self_BTKE, xsa).reshape(q_BTHE.shape).astype(q_BTHE.dtype)
