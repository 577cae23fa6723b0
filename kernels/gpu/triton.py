"""Fused attention for GPUs through Pallas-Triton: launches of the kernels in `triton_body`."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.gpu import triton_body as body
from kernels.spec import MaskSpec, Projection

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
    """Fits the 163 KiB of shared memory that an A100 gives one program, so that it serves every chip since."""
    if itemsize == 4:
        # float32 products have no tensor core that keeps their precision: small tiles, or the registers spill.
        block = 32 if head_dim <= 128 else 16
        return Tiles(Tile(block, block, 4, 1), Tile(block, block, 4, 1), Tile(block, block, 4, 1))
    if head_dim <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if head_dim <= 128:
        return Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    return Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1))


def forward(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array | None,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
    skip_own: bool,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns z [B, T, H, E], the log-sum-exp (sinks included) and c (None without XSA), both float32 [B, H, T].

    With `skip_own` c is that of the sum without the token's own value. Either way that sum is z + c v.
    """
    B, T, H, E = q_BTHE.shape
    G = H // k_BSKE.shape[2]
    tile = (tiles or default_tiles(E, q_BTHE.dtype.itemsize)).forward
    call = _call(q_BTHE, k_BSKE, mask, softcap, scale, skip_own, xsa, tile)
    N = pl.cdiv(T, tile.block_t)
    blocks = _Blocks(call, lambda n: N - 1 - n)
    alpha_H = None
    if xsa is not None and not (isinstance(xsa.alpha, (int, float)) and xsa.alpha == 1):
        alpha_H = jnp.broadcast_to(jnp.asarray(xsa.alpha, jnp.float32), (H,))
    q_ids, k_ids, segments = _segments(call, mask, call.block_t, call.block_s)
    of_head = pl.BlockSpec((None,), lambda n, h, b: (h,))
    row, row_spec = jax.ShapeDtypeStruct((B, H, T), jnp.float32), blocks.scalars()
    z, lse, c = pl.pallas_call(
        functools.partial(body.forward_kernel, call),
        name="xsa_forward" if xsa is not None else "attention_forward",
        grid=(N, H, B),
        in_specs=[
            blocks.queries(),
            blocks.all_keys(G),
            blocks.all_keys(G),
            None if xsa is None else blocks.queries(G),
            None if sinks_H is None else of_head,
            None if alpha_H is None else of_head,
            None if q_ids is None else pl.BlockSpec((None, call.block_t), lambda n, h, b: (b, N - 1 - n)),
            None if k_ids is None else pl.BlockSpec((None, blocks.padded_s), lambda n, h, b: (b, 0)),
            None if segments is None else pl.BlockSpec((None, None, 2), lambda n, h, b: (b, N - 1 - n, 0)),
        ],
        out_specs=[blocks.queries(), row_spec, None if xsa is None else row_spec],
        out_shape=[jax.ShapeDtypeStruct(q_BTHE.shape, q_BTHE.dtype), row, None if xsa is None else row],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(call, q_BTHE, k_BSKE, products=2),
        interpret=interpret,
    )(q_BTHE, k_BSKE, v_BSKE, None if xsa is None else v_self_BTKE, sinks_H, alpha_H, q_ids, k_ids, segments)
    return z, lse, c


