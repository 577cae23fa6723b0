"""The backward kernel: one pass over the blocks makes dq, dk and dv, with five matrix products per pair of blocks instead of seven.

Key blocks are the outer loop, so dk and dv of one block accumulate in place, while dq of a whole KV group accumulates in VMEM
beside them. Each block of dq is written when the last key block that it sees is done. Where dq does not fit, the queries are cut
into chunks.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.fused import Call
from kernels.tpu import schedule, tile
from kernels.tpu.schedule import COMPUTE, DONE, FIRST, LANES, LAST, MASKED, NEW, Blocks, Grid
from kernels.tpu.tile import LOG2E

DQ_BYTES = 16 * 2**20
VMEM_BYTES = 48 * 2**20


class _Inputs(NamedTuple):
    """Arrays, their block specs, or the kernel's references to them; None where a call does not have them.

    The rows of q, dy, lse and delta are those of all query heads of a KV head, one head after the other.
    """

    q: Any
    dy: Any
    lse: Any
    delta: Any
    k: Any
    v: Any
    diagonal: Any = None
    dv: Any = None
    q_ids: Any = None
    k_ids: Any = None


class _Steps(NamedTuple):
    """The lists that the grid's last axis walks: a pair of blocks, its block of rows, the one that is loaded, and dq's output."""

    i: Any
    j: Any
    flags: Any
    row: Any
    loaded: Any
    written: Any


class _Scratch(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


def backward(
    blocks: Blocks | None,
    interpret: Any,
    call: Call,
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    segment_ids: jax.Array | None,
    lse_BHT: jax.Array,
    dy_BTHE: jax.Array,
    delta_BHT: jax.Array,
    kept_BKT: jax.Array | None,
    dv_BTKE: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Backend.backward_main` after its first two arguments."""
    (_, T, H, E), (_, S, K, _) = q_BTHE.shape, k_BSKE.shape
    blocks = (blocks or schedule.BACKWARD).fit(T, S)
    fits = DQ_BYTES // (H // K * blocks.q * max(E, LANES) * 4)
    size = max(fits, 1) * blocks.q
    parts = []
    for first in range(0, T, size):
        t = slice(first, min(first + size, T))
        grid = Grid(call, t.stop - first, S, S - T + first, blocks)
        kept = None if kept_BKT is None else kept_BKT[:, :, t]
        rows = q_BTHE[:, t], dy_BTHE[:, t], lse_BHT[:, :, t], delta_BHT[:, :, t], kept
        parts.append(_chunk(grid, interpret, k_BSKE, v_BSKE, segment_ids, *rows, None if first else dv_BTKE, size < T))
    dq, dk, dv = zip(*parts, strict=True)
    return jnp.concatenate(dq, axis=1), _sum(dk).astype(k_BSKE.dtype), _sum(dv).astype(v_BSKE.dtype)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _chunk(grid, interpret, k_BSKE, v_BSKE, segment_ids, q_BTHE, dy_BTHE, lse_BHT, delta_BHT, kept_BKT, dv_BTKE, partial):
    """The gradients that the queries of one chunk make; dk and dv in float32 where they are `partial` sums."""
    (B, T, H, E), (_, S, K, _) = q_BTHE.shape, k_BSKE.shape
    G, bq, bkv = H // K, grid.blocks.q, grid.blocks.kv
    steps, masked = _steps(grid, G, segment_ids)
    at = functools.partial(schedule.at, None if segment_ids is None else len(steps.i))

    def grouped(x_BHTE):
        return x_BHTE.reshape(B, K, G * grid.padded_T, x_BHTE.shape[-1])

    def number_per_row(x_BHT, fill):
        x_BHT = jnp.pad(x_BHT, ((0, 0), (0, 0), (0, grid.padded_T - T)), constant_values=fill)
        return x_BHT.reshape(B, K, 1, -1)

    def loaded(b, k, n, *steps):
        return b, k, _Steps(*steps).loaded[at(b, n)]

    q_spec = pl.BlockSpec((None, None, bq, E), lambda *ids: (*loaded(*ids), 0))
    row_spec = pl.BlockSpec((None, None, 1, bq), lambda b, k, n, *steps: (b, k, 0, loaded(b, k, n, *steps)[2]))
    k_spec = pl.BlockSpec((None, None, bkv, E), lambda b, k, n, *steps: (b, k, _Steps(*steps).j[n], 0))
    arrays = _Inputs(
        q=grouped(schedule.rows_first(q_BTHE, grid.padded_T)),
        dy=grouped(schedule.rows_first(dy_BTHE, grid.padded_T)),
        # An infinite log-sum-exp keeps the weights of padded rows 0.
        lse=number_per_row(lse_BHT * LOG2E, jnp.inf),
        delta=number_per_row(delta_BHT, 0),
        k=schedule.rows_first(k_BSKE, grid.padded_S),
        v=schedule.rows_first(v_BSKE, grid.padded_S),
    )
    specs = _Inputs(q_spec, q_spec, row_spec, row_spec, k_spec, k_spec)
    i_spec = pl.BlockSpec((None, None, 1, bq), lambda b, k, n, *steps: (b, k, 0, _Steps(*steps).i[n]))
    if kept_BKT is not None:
        position = grid.offset + jnp.arange(T, dtype=jnp.int32)
        diagonal = jnp.where(kept_BKT, -1, position)
        diagonal = jnp.pad(diagonal, ((0, 0), (0, 0), (0, grid.padded_T - T)), constant_values=-1)
        arrays, specs = arrays._replace(diagonal=diagonal[:, :, None]), specs._replace(diagonal=i_spec)
    if dv_BTKE is not None:
        arrays, specs = arrays._replace(dv=schedule.rows_first(dv_BTKE, grid.padded_S)), specs._replace(dv=k_spec)
    if segment_ids is not None:
        q_ids, k_ids = schedule.padded_ids(segment_ids, grid)
        arrays = arrays._replace(q_ids=q_ids[:, None], k_ids=jnp.broadcast_to(k_ids[:, :, None], (*k_ids.shape, LANES)))
        specs = specs._replace(
            q_ids=pl.BlockSpec((None, 1, bq), lambda b, k, n, *steps: (b, 0, _Steps(*steps).i[n])),
            k_ids=pl.BlockSpec((None, bkv, LANES), lambda b, k, n, *steps: (b, _Steps(*steps).j[n], 0)),
        )

    cells = B * K * len(steps.i) * bq * bkv
    wide = jnp.float32
    dq, dk, dv = pl.pallas_call(
        functools.partial(_kernel, grid, at, masked),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(B, K, len(steps.i)),
            in_specs=[specs],
            out_specs=[
                pl.BlockSpec((None, None, bq, E), lambda b, k, n, *steps: (b, k, _Steps(*steps).written[n], 0)),
                k_spec,
                k_spec,
            ],
            scratch_shapes=[_Scratch(*(pltpu.VMEM((rows, E), wide) for rows in (G * grid.padded_T, bkv, bkv)))],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(arrays.q.shape, q_BTHE.dtype),
            jax.ShapeDtypeStruct(arrays.k.shape, wide if partial else k_BSKE.dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, wide if partial else v_BSKE.dtype),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * cells * E, transcendentals=cells, bytes_accessed=2 * sum(x.nbytes for x in arrays if x is not None)
        ),
        interpret=interpret,
        name="attention_backward" if kept_BKT is None else "xsa_backward",
    )(*steps, arrays)
    dq_BTHE = dq.reshape(B, H, grid.padded_T, E)[:, :, :T].swapaxes(1, 2)
    return dq_BTHE, dk[:, :, :S].swapaxes(1, 2), dv[:, :, :S].swapaxes(1, 2)


