"""Small inputs and stores for the tests of data."""

import gzip
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from xsa_jax.data.convert import Settings, token_dtype
from xsa_jax.data.prepare import prepare
from xsa_jax.data.shard import ShardWriter
from xsa_jax.data.store import TokenStore, write_meta


def settings(tokenizer: str = "bytes", validation_fraction: float = 0.0, eot: Any = "end", on_error: Any = "fail") -> Settings:
    return Settings(tokenizer, validation_fraction, eot, on_error)


def write_parquet(path: Path, texts: Sequence[Any], kind: pa.DataType | None = None, rows_per_group: int = 4) -> Path:
    table = pa.table({"id": [str(i) for i in range(len(texts))], "text": pa.array(texts, kind or pa.string())})
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True, use_dictionary=False)
    return path


def write_invalid_utf8(path: Path, data: Sequence[bytes]) -> Path:
    """Parquet whose column claims to be a string, as a faulty writer leaves it."""
    offsets = np.cumsum([0] + [len(item) for item in data]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(data))]
    column = pa.Array.from_buffers(pa.string(), len(data), buffers)
    pq.write_table(pa.table({"text": column}), path)
    return path


def write_json_lines(path: Path, lines: Sequence[Any]) -> Path:
    """Lines that are bytes go in as they are, others as the `text` of an object; packed as the suffix says, in two members."""
    parts = [line if isinstance(line, bytes) else json.dumps({"text": line}).encode() for line in lines]
    half = len(parts) // 2
    members = [b"".join(part + b"\n" for part in some) for some in (parts[:half], parts[half:])]
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(b"".join(pack(member) for member in members))
    return path


def words(count: int, seed: int = 0) -> list[str]:
    """Distinct documents of 20 to 200 letters and spaces, some with letters of several bytes."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghij klmnop é漢"))
    return [f"{seed}-{i} " + "".join(rng.choice(letters, rng.integers(20, 200))) for i in range(count)]


def text_store(folder: Path, texts: Sequence[str], files: int = 1, **chosen: Any) -> TokenStore:
    """Prepares the texts, dealt to several files, with the `bytes` tokenizer unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        write_json_lines(folder / f"{index}.jsonl", texts[index::files])
    prepare([str(folder / "*.jsonl")], folder / "store", settings(**chosen))
    return TokenStore.open(folder / "store")


def number_store(folder: Path, shards: Sequence[Sequence[int]], vocab_size: int = 1 << 20) -> TokenStore:
    """A store whose token at position p is p. shards: for each shard the lengths of its documents."""
    records, position = [], 0
    folder.mkdir()
    for index, lengths in enumerate(shards):
        writer = ShardWriter(folder, "train", f"{index:05}", token_dtype(vocab_size))
        for length in lengths:
            writer.add([list(range(position, position + length))], length)
            position += length
        records.append(writer.commit())
    described = {"name": "numbers", "fingerprint": "-", "vocab_size": vocab_size, "eot_id": vocab_size - 1}
    made = {"validation_fraction": 0.0, "on_error": "fail", "inputs": [], "skipped": {}}
    write_meta(folder, described, token_dtype(vocab_size).name, "none", {"train": records}, made)
    return TokenStore.open(folder)


def documents(store: TokenStore, split: str = "train") -> Iterator[list[int]]:
    """The ids of each document, end-of-text tokens included."""
    part = store.split(split)
    borders = [*part.starts(0, part.num_tokens), part.num_tokens]
    for start, stop in itertools.pairwise(borders):
        yield part.read(start, stop).tolist()


def files_of(folder: Path) -> dict[str, str]:
    """Every file under the folder with a hash of its bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest() for path in paths}
