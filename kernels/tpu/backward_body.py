"""The backward kernel's body: what happens at one pair of blocks, and at the first visit to a block of rows."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.fused import Call
from kernels.tpu import tile
from kernels.tpu.schedule import COMPUTE, DIAGONAL, DONE, FIRST, LANES, LAST, MASKED, NEW, Grid
from kernels.tpu.tile import LOG2E

# The bits of a step that say which code runs at it.
KIND = COMPUTE | MASKED | DIAGONAL


class Inputs(NamedTuple):
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


class Steps(NamedTuple):
    """The lists that the grid's last axis walks: a pair of blocks, its block of rows, the one that is loaded, the one whose
    rows are loaded at their first visit only, and dq's output."""

    i: Any
    j: Any
    flags: Any
    row: Any
    loaded: Any
    new: Any
    written: Any


class Scratch(NamedTuple):
    """`dy` where the kernel projects; without that dz is dy."""

    dq: Any
    dk: Any
    dv: Any
    dy: Any = None


class Row(NamedTuple):
    """References to what is kept of one block of rows."""

    dy: Any
    delta: Any
    dq: Any


def kernel(grid: Grid, at, kinds: frozenset[int], *refs):
    steps = Steps(*refs[: len(Steps._fields)])
    x, dq_ref, dk_ref, dv_ref, delta_ref, total = refs[len(Steps._fields) :]
    b, n = pl.program_id(0), pl.program_id(2)
    flags = steps.flags[at(b, n)]
    bq = grid.blocks.q
    rows = pl.ds(pl.multiple_of(steps.row[n] * bq, bq), bq)
    row = Row(x.dz if total.dy is None else total.dy.at[rows, :], delta_ref.at[:, rows], total.dq.at[rows, :])
    starts = grid.offset + steps.i[n] * bq, steps.j[n] * grid.blocks.kv

    @pl.when(flags & FIRST != 0)
    def _():
        total.dk[...] = jnp.zeros_like(total.dk)
        total.dv[...] = jnp.zeros_like(total.dv) if x.dv is None else x.dv[...]

    if not grid.triangular:
        pl.when(flags & NEW != 0)(lambda: _open(grid.call, slice(0, bq), x, row, total))
    kind = flags & KIND
    if COMPUTE in kinds:
        pl.when(kind == COMPUTE)(lambda: _block(grid, None, x, row, total))
    if COMPUTE | MASKED in kinds:
        pl.when(kind == COMPUTE | MASKED)(lambda: _block(grid, starts, x, row, total))
    if KIND in kinds:
        pl.when(kind == KIND)(lambda: _diagonal_block(grid, starts, x, row, total))

    @pl.when(flags & DONE != 0)
    def _():
        dq_ref[...] = (row.dq[...] * grid.call.scale).astype(dq_ref.dtype)

    @pl.when(flags & LAST != 0)
    def _():
        dk_ref[...] = (total.dk[...] * grid.call.scale).astype(dk_ref.dtype)
        dv_ref[...] = total.dv[...].astype(dv_ref.dtype)


def _block(grid: Grid, starts, x: Inputs, row: Row, total: Scratch):
    """A pair of blocks; `starts` (of queries, of keys) where some of it is hidden or on the diagonal."""
    for first in range(0, grid.blocks.kv, grid.blocks.compute):
        _keys(grid, starts, slice(first, first + grid.blocks.compute), slice(0, grid.blocks.q), x, row, total)


def _diagonal_block(grid: Grid, starts, x: Inputs, row: Row, total: Scratch):
    """The queries of a block on their own keys, the last ones first: no query before these keys sees them."""
    size = grid.blocks.diagonal
    for first in reversed(range(0, grid.blocks.kv, size)):
        own = slice(first, first + size)
        exact = _open(grid.call, own, x, row, total)
        _keys(grid, starts, own, slice(first, grid.blocks.q), x, row, total, exact)


