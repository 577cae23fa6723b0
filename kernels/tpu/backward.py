"""The backward kernel: one pass over the blocks makes dq, dk and dv, with five matrix products per pair of blocks instead of seven.

Key blocks are the outer loop, so dk and dv of one block accumulate in place, while dq of a whole KV group accumulates in VMEM
beside them. Each block of dq is written when the last key block that it sees is done. Where dq does not fit, the queries are cut
into chunks.

The key blocks are visited from the last to the first. Under a causal mask a block of queries then meets its own tokens first, and
the row-local half of the backward pass (`kernels.fused`) happens there, hidden behind the matrix products: the values at hand are
the rows' own, dy and delta stay in VMEM for the visits that follow, and dv starts where it must.
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
from kernels.tpu.schedule import COMPUTE, DIAGONAL, DONE, FIRST, LANES, LAST, MASKED, NEW, Blocks, Grid
from kernels.tpu.tile import LOG2E

# What a row keeps in VMEM from its first visit to its last: dq in float32 and, with the projection, dy.
ROW_BYTES = 24 * 2**20
VMEM_BYTES = 48 * 2**20


class _Inputs(NamedTuple):
    """Arrays, their block specs, or the kernel's references to them; None where a call does not have them.

    The rows of q, dz, z, lse, c and delta are those of all query heads of a KV head, one head after the other. Either there is
    `z`, and the kernel makes dy and delta, or `dz` is dy already and `delta` is given.
    """

    q: Any
    dz: Any
    lse: Any
    k: Any
    v: Any
    z: Any = None
    c: Any = None
    delta: Any = None
    diagonal: Any = None
    dv: Any = None
    q_ids: Any = None
    k_ids: Any = None


class _Steps(NamedTuple):
    """The lists that the grid's last axis walks: a pair of blocks, its block of rows, the one that is loaded, the one that is loaded
    at its first visit only, and dq's output."""

    i: Any
    j: Any
    flags: Any
    row: Any
    loaded: Any
    new: Any
    written: Any


class _Scratch(NamedTuple):
    """`dy` where the kernel projects; without that dz is dy."""

    dq: Any
    dk: Any
    dv: Any
    dy: Any = None


class _Row(NamedTuple):
    """References to what is kept of one block of rows."""

    dy: Any
    delta: Any
    dq: Any


KIND = COMPUTE | MASKED | DIAGONAL
import os
DC = int(os.environ.get('DC','512'))


