"""The backward pass for Hopper chips: two kernels in the manner of `hopper`, one for dq and one for dk and dv.

Both find the weights again from q, k and the log-sum-exp. In the second a program owns its keys and goes through all query heads
that read them: grouped heads are added up in registers, in a fixed order, and no sum is left to another pass. At E = 128 its two
accumulators take more than half of the registers, and several lines below are as they are so that nothing is spilled.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.gpu import hopper_tile as tile
from kernels.gpu.hopper_tile import COMPUTE, LOG2E, ROWS, along_columns, along_rows
from kernels.gpu.spans import Plan, Spans, key_spans, query_spans

KEYS = 64  # of a key block in the kernel for dq


def backward(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, start_BTKE, *, interpret):
    """`backward_main` of `kernels.fused.Backend`, for the calls that `hopper.refused` lets pass."""
    assert segment_ids is None
    kept = [] if kept_BKT is None else [kept_BKT.astype(jnp.float32)]
    start = [] if start_BTKE is None else [start_BTKE]
    rows = (q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT)
    dq = _launch_dq(call, rows, kept, interpret)
    dk, dv = _launch_dkv(call, rows, kept, start, interpret)
    return dq, dk, dv


def _launch_dq(call, rows, kept, interpret):
    q_BTHE, k_BSKE = rows[:2]
    (B, T, H, E), S = q_BTHE.shape, k_BSKE.shape[1]
    plan = Plan(call, T, S, E, COMPUTE * ROWS, KEYS, segments=False)
    stages = min(3, pl.cdiv(S, KEYS))

    def entry(*refs):
        own = plgpu.SMEM((COMPUTE, ROWS, E), q_BTHE.dtype, transforms=tile.tiling(E))
        keys = plgpu.SMEM((stages, KEYS, E), q_BTHE.dtype, transforms=tile.tiling(E))
        pl.run_scoped(
            functools.partial(_dq_kernel, plan, refs[:6], refs[6] if kept else None, refs[-1]),
            own,
            own,
            keys,
            keys,
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
            (plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
            (plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages), plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages)),
            collective_axes="wg",
        )

    shape = jax.ShapeDtypeStruct(q_BTHE.shape, q_BTHE.dtype)
    return tile.launch(entry, "attention_dq", shape, (H, T // plan.block_t, B), interpret)(*rows, *kept)


def _dq_kernel(plan: Plan, inputs, kept_ref, dq_ref, q_smem, dy_smem, k_smem, v_smem, own_ready, ready, consumed):
    q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref = inputs
    wg, head, batch = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("batch")
    block = plan.T // plan.block_t - 1 - lax.axis_index("block")
    kv_head = lax.div(head, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))
    spans = key_spans(plan, block, None)
    steps, num_clean = spans.stop - spans.start, spans.number(clean=True)

    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        first = block * plan.block_t + wg * ROWS
        rows = pl.ds(first, ROWS)
        q, dy = q_smem.at[wg], dy_smem.at[wg]
        plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q, own_ready.at[wg])
        plgpu.copy_gmem_to_smem(dy_ref.at[batch, rows, head], dy, own_ready.at[wg])
        lse = tile.load(lse_ref.at[batch, head, rows], tile.row_layout()) * LOG2E
        delta = tile.load(delta_ref.at[batch, head, rows], tile.row_layout())
        kept = None if kept_ref is None else tile.load(kept_ref.at[batch, kv_head, rows], tile.row_layout())
        plgpu.barrier_wait(own_ready.at[wg])

        def step(n, dq, masked):
            slot = lax.rem(n, jnp.int32(k_smem.shape[0]))
            plgpu.barrier_wait(ready[0].at[slot])
            plgpu.barrier_wait(ready[1].at[slot])
            s, dp = tile.products((q, k_smem.at[slot]), (dy, v_smem.at[slot]))
            plgpu.barrier_arrive(consumed[1].at[slot])
            s, factor = tile.scores(plan, s)
            p = jnp.exp2(s * factor - along_rows(lse, s.shape))
            if masked:
                query, key = tile.positions(first + plan.offset, tile.nth_block(spans, n, num_clean) * KEYS, s.shape)
                p = jnp.where(tile.seen(plan, query, key), p, 0.0)
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
        plgpu.copy_smem_to_gmem(q, dq_ref.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == COMPUTE)
    def _():
        plgpu.set_max_registers(tile.FEED_REGISTERS, action="decrease")

        def fetch(n, slot):
            at = (batch, pl.ds(tile.nth_block(spans, n, num_clean) * KEYS, KEYS), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], ready[0].at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], ready[1].at[slot])

        tile.feed(steps, k_smem.shape[0], consumed, fetch)


def _launch_dkv(call, rows, kept, start, interpret):
    q_BTHE, k_BSKE = rows[:2]
    (B, T, _, E), (S, K) = q_BTHE.shape, k_BSKE.shape[1:3]
    plan = Plan(call, T, S, E, ROWS, COMPUTE * ROWS, segments=False)
    stages = 3

    def entry(*refs):
        extra = list(refs[6:-2])
        kept_ref = extra.pop(0) if kept else None
        start_ref = extra.pop(0) if start else None
        own = plgpu.SMEM((COMPUTE, ROWS, E), q_BTHE.dtype, transforms=tile.tiling(E))
        tiles = plgpu.SMEM((stages, ROWS, E), q_BTHE.dtype, transforms=tile.tiling(E))
        numbers = plgpu.SMEM((stages, ROWS), jnp.float32)
        pl.run_scoped(
            functools.partial(_dkv_kernel, plan, refs[:6], kept_ref, start_ref, refs[-2:]),
            (own, own),
            (tiles, tiles, numbers, numbers),
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE),
            plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages),
            collective_axes="wg",
        )

    shape = jax.ShapeDtypeStruct(k_BSKE.shape, k_BSKE.dtype)
    return tile.launch(entry, "attention_dkv", [shape, shape], (K, pl.cdiv(S, plan.block_s), B), interpret)(*rows, *kept, *start)


def _dkv_kernel(plan: Plan, inputs, kept_ref, start_ref, outputs, own_smem, query_smem, own_ready, ready, consumed):
    q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref = inputs
    wg, kv_head, block, batch = (lax.axis_index(name) for name in ("wg", "head", "block", "batch"))
    group = jnp.int32(q_ref.shape[2] // k_ref.shape[2])

    # Each role finds the spans for itself: numbers alive where the roles part are spilled.
    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        first = block * plan.block_s + wg * ROWS
        keys = pl.ds(first, ROWS)
        own = [smem.at[wg] for smem in own_smem]
        for source, target in zip((k_ref, v_ref), own, strict=True):
            plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], target, own_ready.at[wg])
        kept = None if kept_ref is None else tile.load(kept_ref.at[batch, kv_head, keys], tile.row_layout())
        dk = tile.zeros(ROWS, plan.E)
        dv = dk if start_ref is None else tile.load(start_ref.at[batch, keys, kv_head], plgpu.Layout.WGMMA)
        plgpu.barrier_wait(own_ready.at[wg])
        step = functools.partial(_dkv_step, plan, block, kept, own_smem, query_smem, ready, consumed)
        dk, dv = _dkv_sweep(query_spans(plan, block, None), group, step, (dk, dv))
        plgpu.commit_smem()
        for value, buffer, target in zip((dk * plan.call.scale, dv), own, outputs, strict=True):
            buffer[...] = value.astype(buffer.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, target.at[batch, keys, kv_head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == COMPUTE)
    def _():
        plgpu.set_max_registers(tile.FEED_REGISTERS, action="decrease")
        spans = query_spans(plan, block, None)
        num_clean, num_masked = spans.number(clean=True), spans.number(clean=False)

        def fetch(n, slot):
            clean = n < group * num_clean
            number = jnp.where(clean, num_clean, num_masked)
            n = jnp.where(clean, n, n - group * num_clean)
            head, n = kv_head * group + lax.div(n, number), lax.rem(n, number)
            first = jnp.where(clean, spans.block(n, clean=True), spans.block(n, clean=False)) * plan.block_t
            rows = pl.ds(first, plan.block_t)
            for source, target in zip((q_ref, dy_ref), query_smem[:2], strict=True):
                plgpu.copy_gmem_to_smem(source.at[batch, rows, head], target.at[slot], ready.at[slot])
            for source, target in zip((lse_ref, delta_ref), query_smem[2:], strict=True):
                plgpu.copy_gmem_to_smem(source.at[batch, head, rows], target.at[slot], ready.at[slot])

        tile.feed(group * (num_clean + num_masked), query_smem[0].shape[0], (consumed,), fetch)


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


def _dkv_step(plan: Plan, block, kept, own_smem, query_smem, ready, consumed, n, carry, masked_block=None):
    """Adds what the n-th block of queries gives to (dk, dv). `masked_block` is its number where it needs the mask."""
    # The compiler takes this copy for another number in every step. Else it makes all addresses of k and v before the loop, and has
    # no registers to keep them in.
    wg = lax.optimization_barrier(lax.axis_index("wg"))
    dk, dv = carry
    slot = lax.rem(n, jnp.int32(ready.shape[0]))
    q, dy, lse, delta = (smem.at[slot] for smem in query_smem)
    plgpu.barrier_wait(ready.at[slot])
    s, dp = tile.products((own_smem[0].at[wg], q), (own_smem[1].at[wg], dy))
    lse = tile.load(lse, plgpu.Layout.WGMMA.reduce(0)) * LOG2E
    s, factor = tile.scores(plan, s)
    p = jnp.exp2(s * factor - along_columns(lse, s.shape))
    slope = p if plan.call.softcap is None else p * (1.0 - s * s)
    if masked_block is not None:
        key, query = tile.positions(block * plan.block_s + wg * ROWS, masked_block * plan.block_t + plan.offset, s.shape)
        shown = tile.seen(plan, query, key)
        p, slope = jnp.where(shown, p, 0.0), jnp.where(shown, slope, 0.0)
        if kept is not None:
            left_out = (query == key) & (along_rows(kept, s.shape) == 0)
            p, dp = jnp.where(left_out, 0.0, p), jnp.where(left_out, 0.0, dp)
    # In this order the fewest numbers are alive at once.
    p, dp, slope = lax.optimization_barrier((p.astype(q.dtype), dp, slope))
    delta = tile.load(delta, plgpu.Layout.WGMMA.reduce(0))
    plgpu.commit_smem()  # lse and delta are read, and the next copy may take their place
    ds = slope * (dp - along_columns(delta, s.shape))
    dv, dk = tile.add_products((dv, p, dy), (dk, ds.astype(q.dtype), q))
    plgpu.barrier_arrive(consumed.at[slot])
    return dk, dv
