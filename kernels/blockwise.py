"""Attention in plain XLA, block by block: a T x S matrix never exists, and a block that the mask hides is never visited.

The method is FlashAttention's (arXiv 2205.14135): forward, an online softmax over key blocks; backward, the weights once more
from q, k and the saved log-sum-exp. One `lax.scan` runs over the list of (query block, key block) pairs that positions leave
visible, so that causal and windowed masks cost what they show.

Axes beside the package's: N query blocks of t rows, M key blocks of s columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels.reference import visible
from kernels.spec import MaskSpec

# A finite start for the running maximum: where a block hides all its keys from a row, exp(-inf - LOWEST) is 0 and not NaN.
LOWEST = -1e30


def forward(
    q_BTKGE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    mask: MaskSpec,
    skip_BTK: jax.Array | None,
    sinks_KG: jax.Array | None,
    softcap: float | None,
    scale: float,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns y [B, T, K, G, E] and the log-sum-exp of the scores [B, T, K, G] (sinks included), both in float32 or better.

    Args:
      skip_BTK: bool, the rows whose own value is left out of y, though its weight stays in the softmax; None: no row.
    """
    grid = _Grid(q_BTKGE, k_BSKE, mask, skip_BTK, softcap, scale, block)
    q_NBKGtE, k_MBKsE, v_MBKsE = grid.queries(q_BTKGE), grid.keys(k_BSKE), grid.keys(v_BSKE)
    wide = jnp.promote_types(q_BTKGE.dtype, jnp.float32)

    m_NBKGt = jnp.full(q_NBKGtE.shape[:-1], LOWEST, wide)
    l_NBKGt = jnp.zeros_like(m_NBKGt)
    if sinks_KG is not None:
        sinks_KG1 = sinks_KG.astype(wide)[:, :, None]
        m_NBKGt = jnp.maximum(m_NBKGt, sinks_KG1)
        l_NBKGt = jnp.exp(sinks_KG1 - m_NBKGt)

    def step(carry, pair):
        acc_NBKGtE, m_NBKGt, l_NBKGt = carry
        i, j = pair
        s_BKGts = jnp.where(grid.seen(i, j), grid.scores(q_NBKGtE[i], k_MBKsE[j]), -jnp.inf)
        m_old = m_NBKGt[i]
        m_new = jnp.maximum(m_old, s_BKGts.max(-1))
        p_BKGts = jnp.exp(s_BKGts - m_new[..., None])
        shrink = jnp.exp(m_old - m_new)
        p_narrow = grid.without_own(p_BKGts, i, j).astype(v_BSKE.dtype)
        acc = acc_NBKGtE[i] * shrink[..., None] + _dot("BKGts,BKsE->BKGtE", p_narrow, v_MBKsE[j])
        carry = (
            acc_NBKGtE.at[i].set(acc),
            m_NBKGt.at[i].set(m_new),
            l_NBKGt.at[i].set(l_NBKGt[i] * shrink + p_BKGts.sum(-1)),
        )
        return carry, None

    (acc_NBKGtE, m_NBKGt, l_NBKGt), _ = lax.scan(step, (jnp.zeros(q_NBKGtE.shape, wide), m_NBKGt, l_NBKGt), grid.pairs)
    # Only rows that fill up the last block can see nothing; they are cut off, but a NaN in them would stop a user who hunts NaNs.
    l_NBKGt = jnp.where(l_NBKGt > 0, l_NBKGt, 1)
    y_NBKGtE = acc_NBKGtE / l_NBKGt[..., None]
    lse_NBKGt = m_NBKGt + jnp.log(l_NBKGt)
    return grid.rows(y_NBKGtE), grid.rows(lse_NBKGt[..., None])[..., 0]


