"""The token store: a folder that holds tokenized text, written once and read at random by memory map.

    meta.json                   what it is: tokenizer, policy, counts, hashes; its presence says the store is complete
    tokenizer.json              only when a `tokenizers` JSON file made it
    skipped.txt                 only when documents were left out: which and why
    train/00000.tokens.npy      all documents of one input file end to end, uint16 or uint32 by vocabulary
    train/00000.starts.npy      uint64, where in that file each document starts
    validation/...

Any context length reads from the same store. A store does not depend on the machine or on how many workers made it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xsa_jax.data import tokenizer as tokenizers
from xsa_jax.data.shard import EotPolicy, Shard
from xsa_jax.errors import UserError
from xsa_jax.files import write_json

FORMAT = 1
META = "meta.json"
WORK = "work"  # the folder of an unfinished preparation


class TokenStore:
    """A finished store.

    Attributes:
      path: its folder.
      meta: meta.json; see `write_meta` for the fields.
      hash: of the content, whoever made it and wherever it lies.
      tokenizer_name, vocab_size, eot_id: of the tokenizer.
    """

    def __init__(self, path: Path, meta: dict[str, Any]):
        self.path = path
        self.meta = meta
        self.hash: str = meta["hash"]
        self.tokenizer_name: str = meta["tokenizer"]["name"]
        self.vocab_size: int = meta["tokenizer"]["vocab_size"]
        self.eot_id: int = meta["tokenizer"]["eot_id"]
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "TokenStore":
        """Opens the store and checks its description and the size of every file, without reading the tokens.

        Raises:
          UserError: when there is none, it is unfinished, of another format, or damaged.
        """
        folder = Path(path)
        meta = read_meta(folder)
        store = cls(folder, meta)
        for name in meta["splits"]:
            store.split(name)
        return store

    def split(self, name: str) -> "Split":
        """Raises: UserError when the store has no such split."""
        if name not in self.meta["splits"]:
            raise UserError(
                f"{self.path} has no {name!r} split; it has {', '.join(self.meta['splits'])}. It was made with "
                f"--validation-fraction {self.meta['made']['validation_fraction']}; a small corpus needs a larger one"
            )
        if name not in self._splits:
            self._splits[name] = Split(self, name)
        return self._splits[name]

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that made the store.

        Raises:
          UserError: when the installed one is not the same.
        """
        copy = self.path / "tokenizer.json"
        found = tokenizers.load(str(copy) if copy.exists() else self.tokenizer_name)
        wanted = self.meta["tokenizer"]["fingerprint"]
        if found.fingerprint != wanted:
            raise UserError(
                f"{self.path}: made with tokenizer {found.name!r} of fingerprint {wanted}, here it is {found.fingerprint}"
            )
        return found

    def verify(self) -> None:
        """Reads everything again and compares hashes, counts and the place of every end-of-text token.

        Raises:
          UserError: naming the first damaged shard.
        """
        for name in self.meta["splits"]:
            for shard in self.split(name).shards:
                shard.verify(self.meta["eot"], self.eot_id)


class Split:
    """One split as a single run of tokens, whatever the shards.

    Attributes:
      num_tokens, num_documents: with end-of-text tokens counted.
      num_bytes: UTF-8 bytes of the documents' text.
      bytes_per_token: their mean, which turns nats per token into bits per byte.
    """

    def __init__(self, store: TokenStore, name: str):
        self.store_path = store.path
        self.name = name
        self.dtype = np.dtype(store.meta["dtype"])
        self.shards = [Shard(store.path, name, record, self.dtype) for record in store.meta["splits"][name]["shards"]]
        self.num_tokens = sum(shard.num_tokens for shard in self.shards)
        self.num_documents = sum(shard.num_documents for shard in self.shards)
        self.num_bytes = sum(shard.num_bytes for shard in self.shards)
        self.bytes_per_token = self.num_bytes / self.num_tokens
        self._first = np.cumsum([0] + [shard.num_tokens for shard in self.shards])

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map pickles as its whole content; a worker opens the files itself.
        return _open_split, (self.store_path, self.name)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1 of the split, copied, in the store's dtype.

        Raises:
          IndexError: when the range leaves the split.
        """
        return self._gather(start, stop, lambda shard, base, a, b: shard.tokens[a:b], self.dtype)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, ascending, int64."""

        def of_shard(shard: "Shard", base: int, a: int, b: int) -> np.ndarray:
            low, high = np.searchsorted(shard.starts, np.array([a, b], np.uint64))
            return shard.starts[low:high].astype(np.int64) + base

        return self._gather(start, stop, of_shard, np.dtype(np.int64))

    def _gather(self, start: int, stop: int, read: Any, dtype: np.dtype) -> np.ndarray:
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        parts = []
        index = int(np.searchsorted(self._first, start, side="right")) - 1
        while start < stop:
            shard, base = self.shards[index], int(self._first[index])
            end = min(stop, base + shard.num_tokens)
            parts.append(read(shard, base, start - base, end - base))
            start, index = end, index + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype)


def _open_split(path: Path, name: str) -> Split:
    return TokenStore(path, read_meta(path)).split(name)


def write_meta(
    path: Path, tokenizer: dict[str, Any], dtype: str, eot: EotPolicy, splits: Mapping[str, list[Any]], made: dict[str, Any]
) -> dict[str, Any]:
    """Finishes a store and returns its meta.

    Args:
      tokenizer: name, fingerprint, vocab_size, eot_id.
      splits: the shards' records by split, as `ShardWriter.commit` returned them.
      made: how it was made (validation_fraction, on_error, inputs, skipped); not part of the hash.
    """
    totals = {
        name: {total: sum(shard[total] for shard in shards) for total in ("tokens", "documents", "bytes")} | {"shards": shards}
        for name, shards in splits.items()
    }
    meta = {"format": FORMAT, "tokenizer": tokenizer, "dtype": dtype, "eot": eot, "splits": totals}
    meta |= {"hash": _content_hash(meta), "made": made}
    write_json(path / META, meta)
    return meta


def read_meta(path: Path) -> dict[str, Any]:
    """Raises: UserError when there is no finished store of this format, or its description is damaged."""
    file = path / META
    if not file.exists():
        if (path / WORK).exists():
            raise UserError(f"{path}: its preparation did not finish; run the same prepare command again to continue it")
        raise UserError(f"{path}: no token store here (no {META}); make one with python -m xsa_jax.data.prepare --output {path}")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        found = meta["format"]
        intact = found != FORMAT or meta["hash"] == _content_hash(meta)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error!r}); restore it, or prepare the store anew") from error
    if found != FORMAT:
        raise UserError(f"{file}: format {found!r}; this version reads format {FORMAT}. Prepare the store anew")
    if not intact:
        raise UserError(f"{file}: was edited or damaged (its hash does not match); restore it, or prepare the store anew")
    return meta


def _content_hash(meta: Mapping[str, Any]) -> str:
    tokenizer = {key: value for key, value in meta["tokenizer"].items() if key != "name"}
    content = [meta["format"], tokenizer, meta["dtype"], meta["eot"], meta["splits"]]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
