"""Which (query block, key block) pairs a kernel visits, and in which order: the grid's last axis is a list, not a rectangle.

Positions decide at trace time, so that a causal or windowed mask costs what it shows. Segment ids decide while running: a pair
whose ids cannot meet is still a grid step, but loads nothing and computes nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsa_kernels.fused import Call
from xsa_kernels.spec import need
from xsa_kernels.tpu import tile
from xsa_kernels.tpu.tile import LANES

# Bits of a step's flags. FIRST and LAST of the steps on the outer loop's block, NEW and DONE of those on the inner loop's;
# whether the pair of blocks has weights at all, whether some of them are hidden or on the diagonal, and whether both are the same
# tokens.
FIRST, LAST, COMPUTE, MASKED, NEW, DONE, DIAGONAL = 1, 2, 4, 8, 16, 32, 64
# The bits that say which code runs at a step.
KIND = COMPUTE | MASKED | DIAGONAL


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes, multiples of 128; `compute` divides `kv`, and `rows` divides `q`.

    Attributes:
      q: query rows of a block.
      kv: keys of a block.
      compute: keys whose scores are made at a time.
      rows: query rows whose scores are made at a time. A block on the diagonal of a causal mask is cut in other ways.
    """

    q: int
    kv: int
    compute: int
    rows: int

    def __post_init__(self):
        need(all(size > 0 and size % LANES == 0 for size in dataclasses.astuple(self)), "Blocks", self, "multiples of 128")
        need(self.kv % self.compute == 0 and self.q % self.rows == 0, "Blocks", self, "compute to divide kv and rows to divide q")

    @property
    def diagonal(self) -> int:
        """Keys at a time of a backward block on the diagonal: the fewer, the less is computed of the half that is hidden, down to
        what the matrix unit takes at once."""
        return LANES if self.compute % 256 or _small_matrix_unit() else 256

    @property
    def parts(self) -> int:
        """Pieces that have the same queries."""
        return self.kv // self.compute

    def pieces(self) -> list[tuple[slice, slice]]:
        """(queries, keys) of each piece of a block: some queries with one part of the keys after the other, then the next."""
        starts = [(i, j) for i in range(0, self.q, self.rows) for j in range(0, self.kv, self.compute)]
        return [(slice(i, i + self.rows), slice(j, j + self.compute)) for i, j in starts]

    def fit(self, T: int, S: int) -> "Blocks":
        """The same sizes, no larger than T queries and S keys need."""
        q, kv = min(self.q, round_up(T, LANES)), min(self.kv, round_up(S, LANES))
        compute, rows = min(self.compute, kv), min(self.rows, q)
        return Blocks(q, kv, compute if kv % compute == 0 else LANES, rows if q % rows == 0 else LANES)


def forward_blocks(E: int) -> Blocks:
    """The table, by static cost (`benchmarks/tpu_bundles.py`), for the TPU that the program is traced for."""
    if _small_matrix_unit():
        return Blocks(1024, 1024, 128, 128)
    return Blocks(1024, 1024, 256, 512 if E <= LANES else 256)


def backward_blocks() -> Blocks:
    return Blocks(1024, 1024, 512, 1024) if _small_matrix_unit() else Blocks(1024, 1024, 256, 256)


def _small_matrix_unit() -> bool:
    """Whether it has 128 x 128 cells, as up to v5; from v6 on, and where no TPU is known, 256 x 256."""
    return (tile.generation() or 6) <= 5


