"""NVIDIA's cuDNN flash attention as jax ships it, forward and backward, with the projection behind it.

As with `splash`, the projection sees y already rounded. `jax.nn.dot_product_attention` would keep y and round the log-sum-exp to
the dtype of q, so this goes one level below it, to functions that jax does not promise to keep: a test compares the program with
that of `jax.nn`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from xsa_kernels import compose, frame
from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.request import Request, Settings
from xsa_kernels.rows import output
from xsa_kernels.spec import Sharding


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """`xsa_kernels.attention` with impl="cudnn"; the registry has refused what it cannot honour."""
    return frame.attention(BACKEND, request, sharding)


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "scale": settings.scale,
        "mask_type": stablehlo.MaskType.CAUSAL if settings.causal else stablehlo.MaskType.NO_MASK,
        "sliding_window_length": settings.window,
    }


def _attend(request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `compose.Attend`."""
    try:
        return stablehlo.dot_product_attention(
            request.q_BTHE, request.k_BSKE, request.v_BSKE, **_options(request.settings), return_residual=True
        )
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"impl: found 'cudnn', which refuses: {error}. Expected 'xla', or a machine that has it") from error


def _backward_main(request: Request, outputs: Outputs, rows: RowGradients) -> Gradients:
    """jax has no function for this, only a primitive. It computes delta by itself, from y and dy."""
    q_BTHE, dv_start_BTKE = request.q_BTHE, rows.dv_start_BTKE
    none = jnp.zeros(0, q_BTHE.dtype)
    lengths = offsets = pages = (none, none)
    options = _options(request.settings)
    options |= {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "layout": _BTNH}
    if jax.__version_info__ >= (0, 12):
        options["score_mod"] = None
    dq, dk, dv = stablehlo._dot_product_attention_bwd_p_wrapper.bind(
        q_BTHE,
        request.k_BSKE,
        request.v_BSKE,
        none,
        *lengths,
        *offsets,
        *pages,
        outputs.lse_BHT,
        output(request, outputs),
        rows.dy_BTHE,
        **options,
    )
    return Gradients(dq, dk, dv if dv_start_BTKE is None else (dv_start_BTKE + dv).astype(dv.dtype))


_BTNH = stablehlo.AttentionLayout.BTNH.value
BACKEND = frame.Backend(functools.partial(compose.forward, _attend), _backward_main, splits_by_itself=True, keeps_diagonal=True)
