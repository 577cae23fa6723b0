"""Fused attention for Hopper chips through Pallas Mosaic GPU: the forward pass of FlashAttention-3 (arXiv 2407.08608), then XSA.

Two warpgroups compute 64 query rows each, a third keeps the tensor memory accelerator busy with keys and values. The two take turns
on the tensor cores: while one multiplies, the other does its softmax. When a warpgroup has no key block left, its Q buffer is free
and takes the tokens' own values, so that the projection costs no shared memory and y never leaves the registers.

No simulator multiplies as these tensor cores do: tests put jnp.dot in their place, and the products wait for a device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels import frame
from xsa_kernels.backend import Backend, Outputs
from xsa_kernels.gpu import hopper_backward, scores
from xsa_kernels.gpu import hopper_tile as tile
from xsa_kernels.gpu.hopper_tile import COMPUTE_WARPGROUPS, ROWS, Program, Sweep, along_columns, along_rows
from xsa_kernels.gpu.spans import BlockGrid, key_spans
from xsa_kernels.request import Request
from xsa_kernels.spec import LOG2E, LOWEST, Sharding

KEYS = 128  # of a key block


class _Shared(NamedTuple):
    """Shared memory of one program, and the barriers that guard it.

    Attributes:
      q: a tile of queries, later of own values and of z, for each computing warpgroup.
      k, v: rings of key blocks.
      row: the log-sum-exp and c of each warpgroup's rows.
      q_ready: `q` is loaded.
      ready, consumed: a slot of `k` (or of `v`) is loaded, or may be loaded again.
      turn: the other warpgroup is done with the tensor cores.
    """

    q: Any
    k: Any
    v: Any
    row: Any
    q_ready: Any
    ready: tuple[Any, Any]
    consumed: tuple[Any, Any]
    turn: Any


class _State(NamedTuple):
    """What a warpgroup knows of its rows from the key blocks so far, in base 2.

    Attributes:
      y: the sum of weights times values, before it is divided by `total`.
      maximum: the largest score.
      total: the sum of weights.
      self_weight: the weight of the row's own token, which is left out of y with `drop_diagonal`.
    """

    y: jax.Array
    maximum: jax.Array
    total: jax.Array
    self_weight: jax.Array


@functools.cache
def backend(interpret: bool = False) -> Backend:
    """The kernels as a backend of `frame.attention`. `interpret` simulates the chip on the CPU; only jax from 0.12 on can."""
    return Backend(
        forward=functools.partial(_forward, interpret=interpret),
        backward_main=functools.partial(hopper_backward.backward_main, interpret=interpret),
    )


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """The implementation "hopper"."""
    return frame.attention(backend(), request, sharding)


def _forward(request: Request, *, interpret: bool) -> Outputs:
    (B, T, H, E), dtype = request.q_BTHE.shape, request.q_BTHE.dtype
    grid = BlockGrid.of(request, COMPUTE_WARPGROUPS * ROWS, KEYS)
    blocks, slots = pl.cdiv(T, grid.block_t), min(4 if E == 64 else 3 if E < 128 else 2, pl.cdiv(grid.S, KEYS))
    v_self_BTKE = request.projected_v_BTKE
    inputs = {
        "q": tile.copyable(request.q_BTHE),
        "k": tile.copyable(request.k_BSKE),
        "v": tile.copyable(request.v_BSKE),
        "v_self": tile.copyable(v_self_BTKE),
        **tile.segment_inputs(grid, request.segment_ids_BS, of_keys=False),
        "sinks": None if request.sinks_H is None else request.sinks_H.astype(jnp.float32),
        "alpha": None if request.alpha_H is None else request.alpha_H.astype(jnp.float32),
    }
    row = jax.ShapeDtypeStruct((B, H, blocks * grid.block_t), jnp.float32)
    z = jax.ShapeDtypeStruct((B, T + -T % 8, H, E), dtype)
    ring = plgpu.SMEM((slots, KEYS, E), dtype, transforms=tile.tiling(E))
    loaded, used = plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=slots)
    shared = _Shared(
        q=plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS, E), dtype, transforms=tile.tiling(E)),
        k=ring,
        v=ring,
        row=plgpu.SMEM((COMPUTE_WARPGROUPS, 2, ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS),
        ready=(loaded, loaded),
        consumed=(used, used),
        turn=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
    )
    projects = v_self_BTKE is not None
    out = tile.launch(
        functools.partial(_kernel, grid),
        "xsa_forward" if projects else "attention_forward",
        inputs,
        {"z": z, "lse": row, "c": row if projects else None},
        shared,
        (H, blocks, B),
        interpret,
    )
    return Outputs(out["z"][:, :T], out["lse"][..., :T], out["c"][..., :T] if projects else None)


def _kernel(grid: BlockGrid, refs: Any, shared: _Shared) -> None:
    """One block of queries of one head."""
    wg, program = lax.axis_index("wg"), Program.of_queries(grid, refs)
    segment_spans = refs.segment_spans.at[program.batch, program.block] if grid.segments else None
    # Each role finds the spans for itself: numbers alive where the roles part are spilled.

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
    """What a computing warpgroup does: attention of its 64 rows, then the projection."""
    rows = (program.batch, pl.ds(program.block * grid.block_t + wg * ROWS, ROWS))
    buffer, ready = shared.q.at[wg], shared.q_ready.at[wg]
    plgpu.copy_gmem_to_smem(refs.q.at[*rows, program.head], buffer, ready)
    plgpu.barrier_wait(ready)
    sink = None if refs.sinks is None else refs.sinks[program.head] * LOG2E
    q_ids = tile.load(refs.q_ids.at[rows], tile.row_layout()) if grid.segments else None
    sweep = Sweep.over(key_spans(grid, program.block, segment_spans))
    step = functools.partial(_add_key_block, grid, program, sweep, q_ids, refs, shared)

    state = _initial_state(grid, sink)
    pl.when(wg == 1)(lambda: _take_turn(shared))
    state = sweep.run(step, state)
    pl.when(wg == 0)(lambda: _take_turn(shared))
    if refs.v_self is not None:
        plgpu.commit_smem()  # all four warps are done with Q
        plgpu.copy_gmem_to_smem(refs.v_self.at[*rows, program.kv_head], buffer, ready)
        plgpu.barrier_wait(ready)
    _project_and_store(grid, state, refs, buffer, shared.row.at[wg], rows, program.head)


def _take_turn(shared: _Shared) -> None:
    """Lets the other warpgroup have the tensor cores, and waits for its turn to come."""
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def _initial_state(grid: BlockGrid, sink: jax.Array | None) -> _State:
    """Before the first keys: empty, but for the sink."""
    self_weight = total = tile.zeros(ROWS)
    m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), tile.row_layout())
    if sink is not None:
        m = jnp.maximum(m, sink)
        total = jnp.exp2(sink - m)
    return _State(tile.zeros(ROWS, grid.E), m, total, self_weight)


def _add_key_block(
    grid: BlockGrid,
    program: Program,
    sweep: Sweep,
    q_ids: jax.Array | None,
    refs: Any,
    shared: _Shared,
    n: jax.Array,
    state: _State,
    *,
    masked: bool,
) -> _State:
    """The state after the key block of step n: one step of the online softmax."""
    y, m, total, self_weight = state
    wg, slot = tile.warpgroup(), lax.rem(n, jnp.int32(shared.k.shape[0]))

    plgpu.barrier_wait(shared.ready[0].at[slot])
    (s,) = tile.products((shared.q.at[wg], shared.k.at[slot]), meanwhile=lambda: _take_turn(shared))
    plgpu.barrier_arrive(shared.consumed[0].at[slot])
    s, factor = scores.base2_scores(grid.settings, s)
    if masked:
        first_key = sweep.masked_block(n) * KEYS
        query, key = tile.positions(program.block * grid.block_t + wg * ROWS + grid.offset, first_key, s.shape)
        shown = scores.visible(grid, query, key)
        if q_ids is not None:
            k_ids = tile.load(refs.k_ids.at[program.batch, pl.ds(first_key, KEYS)], tile.column_layout())
            shown &= along_rows(q_ids, s.shape) == along_columns(k_ids, s.shape)
        s = jnp.where(shown, s, -jnp.inf)
    m_new = jnp.maximum(m, jnp.max(s, axis=1) * factor)
    p = jnp.exp2(s * factor - along_rows(m_new, s.shape))
    shrink = jnp.exp2(m - m_new)
    total = total * shrink + jnp.sum(p, axis=1)
    y *= along_rows(shrink, y.shape)
    if grid.settings.drop_diagonal:
        self_weight *= shrink
        if masked:
            diagonal = query == key
            self_weight += jnp.sum(jnp.where(diagonal, p, 0.0), axis=1)
            p = jnp.where(diagonal, 0.0, p)
    p = p.astype(shared.v.dtype)
    y, m_new, total, self_weight, p = lax.optimization_barrier((y, m_new, total, self_weight, p))
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.ready[1].at[slot])
    plgpu.barrier_wait(shared.turn)
    (y,) = tile.add_products((y, p, shared.v.at[slot]))
    plgpu.barrier_arrive(shared.consumed[1].at[slot])
    return _State(y, m_new, total, self_weight)


def _project_and_store(
    grid: BlockGrid, state: _State, refs: Any, buffer: Any, row_buffer: Any, rows: tuple[Any, Any], head: jax.Array
) -> None:
    """Divides y by the sum of the weights, projects it and writes one warpgroup's rows. `buffer` holds their own values."""
    settings, (y, m, total, self_weight) = grid.settings, state
    y /= along_rows(total, y.shape)
    row_buffer[0, :] = m / LOG2E + jnp.log(total)
    if refs.v_self is not None:
        v = tile.load(buffer, plgpu.Layout.WGMMA).astype(jnp.float32)
        n2 = jnp.sum(v * v, axis=1)
        if settings.drop_diagonal:
            y += along_rows(jnp.where(settings.exact(n2), 0.0, self_weight / total), y.shape) * v
        c = settings.inverse(n2) * jnp.sum(y * v, axis=1)
        row_buffer[1, :] = c
        y -= along_rows(c if refs.alpha is None else refs.alpha[head] * c, y.shape) * v
    buffer[...] = y.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, refs.z.at[*rows, head])
    plgpu.copy_smem_to_gmem(row_buffer.at[0], refs.lse.at[rows[0], head, rows[1]])
    if refs.v_self is not None:
        plgpu.copy_smem_to_gmem(row_buffer.at[1], refs.c.at[rows[0], head, rows[1]])
    plgpu.wait_smem_to_gmem(0)
