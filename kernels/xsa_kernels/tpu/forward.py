"""The forward kernel: FlashAttention (arXiv 2205.14135) over a list of blocks, with the projection before the only write of z.

Tiles of scores have the keys in sublanes and the queries in lanes; y and the values have E in sublanes. What the softmax and the
projection need of a row (its maximum, its sum, |v|^2 and y . v) is then computed by adding whole registers, and one register holds
it for 128 rows. With queries in sublanes each of these would be a reduction over lanes, and one register would hold it for eight.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsa_kernels.backend import Outputs
from xsa_kernels.request import Request, Settings
from xsa_kernels.spec import LOG2E, LOWEST
from xsa_kernels.tpu import schedule, tile
from xsa_kernels.tpu.schedule import COMPUTE, DIAGONAL, FIRST, KIND, LAST, MASKED, BlockGrid, Blocks
from xsa_kernels.tpu.tile import LANES, SUBLANES, Origin


class _Inputs(NamedTuple):
    """Arrays, their block specs, or the kernel's references to them; None for what a call does not have.

    `v_self` is None also where the kernel finds the tokens' own values in the last block of `v` (`BlockGrid.triangular`).
    """

    q: Any
    k: Any
    v: Any
    v_self: Any = None
    q_ids: Any = None
    k_ids: Any = None
    sinks: Any = None
    alpha: Any = None


class _Steps(NamedTuple):
    """The lists that the grid's last axis walks: query block, key block, flags, and the key block that is loaded."""

    i: Any
    j: Any
    flags: Any
    loaded: Any


class _Accumulators(NamedTuple):
    """What is known of each query, in lanes, from the key blocks so far.

    Attributes:
      y: [E, queries], the output before it is divided by the sum of the weights.
      maximum: [1, queries], the largest score.
      sums: [8, queries], partial sums of the weights.
      dropped_key: [1, queries], see `tile.is_dropped`; None where nothing is dropped, or only in a block on the diagonal.
    """

    y: Any
    maximum: Any
    sums: Any
    dropped_key: Any = None