def backward(
    q_BTKGE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    mask: MaskSpec,
    skip_BTK: jax.Array | None,
    softcap: float | None,
    scale: float,
    block: int,
    lse_BTKG: jax.Array,
    dy_BTKGE: jax.Array,
    delta_BTKG: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v in float32 or better.

    Args:
      dy_BTKGE: the cotangent of y, rounded to the dtype of q.
      delta_BTKG: rowsum(y * dy) of that rounded dy, in float32 or better.
    """
    grid = _Grid(q_BTKGE, k_BSKE, mask, skip_BTK, softcap, scale, block)
    q_NBKGtE, k_MBKsE, v_MBKsE, dy_NBKGtE = grid.queries(q_BTKGE), grid.keys(k_BSKE), grid.keys(v_BSKE), grid.queries(dy_BTKGE)
    lse_NBKGt1 = grid.queries(lse_BTKG[..., None])
    delta_NBKGt1 = grid.queries(delta_BTKG[..., None])
    wide, narrow = lse_BTKG.dtype, q_BTKGE.dtype

    def step(carry, pair):
        dq_NBKGtE, dk_MBKsE, dv_MBKsE = carry
        i, j = pair
        q, k, v, dy = q_NBKGtE[i], k_MBKsE[j], v_MBKsE[j], dy_NBKGtE[i]
        s_BKGts = grid.scores(q, k)
        p_BKGts = jnp.where(grid.seen(i, j), jnp.exp(s_BKGts - lse_NBKGt1[i]), 0)
        dp_BKGts = grid.without_own(_dot("BKGtE,BKsE->BKGts", dy, v), i, j)
        ds_BKGts = p_BKGts * (dp_BKGts - delta_NBKGt1[i])
        if softcap is not None:
            ds_BKGts *= 1 - (s_BKGts / softcap) ** 2
        ds_BKGts = (ds_BKGts * scale).astype(narrow)
        p_narrow = grid.without_own(p_BKGts, i, j).astype(narrow)
        carry = (
            dq_NBKGtE.at[i].add(_dot("BKGts,BKsE->BKGtE", ds_BKGts, k)),
            dk_MBKsE.at[j].add(_dot("BKGts,BKGtE->BKsE", ds_BKGts, q)),
            dv_MBKsE.at[j].add(_dot("BKGts,BKGtE->BKsE", p_narrow, dy)),
        )
        return carry, None

    zeros = (jnp.zeros(q_NBKGtE.shape, wide), jnp.zeros(k_MBKsE.shape, wide), jnp.zeros(v_MBKsE.shape, wide))
    (dq_NBKGtE, dk_MBKsE, dv_MBKsE), _ = lax.scan(step, zeros, grid.pairs)
    return grid.rows(dq_NBKGtE), grid.columns(dk_MBKsE), grid.columns(dv_MBKsE)


class _Grid:
    """How one call is cut into blocks, and what a query block sees of a key block."""

    def __init__(self, q_BTKGE, k_BSKE, mask: MaskSpec, skip_BTK, softcap: float | None, scale: float, block: int):
        self.T, self.S = q_BTKGE.shape[1], k_BSKE.shape[1]
        self.t, self.s = min(block, self.T), min(block, self.S)
        self.mask, self.softcap, self.scale = mask, softcap, scale
        N, M = -(-self.T // self.t), -(-self.S // self.s)
        i, j = np.divmod(np.arange(N * M, dtype=np.int32), M)
        # The most and the least that a key of block j can be ahead of a query of block i.
        least = j * self.s - (self.S - self.T + i * self.t + self.t - 1)
        most = least + self.s - 1 + self.t - 1
        active = np.ones(N * M, bool)
        if mask.causal:
            active &= least <= 0
        if mask.window is not None:
            active &= most > -mask.window
            if not mask.causal:
                active &= least < mask.window
        self.pairs = i[active], j[active]
        if mask.segment_ids is not None:
            self.q_ids_NBt = _cut(mask.segment_ids[:, self.S - self.T :], self.t)
            self.k_ids_MBs = _cut(mask.segment_ids, self.s)
        self.skip_NBtK = None if skip_BTK is None else _cut(skip_BTK, self.t)

    def queries(self, x_BTKGE: jax.Array) -> jax.Array:
        return _cut(x_BTKGE, self.t).transpose(0, 1, 3, 4, 2, 5)

    def keys(self, x_BSKE: jax.Array) -> jax.Array:
        return _cut(x_BSKE, self.s).transpose(0, 1, 3, 2, 4)

    def rows(self, x_NBKGtE: jax.Array) -> jax.Array:
        N, B, K, G, t, E = x_NBKGtE.shape
        return x_NBKGtE.transpose(1, 0, 4, 2, 3, 5).reshape(B, N * t, K, G, E)[:, : self.T]

    def columns(self, x_MBKsE: jax.Array) -> jax.Array:
        M, B, K, s, E = x_MBKsE.shape
        return x_MBKsE.transpose(1, 0, 3, 2, 4).reshape(B, M * s, K, E)[:, : self.S]

    def scores(self, q_BKGtE: jax.Array, k_BKsE: jax.Array) -> jax.Array:
        s_BKGts = _dot("BKGtE,BKsE->BKGts", q_BKGtE, k_BKsE) * self.scale
        return s_BKGts if self.softcap is None else self.softcap * jnp.tanh(s_BKGts / self.softcap)

    def positions(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.S - self.T + i * self.t + jnp.arange(self.t), j * self.s + jnp.arange(self.s)

    def seen(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """What query block i sees of key block j: bool, broadcasts to [B, K, G, t, s]."""
        q_positions, k_positions = self.positions(i, j)
        seen = visible(self.mask, q_positions, k_positions) & (k_positions < self.S)
        if self.mask.segment_ids is None:
            return seen
        return (seen & (self.q_ids_NBt[i][:, :, None] == self.k_ids_MBs[j][:, None, :]))[:, None, None]

    def without_own(self, x_BKGts: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """x with 0 where a query of a skipped row meets its own key."""
        if self.skip_NBtK is None:
            return x_BKGts
        q_positions, k_positions = self.positions(i, j)
        skip_BKt1 = self.skip_NBtK[i].transpose(0, 2, 1)[..., None]
        return jnp.where((skip_BKt1 & (q_positions[:, None] == k_positions))[:, :, None], 0, x_BKGts)


def _cut(x_BT: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [N, B, size, ...], the last block filled up with zeros: rows whose dy and delta are 0 add nothing."""
    B, T, *rest = x_BT.shape
    N = -(-T // size)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, N * size - T), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(x_BT.reshape(B, N, size, *rest), 1, 0)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
