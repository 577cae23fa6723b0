"""Fused attention for Hopper chips through Pallas Mosaic GPU: the forward pass of FlashAttention-3 (arXiv 2407.08608), then XSA.

Two warpgroups compute 64 query rows each, a third keeps the tensor memory accelerator busy with keys and values. The two take turns
on the tensor cores: while one multiplies, the other does its softmax. When a warpgroup has no key block left, its Q buffer is dead
and takes the own values, so that the projection costs no shared memory and y never leaves the registers.

No simulator multiplies as these tensor cores do: tests put jnp.dot in their place, and the products wait for a device.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels import fused
from xsa_kernels.gpu import hopper_backward
from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu.hopper_tile import COMPUTE, HEAD_DIMS, LOG2E, ROWS, along_columns, along_rows
from xsa_kernels.gpu.spans import Plan, key_spans

KEYS = 128
LOWEST = -1e30


@functools.cache
def backend(interpret: bool = False) -> fused.Backend:
    """What `fused.attention` runs. `interpret` simulates the chip on the CPU; only jax from 0.12 on can."""
    return fused.Backend(
        functools.partial(_forward, interpret=interpret), functools.partial(hopper_backward.backward, interpret=interpret)
    )


def attention(*call):
    """`xsa_kernels.attention`'s "hopper"."""
    return fused.attention(backend(), *call)


def refused(dtype: str, head_dim: int) -> str:
    """The features of a call that the kernel does not have, in words; empty when it has them all."""
    features = {
        f"dtype={dtype}": dtype not in ("bfloat16", "float16"),
        f"head_dim={head_dim} (only {HEAD_DIMS})": head_dim not in HEAD_DIMS,
    }
    return ", ".join(feature for feature, found in features.items() if found)


def _forward(call, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H, *, interpret):
    (B, T, H, E), S = q_BTHE.shape, k_BSKE.shape[1]
    if named := refused(q_BTHE.dtype.name, E):
        raise ValueError(f"impl: found 'hopper', which cannot honour {named}, expected 'triton', which can")
    plan = Plan(call, T, S, E, COMPUTE * ROWS, KEYS, segment_ids is not None)
    blocks, stages = pl.cdiv(T, plan.block_t), min(4 if E == 64 else 3 if E < 128 else 2, pl.cdiv(S, KEYS))
    row = jax.ShapeDtypeStruct((B, H, blocks * plan.block_t), jnp.float32)
    inputs = {n: tile.copyable(x) for n, x in (("q", q_BTHE), ("k", k_BSKE), ("v", v_BSKE), ("own", own_BTKE))}
    inputs |= tile.segments(plan, segment_ids, of_keys=False)
    inputs |= {n: None if x is None else x.astype(jnp.float32) for n, x in (("sinks", sinks_H), ("alpha", alpha_H))}
    z = jax.ShapeDtypeStruct(inputs["q"].shape, q_BTHE.dtype)
    keys = plgpu.SMEM((stages, KEYS, E), q_BTHE.dtype, transforms=tile.tiling(E))
    scratch = (
        plgpu.SMEM((COMPUTE, ROWS, E), q_BTHE.dtype, transforms=tile.tiling(E)),
        keys,
        keys,
        plgpu.SMEM((COMPUTE, 2, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=COMPUTE),
        (plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
        (plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages), plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=stages)),
        plgpu.Barrier(num_arrivals=COMPUTE),
    )
    has_own = own_BTKE is not None
    out = tile.launch(
        functools.partial(_kernel, plan),
        "xsa_forward" if has_own else "attention_forward",
        inputs,
        {"z": z, "lse": row, "c": row if has_own else None},
        scratch,
        (H, blocks, B),
        interpret,
    )
    return out["z"][:, :T], out["lse"][..., :T], out["c"][..., :T] if has_own else None