def backward(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    dy_BTHE: jax.Array,
    lse_BHT: jax.Array,
    delta_BHT: jax.Array,
    dv_self_BSKE: jax.Array | None,
    mask: MaskSpec,
    softcap: float | None,
    scale: float,
    skip_own: bool,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk and dv, which starts from dv_self. delta = rowsum(y * dy) must come from this dy, rounded as it is."""
    B, T, H, E = q_BTHE.shape
    S, K = k_BSKE.shape[1:3]
    G = H // K
    tiles = tiles or default_tiles(E, q_BTHE.dtype.itemsize)
    call = _call(q_BTHE, k_BSKE, mask, softcap, scale, skip_own, None, tiles.dq)
    N = pl.cdiv(T, call.block_t)
    blocks = _Blocks(call, lambda n: N - 1 - n)
    q_ids, k_ids, segments = _segments(call, mask, call.block_t, call.block_s)
    dq = pl.pallas_call(
        functools.partial(body.dq_kernel, call),
        name="attention_dq",
        grid=(N, H, B),
        in_specs=[
            blocks.queries(),
            blocks.all_keys(G),
            blocks.all_keys(G),
            blocks.queries(),
            blocks.scalars(),
            blocks.scalars(),
            None if q_ids is None else pl.BlockSpec((None, call.block_t), lambda n, h, b: (b, N - 1 - n)),
            None if k_ids is None else pl.BlockSpec((None, blocks.padded_s), lambda n, h, b: (b, 0)),
            None if segments is None else pl.BlockSpec((None, None, 2), lambda n, h, b: (b, N - 1 - n, 0)),
        ],
        out_specs=blocks.queries(),
        out_shape=jax.ShapeDtypeStruct(q_BTHE.shape, q_BTHE.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.dq.warps, num_stages=tiles.dq.stages),
        cost_estimate=_cost(call, q_BTHE, k_BSKE, products=3),
        interpret=interpret,
    )(q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT, q_ids, k_ids, segments)

    call = _call(q_BTHE, k_BSKE, mask, softcap, scale, skip_own, None, tiles.dkv)
    blocks = _Blocks(call, lambda n: n)
    k_ids, q_ids, segments = _segments(call, mask, call.block_s, call.block_t, of_keys=True)
    all_queries = pl.BlockSpec((None, blocks.padded_t, G, blocks.padded_e), lambda n, h, b: (b, 0, h, 0))
    all_scalars = pl.BlockSpec((None, G, blocks.padded_t), lambda n, h, b: (b, h, 0))
    own_keys = pl.BlockSpec((None, call.block_s, None, blocks.padded_e), lambda n, h, b: (b, n, h, 0))
    dk, dv = pl.pallas_call(
        functools.partial(body.dkv_kernel, call),
        name="attention_dkv",
        grid=(pl.cdiv(S, call.block_s), K, B),
        in_specs=[
            all_queries,
            own_keys,
            own_keys,
            all_queries,
            all_scalars,
            all_scalars,
            None if q_ids is None else pl.BlockSpec((None, blocks.padded_t), lambda n, h, b: (b, 0)),
            None if k_ids is None else pl.BlockSpec((None, call.block_s), lambda n, h, b: (b, n)),
            None if segments is None else pl.BlockSpec((None, None, 2), lambda n, h, b: (b, n, 0)),
            None if dv_self_BSKE is None else own_keys,
        ],
        out_specs=[own_keys, own_keys],
        out_shape=[jax.ShapeDtypeStruct(k_BSKE.shape, k_BSKE.dtype), jax.ShapeDtypeStruct(v_BSKE.shape, v_BSKE.dtype)],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.dkv.warps, num_stages=tiles.dkv.stages),
        cost_estimate=_cost(call, q_BTHE, k_BSKE, products=4),
        interpret=interpret,
    )(q_BTHE, k_BSKE, v_BSKE, dy_BTHE, lse_BHT, delta_BHT, q_ids, k_ids, segments, dv_self_BSKE)
    return dq, dk, dv


def _call(q_BTHE, k_BSKE, mask: MaskSpec, softcap, scale, skip_own: bool, xsa: Projection | None, tile: Tile) -> body.Call:
    (_, T, _, E), S = q_BTHE.shape, k_BSKE.shape[1]
    return body.Call(
        T=T,
        S=S,
        E=E,
        # Tensor cores take no tile of fewer than 16 rows.
        block_t=min(tile.block_t, max(16, pl.next_power_of_2(T))),
        block_s=min(tile.block_s, max(16, pl.next_power_of_2(S))),
        causal=mask.causal,
        window=mask.window,
        segments=mask.segment_ids is not None,
        scale=float(scale),
        softcap=softcap,
        xsa=xsa is not None,
        skip_own=skip_own,
        zero_rule="" if xsa is None else xsa.zero_rule,
        eps=0.0 if xsa is None else xsa.eps,
    )


class _Blocks:
    """Block specs on the grid (block n, head, batch row). `order` says which block the n-th program takes."""

    def __init__(self, call: body.Call, order):
        self.call, self.order = call, order
        self.padded_t = pl.cdiv(call.T, call.block_t) * call.block_t
        self.padded_s = pl.cdiv(call.S, call.block_s) * call.block_s
        self.padded_e = max(16, pl.next_power_of_2(call.E))

    def queries(self, heads_per_head: int = 1) -> pl.BlockSpec:
        shape = (None, self.call.block_t, None, self.padded_e)
        return pl.BlockSpec(shape, lambda n, h, b: (b, self.order(n), h // heads_per_head, 0))

    def all_keys(self, heads_per_head: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.padded_s, None, self.padded_e), lambda n, h, b: (b, 0, h // heads_per_head, 0))

    def scalars(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.call.block_t), lambda n, h, b: (b, h, self.order(n)))


def _segments(call: body.Call, mask: MaskSpec, own_block: int, other_block: int, of_keys: bool = False):
    """(ids of the own axis, ids of the other axis, int32 [B, own blocks, 2]: the range of other blocks whose ids overlap)."""
    if mask.segment_ids is None:
        return None, None, None
    own_B, other_B = mask.segment_ids[:, call.offset :], mask.segment_ids
    if of_keys:
        own_B, other_B = other_B, own_B
    own_least, own_most = _extremes(own_B, own_block)
    other_least, other_most = _extremes(other_B, other_block)
    overlap_BNM = (own_least[:, :, None] <= other_most[:, None, :]) & (other_least[:, None, :] <= own_most[:, :, None])
    some_BN = overlap_BNM.any(-1)
    start_BN = jnp.argmax(overlap_BNM, -1)
    stop_BN = overlap_BNM.shape[-1] - jnp.argmax(overlap_BNM[:, :, ::-1], -1)
    return own_B, other_B, jnp.stack([start_BN, jnp.where(some_BN, stop_BN, start_BN)], -1).astype(jnp.int32)


def _extremes(ids_BT: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest id of each block."""
    B, T = ids_BT.shape
    N = pl.cdiv(T, block)
    ids_BNt = jnp.pad(ids_BT, ((0, 0), (0, N * block - T)), mode="edge").reshape(B, N, block)
    return ids_BNt.min(-1), ids_BNt.max(-1)


def _cost(call: body.Call, q_BTHE, k_BSKE, products: int) -> pl.CostEstimate:
    """`products` matrix products of T x S x E per head; half of that under a causal mask."""
    B, T, H, E = q_BTHE.shape
    pairs = T * min(call.S, call.window or call.S) * (0.5 if call.causal and not call.window else 1)
    return pl.CostEstimate(
        flops=int(2 * products * B * H * E * pairs),
        transcendentals=int(B * H * pairs),
        bytes_accessed=(2 * q_BTHE.size + 2 * k_BSKE.size) * q_BTHE.dtype.itemsize,
    )
