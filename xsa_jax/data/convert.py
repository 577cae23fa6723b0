"""One input file -> its shard of each split, by one worker."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from xsa_jax.data import text, tokenizer
from xsa_jax.data.shard import EotPolicy, ShardWriter
from xsa_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the content of a store, beside its inputs.

    Attributes:
      tokenizer: what `tokenizer.load` takes.
      validation_fraction: expected share of documents in the validation split, chosen by a hash of their text.
      eot: where end-of-text tokens go.
      on_error: what a broken document or file does.
    """

    tokenizer: str
    validation_fraction: float
    eot: EotPolicy
    on_error: text.OnError


@dataclasses.dataclass(frozen=True)
class Job:
    index: int
    path: Path
    output: Path
    settings: Settings


Report = Callable[[int, float], None]  # (tokens written, fraction of the file read), each since the last call


def convert(job: Job, report: Report) -> dict[str, Any]:
    """Writes the shards of one input file.

    Returns:
      {"shards": {split: record}, "skipped": {reason: count}, "named": [line, ...], "hash": of the file}

    Raises:
      UserError: see `text.Reader.batches`.
    """
    settings = job.settings
    encoder = tokenizer.load(settings.tokenizer)
    dtype = token_dtype(encoder.vocab_size)
    before = [encoder.eot_id] if settings.eot in ("start", "both") else []
    after = [encoder.eot_id] if settings.eot in ("end", "both") else []
    content = file_hash(job.path)  # before reading: a file that changes under the reader will not match
    reader = text.Reader(job.path, settings.on_error)
    read = 0.0
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(ShardWriter(job.output, name, f"{job.index:05}", dtype)) for name in ("train", "validation")
        }
        for documents in reader.batches():
            encoded: dict[str, list[list[int]]] = {name: [] for name in writers}
            sizes = dict.fromkeys(writers, 0)
            for document, ids in zip(documents, encoder.encode_batch(documents), strict=True):
                if not ids:
                    reader.skipped["empty"] += 1  # a normalizer may drop every character
                    continue
                if encoder.eot_id in ids:
                    raise UserError(f"tokenizer {encoder.name!r} made end-of-text of the text {document[:80]!r} in {job.path}")
                data = document.encode()
                name = "validation" if _in_validation(data, settings.validation_fraction) else "train"
                encoded[name].append(before + ids + after)
                sizes[name] += len(data)
            for name, writer in writers.items():
                writer.add(encoded[name], sizes[name])
            report(sum(len(ids) for name in writers for ids in encoded[name]), reader.fraction - read)
            read = reader.fraction
        shards = {name: record for name, writer in writers.items() if (record := writer.commit())}
    skipped = dict(sorted(reader.skipped.items()))
    return {"shards": shards, "skipped": skipped, "named": reader.named, "hash": content}


def file_hash(path: Path) -> str | None:
    """Of an input's bytes; None when it cannot be read, which `Reader` has reported."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return None


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _in_validation(data: bytes, fraction: float) -> bool:
    # By content, so that copies of a document, in whatever file, never stand on both sides.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < fraction * 2**64
