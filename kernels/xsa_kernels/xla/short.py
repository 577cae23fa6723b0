"""Attention in plain XLA for short sequences: each block of queries meets all keys that it sees at once.

The blocks are a Python loop, so the keys of each block are a static slice: what a causal or windowed mask hides is never computed
but for the rest of a block. XLA sees plain batched products, with heads before tokens, which it computes fast on a CPU.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.reference import group
from xsa_kernels.request import Request
from xsa_kernels.xla.tile import Tile, dot, drops_diagonal, make_tile

LONGEST = 1024
BLOCK = 64  # the fewest queries of a block, if there are so many
MOST_BLOCKS = 8


def fits(request: Request) -> bool:
    """Whether queries and keys are few enough for a loop that is compiled unrolled."""
    return max(request.q_BTHE.shape[1], request.k_BSKE.shape[1]) <= LONGEST


def forward(request: Request, keeps_diagonal_BKT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Attention without sinks and projection; see `compose.Attend`."""
    (B, T, H, _), K = request.q_BTHE.shape, request.k_BSKE.shape[2]
    wide = jnp.promote_types(request.q_BTHE.dtype, jnp.float32)
    q_BKGTE = _heads_first(group(request.q_BTHE, K).astype(wide))
    k_BKSE, v_BKSE = (x.astype(wide).swapaxes(1, 2) for x in (request.k_BSKE, request.v_BSKE))
    y, lse = [], []
    for rows, keys, tile in _blocks(request, keeps_diagonal_BKT):
        s_BKGts = tile.masked(tile.scores(q_BKGTE[..., rows, :], k_BKSE[:, :, keys]), -jnp.inf)
        m_BKGt1 = s_BKGts.max(-1, keepdims=True)
        p_BKGts = jnp.exp(s_BKGts - m_BKGt1)
        l_BKGt1 = p_BKGts.sum(-1, keepdims=True)
        y.append(dot("BKGts,BKsE->BKGtE", tile.without_diagonal(p_BKGts), v_BKSE[:, :, keys]) / l_BKGt1)
        lse.append((m_BKGt1 + jnp.log(l_BKGt1))[..., 0])
    y_BTHE = _tokens_first(jnp.concatenate(y, 3)).reshape(request.q_BTHE.shape)
    return y_BTHE, jnp.concatenate(lse, 3).reshape(B, H, T)


def backward_main(request: Request, outputs: Outputs, rows: RowGradients) -> Gradients:
    """See `backend.BackwardMain`."""
    (B, T, H, _), (_, S, K, _) = request.q_BTHE.shape, request.k_BSKE.shape
    q_BKGTE, dy_BKGTE = (_heads_first(group(x, K)) for x in (request.q_BTHE, rows.dy_BTHE))
    k_BKSE, v_BKSE = (x.swapaxes(1, 2) for x in (request.k_BSKE, request.v_BSKE))
    lse_BKGT1, delta_BKGT1 = (x.reshape(B, K, H // K, T, 1) for x in (outputs.lse_BHT, rows.delta_BHT))
    dq, dk, dv = [], [], []
    for block, keys, tile in _blocks(request, rows.keeps_diagonal_BKT):
        here = (..., block, slice(None))
        dq_block, dk_keys, dv_keys = tile.backward(
            q_BKGTE[here], k_BKSE[:, :, keys], v_BKSE[:, :, keys], dy_BKGTE[here], lse_BKGT1[here], delta_BKGT1[here]
        )
        dq.append(dq_block)
        around = ((0, 0), (0, 0), (keys.start, S - keys.stop), (0, 0))
        dk.append(jnp.pad(dk_keys, around))
        dv.append(jnp.pad(dv_keys, around))
    dv_BSKE = functools.reduce(jnp.add, dv).swapaxes(1, 2)
    if rows.dv_start_BTKE is not None:
        dv_BSKE += rows.dv_start_BTKE
    dq_BTHE = _tokens_first(jnp.concatenate(dq, 3)).reshape(request.q_BTHE.shape)
    narrow = request.q_BTHE.dtype
    return Gradients(dq_BTHE.astype(narrow), functools.reduce(jnp.add, dk).swapaxes(1, 2).astype(narrow), dv_BSKE.astype(narrow))


def _blocks(request: Request, keeps_diagonal_BKT: jax.Array | None) -> Iterator[tuple[slice, slice, Tile]]:
    """The queries of each block, the keys from the first to the last that one of them sees by position, and their tile."""
    causal, window, ids_BS = request.settings.causal, request.settings.window, request.segment_ids_BS
    T, S = request.q_BTHE.shape[1], request.k_BSKE.shape[1]
    drops_BKT = drops_diagonal(keeps_diagonal_BKT)
    size = max(BLOCK, -(-T // MOST_BLOCKS))
    for start in range(0, T, size):
        rows = slice(start, min(start + size, T))
        first, last = S - T + rows.start, S - T + rows.stop - 1  # positions of the queries
        begin = 0 if window is None else max(0, first - window + 1)
        end = last + 1 if causal else S if window is None else min(S, last + window)
        keys = slice(begin, end)
        ids = None if ids_BS is None else (ids_BS[:, first : last + 1], ids_BS[:, keys])
        drops = None if drops_BKT is None else drops_BKT[:, :, rows]
        yield rows, keys, make_tile(request, jnp.arange(first, last + 1), jnp.arange(begin, end), ids, drops)


def _heads_first(x_BTKGE: jax.Array) -> jax.Array:
    """[B, T, K, G, E] -> [B, K, G, T, E]."""
    return jnp.moveaxis(x_BTKGE, 1, 3)


def _tokens_first(x_BKGTE: jax.Array) -> jax.Array:
    """[B, K, G, T, E] -> [B, T, K, G, E]."""
    return jnp.moveaxis(x_BKGTE, 3, 1)
