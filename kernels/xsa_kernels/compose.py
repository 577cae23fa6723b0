"""The projection behind any attention that returns its output and log-sum-exp: a forward pass for the frame in `fused`."""

import jax
import jax.numpy as jnp

from xsa_kernels.fused import Call
from xsa_kernels.reference import group


def forward(
    attend, call: Call, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`Backend.forward` after its first argument.

    attend(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT) -> y_BTHE, lse_BHT knows of no sinks and no projection. kept_BKT
    (bool) is None, or marks the rows in which y has p_ii v_i; from y of the other rows it is left out, and counts in lse.
    """
    if own_BTKE is None:
        y_BTHE, lse_BHT = _with_sinks(sinks_H, *attend(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, None))
        return y_BTHE.astype(q_BTHE.dtype), lse_BHT, None
    K, wide = k_BSKE.shape[2], jnp.promote_types(q_BTHE.dtype, jnp.float32)
    own_BTK1E = own_BTKE.astype(wide)[:, :, :, None]
    n2_BTK11 = jnp.sum(own_BTK1E * own_BTK1E, axis=-1, keepdims=True)
    kept_BKT = jnp.logical_not(call.exact(n2_BTK11))[..., 0, 0].swapaxes(1, 2) if call.drop_diagonal else None
    y_BTHE, lse_BHT = _with_sinks(sinks_H, *attend(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT))
    y_BTKGE = group(y_BTHE, K).astype(wide)
    c_BTKG1 = jnp.sum(y_BTKGE * own_BTK1E, axis=-1, keepdims=True) * call.inverse(n2_BTK11)
    alpha = 1 if alpha_H is None else alpha_H.reshape(K, -1, 1)
    z_BTKGE = y_BTKGE - alpha * c_BTKG1 * own_BTK1E
    return z_BTKGE.reshape(q_BTHE.shape).astype(q_BTHE.dtype), lse_BHT, c_BTKG1.reshape(q_BTHE.shape[:3]).swapaxes(1, 2)


def _with_sinks(sinks_H: jax.Array | None, y_BTHE: jax.Array, lse_BHT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (y_BTHE, lse_BHT) if sinks_H is None else also(y_BTHE, lse_BHT, sinks_H.astype(lse_BHT.dtype)[:, None])


def also(y_BTHE: jax.Array, lse_BHT: jax.Array, score_BHT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(y, lse) once one more key takes weight: its scores broadcast to [B, H, T], and its value is zero."""
    both_BHT = jnp.logaddexp(lse_BHT, score_BHT)
    return y_BTHE * jnp.exp(lse_BHT - both_BHT).swapaxes(1, 2)[..., None], both_BHT
