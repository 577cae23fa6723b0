"""NVIDIA's cuDNN flash attention as jax ships it, forward and backward, with the projection behind it.

As with `xsa_kernels.splash`, y is rounded before it is projected. `jax.nn.dot_product_attention` would keep y and round the
log-sum-exp to the dtype of q, so this goes one level below it, to functions that jax does not promise to keep: a test compares the
program with that of `jax.nn`.
"""

import functools

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from xsa_kernels import compose, fused
from xsa_kernels.fused import Call


def attention(*call):
    """`xsa_kernels.attention`'s "cudnn". `api.check` has refused what it cannot honour."""
    return fused.attention(BACKEND, *call)


def _options(call: Call) -> dict:
    return {
        "scale": call.scale,
        "mask_type": stablehlo.MaskType.CAUSAL if call.causal else stablehlo.MaskType.NO_MASK,
        "sliding_window_length": call.window,
    }


def _attend(call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT):
    try:
        return stablehlo.dot_product_attention(q_BTHE, k_BSKE, v_BSKE, **_options(call), return_residual=True)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"impl: found 'cudnn', which refuses: {error}. Expected 'xla', or a machine that has it") from error


def _backward(y_BTHE, call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, dv_BTKE):
    """jax has no function for this, only a primitive. It makes delta by itself, from y and dy."""
    none = jnp.zeros(0, q_BTHE.dtype)
    lengths = offsets = pages = (none, none)
    options = _options(call) | {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "layout": _BTNH}
    if jax.__version_info__ >= (0, 12):
        options["score_mod"] = None
    dq, dk, dv = stablehlo._dot_product_attention_bwd_p_wrapper.bind(
        q_BTHE, k_BSKE, v_BSKE, none, *lengths, *offsets, *pages, lse_BHT, y_BTHE, dy_BTHE, **options
    )
    return dq, dk, dv if dv_BTKE is None else (dv_BTKE + dv).astype(dv.dtype)


_BTNH = stablehlo.AttentionLayout.BTNH.value
BACKEND = fused.Backend(
    functools.partial(compose.forward, _attend), _backward, splits_by_itself=True, keeps_diagonal=True, needs_y=True
)
