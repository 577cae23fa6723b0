"""The frame that every implementation of ours shares: what is saved, the row-local half of the backward pass, and the mesh.

A backend brings two functions. Its forward kernel ends each query row with the projection and saves, beside z and the
log-sum-exp, one number c = (y . v) / n2 per row instead of y, because y = z + alpha c v. The backward pass then has two steps:
`_rows` below, which turns dz into dy and needs no other token, and the backend's main loop, which is FlashAttention's with dy in
place of dz. A backend may bring both in one.

The projection removes whatever multiple of v_i is in y_i, so the weight of token i on itself need not enter y_i at all.
`Call.drop_diagonal` says that the kernels use this: they leave p_ii v_i out of y_i (the softmax still counts it) and, in the
backward pass, p_ii out of dv and dP_ii out of dS. What is left out is exactly what makes z a small difference of large numbers
where p_ii is near 1, so that the rounding error of every result is the same at every p_ii. Rows whose |v|^2 is below the zero
rule's limit are not fully projected and keep their diagonal.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from xsa_kernels.reference import group
from xsa_kernels.spec import MaskSpec, Projection

BATCH_AXES = ("data", "fsdp")
HEAD_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Call:
    """The part of a call that is known when it is traced. `zero_rule` is None without a projection."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    zero_rule: Literal["clamp", "add", "exact"] | None
    eps: float
    drop_diagonal: bool

    @property
    def mask(self) -> MaskSpec:
        """The mask without segments."""
        return MaskSpec(self.causal, self.window)

    def inverse(self, n2: jax.Array) -> jax.Array:
        """1 / n2 by the zero rule, from |v|^2 in float32."""
        if self.zero_rule == "add":
            return 1 / (n2 + self.eps)
        if self.zero_rule == "clamp":
            return 1 / jnp.maximum(n2, self.eps)
        live = self.exact(n2)
        return jnp.where(live, 1 / jnp.where(live, n2, 1), 0)

    def exact(self, n2: jax.Array) -> jax.Array:
        """Whether `inverse` is 1 / |v|^2, so that z . v = 0."""
        if self.zero_rule == "add":
            return jnp.zeros_like(n2, bool)
        return n2 >= (self.eps if self.zero_rule == "clamp" else jnp.finfo(jnp.float32).tiny)


class Backend(NamedTuple):
    """One implementation. Hashable, and the same object for the same settings, so that jax compiles it once.

    forward(call, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H) -> z_BTHE, lse_BHT, c_BHT:
      own_BTKE are the values to project on, None without a projection, and c_BHT is then None too. segment_ids [B, S], sinks_H and
      alpha_H (None means 1) may be None. lse (sinks included) and c = (y . own) / n2 are float32, or float64 for float64; with
      `call.drop_diagonal` y is without the diagonal, except in rows where `call.exact` says that n2 is not |v|^2.

    backward_main(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, dv_BTKE) -> dq, dk, dv:
      dy is in the dtype of q and delta = rowsum(y * dy). kept_BKT (bool) marks the rows that keep their diagonal; None: all do.
      dv_BTKE (in the dtype of lse) is what dv starts from, with T = S; None: zero.

    backward(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, z_BTHE, lse_BHT, c_BHT, dz_BTHE) -> dq, dk, dv, delta_BHT: both steps in
      one, for own values that are v and alpha 1, or no projection. It returns None for calls that it leaves to `_rows` and
      backward_main.

    splits_by_itself: XLA can split it over a mesh, as it can anything but a kernel.

    keeps_diagonal: its forward pass cannot leave the diagonal out of y, so no call asks it to.

    needs_y: its backward_main takes y_BTHE, in the dtype of q, before all other arguments.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]
    backward_main: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None] | None = None
    splits_by_itself: bool = False
    keeps_diagonal: bool = False
    needs_y: bool = False


def attention(
    backend: Backend,
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
    """`api.attention` by one backend; kernels run under `jax.set_mesh` by every device for its rows of the batch and its heads.

    Pass `v_BSKE` itself (or None) as `v_self_BTKE` where the queries are all the tokens. Other own values may point anywhere,
    so then the diagonal stays.
    """
    if xsa is None or v_self_BTKE is v_BSKE:
        v_self_BTKE = None
    alpha = None if xsa is None or (isinstance(xsa.alpha, float | int) and xsa.alpha == 1) else xsa.alpha
    call = Call(
        mask.causal,
        mask.window,
        softcap,
        scale,
        None if xsa is None else xsa.zero_rule,
        0.0 if xsa is None else xsa.eps,
        drop_diagonal=not backend.keeps_diagonal
        and xsa is not None
        and alpha is None
        and xsa.zero_rule != "add"
        and v_self_BTKE is None,
    )
    alpha_H = None if alpha is None else jnp.broadcast_to(jnp.asarray(alpha, _wide(q_BTHE)), (q_BTHE.shape[2],))
    attend = functools.partial(_attention, backend, call)
    attend = attend if backend.splits_by_itself else on_mesh(attend)
    return attend(q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, mask.segment_ids, sinks_H, alpha_H)


@jax.custom_jvp
def _first_order(arrays):
    """The same arrays. Neither pass has derivatives of its own; what XLA would make of some backends' are wrong ones."""
    return arrays


