"""Fused attention for GPUs through Pallas-Triton: the launches of the kernels in `triton_body`, as a backend of `fused`."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xsa_kernels import fused
from xsa_kernels.gpu import triton_body as body
from xsa_kernels.gpu.spans import Plan, query_and_key_ids, segment_spans

MAX_HEAD_DIM = 256


class Tile(NamedTuple):
    """Rows of queries and of keys in one tile, warps of a program, and depth of its load pipeline."""

    block_t: int
    block_s: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile of each kernel."""

    forward: Tile
    dq: Tile
    dkv: Tile


def default_tiles(head_dim: int, itemsize: int) -> Tiles:
    """Fits the 163 KiB of shared memory that an A100 gives one program, and so every data-centre chip since."""
    if itemsize == 4:
        # No tensor core multiplies float32 without loss: small tiles, or the registers spill.
        block = 32 if head_dim <= 128 else 16
        tile = Tile(block, block, 4, 1)
        return Tiles(tile, tile, tile)
    if head_dim <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if head_dim <= 128:
        return Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2))
    # With one stage the tiles would go to shared memory through registers, and there are none left.
    return Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2))


@functools.cache
def backend(tiles: Tiles | None = None, interpret: bool = False) -> fused.Backend:
    """What `fused.attention` runs. `tiles` overrides `default_tiles`; `interpret` runs the kernels as plain XLA, on any device."""
    settings = {"tiles": tiles, "interpret": interpret}
    return fused.Backend(functools.partial(_forward, **settings), functools.partial(_backward, **settings))


def attention(*call):
    """`xsa_kernels.attention`'s "triton". Where there is no accelerator the kernels are interpreted: right, and slow."""
    return fused.attention(backend(interpret=jax.default_backend() == "cpu"), *call)


def _forward(call, q_BTHE, k_BSKE, v_BSKE, own_BTKE, segment_ids, sinks_H, alpha_H, *, tiles, interpret):
    B, T, H, E = q_BTHE.shape
    tile = (tiles or default_tiles(E, q_BTHE.dtype.itemsize)).forward
    plan = _plan(call, q_BTHE, k_BSKE, segment_ids, tile)
    specs = _QuerySpecs(plan, q_BTHE, k_BSKE)
    spans_BN2 = segment_spans(plan, segment_ids, of_keys=False)
    row = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    has_own = own_BTKE is not None
    return pl.pallas_call(
        functools.partial(body.forward_kernel, plan),
        name="xsa_forward" if has_own else "attention_forward",
        grid=specs.grid,
        in_specs=[
            specs.queries,
            specs.keys,
            specs.keys,
            specs.own if has_own else None,
            None if sinks_H is None else specs.of_head,
            None if alpha_H is None else specs.of_head,
            *((specs.q_ids, specs.k_ids, specs.spans) if plan.segments else (None,) * 3),
        ],
        out_specs=[specs.queries, specs.row, specs.row if has_own else None],
        out_shape=[jax.ShapeDtypeStruct(q_BTHE.shape, q_BTHE.dtype), row, row if has_own else None],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(plan, q_BTHE, k_BSKE, products=2),
        interpret=interpret,
    )(q_BTHE, k_BSKE, v_BSKE, own_BTKE, sinks_H, alpha_H, *query_and_key_ids(plan, segment_ids), spans_BN2)


def _backward(call, q_BTHE, k_BSKE, v_BSKE, segment_ids, lse_BHT, dy_BTHE, delta_BHT, kept_BKT, start_BTKE, *, tiles, interpret):
    tiles = tiles or default_tiles(q_BTHE.shape[-1], q_BTHE.dtype.itemsize)
    kept_BKT = None if kept_BKT is None else kept_BKT.astype(jnp.int32)
    rows = (q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT)
    dq = _dq(call, *rows, segment_ids, kept_BKT, tiles.dq, interpret)
    return dq, *_dkv(call, *rows, segment_ids, kept_BKT, start_BTKE, tiles.dkv, interpret)