def forward(request: Request, *, blocks: Blocks | None, interpret: Any) -> Outputs:
    """The protocol `backend.Forward`."""
    settings, q_BTHE = request.settings, request.q_BTHE
    (B, T, H, E), S = q_BTHE.shape, request.k_BSKE.shape[1]
    grid = BlockGrid(settings, T, S, S - T, (blocks or schedule.forward_blocks(E)).fit(T, S))
    bq, bkv = grid.blocks.q, grid.blocks.kv
    steps, kinds = _steps(grid, request.segment_ids_BS)
    num_steps = len(steps.i)
    step_index = functools.partial(schedule.step_index, None if request.segment_ids_BS is None else num_steps)
    arrays, specs = _inputs(grid, step_index, request)
    # The log-sum-exp and c in one array: a grid step pays for every output. The backward kernel reads them together.
    num_stats = 1 if settings.zero_rule is None else 2
    scratch = _Accumulators(*(pltpu.VMEM((height, bq), jnp.float32) for height in (E, 1, SUBLANES)))
    if settings.drop_diagonal and not grid.triangular:
        scratch = scratch._replace(dropped_key=pltpu.VMEM((1, bq), jnp.int32))
    cells = B * H * num_steps * bq * bkv
    z_BHTE, stats_BHNT = pl.pallas_call(
        functools.partial(_kernel, grid, step_index, kinds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(B, H, num_steps),
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
        name="attention_forward" if settings.zero_rule is None else "xsa_forward",
    )(*steps, arrays)
    lse_BHT, *c_BHT = (stats_BHNT[:, :, row, :T] for row in range(num_stats))
    return Outputs(z_BHTE[:, :, :T].swapaxes(1, 2), lse_BHT, c_BHT[0] if c_BHT else None)


def _steps(grid: BlockGrid, segment_ids_BS: jax.Array | None) -> tuple[_Steps, frozenset[int]]:
    """For every query block the key blocks that it sees, and the kinds of steps that occur."""
    i, j, masked = grid.pairs()
    flags = schedule.first_and_last(i) | COMPUTE | MASKED * masked | DIAGONAL * grid.on_diagonal(i, j)
    kinds = schedule.kinds(flags, segment_ids_BS)
    return _Steps(i, j, *schedule.with_segments(segment_ids_BS, grid, i, j, flags, j)), kinds


def _inputs(grid: BlockGrid, step_index: Callable[..., Any], request: Request) -> tuple[_Inputs, _Inputs]:
    """What the kernel reads, padded to whole blocks, and the block specs."""
    q_BTHE, k_BSKE, v_BSKE, v_self_BTKE = request.q_BTHE, request.k_BSKE, request.v_BSKE, request.projected_v_BTKE
    (_, _, H, E), K = q_BTHE.shape, k_BSKE.shape[2]
    G, bq, bkv = H // K, grid.blocks.q, grid.blocks.kv
    rows = pl.BlockSpec((None, None, bq, E), lambda b, h, n, i, *_: (b, h, i[n], 0))
    keys = pl.BlockSpec((None, None, bkv, E), lambda b, h, n, i, j, flags, loaded: (b, h // G, loaded[step_index(b, n)], 0))
    arrays = _Inputs(
        schedule.heads_first(q_BTHE, grid.padded_T),
        schedule.heads_first(k_BSKE, grid.padded_S),
        schedule.heads_first(v_BSKE, grid.padded_S),
    )
    specs = _Inputs(rows, keys, keys)
    if v_self_BTKE is not None and not (request.v_self_BTKE is None and grid.triangular):
        arrays = arrays._replace(v_self=schedule.heads_first(v_self_BTKE, grid.padded_T))
        specs = specs._replace(v_self=pl.BlockSpec((None, None, bq, E), lambda b, h, n, i, *_: (b, h // G, i[n], 0)))
    if request.segment_ids_BS is not None:
        q_ids, k_ids = schedule.ids_for_tiles(request.segment_ids_BS, grid)
        arrays = arrays._replace(q_ids=q_ids, k_ids=k_ids)
        specs = specs._replace(
            q_ids=pl.BlockSpec((None, 1, bq), lambda b, h, n, i, *_: (b, 0, i[n])),
            k_ids=pl.BlockSpec((None, bkv, LANES), lambda b, h, n, i, j, flags, loaded: (b, loaded[step_index(b, n)], 0)),
        )
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    if request.sinks_H is not None:
        arrays, specs = arrays._replace(sinks=request.sinks_H.astype(jnp.float32) * LOG2E), specs._replace(sinks=scalars)
    if request.alpha_H is not None:
        arrays, specs = arrays._replace(alpha=request.alpha_H), specs._replace(alpha=scalars)
    return arrays, specs


def _kernel(
    grid: BlockGrid,
    step_index: Callable[..., Any],
    kinds: frozenset[int],
    i_ref: Any,
    j_ref: Any,
    flags_ref: Any,
    _: Any,
    x: _Inputs,
    z_ref: Any,
    stats_ref: Any,
    state: _Accumulators,
) -> None:
    """One step: a block of queries of one head and a block of keys."""
    b, h, n = (pl.program_id(axis) for axis in range(3))
    flags = flags_ref[step_index(b, n)]
    origin = Origin(grid.offset + i_ref[n] * grid.blocks.q, j_ref[n] * grid.blocks.kv)

    pl.when(flags & FIRST != 0)(lambda: _initialise(grid.settings, origin, h, x, state))
    kind = flags & KIND
    if COMPUTE in kinds:
        pl.when(kind == COMPUTE)(lambda: _accumulate_block(grid, None, x, state))
    if COMPUTE | MASKED in kinds:
        pl.when(kind == COMPUTE | MASKED)(lambda: _accumulate_block(grid, origin, x, state))
    if grid.triangular:  # the last block that the queries see is on the diagonal
        pl.when(flags & LAST != 0)(lambda: _finish_on_diagonal(grid, origin, h, x, z_ref, stats_ref, state))
    else:
        pl.when(flags & LAST != 0)(lambda: _finish(grid, h, x, z_ref, stats_ref, state))


def _initialise(settings: Settings, origin: Origin, h: jax.Array, x: _Inputs, state: _Accumulators) -> None:
    """The accumulators of a block of queries before its first keys: empty, but for the sink."""
    state.y[...] = jnp.zeros_like(state.y)
    if x.sinks is None:
        state.maximum[...] = jnp.full_like(state.maximum, LOWEST)
        state.sums[...] = jnp.zeros_like(state.sums)
    else:
        sink = x.sinks[h]
        m = jnp.maximum(sink, LOWEST)
        state.maximum[...] = jnp.full_like(state.maximum, m)
        first_sum = lax.broadcasted_iota(jnp.int32, state.sums.shape, 0) == 0
        state.sums[...] = jnp.where(first_sum, jnp.exp2(jnp.full_like(state.sums, sink) - m), 0)
    if state.dropped_key is not None:
        state.dropped_key[...] = _dropped_key(settings, origin.query, x.v_self[...].T)


def _accumulate_block(grid: BlockGrid, origin: Origin | None, x: _Inputs, state: _Accumulators) -> None:
    """Adds one key block to the accumulators; `origin` is None where the block needs no mask.

    The scores of the next pieces are computed while one piece is added: else the matrix unit would wait for the weights.
    """
    pieces, values = grid.blocks.pieces(), x.v[...].T
    scores: list[jax.Array] = []
    for n, (queries, keys) in enumerate(pieces):
        scores += [_scores(grid, origin, *later, x) for later in pieces[len(scores) : n + grid.blocks.pieces_per_row_slice]]
        dropped = None
        if origin is not None and state.dropped_key is not None:
            k_position = origin.key + keys.start + lax.broadcasted_iota(jnp.int32, scores[n].shape, 0)
            dropped = tile.is_dropped(k_position, state.dropped_key[:, queries])
        new = _accumulate(scores[n], dropped, queries, values[:, keys], state)
        state.y[:, queries], state.maximum[:, queries], state.sums[:, queries] = new.y, new.maximum, new.sums


def _finish_on_diagonal(
    grid: BlockGrid, origin: Origin, h: jax.Array, x: _Inputs, z_ref: Any, stats_ref: Any, state: _Accumulators
) -> None:
    """The last block of queries that see no key after their own: 128 queries at a time, with the keys up to the last of these.

    All scores are computed first, which leaves the compiler most to choose from.
    """
    values = x.v[...].T
    all_v_self = None
    if grid.settings.zero_rule is not None:
        all_v_self = values if x.v_self is None else x.v_self[...].T
    strips = [slice(first, first + LANES) for first in range(0, grid.blocks.q, LANES)]
    scores = [_scores(grid, origin, queries, slice(0, queries.stop), x, num_clear=queries.start) for queries in strips]
    for queries, s in zip(strips, scores, strict=True):
        v_self = None if all_v_self is None else all_v_self[:, queries]
        dropped = None
        if v_self is not None and grid.settings.drop_diagonal:
            dropped_key = _dropped_key(grid.settings, 0, v_self)
            dropped = tile.is_dropped(lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0), dropped_key)
        new = _accumulate(s, dropped, queries, values[:, : queries.stop], state)
        _project_and_store(grid.settings, h, queries, new, v_self, x, z_ref, stats_ref)


def _finish(grid: BlockGrid, h: jax.Array, x: _Inputs, z_ref: Any, stats_ref: Any, state: _Accumulators) -> None:
    """What follows the last key block that a block of queries sees."""
    final = _Accumulators(state.y[...], state.maximum[...], state.sums[...])
    v_self = None if x.v_self is None else x.v_self[...].T
    _project_and_store(grid.settings, h, slice(0, grid.blocks.q), final, v_self, x, z_ref, stats_ref)


def _scores(grid: BlockGrid, origin: Origin | None, queries: slice, keys: slice, x: _Inputs, num_clear: int = 0) -> jax.Array:
    """Base-2 scores, -inf where a key is hidden. Causality hides none of the first `num_clear` keys."""
    settings = grid.settings
    s = tile.base2_scores(settings, tile.dot(x.k[keys, :], x.q[queries, :], tile.NT))
    if origin is None:
        return s
    num_clear = num_clear if x.q_ids is None and settings.window is None else 0
    masked = s[num_clear:]
    q_position = origin.query + queries.start + lax.broadcasted_iota(jnp.int32, masked.shape, 1)
    k_position = origin.key + keys.start + num_clear + lax.broadcasted_iota(jnp.int32, masked.shape, 0)
    shown = tile.visible(settings, q_position, k_position, grid.num_keys)
    if x.q_ids is not None:
        shown = tile.both(shown, tile.repeat_lanes(x.k_ids[keys, :], s.shape[1]) == x.q_ids[:, queries])
    if shown is None:
        return s
    return tile.concatenate_nonempty([s[:num_clear], jnp.where(shown, masked, -jnp.inf)], axis=0)


def _accumulate(s: jax.Array, dropped: jax.Array | None, queries: slice, values: jax.Array, state: _Accumulators) -> _Accumulators:
    """The accumulators of some queries after these scores; y leaves out weights that are `dropped` among the last keys."""
    m_old = state.maximum[:, queries]
    m_new = jnp.maximum(m_old, jnp.max(s, axis=0, keepdims=True))
    p = jnp.exp2(s - m_new)
    shrink = jnp.exp2(m_old - m_new)
    # Sums of every eighth weight: the one reduction within registers waits for the last block.
    sums = shrink * state.sums[:, queries] + jnp.sum(p.reshape(-1, SUBLANES, p.shape[1]), axis=0)
    if dropped is not None:
        before = len(s) - len(dropped)
        p = tile.concatenate_nonempty([p[:before], jnp.where(dropped, 0, p[before:])], axis=0)
    return _Accumulators(shrink * state.y[:, queries] + tile.dot(values, p.astype(values.dtype), tile.NN), m_new, sums)


def _dropped_key(settings: Settings, first: Any, v_self: jax.Array) -> jax.Array:
    """For queries from position `first` on, the key whose weight y leaves out (their own position), or -1; [1, queries]."""
    exact = settings.exact(_squared_norm(v_self))
    return jnp.where(exact, first + lax.broadcasted_iota(jnp.int32, exact.shape, 1), -1)


def _squared_norm(v: jax.Array) -> jax.Array:
    v = v.astype(jnp.float32)
    return tile.row_sum(v * v)


def _project_and_store(
    settings: Settings,
    h: jax.Array,
    queries: slice,
    final: _Accumulators,
    v_self: jax.Array | None,
    x: _Inputs,
    z_ref: Any,
    stats_ref: Any,
) -> None:
    """Projects y along v_self, divides by the sum of the weights and writes z, the log-sum-exp and c."""
    y, total = final.y, tile.row_sum(final.sums)
    stats_ref[:1, queries] = final.maximum * math.log(2) + jnp.log(total)
    if v_self is not None:
        c = tile.row_sum(y * v_self) * settings.inverse(_squared_norm(v_self))
        stats_ref[1:, queries] = c / total
        y -= (c if x.alpha is None else x.alpha[h] * c) * v_self
    z_ref[queries, :] = (y * (1 / total)).astype(z_ref.dtype).T
