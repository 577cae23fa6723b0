"""Attention of others with the projection behind it, in float32.

Neither cuDNN nor splash has a public backward pass that takes a given y and log-sum-exp, so each keeps its own derivative, with
its own residuals. What y was rounded to is all that the projection sees, and what costs accuracy where tokens attend mostly to
themselves; README.md has the numbers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention

from kernels import fused, reference
from kernels.spec import MaskSpec, Projection


def cudnn(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array | None,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """NVIDIA's cuDNN flash attention as jax ships it. `api.check` has refused what it cannot honour."""
    window = None if mask.window is None else (mask.window - 1, 0)
    try:
        y_BTHE = jax.nn.dot_product_attention(
            q_BTHE, k_BSKE, v_BSKE, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
        )
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"impl: found 'cudnn', which refuses: {error}. Expected 'xla', or a machine that has it") from error
    return _project(y_BTHE, v_BSKE if v_self_BTKE is None else v_self_BTKE, xsa)


def splash(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array | None,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """The TPU flash attention that ships with jax; on a CPU, interpreted. `api.check` has refused what it cannot honour."""
    attend: Any = fused.on_mesh(lambda q, k, v, _, ids, *none: _splash(q, k, v, ids, mask, softcap, scale))
    y_BTHE = attend(q_BTHE, k_BSKE, v_BSKE, None, mask.segment_ids, None, None)
    return _project(y_BTHE, v_BSKE if v_self_BTKE is None else v_self_BTKE, xsa)


def _splash(q_BTHE, k_BSKE, v_BSKE, segment_ids, mask: MaskSpec, softcap: float | None, scale: float):
    (_, T, H, _), S = q_BTHE.shape, k_BSKE.shape[1]
    shape, offset = (T, S), S - T
    shown: splash_attention.Mask
    if mask.window is not None:
        shown = splash_attention.LocalMask(shape, (mask.window - 1, 0 if mask.causal else mask.window - 1), offset)
    elif mask.causal:
        shown = splash_attention.CausalMask(shape, offset)
    else:
        shown = splash_attention.FullMask(shape)
    b = math.gcd(T, S, 512)
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([shown] * H),
        block_sizes=splash_attention.BlockSizes(b, b, b, b, b, b, b, b),
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() == "cpu",
    )
    ids = None if segment_ids is None else splash_attention.SegmentIds(segment_ids[:, offset:], segment_ids)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTHE * scale, k_BSKE, v_BSKE))
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)


def _project(y_BTHE: jax.Array, own_BTKE: jax.Array, xsa: Projection | None) -> jax.Array:
    if xsa is None:
        return checkpoint_name(y_BTHE, "attention_out")

    # Made once more for the backward pass: stored, its float32 intermediates would be several times the size of y.
    @jax.checkpoint
    def project(y_BTHE, own_BTKE, xsa):
        y_BTKGE = reference.group(y_BTHE, own_BTKE.shape[2]).astype(jnp.float32)
        return reference.project(y_BTKGE, own_BTKE, xsa).reshape(y_BTHE.shape).astype(y_BTHE.dtype)

    return checkpoint_name(project(y_BTHE, own_BTKE, xsa), "attention_out")