def _dq(call, q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT, segment_ids, kept_BKT, tile, interpret):
    plan = _plan(call, q_BTHE, k_BSKE, segment_ids, tile)
    specs = _QuerySpecs(plan, q_BTHE, k_BSKE)
    spans_BN2 = segment_spans(plan, segment_ids, of_keys=False)
    return pl.pallas_call(
        functools.partial(body.dq_kernel, plan),
        name="attention_dq",
        grid=specs.grid,
        in_specs=[
            specs.queries,
            specs.keys,
            specs.keys,
            specs.queries,
            specs.row,
            specs.row,
            *((specs.q_ids, specs.k_ids, specs.spans) if plan.segments else (None,) * 3),
            None if kept_BKT is None else specs.own_row,
        ],
        out_specs=specs.queries,
        out_shape=jax.ShapeDtypeStruct(q_BTHE.shape, q_BTHE.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(plan, q_BTHE, k_BSKE, products=3),
        interpret=interpret,
    )(q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT, *query_and_key_ids(plan, segment_ids), spans_BN2, kept_BKT)


def _dkv(call, q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT, segment_ids, kept_BKT, start_BTKE, tile, interpret):
    plan = _plan(call, q_BTHE, k_BSKE, segment_ids, tile)
    (B, T, H, E), (S, K) = q_BTHE.shape, k_BSKE.shape[1:3]
    G, padded_t, padded_e = H // K, _round_up(T, plan.block_t), _padded_head_dim(E)
    spans_BN2 = segment_spans(plan, segment_ids, of_keys=True)
    queries = pl.BlockSpec((None, padded_t, G, padded_e), lambda n, k, b: (b, 0, k, 0))
    rows = pl.BlockSpec((None, G, padded_t), lambda n, k, b: (b, k, 0))
    keys = pl.BlockSpec((None, plan.block_s, None, padded_e), lambda n, k, b: (b, n, k, 0))
    q_ids = pl.BlockSpec((None, padded_t), lambda n, k, b: (b, 0))
    k_ids = pl.BlockSpec((None, plan.block_s), lambda n, k, b: (b, n))
    spans = pl.BlockSpec((None, None, 2), lambda n, k, b: (b, n, 0))
    return pl.pallas_call(
        functools.partial(body.dkv_kernel, plan),
        name="attention_dkv",
        grid=(pl.cdiv(S, plan.block_s), K, B),
        in_specs=[
            queries,
            keys,
            keys,
            queries,
            rows,
            rows,
            *((q_ids, k_ids, spans) if plan.segments else (None,) * 3),
            None if kept_BKT is None else pl.BlockSpec((None, None, plan.block_s), lambda n, k, b: (b, k, n)),
            None if start_BTKE is None else keys,
        ],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(k_BSKE.shape, k_BSKE.dtype), jax.ShapeDtypeStruct(v_BSKE.shape, v_BSKE.dtype)],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(plan, q_BTHE, k_BSKE, products=4),
        interpret=interpret,
    )(q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT, *query_and_key_ids(plan, segment_ids), spans_BN2, kept_BKT, start_BTKE)


class _QuerySpecs:
    """Blocks of a grid with one program per query block, head and batch row."""

    def __init__(self, plan: Plan, q_BTHE: jax.Array, k_BSKE: jax.Array):
        (B, T, H, E), (S, K) = q_BTHE.shape, k_BSKE.shape[1:3]
        G, N, e, s, t = H // K, pl.cdiv(T, plan.block_t), _padded_head_dim(E), _round_up(S, plan.block_s), plan.block_t

        def i(n):  # the order of `body.query_block`
            return N - 1 - n

        self.grid = (N, H, B)
        self.queries = pl.BlockSpec((None, t, None, e), lambda n, h, b: (b, i(n), h, 0))
        self.own = pl.BlockSpec((None, t, None, e), lambda n, h, b: (b, i(n), h // G, 0))
        self.keys = pl.BlockSpec((None, s, None, e), lambda n, h, b: (b, 0, h // G, 0))
        self.row = pl.BlockSpec((None, None, t), lambda n, h, b: (b, h, i(n)))
        self.own_row = pl.BlockSpec((None, None, t), lambda n, h, b: (b, h // G, i(n)))
        self.of_head = pl.BlockSpec((None,), lambda n, h, b: (h,))
        self.q_ids = pl.BlockSpec((None, t), lambda n, h, b: (b, i(n)))
        self.k_ids = pl.BlockSpec((None, s), lambda n, h, b: (b, 0))
        self.spans = pl.BlockSpec((None, None, 2), lambda n, h, b: (b, i(n), 0))


def _plan(call: fused.Call, q_BTHE: jax.Array, k_BSKE: jax.Array, segment_ids: jax.Array | None, tile: Tile) -> Plan:
    (_, T, _, E), S = q_BTHE.shape, k_BSKE.shape[1]
    # Tensor cores take no tile of fewer than 16 rows.
    block_t = min(tile.block_t, max(16, pl.next_power_of_2(T)))
    block_s = min(tile.block_s, max(16, pl.next_power_of_2(S)))
    return Plan(call, T, S, E, block_t, block_s, segment_ids is not None)


def _padded_head_dim(head_dim: int) -> int:
    return max(16, pl.next_power_of_2(head_dim))


def _round_up(n: int, block: int) -> int:
    return pl.cdiv(n, block) * block


def _cost(plan: Plan, q_BTHE: jax.Array, k_BSKE: jax.Array, products: int) -> pl.CostEstimate:
    """`products` matrix products of T x S x E per head, of the pairs that the mask's positions show."""
    B, T, H, E = q_BTHE.shape
    call = plan.call
    pairs = T * min(plan.S, call.window or plan.S) // (2 if call.causal and call.window is None else 1)
    return pl.CostEstimate(
        flops=2 * products * B * H * E * pairs,
        transcendentals=B * H * pairs,
        bytes_accessed=2 * (q_BTHE.size + k_BSKE.size) * q_BTHE.dtype.itemsize,
    )