def _steps(grid: Grid, G: int, segment_ids: jax.Array | None) -> tuple[_Steps, np.ndarray]:
    """For every key block, for every query head of the group, the query blocks that see it."""
    i, j, masked = grid.pairs()
    # A key block that no query sees still has its gradient, zero, to write.
    unseen = np.setdiff1d(np.arange(grid.padded_S // grid.blocks.kv, dtype=np.int32), j)
    flags = np.concatenate([COMPUTE | MASKED * masked, np.zeros_like(unseen)]).astype(np.int32)
    i, j = np.concatenate([i, np.zeros_like(unseen)]), np.concatenate([j, unseen])
    head = np.repeat(np.arange(G, dtype=np.int32), len(i))
    i, j, flags = (np.tile(x, G) for x in (i, j, flags))
    order = np.lexsort((i, head, j))
    i, j, head, flags = i[order], j[order], head[order], flags[order]

    row = head * (grid.padded_T // grid.blocks.q) + i
    computes = np.flatnonzero(flags & COMPUTE)
    flags |= schedule.edges(j)
    flags[computes[np.unique(row[computes], return_index=True)[1]]] |= NEW
    last = computes[::-1][np.unique(row[computes[::-1]], return_index=True)[1]]
    flags[last] |= DONE
    # The block of dq in VMEM is the one finished last, or first of all: every block is written out once, when the next is finished.
    finished = np.flatnonzero(flags & DONE)
    written = row[finished[np.maximum(np.searchsorted(finished, np.arange(len(row)), side="right") - 1, 0)]]
    flags_, loaded = schedule.with_segments(segment_ids, grid, i, j, flags, row)
    return _Steps(i, j, flags_, row, loaded, written), flags & MASKED != 0


def _kernel(grid: Grid, at, masked: np.ndarray, *refs):
    steps = _Steps(*refs[: len(_Steps._fields)])
    x, dq_ref, dk_ref, dv_ref, total = refs[len(_Steps._fields) :]
    b, n = pl.program_id(0), pl.program_id(2)
    flags = steps.flags[at(b, n)]
    bq = grid.blocks.q
    rows = pl.ds(pl.multiple_of(steps.row[n] * bq, bq), bq)
    starts = grid.offset + steps.i[n] * bq, steps.j[n] * grid.blocks.kv

    @pl.when(flags & FIRST != 0)
    def _():
        total.dk[...] = jnp.zeros_like(total.dk)
        total.dv[...] = jnp.zeros_like(total.dv) if x.dv is None else x.dv[...]

    @pl.when(flags & NEW != 0)
    def _():
        total.dq[rows, :] = jnp.zeros((bq, total.dq.shape[1]), jnp.float32)

    if x.q_ids is None and not masked.all():
        pl.when(flags & (COMPUTE | MASKED) == COMPUTE)(lambda: _block(grid, None, rows, x, total))
    if x.q_ids is not None or masked.any():
        pl.when(flags & (COMPUTE | MASKED) == COMPUTE | MASKED)(lambda: _block(grid, starts, rows, x, total))

    @pl.when(flags & DONE != 0)
    def _():
        dq_ref[...] = (total.dq[rows, :] * grid.call.scale).astype(dq_ref.dtype)

    @pl.when(flags & LAST != 0)
    def _():
        dk_ref[...] = (total.dk[...] * grid.call.scale).astype(dk_ref.dtype)
        dv_ref[...] = total.dv[...].astype(dv_ref.dtype)


def _block(grid: Grid, starts, rows, x: _Inputs, total: _Scratch):
    """One pair of blocks, keys in sublanes; `starts` (of queries, of keys) where some of it is hidden or on the diagonal."""
    call, compute = grid.call, grid.blocks.compute
    for first in range(0, grid.blocks.kv, compute):
        keys = pl.ds(first, compute)
        q, dy, k, v = x.q[...], x.dy[...], x.k[keys, :], x.v[keys, :]
        s = tile.scores(call, q, k, keys_first=True)
        p = jnp.exp2(s - x.lse[...])
        dp = tile.dot(v, dy, tile.NT)
        p_dv = p
        if starts is not None:
            k_position = starts[1] + first + lax.broadcasted_iota(jnp.int32, s.shape, 0)
            q_position = starts[0] + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            seen = tile.visible(call, q_position, k_position, grid.padding_from)
            if x.q_ids is not None:
                seen = tile.both(seen, tile.lanes(x.k_ids[keys, :], s.shape[1]) == x.q_ids[...])
            p_dv = p = p if seen is None else jnp.where(seen, p, 0)
            if x.diagonal is not None:
                p_dv, dp = (_drop_diagonal(grid, first, kq, k_position, x.diagonal[...]) for kq in (p, dp))
        total.dv[keys, :] += tile.dot(p_dv.astype(dy.dtype), dy, tile.NN)
        ds = p * (dp - x.delta[...])
        if call.softcap is not None:
            ds *= 1 - (s * (1 / (call.softcap * LOG2E))) ** 2
        ds = ds.astype(q.dtype)
        total.dk[keys, :] += tile.dot(ds, q, tile.NN)
        total.dq[rows, :] += tile.dot(ds, k, tile.TN)


def _drop_diagonal(grid: Grid, first: int, x, k_position, diagonal):
    """`x` with zeros for tokens and themselves. In blocks that start together these can only be in square tiles."""
    if not grid.aligned:
        return jnp.where(tile.on_diagonal(k_position, diagonal), 0, x)
    strips = []
    for row in range(0, grid.blocks.compute, LANES):
        rows, columns = slice(row, row + LANES), slice(first + row, first + row + LANES)
        square = jnp.where(tile.on_diagonal(k_position[rows, columns], diagonal[:, columns]), 0, x[rows, columns])
        strips.append(tile.join([x[rows, : first + row], square, x[rows, first + row + LANES :]], axis=1))
    return tile.join(strips, axis=0)
