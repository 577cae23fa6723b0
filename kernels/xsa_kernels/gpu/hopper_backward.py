"""The backward pass for Hopper chips: two kernels in the manner of `hopper`, one for dq and one for dk and dv.

Both recompute the weights from q, k and the log-sum-exp. In the second a program owns its keys and goes through all query heads
that read them: grouped heads are added up in registers, in a fixed order, and no sum is left to another pass. At E = 128 its two
accumulators take more than half of the registers, and several lines below are as they are so that nothing is spilled.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels.backend import Gradients, Outputs, RowGradients
from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu import scores
from xsa_kernels.gpu.hopper_tile import COMPUTE_WARPGROUPS, ROWS, Program, Sweep, along_columns, along_rows
from xsa_kernels.gpu.spans import BlockGrid, Spans, key_spans, query_spans
from xsa_kernels.request import Request
from xsa_kernels.spec import LOG2E

KEYS = 64  # of a key block in the kernel for dq


class _DqShared(NamedTuple):
    """Shared memory of one program of the kernel for dq, and the barriers that guard it.

    Attributes:
      q, dy: a tile of each computing warpgroup's own queries; `q` takes dq in the end.
      k, v: rings of key blocks.
      own_ready: `q` and `dy` are loaded.
      ready, consumed: a slot of `k` (or of `v`) is loaded, or may be loaded again.
    """

    q: Any
    dy: Any
    k: Any
    v: Any
    own_ready: Any
    ready: tuple[Any, Any]
    consumed: tuple[Any, Any]


class _DkvShared(NamedTuple):
    """Shared memory of one program of the kernel for dk and dv, and the barriers that guard it.

    Attributes:
      kv: a tile of each computing warpgroup's own keys, and one of their values, which take dk and dv in the end.
      q_dy: rings of query blocks and of their dy.
      numbers: rings of the log-sum-exp, of delta and, with segments, of the ids of the queries.
      own_ready: `kv` is loaded.
      ready, consumed: a slot of the rings is loaded, or may be loaded again.
    """

    kv: tuple[Any, Any]
    q_dy: tuple[Any, Any]
    numbers: list[Any]
    own_ready: Any
    ready: Any
    consumed: Any


class _OwnRows(NamedTuple):
    """What a computing warpgroup holds of its 64 query rows (in the kernel for dq) in registers; None without the feature."""

    lse: jax.Array
    delta: jax.Array
    keeps_diagonal: jax.Array | None
    q_ids: jax.Array | None


class _OwnKeys(NamedTuple):
    """What a computing warpgroup holds of its 64 keys (in the kernel for dk and dv) in registers; None without the feature."""

    keeps_diagonal: jax.Array | None
    k_ids: jax.Array | None


def backward_main(request: Request, outputs: Outputs, rows: RowGradients, *, interpret: bool) -> Gradients:
    """The protocol `backend.BackwardMain`."""
    keeps_diagonal = None if rows.keeps_diagonal_BKT is None else rows.keeps_diagonal_BKT.astype(jnp.float32)
    inputs = {
        # q and dy are zero beyond their ends, so those rows add nothing.
        "q": tile.copyable(request.q_BTHE),
        "k": tile.copyable(request.k_BSKE),
        "v": tile.copyable(request.v_BSKE),
        "dy": tile.copyable(rows.dy_BTHE),
        "lse": tile.padded(outputs.lse_BHT, 2),
        "delta": tile.padded(rows.delta_BHT, 2),
        "keeps_diagonal": tile.padded(keeps_diagonal, 2),
    }
    dq_grid = BlockGrid.of(request, COMPUTE_WARPGROUPS * ROWS, KEYS)
    dkv_grid = dataclasses.replace(dq_grid, block_t=ROWS, block_s=COMPUTE_WARPGROUPS * ROWS)
    dq_segments = tile.segment_inputs(dq_grid, request.segment_ids_BS, of_keys=False)
    dkv_segments = tile.segment_inputs(dkv_grid, request.segment_ids_BS, of_keys=True)
    dq = _launch_dq(dq_grid, inputs | dq_segments, interpret)
    dk, dv = _launch_dkv(dkv_grid, inputs | {"dv_start": tile.padded(rows.dv_start_BTKE, 1)} | dkv_segments, interpret)
    return Gradients(dq[:, : dq_grid.T], dk[:, : dq_grid.S], dv[:, : dq_grid.S])


def _launch_dq(grid: BlockGrid, inputs: dict[str, Any], interpret: bool) -> jax.Array:
    q = jax.ShapeDtypeStruct(inputs["q"].shape, inputs["q"].dtype)
    slots = min(3, pl.cdiv(grid.S, KEYS))
    own = plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS, grid.E), q.dtype, transforms=tile.tiling(grid.E))
    ring = plgpu.SMEM((slots, KEYS, grid.E), q.dtype, transforms=tile.tiling(grid.E))
    loaded, used = plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=slots)
    shared = _DqShared(
        q=own,
        dy=own,
        k=ring,
        v=ring,
        own_ready=plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE_WARPGROUPS),
        ready=(loaded, loaded),
        consumed=(used, used),
    )
    launch_grid = (q.shape[2], pl.cdiv(grid.T, grid.block_t), q.shape[0])
    kernel = functools.partial(_dq_kernel, grid)
    return tile.launch(kernel, "attention_dq", inputs, {"dq": q}, shared, launch_grid, interpret)["dq"]


def _dq_kernel(grid: BlockGrid, refs: Any, shared: _DqShared) -> None:
    """dq of one block of queries of one head."""
    wg, program = lax.axis_index("wg"), Program.of_queries(grid, refs)
    segment_spans = refs.segment_spans.at[program.batch, program.block] if grid.segments else None

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        _compute_dq(grid, program, wg, segment_spans, refs, shared)

    @pl.when(wg == COMPUTE_WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(tile.LOAD_REGISTERS, action="decrease")
        sweep = Sweep.over(key_spans(grid, program.block, segment_spans))
        tile.load_keys_and_values(grid, program, sweep, refs, shared)


def _compute_dq(grid: BlockGrid, program: Program, wg: jax.Array, segment_spans: Any, refs: Any, shared: _DqShared) -> None:
    """What a computing warpgroup does for its 64 queries."""
    batch, _, head, kv_head = program
    rows = pl.ds(program.block * grid.block_t + wg * ROWS, ROWS)
    q, dy, ready = shared.q.at[wg], shared.dy.at[wg], shared.own_ready.at[wg]
    plgpu.copy_gmem_to_smem(refs.q.at[batch, rows, head], q, ready)
    plgpu.copy_gmem_to_smem(refs.dy.at[batch, rows, head], dy, ready)
    layout = tile.row_layout()
    own = _OwnRows(
        lse=tile.load(refs.lse.at[batch, head, rows], layout) * LOG2E,
        delta=tile.load(refs.delta.at[batch, head, rows], layout),
        keeps_diagonal=None if refs.keeps_diagonal is None else tile.load(refs.keeps_diagonal.at[batch, kv_head, rows], layout),
        q_ids=tile.load(refs.q_ids.at[batch, rows], layout) if grid.segments else None,
    )
    sweep = Sweep.over(key_spans(grid, program.block, segment_spans))
    plgpu.barrier_wait(ready)
    dq = sweep.run(functools.partial(_add_key_block, grid, program, sweep, own, refs, shared), tile.zeros(ROWS, grid.E))
    plgpu.commit_smem()
    q[...] = (dq * grid.settings.scale).astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, refs.dq.at[batch, rows, head])
    plgpu.wait_smem_to_gmem(0)


def _add_key_block(
    grid: BlockGrid,
    program: Program,
    sweep: Sweep,
    own: _OwnRows,
    refs: Any,
    shared: _DqShared,
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
    p = jnp.exp2(s * factor - along_rows(own.lse, s.shape))
    if masked:
        first_key = sweep.masked_block(n) * KEYS
        query, key = tile.positions(program.block * grid.block_t + wg * ROWS + grid.offset, first_key, s.shape)
        shown = scores.visible(grid, query, key)
        if own.q_ids is not None:
            k_ids = tile.load(refs.k_ids.at[program.batch, pl.ds(first_key, KEYS)], tile.column_layout())
            shown &= along_rows(own.q_ids, s.shape) == along_columns(k_ids, s.shape)
        p = jnp.where(shown, p, 0.0)
        if own.keeps_diagonal is not None:
            dp = jnp.where(query == key, dp * along_rows(own.keeps_diagonal, dp.shape), dp)
    ds = p * (dp - along_rows(own.delta, s.shape))
    if grid.settings.softcap is not None:
        ds *= 1.0 - s * s
    (dq,) = tile.add_products((dq, ds.astype(shared.k.dtype), shared.k.at[slot]))
    plgpu.barrier_arrive(shared.consumed[0].at[slot])
    return dq


def _launch_dkv(grid: BlockGrid, inputs: dict[str, Any], interpret: bool) -> tuple[jax.Array, jax.Array]:
    k = jax.ShapeDtypeStruct(inputs["k"].shape, inputs["k"].dtype)
    slots = 3
    own = plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS, grid.E), k.dtype, transforms=tile.tiling(grid.E))
    ring = plgpu.SMEM((slots, ROWS, grid.E), k.dtype, transforms=tile.tiling(grid.E))
    numbers = [plgpu.SMEM((slots, ROWS), kind) for kind in (jnp.float32, jnp.float32, *([jnp.int32] if grid.segments else []))]
    shared = _DkvShared(
        kv=(own, own),
        q_dy=(ring, ring),
        numbers=numbers,
        own_ready=plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE_WARPGROUPS),
        ready=plgpu.Barrier(num_arrivals=2 + len(numbers), num_barriers=slots),
        consumed=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=slots),
    )
    launch_grid = (k.shape[2], pl.cdiv(grid.S, grid.block_s), k.shape[0])
    kernel = functools.partial(_dkv_kernel, grid)
    out = tile.launch(kernel, "attention_dkv", inputs, {"dk": k, "dv": k}, shared, launch_grid, interpret)
    return out["dk"], out["dv"]


def _dkv_kernel(grid: BlockGrid, refs: Any, shared: _DkvShared) -> None:
    """dk and dv of one block of keys of one KV head: the sum over all its query heads."""
    wg, kv_head, block, batch = (lax.axis_index(name) for name in ("wg", "head", "block", "batch"))
    group = jnp.int32(refs.q.shape[2] // refs.k.shape[2])
    segment_spans = refs.segment_spans.at[batch, block] if grid.segments else None

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        _compute_dkv(grid, wg, kv_head, block, batch, group, segment_spans, refs, shared)

    @pl.when(wg == COMPUTE_WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(tile.LOAD_REGISTERS, action="decrease")
        _load_queries(grid, kv_head, batch, group, query_spans(grid, block, segment_spans), refs, shared)


def _compute_dkv(
    grid: BlockGrid,
    wg: jax.Array,
    kv_head: jax.Array,
    block: jax.Array,
    batch: jax.Array,
    group: jax.Array,
    segment_spans: Any,
    refs: Any,
    shared: _DkvShared,
) -> None:
    """What a computing warpgroup does for its 64 keys."""
    keys = pl.ds(block * grid.block_s + wg * ROWS, ROWS)
    kv, ready, layout = [buffer.at[wg] for buffer in shared.kv], shared.own_ready.at[wg], tile.row_layout()
    for source, buffer in zip((refs.k, refs.v), kv, strict=True):
        plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], buffer, ready)
    own = _OwnKeys(
        keeps_diagonal=None if refs.keeps_diagonal is None else tile.load(refs.keeps_diagonal.at[batch, kv_head, keys], layout),
        k_ids=tile.load(refs.k_ids.at[batch, keys], layout) if grid.segments else None,
    )
    dk = tile.zeros(ROWS, grid.E)
    dv = dk if refs.dv_start is None else tile.load(refs.dv_start.at[batch, keys, kv_head], plgpu.Layout.WGMMA)
    plgpu.barrier_wait(ready)
    step = functools.partial(_add_query_block, grid, block, own, shared)
    dk, dv = _sweep_group(query_spans(grid, block, segment_spans), group, step, (dk, dv))
    plgpu.commit_smem()
    for value, buffer, target in zip((dk * grid.settings.scale, dv), kv, (refs.dk, refs.dv), strict=True):
        buffer[...] = value.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target.at[batch, keys, kv_head])
    plgpu.wait_smem_to_gmem(0)


def _load_queries(
    grid: BlockGrid, kv_head: jax.Array, batch: jax.Array, group: jax.Array, spans: Spans, refs: Any, shared: _DkvShared
) -> None:
    """What the loading warpgroup does: it fills the rings in the order of `_sweep_group`."""
    num_unmasked, num_masked = spans.number(masked=False), spans.number(masked=True)

    def fetch(n: jax.Array, slot: jax.Array) -> None:
        unmasked = n < group * num_unmasked
        number = jnp.where(unmasked, num_unmasked, num_masked)
        n = jnp.where(unmasked, n, n - group * num_unmasked)
        head, n = kv_head * group + lax.div(n, number), lax.rem(n, number)
        first = jnp.where(unmasked, spans.block(n, masked=False), spans.block(n, masked=True)) * grid.block_t
        rows = pl.ds(first, grid.block_t)
        copies = [(ref.at[batch, rows, head], ring) for ref, ring in zip((refs.q, refs.dy), shared.q_dy, strict=True)]
        numbers = [refs.lse.at[batch, head, rows], refs.delta.at[batch, head, rows]]
        numbers += [refs.q_ids.at[batch, rows]] if grid.segments else []
        for source, ring in (*copies, *zip(numbers, shared.numbers, strict=True)):
            plgpu.copy_gmem_to_smem(source, ring.at[slot], shared.ready.at[slot])

    tile.fill_ring(group * (num_unmasked + num_masked), shared.ready.shape[0], (shared.consumed,), fetch)


def _sweep_group(spans: Spans, group: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
    """First the blocks that need no mask, of every query head of the group, then those that do.

    In loops of their own, so that no number which only a mask needs is alive where most of the time goes.
    """
    num_unmasked, num_masked = spans.number(masked=False), spans.number(masked=True)

    def masked_of_head(head: jax.Array, carry: Any) -> Any:
        start = group * num_unmasked + head * num_masked
        return lax.fori_loop(0, num_masked, lambda n, carry: step(start + n, carry, spans.block(n, masked=True)), carry)

    carry = lax.fori_loop(0, group * num_unmasked, step, carry)
    return lax.fori_loop(0, group, masked_of_head, carry)


def _add_query_block(
    grid: BlockGrid,
    block: jax.Array,
    own: _OwnKeys,
    shared: _DkvShared,
    n: jax.Array,
    carry: tuple[jax.Array, jax.Array],
    masked_block: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(dk, dv) after the query block of step n. `masked_block` is its number where it needs the mask."""
    dk, dv = carry
    wg, slot = tile.warpgroup(), lax.rem(n, jnp.int32(shared.ready.shape[0]))
    q, dy = (ring.at[slot] for ring in shared.q_dy)
    lse, delta, *q_ids = (ring.at[slot] for ring in shared.numbers)
    plgpu.barrier_wait(shared.ready.at[slot])
    s, dp = tile.products((shared.kv[0].at[wg], q), (shared.kv[1].at[wg], dy))
    lse = tile.load(lse, tile.column_layout()) * LOG2E
    s, factor = scores.base2_scores(grid.settings, s)
    p = jnp.exp2(s * factor - along_columns(lse, s.shape))
    slope = p if grid.settings.softcap is None else p * (1.0 - s * s)
    if masked_block is not None:
        key, query = tile.positions(block * grid.block_s + wg * ROWS, masked_block * grid.block_t + grid.offset, s.shape)
        shown = scores.visible(grid, query, key)
        if own.k_ids is not None:
            shown &= along_rows(own.k_ids, s.shape) == along_columns(tile.load(q_ids[0], tile.column_layout()), s.shape)
        p, slope = lax.optimization_barrier((jnp.where(shown, p, 0.0), jnp.where(shown, slope, 0.0)))
        if own.keeps_diagonal is not None:
            dropped = (query == key) & (along_rows(own.keeps_diagonal, s.shape) == 0)
            p, dp = jnp.where(dropped, 0.0, p), jnp.where(dropped, 0.0, dp)
    # In this order the fewest numbers are alive at once.
    p, dp, slope = lax.optimization_barrier((p.astype(q.dtype), dp, slope))
    delta = tile.load(delta, tile.column_layout())
    plgpu.commit_smem()  # the numbers are read, and the next copy may take their place
    ds = slope * (dp - along_columns(delta, s.shape))
    dv, dk = tile.add_products((dv, p, dy), (dk, ds.astype(q.dtype), q))
    plgpu.barrier_arrive(shared.consumed.at[slot])
    return dk, dv
