"""The frame that every backend runs in: what is saved between the passes, and the two halves of the backward pass.

A backend brings the functions that `backend.Backend` describes. Its forward pass ends each query row with the projection and
returns, beside z and the log-sum-exp, one number c = (y . v) / n2 per row instead of y, because y = z + alpha c v. The backward
pass then has two halves: `rows.row_gradients`, which turns dz into dy and needs no other token, and the backend's main loop, which
is FlashAttention's with dy in place of dz. A backend may bring both halves in one kernel.

The projection removes whatever multiple of v_i is in y_i, so the weight of token i on itself need not enter y_i at all.
`Settings.drop_diagonal` says that a backend uses this: it leaves p_ii v_i out of y_i (the softmax still counts it) and, in the
backward pass, p_ii out of dv and dP_ii out of dS. What is left out is exactly what makes z a small difference of large numbers
where p_ii is near 1, so that the rounding error of every result is the same at every p_ii. Rows whose |v|^2 is below the zero
rule's limit are not fully projected and keep their diagonal.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from xsa_kernels import mesh, rows
from xsa_kernels.backend import Backend, BackwardMain, Forward, FusedBackward, Gradients, Outputs, RowGradients
from xsa_kernels.request import Request
from xsa_kernels.spec import Sharding

__all__ = ["Backend", "BackwardMain", "Forward", "FusedBackward", "Gradients", "Outputs", "RowGradients", "attention"]


def attention(backend: Backend, request: Request, sharding: Sharding | None) -> jax.Array:
    """z_BTHE by one backend. Under a mesh every device runs a kernel on its own rows of the batch and its own heads."""
    settings = dataclasses.replace(request.settings, drop_diagonal=_drops_diagonal(backend, request))
    request = dataclasses.replace(request, settings=settings)
    attend = functools.partial(_attention, backend)
    if backend.splits_by_itself:
        return attend(request)
    return mesh.on_mesh(attend, request, sharding)


def _drops_diagonal(backend: Backend, request: Request) -> bool:
    """Whether the backend leaves p_ii v_i out of y_i: it can, and the projection would remove all of p_ii v_i.

    Own values that are not `v_BSKE` may point anywhere, and a zero rule that is never exact never projects fully.
    """
    fully_projected = request.settings.sometimes_exact and request.alpha_H is None
    return fully_projected and request.v_self_BTKE is None and not backend.keeps_diagonal


@jax.custom_jvp
def _first_order(arrays: Any) -> Any:
    """The same arrays. Neither pass has derivatives of its own; those that XLA would make of some backends are wrong."""
    return arrays


@_first_order.defjvp
def _second_order(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "xsa_kernels.attention: found a derivative of its gradient, expected first ones; impl='reference' has more"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(backend: Backend, request: Request) -> jax.Array:
    return _forward(backend, request)[0]


def _forward(backend: Backend, request: Request) -> tuple[jax.Array, tuple[Request, Outputs]]:
    request = _first_order(request)
    z_BTHE, lse_BHT, c_BHT = backend.forward(request)
    outputs = Outputs(
        checkpoint_name(z_BTHE, "attention_out"),
        checkpoint_name(lse_BHT, "attention_lse"),
        None if c_BHT is None else checkpoint_name(c_BHT, "attention_c"),
    )
    return outputs.z_BTHE, (request, outputs)


def _backward(backend: Backend, residuals: tuple[Request, Outputs], dz_BTHE: jax.Array) -> tuple[Request]:
    """A request that holds cotangents in place of the arrays; None is zero."""
    request, outputs = residuals
    dz_BTHE = _first_order(dz_BTHE)
    fused = dv_self_BTKE = dalpha_H = None
    if backend.fused_backward is not None and request.v_self_BTKE is None and request.alpha_H is None:
        fused = backend.fused_backward(request, outputs, dz_BTHE.astype(request.q_BTHE.dtype))
    if fused is not None:
        gradients, delta_BHT = fused
    else:
        of_rows, dv_self_BTKE, dalpha_H = rows.row_gradients(request, outputs, dz_BTHE)
        gradients, delta_BHT = backend.backward_main(request, outputs, of_rows), of_rows.delta_BHT
    cotangents = dataclasses.replace(
        request,
        q_BTHE=gradients.dq_BTHE,
        k_BSKE=gradients.dk_BSKE,
        v_BSKE=gradients.dv_BSKE,
        v_self_BTKE=dv_self_BTKE,
        segment_ids_BS=None,
        sinks_H=rows.dsinks(request, outputs, delta_BHT),
        alpha_H=dalpha_H,
    )
    return (cotangents,)


_attention.defvjp(_forward, _backward)
