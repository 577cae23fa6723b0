"""Which (query block, key block) pairs a kernel visits, and in which order: the last axis of its grid walks a list of steps.

Positions decide at trace time, so a causal or windowed mask costs only what it shows. Segment ids decide at run time: a pair of
blocks that share no segment is still a grid step, but it loads nothing and computes nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsa_kernels.arguments import need
from xsa_kernels.request import Settings
from xsa_kernels.tpu import tile
from xsa_kernels.tpu.tile import LANES

# Bits of a step's flags. The outer loop's block stays the same from FIRST to LAST; the inner loop's blocks come and go.
FIRST = 1  # the first step on a block of the outer loop
LAST = 2  # the last step on it
COMPUTE = 4  # some query of the pair sees some key
MASKED = 8  # the pair needs the mask: some weights are hidden, or left out because they are on the diagonal
FIRST_VISIT = 16  # the first step on a block of the inner loop
LAST_VISIT = 32  # the last step on it
DIAGONAL = 64  # the queries and the keys are the same tokens, and the mask is causal
# The bits that decide which code runs at a step.
KIND = COMPUTE | MASKED | DIAGONAL


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes, multiples of 128; `compute` divides `kv`, and `rows` divides `q`.

    Attributes:
      q: query rows of a block.
      kv: keys of a block.
      compute: keys whose scores are computed at a time.
      rows: query rows whose scores are computed at a time. Blocks on the diagonal of a causal mask are cut differently.
    """

    q: int
    kv: int
    compute: int
    rows: int

    def __post_init__(self) -> None:
        need(all(size > 0 and size % LANES == 0 for size in dataclasses.astuple(self)), "Blocks", self, "multiples of 128")
        need(self.kv % self.compute == 0 and self.q % self.rows == 0, "Blocks", self, "compute to divide kv and rows to divide q")

    @property
    def diagonal_compute(self) -> int:
        """Keys that the backward kernel takes at a time on the diagonal.

        Fewer keys waste less work on the hidden half, down to what the matrix unit takes at once.
        """
        return LANES if self.compute % 256 or _has_small_matrix_unit() else 256

    @property
    def pieces_per_row_slice(self) -> int:
        """How many pieces have the same queries."""
        return self.kv // self.compute

    def pieces(self) -> list[tuple[slice, slice]]:
        """(queries, keys) of each piece of a block, keys innermost."""
        starts = [(i, j) for i in range(0, self.q, self.rows) for j in range(0, self.kv, self.compute)]
        return [(slice(i, i + self.rows), slice(j, j + self.compute)) for i, j in starts]

    def fit(self, T: int, S: int) -> "Blocks":
        """The same sizes, no larger than T queries and S keys need."""
        q, kv = min(self.q, round_up(T, LANES)), min(self.kv, round_up(S, LANES))
        compute, rows = min(self.compute, kv), min(self.rows, q)
        return Blocks(q, kv, compute if kv % compute == 0 else LANES, rows if q % rows == 0 else LANES)


def forward_blocks(E: int) -> Blocks:
    """The cheapest sizes by static cost (`benchmarks/tpu_bundles.py`) for the TPU that the program is traced for."""
    if _has_small_matrix_unit():
        return Blocks(1024, 1024, 128, 128)
    return Blocks(1024, 1024, 256, 512 if E <= LANES else 256)


def backward_blocks() -> Blocks:
    """The same for the backward kernel."""
    return Blocks(1024, 1024, 512, 1024) if _has_small_matrix_unit() else Blocks(1024, 1024, 256, 256)


def _has_small_matrix_unit() -> bool:
    """Whether the matrix unit has 128 x 128 cells, as up to v5; from v6 on, and where no TPU is known, it has 256 x 256."""
    return (tile.generation() or 6) <= 5


