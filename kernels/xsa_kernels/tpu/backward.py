"""The backward kernel: one pass over the blocks makes dq, dk and dv, with five matrix products per pair of blocks instead of seven.

Key blocks are the outer loop, so dk and dv of one block accumulate in place, while dq of a whole KV group accumulates in VMEM
beside them. Each block of dq is written when the last key block that it sees is done. Where dq does not fit, the queries are cut
into chunks.

The key blocks are visited from the last to the first. Under a causal mask a block of queries then meets its own tokens first, and
the row-local half of the backward pass (`rows`) happens there, hidden behind the matrix products: the values at hand are the rows'
own, dy and delta stay in VMEM for the visits that follow, and dv starts from the gradient that the projection gives it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.request import Request
from xsa_kernels.tpu import backward_body as body
from xsa_kernels.tpu import schedule
from xsa_kernels.tpu.backward_body import Inputs, Scratch, Steps
from xsa_kernels.tpu.schedule import COMPUTE, DIAGONAL, FIRST_VISIT, LAST_VISIT, MASKED, BlockGrid, Blocks
from xsa_kernels.tpu.tile import LANES

# For what rows keep in VMEM from their first visit to their last: dq in float32 and, with the projection, dy.
ROW_BYTES = 12 * 2**20
VMEM_BYTES = 48 * 2**20


class _Rows(NamedTuple):
    """What the kernel reads of the query rows; `Inputs` says when it reads what."""

    q_BTHE: jax.Array
    dz_BTHE: jax.Array
    lse_BHT: jax.Array
    c_BHT: jax.Array | None = None
    z_BTHE: jax.Array | None = None
    delta_BHT: jax.Array | None = None
    keeps_diagonal_BKT: jax.Array | None = None

    def at(self, t: slice) -> "_Rows":
        """The rows of some query positions."""
        return jax.tree.map(lambda x: x[:, t] if x.ndim == 4 else x[:, :, t], self)


def fused_backward(
    request: Request, outputs: Outputs, dz_BTHE: jax.Array, *, blocks: Blocks | None, interpret: Any
) -> tuple[Gradients, jax.Array] | None:
    """The protocol `backend.FusedBackward`: with a projection, for causal masks and dropped diagonals."""
    settings, blocks = request.settings, _fitting(blocks, request)
    if settings.zero_rule is not None and not (settings.drop_diagonal and settings.causal and blocks.q == blocks.kv):
        return None
    rows = _Rows(request.q_BTHE, dz_BTHE, outputs.lse_BHT, c_BHT=outputs.c_BHT, z_BTHE=outputs.z_BTHE)
    return _in_chunks(request, rows, None, blocks, interpret)


def backward_main(request: Request, outputs: Outputs, rows: RowGradients, *, blocks: Blocks | None, interpret: Any) -> Gradients:
    """The protocol `backend.BackwardMain`."""
    given = _Rows(
        request.q_BTHE,
        rows.dy_BTHE,
        outputs.lse_BHT,
        delta_BHT=rows.delta_BHT,
        keeps_diagonal_BKT=rows.keeps_diagonal_BKT,
    )
    return _in_chunks(request, given, rows.dv_start_BTKE, _fitting(blocks, request), interpret)[0]


def _fitting(blocks: Blocks | None, request: Request) -> Blocks:
    return (blocks or schedule.backward_blocks()).fit(request.q_BTHE.shape[1], request.k_BSKE.shape[1])


def _in_chunks(
    request: Request, rows: _Rows, dv_start_BTKE: jax.Array | None, blocks: Blocks, interpret: Any
) -> tuple[Gradients, jax.Array]:
    """The gradients and delta_BHT, from as many query rows at a time as fit into VMEM."""
    (_, T, H, E), (_, S, K, _) = rows.q_BTHE.shape, request.k_BSKE.shape
    # E in sublanes, of which a bfloat16 register has 16
    row_bytes = H // K * schedule.round_up(E, 16) * (4 + (0 if rows.c_BHT is None else rows.q_BTHE.dtype.itemsize))
    while blocks.q > LANES and blocks.q * row_bytes > ROW_BYTES:  # many query heads on a KV head
        blocks = blocks.fit(blocks.q // 2, blocks.q // 2)
    size = max(ROW_BYTES // (blocks.q * row_bytes), 1) * blocks.q
    parts = []
    for first in range(0, T, size):
        t = slice(first, min(first + size, T))
        grid = BlockGrid(request.settings, t.stop - first, S, S - T + first, blocks)
        parts.append(_chunk(grid, request, rows.at(t), None if first else dv_start_BTKE, size < T, interpret))
    dq, dk, dv, delta = zip(*parts, strict=True)
    dk_BSKE, dv_BSKE = _sum(dk).astype(request.k_BSKE.dtype), _sum(dv).astype(request.v_BSKE.dtype)
    return Gradients(jnp.concatenate(dq, axis=1), dk_BSKE, dv_BSKE), jnp.concatenate(delta, axis=2)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _chunk(
    grid: BlockGrid, request: Request, rows: _Rows, dv_start_BTKE: jax.Array | None, partial: bool, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv and delta of the queries of one chunk; dk and dv are float32 where they are `partial` sums."""
    (B, T, H, E), (_, S, K, _) = rows.q_BTHE.shape, request.k_BSKE.shape
    G, bq, bkv = H // K, grid.blocks.q, grid.blocks.kv
    steps, kinds = _steps(grid, G, request.segment_ids_BS)
    num_steps = len(steps.i)
    step_index = functools.partial(schedule.step_index, None if request.segment_ids_BS is None else num_steps)
    arrays = _arrays(grid, request, rows, dv_start_BTKE)
    specs, dq_spec, delta_spec = _specs(grid, step_index, arrays)
    wide = jnp.float32
    scratch = Scratch(*(pltpu.VMEM((E, length), wide) for length in (G * grid.padded_T, bkv, bkv)))
    if rows.c_BHT is not None:
        scratch = scratch._replace(dy=pltpu.VMEM((E, G * grid.padded_T), arrays.q.dtype))
    cells = B * K * num_steps * bq * bkv
    dq, dk, dv, delta = pl.pallas_call(
        functools.partial(body.kernel, grid, step_index, kinds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(B, K, num_steps),
            in_specs=[specs],
            out_specs=[dq_spec, specs.k, specs.v, delta_spec],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
            jax.ShapeDtypeStruct(arrays.k.shape, wide if partial else arrays.k.dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, wide if partial else arrays.v.dtype),
            jax.ShapeDtypeStruct((B, K, 1, G * grid.padded_T), wide),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * cells * E, transcendentals=cells, bytes_accessed=2 * sum(x.nbytes for x in arrays if x is not None)
        ),
        interpret=interpret,
        name="xsa_backward" if grid.settings.drop_diagonal else "attention_backward",
    )(*steps, arrays)
    dq_BTHE = dq.reshape(B, H, grid.padded_T, E)[:, :, :T].swapaxes(1, 2)
    delta_BHT = delta.reshape(B, H, grid.padded_T)[:, :, :T]
    return dq_BTHE, dk[:, :, :S].swapaxes(1, 2), dv[:, :, :S].swapaxes(1, 2), delta_BHT


