"""Batches of a token store, shuffled by Grain: exact after any restart, and the same for any number of processes.

Row i of a split is tokens[i*T : i*T + T + 1]. Consecutive rows share a token, so each token but the first is predicted once per
epoch. The order depends only on the seed and the position in the stream, so the number of consumed batches is the whole state of
a loader.
"""

import hashlib
import itertools
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal

import grain
import numpy as np
from absl import flags

from xsa_jax.data import spawn
from xsa_jax.data.store import Split, TokenStore
from xsa_jax.errors import UserError

_MAX_ROWS = 1 << 32  # Grain shuffles with 32-bit indices
_ENDLESS_ROWS = 1 << 62  # sys.maxsize, Grain's length of an endless dataset, overflows where Grain counts batches in floating point


class _Rows:
    """The rows of a split, as the random-access source that Grain reads."""

    def __init__(self, split: Split, seq_len: int, isolate: bool):
        self._split = split
        self._seq_len = seq_len
        self._isolate = isolate

    def __len__(self) -> int:
        return max(self._split.num_tokens - 1, 0) // self._seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(index) * self._seq_len
        stop = start + self._seq_len + 1
        row = {"tokens": self._split.read(start, stop).astype(np.int32)}
        if self._isolate:
            is_start = np.zeros(self._seq_len + 1, np.int32)
            is_start[self._split.starts(start + 1, stop) - start] = 1
            row["segment_ids"] = np.cumsum(is_start, dtype=np.int32)
        return row


class _Share:
    """Chosen rows of every batch, one batch after the other, as the random-access source that Grain reads."""

    def __init__(self, order: grain.MapDataset, batch_size: int, chosen: tuple[int, ...]):
        self._order = order
        self._batch_size = batch_size
        self._chosen = chosen

    def __len__(self) -> int:
        batches, rest = divmod(min(len(self._order), _ENDLESS_ROWS), self._batch_size)
        return batches * len(self._chosen) + sum(row < rest for row in self._chosen)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, position = divmod(int(index), len(self._chosen))
        return self._order[batch * self._batch_size + self._chosen[position]]


class Loader:
    """Batches of one split, or the same chosen rows of every batch.

    Args:
      store: an open store.
      split: "train" or "validation".
      seq_len: context length T; a row has T + 1 tokens.
      batch_size: number of rows per step over all processes.
      seed: random seed of the shuffle.
      documents: "isolate" adds segment ids to the batches; "ignore" does not.
      max_rows: None gives an endless loader, which shuffles the whole split anew in each epoch. A number gives a loader of a
        single pass, which reads at most so many rows in order.
      rows: indices of the rows of each batch that this process reads, ascending; None for all.
      workers: number of worker processes that read ahead; 0 = a thread of this process.

    Attributes:
      num_rows: number of rows in an epoch or in the single pass.
      num_batches: number of batches in the single pass, the same for every process; None for an endless loader.
      rows: indices of the rows of a full batch that this loader reads.
      store_hash: hash of the content of the store.

    Raises:
      UserError: the split is missing, too small or too large.
    """

    def __init__(
        self,
        store: TokenStore,
        split: str,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        documents: Literal["ignore", "isolate"] = "ignore",
        max_rows: int | None = None,
        rows: Sequence[int] | None = None,
        workers: int = 0,
    ):
        if batch_size < 1:
            raise UserError(f"data.batch_size={batch_size}: expected at least 1")
        if max_rows is not None and max_rows < 1:
            raise UserError(f"max_rows={max_rows}: expected at least 1")
        tokens = store.split(split)
        source = _Rows(tokens, seq_len, documents == "isolate")
        self.num_rows = len(source) if max_rows is None else min(max_rows, len(source))
        if self.num_rows < 1:
            raise UserError(
                f"the {split} split of {store.path} has {tokens.num_tokens} tokens; expected at least the {seq_len + 1} of one row "
                f"of data.seq_len={seq_len}. Prepare more text, or lower data.seq_len"
            )
        if self.num_rows >= _MAX_ROWS:
            raise UserError(f"the {split} split of {store.path} has {self.num_rows} rows; expected fewer than {_MAX_ROWS}")
        self.num_batches = None if max_rows is None else -(-self.num_rows // batch_size)
        self.rows = tuple(range(batch_size)) if rows is None else tuple(rows)
        self.store_hash = store.hash
        self._workers = workers
        self._identity = {
            "store": store.hash,
            "tokenizer": store.meta["tokenizer"]["fingerprint"],
            "split": split,
            "seed": seed,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "documents": documents,
            "max_rows": max_rows,
        }
        dataset = grain.MapDataset.source(source)
        order = dataset.shuffle(seed=_shuffle_seed(seed)).repeat() if max_rows is None else dataset[: self.num_rows]
        share = order[:_ENDLESS_ROWS] if rows is None else grain.MapDataset.source(_Share(order, batch_size, self.rows))
        self._batches = share.batch(len(self.rows))
        self._empty_batch = {name: array[:0] for name, array in dataset[:1].batch(1)[0].items()}

    def state(self, step: int) -> dict[str, Any]:
        """The state after `step` batches, for a checkpoint: plain values, of constant size."""
        return {"step": step, **self._identity}

    def check_state(self, state: Mapping[str, Any]) -> int:
        """Checks a stored state, and returns the step to iterate from.

        Raises:
          UserError: the state belongs to another data stream. The message names each field that differs, with both values.
        """
        changed = [
            f"{name} (checkpoint: {state.get(name)!r}, now: {value!r})"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if changed:
            raise UserError(f"the checkpoint's data stream is another one: {'; '.join(changed)}. Restore these, or start a new run")
        return int(state["step"])

    def iterate(self, start: int = 0) -> Generator[dict[str, np.ndarray], None, None]:
        """Yields batches start, start + 1, ... without reading earlier ones. Closing the iterator ends its workers.

        A batch holds "tokens", int32 [rows, T+1]. With documents="isolate" it also holds "segment_ids", int32 [rows, T+1]: the
        index, within the row, of the document that each token belongs to. The last batch of a single pass may have fewer rows. It
        has no rows if only other processes have rows left, so that all processes take the same number of steps.
        """
        dataset = self._batches[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        if self._workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # mp_prefetch sets flags for its workers
            # No shared memory: it outlives a killed process, and a container may have little of it.
            options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, options)
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=2))
        iterator = iter(dataset)
        try:
            with spawn.without_jax():
                batch = next(iterator, self._empty_batch)
                iterator.get_state()  # the first batch starts the workers, and this call waits until all have started
            for step in itertools.count(start) if self.num_batches is None else range(start, self.num_batches):
                yield batch if step == start else next(iterator, self._empty_batch)
        finally:
            iterator.close()


def _shuffle_seed(seed: int) -> int:
    # Grain shuffles epoch e by seed + e. Without the hash, seed 1 would repeat the second epoch of seed 0.
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "big")
