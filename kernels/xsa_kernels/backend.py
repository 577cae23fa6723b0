"""The contract between the frame and a backend: what a backend is given, and what it returns."""

import dataclasses
from typing import NamedTuple, Protocol

import jax

from xsa_kernels.request import Request


class Outputs(NamedTuple):
    """What a forward pass returns, and what the backward pass keeps of it.

    Attributes:
      z_BTHE: the result, in the dtype of q.
      lse_BHT: log-sum-exp of the scores, sinks included, in float32 (float64 for float64).
      c_BHT: (y . v) / n2 in the dtype of lse; None without a projection. With `settings.drop_diagonal` y is without p_ii v_i,
        except in rows where `settings.exact` says that n2 is not |v|^2.
    """

    z_BTHE: jax.Array
    lse_BHT: jax.Array
    c_BHT: jax.Array | None


class RowGradients(NamedTuple):
    """What the main loop of the backward pass needs to know of each query row; `rows.row_gradients` computes it.

    Attributes:
      dy_BTHE: cotangent of y, in the dtype of q.
      delta_BHT: rowsum(y * dy).
      keeps_diagonal_BKT: bool, marks the rows that keep their diagonal; None: all do.
      dv_start_BTKE: what dv starts from, in the dtype of lse, with T = S; None: zero.
    """

    dy_BTHE: jax.Array
    delta_BHT: jax.Array
    keeps_diagonal_BKT: jax.Array | None
    dv_start_BTKE: jax.Array | None


class Gradients(NamedTuple):
    """Cotangents of queries, keys and values, in the dtype of q."""

    dq_BTHE: jax.Array
    dk_BSKE: jax.Array
    dv_BSKE: jax.Array


class Forward(Protocol):
    """Attention, then the projection of each query row if there is one."""

    def __call__(self, request: Request) -> Outputs: ...


class BackwardMain(Protocol):
    """FlashAttention's backward pass, with the row gradients in place of those of z.

    `outputs` are those of the forward pass. A library that computes delta by itself finds y by `rows.output(request, outputs)`.
    """

    def __call__(self, request: Request, outputs: Outputs, rows: RowGradients) -> Gradients: ...


class FusedBackward(Protocol):
    """Both halves of the backward pass in one kernel, where `v_self_BTKE` and `alpha_H` are None.

    Returns the gradients and delta_BHT, or None for requests that it leaves to the two halves. `dz_BTHE` is in the dtype of q.
    """

    def __call__(self, request: Request, outputs: Outputs, dz_BTHE: jax.Array) -> tuple[Gradients, jax.Array] | None: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention. It is the same object for the same options, so that jax compiles a program once.

    Attributes:
      forward, backward_main, fused_backward: the passes; see the protocols.
      splits_by_itself: whether XLA can divide it over a mesh, as it can anything but a kernel.
      keeps_diagonal: whether its forward pass cannot leave p_ii v_i out of y_i, so that no request asks it to.
    """

    forward: Forward
    backward_main: BackwardMain
    fused_backward: FusedBackward | None = None
    splits_by_itself: bool = False
    keeps_diagonal: bool = False
