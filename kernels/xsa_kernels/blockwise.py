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

from xsa_kernels.fused import Call
from xsa_kernels.reference import group, visible

BLOCK = 512
# A finite start for the running maximum: where a block hides all its keys from a row, exp(-inf - LOWEST) is 0 and not NaN.
LOWEST = -1e30


def average(call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, kept_BKT) -> tuple[jax.Array, jax.Array]:
    """`attend` of `xsa_kernels.compose.forward`."""
    wide = jnp.promote_types(q_BTHE.dtype, jnp.float32)
    grid = _Grid(call, q_BTHE, k_BSKE, segment_ids, kept_BKT)
    q_NBKGtE, k_MBKsE, v_MBKsE = grid.queries(q_BTHE), grid.keys(k_BSKE), grid.keys(v_BSKE)
    m_NBKGt = jnp.full(q_NBKGtE.shape[:-1], LOWEST, wide)
    l_NBKGt = jnp.zeros_like(m_NBKGt)

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
    lse_BTKG1 = grid.rows((m_NBKGt + jnp.log(l_NBKGt))[..., None])
    y_BTHE = grid.rows(acc_NBKGtE / l_NBKGt[..., None]).reshape(q_BTHE.shape)
    return y_BTHE, lse_BTKG1.reshape(q_BTHE.shape[:3]).swapaxes(1, 2)


def backward(call: Call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, dv_BTKE):
    """`backward_main` of `xsa_kernels.fused.Backend`."""
    grid = _Grid(call, q_BTHE, k_BSKE, segment_ids, kept_BKT)
    q_NBKGtE, k_MBKsE, v_MBKsE, dy_NBKGtE = grid.queries(q_BTHE), grid.keys(k_BSKE), grid.keys(v_BSKE), grid.queries(dy_BTHE)
    lse_NBKGt1, delta_NBKGt1 = (grid.queries(x_BHT.swapaxes(1, 2)[..., None]) for x_BHT in (lse_BHT, delta_BHT))
    wide, narrow = lse_BHT.dtype, q_BTHE.dtype

    def step(carry, pair):
        dq_NBKGtE, dk_MBKsE, dv_MBKsE = carry
        i, j = pair
        q, k, v, dy = q_NBKGtE[i], k_MBKsE[j], v_MBKsE[j], dy_NBKGtE[i]
        s_BKGts = grid.scores(q, k)
        p_BKGts = jnp.where(grid.seen(i, j), jnp.exp(s_BKGts - lse_NBKGt1[i]), 0)
        dp_BKGts = grid.without_own(_dot("BKGtE,BKsE->BKGts", dy, v), i, j)
        ds_BKGts = p_BKGts * (dp_BKGts - delta_NBKGt1[i])
        if call.softcap is not None:
            ds_BKGts *= 1 - (s_BKGts / call.softcap) ** 2
        ds_BKGts = (ds_BKGts * call.scale).astype(narrow)
        p_narrow = grid.without_own(p_BKGts, i, j).astype(narrow)
        carry = (
            dq_NBKGtE.at[i].add(_dot("BKGts,BKsE->BKGtE", ds_BKGts, k)),
            dk_MBKsE.at[j].add(_dot("BKGts,BKGtE->BKsE", ds_BKGts, q)),
            dv_MBKsE.at[j].add(_dot("BKGts,BKGtE->BKsE", p_narrow, dy)),
        )
        return carry, None

    dv_MBKsE = jnp.zeros(v_MBKsE.shape, wide) if dv_BTKE is None else grid.keys(dv_BTKE)
    zeros = (jnp.zeros(q_NBKGtE.shape, wide), jnp.zeros(k_MBKsE.shape, wide), dv_MBKsE)
    (dq_NBKGtE, dk_MBKsE, dv_MBKsE), _ = lax.scan(step, zeros, grid.pairs)
    dq_BTHE = grid.rows(dq_NBKGtE).reshape(q_BTHE.shape)
    return dq_BTHE.astype(narrow), grid.columns(dk_MBKsE).astype(narrow), grid.columns(dv_MBKsE).astype(narrow)


class _Grid:
    """How one call is cut into blocks, and what a query block sees of a key block."""

    def __init__(self, call: Call, q_BTHE, k_BSKE, segment_ids, kept_BKT):
        (_, self.T, _, _), (_, self.S, self.K, _) = q_BTHE.shape, k_BSKE.shape
        self.t, self.s = min(BLOCK, self.T), min(BLOCK, self.S)
        self.call = call
        N, M = -(-self.T // self.t), -(-self.S // self.s)
        i, j = np.divmod(np.arange(N * M, dtype=np.int32), M)
        # The most and the least that a key of block j can be ahead of a query of block i.
        least = j * self.s - (self.S - self.T + i * self.t + self.t - 1)
        most = least + self.s - 1 + self.t - 1
        active = np.ones(N * M, bool)
        if call.causal:
            active &= least <= 0
        if call.window is not None:
            active &= most > -call.window
            if not call.causal:
                active &= least < call.window
        self.pairs = i[active], j[active]
        self.ids = None
        if segment_ids is not None:
            self.ids = _cut(segment_ids[:, self.S - self.T :], self.t), _cut(segment_ids, self.s)
        self.drops_NBtK = None
        if call.drop_diagonal:
            self.drops_NBtK = _cut(jnp.logical_not(kept_BKT).swapaxes(1, 2), self.t)

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

    def scores(self, q_BKGtE: jax.Array, k_BKsE: jax.Array) -> jax.Array:
        s_BKGts, softcap = _dot("BKGtE,BKsE->BKGts", q_BKGtE, k_BKsE) * self.call.scale, self.call.softcap
        return s_BKGts if softcap is None else softcap * jnp.tanh(s_BKGts / softcap)

    def positions(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.S - self.T + i * self.t + jnp.arange(self.t), j * self.s + jnp.arange(self.s)

    def seen(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """What query block i sees of key block j: bool, broadcasts to [B, K, G, t, s]."""
        q_positions, k_positions = self.positions(i, j)
        seen = visible(self.call.mask, q_positions, k_positions) & (k_positions < self.S)
        if self.ids is None:
            return seen
        q_ids_NBt, k_ids_MBs = self.ids
        return (seen & (q_ids_NBt[i][:, :, None] == k_ids_MBs[j][:, None, :]))[:, None, None]

    def without_own(self, x_BKGts: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """x with 0 where a query that drops its diagonal meets its own key."""
        if self.drops_NBtK is None:
            return x_BKGts
        q_positions, k_positions = self.positions(i, j)
        drops_BKt1 = self.drops_NBtK[i].transpose(0, 2, 1)[..., None]
        return jnp.where((drops_BKt1 & (q_positions[:, None] == k_positions))[:, :, None], 0, x_BKGts)


def _cut(x_BT: jax.Array, size: int) -> jax.Array:
    """[B, T, ...] -> [N, B, size, ...], the last block filled up with zeros: rows whose dy and delta are 0 add nothing."""
    B, T, *rest = x_BT.shape
    N = -(-T // size)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, N * size - T), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(x_BT.reshape(B, N, size, *rest), 1, 0)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))