def _kernel(plan: Plan, refs, q_smem, k_smem, v_smem, row_smem, q_ready, ready, consumed, turn):
    wg, head, batch = lax.axis_index("wg"), lax.axis_index("head"), lax.axis_index("batch")
    # The last query blocks see the most keys under a causal mask, and start first.
    block = pl.cdiv(plan.T, plan.block_t) - 1 - lax.axis_index("block")
    kv_head = lax.div(head, jnp.int32(refs.q.shape[2] // refs.k.shape[2]))
    meeting = refs.meeting.at[batch, block] if plan.segments else None
    # Each role finds the spans for itself: numbers alive where the roles part are spilled.

    @pl.when(wg < COMPUTE)
    def _():
        plgpu.set_max_registers(tile.COMPUTE_REGISTERS, action="increase")
        rows = (batch, pl.ds(block * plan.block_t + wg * ROWS, ROWS))
        buffer = q_smem.at[wg]
        plgpu.copy_gmem_to_smem(refs.q.at[*rows, head], buffer, q_ready.at[wg])
        plgpu.barrier_wait(q_ready.at[wg])
        sink = None if refs.sinks is None else refs.sinks[head] * LOG2E
        ids = (tile.load(refs.q_ids.at[rows], tile.row_layout()), refs.k_ids.at[batch]) if plan.segments else None
        state = _softmax(plan, block, key_spans(plan, block, meeting), ids, sink, wg, q_smem, k_smem, v_smem, ready, consumed, turn)
        if refs.own is not None:
            plgpu.commit_smem()  # all four warps are done with Q
            plgpu.copy_gmem_to_smem(refs.own.at[*rows, kv_head], buffer, q_ready.at[wg])
            plgpu.barrier_wait(q_ready.at[wg])
        _epilogue(plan, state, refs, buffer, row_smem.at[wg], rows, head)

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


def _softmax(plan: Plan, block, spans, ids, sink, wg, q_smem, k_smem, v_smem, ready, consumed, turn):
    """(sum of weights times values, maximum, sum of weights, own weight) of one warpgroup's rows, unnormalised, in base 2."""
    call, stages, dtype = plan.call, k_smem.shape[0], k_smem.dtype
    steps, num_clean = spans.stop - spans.start, spans.number(clean=True)

    def take_turn():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def step(n, carry, masked):
        acc, m, total, own_weight = carry
        wg, slot = tile.warpgroup(), lax.rem(n, jnp.int32(stages))

        plgpu.barrier_wait(ready[0].at[slot])
        (s,) = tile.products((q_smem.at[wg], k_smem.at[slot]), meanwhile=take_turn)
        plgpu.barrier_arrive(consumed[0].at[slot])
        s, factor = tile.scores(plan, s)
        if masked:
            first_key = spans.block(n - num_clean, clean=False) * KEYS
            row, column = tile.positions(block * plan.block_t + wg * ROWS + plan.offset, first_key, s.shape)
            shown = tile.seen(plan, row, column)
            if ids is not None:
                key_ids = tile.load(ids[1].at[pl.ds(first_key, KEYS)], tile.column_layout())
                shown &= along_rows(ids[0], s.shape) == along_columns(key_ids, s.shape)
            s = jnp.where(shown, s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * factor)
        p = jnp.exp2(s * factor - along_rows(m_new, s.shape))
        shrink = jnp.exp2(m - m_new)
        total = total * shrink + jnp.sum(p, axis=1)
        acc *= along_rows(shrink, acc.shape)
        if call.drop_diagonal:
            own_weight *= shrink
            if masked:
                own = row == column
                own_weight += jnp.sum(jnp.where(own, p, 0.0), axis=1)
                p = jnp.where(own, 0.0, p)
        p = p.astype(dtype)
        acc, m_new, total, own_weight, p = lax.optimization_barrier((acc, m_new, total, own_weight, p))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(ready[1].at[slot])
        plgpu.barrier_wait(turn)
        (acc,) = tile.add_products((acc, p, v_smem.at[slot]))
        plgpu.barrier_arrive(consumed[1].at[slot])
        return acc, m_new, total, own_weight

    own_weight = total = tile.zeros(ROWS)
    m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), tile.row_layout())
    if sink is not None:
        m = jnp.maximum(m, sink)
        total = jnp.exp2(sink - m)
    acc = tile.zeros(ROWS, plan.E)
    pl.when(wg == 1)(take_turn)
    carry = lax.fori_loop(0, num_clean, functools.partial(step, masked=False), (acc, m, total, own_weight))
    carry = lax.fori_loop(num_clean, steps, functools.partial(step, masked=True), carry)
    pl.when(wg == 0)(take_turn)
    return carry


def _epilogue(plan: Plan, state, refs, buffer, row_smem, rows, head):
    """Normalises, projects and writes one warpgroup's rows. `buffer` holds the own values."""
    y, m, total, own_weight = state
    y /= along_rows(total, y.shape)
    row_smem[0, :] = m / LOG2E + jnp.log(total)
    if refs.own is not None:
        v = tile.load(buffer, plgpu.Layout.WGMMA).astype(jnp.float32)
        n2 = jnp.sum(v * v, axis=1)
        if plan.call.drop_diagonal:
            y += along_rows(jnp.where(plan.call.exact(n2), 0.0, own_weight / total), y.shape) * v
        c = plan.call.inverse(n2) * jnp.sum(y * v, axis=1)
        row_smem[1, :] = c
        y -= along_rows(c if refs.alpha is None else refs.alpha[head] * c, y.shape) * v
    buffer[...] = y.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, refs.z.at[*rows, head])
    plgpu.copy_smem_to_gmem(row_smem.at[0], refs.lse.at[rows[0], head, rows[1]])
    if refs.own is not None:
        plgpu.copy_smem_to_gmem(row_smem.at[1], refs.c.at[rows[0], head, rows[1]])
    plgpu.wait_smem_to_gmem(0)
