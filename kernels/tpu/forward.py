"""The forward kernel: FlashAttention (arXiv 2205.14135) over a list of blocks, with the projection before the only write of z."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.fused import Call
from kernels.tpu import schedule, tile
from kernels.tpu.schedule import COMPUTE, DIAGONAL, FIRST, KIND, LANES, LAST, MASKED, Blocks, Grid
from kernels.tpu.tile import LOG2E

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


class _Scratch(NamedTuple):
    """Of each row: y before it is divided, the running maximum over 128 lanes, partial sums of the weights in as many, and 1 / n2
    over 128 lanes, where the own values are those of the diagonal block."""

    y: Any
    maximum: Any
    total: Any
    inverse: Any = None


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
    grid = Grid(call, T, S, S - T, (blocks or schedule.FORWARD).fit(T, S))
    bq, bkv = grid.blocks.q, grid.blocks.kv
    i, j, masked = grid.pairs()
    flags = schedule.edges(i) | COMPUTE | MASKED * masked | DIAGONAL * grid.on_diagonal(i, j)
    kinds = schedule.kinds(flags, segment_ids)
    flags, loaded = schedule.with_segments(segment_ids, grid, i, j, flags, j)
    at = functools.partial(schedule.at, None if segment_ids is None else len(i))

    arrays, specs = _inputs(grid, at, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H)
    # The log-sum-exp and c in one array: a grid step pays for every output. The backward kernel reads them together.
    num_stats = 1 if own_BTKE is None else 2
    widths = (E, LANES, LANES) if own_BTKE is None or arrays.own is not None else (E, LANES, LANES, LANES)
    cells = B * H * len(i) * bq * bkv
    z_BHTE, stats_BHnT = pl.pallas_call(
        functools.partial(_kernel, grid, at, kinds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B, H, len(i)),
            in_specs=[specs],
            out_specs=[specs.q, pl.BlockSpec((None, None, num_stats, bq), lambda b, h, n, i, *_: (b, h, 0, i[n]))],
            scratch_shapes=[_Scratch(*(pltpu.VMEM((bq, width), jnp.float32) for width in widths))],
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
        q_ids, k_ids = schedule.padded_ids(segment_ids, grid)
        arrays = arrays._replace(q_ids=jnp.broadcast_to(q_ids[:, :, None], (*q_ids.shape, LANES)), k_ids=k_ids[:, None])
        specs = specs._replace(
            q_ids=pl.BlockSpec((None, bq, LANES), lambda b, h, n, i, *_: (b, i[n], 0)),
            k_ids=pl.BlockSpec((None, 1, bkv), lambda b, h, n, i, j, flags, loaded: (b, 0, loaded[at(b, n)])),
        )
    number = pl.BlockSpec(memory_space=pltpu.SMEM)
    if sinks_H is not None:
        arrays, specs = arrays._replace(sinks=sinks_H.astype(jnp.float32) * LOG2E), specs._replace(sinks=number)
    if alpha_H is not None:
        arrays, specs = arrays._replace(alpha=alpha_H), specs._replace(alpha=number)
    return arrays, specs


def _kernel(grid: Grid, at, kinds: frozenset[int], i_ref, j_ref, flags_ref, _, x: _Inputs, z_ref, stats_ref, t: _Scratch):
    b, h, n = (pl.program_id(axis) for axis in range(3))
    flags = flags_ref[at(b, n)]
    start = grid.offset + i_ref[n] * grid.blocks.q, j_ref[n] * grid.blocks.kv

    pl.when(flags & FIRST != 0)(lambda: _open(h, x, t))
    kind = flags & KIND
    if COMPUTE in kinds:
        pl.when(kind == COMPUTE)(lambda: _block(grid, None, x, t))
    if COMPUTE | MASKED in kinds:
        pl.when(kind == COMPUTE | MASKED)(lambda: _block(grid, start, x, t))
    if grid.triangular:  # the last block that the queries see is that of their own keys
        pl.when(flags & LAST != 0)(lambda: _diagonal_block(grid, start, h, x, z_ref, stats_ref, t))
    else:
        pl.when(flags & LAST != 0)(lambda: _finish(grid, h, x, z_ref, stats_ref, t))


def _finish(grid: Grid, h, x: _Inputs, z_ref, stats_ref, t: _Scratch):
    rows = slice(0, grid.blocks.q)
    _close(grid.call, h, rows, x, z_ref, stats_ref, _Scratch(t.y[...], t.maximum[...], t.total[...]))


def _open(h, x: _Inputs, t: _Scratch):
    t.y[...] = jnp.zeros_like(t.y)
    if x.sinks is None:
        t.maximum[...] = jnp.full_like(t.maximum, LOWEST)
        t.total[...] = jnp.zeros_like(t.total)
    else:
        sink = x.sinks[h]
        m = jnp.maximum(sink, LOWEST)
        t.maximum[...] = jnp.full_like(t.maximum, m)
        first = lax.broadcasted_iota(jnp.int32, t.total.shape, 1) == 0
        t.total[...] = jnp.where(first, jnp.exp2(jnp.full_like(t.total, sink) - m), 0)


def _block(grid: Grid, start, x: _Inputs, t: _Scratch):
    """One key block; `start` (of the queries, of the keys) where some of it is hidden or on the diagonal."""
    rows = slice(0, grid.blocks.q)
    diagonal = None
    if start is not None and grid.call.drop_diagonal:
        exact = grid.call.exact(_length2(_own(x, rows)))
        diagonal = jnp.where(exact, start[0] + lax.broadcasted_iota(jnp.int32, exact.shape, 0), -1)
    chunks = [slice(first, first + grid.blocks.compute) for first in range(0, grid.blocks.kv, grid.blocks.compute)]
    scores = [_scores(grid, start, rows, columns, x) for columns in chunks]
    for columns, s in zip(chunks, scores, strict=True):
        drop = None
        if diagonal is not None:
            k_position = start[1] + columns.start + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            drop = tile.on_diagonal(k_position, diagonal)
        t.y[...], t.maximum[...], t.total[...] = _attend(s, drop, rows, columns, x, t)


def _diagonal_block(grid: Grid, start, h, x: _Inputs, z_ref, stats_ref, t: _Scratch):
    """The queries of a block and their own keys: 128 queries at a time, and of the keys those that one of them sees.

    All scores come first, and the longest rows: the compiler then has most to choose from.
    """
    strips = [slice(first, first + LANES) for first in reversed(range(0, grid.blocks.q, LANES))]
    diagonals = [_measure_own(grid.call, rows, x, t) for rows in strips]
    scores = [_scores(grid, start, rows, slice(0, rows.stop), x, clear=rows.start) for rows in strips]
    for rows, diagonal, s in zip(strips, diagonals, scores, strict=True):
        drop = None
        if diagonal is not None:
            drop = tile.on_diagonal(diagonal, lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0))
        y, maximum, total = _attend(s, drop, rows, slice(0, rows.stop), x, t)
        _close(grid.call, h, rows, x, z_ref, stats_ref, t._replace(y=y, maximum=maximum, total=total))


def _measure_own(call: Call, rows: slice, x: _Inputs, t: _Scratch) -> jax.Array | None:
    """Prepares the projection of 128 rows. Returns, as [1, 128], which of these keys is itself left out of y by its row, or -1."""
    if t.inverse is None:
        return None
    n2 = _length2(_own(x, rows))
    t.inverse[rows, :] = jnp.broadcast_to(call.inverse(n2, tile.reciprocal), (LANES, LANES))
    if not call.drop_diagonal:
        return None
    exact = tile.row(call.exact(tile.pack(n2)).astype(jnp.float32)) > 0
    return jnp.where(exact, lax.broadcasted_iota(jnp.int32, exact.shape, 1), -1)


def _scores(grid: Grid, start, rows: slice, columns: slice, x: _Inputs, clear: int = 0) -> jax.Array:
    """Scores in powers of 2, as the hardware's exponential has them. Causality hides none of the first `clear` keys."""
    call = grid.call
    s = tile.scores(call, x.q[rows, :], x.k[columns, :])
    if start is None:
        return s
    clear = clear if x.q_ids is None and call.window is None else 0
    hidden = s[:, clear:]
    q_position = start[0] + rows.start + lax.broadcasted_iota(jnp.int32, hidden.shape, 0)
    k_position = start[1] + columns.start + clear + lax.broadcasted_iota(jnp.int32, hidden.shape, 1)
    seen = tile.visible(call, q_position, k_position, grid.padding_from)
    if x.q_ids is not None:
        seen = tile.both(seen, tile.lanes(x.q_ids[rows, :], s.shape[1]) == x.k_ids[:, columns])
    return s if seen is None else tile.join([s[:, :clear], jnp.where(seen, hidden, -jnp.inf)], axis=1)