@dataclasses.dataclass(frozen=True)
class BlockGrid:
    """How one call is cut into blocks. The T queries are the tokens from position `offset` on, of S tokens."""

    settings: Settings
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
        """Whether the tokens of each query block are the tokens of one key block."""
        return self.blocks.q == self.blocks.kv and self.offset % self.blocks.kv == 0

    @property
    def triangular(self) -> bool:
        """Whether, besides, that key block is the last one that the query block sees."""
        return self.aligned and self.settings.causal

    def on_diagonal(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Whether query block i and key block j are the same tokens under a causal mask."""
        return self.triangular & (i * self.blocks.q + self.offset == j * self.blocks.kv)

    @property
    def num_keys(self) -> int | None:
        """S where the last key block is padded, else None."""
        return self.S if self.padded_S > self.S else None

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query block i, key block j and whether the pair needs the mask, for each pair in which a key is seen; i outermost."""
        q, kv = self.blocks.q, self.blocks.kv
        i, j = np.divmod(np.arange(self.padded_T // q * (self.padded_S // kv), dtype=np.int32), self.padded_S // kv)
        # How far the keys of block j are ahead of the queries of block i, at least and at most.
        min_ahead = j * kv - (self.offset + i * q + q - 1)
        max_ahead = min_ahead + kv + q - 2
        visible, unmasked = np.ones(i.shape, bool), (j + 1) * kv <= self.S
        if self.settings.causal:
            visible, unmasked = visible & (min_ahead <= 0), unmasked & (max_ahead <= 0)
        if (window := self.settings.window) is not None:
            visible, unmasked = visible & (max_ahead > -window), unmasked & (min_ahead > -window)
            if not self.settings.causal:
                visible, unmasked = visible & (min_ahead < window), unmasked & (max_ahead < window)
        if self.settings.drop_diagonal:
            unmasked &= (min_ahead > 0) | (max_ahead < 0)
        return i[visible], j[visible], ~unmasked[visible]


def first_and_last(outer: np.ndarray) -> np.ndarray:
    """FIRST and LAST for the runs of equal block numbers in `outer`."""
    change = outer[1:] != outer[:-1]
    return FIRST * np.append(True, change) + LAST * np.append(change, True)


def kinds(flags: np.ndarray, segment_ids_BS: jax.Array | None) -> frozenset[int]:
    """The kinds of steps that occur; with segments every pair of blocks needs the mask."""
    return frozenset(int(kind) for kind in np.unique((flags if segment_ids_BS is None else flags | MASKED) & KIND))


def with_segments(
    segment_ids_BS: jax.Array | None, grid: BlockGrid, i: np.ndarray, j: np.ndarray, flags: np.ndarray, loaded: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """`flags` and `loaded` of the N steps or, with segments, of the N steps of every batch row, [B * N].

    Pairs whose ranges of ids do not overlap compute nothing. They read what the step before them read, which costs no copy, except
    at the FIRST_VISIT to a block, where every array must be the block's own.

    Args:
      segment_ids_BS: int32, or None.
      i: the query block of each step.
      j: the key block of each step.
      flags: the flags of each step without segments.
      loaded: the block of the inner loop that each step reads.
    """
    if segment_ids_BS is None:
        return jnp.asarray(flags), jnp.asarray(loaded)
    q_ids, k_ids = padded_ids(segment_ids_BS, grid)
    q_ids, k_ids = (x.reshape(len(x), -1, size) for x, size in ((q_ids, grid.blocks.q), (k_ids, grid.blocks.kv)))
    overlap_BN = (q_ids.min(2)[:, i] <= k_ids.max(2)[:, j]) & (k_ids.min(2)[:, j] <= q_ids.max(2)[:, i])
    loading_step = jnp.where(overlap_BN | (flags & FIRST_VISIT != 0), np.arange(len(i), dtype=np.int32), 0)
    flags_BN = jnp.where(overlap_BN, flags | MASKED, flags & ~COMPUTE)
    return flags_BN.reshape(-1), jnp.asarray(loaded)[lax.cummax(loading_step, axis=1)].reshape(-1)


def step_index(steps_per_row: int | None, b: jax.Array, n: jax.Array) -> jax.Array:
    """The index of step n of batch row b in the lists of `with_segments`; None: all batch rows share one list."""
    return n if steps_per_row is None else b * steps_per_row + n


def heads_first(x_BTHE: jax.Array, padded_T: int) -> jax.Array:
    """[B, T, H, E] -> [B, H, padded_T, E], as the kernels read it."""
    T = x_BTHE.shape[1]
    return jnp.pad(x_BTHE.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded_T - T), (0, 0)))


def padded_ids(segment_ids_BS: jax.Array, grid: BlockGrid) -> tuple[jax.Array, jax.Array]:
    """The ids of the queries [B, T] and of the keys [B, S], padded to whole blocks."""
    q_ids = segment_ids_BS[:, grid.offset : grid.offset + grid.T]
    return (
        jnp.pad(q_ids, ((0, 0), (0, grid.padded_T - grid.T)), mode="edge"),
        jnp.pad(segment_ids_BS, ((0, 0), (0, grid.padded_S - grid.S)), mode="edge"),
    )


def ids_for_tiles(segment_ids_BS: jax.Array, grid: BlockGrid) -> tuple[jax.Array, jax.Array]:
    """The padded ids as tiles of scores need them: of queries in lanes, [B, 1, T], of keys in sublanes, in each of 128 lanes."""
    q_ids, k_ids = padded_ids(segment_ids_BS, grid)
    return q_ids[:, None], jnp.broadcast_to(k_ids[:, :, None], (*k_ids.shape, LANES))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
