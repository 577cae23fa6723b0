"""One shard of a token store: the documents of one input file in one split, as a pair of .npy files."""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from xsa_jax.errors import UserError
from xsa_jax.files import sync_folder

EotPolicy = Literal["end", "start", "both", "none"]
EOTS_PER_DOCUMENT: Mapping[str, int] = {"end": 1, "start": 1, "both": 2, "none": 0}
MAX_MAPS = 128  # memory maps open at once; each holds a file descriptor, and a process may have as few as 256


class Shard:
    """The documents of one input file in one split, read by memory map.

    Args:
      store: folder of the store.
      split: "train" or "validation".
      record: the shard's entry in meta.json.
      dtype: dtype of the token ids.

    Attributes:
      path: path of the shard's files without their suffixes.
      hash: hash of the content.
      num_tokens: number of tokens, end-of-text tokens included.
      num_documents: number of documents.
      num_bytes: number of UTF-8 bytes of the documents' text.

    Raises:
      UserError: a file is missing, unreadable, or of another length or dtype than the record says.
    """

    def __init__(self, store: Path, split: str, record: Mapping[str, Any], dtype: np.dtype):
        self.path = store / split / record["name"]
        self.hash: str = record["hash"]
        self.num_tokens: int = record["tokens"]
        self.num_documents: int = record["documents"]
        self.num_bytes: int = record["bytes"]
        self._tokens = _checked_file(self.path.with_name(f"{self.path.name}.tokens.npy"), self.num_tokens, dtype)
        self._starts = _checked_file(self.path.with_name(f"{self.path.name}.starts.npy"), self.num_documents, np.dtype(np.uint64))

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of all documents, one after the other, [num_tokens]."""
        return _map(self._tokens)

    @property
    def starts(self) -> np.ndarray:
        """Position of the first token of each document, uint64 [num_documents]."""
        return _map(self._starts)

    def verify(self, eot: EotPolicy, eot_id: int) -> None:
        """Reads the shard, and checks its hash and its end-of-text tokens.

        Raises:
          UserError: the content differs from what was written.
        """
        tokens = self.tokens
        hashes = [hashlib.blake2b(array.data, digest_size=16) for array in (tokens, self.starts)]
        if shard_hash(*hashes) != self.hash:
            raise UserError(f"{self.path}: its content changed since it was written; restore it, or prepare the store anew")
        starts = self.starts.astype(np.int64)
        found = int(np.count_nonzero(tokens == eot_id))
        wanted = EOTS_PER_DOCUMENT[eot] * self.num_documents
        last = np.append(starts[1:], self.num_tokens) - 1
        placed = (eot not in ("start", "both") or (tokens[starts] == eot_id).all()) and (
            eot not in ("end", "both") or (tokens[last] == eot_id).all()
        )
        if found != wanted or not placed:
            raise UserError(
                f"{self.path}: {found} end-of-text tokens in {self.num_documents} documents; expected {wanted}, "
                f"placed by --eot {eot}. Prepare the store anew"
            )


@dataclasses.dataclass(frozen=True, eq=False)  # so that `_map` never returns the map of an older file of this name
class _NpyFile:
    path: Path
    offset: int
    length: int
    dtype: np.dtype


def _checked_file(path: Path, length: int, dtype: np.dtype) -> _NpyFile:
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; restore it, or prepare the store anew") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: cut short or not an .npy file ({error}); restore it, or prepare the store anew") from error
    if array.shape != (length,) or array.dtype != dtype or path.stat().st_size != array.offset + array.nbytes:
        raise UserError(
            f"{path}: holds {array.shape} {array.dtype} in {path.stat().st_size} bytes; meta.json expects ({length},) {dtype}. "
            "Restore it, or prepare the store anew"
        )
    return _NpyFile(path, array.offset, length, dtype)


@functools.lru_cache(MAX_MAPS)
def _map(file: _NpyFile) -> np.ndarray:
    try:
        return np.memmap(file.path, file.dtype, "r", file.offset, file.length)
    except (OSError, ValueError) as error:  # ValueError: the file has shrunk since it was checked
        raise _unreadable(file.path, error) from error


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be mapped into memory ({error}); expected a readable file, and room for {MAX_MAPS} open ones")


class ShardWriter:
    """Writes one shard, in memory bounded by one batch of documents. Leaving its context without `commit` deletes the files.

    Args:
      store: folder of the store.
      split: "train" or "validation".
      name: name of the shard.
      dtype: dtype of the token ids.
    """

    def __init__(self, store: Path, split: str, name: str, dtype: np.dtype):
        folder = store / split
        folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._tokens = _NpyWriter(folder / f"{name}.tokens.npy", dtype)
        self._starts = _NpyWriter(folder / f"{name}.starts.npy", np.dtype(np.uint64))
        self._num_bytes = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in (self._tokens, self._starts):
            writer.close(keep=False)

    def add(self, documents: Sequence[Sequence[int]], num_bytes: int) -> None:
        """Appends documents.

        Args:
          documents: token ids of each document; none is empty.
          num_bytes: number of UTF-8 bytes of their text.
        """
        if not documents:
            return
        lengths = np.array([len(ids) for ids in documents], np.int64)
        tokens = np.concatenate([np.array(ids, self._tokens.dtype) for ids in documents])
        starts = self._tokens.length + np.cumsum(lengths) - lengths
        self._tokens.append(tokens)
        self._starts.append(starts.astype(np.uint64))
        self._num_bytes += num_bytes

    def commit(self) -> dict[str, Any] | None:
        """Makes the shard durable under its final name. Returns its record for meta.json, or None if it has no documents."""
        record = {
            "name": self._name,
            "tokens": self._tokens.length,
            "documents": self._starts.length,
            "bytes": self._num_bytes,
            "hash": shard_hash(self._tokens.hash, self._starts.hash),
        }
        for writer in (self._tokens, self._starts):
            writer.close(keep=self._starts.length > 0)
        return record if self._starts.length else None


def shard_hash(*parts: Any) -> str:
    """Hex digest of a shard, from the hash objects of its files in order."""
    return hashlib.blake2b(b"".join(part.digest() for part in parts), digest_size=16).hexdigest()


class _NpyWriter:
    """Writes a one-dimensional .npy file of growing length. The header has room for the final length."""

    def __init__(self, path: Path, dtype: np.dtype):
        self.dtype = dtype.newbyteorder("<")
        self.length = 0
        self.hash = hashlib.blake2b(digest_size=16)
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file = open(self._temporary, "wb")  # noqa: SIM115 (open as long as the writer)
        self._write_header()

    def append(self, array: np.ndarray) -> None:
        data = array.astype(self.dtype, copy=False).data
        self.hash.update(data)
        self._file.write(data)
        self.length += len(array)

    def close(self, keep: bool) -> None:
        if self._file.closed:
            return
        if not keep:
            with contextlib.suppress(OSError):  # on a full disk the rest of the buffer cannot be written
                self._file.close()
            self._temporary.unlink()
            return
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        sync_folder(self._path.parent)

    def _write_header(self) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
