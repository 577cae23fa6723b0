"""The backward kernel's body: what happens at one pair of blocks, and at the first visit to a block of rows.

Tiles of scores have the keys in sublanes and the queries in lanes. What is computed of rows has E in sublanes and the rows in
lanes: numbers per row fill registers, and the products that make dq, dk and dv fill the 256 columns of the matrix units of v6e and
tpu7x, of which E = 128 columns would leave half idle.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xsa_kernels.request import Settings
from xsa_kernels.spec import LOG2E
from xsa_kernels.tpu import tile
from xsa_kernels.tpu.schedule import COMPUTE, FIRST, FIRST_VISIT, KIND, LAST, LAST_VISIT, MASKED, BlockGrid
from xsa_kernels.tpu.tile import LANES, Origin


class Inputs(NamedTuple):
    """Arrays, their block specs, or the kernel's references to them; None for what a call does not have.

    The rows of q, dz, z and delta are those of all query heads of a KV head, one head after the other.

    Attributes:
      dz: the cotangent of z if the kernel projects (then `stats` has c), else that of y.
      stats: the log-sum-exp and, where the kernel projects, c.
      z: where the kernel computes delta; else `delta` is given.
      dropped_key: see `tile.is_dropped`; given where rows drop their diagonal and the kernel does not project.
      dv_start: what dv starts from; None: zero.
    """

    q: Any
    dz: Any
    stats: Any
    k: Any
    v: Any
    z: Any = None
    delta: Any = None
    dropped_key: Any = None
    dv_start: Any = None
    q_ids: Any = None
    k_ids: Any = None


class Steps(NamedTuple):
    """The lists that the grid's last axis walks. A block of rows is a block of queries of one query head of the group.

    Attributes:
      i, j: the query block and the key block.
      flags: see `schedule`.
      row: the block of rows.
      loaded: the block of rows that is loaded.
      first_visited: the block of rows of the latest first visit, which loads what no later visit needs.
      finished: the block of rows that was finished last, whose dq is written.
    """

    i: Any
    j: Any
    flags: Any
    row: Any
    loaded: Any
    first_visited: Any
    finished: Any


class Scratch(NamedTuple):
    """What stays in VMEM, with rows in lanes: sums of dq of a whole KV group, sums of dk and dv of a key block, and dy of all rows.

    `dy` is None where the kernel does not project: then dz is dy.
    """

    dq: Any
    dk: Any
    dv: Any
    dy: Any = None


class RowRefs(NamedTuple):
    """References to what VMEM holds of one block of rows; `dy` is None where dz is dy."""

    dy: Any
    delta: Any
    dq: Any


class Operands(NamedTuple):
    """Operands of matrix products with E in sublanes: [E, queries], [E, keys], and dy [E, queries] or a reference to it."""

    q: jax.Array
    k: jax.Array
    dy: Any


class _Products(NamedTuple):
    """Base-2 scores and dP of some keys and queries, [keys, queries]."""

    s: jax.Array
    dp: jax.Array


def kernel(grid: BlockGrid, step_index: Callable[..., Any], kinds: frozenset[int], *refs: Any) -> None:
    """One step: a block of queries of one head and a block of keys."""
    steps = Steps(*refs[: len(Steps._fields)])
    x, dq_ref, dk_ref, dv_ref, delta_ref, scratch = refs[len(Steps._fields) :]
    b, n = pl.program_id(0), pl.program_id(2)
    flags = steps.flags[step_index(b, n)]
    bq = grid.blocks.q
    block = pl.ds(pl.multiple_of(steps.row[n] * bq, bq), bq)
    dy_ref = None if scratch.dy is None else scratch.dy.at[:, block]
    rows = RowRefs(dy_ref, delta_ref.at[:, block], scratch.dq.at[:, block])
    origin = Origin(grid.offset + steps.i[n] * bq, steps.j[n] * grid.blocks.kv)

    @pl.when(flags & FIRST != 0)
    def initialise_keys() -> None:
        scratch.dk[...] = jnp.zeros_like(scratch.dk)
        scratch.dv[...] = jnp.zeros_like(scratch.dv) if x.dv_start is None else x.dv_start[...].T

    if not grid.triangular:  # else the first visit is on the diagonal

        @pl.when(flags & FIRST_VISIT != 0)
        def initialise_rows() -> None:
            _initialise_rows(grid.settings, slice(0, bq), x, rows, scratch)

    kind = flags & KIND
    if COMPUTE in kinds:
        pl.when(kind == COMPUTE)(lambda: _accumulate_block(grid, None, x, rows, scratch))
    if COMPUTE | MASKED in kinds:
        pl.when(kind == COMPUTE | MASKED)(lambda: _accumulate_block(grid, origin, x, rows, scratch))
    if KIND in kinds:
        pl.when(kind == KIND)(lambda: _initialise_and_accumulate_diagonal(grid, origin, x, rows, scratch))

    @pl.when(flags & LAST_VISIT != 0)
    def store_dq() -> None:
        dq_ref[...] = (rows.dq[...] * grid.settings.scale).astype(dq_ref.dtype).T

    @pl.when(flags & LAST != 0)
    def store_dk_and_dv() -> None:
        dk_ref[...] = (scratch.dk[...] * grid.settings.scale).astype(dk_ref.dtype).T
        dv_ref[...] = scratch.dv[...].astype(dv_ref.dtype).T


def _accumulate_block(grid: BlockGrid, origin: Origin | None, x: Inputs, rows: RowRefs, scratch: Scratch) -> None:
    """Adds a pair of blocks to dq, dk and dv; `origin` is None where the pair needs no mask."""
    operands, pieces = _transposed_operands(x, rows), grid.blocks.pieces()
    # Products are computed ahead, so that the matrix unit need not wait for the weights; one piece fewer than in the forward kernel
    # costs least.
    ahead = max(grid.blocks.pieces_per_row_slice - 1, 1)
    products: list[_Products] = []
    for n, (queries, keys) in enumerate(pieces):
        products += [_products(grid.settings, *later, x, operands) for later in pieces[len(products) : n + ahead]]
        _accumulate(grid, origin, queries, keys, products[n], None, x, operands, rows, scratch)


def _initialise_and_accumulate_diagonal(grid: BlockGrid, origin: Origin, x: Inputs, rows: RowRefs, scratch: Scratch) -> None:
    """The first visit to a block of rows, which is on the diagonal: the last keys first, each with the queries that see them."""
    size, operands = grid.blocks.diagonal_compute, _transposed_operands(x, rows)
    pieces = [(slice(first, grid.blocks.q), slice(first, first + size)) for first in reversed(range(0, grid.blocks.kv, size))]
    begun = [
        (_initialise_rows(grid.settings, keys, x, rows, scratch), _products(grid.settings, queries, keys, x, operands))
        for queries, keys in pieces
    ]
    some_row_keeps_its_diagonal = jnp.array(False)
    for (queries, keys), (dropped_key, products) in zip(pieces, begun, strict=True):
        _accumulate(grid, origin, queries, keys, products, dropped_key, x, operands, rows, scratch)
        if dropped_key is not None:
            position = origin.query + keys.start + lax.broadcasted_iota(jnp.int32, dropped_key.shape, 1)
            least = jnp.min(jnp.where(position < grid.S, dropped_key, 0).astype(jnp.float32))
            some_row_keeps_its_diagonal |= least < 0
    if scratch.dy is not None:
        pl.when(some_row_keeps_its_diagonal)(lambda: _add_dv_self_of_kept_diagonals(grid.settings, x, scratch))


def _initialise_rows(settings: Settings, part: slice, x: Inputs, rows: RowRefs, scratch: Scratch) -> jax.Array | None:
    """The row-local half of the backward pass, for part of a block of rows at its first visit; dy and delta stay in VMEM.

    The formulas are those of `rows.row_gradients`, at alpha = 1. Of dv_self = -(c dy + b r z) the part with c is computed together
    with the products of weights, in `_accumulate`.

    Returns:
      With a projection, [1, rows]: the row's own key, counted within its 128 keys, or -1 where the row keeps its diagonal. Without
      one None.
    """
    rows.dq[:, part] = jnp.zeros_like(rows.dq[:, part])
    if x.z is None:
        rows.delta[:, part] = x.delta[:, part]
        return None
    z, dz = (ref[part, :].T.astype(jnp.float32) for ref in (x.z, x.dz))
    if scratch.dy is None:
        rows.delta[:, part] = tile.row_sum(z * dz)
        return None
    v = x.v[part, :].T.astype(jnp.float32)
    n2 = tile.row_sum(v * v)
    br = settings.inverse(n2) * tile.row_sum(dz * v)
    rows.dy[:, part] = (dz - br * v).astype(rows.dy.dtype)
    # delta = y . dy with y = z + c v, from the rounded dy: the main loop sees no other.
    dy = rows.dy[:, part].astype(jnp.float32)
    rows.delta[:, part] = tile.row_sum((z + x.stats[1:, part] * v) * dy)
    scratch.dv[:, part] -= br * z
    return jnp.where(settings.exact(n2), lax.broadcasted_iota(jnp.int32, n2.shape, 1) % LANES, -1)


def _add_dv_self_of_kept_diagonals(settings: Settings, x: Inputs, scratch: Scratch) -> None:
    """In rows that keep their diagonal, the part of dv_self that `_accumulate` does not compute: -c (dz + b r v)."""
    v, dz = (ref[...].T.astype(jnp.float32) for ref in (x.v, x.dz))
    n2 = tile.row_sum(v * v)
    kept_c = jnp.where(settings.exact(n2), 0, x.stats[1:, :])
    scratch.dv[...] -= kept_c * (dz + settings.inverse(n2) * tile.row_sum(dz * v) * v)


def _transposed_operands(x: Inputs, rows: RowRefs) -> Operands:
    return Operands(q=x.q[...].T, k=x.k[...].T, dy=x.dz[...].T if rows.dy is None else rows.dy)


def _products(settings: Settings, queries: slice, keys: slice, x: Inputs, operands: Operands) -> _Products:
    s = tile.base2_scores(settings, tile.dot(x.k[keys, :], operands.q[:, queries], tile.NN))
    return _Products(s, tile.dot(x.v[keys, :], operands.dy[:, queries], tile.NN))


def _accumulate(
    grid: BlockGrid,
    origin: Origin | None,
    queries: slice,
    keys: slice,
    products: _Products,
    dropped_key: jax.Array | None,
    x: Inputs,
    operands: Operands,
    rows: RowRefs,
    scratch: Scratch,
) -> None:
    """Adds some queries and keys to dq, dk and dv.

    `dropped_key` is what `_initialise_rows` returns, where the first of these queries are these keys.
    """
    settings, (s, dp) = grid.settings, products
    q, k, dy = operands.q[:, queries], operands.k[:, keys], operands.dy[:, queries]
    p_dv = p = jnp.exp2(s - x.stats[:1, queries] * LOG2E)
    if origin is not None:
        p_dv = p = _masked(grid, origin, queries, keys, x, p)
        # On the diagonal there is no weight in dv and no dP. In dv -c in its place is the part -c dy of dv_self.
        if dropped_key is not None:
            c = x.stats[1:, keys]
            p_dv, dp = _with_diagonal(p, dropped_key, -c), _with_diagonal(dp, dropped_key, jnp.zeros_like(c))
        elif x.dropped_key is not None:
            k_position = origin.key + keys.start + lax.broadcasted_iota(jnp.int32, s.shape, 0)
            p_dv, dp = (jnp.where(tile.is_dropped(k_position, x.dropped_key[:, queries]), 0, kq) for kq in (p, dp))
    scratch.dv[:, keys] += tile.dot(dy, p_dv.astype(dy.dtype), tile.NT)
    ds = p * (dp - rows.delta[:, queries])
    if settings.softcap is not None:
        ds *= 1 - (s * (1 / (settings.softcap * LOG2E))) ** 2
    ds = ds.astype(q.dtype)
    scratch.dk[:, keys] += tile.dot(q, ds, tile.NT)
    rows.dq[:, queries] += tile.dot(k, ds, tile.NN)


def _masked(grid: BlockGrid, origin: Origin, queries: slice, keys: slice, x: Inputs, p: jax.Array) -> jax.Array:
    """`p` with 0 where a query does not see a key."""
    # On the diagonal, causality alone hides keys only from queries among them.
    causality_alone = grid.triangular and x.q_ids is None and grid.settings.window is None and keys.start == queries.start
    some = p[:, : len(p)] if causality_alone else p
    q_position = origin.query + queries.start + lax.broadcasted_iota(jnp.int32, some.shape, 1)
    k_position = origin.key + keys.start + lax.broadcasted_iota(jnp.int32, some.shape, 0)
    shown = tile.visible(grid.settings, q_position, k_position, grid.num_keys)
    if x.q_ids is not None:
        shown = tile.both(shown, tile.repeat_lanes(x.k_ids[keys, :], p.shape[1]) == x.q_ids[:, queries])
    if shown is None:
        return p
    return tile.concatenate_nonempty([jnp.where(shown, some, 0), p[:, some.shape[1] :]], axis=1)


def _with_diagonal(x: jax.Array, dropped_key: jax.Array, new: jax.Array) -> jax.Array:
    """`x` [keys, queries], whose first key is its first query, with `new` [1, keys] on the diagonal where it is dropped."""
    strips = []
    for first in range(0, len(x), LANES):
        strip = slice(first, first + LANES)
        dropped = tile.is_dropped(lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0), dropped_key[:, strip])
        parts = [x[strip, :first], jnp.where(dropped, new[:, strip], x[strip, strip]), x[strip, strip.stop :]]
        strips.append(tile.concatenate_nonempty(parts, axis=1))
    return tile.concatenate_nonempty(strips, axis=0)
