"""Fused attention for GPUs through Pallas-Triton: the launches of the kernels in `triton_body`, as a backend of the frame."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xsa_kernels import device, frame
from xsa_kernels.backend import Backend, Gradients, Outputs, RowGradients
from xsa_kernels.gpu import triton_body as body
from xsa_kernels.gpu.spans import BlockGrid, query_and_key_ids, segment_spans
from xsa_kernels.gpu.triton_body import Inputs
from xsa_kernels.request import Request
from xsa_kernels.spec import Sharding


class Tile(NamedTuple):
    """The size of one kernel's tiles, and how its programs run.

    Attributes:
      block_t: query rows.
      block_s: keys.
      warps: warps of a program.
      stages: depth of the pipeline that loads.
    """

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
    """Tiles that fit the 163 KiB of shared memory that an A100 gives one program, and so every data-centre chip since."""
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
def backend(tiles: Tiles | None = None, interpret: bool = False) -> Backend:
    """The kernels as a backend of `frame.attention`.

    Args:
      tiles: None takes `default_tiles`.
      interpret: runs the kernels as plain XLA, on any device.
    """
    return Backend(
        forward=functools.partial(_forward, tiles=tiles, interpret=interpret),
        backward_main=functools.partial(_backward_main, tiles=tiles, interpret=interpret),
    )


def attention(request: Request, sharding: Sharding | None) -> jax.Array:
    """The implementation "triton". Programs for a CPU interpret the kernels, which is right and slow."""
    interpret = device.platform(request) == "cpu"
    return frame.attention(backend(interpret=interpret), request, sharding)


def _forward(request: Request, *, tiles: Tiles | None, interpret: bool) -> Outputs:
    q_BTHE = request.q_BTHE
    B, T, H, E = q_BTHE.shape
    tile = (tiles or default_tiles(E, q_BTHE.dtype.itemsize)).forward
    grid = _block_grid(request, tile)
    q_ids_BT, k_ids_BS = query_and_key_ids(grid, request.segment_ids_BS)
    arrays = Inputs(
        q=q_BTHE,
        k=request.k_BSKE,
        v=request.v_BSKE,
        v_self=request.projected_v_BTKE,
        sinks=request.sinks_H,
        alpha=request.alpha_H,
        q_ids=q_ids_BT,
        k_ids=k_ids_BS,
        segment_spans=segment_spans(grid, request.segment_ids_BS, of_keys=False),
    )
    launch_grid, specs = _query_specs(grid, H, request.k_BSKE.shape[2], B)
    row = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    projects = arrays.v_self is not None
    z_BTHE, lse_BHT, c_BHT = _launch(
        functools.partial(body.forward_kernel, grid),
        "xsa_forward" if projects else "attention_forward",
        launch_grid,
        arrays,
        specs,
        [specs.q, specs.lse, specs.lse if projects else None],
        [jax.ShapeDtypeStruct(q_BTHE.shape, q_BTHE.dtype), row, row if projects else None],
        tile,
        _cost(grid, q_BTHE, request.k_BSKE, products=2),
        interpret,
    )
    return Outputs(z_BTHE, lse_BHT, c_BHT)


def _backward_main(request: Request, outputs: Outputs, rows: RowGradients, *, tiles: Tiles | None, interpret: bool) -> Gradients:
    tiles = tiles or default_tiles(request.q_BTHE.shape[-1], request.q_BTHE.dtype.itemsize)
    arrays = Inputs(
        q=request.q_BTHE,
        k=request.k_BSKE,
        v=request.v_BSKE,
        dy=rows.dy_BTHE,
        lse=outputs.lse_BHT,
        delta=rows.delta_BHT,
        keeps_diagonal=None if rows.keeps_diagonal_BKT is None else rows.keeps_diagonal_BKT.astype(jnp.int32),
    )
    dq_BTHE = _dq(request, arrays, tiles.dq, interpret)
    return Gradients(dq_BTHE, *_dkv(request, arrays._replace(dv_start=rows.dv_start_BTKE), tiles.dkv, interpret))


def _dq(request: Request, arrays: Inputs, tile: Tile, interpret: bool) -> jax.Array:
    B, _, H, _ = request.q_BTHE.shape
    grid = _block_grid(request, tile)
    q_ids_BT, k_ids_BS = query_and_key_ids(grid, request.segment_ids_BS)
    spans_BN2 = segment_spans(grid, request.segment_ids_BS, of_keys=False)
    launch_grid, specs = _query_specs(grid, H, request.k_BSKE.shape[2], B)
    return _launch(
        functools.partial(body.dq_kernel, grid),
        "attention_dq",
        launch_grid,
        arrays._replace(q_ids=q_ids_BT, k_ids=k_ids_BS, segment_spans=spans_BN2),
        specs,
        specs.q,
        jax.ShapeDtypeStruct(request.q_BTHE.shape, request.q_BTHE.dtype),
        tile,
        _cost(grid, request.q_BTHE, request.k_BSKE, products=3),
        interpret,
    )


def _dkv(request: Request, arrays: Inputs, tile: Tile, interpret: bool) -> tuple[jax.Array, jax.Array]:
    (B, T, H, E), (S, K) = request.q_BTHE.shape, request.k_BSKE.shape[1:3]
    grid = _block_grid(request, tile)
    q_ids_BT, k_ids_BS = query_and_key_ids(grid, request.segment_ids_BS)
    spans_BN2 = segment_spans(grid, request.segment_ids_BS, of_keys=True)
    G, padded_t, padded_e, block_s = H // K, _round_up(T, grid.block_t), _padded_head_dim(E), grid.block_s
    queries = pl.BlockSpec((None, padded_t, G, padded_e), lambda n, k, b: (b, 0, k, 0))
    rows = pl.BlockSpec((None, G, padded_t), lambda n, k, b: (b, k, 0))
    keys = pl.BlockSpec((None, block_s, None, padded_e), lambda n, k, b: (b, n, k, 0))
    specs = Inputs(
        q=queries,
        k=keys,
        v=keys,
        dy=queries,
        lse=rows,
        delta=rows,
        q_ids=pl.BlockSpec((None, padded_t), lambda n, k, b: (b, 0)),
        k_ids=pl.BlockSpec((None, block_s), lambda n, k, b: (b, n)),
        segment_spans=pl.BlockSpec((None, None, 2), lambda n, k, b: (b, n, 0)),
        keeps_diagonal=pl.BlockSpec((None, None, block_s), lambda n, k, b: (b, k, n)),
        dv_start=keys,
    )
    return _launch(
        functools.partial(body.dkv_kernel, grid),
        "attention_dkv",
        (pl.cdiv(S, block_s), K, B),
        arrays._replace(q_ids=q_ids_BT, k_ids=k_ids_BS, segment_spans=spans_BN2),
        specs,
        [keys, keys],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (request.k_BSKE, request.v_BSKE)],
        tile,
        _cost(grid, request.q_BTHE, request.k_BSKE, products=4),
        interpret,
    )


def _launch(
    kernel: Callable[..., None],
    name: str,
    launch_grid: tuple[int, ...],
    arrays: Inputs,
    specs: Inputs,
    out_specs: Any,
    out_shape: Any,
    tile: Tile,
    cost: pl.CostEstimate,
    interpret: bool,
) -> Any:
    """kernel(references to the arrays, references to the outputs) on a grid; specs of arrays that are None do not matter."""
    return pl.pallas_call(
        kernel,
        name=name,
        grid=launch_grid,
        in_specs=[Inputs(*(None if x is None else spec for x, spec in zip(arrays, specs, strict=True)))],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=cost,
        interpret=interpret,
    )(arrays)


def _query_specs(grid: BlockGrid, H: int, K: int, B: int) -> tuple[tuple[int, int, int], Inputs]:
    """One program per query block, head and batch row: the launch grid, and the blocks that its programs read."""
    G, N, e, s, t = H // K, pl.cdiv(grid.T, grid.block_t), _padded_head_dim(grid.E), _round_up(grid.S, grid.block_s), grid.block_t

    def i(n: Any) -> Any:  # the order of `body.query_block`
        return N - 1 - n

    queries = pl.BlockSpec((None, t, None, e), lambda n, h, b: (b, i(n), h, 0))
    keys = pl.BlockSpec((None, s, None, e), lambda n, h, b: (b, 0, h // G, 0))
    rows = pl.BlockSpec((None, None, t), lambda n, h, b: (b, h, i(n)))
    number_of_head = pl.BlockSpec((None,), lambda n, h, b: (h,))
    specs = Inputs(
        q=queries,
        k=keys,
        v=keys,
        v_self=pl.BlockSpec((None, t, None, e), lambda n, h, b: (b, i(n), h // G, 0)),
        sinks=number_of_head,
        alpha=number_of_head,
        dy=queries,
        lse=rows,
        delta=rows,
        q_ids=pl.BlockSpec((None, t), lambda n, h, b: (b, i(n))),
        k_ids=pl.BlockSpec((None, s), lambda n, h, b: (b, 0)),
        segment_spans=pl.BlockSpec((None, None, 2), lambda n, h, b: (b, i(n), 0)),
        keeps_diagonal=pl.BlockSpec((None, None, t), lambda n, h, b: (b, h // G, i(n))),
    )
    return (N, H, B), specs


def _block_grid(request: Request, tile: Tile) -> BlockGrid:
    """Tiles no larger than the call needs; tensor cores take none of fewer than 16 rows."""
    T, S = request.q_BTHE.shape[1], request.k_BSKE.shape[1]
    block_t = min(tile.block_t, max(16, pl.next_power_of_2(T)))
    block_s = min(tile.block_s, max(16, pl.next_power_of_2(S)))
    return BlockGrid.of(request, block_t, block_s)


def _padded_head_dim(head_dim: int) -> int:
    return max(16, pl.next_power_of_2(head_dim))


def _round_up(n: int, block: int) -> int:
    return pl.cdiv(n, block) * block


def _cost(grid: BlockGrid, q_BTHE: jax.Array, k_BSKE: jax.Array, products: int) -> pl.CostEstimate:
    """`products` matrix products of T x S x E per head, counting only the pairs that the mask shows by position."""
    B, T, H, E = q_BTHE.shape
    settings = grid.settings
    pairs = T * min(grid.S, settings.window or grid.S) // (2 if settings.causal and settings.window is None else 1)
    return pl.CostEstimate(
        flops=2 * products * B * H * E * pairs,
        transcendentals=B * H * pairs,
        bytes_accessed=2 * (q_BTHE.size + k_BSKE.size) * q_BTHE.dtype.itemsize,
    )
