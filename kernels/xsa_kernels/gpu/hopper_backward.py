"""The backward pass for Hopper chips: two kernels in the manner of `hopper`, one for dq and one for dk and dv.

Both find the weights again from q, k and the log-sum-exp. In the second a program owns its keys and goes through all query heads
that read them: grouped heads are added up in registers, in a fixed order, and no sum is left to another pass. At E = 128 its two
accumulators take more than half of the registers, and several lines below are as they are so that nothing is spilled.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu.hopper_tile import COMPUTE, LOG2E, ROWS, along_columns, along_rows
from xsa_kernels.gpu.spans import Plan, Spans, key_spans, query_spans

KEYS = 64  # of a key block in the kernel for dq


def backward(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, start_BTKE, *, interpret):
    """`backward_main` of `xsa_kernels.fused.Backend`, for the calls that `hopper.refused` lets pass."""
    T, E, S = q_BTHE.shape[1], q_BTHE.shape[3], k_BSKE.shape[1]
    # q and dy are zero beyond their ends, so those rows add nothing.
    inputs = {n: tile.copyable(x) for n, x in (("q", q_BTHE), ("k", k_BSKE), ("v", v_BSKE), ("dy", dy_BTHE))}
    kept = None if kept_BKT is None else kept_BKT.astype(jnp.float32)
    inputs |= {n: tile.padded(x, 2) for n, x in (("lse", lse_BHT), ("delta", delta_BHT), ("kept", kept))}
    dq_plan = Plan(call, T, S, E, COMPUTE * ROWS, KEYS, segment_ids is not None)
    dkv_plan = dataclasses.replace(dq_plan, block_t=ROWS, block_s=COMPUTE * ROWS)
    dq = _launch_dq(dq_plan, inputs | tile.segments(dq_plan, segment_ids, of_keys=False), interpret)
    inputs |= {"start": tile.padded(start_BTKE, 1), **tile.segments(dkv_plan, segment_ids, of_keys=True)}
    dk, dv = _launch_dkv(dkv_plan, inputs, interpret)
    return dq[:, :T], dk[:, :S], dv[:, :S]


def _launch_dq(plan: Plan, inputs, interpret):
    q = jax.ShapeDtypeStruct(inputs["q"].shape, inputs["q"].dtype)
    stages = min(3, pl.cdiv(plan.S, KEYS))
    own = plgpu.SMEM((COMPUTE, ROWS, plan.E), q.dtype, transforms=tile.tiling(plan.E))
    keys = plgpu.SMEM((stages, KEYS, plan.E), q.dtype, transforms=tile.tiling(plan.E))
    scratch = (
        own,
        own,
        keys,
        keys,
        plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
        (plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
        (plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages), plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages)),
    )
    grid = (q.shape[2], pl.cdiv(plan.T, plan.block_t), q.shape[0])
    return tile.launch(functools.partial(_dq_kernel, plan), "attention_dq", inputs, {"dq": q}, scratch, grid, interpret)["dq"]


def _dq_kernel(plan: Plan, refs, q_smem, dy_smem, k_smem, v_smem, own_ready, ready, consumed):
    wg, head, batch = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("batch")
    block = pl.cdiv(plan.T, plan.block_t) - 1 - lax.axis_index("block")
    kv_head = lax.div(head, jnp.int32(refs.q.shape[2] // refs.k.shape[2]))
    meeting = refs.meeting.at[batch, block] if plan.segments else None

    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        rows = pl.ds(block * plan.block_t + wg * ROWS, ROWS)
        q, dy = q_smem.at[wg], dy_smem.at[wg]
        plgpu.copy_gmem_to_smem(refs.q.at[batch, rows, head], q, own_ready.at[wg])
        plgpu.copy_gmem_to_smem(refs.dy.at[batch, rows, head], dy, own_ready.at[wg])
        lse = tile.load(refs.lse.at[batch, head, rows], tile.row_layout()) * LOG2E
        delta = tile.load(refs.delta.at[batch, head, rows], tile.row_layout())
        kept = None if refs.kept is None else tile.load(refs.kept.at[batch, kv_head, rows], tile.row_layout())
        ids = tile.load(refs.q_ids.at[batch, rows], tile.row_layout()) if plan.segments else None
        spans = key_spans(plan, block, meeting)
        steps, num_clean = spans.stop - spans.start, spans.number(clean=True)
        plgpu.barrier_wait(own_ready.at[wg])

        def step(n, dq, masked):
            wg, slot = tile.warpgroup(), lax.rem(n, jnp.int32(k_smem.shape[0]))
            plgpu.barrier_wait(ready[0].at[slot])
            plgpu.barrier_wait(ready[1].at[slot])
            s, dp = tile.products((q_smem.at[wg], k_smem.at[slot]), (dy_smem.at[wg], v_smem.at[slot]))
            plgpu.barrier_arrive(consumed[1].at[slot])
            s, factor = tile.scores(plan, s)
            p = jnp.exp2(s * factor - along_rows(lse, s.shape))
            if masked:
                first_key = spans.block(n - num_clean, clean=False) * KEYS
                query, key = tile.positions(block * plan.block_t + wg * ROWS + plan.offset, first_key, s.shape)
                shown = tile.seen(plan, query, key)
                if plan.segments:
                    key_ids = tile.load(refs.k_ids.at[batch, pl.ds(first_key, KEYS)], tile.column_layout())
                    shown &= along_rows(ids, s.shape) == along_columns(key_ids, s.shape)
                p = jnp.where(shown, p, 0.0)
                if kept is not None:
                    dp = jnp.where(query == key, dp * along_rows(kept, dp.shape), dp)
            ds = p * (dp - along_rows(delta, s.shape))
            if plan.call.softcap is not None:
                ds *= 1.0 - s * s
            (dq,) = tile.add_products((dq, ds.astype(k_smem.dtype), k_smem.at[slot]))
            plgpu.barrier_arrive(consumed[0].at[slot])
            return dq

        dq = lax.fori_loop(0, num_clean, functools.partial(step, masked=False), tile.zeros(ROWS, plan.E))
        dq = lax.fori_loop(num_clean, steps, functools.partial(step, masked=True), dq)
        plgpu.commit_smem()
        q[...] = (dq * plan.call.scale).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, refs.dq.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == COMPUTE)
    def _():
        plgpu.set_max_registers(tile.FEED_REGISTERS, action="decrease")
        spans = key_spans(plan, block, meeting)
        steps, num_clean = spans.stop - spans.start, spans.number(clean=True)

        def fetch(n, slot):
            at = (batch, pl.ds(tile.nth_block(spans, n, num_clean) * KEYS, KEYS), kv_head)
            plgpu.copy_gmem_to_smem(refs.k.at[at], k_smem.at[slot], ready[0].at[slot])
            plgpu.copy_gmem_to_smem(refs.v.at[at], v_smem.at[slot], ready[1].at[slot])

        tile.feed(steps, k_smem.shape[0], consumed, fetch)


def _launch_dkv(plan: Plan, inputs, interpret):
    k = jax.ShapeDtypeStruct(inputs["k"].shape, inputs["k"].dtype)
    stages = 3
    own = plgpu.SMEM((COMPUTE, ROWS, plan.E), k.dtype, transforms=tile.tiling(plan.E))
    rows = plgpu.SMEM((stages, ROWS, plan.E), k.dtype, transforms=tile.tiling(plan.E))
    numbers = [plgpu.SMEM((stages, ROWS), kind) for kind in (jnp.float32, jnp.float32, *([jnp.int32] if plan.segments else []))]
    scratch = (
        (own, own),
        (rows, rows),
        numbers,
        plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
        plgpu.Barrier(num_arrivals=2 + len(numbers), num_barriers=stages),
        plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages),
    )
    grid = (k.shape[2], pl.cdiv(plan.S, plan.block_s), k.shape[0])
    outputs = {"dk": k, "dv": k}
    out = tile.launch(functools.partial(_dkv_kernel, plan), "attention_dkv", inputs, outputs, scratch, grid, interpret)
    return out["dk"], out["dv"]


def _dkv_kernel(plan: Plan, refs, own_smem, row_smem, number_smem, own_ready, ready, consumed):
    wg, kv_head, block, batch = (lax.axis_index(name) for name in ("wg", "head", "block", "batch"))
    group = jnp.int32(refs.q.shape[2] // refs.k.shape[2])
    meeting = refs.meeting.at[batch, block] if plan.segments else None

    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        keys = pl.ds(block * plan.block_s + wg * ROWS, ROWS)
        own = [smem.at[wg] for smem in own_smem]
        for source, target in zip((refs.k, refs.v), own, strict=True):
            plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], target, own_ready.at[wg])
        kept = None if refs.kept is None else tile.load(refs.kept.at[batch, kv_head, keys], tile.row_layout())
        ids = tile.load(refs.k_ids.at[batch, keys], tile.row_layout()) if plan.segments else None
        dk = tile.zeros(ROWS, plan.E)
        dv = dk if refs.start is None else tile.load(refs.start.at[batch, keys, kv_head], plgpu.Layout.WGMMA)
        plgpu.barrier_wait(own_ready.at[wg])
        step = functools.partial(_dkv_step, plan, block, kept, ids, own_smem, row_smem, number_smem, ready, consumed)
        dk, dv = _dkv_sweep(query_spans(plan, block, meeting), group, step, (dk, dv))
        plgpu.commit_smem()
        for value, buffer, target in zip((dk * plan.call.scale, dv), own, (refs.dk, refs.dv), strict=True):
            buffer[...] = value.astype(buffer.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, target.at[batch, keys, kv_head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == COMPUTE)
    def _():
        plgpu.set_max_registers(tile.FEED_REGISTERS, action="decrease")
        spans = query_spans(plan, block, meeting)
        num_clean, num_masked = spans.number(clean=True), spans.number(clean=False)

        def fetch(n, slot):
            clean = n < group * num_clean
            number = jnp.where(clean, num_clean, num_masked)
            n = jnp.where(clean, n, n - group * num_clean)
            head, n = kv_head * group + lax.div(n, number), lax.rem(n, number)
            first = jnp.where(clean, spans.block(n, clean=True), spans.block(n, clean=False)) * plan.block_t
            rows = pl.ds(first, plan.block_t)
            copies = [(ref.at[batch, rows, head], smem) for ref, smem in zip((refs.q, refs.dy), row_smem, strict=True)]
            numbers = [refs.lse.at[batch, head, rows], refs.delta.at[batch, head, rows]]
            numbers += [refs.q_ids.at[batch, rows]] if plan.segments else []
            for source, smem in (*copies, *zip(numbers, number_smem, strict=True)):
                plgpu.copy_gmem_to_smem(source, smem.at[slot], ready.at[slot])

        tile.feed(group * (num_clean + num_masked), ready.shape[0], (consumed,), fetch)


def _dkv_sweep(spans: Spans, group, step, carry):
    """First the blocks that need no mask, of every query head of the group, then those that do.

    In loops of their own, so that no number which only a mask needs is alive where most of the time goes.
    """
    num_clean, num_masked = spans.number(clean=True), spans.number(clean=False)

    def masked_of_head(head, carry):
        start = group * num_clean + head * num_masked
        return lax.fori_loop(0, num_masked, lambda n, carry: step(start + n, carry, spans.block(n, clean=False)), carry)

    carry = lax.fori_loop(0, group * num_clean, step, carry)
    return lax.fori_loop(0, group, masked_of_head, carry)


def _dkv_step(plan: Plan, block, kept, ids, own_smem, row_smem, number_smem, ready, consumed, n, carry, masked_block=None):
    """Adds what the n-th block of queries gives to (dk, dv). `masked_block` is its number where it needs the mask."""
    dk, dv = carry
    wg, slot = tile.warpgroup(), lax.rem(n, jnp.int32(ready.shape[0]))
    q, dy = (smem.at[slot] for smem in row_smem)
    lse, delta, *query_ids = (smem.at[slot] for smem in number_smem)
    plgpu.barrier_wait(ready.at[slot])
    s, dp = tile.products((own_smem[0].at[wg], q), (own_smem[1].at[wg], dy))
    lse = tile.load(lse, tile.column_layout()) * LOG2E
    s, factor = tile.scores(plan, s)
    p = jnp.exp2(s * factor - along_columns(lse, s.shape))
    slope = p if plan.call.softcap is None else p * (1.0 - s * s)
    if masked_block is not None:
        key, query = tile.positions(block * plan.block_s + wg * ROWS, masked_block * plan.block_t + plan.offset, s.shape)
        shown = tile.seen(plan, query, key)
        if plan.segments:
            shown &= along_rows(ids, s.shape) == along_columns(tile.load(query_ids[0], tile.column_layout()), s.shape)
        p, slope = lax.optimization_barrier((jnp.where(shown, p, 0.0), jnp.where(shown, slope, 0.0)))
        if kept is not None:
            left_out = (query == key) & (along_rows(kept, s.shape) == 0)
            p, dp = jnp.where(left_out, 0.0, p), jnp.where(left_out, 0.0, dp)
    # In this order the fewest numbers are alive at once.
    p, dp, slope = lax.optimization_barrier((p.astype(q.dtype), dp, slope))
    delta = tile.load(delta, tile.column_layout())
    plgpu.commit_smem()  # the numbers are read, and the next copy may take their place
    ds = slope * (dp - along_columns(delta, s.shape))
    dv, dk = tile.add_products((dv, p, dy), (dk, ds.astype(q.dtype), q))
    plgpu.barrier_arrive(consumed.at[slot])
    return dk, dv
