"""Attention in plain XLA for long sequences, block by block: a T x S matrix never exists, and a hidden block is never visited.

The method is FlashAttention's (arXiv 2205.14135): forward, an online softmax over key blocks; backward, the weights once more
from q, k and the saved log-sum-exp. One `lax.scan` runs over the list of (query block, key block) pairs that positions leave
visible, so that causal and windowed masks cost what they show.

Axes beside the package's: N query blocks of t rows, M key blocks of s columns.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.reference import group
from xsa_kernels.request import Request
from xsa_kernels.spec import LOWEST
from xsa_kernels.xla.tile import Tile, dot, drops_diagonal, make_tile

BLOCK = 512
Carry = tuple[jax.Array, jax.Array, jax.Array]  # the sums that a scan over pairs of blocks adds to


def forward(request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Attention without sinks and projection; see `compose.Attend`."""
    q_BTHE, v_BSKE = request.q_BTHE, request.v_BSKE
    wide = jnp.promote_types(q_BTHE.dtype, jnp.float32)
    grid = BlockGrid(request, keeps_diagonal_BKT)
    q_NBKGtE, k_MBKsE, v_MBKsE = grid.queries(q_BTHE), grid.keys(request.k_BSKE), grid.keys(v_BSKE)
    m_NBKGt = jnp.full(q_NBKGtE.shape[:-1], LOWEST, wide)
    l_NBKGt = jnp.zeros_like(m_NBKGt)

    def step(carry: Carry, pair: Any) -> tuple[Carry, None]:
        acc_NBKGtE, m_NBKGt, l_NBKGt = carry
        i, j = pair
        tile = grid.tile(i, j)
        s_BKGts = tile.masked(tile.scores(q_NBKGtE[i], k_MBKsE[j]), -jnp.inf)
        m_old = m_NBKGt[i]
        m_new = jnp.maximum(m_old, s_BKGts.max(-1))
        p_BKGts = jnp.exp(s_BKGts - m_new[..., None])
        shrink = jnp.exp(m_old - m_new)
        p_narrow = tile.without_diagonal(p_BKGts).astype(v_BSKE.dtype)
        acc = acc_NBKGtE[i] * shrink[..., None] + dot("BKGts,BKsE->BKGtE", p_narrow, v_MBKsE[j])
        carry = (
            acc_NBKGtE.at[i].set(acc),
            m_NBKGt.at[i].set(m_new),
            l_NBKGt.at[i].set(l_NBKGt[i] * shrink + p_BKGts.sum(-1)),
        )
        return carry, None

    (acc_NBKGtE, m_NBKGt, l_NBKGt), _ = lax.scan(step, (jnp.zeros(q_NBKGtE.shape, wide), m_NBKGt, l_NBKGt), grid.pairs)
    # Only rows that fill up the last block can see nothing; they are cut off, but a NaN in them would stop a user who hunts NaNs.
    l_NBKGt = jnp.where(l_NBKGt > 0, l_NBKGt, 1)
    lse_BTKG1 = grid.rows((m_NBKGt + jnp.log(l_NBKGt))[..., None])
    y_BTHE = grid.rows(acc_NBKGtE / l_NBKGt[..., None]).reshape(q_BTHE.shape)
    return y_BTHE, lse_BTKG1.reshape(q_BTHE.shape[:3]).swapaxes(1, 2)


def backward_main(request: Request, outputs: Outputs, rows: RowGradients) -> Gradients:
    """See `backend.BackwardMain`."""
    q_BTHE, wide, narrow = request.q_BTHE, outputs.lse_BHT.dtype, request.q_BTHE.dtype
    grid = BlockGrid(request, rows.keeps_diagonal_BKT)
    q_NBKGtE, dy_NBKGtE = grid.queries(q_BTHE), grid.queries(rows.dy_BTHE)
    k_MBKsE, v_MBKsE = grid.keys(request.k_BSKE), grid.keys(request.v_BSKE)
    lse_NBKGt1, delta_NBKGt1 = (grid.queries(x.swapaxes(1, 2)[..., None]) for x in (outputs.lse_BHT, rows.delta_BHT))

    def step(carry: Carry, pair: Any) -> tuple[Carry, None]:
        dq_NBKGtE, dk_MBKsE, dv_MBKsE = carry
        i, j = pair
        dq, dk, dv = grid.tile(i, j).backward(q_NBKGtE[i], k_MBKsE[j], v_MBKsE[j], dy_NBKGtE[i], lse_NBKGt1[i], delta_NBKGt1[i])
        carry = (dq_NBKGtE.at[i].add(dq), dk_MBKsE.at[j].add(dk), dv_MBKsE.at[j].add(dv))
        return carry, None

    dv_MBKsE = jnp.zeros(v_MBKsE.shape, wide) if rows.dv_start_BTKE is None else grid.keys(rows.dv_start_BTKE)
    zeros = (jnp.zeros(q_NBKGtE.shape, wide), jnp.zeros(k_MBKsE.shape, wide), dv_MBKsE)
    (dq_NBKGtE, dk_MBKsE, dv_MBKsE), _ = lax.scan(step, zeros, grid.pairs)
    dq_BTHE = grid.rows(dq_NBKGtE).reshape(q_BTHE.shape)
    return Gradients(dq_BTHE.astype(narrow), grid.columns(dk_MBKsE).astype(narrow), grid.columns(dv_MBKsE).astype(narrow))


