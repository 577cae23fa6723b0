"""The backward kernel: one pass over the blocks makes dq, dk and dv, with five matrix products per pair of blocks instead of seven.

Key blocks are the outer loop, so dk and dv of one block accumulate in place, while dq of a whole KV group accumulates in VMEM
beside them. Each block of dq is written when the last key block that it sees is done. Where dq does not fit, the queries are cut
into chunks.

The key blocks are visited from the last to the first. Under a causal mask a block of queries then meets its own tokens first, and
the row-local half of the backward pass (`fused`) happens there, hidden behind the matrix products: the values at hand are
the rows' own, dy and delta stay in VMEM for the visits that follow, and dv starts where it must.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsa_kernels.fused import Call
from xsa_kernels.tpu import backward_body as body
from xsa_kernels.tpu import schedule
from xsa_kernels.tpu.backward_body import Inputs, Scratch, Steps
from xsa_kernels.tpu.schedule import COMPUTE, DIAGONAL, DONE, MASKED, NEW, Blocks, Grid
from xsa_kernels.tpu.tile import LANES

# For what rows keep in VMEM from their first visit to their last: dq in float32 and, with the projection, dy.
ROW_BYTES = 12 * 2**20
VMEM_BYTES = 48 * 2**20


def backward(
    blocks: Blocks | None,
    interpret: Any,
    call: Call,
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    segment_ids: jax.Array | None,
    z_BTHE: jax.Array,
    lse_BHT: jax.Array,
    c_BHT: jax.Array | None,
    dz_BTHE: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array] | None:
    """`Backend.backward` after its first two arguments."""
    blocks = (blocks or schedule.backward_blocks()).fit(q_BTHE.shape[1], k_BSKE.shape[1])
    if call.zero_rule is not None and not (call.drop_diagonal and call.causal and blocks.q == blocks.kv):
        return None
    rows = {"q": q_BTHE, "dz": dz_BTHE, "z": z_BTHE, "lse": lse_BHT, "c": c_BHT}
    return _in_chunks(blocks, interpret, call, k_BSKE, v_BSKE, segment_ids, rows, None)


def backward_main(
    blocks: Blocks | None,
    interpret: Any,
    call: Call,
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    segment_ids: jax.Array | None,
    lse_BHT: jax.Array,
    dy_BTHE: jax.Array,
    delta_BHT: jax.Array,
    kept_BKT: jax.Array | None,
    dv_BTKE: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Backend.backward_main` after its first two arguments."""
    blocks = (blocks or schedule.backward_blocks()).fit(q_BTHE.shape[1], k_BSKE.shape[1])
    rows = {"q": q_BTHE, "dz": dy_BTHE, "lse": lse_BHT, "delta": delta_BHT, "kept": kept_BKT}
    return _in_chunks(blocks, interpret, call, k_BSKE, v_BSKE, segment_ids, rows, dv_BTKE)[:3]