@dataclasses.dataclass(frozen=True)
class Grid:
    """One call in blocks. The T queries are the tokens from `offset` on, of S."""

    call: Call
    T: int
    S: int
    offset: int
    blocks: Blocks

    @property
    def padded_T(self) -> int:
        return round_up(self.T, self.blocks.q)

    @property
    def padded_S(self) -> int:
        return round_up(self.S, self.blocks.kv)

    @property
    def aligned(self) -> bool:
        """Whether the queries of a block are also the keys of one block."""
        return self.blocks.q == self.blocks.kv and self.offset % self.blocks.kv == 0

    @property
    def triangular(self) -> bool:
        """Whether, besides, those are the last keys that the block sees."""
        return self.aligned and self.call.causal

    def on_diagonal(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Whether query block i and key block j are the same tokens, and the mask is causal."""
        return self.triangular & (i * self.blocks.q + self.offset == j * self.blocks.kv)

    @property
    def padding_from(self) -> int | None:
        """The first key that is padding."""
        return self.S if self.padded_S > self.S else None

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query block i, key block j and whether some weight needs a second look, for every pair that shows a key; i outermost."""
        q, kv = self.blocks.q, self.blocks.kv
        i, j = np.divmod(np.arange(self.padded_T // q * (self.padded_S // kv), dtype=np.int32), self.padded_S // kv)
        # The least and the most that a key of block j is ahead of a query of block i.
        least = j * kv - (self.offset + i * q + q - 1)
        most = least + kv + q - 2
        seen, whole = np.ones(i.shape, bool), (j + 1) * kv <= self.S
        if self.call.causal:
            seen, whole = seen & (least <= 0), whole & (most <= 0)
        if (window := self.call.window) is not None:
            seen, whole = seen & (most > -window), whole & (least > -window)
            if not self.call.causal:
                seen, whole = seen & (least < window), whole & (most < window)
        if self.call.drop_diagonal:
            whole &= (least > 0) | (most < 0)
        return i[seen], j[seen], ~whole[seen]


def edges(outer: np.ndarray) -> np.ndarray:
    """FIRST and LAST for the runs of equal numbers in `outer`."""
    change = outer[1:] != outer[:-1]
    return FIRST * np.append(True, change) + LAST * np.append(change, True)


def kinds(flags: np.ndarray, segment_ids: jax.Array | None) -> frozenset[int]:
    """The kinds that occur; with segments every pair of blocks needs a second look."""
    return frozenset(int(kind) for kind in np.unique((flags if segment_ids is None else flags | MASKED) & KIND))


def with_segments(
    segment_ids: jax.Array | None, grid: Grid, i: np.ndarray, j: np.ndarray, flags: np.ndarray, loaded: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """`flags` and `loaded` for the N steps or, with segments, for those of every row of the batch, [B * N].

    Pairs whose ranges of ids do not meet compute nothing. They read what the step before them read, which costs no copy, except
    where a block of rows is NEW: there every array must be the block's own.

    Args:
      segment_ids: int32 [B, S] or None.
      i: the query block of each step.
      j: its key block.
      loaded: the block that the kernel's inner loop reads.
    """
    if segment_ids is None:
        return jnp.asarray(flags), jnp.asarray(loaded)
    q_ids, k_ids = padded_ids(segment_ids, grid)
    q_ids, k_ids = (x.reshape(len(x), -1, size) for x, size in ((q_ids, grid.blocks.q), (k_ids, grid.blocks.kv)))
    meet_BN = (q_ids.min(2)[:, i] <= k_ids.max(2)[:, j]) & (k_ids.min(2)[:, j] <= q_ids.max(2)[:, i])
    steps = jnp.where(meet_BN | (flags & NEW != 0), np.arange(len(i), dtype=np.int32), 0)
    flags_BN = jnp.where(meet_BN, flags | MASKED, flags & ~COMPUTE)
    return flags_BN.reshape(-1), jnp.asarray(loaded)[lax.cummax(steps, axis=1)].reshape(-1)


def at(steps_per_row: int | None, b, n):
    """Where step n of batch row b is in the lists of `with_segments`, which without segments (None) all rows share."""
    return n if steps_per_row is None else b * steps_per_row + n


def rows_first(x_BTHE: jax.Array, padded_T: int) -> jax.Array:
    """[B, T, H, E] -> [B, H, padded_T, E], as the kernels read it."""
    T = x_BTHE.shape[1]
    return jnp.pad(x_BTHE.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded_T - T), (0, 0)))


def padded_ids(segment_ids: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """The ids of the queries and of the keys as int32 [B, T] and [B, S], padded to whole blocks."""
    q_ids = segment_ids[:, grid.offset : grid.offset + grid.T]
    return (
        jnp.pad(q_ids, ((0, 0), (0, grid.padded_T - grid.T)), mode="edge"),
        jnp.pad(segment_ids, ((0, 0), (0, grid.padded_S - grid.S)), mode="edge"),
    )


def ids_for_keys_first(segment_ids: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """The padded ids of queries in lanes, [B, 1, T], and of keys in sublanes, repeated over the lanes, [B, S, 128]."""
    q_ids, k_ids = padded_ids(segment_ids, grid)
    return q_ids[:, None], jnp.broadcast_to(k_ids[:, :, None], (*k_ids.shape, LANES))


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to