def _open(call: Call, own: slice, x: Inputs, row: Row, total: Scratch):
    """Rows at their first visit: leaves in VMEM what the next ones need. Returns which leave out the diagonal, or None: x says it.

    The formulas are those of `fused._rows`, at alpha = 1. Of dv_self = -(c dy + b r z) the part with c is made with the products
    of weights, except in rows that keep their diagonal, where it is -c (dz + b r v).
    """
    row.dq[own, :] = jnp.zeros_like(row.dq[own, :])
    if x.z is None:
        row.delta[:, own] = x.delta[:, own]
        return None
    z, dz = x.z[own, :].astype(jnp.float32), x.dz[own, :].astype(jnp.float32)
    if x.c is None:
        row.delta[:, own] = tile.row(jnp.sum(z * dz, axis=1, keepdims=True))
        return None
    v = x.v[own, :].astype(jnp.float32)
    b, exact = call.inverse(jnp.sum(v * v, axis=1, keepdims=True))
    br = b * jnp.sum(dz * v, axis=1, keepdims=True)
    row.dy[own, :] = (dz - br * v).astype(row.dy.dtype)
    # delta = (z + c v) . dy, from the rounded dy: the main loop sees no other.
    dy = row.dy[own, :].astype(jnp.float32)
    z_dy, v_dy = (jnp.sum(a * dy, axis=1, keepdims=True) for a in (z, v))
    row.delta[:, own] = tile.row(z_dy) + x.c[:, own] * tile.row(v_dy)
    kept_c = jnp.where(exact, 0, tile.column(x.c[:, own]))
    total.dv[own, :] -= br * z + kept_c * (dz + br * v)
    return exact


def _keys(grid: Grid, starts, keys: slice, queries: slice, x: Inputs, row: Row, total: Scratch, exact=None):
    """Some keys, in sublanes, and the queries that may see them; `exact` for queries on their own keys that `_open` made."""
    call = grid.call
    q, dy, k, v = x.q[queries, :], row.dy[queries, :], x.k[keys, :], x.v[keys, :]
    s = tile.scores(call, q, k, keys_first=True)
    p = jnp.exp2(s - x.lse[:, queries] * LOG2E)
    dp = tile.dot(v, dy, tile.NT)
    p_dv = p
    if starts is not None:
        q_position = starts[0] + queries.start + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        k_position = starts[1] + keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        seen = tile.visible(call, q_position, k_position, grid.padding_from)
        if x.q_ids is not None:
            seen = tile.both(seen, tile.lanes(x.k_ids[keys, :], s.shape[1]) == x.q_ids[:, queries])
        p_dv = p = p if seen is None else jnp.where(seen, p, 0)
        # Tokens and themselves: without weight in dv and without dP. In dv -c in its place is the part -c dy of dv_self.
        if exact is not None:
            p_dv = _fill_diagonal(p, 0, k_position, q_position[:1], exact, -x.c[:, keys])
            dp = _fill_diagonal(dp, 0, k_position, q_position[:1], exact, jnp.zeros_like(x.c[:, keys]))
        elif x.diagonal is not None:
            p_dv, dp = (_drop_diagonal(grid, keys.start, kq, k_position, x.diagonal[...]) for kq in (p, dp))
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
    return _fill_diagonal(x, first, k_position, diagonal, None, jnp.zeros_like(diagonal, x.dtype))


def _fill_diagonal(x, first: int, k_position, q_position, rows, new):
    """`x`, in which key 0 and query `first` are one token, with `new` [1, queries] on the diagonal of all or of some `rows`."""
    strips = []
    for key in range(0, len(x), LANES):
        keys, queries = slice(key, key + LANES), slice(first + key, first + key + LANES)
        drop = tile.on_diagonal(k_position[keys, queries], q_position[:, queries])
        drop = drop if rows is None else drop & rows[keys]
        square = jnp.where(drop, new[:, queries], x[keys, queries])
        strips.append(tile.join([x[keys, : first + key], square, x[keys, first + key + LANES :]], axis=1))
    return tile.join(strips, axis=0)