def _attend(s, drop, rows: slice, columns: slice, x: _Inputs, t: _Scratch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What y, maximum and total become with these scores. `drop`: the weights to leave out of y, among those of the last keys."""
    m_old = t.maximum[rows, :]
    m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
    p = jnp.exp2(s - tile.lanes(m_new, s.shape[1]))
    shrink = jnp.exp2(m_old - m_new)
    # Sums of every 128th weight: the one reduction over lanes waits for the last block.
    total = shrink * t.total[rows, :] + sum(p[:, lane : lane + LANES] for lane in range(0, s.shape[1], LANES))
    if drop is not None:
        before = s.shape[1] - drop.shape[1]
        p = tile.join([p[:, :before], jnp.where(drop, 0, p[:, before:])], axis=1)
    v = x.v[columns, :]
    y = tile.lanes(shrink, v.shape[1]) * t.y[rows, :] + tile.dot(p.astype(v.dtype), v, tile.NN)
    return y, m_new, total


def _own(x: _Inputs, rows: slice) -> jax.Array:
    """The values to project on: without an input of their own those of the diagonal block, which is the last one visited."""
    return (x.v if x.own is None else x.own)[rows, :].astype(jnp.float32)


def _length2(own: jax.Array) -> jax.Array:
    return jnp.sum(own * own, axis=1, keepdims=True)


def _close(call: Call, h, rows: slice, x: _Inputs, z_ref, stats_ref, t: _Scratch):
    """Projects, divides by the sum of the weights and writes."""
    y, total = t.y, jnp.sum(t.total, axis=1, keepdims=True)
    packed = tile.pack(total)
    stats_ref[:1, rows] = tile.row(tile.pack(t.maximum) * math.log(2) + jnp.log(packed))
    if call.zero_rule is not None:
        own = _own(x, rows)
        if t.inverse is None:
            inverse = jnp.broadcast_to(call.inverse(_length2(own), tile.reciprocal), (len(own), LANES))
        else:
            inverse = t.inverse[rows, :]
        c = jnp.sum(y * own, axis=1, keepdims=True) * inverse
        stats_ref[1:, rows] = tile.row(tile.pack(c) / packed)
        y -= tile.lanes(c if x.alpha is None else x.alpha[h] * c, y.shape[1]) * own
    z_ref[rows, :] = (y * tile.reciprocal(total)).astype(z_ref.dtype)
