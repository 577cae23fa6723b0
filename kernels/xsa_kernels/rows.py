"""The row-local half of the backward pass: the projection's own, in which each query row needs no other token."""

import jax
import jax.numpy as jnp
from jax import lax

from xsa_kernels.backend import Outputs, RowGradients
from xsa_kernels.reference import group
from xsa_kernels.request import Request


def row_gradients(
    request: Request, outputs: Outputs, dz_BTHE: jax.Array
) -> tuple[RowGradients, jax.Array | None, jax.Array | None]:
    """The cotangents of y from those of z.

    Returns:
      The row gradients, and the cotangents of `v_self_BTKE` and of `alpha_H`, each None where the request has none. Where the own
      values are `v_BSKE`, their cotangent is what dv starts from.
    """
    if request.settings.zero_rule is None:
        dy_BTHE = dz_BTHE.astype(request.q_BTHE.dtype)
        delta_BHT = jnp.einsum("BTHE,BTHE->BHT", outputs.z_BTHE, dy_BTHE, preferred_element_type=outputs.lse_BHT.dtype)
        return RowGradients(dy_BTHE, delta_BHT, None, None), None, None
    rows, dv_self_BTKE, dalpha_H = _through_the_projection(request, outputs, dz_BTHE)
    if request.v_self_BTKE is None:
        return rows._replace(dv_start_BTKE=dv_self_BTKE), None, dalpha_H
    return rows, dv_self_BTKE.astype(request.v_self_BTKE.dtype), dalpha_H


def _through_the_projection(
    request: Request, outputs: Outputs, dz_BTHE: jax.Array
) -> tuple[RowGradients, jax.Array, jax.Array | None]:
    """dy and delta, and the cotangents of the own values and of alpha.

    With b = 1 / n2, r = dz . v and c = b (y . v):

      dy = dz - alpha b r v
      delta = y . dy
      dalpha = -c r
      dv_self = alpha (2 (slope - alpha) b c r v - c dy - b r z), where `slope` is the derivative of n2 by |v|^2.

    At alpha = 1 and n2 = |v|^2, dv_self is -(c dy + b r z).
    """
    settings, (z_BTHE, lse_BHT, c_BHT) = request.settings, outputs
    assert c_BHT is not None
    assert request.projected_v_BTKE is not None
    K, wide = request.k_BSKE.shape[2], lse_BHT.dtype
    z, dz = group(z_BTHE, K).astype(wide), group(dz_BTHE, K).astype(wide)
    v_BTKE = request.projected_v_BTKE.astype(wide)
    v = v_BTKE[:, :, :, None]
    c = _columns(c_BHT, K)
    alpha = 1.0 if request.alpha_H is None else request.alpha_H.reshape(K, -1, 1)

    n2 = dot_of_rows(v, v_BTKE)
    b, exact = settings.inverse(n2), settings.exact(n2)
    slope = settings.slope(n2)
    r = dot_of_rows(dz, v_BTKE)
    # The kernels see dy in the dtype of q. delta must come from those same numbers, or their errors no longer cancel in dP - delta;
    # `reduce_precision`, unlike a cast to and fro, is never optimised away.
    narrow = jnp.finfo(z_BTHE.dtype)
    dy = dz - alpha * b * r * v
    dy_narrow = lax.reduce_precision(dy, narrow.nexp, narrow.nmant)
    delta = jnp.einsum("BTKGE,BTKGE->BTKG", _grouped_output(request, outputs), dy_narrow, precision=lax.Precision.HIGHEST)
    dv_self = alpha * (2 * (slope - alpha) * b * c * r * v - c * dy - b * r * z)

    dalpha_H = None if request.alpha_H is None else -jnp.sum(c * r, axis=(0, 1)).reshape(-1)
    rows = RowGradients(
        dy_BTHE=dy_narrow.astype(z_BTHE.dtype).reshape(z_BTHE.shape),
        delta_BHT=jnp.moveaxis(delta, 1, -1).reshape(c_BHT.shape),
        keeps_diagonal_BKT=jnp.logical_not(exact[..., 0, 0]).swapaxes(1, 2) if settings.drop_diagonal else None,
        dv_start_BTKE=None,
    )
    return rows, jnp.sum(dv_self, axis=3), dalpha_H


def dot_of_rows(x_BTKGE: jax.Array, v_BTKE: jax.Array) -> jax.Array:
    """x . v of each query row, [B, T, K, G, 1]. As a product and not a sum: XLA's sums over so short an axis are slow on a CPU."""
    return jnp.einsum("BTKGE,BTKE->BTKG", x_BTKGE, v_BTKE, precision=lax.Precision.HIGHEST)[..., None]


def output(request: Request, outputs: Outputs) -> jax.Array:
    """y_BTHE in the dtype of q: what attention returned before the projection."""
    if request.settings.zero_rule is None:
        return outputs.z_BTHE
    return _grouped_output(request, outputs).reshape(outputs.z_BTHE.shape).astype(outputs.z_BTHE.dtype)


def _grouped_output(request: Request, outputs: Outputs) -> jax.Array:
    """y = z + alpha c v, [B, T, K, G, E] in float32 or better."""
    assert outputs.c_BHT is not None
    assert request.projected_v_BTKE is not None
    K = request.k_BSKE.shape[2]
    alpha = 1.0 if request.alpha_H is None else request.alpha_H.reshape(K, -1, 1)
    v_BTK1E = request.projected_v_BTKE[:, :, :, None].astype(outputs.c_BHT.dtype)
    return group(outputs.z_BTHE, K) + alpha * _columns(outputs.c_BHT, K) * v_BTK1E


def dsinks(request: Request, outputs: Outputs, delta_BHT: jax.Array) -> jax.Array | None:
    """The cotangent of `sinks_H`; None without sinks."""
    if request.sinks_H is None:
        return None
    p_sink_BHT = jnp.exp(request.sinks_H.astype(outputs.lse_BHT.dtype)[:, None] - outputs.lse_BHT)
    return -jnp.sum(p_sink_BHT * delta_BHT, axis=(0, 2)).astype(request.sinks_H.dtype)


def _columns(x_BHT: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, H, T] -> [B, T, K, G, 1]."""
    B, H, T = x_BHT.shape
    return jnp.moveaxis(x_BHT.reshape(B, num_kv_heads, H // num_kv_heads, T), -1, 1)[..., None]
