"""One tile of the score matrix: what a block of queries makes of a block of keys, forward and backward.

Axes beside the package's: t queries and s keys of the tile. Queries are grouped by the KV head that they read, [B, K, G, t, E].
"""

import dataclasses

import jax
import jax.numpy as jnp

from xsa_kernels.request import Request, Settings
from xsa_kernels.spec import visible


@dataclasses.dataclass(frozen=True)
class Tile:
    """Which scores of a tile count.

    Attributes:
      settings: those of the request.
      seen: which keys a query sees; broadcasts to [B, K, G, t, s]. None: all.
      dropped: where a query that drops its diagonal meets its own key; broadcasts likewise. None: nowhere.
    """

    settings: Settings
    seen: jax.Array | None
    dropped: jax.Array | None

    def scores(self, q_BKGtE: jax.Array, k_BKsE: jax.Array) -> jax.Array:
        """Scores before the mask, with the soft-cap."""
        softcap = self.settings.softcap
        s_BKGts = dot("BKGtE,BKsE->BKGts", q_BKGtE, k_BKsE) * self.settings.scale
        return s_BKGts if softcap is None else softcap * jnp.tanh(s_BKGts / softcap)

    def masked(self, x_BKGts: jax.Array, fill: float) -> jax.Array:
        """x with `fill` in place of what no query sees."""
        return x_BKGts if self.seen is None else jnp.where(self.seen, x_BKGts, fill)

    def without_diagonal(self, x_BKGts: jax.Array) -> jax.Array:
        """x with 0 where a query that drops its diagonal meets its own key."""
        return x_BKGts if self.dropped is None else jnp.where(self.dropped, 0, x_BKGts)

    def backward(
        self, q_BKGtE: jax.Array, k_BKsE: jax.Array, v_BKsE: jax.Array, dy_BKGtE: jax.Array, lse_BKGt1: jax.Array,
        delta_BKGt1: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """What the tile adds to dq [B, K, G, t, E], dk and dv [B, K, s, E], in float32 or better."""
        settings, narrow = self.settings, q_BKGtE.dtype
        s_BKGts = self.scores(q_BKGtE, k_BKsE)
        p_BKGts = self.masked(jnp.exp(s_BKGts - lse_BKGt1), 0)
        dp_BKGts = self.without_diagonal(dot("BKGtE,BKsE->BKGts", dy_BKGtE, v_BKsE))
        ds_BKGts = p_BKGts * (dp_BKGts - delta_BKGt1)
        if settings.softcap is not None:
            ds_BKGts *= 1 - (s_BKGts / settings.softcap) ** 2
        ds_BKGts = (ds_BKGts * settings.scale).astype(narrow)
        return (
            dot("BKGts,BKsE->BKGtE", ds_BKGts, k_BKsE),
            dot("BKGts,BKGtE->BKsE", ds_BKGts, q_BKGtE),
            dot("BKGts,BKGtE->BKsE", self.without_diagonal(p_BKGts).astype(narrow), dy_BKGtE),
        )


def make_tile(
    request: Request,
    q_position_t: jax.Array,
    k_position_s: jax.Array,
    ids: tuple[jax.Array, jax.Array] | None,
    drops_diagonal_BKt: jax.Array | None,
) -> Tile:
    """The tile of these queries and keys.

    Args:
      request: the whole call.
      q_position_t, k_position_s: positions among the S tokens.
      ids: their segment ids, [B, t] and [B, s]; None where every row is one document.
      drops_diagonal_BKt: bool, the queries that drop their diagonal; None: none does.
    """
    column_t1 = q_position_t[:, None]
    seen = visible(request.settings, column_t1, k_position_s)
    if ids is not None:
        same_B11ts = (ids[0][:, :, None] == ids[1][:, None, :])[:, None, None]
        seen = same_B11ts if seen is None else seen & same_B11ts
    dropped = None
    if drops_diagonal_BKt is not None:
        dropped = drops_diagonal_BKt[:, :, None, :, None] & (column_t1 == k_position_s)
    return Tile(request.settings, seen, dropped)


def drops_diagonal(keeps_diagonal_BKT: jax.Array | None) -> jax.Array | None:
    """The rows that `compose.Attend` and `RowGradients` do not name; None: none."""
    return None if keeps_diagonal_BKT is None else jnp.logical_not(keeps_diagonal_BKT)


def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum in float32 or better."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
