"""Which blocks of keys a block of queries sees, which blocks of queries a block of keys, and which of those need a mask."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xsa_kernels import fused


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that a kernel knows at compile time."""

    call: fused.Call
    T: int
    S: int
    E: int
    block_t: int
    block_s: int
    segments: bool

    @property
    def offset(self) -> int:
        """The position of the first query: the queries are the last T of the S tokens."""
        return self.S - self.T

    @property
    def back(self) -> int | None:
        """How far a query sees back; None is without end."""
        return None if self.call.window is None else self.call.window - 1

    @property
    def ahead(self) -> int | None:
        return 0 if self.call.causal else self.back


class Spans(NamedTuple):
    """Block numbers in order. [start, clean), [own, after_own) and [masked, stop) need the mask; between them no block does."""

    start: jax.Array
    clean: jax.Array
    own: jax.Array
    after_own: jax.Array
    masked: jax.Array
    stop: jax.Array

    def number(self, clean: bool) -> jax.Array:
        """How many blocks need no mask (or do)."""
        num_clean = (self.own - self.clean) + (self.masked - self.after_own)
        return num_clean if clean else (self.stop - self.start) - num_clean

    def block(self, n: jax.Array, clean: bool) -> jax.Array:
        """The n-th of them."""
        if clean:
            j = self.clean + n
            return jnp.where(j < self.own, j, j + (self.after_own - self.own))
        j = self.start + n
        j = jnp.where(j < self.clean, j, j + (self.own - self.clean))
        return jnp.where(j < self.after_own, j, j + (self.masked - self.after_own))


def key_spans(plan: Plan, i: jax.Array, segments_ref) -> Spans:
    """The key blocks that query block i sees."""
    first = plan.offset + i * plan.block_t
    return _spans(plan, first, first + plan.block_t, plan.back, plan.ahead, 0, plan.S, plan.block_s, segments_ref)


def query_spans(plan: Plan, j: jax.Array, segments_ref) -> Spans:
    """The query blocks that see key block j."""
    first = j * plan.block_s
    return _spans(plan, first, first + plan.block_s, plan.ahead, plan.back, plan.offset, plan.T, plan.block_t, segments_ref)


def _spans(plan, first, last, back, ahead, offset, length, block, segments_ref) -> Spans:
    """What tokens [first, last) see, each from `back` behind it to `ahead` past it, of `length` tokens from `offset` on."""
    blocks = jnp.int32(-(-length // block))
    start, stop, clean, masked = jnp.int32(0), blocks, jnp.int32(0), jnp.int32(length // block)
    if back is not None:
        start = _div(jnp.maximum(first - back - offset, 0), block)
        clean = _div(jnp.maximum(last - 1 - back - offset, 0) + block - 1, block)
    if ahead is not None:
        stop = jnp.minimum(_div(jnp.maximum(last + ahead - offset, 0) + block - 1, block), blocks)
        masked = jnp.minimum(_div(jnp.maximum(first + ahead + 1 - offset, 0), block), masked)
    if segments_ref is not None:
        start, stop = jnp.maximum(start, segments_ref[0]), jnp.minimum(stop, segments_ref[1])
        start = jnp.minimum(start, stop)
        return Spans(start, start, start, stop, stop, stop)
    start = jnp.minimum(start, stop)
    clean = jnp.clip(clean, start, stop)
    masked = jnp.clip(masked, clean, stop)
    if not plan.call.drop_diagonal:
        return Spans(start, clean, masked, masked, masked, stop)
    own = jnp.clip(_div(jnp.maximum(first - offset, 0), block), clean, masked)
    after_own = jnp.clip(_div(jnp.maximum(last - offset, 0) + block - 1, block), own, masked)
    return Spans(start, clean, own, after_own, masked, stop)


def _div(x: jax.Array, n: int) -> jax.Array:
    return lax.div(x, jnp.int32(n))


def query_and_key_ids(plan: Plan, segment_ids: jax.Array | None):
    """The segment ids of the queries and of the keys."""
    return (None, None) if segment_ids is None else (segment_ids[:, plan.offset :], segment_ids)


def segment_spans(plan: Plan, segment_ids: jax.Array | None, of_keys: bool) -> jax.Array | None:
    """Of each query block (or key block) the range of key blocks (query blocks) that may share a segment: int32 [B, N, 2]."""
    if segment_ids is None:
        return None
    q_ids, k_ids = query_and_key_ids(plan, segment_ids)
    q_range, k_range = _extremes(q_ids, plan.block_t), _extremes(k_ids, plan.block_s)
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
