"""The attention of the package tokamax, where that is installed, with the projection behind it and the backward pass of this one.

It takes tokamax's Mosaic kernel on a TPU and from Hopper chips on, its Triton kernel on older GPUs, and its XLA form on a CPU. As
with `splash`, y is rounded before it is projected. `tokamax.dot_product_attention` returns no log-sum-exp, so this goes one
level below it, to what tokamax does not promise to keep: it was written for version 0.0.12.
"""

import functools

import jax
import jax.numpy as jnp

from xsa_kernels import blockwise, compose, fused
from xsa_kernels.fused import Call


def attention(*call):
    """`xsa_kernels.attention`'s "tokamax". `api.check` has refused what it cannot honour.

    Raises:
      ValueError: where tokamax has nothing for this device and these arrays.
    """
    return fused.attention(_backend(jax.default_backend()), *call)


@functools.cache
def _backend(device: str) -> fused.Backend:
    forward = functools.partial(compose.forward, functools.partial(_attend, device))
    if device == "tpu":
        from xsa_kernels import tpu

        return tpu.backend()._replace(forward=forward, keeps_diagonal=True)
    if device == "gpu":
        from xsa_kernels.gpu import triton

        return triton.backend()._replace(forward=forward, keeps_diagonal=True)
    return fused.Backend(forward, blockwise.backward, keeps_diagonal=True)


def _attend(device: str, call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT):
    from tokamax._src.ops.attention import api, base

    names = {"tpu": ("mosaic_tpu",), "gpu": ("mosaic_gpu", "triton")}.get(device, ("xla",))
    refusals = []
    for name in names:
        try:
            y_BTHE, (m_BHT, sum_BHT) = api.IMPLEMENTATIONS[name](
                q_BTHE,
                k_BSKE,
                v_BSKE,
                mask=_mask(base.Mask, call, q_BTHE.shape[1], k_BSKE.shape[1]),
                logits_scale=call.scale,
                logits_soft_cap=call.softcap,
                return_residuals=True,
            )
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
        else:
            # For TPUs the second number is the log-sum-exp itself.
            return y_BTHE, sum_BHT if device == "tpu" else m_BHT + jnp.log(sum_BHT)
    raise ValueError(f"impl: found 'tokamax', which refuses ({'; '.join(refusals)}), expected 'xla'")


def _mask(mask_type, call: Call, T: int, S: int):
    """The keys that each query sees as the first of them and the one behind the last."""
    position = jnp.arange(T) + S - T
    start = None if call.window is None else jnp.maximum(position - call.window + 1, 0)
    end = None if call.window is None else jnp.minimum(position + call.window, S)
    if call.causal and T == S:
        return mask_type(k_start=start, is_causal=True)
    return mask_type(k_start=start, k_end=position + 1 if call.causal else end)
