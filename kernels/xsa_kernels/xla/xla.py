"""A short forward pass by `jax.nn.dot_product_attention`; a long one, and every backward pass, block by block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from xsa_kernels import compose, frame, reference
from xsa_kernels.request import Request
from xsa_kernels.spec import Sharding
from xsa_kernels.xla import blockwise


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """`xsa_kernels.attention` with impl="xla"."""
    return frame.attention(BACKEND, request, sharding)


def _attend(request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `compose.Attend`."""
    q_BTHE = request.q_BTHE
    short = max(q_BTHE.shape[1], request.k_BSKE.shape[1]) <= blockwise.BLOCK
    # jax's function has no soft-cap, and computes in float32 at most.
    if short and request.settings.softcap is None and q_BTHE.dtype != jnp.float64:
        return _dense(request, keeps_diagonal_BKT)
    return blockwise.forward(request, keeps_diagonal_BKT)


def _dense(request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Given float32, jax's function returns y and the log-sum-exp in float32 too: neither is rounded before the projection."""
    settings = request.settings
    (_, T, H, _), (_, S, K, _) = request.q_BTHE.shape, request.k_BSKE.shape
    q_BTHE, k_BSKE, v_BSKE = (x.astype(jnp.float32) for x in (request.q_BTHE, request.k_BSKE, request.v_BSKE))
    mask = dataclasses.replace(settings.mask, segment_ids=request.segment_ids_BS)
    seen_BHTS = reference.dense_mask(mask, T, S)[:, None]
    if keeps_diagonal_BKT is not None:
        drops_diagonal_BHT = jnp.repeat(jnp.logical_not(keeps_diagonal_BKT), H // K, axis=1)
        seen_BHTS &= ~(drops_diagonal_BHT[..., None] & jnp.eye(T, dtype=bool))
    y_BTHE, lse_BTH = jax.nn.dot_product_attention(
        q_BTHE, k_BSKE, v_BSKE, mask=seen_BHTS, scale=settings.scale, implementation="xla", return_residual=True
    )
    lse_BHT = lse_BTH.swapaxes(1, 2)
    if keeps_diagonal_BKT is None:
        return y_BTHE, lse_BHT
    diagonal_BTKG = jnp.sum(reference.group(q_BTHE, K) * k_BSKE[:, :, :, None], axis=-1) * settings.scale
    diagonal_BHT = diagonal_BTKG.reshape(lse_BTH.shape).swapaxes(1, 2)
    return compose.add_zero_value_key(y_BTHE, lse_BHT, jnp.where(drops_diagonal_BHT, diagonal_BHT, -jnp.inf))


BACKEND = frame.Backend(functools.partial(compose.forward, _attend), blockwise.backward_main, splits_by_itself=True)
