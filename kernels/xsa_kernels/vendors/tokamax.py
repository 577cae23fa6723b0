"""The attention of the package tokamax, where that is installed, with the projection behind it and the backward pass of this one.

It takes tokamax's Mosaic kernel on a TPU and from Hopper chips on, its Triton kernel on older GPUs, and its XLA form on a CPU. As
with `splash`, the projection sees y already rounded. `tokamax.dot_product_attention` returns no log-sum-exp, so this goes one
level below it, to what tokamax does not promise to keep: it was written for version 0.0.12.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xsa_kernels import compose, frame
from xsa_kernels import device as devices
from xsa_kernels.request import Request, Settings
from xsa_kernels.spec import Sharding
from xsa_kernels.xla import blockwise


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """`xsa_kernels.attention` with impl="tokamax"; the registry has refused what it cannot honour.

    Raises:
      ValueError: where tokamax has nothing for this device and these arrays.
    """
    platform = devices.platform(request)
    return frame.attention(_backend(platform), request, sharding)


@functools.cache
def _backend(platform: str) -> frame.Backend:
    forward = functools.partial(compose.forward, functools.partial(_attend, platform))
    if platform == "tpu":
        from xsa_kernels import tpu

        return dataclasses.replace(tpu.backend(), forward=forward, keeps_diagonal=True)
    if platform == "gpu":
        from xsa_kernels.gpu import triton

        return dataclasses.replace(triton.backend(), forward=forward, keeps_diagonal=True)
    return frame.Backend(forward, blockwise.backward_main, keeps_diagonal=True)


def _attend(platform: str, request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `compose.Attend`."""
    from tokamax._src.ops.attention import api, base

    names = {"tpu": ("mosaic_tpu",), "gpu": ("mosaic_gpu", "triton")}.get(platform, ("xla",))
    refusals = []
    for name in names:
        try:
            y_BTHE, (m_BHT, sum_BHT) = api.IMPLEMENTATIONS[name](
                request.q_BTHE,
                request.k_BSKE,
                request.v_BSKE,
                mask=_mask(base.Mask, request.settings, request.q_BTHE.shape[1], request.k_BSKE.shape[1]),
                logits_scale=request.settings.scale,
                logits_soft_cap=request.settings.softcap,
                return_residuals=True,
            )
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
        else:
            # For TPUs the second number is the log-sum-exp itself.
            return y_BTHE, sum_BHT if platform == "tpu" else m_BHT + jnp.log(sum_BHT)
    raise ValueError(f"impl: found 'tokamax', which refuses ({'; '.join(refusals)}), expected 'xla'")


def _mask(mask_type: Any, settings: Settings, T: int, S: int) -> Any:
    """The half-open range [start, end) of visible keys per query."""
    position = jnp.arange(T) + S - T
    start = None if settings.window is None else jnp.maximum(position - settings.window + 1, 0)
    end = None if settings.window is None else jnp.minimum(position + settings.window, S)
    if settings.causal and T == S:
        return mask_type(k_start=start, is_causal=True)
    return mask_type(k_start=start, k_end=position + 1 if settings.causal else end)
