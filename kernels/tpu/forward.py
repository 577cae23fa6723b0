"""The forward kernel: FlashAttention (arXiv 2205.14135) over a list of blocks, with the projection before the only write of z."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.fused import Call
from kernels.tpu import schedule, tile
from kernels.tpu.schedule import COMPUTE, FIRST, LANES, LAST, MASKED, Blocks, Grid
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
    """Per row, over 128 lanes: the running maximum, partial sums of the weights, and 1 / n2, negative where the diagonal stays."""

    acc: Any
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
    (B, T, H, E), (_, S, K, _) = q_BTHE.shape, k_BSKE.shape
    G = H // K
    grid = Grid(call, T, S, S - T, (blocks or schedule.FORWARD).fit(T, S))
    bq, bkv = grid.blocks.q, grid.blocks.kv
    i, j, masked = grid.pairs()
    flags, loaded = schedule.with_segments(segment_ids, grid, i, j, schedule.edges(i) | COMPUTE | MASKED * masked, j)
    at = functools.partial(schedule.at, None if segment_ids is None else len(i))

    row_spec = pl.BlockSpec((None, None, bq, E), lambda b, h, n, i, *_: (b, h, i[n], 0))
    key_spec = pl.BlockSpec((None, None, bkv, E), lambda b, h, n, i, j, flags, loaded: (b, h // G, loaded[at(b, n)], 0))
    arrays = _Inputs(
        schedule.rows_first(q_BTHE, grid.padded_T),
        schedule.rows_first(k_BSKE, grid.padded_S),
        schedule.rows_first(v_BSKE, grid.padded_S),
    )
    specs = _Inputs(row_spec, key_spec, key_spec)
    num_stats = 1
    scratch = _Scratch(*(pltpu.VMEM((bq, width), jnp.float32) for width in (E, LANES, LANES)))
    if own_BTKE is not None:
        num_stats = 2
    if call.drop_diagonal:
        scratch = scratch._replace(inverse=pltpu.VMEM((bq, LANES), jnp.float32))
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

    cells = B * H * len(i) * bq * bkv
    z_BHTE, stats_BHnT = pl.pallas_call(
        functools.partial(_kernel, grid, at, masked),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B, H, len(i)),
            in_specs=[specs],
            out_specs=[row_spec, pl.BlockSpec((None, None, num_stats, bq), lambda b, h, n, i, *_: (b, h, 0, i[n]))],
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
    z_BTHE = z_BHTE[:, :, :T].swapaxes(1, 2)
    lse_BHT, *c = (stats_BHnT[:, :, row, :T] for row in range(num_stats))
    return z_BTHE, lse_BHT, c[0] if c else None


def _kernel(grid: Grid, at, masked: np.ndarray, i_ref, j_ref, flags_ref, _, x: _Inputs, z_ref, stats_ref, t: _Scratch):
    b, h, n = (pl.program_id(axis) for axis in range(3))
    flags = flags_ref[at(b, n)]
    q_start = grid.offset + i_ref[n] * grid.blocks.q
    k_start = j_ref[n] * grid.blocks.kv

    pl.when(flags & FIRST != 0)(lambda: _open(h, x, t))
    if x.q_ids is None and not masked.all():
        pl.when(flags & (COMPUTE | MASKED) == COMPUTE)(lambda: _block(grid, None, x, t))
    if x.q_ids is not None or masked.any():
        pl.when(flags & (COMPUTE | MASKED) == COMPUTE | MASKED)(lambda: _block(grid, (q_start, k_start), x, t))
    pl.when(flags & LAST != 0)(lambda: _close(grid.call, h, x, z_ref, stats_ref, t))


def _open(h, x: _Inputs, t: _Scratch):
    t.acc[...] = jnp.zeros_like(t.acc)
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
    call, compute = grid.call, grid.blocks.compute
    if start is not None and call.drop_diagonal:
        # Here, where the matrix unit has enough to do, the reduction over lanes is almost free.
        t.inverse[...] = _inverse(call, x)
    for first in range(0, grid.blocks.kv, compute):
        columns = pl.ds(first, compute)
        # Scores in powers of 2, as the hardware's exponential has them.
        s = tile.scores(call, x.q[...], x.k[columns, :])
        if start is not None:
            k_position = start[1] + first + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            q_position = start[0] + lax.broadcasted_iota(jnp.int32, s.shape, 0)
            seen = tile.visible(call, q_position, k_position, grid.padding_from)
            if x.q_ids is not None:
                seen = tile.both(seen, tile.lanes(x.q_ids[...], compute) == x.k_ids[:, columns])
            s = s if seen is None else jnp.where(seen, s, -jnp.inf)
        m_old = t.maximum[...]
        m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - tile.lanes(m_new, compute))
        shrink = jnp.exp2(m_old - m_new)
        t.maximum[...] = m_new
        # Sums of every 128th weight: the one reduction over lanes waits for the last block.
        t.total[...] = shrink * t.total[...] + sum(p[:, lane : lane + LANES] for lane in range(0, compute, LANES))
        if start is not None and call.drop_diagonal:
            p = _drop_diagonal(grid, first, p, k_position, q_position, t.inverse)
        v = x.v[columns, :]
        t.acc[...] = tile.lanes(shrink, v.shape[1]) * t.acc[...] + tile.dot(p.astype(v.dtype), v, tile.NN)


def _drop_diagonal(grid: Grid, first: int, p, k_position, q_position, inverse):
    """The weights without those of tokens on themselves. In blocks that start together these can only be in square tiles."""
    compute = grid.blocks.compute
    if not grid.aligned:
        diagonal = jnp.where(tile.lanes(inverse[...], compute) > 0, q_position, -1)
        return jnp.where(tile.on_diagonal(k_position, diagonal), 0, p)
    strips = [p[:first]]
    for column in range(0, compute, LANES):
        rows, columns = slice(first + column, first + column + LANES), slice(column, column + LANES)
        diagonal = jnp.where(inverse[rows, :] > 0, q_position[rows, columns], -1)
        square = jnp.where(tile.on_diagonal(k_position[rows, columns], diagonal), 0, p[rows, columns])
        strips.append(tile.join([p[rows, :column], square, p[rows, column + LANES :]], axis=1))
    return tile.join([*strips, p[first + compute :]], axis=0)


def _own(x: _Inputs) -> jax.Array:
    """The values to project on: without an input of their own those of the diagonal block, which is the last one visited."""
    return (x.v if x.own is None else x.own)[...].astype(jnp.float32)


def _inverse(call: Call, x: _Inputs) -> jax.Array:
    own = _own(x)
    n2 = jnp.broadcast_to(jnp.sum(own * own, axis=1, keepdims=True), (own.shape[0], LANES))
    inverse, exact = call.inverse(n2)
    return jnp.where(exact, inverse, -jnp.maximum(inverse, jnp.finfo(jnp.float32).tiny)) if call.drop_diagonal else inverse


def _close(call: Call, h, x: _Inputs, z_ref, stats_ref, t: _Scratch):
    total = jnp.broadcast_to(jnp.sum(t.total[...], axis=1, keepdims=True), t.total.shape)
    z = t.acc[...] * tile.lanes(1 / total, t.acc.shape[1])
    lse = t.maximum[...] * math.log(2) + jnp.log(total)
    if call.zero_rule is None:
        stats_ref[...] = lse.T[:1]
    else:
        own = _own(x)
        inverse = jnp.abs(t.inverse[...]) if call.drop_diagonal else _inverse(call, x)
        c = jnp.sum(z * own, axis=1, keepdims=True) * inverse
        taken = c if x.alpha is None else x.alpha[h] * c
        z -= tile.lanes(taken, z.shape[1]) * own
        stats_ref[...] = jnp.where(lax.broadcasted_iota(jnp.int32, lse.shape, 1) == 0, lse, c).T[:2]
    z_ref[...] = z.astype(z_ref.dtype)