@_first_order.defjvp
def _second_order(primals, tangents):
    raise NotImplementedError(
        "xsa_kernels.attention: found a derivative of its gradient, expected first ones; impl='reference' has more"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(backend, call, q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, segment_ids, sinks_H, alpha_H):
    return _forward(backend, call, q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, segment_ids, sinks_H, alpha_H)[0]


def _forward(backend, call, q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, segment_ids, sinks_H, alpha_H):
    differentiable = (q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, sinks_H, alpha_H)
    q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, sinks_H, alpha_H = _first_order(differentiable)
    own_BTKE = v_BSKE if v_self_BTKE is None else v_self_BTKE
    own_BTKE = None if call.zero_rule is None else own_BTKE
    z_BTHE, lse_BHT, c_BHT = backend.forward(call, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H)
    z_BTHE = checkpoint_name(z_BTHE, "attention_out")
    lse_BHT = checkpoint_name(lse_BHT, "attention_lse")
    c_BHT = None if c_BHT is None else checkpoint_name(c_BHT, "attention_c")
    return z_BTHE, (q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, segment_ids, sinks_H, alpha_H, z_BTHE, lse_BHT, c_BHT)


def _backward(backend, call, residuals, dz_BTHE):
    q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, segment_ids, sinks_H, alpha_H, z_BTHE, lse_BHT, c_BHT = residuals
    dz_BTHE = _first_order(dz_BTHE)
    if backend.backward is not None and v_self_BTKE is None and alpha_H is None:
        dz_BTHE = dz_BTHE.astype(q_BTHE.dtype)
        gradients = backend.backward(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, z_BTHE, lse_BHT, c_BHT, dz_BTHE)
        if gradients is not None:
            dq, dk, dv, delta_BHT = gradients
            return dq, dk, dv, None, None, _dsinks(sinks_H, lse_BHT, delta_BHT), None
    dv_self_BTKE = dalpha_H = kept_BKT = None
    if call.zero_rule is None:
        dy_BTHE = dz_BTHE.astype(q_BTHE.dtype)
        delta_BHT = jnp.einsum("BTHE,BTHE->BHT", z_BTHE, dy_BTHE, preferred_element_type=_wide(z_BTHE))
    else:
        own_BTKE = v_BSKE if v_self_BTKE is None else v_self_BTKE
        dy_BTHE, delta_BHT, dv_self_BTKE, dalpha_H, kept_BKT = _rows(call, z_BTHE, c_BHT, own_BTKE, alpha_H, dz_BTHE)
        dv_self_BTKE = dv_self_BTKE if v_self_BTKE is None else dv_self_BTKE.astype(v_self_BTKE.dtype)
    start_BTKE = dv_self_BTKE if v_self_BTKE is None else None
    main = backend.backward_main
    if backend.needs_y:
        y_BTHE = z_BTHE if call.zero_rule is None else _output(z_BTHE, c_BHT, own_BTKE, alpha_H).reshape(z_BTHE.shape)
        main = functools.partial(main, y_BTHE.astype(z_BTHE.dtype))
    dq, dk, dv = main(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, start_BTKE)
    if v_self_BTKE is None:
        dv_self_BTKE = None  # it is in dv
    return dq, dk, dv, dv_self_BTKE, None, _dsinks(sinks_H, lse_BHT, delta_BHT), dalpha_H


_attention.defvjp(_forward, _backward)


def _dsinks(sinks_H, lse_BHT, delta_BHT):
    if sinks_H is None:
        return None
    p_sink_BHT = jnp.exp(sinks_H.astype(lse_BHT.dtype)[:, None] - lse_BHT)
    return -jnp.sum(p_sink_BHT * delta_BHT, axis=(0, 2)).astype(sinks_H.dtype)


def _rows(call, z_BTHE, c_BHT, own_BTKE, alpha_H, dz_BTHE):
    """The backward pass of the projection, each row by itself: dy, delta, dv_self, dalpha, and which rows keep their diagonal.

    With b = 1 / n2, r = dz . v and c = b (y . v):  dy = dz - alpha b r v, delta = y . dy, dalpha = -c r, and dv_self = alpha (2
    (live - alpha) b c r v - c dy - b r z), where `live` is 1 if n2 depends on v. At alpha = 1 and n2 = |v|^2 that is -(c dy + b r
    z).
    """
    K = own_BTKE.shape[2]
    wide = _wide(z_BTHE)
    z, dz = group(z_BTHE, K).astype(wide), group(dz_BTHE, K).astype(wide)
    v = own_BTKE.astype(wide)[:, :, :, None]
    c = _columns(c_BHT, K)
    alpha = 1.0 if alpha_H is None else alpha_H.reshape(K, -1, 1)

    n2 = jnp.sum(v * v, axis=-1, keepdims=True)
    b, exact = call.inverse(n2), call.exact(n2)
    live = 1.0 if call.zero_rule == "add" else exact.astype(wide)
    r = jnp.sum(dz * v, axis=-1, keepdims=True)
    # The kernels see dy in the dtype of q. delta must come from those same numbers, or their errors no longer cancel in dP - delta;
    # `reduce_precision`, unlike a cast to and fro, is never optimised away.
    narrow = jnp.finfo(z_BTHE.dtype)
    dy = dz - alpha * b * r * v
    dy_narrow = lax.reduce_precision(dy, narrow.nexp, narrow.nmant)
    delta = jnp.sum(_output(z_BTHE, c_BHT, own_BTKE, alpha_H) * dy_narrow, axis=-1)
    dv_self = alpha * (2 * (live - alpha) * b * c * r * v - c * dy - b * r * z)

    dalpha_H = None if alpha_H is None else -jnp.sum(c * r, axis=(0, 1)).reshape(-1)
    kept_BKT = jnp.logical_not(exact[..., 0, 0]).swapaxes(1, 2) if call.drop_diagonal else None
    dy_BTHE = dy_narrow.astype(z_BTHE.dtype).reshape(z_BTHE.shape)
    delta_BHT = jnp.moveaxis(delta, 1, -1).reshape(c_BHT.shape)
    return dy_BTHE, delta_BHT, jnp.sum(dv_self, axis=3), dalpha_H, kept_BKT


def _output(z_BTHE, c_BHT, own_BTKE, alpha_H):
    """y = z + alpha c v, [B, T, K, G, E] in float32 or better."""
    K = own_BTKE.shape[2]
    alpha = 1.0 if alpha_H is None else alpha_H.reshape(K, -1, 1)
    return group(z_BTHE, K) + alpha * _columns(c_BHT, K) * own_BTKE[:, :, :, None].astype(c_BHT.dtype)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _columns(x_BHT: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, H, T] -> [B, T, K, G, 1]."""
    B, H, T = x_BHT.shape
    return jnp.moveaxis(x_BHT.reshape(B, num_kv_heads, H // num_kv_heads, T), -1, 1)[..., None]


def on_mesh(attend):
    """`attend` run by each device of the ambient mesh on its own batch rows and heads: XLA cannot split a kernel by itself.

    Raises:
      ValueError: when the heads do not divide over the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    if not free:
        return attend

    def call(q, k, v, v_self, segment_ids, sinks, alpha):
        (B, _, H, _), K = q.shape, k.shape[2]
        batch = tuple(name for name in BATCH_AXES if name in free)
        batch = batch if B % math.prod(free[name] for name in batch) == 0 else ()
        shards = free.get(HEAD_AXIS, 1)
        if H % shards or (K % shards and shards % K):
            raise ValueError(
                f"q_BTHE: found {H} heads over {K} KV heads, expected both to divide over {shards} '{HEAD_AXIS}' shards"
            )
        heads = HEAD_AXIS if HEAD_AXIS in free else None
        shared = K % shards != 0

        def local(q, k, v, v_self, *rest):
            if shared:  # fewer KV heads than shards: a shard's query heads all read one of them
                head = lax.axis_index(HEAD_AXIS) * K // shards
                k, v, v_self = (None if x is None else lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k, v, v_self))
            return attend(q, k, v, v_self, *rest)

        spec_q = PartitionSpec(batch, None, heads)
        spec_k = PartitionSpec(batch, None, None if shared else heads)
        specs = (spec_q, spec_k, spec_k, spec_k, PartitionSpec(batch), PartitionSpec(heads), PartitionSpec(heads))
        sharded = jax.shard_map(local, in_specs=specs, out_specs=spec_q, axis_names=set(free), check_vma=False)
        return sharded(q, k, v, v_self, segment_ids, sinks, alpha)

    return call
