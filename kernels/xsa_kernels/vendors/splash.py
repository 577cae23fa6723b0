"""The attention that ships with jax for TPUs, splash, with the projection behind it.

The projection sees y already rounded, which costs accuracy where tokens attend mostly to themselves; README.md has the numbers.
"""

import dataclasses
import functools
import math

import jax
from jax.experimental.pallas.ops.tpu import splash_attention

from xsa_kernels import compose, device, frame, tpu
from xsa_kernels.request import Request, Settings
from xsa_kernels.spec import Sharding


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """`xsa_kernels.attention` with impl="splash": its forward pass, and the backward pass of "tpu"; on a CPU both interpreted."""
    interpret = device.platform(request) == "cpu"
    return frame.attention(_backend(interpret), request, sharding)


@functools.cache
def _backend(interpret: bool) -> frame.Backend:
    forward = functools.partial(compose.forward, functools.partial(_attend, interpret))
    return dataclasses.replace(tpu.backend(interpret=interpret), forward=forward, keeps_diagonal=True)


def _attend(interpret: bool, request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `compose.Attend`."""
    settings, segment_ids_BS = request.settings, request.segment_ids_BS
    T, S = request.q_BTHE.shape[1], request.k_BSKE.shape[1]
    block = math.gcd(T, S, 512)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([_mask(settings, T, S)] * request.q_BTHE.shape[2]),
        block_sizes=splash_attention.BlockSizes(block, block, block),
        attn_logits_soft_cap=settings.softcap,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )
    ids = None if segment_ids_BS is None else splash_attention.SegmentIds(segment_ids_BS[:, S - T :], segment_ids_BS)
    heads_first = (x.swapaxes(1, 2) for x in (request.q_BTHE * settings.scale, request.k_BSKE, request.v_BSKE))
    y_BHTE, (lse_BHT,) = jax.vmap(kernel)(*heads_first, ids)
    return y_BHTE.swapaxes(1, 2), lse_BHT


def _mask(settings: Settings, T: int, S: int) -> splash_attention.Mask:
    if settings.window is not None:
        left, right = settings.window - 1, 0 if settings.causal else settings.window - 1
        return splash_attention.LocalMask((T, S), (left, right), S - T)
    if settings.causal:
        return splash_attention.CausalMask((T, S), S - T)
    return splash_attention.FullMask((T, S))