def _arrays(grid: BlockGrid, request: Request, rows: _Rows, dv_start_BTKE: jax.Array | None) -> Inputs:
    """What the kernel reads, padded to whole blocks."""
    B, _, K, E = request.k_BSKE.shape

    def by_group(x_BTHE: jax.Array) -> jax.Array:
        return schedule.heads_first(x_BTHE, grid.padded_T).reshape(B, K, -1, E)

    def padded(x_BHT: jax.Array, fill: float = 0.0) -> jax.Array:
        return jnp.pad(x_BHT, ((0, 0), (0, 0), (0, grid.padded_T - grid.T)), constant_values=fill)

    # An infinite log-sum-exp keeps the weights of padded rows 0. XLA sees that the two came in one array, and copies nothing.
    stats = [padded(rows.lse_BHT, jnp.inf), *([] if rows.c_BHT is None else [padded(rows.c_BHT)])]
    k, v = (schedule.heads_first(x, grid.padded_S) for x in (request.k_BSKE, request.v_BSKE))
    arrays = Inputs(q=by_group(rows.q_BTHE), dz=by_group(rows.dz_BTHE), k=k, v=v, stats=jnp.stack(stats, axis=2))
    if rows.z_BTHE is not None:
        arrays = arrays._replace(z=by_group(rows.z_BTHE))
    if rows.delta_BHT is not None:
        arrays = arrays._replace(delta=padded(rows.delta_BHT).reshape(B, K, 1, -1))
    if rows.keeps_diagonal_BKT is not None:
        dropped_key = jnp.where(rows.keeps_diagonal_BKT, -1, grid.offset + jnp.arange(grid.T, dtype=jnp.int32))
        arrays = arrays._replace(dropped_key=padded(dropped_key, -1)[:, :, None])
    if dv_start_BTKE is not None:
        arrays = arrays._replace(dv_start=schedule.heads_first(dv_start_BTKE, grid.padded_S))
    if request.segment_ids_BS is not None:
        q_ids, k_ids = schedule.ids_for_tiles(request.segment_ids_BS, grid)
        arrays = arrays._replace(q_ids=q_ids, k_ids=k_ids)
    return arrays


