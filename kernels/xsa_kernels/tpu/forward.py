"""The forward kernel: FlashAttention (arXiv 2205.14135) over a list of blocks, with the projection before the only write of z.

Of scores the keys are in sublanes and the queries in lanes; y and the values have E in sublanes. What a softmax and a projection
need of a row, its maximum, its sum, |v|^2 and y . v, then comes by adding whole registers, and 128 of them fill a register. With
queries in sublanes each would be a reduction over lanes, and eight would fill one.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsa_kernels.fused import Call
from xsa_kernels.tpu import schedule, tile
from xsa_kernels.tpu.schedule import COMPUTE, DIAGONAL, FIRST, KIND, LAST, MASKED, Blocks, Grid
from xsa_kernels.tpu.tile import LANES, LOG2E, SUBLANES

# A finite start for the running maximum: where a block hides all its keys from a row, exp(-inf - LOWEST) is 0 and not NaN.
LOWEST = -1e30


class _Inputs(NamedTuple):
    """Arrays, their block specs, or the kernel's references to them; None where a call does not have them."""

    q: Any
    k: Any
    v: Any
    own: Any = None
    q_ids: Any = None
    k_ids: Any = None
    sinks: Any = None
    alpha: Any = None


class _State(NamedTuple):
    """Of each query, in lanes: y before it is divided, the running maximum, and the sums of every eighth weight; where own tokens
    are not all in the last block, also what `_diagonal` returns."""

    y: Any
    maximum: Any
    total: Any
    diagonal: Any = None