def backward(
    blocks: Blocks | None,
    interpret: Any,
    call: Call,
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    segment_ids: jax.Array | None,
    z_BTHE: jax.Array,
    lse_BHT: jax.Array,
    c_BHT: jax.Array | None,
    dz_BTHE: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None:
    """`Backend.backward` after its first two arguments."""
    blocks = (blocks or schedule.BACKWARD).fit(q_BTHE.shape[1], k_BSKE.shape[1])
    if call.zero_rule is not None and not (call.drop_diagonal and call.causal and blocks.q == blocks.kv):
        return None
    rows = {"q": q_BTHE, "dz": dz_BTHE, "z": z_BTHE, "lse": lse_BHT, "c": c_BHT}
    return _in_chunks(blocks, interpret, call, k_BSKE, v_BSKE, segment_ids, rows, None)


def backward_main(
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
    blocks = (blocks or schedule.BACKWARD).fit(q_BTHE.shape[1], k_BSKE.shape[1])
    rows = {"q": q_BTHE, "dz": dy_BTHE, "lse": lse_BHT, "delta": delta_BHT, "kept": kept_BKT}
    return _in_chunks(blocks, interpret, call, k_BSKE, v_BSKE, segment_ids, rows, dv_BTKE)[:3]


def _in_chunks(blocks: Blocks, interpret, call: Call, k_BSKE, v_BSKE, segment_ids, rows: dict[str, jax.Array | None], dv_BTKE):
    """dq, dk, dv and delta, from as many query rows at a time as fit into VMEM."""
    (_, T, H, E), (_, S, K, _) = rows["q"].shape, k_BSKE.shape
    fits = ROW_BYTES // (H // K * blocks.q * max(E, LANES) * (4 + rows["q"].dtype.itemsize))
    size = max(fits, 1) * blocks.q
    parts = []
    for first in range(0, T, size):
        t = slice(first, min(first + size, T))
        grid = Grid(call, t.stop - first, S, S - T + first, blocks)
        chunk = {name: x[:, t] if x.ndim == 4 else x[:, :, t] for name, x in rows.items() if x is not None}
        parts.append(_chunk(grid, interpret, k_BSKE, v_BSKE, segment_ids, chunk, None if first else dv_BTKE, size < T))
    dq, dk, dv, delta = zip(*parts, strict=True)
    dk, dv = _sum(dk).astype(k_BSKE.dtype), _sum(dv).astype(v_BSKE.dtype)
    return jnp.concatenate(dq, axis=1), dk, dv, jnp.concatenate(delta, axis=2)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _chunk(grid: Grid, interpret, k_BSKE, v_BSKE, segment_ids, rows: dict[str, jax.Array], dv_BTKE, partial: bool):
    """The gradients that the queries of one chunk make; dk and dv in float32 where they are `partial` sums."""
    (B, T, H, E), (_, S, K, _) = rows["q"].shape, k_BSKE.shape
    G, bq, bkv = H // K, grid.blocks.q, grid.blocks.kv
    steps, kinds = _steps(grid, G, segment_ids)
    at = functools.partial(schedule.at, None if segment_ids is None else len(steps.i))
    arrays = _arrays(grid, k_BSKE, v_BSKE, segment_ids, rows, dv_BTKE)
    specs, written, every_row = _specs(grid, at, arrays)
    wide = jnp.float32
    scratch = _Scratch(*(pltpu.VMEM((length, E), wide) for length in (G * grid.padded_T, bkv, bkv)))
    if arrays.c is not None:
        scratch = scratch._replace(dy=pltpu.VMEM((G * grid.padded_T, E), arrays.q.dtype))
    cells = B * K * len(steps.i) * bq * bkv
    dq, dk, dv, delta = pl.pallas_call(
        functools.partial(_kernel, grid, at, kinds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(B, K, len(steps.i)),
            in_specs=[specs],
            out_specs=[written, specs.k, specs.v, every_row],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
            jax.ShapeDtypeStruct(arrays.k.shape, wide if partial else k_BSKE.dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, wide if partial else v_BSKE.dtype),
            jax.ShapeDtypeStruct(arrays.lse.shape, wide),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * cells * E, transcendentals=cells, bytes_accessed=2 * sum(x.nbytes for x in arrays if x is not None)
        ),
        interpret=interpret,
        name="xsa_backward" if grid.call.drop_diagonal else "attention_backward",
    )(*steps, arrays)
    dq_BTHE = dq.reshape(B, H, grid.padded_T, E)[:, :, :T].swapaxes(1, 2)
    delta_BHT = delta.reshape(B, H, grid.padded_T)[:, :, :T]
    return dq_BTHE, dk[:, :, :S].swapaxes(1, 2), dv[:, :, :S].swapaxes(1, 2), delta_BHT


def _arrays(grid: Grid, k_BSKE, v_BSKE, segment_ids, rows: dict[str, jax.Array], dv_BTKE) -> _Inputs:
    """What the kernel reads, padded to whole blocks."""
    B, _, K, E = k_BSKE.shape

    def by_group(name, fill=0.0):
        if (x := rows.get(name)) is None:
            return None
        if x.ndim == 4:
            return schedule.rows_first(x, grid.padded_T).reshape(B, K, -1, E)
        return jnp.pad(x, ((0, 0), (0, 0), (0, grid.padded_T - grid.T)), constant_values=fill).reshape(B, K, 1, -1)

    # An infinite log-sum-exp keeps the weights of padded rows 0.
    numbers = {"lse": by_group("lse", jnp.inf)} | {name: by_group(name) for name in ("z", "c", "delta")}
    k, v = (schedule.rows_first(x, grid.padded_S) for x in (k_BSKE, v_BSKE))
    arrays = _Inputs(q=by_group("q"), dz=by_group("dz"), k=k, v=v, **numbers)
    if "kept" in rows:
        diagonal = jnp.where(rows["kept"], -1, grid.offset + jnp.arange(grid.T, dtype=jnp.int32))
        diagonal = jnp.pad(diagonal, ((0, 0), (0, 0), (0, grid.padded_T - grid.T)), constant_values=-1)
        arrays = arrays._replace(diagonal=diagonal[:, :, None])
    if dv_BTKE is not None:
        arrays = arrays._replace(dv=schedule.rows_first(dv_BTKE, grid.padded_S))
    if segment_ids is not None:
        q_ids, k_ids = schedule.padded_ids(segment_ids, grid)
        arrays = arrays._replace(q_ids=q_ids[:, None], k_ids=jnp.broadcast_to(k_ids[:, :, None], (*k_ids.shape, LANES)))
    return arrays


def _specs(grid: Grid, at, arrays: _Inputs) -> tuple[_Inputs, pl.BlockSpec, pl.BlockSpec]:
    """The block specs of the inputs, of dq, and of the numbers that all rows of a KV head keep in VMEM."""
    bq, bkv, E = grid.blocks.q, grid.blocks.kv, arrays.q.shape[-1]

    def rows(which):
        return pl.BlockSpec((None, None, bq, E), lambda b, k, n, *steps: (b, k, which(b, n, _Steps(*steps)), 0))

    def numbers(which):
        return pl.BlockSpec((None, None, 1, bq), lambda b, k, n, *steps: (b, k, 0, which(b, n, _Steps(*steps))))

    def loaded(b, n, steps):
        return steps.loaded[at(b, n)]

    def new(b, n, steps):
        return steps.new[n]

    keys = pl.BlockSpec((None, None, bkv, E), lambda b, k, n, *steps: (b, k, _Steps(*steps).j[n], 0))
    specs = _Inputs(
        q=rows(loaded),
        dz=rows(loaded if arrays.c is None else new),
        lse=numbers(loaded),
        k=keys,
        v=keys,
        z=rows(new),
        c=numbers(new),
        delta=numbers(new),
        diagonal=numbers(lambda b, n, steps: steps.i[n]),
        dv=keys,
        q_ids=pl.BlockSpec((None, 1, bq), lambda b, k, n, *steps: (b, 0, _Steps(*steps).i[n])),
        k_ids=pl.BlockSpec((None, bkv, LANES), lambda b, k, n, *steps: (b, _Steps(*steps).j[n], 0)),
    )
    specs = _Inputs(*(None if x is None else spec for x, spec in zip(arrays, specs, strict=True)))
    every_row = pl.BlockSpec((None, None, 1, arrays.lse.shape[-1]), lambda b, k, n, *_: (b, k, 0, 0))
    return specs, rows(lambda b, n, steps: steps.written[n]), every_row


def _steps(grid: Grid, G: int, segment_ids: jax.Array | None) -> tuple[_Steps, frozenset[int]]:
    """For every key block, from the last on, for every query head of the group, the query blocks that see it."""
    i, j, masked = grid.pairs()
    # A key block that no query sees still has its gradient, zero, to write.
    unseen = np.setdiff1d(np.arange(grid.padded_S // grid.blocks.kv, dtype=np.int32), j)
    flags = COMPUTE | MASKED * masked | DIAGONAL * grid.on_diagonal(i, j)
    flags = np.concatenate([flags, np.zeros_like(unseen)]).astype(np.int32)
    i, j = np.concatenate([i, np.zeros_like(unseen)]), np.concatenate([j, unseen])
    head = np.repeat(np.arange(G, dtype=np.int32), len(i))
    i, j, flags = (np.tile(x, G) for x in (i, j, flags))
    order = np.lexsort((i, head, -j))
    i, j, head, flags = i[order], j[order], head[order], flags[order]

    row = head * (grid.padded_T // grid.blocks.q) + i
    computes = np.flatnonzero(flags & COMPUTE)
    flags |= schedule.edges(j)
    flags[computes[np.unique(row[computes], return_index=True)[1]]] |= NEW
    last = computes[::-1][np.unique(row[computes[::-1]], return_index=True)[1]]
    flags[last] |= DONE

    def latest(bit):
        """The row of the latest step that has this bit or, before there is one, of the first."""
        having = np.flatnonzero(flags & bit)
        return row[having[np.maximum(np.searchsorted(having, np.arange(len(row)), side="right") - 1, 0)]]

    # The block of dq in VMEM is the one finished last, or first of all: every block is written out once, when the next is finished.
    flags_, loaded = schedule.with_segments(segment_ids, grid, i, j, flags, row)
    kinds = {int(kind) for kind in np.unique((flags if segment_ids is None else flags | MASKED) & KIND)}
    return _Steps(i, j, flags_, row, loaded, latest(NEW), latest(DONE)), frozenset(kinds)


def _kernel(grid: Grid, at, kinds: frozenset[int], *refs):
    steps = _Steps(*refs[: len(_Steps._fields)])
    x, dq_ref, dk_ref, dv_ref, delta_ref, total = refs[len(_Steps._fields) :]
    b, n = pl.program_id(0), pl.program_id(2)
    flags = steps.flags[at(b, n)]
    bq = grid.blocks.q
    rows = pl.ds(pl.multiple_of(steps.row[n] * bq, bq), bq)
    row = _Row(x.dz if total.dy is None else total.dy.at[rows, :], delta_ref.at[:, rows], total.dq.at[rows, :])
    starts = grid.offset + steps.i[n] * bq, steps.j[n] * grid.blocks.kv

    @pl.when(flags & FIRST != 0)
    def _():
        total.dk[...] = jnp.zeros_like(total.dk)
        total.dv[...] = jnp.zeros_like(total.dv) if x.dv is None else x.dv[...]

    compute = grid.blocks.compute
    if not grid.triangular:
        pl.when(flags & NEW != 0)(lambda: _open(grid.call, x, row, total, slice(0, bq)))

    def block(starts):
        for first in range(0, grid.blocks.kv, compute):
            _keys(grid, starts, first, 0, x, row, total)

    def diagonal_block():
        MODE = os.environ.get('MODE','0')
        firsts = list(reversed(range(0, grid.blocks.kv, DC)))
        op = lambda first: _open(grid.call, x, row, total, slice(first, first + DC))
        ke = lambda first, exact: _keys(grid, starts, first, first, x, row, total, exact, DC)
        if MODE == '0':
            for first in firsts:
                ke(first, op(first))
        elif MODE == '1':
            opened = [op(firsts[0])]
            for n, first in enumerate(firsts):
                if n + 1 < len(firsts):
                    opened.append(op(firsts[n+1]))
                ke(first, opened[n])
        elif MODE == '2':
            opened = [op(f) for f in firsts]
            for n, first in enumerate(firsts):
                ke(first, opened[n])
        elif MODE == '3':
            opened = [op(f) for f in firsts]
            for n, first in reversed(list(enumerate(firsts))):
                ke(first, opened[n])

    kind = flags & KIND
    for bits, visit in (
        (COMPUTE, lambda: block(None)),
        (COMPUTE | MASKED, lambda: block(starts)),
        (COMPUTE | MASKED | DIAGONAL, diagonal_block),
    ):
        if bits in kinds:
            pl.when(kind == bits)(visit)

    @pl.when(flags & DONE != 0)
    def _():
        dq_ref[...] = (row.dq[...] * grid.call.scale).astype(dq_ref.dtype)

    @pl.when(flags & LAST != 0)
    def _():
        dk_ref[...] = (total.dk[...] * grid.call.scale).astype(dk_ref.dtype)
        dv_ref[...] = total.dv[...].astype(dv_ref.dtype)


def _open(call: Call, x: _Inputs, row: _Row, total: _Scratch, part: slice):
    """The first visit to a block of rows: what the later ones find in VMEM."""
    row.dq[part, :] = jnp.zeros_like(row.dq[part, :])
    if x.z is None:
        row.delta[:, part] = x.delta[:, part]
    else:
        z, dz = x.z[part, :].astype(jnp.float32), x.dz[part, :].astype(jnp.float32)
        if x.c is None:
            row.delta[:, part] = tile.row(jnp.sum(z * dz, axis=1, keepdims=True))
            return
        V = os.environ.get('V','')
        v = x.v[part, :].astype(jnp.float32)
        n2 = jnp.sum(v * v, axis=1, keepdims=True)
        b, exact = call.inverse(n2)
        br = b * jnp.sum(dz * v, axis=1, keepdims=True)
        dy = dz - br * v
        row.dy[part, :] = dy.astype(row.dy.dtype)
        dy = row.dy[part, :].astype(jnp.float32)
        zdy = jnp.sum(z * dy, axis=1, keepdims=True)
        if 'd' in V:
            vdy = jnp.sum(v * dy, axis=1, keepdims=True)
            c = x.c[:, part]
            deltas = []
            for t in range(0, DC, 128):
                m = jnp.broadcast_to(zdy[t:t+128],(128,128)) + c[:, t:t+128] * vdy[t:t+128]
                deltas.append(jnp.sum(tile._diagonal2(m), axis=0, keepdims=True))
            row.delta[:, part] = jnp.concatenate(deltas, axis=1)
        elif 'D' in V:
            vdy = jnp.sum(v * dy, axis=1, keepdims=True)
            row.delta[:, part] = tile.row(zdy) + x.c[:, part] * tile.row(vdy)
        else:
            row.delta[:, part] = tile.row(zdy)
        if 'k' in V:
            c = tile.column(x.c[:, part])
            z += jnp.where(exact, 0, 2 * c) * v
        if 'T' in V:
            c = jnp.concatenate([jnp.broadcast_to(x.c[:, t:t+128],(128,128)).T for t in range(part.start, part.stop, 128)], axis=0)
            z += jnp.where(exact, 0, 2 * c) * v
        if 'q' in V:
            c = tile.column(x.c[:, part])
            total.dv[part, :] -= br * z + jnp.where(exact, 0, c) * (dz + br * v)
        else:
            total.dv[part, :] -= br * z
        return exact


def _keys(grid: Grid, starts, first: int, first_query: int, x: _Inputs, row: _Row, total: _Scratch, exact=None, compute=None):
    """One pair of blocks, keys in sublanes; `starts` (of queries, of keys) where some of it is hidden or on the diagonal."""
    call = grid.call
    compute = compute or grid.blocks.compute
    keys, queries = pl.ds(first, compute), slice(first_query, grid.blocks.q)
    q, dy, k, v = x.q[queries, :], row.dy[queries, :], x.k[keys, :], x.v[keys, :]
    s = tile.scores(call, q, k, keys_first=True)
    p = jnp.exp2(s - x.lse[:, queries] * LOG2E)
    dp = tile.dot(v, dy, tile.NT)
    p_dv = p
    if starts is not None:
        k_position = starts[1] + first + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        q_position = starts[0] + first_query + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        seen = tile.visible(call, q_position, k_position, grid.padding_from)
        if x.q_ids is not None:
            seen = tile.both(seen, tile.lanes(x.k_ids[keys, :], s.shape[1]) == x.q_ids[:, queries])
        p_dv = p = p if seen is None else jnp.where(seen, p, 0)
        if exact is not None:
            V = os.environ.get('V','')
            on = tile.on_diagonal(k_position[:LANES, :LANES], q_position[:LANES, :LANES]) 
            p_strips, dp_strips = [], []
            for t in range(0, compute, LANES):
                t_ = slice(t, t + LANES)
                c = x.c[:, first + t : first + t + LANES]
                ex = exact[t_]
                pt, dpt = p[t_, t_], dp[t_, t_]
                if 'q' in V:
                    drop = on & exact[t_]
                    pt = jnp.where(drop, -c, pt)
                    dpt = jnp.where(drop, 0, dpt)
                elif 'x' in V:
                    pt = jnp.where(on, jnp.where(ex, 0, pt) - c, pt)
                    dpt = jnp.where(on & ex, 0, dpt)
                else:
                    pt = jnp.where(on, - c, pt)
                    dpt = jnp.where(on, 0, dpt)
                p_strips.append(tile.join([p[t_, :t], pt, p[t_, t+LANES:]], axis=1))
                dp_strips.append(tile.join([dp[t_, :t], dpt, dp[t_, t+LANES:]], axis=1))
            p_dv, dp = tile.join(p_strips, 0), tile.join(dp_strips, 0)
        elif x.diagonal is not None:
            p_dv, dp = (_drop_diagonal(grid, first, kq, k_position, x.diagonal[...]) for kq in (p, dp))
    total.dv[keys, :] += tile.dot(p_dv.astype(dy.dtype), dy, tile.NN)
    ds = p * (dp - row.delta[:, queries])
    if call.softcap is not None:
        ds *= 1 - (s * (1 / (call.softcap * LOG2E))) ** 2
    ds = ds.astype(q.dtype)
    total.dk[keys, :] += tile.dot(ds, q, tile.NN)
    row.dq[queries, :] += tile.dot(ds, k, tile.TN)


def _drop_diagonal(grid: Grid, first: int, x, k_position, diagonal):
    """`x` with zeros for tokens and themselves. In blocks that start together these can only be in square tiles."""
    if not grid.aligned:
        return jnp.where(tile.on_diagonal(k_position, diagonal), 0, x)
    strips = []
    for row in range(0, len(x), LANES):
        rows, columns = slice(row, row + LANES), slice(first + row, first + row + LANES)
        square = jnp.where(tile.on_diagonal(k_position[rows, columns], diagonal[:, columns]), 0, x[rows, columns])
        strips.append(tile.join([x[rows, : first + row], square, x[rows, first + row + LANES :]], axis=1))
    return tile.join(strips, axis=0)
