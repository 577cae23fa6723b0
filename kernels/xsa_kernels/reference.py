"""The definition of attention with XSA, written to be read. Everything is in float32; a T x S matrix exists."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from xsa_kernels.request import Request
from xsa_kernels.spec import MaskSpec, Projection, Sharding, visible


def group(x_BTHE: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, T, H, E] -> [B, T, K, G, E]: query head h = k * G + g reads KV head k, which therefore never has to be repeated."""
    B, T, H, E = x_BTHE.shape
    return x_BTHE.reshape(B, T, num_kv_heads, H // num_kv_heads, E)


def dense_mask(mask: MaskSpec, T: int, S: int) -> jax.Array:
    """The whole mask as a bool array that broadcasts to [B, T, S]; the queries are the last T of the S tokens."""
    seen = visible(mask, jnp.arange(S - T, S)[:, None], jnp.arange(S))
    seen = jnp.ones((1, T, S), bool) if seen is None else seen[None]
    if mask.segment_ids is not None:
        seen = seen & (mask.segment_ids[:, S - T :, None] == mask.segment_ids[:, None, :])
    return seen


def weights(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    mask: MaskSpec,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float | None,
) -> jax.Array:
    """`api.weights` of arguments that are known to be good."""
    (_, T, H, E), (_, S, K, _) = q_BTHE.shape, k_BSKE.shape
    wide = jnp.promote_types(q_BTHE.dtype, jnp.float32)
    q_BTKGE = group(q_BTHE, K).astype(wide)
    s_BKGTS = jnp.einsum("BTKGE,BSKE->BKGTS", q_BTKGE, k_BSKE.astype(wide), precision=lax.Precision.HIGHEST)
    s_BKGTS *= E**-0.5 if scale is None else scale
    if softcap is not None:
        s_BKGTS = softcap * jnp.tanh(s_BKGTS / softcap)
    seen_B11TS = dense_mask(mask, T, S)[:, None, None]
    s_BKGTS = jnp.where(seen_B11TS, s_BKGTS, -jnp.inf)
    if sinks_H is None:
        return jax.nn.softmax(s_BKGTS, axis=-1)
    sinks_KG11 = sinks_H.astype(wide).reshape(K, H // K, 1, 1)
    # A sink is one more key whose value is zero: its column takes mass and is then dropped.
    sink_BKGT1 = jnp.broadcast_to(sinks_KG11, (*s_BKGTS.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([s_BKGTS, sink_BKGT1], axis=-1), axis=-1)[..., :-1]


def project(y_BTKGE: jax.Array, v_BTKE: jax.Array, xsa: Projection) -> jax.Array:
    """z = y - alpha * (y . v) / n2 * v for every query head, in the precision of y (float32 or better).

    In the place of B and T there may be any axes. Finite with finite gradients for every finite v, v = 0 included.
    """
    K, G = y_BTKGE.shape[-3:-1]
    v_BTK1E = v_BTKE.astype(y_BTKGE.dtype)[..., None, :]
    # z does not depend on the unit in which v is measured. Measuring it by its largest entry keeps |v|^2, and the 1 / |v|^4 of the
    # gradient, inside float32's range; the unit is a constant for the derivative just because z does not depend on it.
    unit = lax.stop_gradient(jnp.max(jnp.abs(v_BTK1E), axis=-1, keepdims=True))
    unit = jnp.where(unit > 0, unit, 1)
    u_BTK1E = v_BTK1E / unit
    n2 = jnp.sum(u_BTK1E * u_BTK1E, axis=-1, keepdims=True)
    if xsa.zero_rule == "clamp":
        n2 = jnp.maximum(n2, xsa.eps / unit / unit)
    elif xsa.zero_rule == "add":
        n2 = n2 + xsa.eps / unit / unit
    else:
        n2 = jnp.where(n2 * unit * unit >= jnp.finfo(jnp.float32).tiny, n2, jnp.inf)
    alpha = xsa.alpha if jnp.ndim(xsa.alpha) == 0 else jnp.reshape(xsa.alpha, (K, G, 1))
    c_BTKG1 = alpha * jnp.sum(y_BTKGE * u_BTK1E, axis=-1, keepdims=True) / n2
    return y_BTKGE - c_BTKG1.astype(y_BTKGE.dtype) * u_BTK1E


def attention(request: Request, sharding: Sharding | None = None) -> jax.Array:
    """`xsa_kernels.attention` with impl="reference". XLA divides it over a mesh by itself."""
    settings = request.settings
    mask = dataclasses.replace(settings.mask, segment_ids=request.segment_ids_BS)
    p_BKGTS = weights(request.q_BTHE, request.k_BSKE, mask, request.sinks_H, settings.softcap, settings.scale)
    v_BSKE = request.v_BSKE.astype(p_BKGTS.dtype)
    y_BTKGE = jnp.einsum("BKGTS,BSKE->BTKGE", p_BKGTS, v_BSKE, precision=lax.Precision.HIGHEST)
    if settings.zero_rule is None:
        z_BTKGE = y_BTKGE
    else:
        xsa = Projection(1.0 if request.alpha_H is None else request.alpha_H, settings.zero_rule, settings.eps)
        z_BTKGE = project(y_BTKGE, v_BSKE if request.v_self_BTKE is None else request.v_self_BTKE, xsa)
    return z_BTKGE.reshape(request.q_BTHE.shape).astype(request.q_BTHE.dtype)
