"""One call of attention, as the public function hands it to an implementation."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from xsa_kernels.spec import MaskSpec


@dataclasses.dataclass(frozen=True)
class Settings:
    """The part of a request that is known when the program is traced.

    Attributes:
      causal, window: positions that a query sees, as in `MaskSpec`.
      softcap, scale: as in `api.attention`; None turns the soft-cap off.
      zero_rule: how 1 / |v|^2 is made, as in `Projection`; None where there is no projection.
      eps: see `zero_rule`.
      drop_diagonal: the forward pass leaves p_ii v_i out of y_i, except in rows where `exact` is False; see `frame`.
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q_BTHE", "k_BSKE", "v_BSKE", "v_self_BTKE", "segment_ids_BS", "sinks_H", "alpha_H"),
    meta_fields=("settings",),
)
@dataclasses.dataclass(frozen=True)
class Request:
    """One call of attention whose arguments are known to be good.

    Attributes:
      q_BTHE, k_BSKE, v_BSKE: queries, keys and values.
      v_self_BTKE: the query tokens' own values; None where they are `v_BSKE` itself, with T = S, or without a projection.
      segment_ids_BS: int32; None where every row is one document.
      sinks_H: one logit per query head; None without sinks.
      alpha_H: how much is removed, per query head, in float32 or better; None is 1 everywhere (or no projection).
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
        """The values along which the projection removes; None without a projection."""
        if self.settings.zero_rule is None:
            return None
        return self.v_BSKE if self.v_self_BTKE is None else self.v_self_BTKE