def _in_chunks(blocks: Blocks, interpret, call: Call, k_BSKE, v_BSKE, segment_ids, rows: dict[str, Any], dv_BTKE):
    """dq, dk, dv and delta, from as many query rows at a time as fit into VMEM."""
    (_, T, H, E), (_, S, K, _) = rows["q"].shape, k_BSKE.shape
    # E in sublanes, of which a bfloat16 register has 16
    row_bytes = H // K * schedule.round_up(E, 16) * (4 + (0 if rows.get("c") is None else rows["q"].dtype.itemsize))
    while blocks.q > LANES and blocks.q * row_bytes > ROW_BYTES:  # many query heads on a KV head
        blocks = blocks.fit(blocks.q // 2, blocks.q // 2)
    size = max(ROW_BYTES // (blocks.q * row_bytes), 1) * blocks.q
    parts = []
    for first in range(0, T, size):
        t = slice(first, min(first + size, T))
        grid = Grid(call, t.stop - first, S, S - T + first, blocks)
        chunk = {name: x[:, t] if x.ndim == 4 else x[:, :, t] for name, x in rows.items() if x is not None}
        parts.append(_chunk(grid, interpret, k_BSKE, v_BSKE, segment_ids, chunk, None if first else dv_BTKE, size < T))
    dq, dk, dv, delta = zip(*parts, strict=True)
    dk_BSKE, dv_BSKE = _sum(dk).astype(k_BSKE.dtype), _sum(dv).astype(v_BSKE.dtype)
    return jnp.concatenate(dq, axis=1), dk_BSKE, dv_BSKE, jnp.concatenate(delta, axis=2)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def _chunk(grid: Grid, interpret, k_BSKE, v_BSKE, segment_ids, rows: dict[str, jax.Array], dv_BTKE, partial: bool):
    """The gradients that the queries of one chunk make; dk and dv in float32 where they are `partial` sums."""
    (B, T, H, E), (_, S, K, _) = rows["q"].shape, k_BSKE.shape
    G, bq, bkv = H // K, grid.blocks.q, grid.blocks.kv
    steps, kinds = _steps(grid, G, segment_ids)
    at = functools.partial(schedule.at, None if segment_ids is None else len(steps.i))
    arrays = _arrays(grid, k_BSKE, v_BSKE, segment_ids, rows, dv_BTKE)
    specs, written, every_row = _specs(grid, at, arrays)
    wide = jnp.float32
    scratch = Scratch(*(pltpu.VMEM((E, length), wide) for length in (G * grid.padded_T, bkv, bkv)))
    if "c" in rows:
        scratch = scratch._replace(dy=pltpu.VMEM((E, G * grid.padded_T), arrays.q.dtype))
    cells = B * K * len(steps.i) * bq * bkv
    dq, dk, dv, delta = pl.pallas_call(
        functools.partial(body.kernel, grid, at, kinds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(B, K, len(steps.i)),
            in_specs=[specs],
            out_specs=[written, specs.k, specs.v, every_row],
            scratch_shapes=[scratch],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
            jax.ShapeDtypeStruct(arrays.k.shape, wide if partial else k_BSKE.dtype),
            jax.ShapeDtypeStruct(arrays.v.shape, wide if partial else v_BSKE.dtype),
            jax.ShapeDtypeStruct((B, K, 1, G * grid.padded_T), wide),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * cells * E, transcendentals=cells, bytes_accessed=2 * sum(x.nbytes for x in arrays if x is not None)
        ),
        interpret=interpret,
        name="xsa_backward" if grid.call.drop_diagonal else "attention_backward",
    )(*steps, arrays)
    dq_BTHE = dq.reshape(B, H, grid.padded_T, E)[:, :, :T].swapaxes(1, 2)
    delta_BHT = delta.reshape(B, H, grid.padded_T)[:, :, :T]
    return dq_BTHE, dk[:, :, :S].swapaxes(1, 2), dv[:, :, :S].swapaxes(1, 2), delta_BHT


def _arrays(grid: Grid, k_BSKE, v_BSKE, segment_ids, rows: dict[str, jax.Array], dv_BTKE) -> Inputs:
    """What the kernel reads, padded to whole blocks."""
    B, _, K, E = k_BSKE.shape

    def by_group(x_BTHE):
        return schedule.rows_first(x_BTHE, grid.padded_T).reshape(B, K, -1, E)

    def padded(x_BHT, fill=0.0):
        return jnp.pad(x_BHT, ((0, 0), (0, 0), (0, grid.padded_T - grid.T)), constant_values=fill)

    # An infinite log-sum-exp keeps the weights of padded rows 0. XLA sees that the two came in one array, and copies nothing.
    stats = [padded(rows["lse"], jnp.inf), *(padded(rows[name]) for name in ("c",) if name in rows)]
    k, v = (schedule.rows_first(x, grid.padded_S) for x in (k_BSKE, v_BSKE))
    arrays = Inputs(q=by_group(rows["q"]), dz=by_group(rows["dz"]), k=k, v=v, stats=jnp.stack(stats, axis=2))
    if "z" in rows:
        arrays = arrays._replace(z=by_group(rows["z"]))
    if "delta" in rows:
        arrays = arrays._replace(delta=padded(rows["delta"]).reshape(B, K, 1, -1))
    if "kept" in rows:
        diagonal = jnp.where(rows["kept"], -1, grid.offset + jnp.arange(grid.T, dtype=jnp.int32))
        diagonal = jnp.pad(diagonal, ((0, 0), (0, 0), (0, grid.padded_T - grid.T)), constant_values=-1)
        arrays = arrays._replace(diagonal=diagonal[:, :, None])
    if dv_BTKE is not None:
        arrays = arrays._replace(dv=schedule.rows_first(dv_BTKE, grid.padded_S))
    if segment_ids is not None:
        q_ids, k_ids = schedule.ids_for_keys_first(segment_ids, grid)
        arrays = arrays._replace(q_ids=q_ids, k_ids=k_ids)
    return arrays


def _specs(grid: Grid, at, arrays: Inputs) -> tuple[Inputs, pl.BlockSpec, pl.BlockSpec]:
    """The block specs of the inputs, of dq, and of the numbers that all rows of a KV head keep in VMEM."""
    (_, _, num_rows, E), num_stats = arrays.q.shape, arrays.stats.shape[2]
    G, bq, bkv = num_rows // grid.padded_T, grid.blocks.q, grid.blocks.kv

    def rows(which):
        return pl.BlockSpec((None, None, bq, E), lambda b, k, n, *steps: (b, k, which(b, n, Steps(*steps)), 0))

    def numbers(which):
        return pl.BlockSpec((None, None, 1, bq), lambda b, k, n, *steps: (b, k, 0, which(b, n, Steps(*steps))))

    def loaded(b, n, steps):
        return steps.loaded[at(b, n)]

    def new(b, n, steps):
        return steps.new[n]

    def stats(b, k, n, *steps):
        head, i = divmod(loaded(b, n, Steps(*steps)), grid.padded_T // bq)
        return b, k * G + head, 0, i

    keys = pl.BlockSpec((None, None, bkv, E), lambda b, k, n, *steps: (b, k, Steps(*steps).j[n], 0))
    specs = Inputs(
        q=rows(loaded),
        dz=rows(loaded if num_stats == 1 else new),
        stats=pl.BlockSpec((None, None, num_stats, bq), stats),
        k=keys,
        v=keys,
        z=rows(new),
        delta=numbers(new),
        diagonal=numbers(lambda b, n, steps: steps.i[n]),
        dv=keys,
        q_ids=pl.BlockSpec((None, 1, bq), lambda b, k, n, *steps: (b, 0, Steps(*steps).i[n])),
        k_ids=pl.BlockSpec((None, bkv, LANES), lambda b, k, n, *steps: (b, Steps(*steps).j[n], 0)),
    )
    specs = Inputs(*(None if x is None else spec for x, spec in zip(arrays, specs, strict=True)))
    every_row = pl.BlockSpec((None, None, 1, num_rows), lambda b, k, n, *_: (b, k, 0, 0))
    return specs, rows(lambda b, n, steps: steps.written[n]), every_row


def _steps(grid: Grid, G: int, segment_ids: jax.Array | None) -> tuple[Steps, frozenset[int]]:
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
    flags |= schedule.edges(j)
    flags[computes[np.unique(row[computes], return_index=True)[1]]] |= NEW
    last = computes[::-1][np.unique(row[computes[::-1]], return_index=True)[1]]
    flags[last] |= DONE

    def latest(bit):
        """The row of the latest step that has this bit or, before there is one, of the first."""
        having = np.flatnonzero(flags & bit)
        return row[having[np.maximum(np.searchsorted(having, np.arange(len(row)), side="right") - 1, 0)]]

    # The block of dq in VMEM is the one finished last, or first of all: every block is written out once, when the next is finished.
    flags_, loaded = schedule.with_segments(segment_ids, grid, i, j, flags, row)
    kinds = schedule.kinds(flags, segment_ids)
    return Steps(i, j, flags_, row, loaded, latest(NEW), latest(DONE)), kinds
