"""The token store: a folder of tokenized text, written once and read at random positions by memory map.

    meta.json                   tokenizer, end-of-text policy, counts and hashes; a store with this file is complete
    tokenizer.json              copy of the `tokenizers` JSON file, if one was used
    skipped.txt                 skipped documents with the reason, if there are any
    train/00000.tokens.npy      token ids of all documents of one input file, uint16 or uint32 by vocabulary
    train/00000.starts.npy      position of each document's first token in that file, uint64
    validation/...

One store serves every context length. A store does not depend on the machine or on the number of workers that made it.
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
    """A finished token store.

    Attributes:
      path: folder of the store.
      meta: content of meta.json; see `write_meta` for the fields.
      hash: hash of the content; it does not depend on the path or on how the store was made.
      tokenizer_name: name of the tokenizer.
      vocab_size: vocabulary size of the tokenizer.
      eot_id: token id of the tokenizer's end of text.
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
        """Opens a store and checks its meta and the size of every file, without reading the tokens.

        Raises:
          UserError: there is no store, or it is unfinished, damaged or of another format.
        """
        folder = Path(path)
        meta = read_meta(folder)
        store = cls(folder, meta)
        for name in meta["splits"]:
            store.split(name)
        return store

    def split(self, name: str) -> "Split":
        """The split "train" or "validation".

        Raises:
          UserError: the store has no such split.
        """
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
          UserError: the tokenizer cannot be loaded, or the installed one has another fingerprint.
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
        """Reads every shard, and checks hashes, counts and the position of every end-of-text token.

        Raises:
          UserError: a shard is damaged. The message names the first such shard.
        """
        for name in self.meta["splits"]:
            for shard in self.split(name).shards:
                shard.verify(self.meta["eot"], self.eot_id)


class Split:
    """One split as a single sequence of tokens, across the borders of shards.

    Attributes:
      store_path: folder of the store.
      name: "train" or "validation".
      dtype: dtype of the token ids.
      shards: shards of the split, in order.
      num_tokens: number of tokens, end-of-text tokens included.
      num_documents: number of documents.
      num_bytes: number of UTF-8 bytes of the documents' text.
      bytes_per_token: mean number of bytes per token, which converts nats per token to bits per byte.
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
        self._shard_starts = np.cumsum([0] + [shard.num_tokens for shard in self.shards])

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map would be pickled with its whole content. Instead, a worker opens the files.
        return _open_split, (self.store_path, self.name)

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of the tokens in [start, stop), [stop - start] in the store's dtype.

        Raises:
          IndexError: the range exceeds the split.
        """
        return self._gather(start, stop, lambda shard, base, a, b: shard.tokens[a:b], self.dtype)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, ascending, int64.

        Raises:
          IndexError: the range exceeds the split.
        """

        def starts_in_shard(shard: "Shard", base: int, a: int, b: int) -> np.ndarray:
            low, high = np.searchsorted(shard.starts, np.array([a, b], np.uint64))
            return shard.starts[low:high].astype(np.int64) + base

        return self._gather(start, stop, starts_in_shard, np.dtype(np.int64))

    def _gather(self, start: int, stop: int, read: Any, dtype: np.dtype) -> np.ndarray:
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        parts = []
        index = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        while start < stop:
            shard, base = self.shards[index], int(self._shard_starts[index])
            end = min(stop, base + shard.num_tokens)
            parts.append(read(shard, base, start - base, end - base))
            start, index = end, index + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype)


def _open_split(path: Path, name: str) -> Split:
    return TokenStore(path, read_meta(path)).split(name)


def write_meta(
    path: Path, tokenizer: dict[str, Any], dtype: str, eot: EotPolicy, splits: Mapping[str, list[Any]], made: dict[str, Any]
) -> dict[str, Any]:
    """Completes a store by writing its meta, and returns the meta.

    Args:
      path: folder of the store.
      tokenizer: name, fingerprint, vocab_size and eot_id of the tokenizer.
      dtype: name of the dtype of the token ids.
      eot: positions of end-of-text tokens in each document.
      splits: records of the shards by split, as `ShardWriter.commit` returned them.
      made: origin of the store (validation_fraction, on_error, inputs, skipped); it is not part of the hash.
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
    """The content of meta.json, which `write_meta` wrote.

    Raises:
      UserError: there is no finished store of this format, or meta.json is damaged.
    """
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
