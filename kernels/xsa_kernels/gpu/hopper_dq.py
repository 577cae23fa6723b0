"""The Hopper kernel for dq: a program owns a block of queries of one head, and goes through the keys that they see."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu import scores
from xsa_kernels.gpu.hopper_tile import COMPUTE_WARPGROUPS, ROWS, Program, Sweep, along_columns, along_rows
from xsa_kernels.gpu.spans import BlockGrid, key_spans
from xsa_kernels.spec import LOG2E

KEYS = 64  # of a key block


class _Shared(NamedTuple):
    """Shared memory of one program, and the barriers that guard it.

    Attributes:
      q, dy: a tile of each computing warpgroup's own queries; `q` takes dq in the end.
      k, v: rings of key blocks.
      rows_ready: `q` and `dy` are loaded.
      ready, consumed: a slot of `k` (or of `v`) is loaded, or may be loaded again.
    """

    q: Any
    dy: Any
    k: Any
    v: Any
    rows_ready: Any
    ready: tuple[Any, Any]
    consumed: tuple[Any, Any]


class _Rows(NamedTuple):
    """What a computing warpgroup holds of its 64 query rows in registers; None for what a call does not have."""

    lse: jax.Array
    delta: jax.Array
    keeps_diagonal: jax.Array | None
    q_ids: jax.Array | None


def launch(grid: BlockGrid, inputs: dict[str, Any], interpret: bool) -> jax.Array:
    """dq, as long as the input q."""
    q = jax.ShapeDtypeStruct(inputs["q"].shape, inputs["q"].dtype)
    slots = min(3, pl.cdiv(grid.S, KEYS))
    tiles = plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS, grid.E), q.dtype, transforms=tile.tiling(grid.E))
    ring = plgpu.SMEM((slots, KEYS, grid.E), q.dtype, transforms=tile.tiling(grid.E))
    loaded, used = plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=slots)
    shared = _Shared(
        q=tiles,
        dy=tiles,
        k=ring,
        v=ring,
        rows_ready=plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE_WARPGROUPS),
        ready=(loaded, loaded),
        consumed=(used, used),
    )
    launch_grid = (q.shape[2], pl.cdiv(grid.T, grid.block_t), q.shape[0])
    kernel = functools.partial(_kernel, grid)
    return tile.launch(kernel, "attention_dq", inputs, {"dq": q}, shared, launch_grid, interpret)["dq"]


def _kernel(grid: BlockGrid, refs: Any, shared: _Shared) -> None:
    """dq of one block of queries of one head."""
    wg, program = lax.axis_index("wg"), Program.of_queries(grid, refs)
    segment_spans = refs.segment_spans.at[program.batch, program.block] if grid.segments else None

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        _compute(grid, program, wg, segment_spans, refs, shared)

    @pl.when(wg == COMPUTE_WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(tile.LOAD_REGISTERS, action="decrease")
        sweep = Sweep.over(key_spans(grid, program.block, segment_spans))
        tile.load_keys_and_values(grid, program, sweep, refs, shared)


def _compute(grid: BlockGrid, program: Program, wg: jax.Array, segment_spans: Any, refs: Any, shared: _Shared) -> None:
    """What a computing warpgroup does for its 64 queries."""
    batch, _, head, kv_head = program
    t = pl.ds(program.block * grid.block_t + wg * ROWS, ROWS)
    q, dy, ready = shared.q.at[wg], shared.dy.at[wg], shared.rows_ready.at[wg]
    plgpu.copy_gmem_to_smem(refs.q.at[batch, t, head], q, ready)
    plgpu.copy_gmem_to_smem(refs.dy.at[batch, t, head], dy, ready)
    layout = tile.row_layout()
    rows = _Rows(
        lse=tile.load(refs.lse.at[batch, head, t], layout) * LOG2E,
        delta=tile.load(refs.delta.at[batch, head, t], layout),
        keeps_diagonal=None if refs.keeps_diagonal is None else tile.load(refs.keeps_diagonal.at[batch, kv_head, t], layout),
        q_ids=tile.load(refs.q_ids.at[batch, t], layout) if grid.segments else None,
    )
    sweep = Sweep.over(key_spans(grid, program.block, segment_spans))
    plgpu.barrier_wait(ready)
    dq = sweep.run(functools.partial(_add_key_block, grid, program, sweep, rows, refs, shared), tile.zeros(ROWS, grid.E))
    plgpu.commit_smem()
    q[...] = (dq * grid.settings.scale).astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, refs.dq.at[batch, t, head])
    plgpu.wait_smem_to_gmem(0)


def _add_key_block(
    grid: BlockGrid,
    program: Program,
    sweep: Sweep,
    rows: _Rows,
    refs: Any,
    shared: _Shared,
    n: jax.Array,
    dq: jax.Array,
    *,
    masked: bool,
) -> jax.Array:
    """dq after the key block of step n."""
    wg, slot = tile.warpgroup(), lax.rem(n, jnp.int32(shared.k.shape[0]))
    plgpu.barrier_wait(shared.ready[0].at[slot])
    plgpu.barrier_wait(shared.ready[1].at[slot])
    s, dp = tile.products((shared.q.at[wg], shared.k.at[slot]), (shared.dy.at[wg], shared.v.at[slot]))
    plgpu.barrier_arrive(shared.consumed[1].at[slot])
    s, factor = scores.base2_scores(grid.settings, s)
    p = jnp.exp2(s * factor - along_rows(rows.lse, s.shape))
    if masked:
        first_key = sweep.masked_block(n) * KEYS
        query, key = tile.positions(program.block * grid.block_t + wg * ROWS + grid.offset, first_key, s.shape)
        shown = scores.visible(grid, query, key)
        if rows.q_ids is not None:
            k_ids = tile.load(refs.k_ids.at[program.batch, pl.ds(first_key, KEYS)], tile.column_layout())
            shown &= along_rows(rows.q_ids, s.shape) == along_columns(k_ids, s.shape)
        p = jnp.where(shown, p, 0.0)
        if rows.keeps_diagonal is not None:
            dp = jnp.where(query == key, dp * along_rows(rows.keeps_diagonal, dp.shape), dp)
    ds = p * (dp - along_rows(rows.delta, s.shape))
    if grid.settings.softcap is not None:
        ds *= 1.0 - s * s
    (dq,) = tile.add_products((dq, ds.astype(shared.k.dtype), shared.k.at[slot]))
    plgpu.barrier_arrive(shared.consumed[0].at[slot])
    return dq
