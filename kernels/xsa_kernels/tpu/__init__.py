"""Fused XSA attention for TPUs, written in Pallas (Mosaic), forward and backward."""

import functools
from typing import Any

import jax

from xsa_kernels import device, frame
from xsa_kernels.backend import Backend
from xsa_kernels.request import Request
from xsa_kernels.spec import Sharding
from xsa_kernels.tpu import backward, forward
from xsa_kernels.tpu.schedule import Blocks

__all__ = ["Blocks", "attention", "backend"]


@functools.cache
def backend(forward_blocks: Blocks | None = None, backward_blocks: Blocks | None = None, interpret: Any = False) -> Backend:
    """The kernels as a backend of `frame.attention`.

    Args:
      forward_blocks: block sizes of the forward kernel; None takes those of `schedule.forward_blocks`.
      backward_blocks: block sizes of the backward kernel; None takes those of `schedule.backward_blocks`.
      interpret: as for `pallas_call`: False compiles, True or `pltpu.InterpretParams(...)` runs on a CPU.
    """
    return Backend(
        forward=functools.partial(forward.forward, blocks=forward_blocks, interpret=interpret),
        backward_main=functools.partial(backward.backward_main, blocks=backward_blocks, interpret=interpret),
        fused_backward=functools.partial(backward.fused_backward, blocks=backward_blocks, interpret=interpret),
    )


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """The implementation "tpu". Programs for a CPU interpret the kernels, which is right and slow."""
    interpret = device.platform(request) == "cpu"
    return frame.attention(backend(interpret=interpret), request, sharding)
