"""Conversion of one input file into one shard per split."""

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
    """The settings that determine the content of a store, together with its inputs.

    Attributes:
      tokenizer: name or path of the tokenizer, as for `tokenizer.load`.
      validation_fraction: expected share of documents in the validation split, which a hash of their text selects.
      eot: positions of end-of-text tokens in each document.
      on_error: whether a broken document or file is skipped or raises an error.
    """

    tokenizer: str
    validation_fraction: float
    eot: EotPolicy
    on_error: text.OnError


@dataclasses.dataclass(frozen=True)
class Job:
    """The conversion of one input file.

    Attributes:
      index: index of the file among all inputs.
      path: path of the file.
      output: folder of the store.
      settings: settings of the store.
    """

    index: int
    path: Path
    output: Path
    settings: Settings


# Called with the number of tokens written and the fraction of the file read, both since the last call.
Report = Callable[[int, float], None]


def convert(job: Job, report: Report) -> dict[str, Any]:
    """Writes the shards of one input file.

    Args:
      job: the conversion to do.
      report: called after each batch of documents; see `Report`.

    Returns:
      {"shards": {split: record of the shard}, "skipped": {reason: count}, "named": [one line per skipped document, ...],
      "hash": hash of the file}

    Raises:
      UserError: the tokenizer cannot be loaded, a document encodes to an end-of-text token, or as `text.Reader.batches`.
    """
    settings = job.settings
    encoder = tokenizer.load(settings.tokenizer)
    dtype = token_dtype(encoder.vocab_size)
    before = [encoder.eot_id] if settings.eot in ("start", "both") else []
    after = [encoder.eot_id] if settings.eot in ("end", "both") else []
    input_hash = file_hash(job.path)  # before the file is read: if it changes during reading, its hash will not match
    reader = text.Reader(job.path, settings.on_error)
    reported_fraction = 0.0
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(job.output, split, f"{job.index:05}", dtype))
            for split in ("train", "validation")
        }
        for documents in reader.batches():
            encoded: dict[str, list[list[int]]] = {split: [] for split in writers}
            sizes = dict.fromkeys(writers, 0)
            for document, ids in zip(documents, encoder.encode_batch(documents), strict=True):
                if not ids:
                    reader.skipped["empty"] += 1  # a normalizer may drop every character
                    continue
                if encoder.eot_id in ids:
                    raise UserError(f"tokenizer {encoder.name!r} made end-of-text of the text {document[:80]!r} in {job.path}")
                data = document.encode()
                split = "validation" if _in_validation(data, settings.validation_fraction) else "train"
                encoded[split].append(before + ids + after)
                sizes[split] += len(data)
            for split, writer in writers.items():
                writer.add(encoded[split], sizes[split])
            report(sum(len(ids) for split in writers for ids in encoded[split]), reader.fraction - reported_fraction)
            reported_fraction = reader.fraction
        shards = {split: record for split, writer in writers.items() if (record := writer.commit())}
    skipped = dict(sorted(reader.skipped.items()))
    return {"shards": shards, "skipped": skipped, "named": reader.named, "hash": input_hash}


def file_hash(path: Path) -> str | None:
    """Hex digest of a file's bytes; None for a file that cannot be read, which `text.Reader` reports."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return None


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _in_validation(data: bytes, fraction: float) -> bool:
    # The content decides, so that all copies of a document are in the same split, whatever their files.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < fraction * 2**64
