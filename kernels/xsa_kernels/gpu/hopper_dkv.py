"""The Hopper kernel for dk and dv: a program owns a block of keys, and goes through all query heads that read them.

The gradients of grouped heads are added up in registers, in a fixed order, so no sum is left to another pass. At E = 128 the two
accumulators take more than half of the registers; the order of several lines below keeps the compiler from spilling others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu import scores
from xsa_kernels.gpu.hopper_tile import COMPUTE_WARPGROUPS, ROWS, along_columns, along_rows
from xsa_kernels.gpu.spans import BlockGrid, Spans, query_spans
from xsa_kernels.spec import LOG2E


class _Shared(NamedTuple):
    """Shared memory of one program, and the barriers that guard it.

    Attributes:
      kv: a tile of each computing warpgroup's own keys, and one of their values, which take dk and dv in the end.
      q_dy: rings of query blocks and of their dy.
      numbers: rings of the log-sum-exp, of delta and, with segments, of the ids of the queries.
      kv_ready: `kv` is loaded.
      ready, consumed: a slot of the rings is loaded, or may be loaded again.
    """

    kv: tuple[Any, Any]
    q_dy: tuple[Any, Any]
    numbers: list[Any]
    kv_ready: Any
    ready: Any
    consumed: Any


class _Program(NamedTuple):
    """The part of a call that one program computes: a block of keys of one KV head, which `group_size` query heads read."""

    batch: jax.Array
    block: jax.Array
    kv_head: jax.Array
    group_size: jax.Array


class _Keys(NamedTuple):
    """What a computing warpgroup holds of its 64 keys in registers; None for what a call does not have."""

    keeps_diagonal: jax.Array | None
    k_ids: jax.Array | None


def launch(grid: BlockGrid, inputs: dict[str, Any], interpret: bool) -> tuple[jax.Array, jax.Array]:
    """dk and dv, as long as the inputs k and v."""
    k = jax.ShapeDtypeStruct(inputs["k"].shape, inputs["k"].dtype)
    slots = 3
    tiles = plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS, grid.E), k.dtype, transforms=tile.tiling(grid.E))
    ring = plgpu.SMEM((slots, ROWS, grid.E), k.dtype, transforms=tile.tiling(grid.E))
    numbers = [plgpu.SMEM((slots, ROWS), kind) for kind in (jnp.float32, jnp.float32, *([jnp.int32] if grid.segments else []))]
    shared = _Shared(
        kv=(tiles, tiles),
        q_dy=(ring, ring),
        numbers=numbers,
        kv_ready=plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE_WARPGROUPS),
        ready=plgpu.Barrier(num_arrivals=2 + len(numbers), num_barriers=slots),
        consumed=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=slots),
    )
    launch_grid = (k.shape[2], pl.cdiv(grid.S, grid.block_s), k.shape[0])
    kernel = functools.partial(_kernel, grid)
    out = tile.launch(kernel, "attention_dkv", inputs, {"dk": k, "dv": k}, shared, launch_grid, interpret)
    return out["dk"], out["dv"]


def _kernel(grid: BlockGrid, refs: Any, shared: _Shared) -> None:
    """dk and dv of one block of keys of one KV head: the sum over all its query heads."""
    wg, kv_head, block, batch = (lax.axis_index(name) for name in ("wg", "head", "block", "batch"))
    program = _Program(batch, block, kv_head, jnp.int32(refs.q.shape[2] // refs.k.shape[2]))
    segment_spans = refs.segment_spans.at[batch, block] if grid.segments else None

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def compute() -> None:
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        _compute(grid, program, wg, segment_spans, refs, shared)

    @pl.when(wg == COMPUTE_WARPGROUPS)
    def load() -> None:
        plgpu.set_max_registers(tile.LOAD_REGISTERS, action="decrease")
        _load_queries(grid, program, query_spans(grid, program.block, segment_spans), refs, shared)


def _compute(grid: BlockGrid, program: _Program, wg: jax.Array, segment_spans: Any, refs: Any, shared: _Shared) -> None:
    """What a computing warpgroup does for its 64 keys."""
    batch, block, kv_head, group_size = program
    at = pl.ds(block * grid.block_s + wg * ROWS, ROWS)
    kv, ready, layout = [buffer.at[wg] for buffer in shared.kv], shared.kv_ready.at[wg], tile.row_layout()
    for source, buffer in zip((refs.k, refs.v), kv, strict=True):
        plgpu.copy_gmem_to_smem(source.at[batch, at, kv_head], buffer, ready)
    keys = _Keys(
        keeps_diagonal=None if refs.keeps_diagonal is None else tile.load(refs.keeps_diagonal.at[batch, kv_head, at], layout),
        k_ids=tile.load(refs.k_ids.at[batch, at], layout) if grid.segments else None,
    )
    dk = tile.zeros(ROWS, grid.E)
    dv = dk if refs.dv_start is None else tile.load(refs.dv_start.at[batch, at, kv_head], plgpu.Layout.WGMMA)
    plgpu.barrier_wait(ready)
    step = functools.partial(_add_query_block, grid, block, keys, shared)
    dk, dv = _sweep_group(query_spans(grid, block, segment_spans), group_size, step, (dk, dv))
    plgpu.commit_smem()
    for value, buffer, target in zip((dk * grid.settings.scale, dv), kv, (refs.dk, refs.dv), strict=True):
        buffer[...] = value.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, target.at[batch, at, kv_head])
    plgpu.wait_smem_to_gmem(0)


def _load_queries(grid: BlockGrid, program: _Program, spans: Spans, refs: Any, shared: _Shared) -> None:
    """What the loading warpgroup does: it fills the rings in the order of `_sweep_group`."""
    batch, _, kv_head, group_size = program
    num_unmasked, num_masked = spans.number(masked=False), spans.number(masked=True)

    def fetch(n: jax.Array, slot: jax.Array) -> None:
        unmasked = n < group_size * num_unmasked
        number = jnp.where(unmasked, num_unmasked, num_masked)
        n = jnp.where(unmasked, n, n - group_size * num_unmasked)
        head, n = kv_head * group_size + lax.div(n, number), lax.rem(n, number)
        first = jnp.where(unmasked, spans.block(n, masked=False), spans.block(n, masked=True)) * grid.block_t
        rows = pl.ds(first, grid.block_t)
        copies = [(ref.at[batch, rows, head], ring) for ref, ring in zip((refs.q, refs.dy), shared.q_dy, strict=True)]
        numbers = [refs.lse.at[batch, head, rows], refs.delta.at[batch, head, rows]]
        numbers += [refs.q_ids.at[batch, rows]] if grid.segments else []
        for source, ring in (*copies, *zip(numbers, shared.numbers, strict=True)):
            plgpu.copy_gmem_to_smem(source, ring.at[slot], shared.ready.at[slot])

    tile.fill_ring(group_size * (num_unmasked + num_masked), shared.ready.shape[0], (shared.consumed,), fetch)


def _sweep_group(spans: Spans, group_size: jax.Array, step: Callable[..., Any], carry: Any) -> Any:
    """First the blocks that need no mask, of every query head of the group, then those that do.

    In loops of their own, so that no number which only a mask needs is alive where most of the time goes.
    """
    num_unmasked, num_masked = spans.number(masked=False), spans.number(masked=True)

    def masked_of_head(head: jax.Array, carry: Any) -> Any:
        start = group_size * num_unmasked + head * num_masked
        return lax.fori_loop(0, num_masked, lambda n, carry: step(start + n, carry, spans.block(n, masked=True)), carry)

    carry = lax.fori_loop(0, group_size * num_unmasked, step, carry)
    return lax.fori_loop(0, group_size, masked_of_head, carry)


def _add_query_block(
    grid: BlockGrid,
    block: jax.Array,
    keys: _Keys,
    shared: _Shared,
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
        if keys.k_ids is not None:
            shown &= along_rows(keys.k_ids, s.shape) == along_columns(tile.load(q_ids[0], tile.column_layout()), s.shape)
        p, slope = lax.optimization_barrier((jnp.where(shown, p, 0.0), jnp.where(shown, slope, 0.0)))
        if keys.keeps_diagonal is not None:
            dropped = (query == key) & (along_rows(keys.keeps_diagonal, s.shape) == 0)
            p, dp = jnp.where(dropped, 0.0, p), jnp.where(dropped, 0.0, dp)
    # In this order the fewest numbers are alive at once.
    p, dp, slope = lax.optimization_barrier((p.astype(q.dtype), dp, slope))
    delta = tile.load(delta, tile.column_layout())
    plgpu.commit_smem()  # the numbers are read, and the next copy may take their place
    ds = slope * (dp - along_columns(delta, s.shape))
    dv, dk = tile.add_products((dv, p, dy), (dk, ds.astype(q.dtype), q))
    plgpu.barrier_arrive(shared.consumed.at[slot])
    return dk, dv