def _specs(grid: BlockGrid, step_index: Callable[..., Any], arrays: Inputs) -> tuple[Inputs, pl.BlockSpec, pl.BlockSpec]:
    """The block specs of the inputs, of dq, and of delta, of which VMEM holds all rows of a KV head."""
    (_, _, num_rows, E), num_stats = arrays.q.shape, arrays.stats.shape[2]
    G, bq, bkv = num_rows // grid.padded_T, grid.blocks.q, grid.blocks.kv
    Which = Callable[[Any, Any, Steps], Any]  # the block of a step, from (batch row, step, lists)

    def vectors(which: Which) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, bq, E), lambda b, k, n, *steps: (b, k, which(b, n, Steps(*steps)), 0))

    def numbers(which: Which) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, 1, bq), lambda b, k, n, *steps: (b, k, 0, which(b, n, Steps(*steps))))

    def loaded(b: Any, n: Any, steps: Steps) -> Any:
        return steps.loaded[step_index(b, n)]

    def first_visited(b: Any, n: Any, steps: Steps) -> Any:
        return steps.first_visited[n]

    def stats(b: Any, k: Any, n: Any, *steps: Any) -> tuple[Any, ...]:
        head, i = divmod(loaded(b, n, Steps(*steps)), grid.padded_T // bq)
        return b, k * G + head, 0, i

    keys = pl.BlockSpec((None, None, bkv, E), lambda b, k, n, *steps: (b, k, Steps(*steps).j[n], 0))
    specs = Inputs(
        q=vectors(loaded),
        dz=vectors(loaded if num_stats == 1 else first_visited),
        stats=pl.BlockSpec((None, None, num_stats, bq), stats),
        k=keys,
        v=keys,
        z=vectors(first_visited),
        delta=numbers(first_visited),
        dropped_key=numbers(lambda b, n, steps: steps.i[n]),
        dv_start=keys,
        q_ids=pl.BlockSpec((None, 1, bq), lambda b, k, n, *steps: (b, 0, Steps(*steps).i[n])),
        k_ids=pl.BlockSpec((None, bkv, LANES), lambda b, k, n, *steps: (b, Steps(*steps).j[n], 0)),
    )
    specs = Inputs(*(None if x is None else spec for x, spec in zip(arrays, specs, strict=True)))
    delta_spec = pl.BlockSpec((None, None, 1, num_rows), lambda b, k, n, *_: (b, k, 0, 0))
    return specs, vectors(lambda b, n, steps: steps.finished[n]), delta_spec


def _steps(grid: BlockGrid, G: int, segment_ids_BS: jax.Array | None) -> tuple[Steps, frozenset[int]]:
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
    flags |= schedule.first_and_last(j)
    flags[computes[np.unique(row[computes], return_index=True)[1]]] |= FIRST_VISIT
    last = computes[::-1][np.unique(row[computes[::-1]], return_index=True)[1]]
    flags[last] |= LAST_VISIT

    def latest(bit: int) -> np.ndarray:
        """The row of the latest step that has this bit or, before there is one, of the first."""
        having = np.flatnonzero(flags & bit)
        return row[having[np.maximum(np.searchsorted(having, np.arange(len(row)), side="right") - 1, 0)]]

    # The block of dq in VMEM is the one finished last, or first of all: every block is written out once, when the next is finished.
    flags_, loaded = schedule.with_segments(segment_ids_BS, grid, i, j, flags, row)
    kinds = schedule.kinds(flags, segment_ids_BS)
    return Steps(i, j, flags_, row, loaded, latest(FIRST_VISIT), latest(LAST_VISIT)), kinds