class BlockGrid:
    """How one request is cut into blocks, and what a query block sees of a key block."""

    def __init__(self, request: Request, keeps_diagonal_BKT: jax.Array | None) -> None:
        self.request = request
        (self.T, self.S), self.K = (x.shape[1] for x in (request.q_BTHE, request.k_BSKE)), request.k_BSKE.shape[2]
        self.t, self.s = min(BLOCK, self.T), min(BLOCK, self.S)
        self.pairs = self._visible_pairs()
        self.ids = None
        if request.segment_ids_BS is not None:
            self.ids = _cut(request.segment_ids_BS[:, self.S - self.T :], self.t), _cut(request.segment_ids_BS, self.s)
        self.drops_diagonal_NBtK = None
        if (drops_BKT := drops_diagonal(keeps_diagonal_BKT)) is not None:
            self.drops_diagonal_NBtK = _cut(drops_BKT.swapaxes(1, 2), self.t)

    def _visible_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The (query block, key block) pairs in which positions leave something visible."""
        causal, window = self.request.settings.causal, self.request.settings.window
        N, M = -(-self.T // self.t), -(-self.S // self.s)
        i, j = np.divmod(np.arange(N * M, dtype=np.int32), M)
        # The most and the least that a key of block j can be ahead of a query of block i.
        least = j * self.s - (self.S - self.T + i * self.t + self.t - 1)
        most = least + self.s - 1 + self.t - 1
        active = np.ones(N * M, bool)
        if causal:
            active &= least <= 0
        if window is not None:
            active &= most > -window
            if not causal:
                active &= least < window
        return i[active], j[active]

    def queries(self, x_BTHE: jax.Array) -> jax.Array:
        return _cut(group(x_BTHE, self.K), self.t).transpose(0, 1, 3, 4, 2, 5)

    def keys(self, x_BSKE: jax.Array) -> jax.Array:
        return _cut(x_BSKE, self.s).transpose(0, 1, 3, 2, 4)

    def rows(self, x_NBKGtE: jax.Array) -> jax.Array:
        N, B, K, G, t, E = x_NBKGtE.shape
        return x_NBKGtE.transpose(1, 0, 4, 2, 3, 5).reshape(B, N * t, K, G, E)[:, : self.T]

    def columns(self, x_MBKsE: jax.Array) -> jax.Array:
        M, B, K, s, E = x_MBKsE.shape
        return x_MBKsE.transpose(1, 0, 3, 2, 4).reshape(B, M * s, K, E)[:, : self.S]

    def tile(self, i: jax.Array, j: jax.Array) -> Tile:
        """Query block i against key block j."""
        k_position_s = j * self.s + jnp.arange(self.s)
        ids = None if self.ids is None else (self.ids[0][i], self.ids[1][j])
        drops_BKt = None if self.drops_diagonal_NBtK is None else self.drops_diagonal_NBtK[i].swapaxes(1, 2)
        q_position_t = self.S - self.T + i * self.t + jnp.arange(self.t)
        tile = make_tile(self.request, q_position_t, k_position_s, ids, drops_BKt)
        is_key = k_position_s < self.S
        return dataclasses.replace(tile, seen=is_key if tile.seen is None else tile.seen & is_key)


def _cut(x_BT: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [N, B, size, ...], the last block filled up with zeros: rows whose dy and delta are 0 add nothing."""
    B, T, *rest = x_BT.shape
    N = -(-T // size)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, N * size - T), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(x_BT.reshape(B, N, size, *rest), 1, 0)
