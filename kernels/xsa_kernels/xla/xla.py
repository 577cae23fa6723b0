"""Attention in plain XLA: one form for short sequences, one for long ones."""

import functools

import jax

from xsa_kernels import compose, frame
from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.request import Request
from xsa_kernels.spec import Sharding
from xsa_kernels.xla import blockwise, short


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """`xsa_kernels.attention` with impl="xla"."""
    return frame.attention(BACKEND, request, sharding)


def _attend(request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See `compose.Attend`."""
    return (short if short.fits(request) else blockwise).forward(request, keeps_diagonal_BKT)


def backward_main(request: Request, outputs: Outputs, rows: RowGradients) -> Gradients:
    """See `backend.BackwardMain`."""
    return (short if short.fits(request) else blockwise).backward_main(request, outputs, rows)


BACKEND = frame.Backend(functools.partial(compose.forward, _attend), backward_main, splits_by_itself=True)
