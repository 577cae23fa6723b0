"""Which blocks of keys a block of queries sees, which blocks of queries see a block of keys, and which of these need the mask."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xsa_kernels.request import Request, Settings


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """How one call is cut into blocks of `block_t` queries and `block_s` keys: all that a kernel knows at compile time."""

    settings: Settings
    T: int
    S: int
    E: int
    block_t: int
    block_s: int
    segments: bool

    @classmethod
    def of(cls, request: Request, block_t: int, block_s: int) -> "BlockGrid":
        (_, T, _, E), S = request.q_BTHE.shape, request.k_BSKE.shape[1]
        return cls(request.settings, T, S, E, block_t, block_s, request.segment_ids_BS is not None)

    @property
    def offset(self) -> int:
        """The position of the first query: the queries are the last T of the S tokens."""
        return self.S - self.T

    @property
    def back(self) -> int | None:
        """How far a query sees back; None is without end."""
        return None if self.settings.window is None else self.settings.window - 1

    @property
    def ahead(self) -> int | None:
        """How far a query sees ahead; None is without end."""
        return 0 if self.settings.causal else self.back


class Spans(NamedTuple):
    """The blocks [start, stop) that a block sees, by the first block of each span, in order.

    Blocks in [start, unmasked), [diagonal, after_diagonal) and [masked, stop) need the mask; the blocks between do not.
    """

    start: jax.Array
    unmasked: jax.Array
    diagonal: jax.Array
    after_diagonal: jax.Array
    masked: jax.Array
    stop: jax.Array

    def number(self, masked: bool) -> jax.Array:
        """How many blocks need the mask (or do not)."""
        num_unmasked = (self.diagonal - self.unmasked) + (self.masked - self.after_diagonal)
        return (self.stop - self.start) - num_unmasked if masked else num_unmasked

    def block(self, n: jax.Array, masked: bool) -> jax.Array:
        """The n-th block of those that need the mask (or do not)."""
        if not masked:
            j = self.unmasked + n
            return jnp.where(j < self.diagonal, j, j + (self.after_diagonal - self.diagonal))
        j = self.start + n
        j = jnp.where(j < self.unmasked, j, j + (self.diagonal - self.unmasked))
        return jnp.where(j < self.after_diagonal, j, j + (self.masked - self.after_diagonal))


def key_spans(grid: BlockGrid, i: jax.Array, segment_spans: Any) -> Spans:
    """The key blocks that query block i sees. `segment_spans` is None, or refers to the block's range in `segment_spans`."""
    first = grid.offset + i * grid.block_t
    return _spans(grid, first, first + grid.block_t, grid.back, grid.ahead, 0, grid.S, grid.block_s, segment_spans)


def query_spans(grid: BlockGrid, j: jax.Array, segment_spans: Any) -> Spans:
    """The query blocks that see key block j."""
    first = j * grid.block_s
    return _spans(grid, first, first + grid.block_s, grid.ahead, grid.back, grid.offset, grid.T, grid.block_t, segment_spans)


def _spans(
    grid: BlockGrid,
    first: jax.Array,
    last: jax.Array,
    back: int | None,
    ahead: int | None,
    offset: int,
    length: int,
    block: int,
    segment_spans: Any,
) -> Spans:
    """What the tokens [first, last) see of `length` tokens from `offset` on: each sees from `back` behind it to `ahead` past it."""
    blocks = jnp.int32(-(-length // block))
    start, stop, unmasked, masked = jnp.int32(0), blocks, jnp.int32(0), jnp.int32(length // block)
    if back is not None:
        start = _div(jnp.maximum(first - back - offset, 0), block)
        unmasked = _div(jnp.maximum(last - 1 - back - offset, 0) + block - 1, block)
    if ahead is not None:
        stop = jnp.minimum(_div(jnp.maximum(last + ahead - offset, 0) + block - 1, block), blocks)
        masked = jnp.minimum(_div(jnp.maximum(first + ahead + 1 - offset, 0), block), masked)
    if segment_spans is not None:
        start, stop = jnp.maximum(start, segment_spans[0]), jnp.minimum(stop, segment_spans[1])
        start = jnp.minimum(start, stop)
        return Spans(start, start, start, stop, stop, stop)
    start = jnp.minimum(start, stop)
    unmasked = jnp.clip(unmasked, start, stop)
    masked = jnp.clip(masked, unmasked, stop)
    if not grid.settings.drop_diagonal:
        return Spans(start, unmasked, masked, masked, masked, stop)
    diagonal = jnp.clip(_div(jnp.maximum(first - offset, 0), block), unmasked, masked)
    after_diagonal = jnp.clip(_div(jnp.maximum(last - offset, 0) + block - 1, block), diagonal, masked)
    return Spans(start, unmasked, diagonal, after_diagonal, masked, stop)


def _div(x: jax.Array, n: int) -> jax.Array:
    return lax.div(x, jnp.int32(n))


def query_and_key_ids(grid: BlockGrid, segment_ids_BS: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """The segment ids of the queries and of the keys."""
    return (None, None) if segment_ids_BS is None else (segment_ids_BS[:, grid.offset :], segment_ids_BS)


def segment_spans(grid: BlockGrid, segment_ids_BS: jax.Array | None, of_keys: bool) -> jax.Array | None:
    """For each query block (or key block) the range of key blocks (query blocks) that may share a segment: int32 [B, N, 2]."""
    if segment_ids_BS is None:
        return None
    q_ids, k_ids = segment_ids_BS[:, grid.offset :], segment_ids_BS
    q_range, k_range = _extremes(q_ids, grid.block_t), _extremes(k_ids, grid.block_s)
    (least_BN, most_BN), (other_least_BM, other_most_BM) = (k_range, q_range) if of_keys else (q_range, k_range)
    overlap_BNM = (least_BN[:, :, None] <= other_most_BM[:, None]) & (other_least_BM[:, None] <= most_BN[:, :, None])
    start_BN = jnp.argmax(overlap_BNM, -1)
    stop_BN = overlap_BNM.shape[-1] - jnp.argmax(overlap_BNM[:, :, ::-1], -1)
    return jnp.stack([start_BN, jnp.where(overlap_BNM.any(-1), stop_BN, start_BN)], -1).astype(jnp.int32)


def _extremes(ids_BT: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest id of each block."""
    B, T = ids_BT.shape
    ids_BNt = jnp.pad(ids_BT, ((0, 0), (0, pl.cdiv(T, block) * block - T)), mode="edge").reshape(B, -1, block)
    return ids_BNt.min(-1), ids_BNt.max(-1)
