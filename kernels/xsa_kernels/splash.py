"""The attention that ships with jax for TPUs, splash, with the projection behind it.

What y was rounded to is all that the projection sees, and what costs accuracy where tokens attend mostly to themselves; README.md
has the numbers.
"""

import functools
import math

import jax
from jax.experimental.pallas.ops.tpu import splash_attention

from xsa_kernels import compose, fused, tpu
from xsa_kernels.fused import Call


def attention(*call):
    """`xsa_kernels.attention`'s "splash": its forward pass, and the backward pass of "tpu"; on a CPU both interpreted."""
    return fused.attention(_backend(interpret=tpu.interpreted()), *call)


@functools.cache
def _backend(interpret: bool) -> fused.Backend:
    forward = functools.partial(compose.forward, functools.partial(_attend, interpret))
    return tpu.backend(interpret=interpret)._replace(forward=forward, keeps_diagonal=True)


def _attend(interpret: bool, call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT):
    (_, T, H, _), S = q_BTHE.shape, k_BSKE.shape[1]
    shape, offset = (T, S), S - T
    shown: splash_attention.Mask
    if call.window is not None:
        shown = splash_attention.LocalMask(shape, (call.window - 1, 0 if call.causal else call.window - 1), offset)
    elif call.causal:
        shown = splash_attention.CausalMask(shape, offset)
    else:
        shown = splash_attention.FullMask(shape)
    b = math.gcd(T, S, 512)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([shown] * H),
        block_sizes=splash_attention.BlockSizes(b, b, b),
        attn_logits_soft_cap=call.softcap,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=interpret,
    )
    ids = None if segment_ids is None else splash_attention.SegmentIds(segment_ids[:, offset:], segment_ids)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTHE * call.scale, k_BSKE, v_BSKE))
    y_BHTE, (lse_BHT,) = jax.vmap(kernel)(*heads_first, ids)
    return y_BHTE.swapaxes(1, 2), lse_BHT