def forward(
    blocks: Blocks | None,
    interpret: Any,
    call: Call,
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    own_BTKE: jax.Array | None,
    segment_ids: jax.Array | None,
    sinks_H: jax.Array | None,
    alpha_H: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """`Backend.forward` after its first two arguments."""
    (B, T, H, E), S = q_BTHE.shape, k_BSKE.shape[1]
    grid = Grid(call, T, S, S - T, (blocks or schedule.forward_blocks(E)).fit(T, S))
    bq, bkv = grid.blocks.q, grid.blocks.kv
    i, j, masked = grid.pairs()
    flags = schedule.edges(i) | COMPUTE | MASKED * masked | DIAGONAL * grid.on_diagonal(i, j)
    kinds = schedule.kinds(flags, segment_ids)
    flags, loaded = schedule.with_segments(segment_ids, grid, i, j, flags, j)
    at = functools.partial(schedule.at, None if segment_ids is None else len(i))

    arrays, specs = _inputs(grid, at, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H)
    # The log-sum-exp and c in one array: a grid step pays for every output. The backward kernel reads them together.
    num_stats = 1 if own_BTKE is None else 2
    scratch = _State(*(pltpu.VMEM((height, bq), jnp.float32) for height in (E, 1, SUBLANES)))
    if call.drop_diagonal and not grid.triangular:
        scratch = scratch._replace(diagonal=pltpu.VMEM((1, bq), jnp.int32))
    cells = B * H * len(i) * bq * bkv
    z_BHTE, stats_BHnT = pl.pallas_call(
        functools.partial(_kernel, grid, at, kinds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B, H, len(i)),
            in_specs=[specs],
            out_specs=[specs.q, pl.BlockSpec((None, None, num_stats, bq), lambda b, h, n, i, *_: (b, h, 0, i[n]))],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(arrays.q.shape, q_BTHE.dtype),
            jax.ShapeDtypeStruct((B, H, num_stats, grid.padded_T), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * cells * E,
            transcendentals=cells,
            bytes_accessed=sum(x.nbytes for x in arrays if x is not None) + arrays.q.nbytes,
        ),
        interpret=interpret,
        name="attention_forward" if own_BTKE is None else "xsa_forward",
    )(i, j, flags, loaded, arrays)
    lse_BHT, *c = (stats_BHnT[:, :, row, :T] for row in range(num_stats))
    return z_BHTE[:, :, :T].swapaxes(1, 2), lse_BHT, c[0] if c else None


def _inputs(grid: Grid, at, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H) -> tuple[_Inputs, _Inputs]:
    """What the kernel reads, padded to whole blocks, and the block specs."""
    (_, _, H, E), K = q_BTHE.shape, k_BSKE.shape[2]
    G, bq, bkv = H // K, grid.blocks.q, grid.blocks.kv
    rows = pl.BlockSpec((None, None, bq, E), lambda b, h, n, i, *_: (b, h, i[n], 0))
    keys = pl.BlockSpec((None, None, bkv, E), lambda b, h, n, i, j, flags, loaded: (b, h // G, loaded[at(b, n)], 0))
    arrays = _Inputs(
        schedule.rows_first(q_BTHE, grid.padded_T),
        schedule.rows_first(k_BSKE, grid.padded_S),
        schedule.rows_first(v_BSKE, grid.padded_S),
    )
    specs = _Inputs(rows, keys, keys)
    if own_BTKE is not None and not (own_BTKE is v_BSKE and grid.triangular):
        arrays = arrays._replace(own=schedule.rows_first(own_BTKE, grid.padded_T))
        specs = specs._replace(own=pl.BlockSpec((None, None, bq, E), lambda b, h, n, i, *_: (b, h // G, i[n], 0)))
    if segment_ids is not None:
        q_ids, k_ids = schedule.ids_for_keys_first(segment_ids, grid)
        arrays = arrays._replace(q_ids=q_ids, k_ids=k_ids)
        specs = specs._replace(
            q_ids=pl.BlockSpec((None, 1, bq), lambda b, h, n, i, *_: (b, 0, i[n])),
            k_ids=pl.BlockSpec((None, bkv, LANES), lambda b, h, n, i, j, flags, loaded: (b, loaded[at(b, n)], 0)),
        )
    number = pl.BlockSpec(memory_space=pltpu.SMEM)
    if sinks_H is not None:
        arrays, specs = arrays._replace(sinks=sinks_H.astype(jnp.float32) * LOG2E), specs._replace(sinks=number)
    if alpha_H is not None:
        arrays, specs = arrays._replace(alpha=alpha_H), specs._replace(alpha=number)
    return arrays, specs


def _kernel(grid: Grid, at, kinds: frozenset[int], i_ref, j_ref, flags_ref, _, x: _Inputs, z_ref, stats_ref, state: _State):
    b, h, n = (pl.program_id(axis) for axis in range(3))
    flags = flags_ref[at(b, n)]
    start = grid.offset + i_ref[n] * grid.blocks.q, j_ref[n] * grid.blocks.kv

    pl.when(flags & FIRST != 0)(lambda: _open(grid.call, start[0], h, x, state))
    kind = flags & KIND
    if COMPUTE in kinds:
        pl.when(kind == COMPUTE)(lambda: _block(grid, None, x, state))
    if COMPUTE | MASKED in kinds:
        pl.when(kind == COMPUTE | MASKED)(lambda: _block(grid, start, x, state))
    if grid.triangular:  # the last block that the queries see is that of their own keys
        pl.when(flags & LAST != 0)(lambda: _diagonal_block(grid, start, h, x, z_ref, stats_ref, state))
    else:
        pl.when(flags & LAST != 0)(lambda: _finish(grid, h, x, z_ref, stats_ref, state))


def _open(call: Call, first, h, x: _Inputs, state: _State):
    """A block of queries, from position `first` on, before its first keys."""
    state.y[...] = jnp.zeros_like(state.y)
    if x.sinks is None:
        state.maximum[...] = jnp.full_like(state.maximum, LOWEST)
        state.total[...] = jnp.zeros_like(state.total)
    else:
        sink = x.sinks[h]
        m = jnp.maximum(sink, LOWEST)
        state.maximum[...] = jnp.full_like(state.maximum, m)
        top = lax.broadcasted_iota(jnp.int32, state.total.shape, 0) == 0  # of the eight sums, which are added in the end
        state.total[...] = jnp.where(top, jnp.exp2(jnp.full_like(state.total, sink) - m), 0)
    if state.diagonal is not None:
        state.diagonal[...] = _diagonal(call, first, x.own[...].T)


def _block(grid: Grid, start, x: _Inputs, state: _State):
    """One key block; `start` (of the queries, of the keys) where some of it is hidden or on the diagonal.

    While a piece is attended to, the scores of the next ones are made already: else the matrix unit would wait for the weights.
    """
    pieces, values = grid.blocks.pieces(), x.v[...].T
    scores: list[jax.Array] = []
    for n, (queries, keys) in enumerate(pieces):
        scores += [_scores(grid, start, *later, x) for later in pieces[len(scores) : n + grid.blocks.parts]]
        drop = None
        if start is not None and state.diagonal is not None:
            k_position = start[1] + keys.start + lax.broadcasted_iota(jnp.int32, scores[n].shape, 0)
            drop = tile.on_diagonal(k_position, state.diagonal[:, queries])
        done = _attend(scores[n], drop, queries, values[:, keys], state)
        state.y[:, queries], state.maximum[:, queries], state.total[:, queries] = done.y, done.maximum, done.total


def _diagonal_block(grid: Grid, start, h, x: _Inputs, z_ref, stats_ref, state: _State):
    """The queries of a block and their own keys: 128 queries at a time, and of the keys those that one of them sees.

    All scores come first: the compiler then has most to choose from.
    """
    values = x.v[...].T
    all_own = None
    if grid.call.zero_rule is not None:
        all_own = values if x.own is None else x.own[...].T
    strips = [slice(first, first + LANES) for first in range(0, grid.blocks.q, LANES)]
    scores = [_scores(grid, start, queries, slice(0, queries.stop), x, clear=queries.start) for queries in strips]
    for queries, s in zip(strips, scores, strict=True):
        own = None if all_own is None else all_own[:, queries]
        drop = None
        if own is not None and grid.call.drop_diagonal:
            diagonal = _diagonal(grid.call, 0, own)
            drop = tile.on_diagonal(lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0), diagonal)
        done = _attend(s, drop, queries, values[:, : queries.stop], state)
        _close(grid.call, h, queries, done, own, x, z_ref, stats_ref)


def _finish(grid: Grid, h, x: _Inputs, z_ref, stats_ref, state: _State):
    done = _State(state.y[...], state.maximum[...], state.total[...])
    own = None if x.own is None else x.own[...].T
    _close(grid.call, h, slice(0, grid.blocks.q), done, own, x, z_ref, stats_ref)


def _scores(grid: Grid, start, queries: slice, keys: slice, x: _Inputs, clear: int = 0) -> jax.Array:
    """Scores in powers of 2, as the hardware's exponential has them. Causality hides none of the first `clear` keys."""
    call = grid.call
    s = tile.scores(call, tile.dot(x.k[keys, :], x.q[queries, :], tile.NT))
    if start is None:
        return s
    clear = clear if x.q_ids is None and call.window is None else 0
    hidden = s[clear:]
    q_position = start[0] + queries.start + lax.broadcasted_iota(jnp.int32, hidden.shape, 1)
    k_position = start[1] + keys.start + clear + lax.broadcasted_iota(jnp.int32, hidden.shape, 0)
    seen = tile.visible(call, q_position, k_position, grid.padding_from)
    if x.q_ids is not None:
        seen = tile.both(seen, tile.lanes(x.k_ids[keys, :], s.shape[1]) == x.q_ids[:, queries])
    return s if seen is None else tile.join([s[:clear], jnp.where(seen, hidden, -jnp.inf)], axis=0)


def _attend(s, drop, queries: slice, values, state: _State) -> _State:
    """The state of some queries after these scores. `drop`: the weights to leave out of y, of the last len(drop) keys."""
    m_old = state.maximum[:, queries]
    m_new = jnp.maximum(m_old, jnp.max(s, axis=0, keepdims=True))
    p = jnp.exp2(s - m_new)
    shrink = jnp.exp2(m_old - m_new)
    # Sums of every eighth weight: the one reduction within registers waits for the last block.
    total = shrink * state.total[:, queries] + jnp.sum(p.reshape(-1, SUBLANES, p.shape[1]), axis=0)
    if drop is not None:
        before = len(s) - len(drop)
        p = tile.join([p[:before], jnp.where(drop, 0, p[before:])], axis=0)
    return _State(shrink * state.y[:, queries] + tile.dot(values, p.astype(values.dtype), tile.NN), m_new, total)


def _diagonal(call: Call, first, own: jax.Array) -> jax.Array:
    """Which token is left out of y: its own position for queries from position `first` on, or -1 for none; [1, queries]."""
    exact = call.exact(_length2(own))
    return jnp.where(exact, first + lax.broadcasted_iota(jnp.int32, exact.shape, 1), -1)


def _length2(own: jax.Array) -> jax.Array:
    own = own.astype(jnp.float32)
    return tile.row_sum(own * own)


def _close(call: Call, h, queries: slice, done: _State, own: jax.Array | None, x: _Inputs, z_ref, stats_ref):
    """Projects, divides by the sum of the weights and writes."""
    y, total = done.y, tile.row_sum(done.total)
    stats_ref[:1, queries] = done.maximum * math.log(2) + jnp.log(total)
    if own is not None:
        c = tile.row_sum(y * own) * call.inverse(_length2(own))
        stats_ref[1:, queries] = c / total
        y -= (c if x.alpha is None else x.alpha[h] * c) * own
    z_ref[queries, :] = (y * (1 / total)).astype(z_ref.dtype).T
