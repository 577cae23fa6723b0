"""Batches of a token store through Grain: shuffled by seed, exact after any restart, the same on any number of hosts.

Row i of a split is tokens[i*T : i*T + T + 1], so each token but the first is predicted once per epoch. The order is a function
of (seed, position) alone; the whole state of a loader is the number of batches consumed.
"""

import hashlib
import itertools
import sys
from collections.abc import Generator, Mapping
from typing import Any, Literal

import grain
import numpy as np
from absl import flags

from xsa_jax.data import spawn
from xsa_jax.data.store import Split, TokenStore
from xsa_jax.errors import UserError

_MOST_ROWS = 1 << 32  # Grain shuffles with 32-bit indices
_ENDLESS_ROWS = 1 << 62  # Grain's own endless length, sys.maxsize, overflows where it counts batches in floating point


class _Rows:
    """The random-access source that Grain reads."""

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
            first = np.zeros(self._seq_len + 1, np.int32)
            first[self._split.starts(start + 1, stop) - start] = 1
            row["segment_ids"] = np.cumsum(first, dtype=np.int32)
        return row


class Loader:
    """Batches of one split, of which process `shard_index` of `shard_count` gets every shard_count-th row.

    Args:
      store: an open store.
      split: "train" or "validation".
      seq_len: T; rows have T + 1 tokens.
      batch_size: rows per step over all processes.
      seed: of the shuffled order.
      documents: "isolate" adds segment ids, "ignore" does not.
      max_rows: None shuffles globally, anew every epoch, without end; a number makes one pass in order over at most so many rows.
      workers: processes that read ahead; 0 = a thread of this one.

    Attributes:
      num_rows: rows of an epoch, or of the pass.
      num_batches: of the pass, the same for every process; None when endless.
      local_batch_size: rows of a full batch of this process.

    Raises:
      UserError: when the split is too small, or the batch does not divide over the processes.
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
        shard_index: int = 0,
        shard_count: int = 1,
        workers: int = 0,
    ):
        if not 0 <= shard_index < shard_count:
            raise UserError(f"shard_index={shard_index}: expected 0 to shard_count - 1 = {shard_count - 1}")
        if batch_size < 1 or batch_size % shard_count:
            raise UserError(f"data.batch_size={batch_size}: expected a positive multiple of the {shard_count} processes")
        if max_rows is not None and max_rows < 1:
            raise UserError(f"max_rows={max_rows}: expected at least 1")
        tokens = store.split(split)
        rows = _Rows(tokens, seq_len, documents == "isolate")
        self.num_rows = len(rows) if max_rows is None else min(max_rows, len(rows))
        if self.num_rows < 1:
            raise UserError(
                f"the {split} split of {store.path} has {tokens.num_tokens} tokens; expected at least the {seq_len + 1} of one row "
                f"of data.seq_len={seq_len}. Prepare more text, or lower data.seq_len"
            )
        if self.num_rows >= _MOST_ROWS:
            raise UserError(f"the {split} split of {store.path} has {self.num_rows} rows; expected fewer than {_MOST_ROWS}")
        self.num_batches = None if max_rows is None else -(-self.num_rows // batch_size)
        self.local_batch_size = batch_size // shard_count
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
        source = grain.MapDataset.source(rows)
        order = source.shuffle(seed=_spread(seed)).repeat() if max_rows is None else source[: self.num_rows]
        self._batches = order[shard_index:_ENDLESS_ROWS:shard_count].batch(self.local_batch_size)
        self._empty = {name: array[:0] for name, array in source[:1].batch(1)[0].items()}

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint stores to continue after `step` batches; plain values of constant size."""
        return {"step": step, **self._identity}

    def check_state(self, state: Mapping[str, Any]) -> int:
        """Returns the step to iterate from.

        Raises:
          UserError: when the state is of another stream; names each field with both values.
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
        """Yields batches start, start + 1, ... without reading those before. Closing the iterator ends its workers.

        Each is {"tokens": int32 [B/n, T+1]} and, with documents="isolate", {"segment_ids": int32 [B/n, T+1]}, the number of
        document starts before each token inside its row. The last batch of a pass may have fewer rows, even none where other
        processes still have some, so that all take the same number of steps.
        """
        dataset = self._batches[start:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        if self._workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain sets some of its flags for the workers
            # Shared memory outlives a killed process, and a container may have little of it.
            options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, options)
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=2))
        iterator = iter(dataset)
        try:
            with spawn.without_jax():
                batch = next(iterator, self._empty)
                iterator.get_state()  # the first batch starts the workers; this waits until all are started
            for step in itertools.count(start) if self.num_batches is None else range(start, self.num_batches):
                yield batch if step == start else next(iterator, self._empty)
        finally:
            iterator.close()


def _spread(seed: int) -> int:
    # Grain's seed of epoch e is seed + e: without this, seed 1 would repeat the second epoch of seed 0.
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "big")
