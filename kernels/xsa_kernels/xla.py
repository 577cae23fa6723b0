"""Attention in plain XLA: a short forward pass by `jax.nn.dot_product_attention`, a long one block by block, and so backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from xsa_kernels import blockwise, compose, fused, reference
from xsa_kernels.fused import Call


def attention(*call):
    """`xsa_kernels.attention`'s "xla"."""
    return fused.attention(BACKEND, *call)


def _attend(call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT):
    short = max(q_BTHE.shape[1], k_BSKE.shape[1]) <= blockwise.BLOCK
    # jax's function has no soft-cap, and computes in float32 at most.
    if short and call.softcap is None and q_BTHE.dtype != jnp.float64:
        return _dense(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT)
    return blockwise.average(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT)


def _dense(call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT):
    """Given float32, jax's function returns y and the log-sum-exp in float32 too: neither is rounded before the projection."""
    (_, T, H, _), (_, S, K, _) = q_BTHE.shape, k_BSKE.shape
    q_BTHE, k_BSKE, v_BSKE = (x.astype(jnp.float32) for x in (q_BTHE, k_BSKE, v_BSKE))
    seen_BHTS = reference.dense_mask(dataclasses.replace(call.mask, segment_ids=segment_ids), T, S)[:, None]
    if kept_BKT is not None:
        dropped_BHT = jnp.repeat(jnp.logical_not(kept_BKT), H // K, axis=1)
        seen_BHTS &= ~(dropped_BHT[..., None] & jnp.eye(T, dtype=bool))
    y_BTHE, lse_BTH = jax.nn.dot_product_attention(
        q_BTHE, k_BSKE, v_BSKE, mask=seen_BHTS, scale=call.scale, implementation="xla", return_residual=True
    )
    lse_BHT = lse_BTH.swapaxes(1, 2)
    if kept_BKT is None:
        return y_BTHE, lse_BHT
    own_BTKG = jnp.sum(reference.group(q_BTHE, K) * k_BSKE[:, :, :, None], axis=-1) * call.scale
    own_BHT = own_BTKG.reshape(lse_BTH.shape).swapaxes(1, 2)
    return compose.also(y_BTHE, lse_BHT, jnp.where(dropped_BHT, own_BHT, -jnp.inf))


BACKEND = fused.Backend(functools.partial(compose.forward, _attend), blockwise.backward, splits_by_itself=True)
