"""The projection behind any attention that returns its output and log-sum-exp: a forward pass for the frame."""

from typing import Protocol

import jax
import jax.numpy as jnp

from xsa_kernels.backend import Outputs
from xsa_kernels.reference import group
from xsa_kernels.request import Request
from xsa_kernels.rows import dot_of_rows


class Attend(Protocol):
    """Attention that knows of no sinks and no projection.

    Returns y_BTHE and lse_BHT. `keeps_diagonal_BKT` (bool) is None, or marks the rows in which y includes p_ii v_i; y of the other
    rows is without it, and lse counts it all the same.
    """

    def __call__(self, request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]: ...


def forward(attend: Attend, request: Request) -> Outputs:
    """`attend`, then the sinks and the projection in float32 or better. With `attend` bound it is a `frame.Forward`."""
    q_BTHE, v_self_BTKE, settings = request.q_BTHE, request.projected_v_BTKE, request.settings
    if v_self_BTKE is None:
        y_BTHE, lse_BHT = _with_sinks(request.sinks_H, *attend(request, None))
        return Outputs(y_BTHE.astype(q_BTHE.dtype), lse_BHT, None)
    K, wide = request.k_BSKE.shape[2], jnp.promote_types(q_BTHE.dtype, jnp.float32)
    v_self_BTKE = v_self_BTKE.astype(wide)
    n2_BTK11 = dot_of_rows(v_self_BTKE[:, :, :, None], v_self_BTKE)
    keeps_diagonal_BKT = None
    if settings.drop_diagonal:
        keeps_diagonal_BKT = jnp.logical_not(settings.exact(n2_BTK11))[..., 0, 0].swapaxes(1, 2)
    y_BTHE, lse_BHT = _with_sinks(request.sinks_H, *attend(request, keeps_diagonal_BKT))
    y_BTKGE = group(y_BTHE, K).astype(wide)
    c_BTKG1 = dot_of_rows(y_BTKGE, v_self_BTKE) * settings.inverse(n2_BTK11)
    alpha = 1 if request.alpha_H is None else request.alpha_H.reshape(K, -1, 1)
    z_BTKGE = y_BTKGE - alpha * c_BTKG1 * v_self_BTKE[:, :, :, None]
    z_BTHE = z_BTKGE.reshape(q_BTHE.shape).astype(q_BTHE.dtype)
    return Outputs(z_BTHE, lse_BHT, c_BTKG1.reshape(q_BTHE.shape[:3]).swapaxes(1, 2))


def _with_sinks(sinks_H: jax.Array | None, y_BTHE: jax.Array, lse_BHT: jax.Array) -> tuple[jax.Array, jax.Array]:
    if sinks_H is None:
        return y_BTHE, lse_BHT
    return add_zero_value_key(y_BTHE, lse_BHT, sinks_H.astype(lse_BHT.dtype)[:, None])


def add_zero_value_key(y_BTHE: jax.Array, lse_BHT: jax.Array, score_BHT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(y, lse) with one more key in the softmax: its scores broadcast to [B, H, T], and its value is zero."""
    lse_with_key_BHT = jnp.logaddexp(lse_BHT, score_BHT)
    return y_BTHE * jnp.exp(lse_BHT - lse_with_key_BHT).swapaxes(1, 2)[..., None], lse_with_key_BHT
