"""The backward kernel's body: what happens at one pair of blocks, and at the first visit to a block of rows.

Of scores the keys are in sublanes and the queries in lanes. What is made of rows has E in sublanes and the rows in lanes: numbers
per row fill registers, and the products that make dq, dk and dv fill the 256 columns of the matrix units of v6e and tpu7x, of which
E = 128 columns would leave half idle.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xsa_kernels.fused import Call
from xsa_kernels.tpu import tile
from xsa_kernels.tpu.schedule import COMPUTE, DONE, FIRST, KIND, LAST, MASKED, NEW, Grid
from xsa_kernels.tpu.tile import LANES, LOG2E


class Inputs(NamedTuple):
    """Arrays, their block specs, or the kernel's references to them; None where a call does not have them.

    The rows of q, dz, z and delta are those of all query heads of a KV head, one head after the other. `stats` are the log-sum-exp
    and, where the kernel projects, c: then it makes dy and delta. With `z` but without c there is no projection, so that `dz` is
    dy, and it makes delta; with neither `dz` is dy and `delta` is given.
    """

    q: Any
    dz: Any
    stats: Any
    k: Any
    v: Any
    z: Any = None
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
    """What stays in VMEM, rows in lanes; `dy` where the kernel projects. Without that dz is dy."""

    dq: Any
    dk: Any
    dv: Any
    dy: Any = None


class Pair(NamedTuple):
    """What a pair of blocks has with rows in lanes: references to dy (None where that is dz), delta and dq of its queries. After
    `_turned` also dy in any case, q and k."""

    dy: Any
    delta: Any
    dq: Any
    q: Any = None
    k: Any = None


class _Products(NamedTuple):
    """Of some queries, in lanes, and keys: the scores in powers of 2, and dP."""

    s: jax.Array
    dp: jax.Array


def kernel(grid: Grid, at, kinds: frozenset[int], *refs):
    steps = Steps(*refs[: len(Steps._fields)])
    x, dq_ref, dk_ref, dv_ref, delta_ref, total = refs[len(Steps._fields) :]
    b, n = pl.program_id(0), pl.program_id(2)
    flags = steps.flags[at(b, n)]
    bq = grid.blocks.q
    rows = pl.ds(pl.multiple_of(steps.row[n] * bq, bq), bq)
    pair = Pair(None if total.dy is None else total.dy.at[:, rows], delta_ref.at[:, rows], total.dq.at[:, rows])
    starts = grid.offset + steps.i[n] * bq, steps.j[n] * grid.blocks.kv

    @pl.when(flags & FIRST != 0)
    def _():
        total.dk[...] = jnp.zeros_like(total.dk)
        total.dv[...] = jnp.zeros_like(total.dv) if x.dv is None else x.dv[...].T

    if not grid.triangular:

        @pl.when(flags & NEW != 0)
        def _():
            _open(grid.call, slice(0, bq), x, pair, total)

    kind = flags & KIND
    if COMPUTE in kinds:
        pl.when(kind == COMPUTE)(lambda: _block(grid, None, x, pair, total))
    if COMPUTE | MASKED in kinds:
        pl.when(kind == COMPUTE | MASKED)(lambda: _block(grid, starts, x, pair, total))
    if KIND in kinds:
        pl.when(kind == KIND)(lambda: _diagonal_block(grid, starts, x, pair, total))

    @pl.when(flags & DONE != 0)
    def _():
        dq_ref[...] = (pair.dq[...] * grid.call.scale).astype(dq_ref.dtype).T

    @pl.when(flags & LAST != 0)
    def _():
        dk_ref[...] = (total.dk[...] * grid.call.scale).astype(dk_ref.dtype).T
        dv_ref[...] = total.dv[...].astype(dv_ref.dtype).T


def _block(grid: Grid, starts, x: Inputs, pair: Pair, total: Scratch):
    """A pair of blocks; `starts` (of queries, of keys) where some of it is hidden or on the diagonal."""
    pair, pieces, ahead = _turned(x, pair), grid.blocks.pieces(), max(grid.blocks.parts - 1, 1)
    # Made ahead, so that the matrix unit need not wait for the weights; one piece fewer than in the forward kernel costs least.
    products: list[_Products] = []
    for n, piece in enumerate(pieces):
        products += [_products(grid.call, *later, x, pair) for later in pieces[len(products) : n + ahead]]
        _piece(grid, starts, *piece, products[n], x, pair, total)


def _diagonal_block(grid: Grid, starts, x: Inputs, pair: Pair, total: Scratch):
    """The queries of a block on their own keys, the last ones first: no query before these keys sees them."""
    size, pair = grid.blocks.diagonal, _turned(x, pair)
    pieces = [(slice(first, grid.blocks.q), slice(first, first + size)) for first in reversed(range(0, grid.blocks.kv, size))]
    opened = [(_open(grid.call, own, x, pair, total), _products(grid.call, queries, own, x, pair)) for queries, own in pieces]
    kept = jnp.array(False)
    for (queries, own), (diagonal, products) in zip(pieces, opened, strict=True):
        _piece(grid, starts, queries, own, products, x, pair, total, diagonal)
        if diagonal is not None:
            position = starts[0] + own.start + lax.broadcasted_iota(jnp.int32, diagonal.shape, 1)
            kept |= jnp.min(jnp.where(position < grid.S, diagonal, 0).astype(jnp.float32)) < 0
    if total.dy is not None:
        pl.when(kept)(lambda: _keep(grid.call, x, total))


def _open(call: Call, own: slice, x: Inputs, pair: Pair, total: Scratch) -> jax.Array | None:
    """Rows at their first visit: leaves in VMEM what the next ones need. With a projection returns, as [1, rows], the key that is
    the row's own, counted within its 128 keys, or -1 where the row keeps its diagonal; without one None.

    The formulas are those of `fused._rows`, at alpha = 1. Of dv_self = -(c dy + b r z) the part with c is made with the products
    of weights.
    """
    pair.dq[:, own] = jnp.zeros_like(pair.dq[:, own])
    if x.z is None:
        pair.delta[:, own] = x.delta[:, own]
        return None
    z, dz = (ref[own, :].T.astype(jnp.float32) for ref in (x.z, x.dz))
    if total.dy is None:
        pair.delta[:, own] = tile.row_sum(z * dz)
        return None
    v = x.v[own, :].T.astype(jnp.float32)
    n2 = tile.row_sum(v * v)
    br = call.inverse(n2) * tile.row_sum(dz * v)
    pair.dy[:, own] = (dz - br * v).astype(pair.dy.dtype)
    # delta = y . dy with y = z + c v, from the rounded dy: the main loop sees no other.
    dy = pair.dy[:, own].astype(jnp.float32)
    pair.delta[:, own] = tile.row_sum((z + x.stats[1:, own] * v) * dy)
    total.dv[:, own] -= br * z
    return jnp.where(call.exact(n2), lax.broadcasted_iota(jnp.int32, n2.shape, 1) % LANES, -1)


def _keep(call: Call, x: Inputs, total: Scratch):
    """The part of dv_self that `_piece` does not make, in rows that keep their diagonal: -c (dz + b r v)."""
    v, dz = (ref[...].T.astype(jnp.float32) for ref in (x.v, x.dz))
    n2 = tile.row_sum(v * v)
    kept_c = jnp.where(call.exact(n2), 0, x.stats[1:, :])
    total.dv[...] -= kept_c * (dz + call.inverse(n2) * tile.row_sum(dz * v) * v)


def _turned(x: Inputs, pair: Pair) -> Pair:
    return pair._replace(q=x.q[...].T, k=x.k[...].T, dy=x.dz[...].T if pair.dy is None else pair.dy)


def _products(call: Call, queries: slice, keys: slice, x: Inputs, pair: Pair) -> _Products:
    s = tile.scores(call, tile.dot(x.k[keys, :], pair.q[:, queries], tile.NN))
    return _Products(s, tile.dot(x.v[keys, :], pair.dy[:, queries], tile.NN))


def _piece(
    grid: Grid, starts, queries: slice, keys: slice, products: _Products, x: Inputs, pair: Pair, total: Scratch, diagonal=None
):
    """What some queries and keys add to dq, dk and dv; `diagonal` as `_open` returns it, if the first queries are these keys."""
    call, (s, dp) = grid.call, products
    q, k, dy = pair.q[:, queries], pair.k[:, keys], pair.dy[:, queries]
    p_dv = p = jnp.exp2(s - x.stats[:1, queries] * LOG2E)
    if starts is not None:
        p_dv = p = _hide(grid, starts, queries, keys, x, p)
        # Tokens and themselves: without weight in dv and without dP. In dv -c in its place is the part -c dy of dv_self.
        if diagonal is not None:
            c = x.stats[1:, keys]
            p_dv, dp = _fill_diagonal(p, diagonal, -c), _fill_diagonal(dp, diagonal, jnp.zeros_like(c))
        elif x.diagonal is not None:
            k_position = starts[1] + keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0)
            p_dv, dp = (jnp.where(tile.on_diagonal(k_position, x.diagonal[:, queries]), 0, kq) for kq in (p, dp))
    total.dv[:, keys] += tile.dot(dy, p_dv.astype(dy.dtype), tile.NT)
    ds = p * (dp - pair.delta[:, queries])
    if call.softcap is not None:
        ds *= 1 - (s * (1 / (call.softcap * LOG2E))) ** 2
    ds = ds.astype(q.dtype)
    total.dk[:, keys] += tile.dot(q, ds, tile.NT)
    pair.dq[:, queries] += tile.dot(k, ds, tile.NN)


def _hide(grid: Grid, starts, queries: slice, keys: slice, x: Inputs, p: jax.Array) -> jax.Array:
    """`p` without the weights of keys that a query does not see."""
    # On the diagonal, causality alone hides keys only from queries among them.
    alone = grid.triangular and x.q_ids is None and grid.call.window is None and keys.start == queries.start
    some = p[:, : len(p)] if alone else p
    q_position = starts[0] + queries.start + lax.broadcasted_iota(jnp.int32, some.shape, 1)
    k_position = starts[1] + keys.start + lax.broadcasted_iota(jnp.int32, some.shape, 0)
    seen = tile.visible(grid.call, q_position, k_position, grid.padding_from)
    if x.q_ids is not None:
        seen = tile.both(seen, tile.lanes(x.k_ids[keys, :], p.shape[1]) == x.q_ids[:, queries])
    return p if seen is None else tile.join([jnp.where(seen, some, 0), p[:, some.shape[1] :]], axis=1)


def _fill_diagonal(x: jax.Array, diagonal: jax.Array, new: jax.Array) -> jax.Array:
    """`x`, in which key 0 and query 0 are one token, with `new` [1, keys] on the diagonal, except where `diagonal` is -1."""
    strips = []
    for first in range(0, len(x), LANES):
        own = slice(first, first + LANES)
        here = tile.on_diagonal(lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0), diagonal[:, own])
        strips.append(tile.join([x[own, :first], jnp.where(here, new[:, own], x[own, own]), x[own, own.stop :]], axis=1))
    return tile.join(strips, axis=0)
