"""Fused XSA attention for TPUs, written in Pallas (Mosaic), forward and backward."""

import functools
from typing import Any

import jax

from xsa_kernels import fused
from xsa_kernels.tpu import backward, forward, tile
from xsa_kernels.tpu.schedule import Blocks

__all__ = ["Blocks", "attention", "backend", "interpreted"]


@functools.cache
def backend(forward_blocks: Blocks | None = None, backward_blocks: Blocks | None = None, interpret: Any = False) -> fused.Backend:
    """The kernels as a backend of `xsa_kernels.fused.attention`.

    Args:
      forward_blocks: block sizes; None takes those of the table in `xsa_kernels.tpu.schedule`.
      backward_blocks: the same for the backward kernel.
      interpret: for `pallas_call`: False compiles, True or `pltpu.InterpretParams(...)` runs on a CPU.
    """
    return fused.Backend(
        functools.partial(forward.forward, forward_blocks, interpret),
        functools.partial(backward.backward_main, backward_blocks, interpret),
        functools.partial(backward.backward, backward_blocks, interpret),
    )


def attention(*call: Any) -> Any:
    """`xsa_kernels.attention`'s "tpu", with the block sizes of the table."""
    return fused.attention(backend(interpret=interpreted()), *call)


def interpreted() -> bool:
    """Whether kernels are to be interpreted, which is right and slow: on a CPU, unless the mesh is of TPUs."""
    return jax.default_backend() == "cpu" and tile.generation() is None
