"""Reading of documents from files: parquet with a `text` column, and JSON lines, plain or compressed.

Of FineWeb's nine parquet columns only `text` is read. Memory is bounded by one batch of documents.
"""

import glob
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from xsa_jax.errors import UserError

OnError = Literal["skip", "fail"]
BATCH_DOCUMENTS = 256
NAMED_MOST = 1000  # largest number of skipped documents per file that get a line in `Reader.named`

_TEXT_TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = (".parquet", *_JSON_SUFFIXES, *(json + packed for json in _JSON_SUFFIXES for packed in _COMPRESSION))


def expand(patterns: Sequence[str]) -> list[Path]:
    """The distinct files that match the patterns, in the order of the patterns. The matches of a glob are sorted.

    Args:
      patterns: paths and globs.

    Raises:
      UserError: a pattern matches nothing or a folder, or a file has a suffix that is not in `SUFFIXES`.
    """
    files: dict[str, Path] = {}
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise UserError(f"--input {pattern}: no such file; expected a path, or a glob in quotes such as 'fineweb/*.parquet'")
        for name in found:
            path = Path(name)
            if path.is_dir():
                raise UserError(f"--input {name} is a folder; expected files, such as '{path / '*.parquet'}'")
            if not path.name.endswith(SUFFIXES):
                raise UserError(f"--input {name}: expected one of {', '.join(SUFFIXES)}")
            files.setdefault(os.path.realpath(name), path)
    return list(files.values())


class Reader:
    """Reads the documents of one file.

    Attributes:
      path: path of the file.
      on_error: whether a broken document or file is skipped or raises an error.
      skipped: number of skipped documents by reason; for "unreadable_file", the number of files.
      named: one line for each of the first `NAMED_MOST` skipped documents.
      fraction: fraction of the file that was read, from 0 to 1.
    """

    def __init__(self, path: Path, on_error: OnError):
        self.path = path
        self.on_error = on_error
        self.skipped: Counter[str] = Counter()
        self.named: list[str] = []
        self.fraction = 0.0

    def batches(self) -> Iterator[list[str]]:
        """Yields lists of non-empty documents, in file order.

        Raises:
          UserError: the file or a document is broken and `on_error` is "fail". The message names the file and the row.
        """
        yield from self._parquet() if self.path.name.endswith(".parquet") else self._json_lines()
        self.fraction = 1.0

    def _reject(self, reason: str, where: str, detail: object, count: int = 1) -> None:
        message = f"{self.path}: {where}: {detail}"
        if self.on_error == "fail" and reason != "empty":
            raise UserError(f"{message}. Mend it, or leave it out with --on-error skip")
        self.skipped[reason] += count
        if len(self.named) < NAMED_MOST:
            self.named.append(message)

    def _parquet(self) -> Iterator[list[str]]:
        try:
            file = pq.ParquetFile(self.path, pre_buffer=False, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            self._reject("unreadable_file", "not readable as parquet, truncated or corrupt", _first_line(error))
            return
        with file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            if "text" not in schema.names:
                self._reject("no_text", "file", f"no column 'text'; its columns are {', '.join(schema.names)}", rows)
                return
            kind = schema.field("text").type
            if kind not in _TEXT_TYPES:
                self._reject("no_text", "file", f"column 'text' holds {kind}; expected string", rows)
                return
            row = 0
            for group in range(file.num_row_groups):
                end = row + file.metadata.row_group(group).num_rows
                try:
                    for batch in file.iter_batches(BATCH_DOCUMENTS, row_groups=[group], columns=["text"], use_threads=False):
                        yield self._documents(batch.column(0), row)
                        row += len(batch)
                        self.fraction = row / rows
                except (pa.ArrowException, OSError) as error:
                    self._reject("corrupt", f"rows {row} to {end - 1}", f"corrupt parquet: {_first_line(error)}", end - row)
                row = end

    def _documents(self, column: pa.Array, first: int) -> list[str]:
        documents = []
        for row, data in enumerate(column.cast(pa.large_binary()).to_pylist(), first):
            try:
                text = "" if data is None else data.decode()
            except UnicodeDecodeError as error:
                self._reject("not_utf8", f"row {row}", f"not UTF-8 ({error.reason} at byte {error.start})")
                continue
            if text.strip():
                documents.append(text)
            else:
                self._reject("empty", f"row {row}", "empty document")
        return documents

    def _json_lines(self) -> Iterator[list[str]]:
        size = max(self.path.stat().st_size, 1)
        line = 0
        documents: list[str] = []
        try:
            with open(self.path, "rb") as raw, _decompress(raw, self.path) as lines:
                for line, data in enumerate(lines, 1):
                    text = self._json_text(data, line)
                    if text is not None:
                        documents.append(text)
                    if len(documents) == BATCH_DOCUMENTS:
                        self.fraction = raw.tell() / size
                        yield documents
                        documents = []
        except (pa.ArrowException, OSError) as error:
            self._reject("unreadable_file", f"after line {line}", f"truncated or corrupt: {_first_line(error)}")
        yield documents

    def _json_text(self, data: bytes, line: int) -> str | None:
        where = f"line {line}"
        if not data.strip():
            return None
        try:
            record: Any = json.loads(data.decode())
            text = record["text"] if isinstance(record, dict) and "text" in record else self
            if isinstance(text, str):
                text.encode()  # JSON can hold a lone surrogate, which UTF-8 cannot encode
        except UnicodeError as error:
            self._reject("not_utf8", where, f"not UTF-8 ({error})")
            return None
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            self._reject("not_json", where, f"not JSON ({error})")
            return None
        if text is not None and not isinstance(text, str):
            self._reject("no_text", where, "expected an object with a string field 'text'")
            return None
        if not text or not text.strip():
            self._reject("empty", where, "empty document")
            return None
        return text


def _decompress(raw: io.BufferedReader, path: Path) -> io.BufferedReader:
    compression = _COMPRESSION.get(path.suffix)
    # pyarrow's streams report a truncated zstd frame; those of the zstandard package do not.
    stream: Any = pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression) if compression else raw
    return io.BufferedReader(stream, 1 << 16)  # a truncated file may lose this many bytes before the cut, too


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
