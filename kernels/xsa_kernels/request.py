"""One call of attention, as the public function hands it to an implementation."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from xsa_kernels.spec import MaskSpec, Projection


@dataclasses.dataclass(frozen=True)
class Settings:
    """The part of a request that is known when the program is traced.

    Attributes:
      causal, window: the positions that a query sees, as in `MaskSpec`.
      softcap, scale: as in `api.attention`; a softcap of None is none.
      zero_rule: how 1 / |v|^2 avoids a division by zero, as in `Projection`; None without a projection.
      eps: see `zero_rule`.
      drop_diagonal: whether the forward pass leaves p_ii v_i out of y_i, except in rows where `exact` is False. `frame.attention`
        sets it.
    """

    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    zero_rule: Literal["clamp", "add", "exact"] | None
    eps: float
    drop_diagonal: bool = False

    @property
    def mask(self) -> MaskSpec:
        """The mask without segments."""
        return MaskSpec(self.causal, self.window)

    def inverse(self, n2: jax.Array) -> jax.Array:
        """1 / n2 by the zero rule, where the argument is |v|^2 in float32 or better."""
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

    def slope(self, n2: jax.Array) -> jax.Array | float:
        """The derivative by |v|^2 of what stands for it: 0 where the rule has put a constant in its place, else 1."""
        return 1.0 if self.zero_rule == "add" else self.exact(n2).astype(n2.dtype)

    @property
    def sometimes_exact(self) -> bool:
        """Whether `exact` can be true at all; false without a projection."""
        return self.zero_rule in ("clamp", "exact")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q_BTHE", "k_BSKE", "v_BSKE", "v_self_BTKE", "segment_ids_BS", "sinks_H", "alpha_H"),
    meta_fields=("settings",),
)
@dataclasses.dataclass(frozen=True)
class Request:
    """One call of attention whose arguments were checked.

    Attributes:
      q_BTHE, k_BSKE, v_BSKE: queries, keys and values.
      v_self_BTKE: the query tokens' own values; None where they are `v_BSKE` itself, with T = S, or without a projection.
      segment_ids_BS: int32; None where every row is one document.
      sinks_H: one logit per query head; None without sinks.
      alpha_H: how much of the component along v is removed, per query head, in float32 or better; None is 1 for all heads, or no
        projection.
      settings: what is known when the program is traced.
    """

    q_BTHE: jax.Array
    k_BSKE: jax.Array
    v_BSKE: jax.Array
    v_self_BTKE: jax.Array | None
    segment_ids_BS: jax.Array | None
    sinks_H: jax.Array | None
    alpha_H: jax.Array | None
    settings: Settings

    @property
    def projected_v_BTKE(self) -> jax.Array | None:
        """The values whose direction the projection removes from y; None without a projection."""
        if self.settings.zero_rule is None:
            return None
        return self.v_BSKE if self.v_self_BTKE is None else self.v_self_BTKE


def make_request(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    *,
    mask: MaskSpec,
    xsa: Projection | None,
    scale: float,
    sinks_H: jax.Array | None = None,
    softcap: float | None = None,
    v_self_BTKE: jax.Array | None = None,
) -> Request:
    """A request from the arguments of `api.attention`, checked, with `window`, `softcap` and `scale` as Python numbers."""
    settings = Settings(
        causal=mask.causal,
        window=mask.window,
        softcap=softcap,
        scale=scale,
        zero_rule=None if xsa is None else xsa.zero_rule,
        eps=0.0 if xsa is None else xsa.eps,
    )
    alpha_H = None
    if xsa is None or v_self_BTKE is v_BSKE:
        v_self_BTKE = None
    if xsa is not None and not (isinstance(xsa.alpha, float | int) and xsa.alpha == 1):
        wide = jnp.promote_types(q_BTHE.dtype, jnp.float32)
        alpha_H = jnp.broadcast_to(jnp.asarray(xsa.alpha, wide), (q_BTHE.shape[2],))
    return Request(q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, mask.segment_ids, sinks_H, alpha_H, settings)
