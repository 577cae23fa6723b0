"""A demo corpus from English text that ships with Python itself.

    python -m xsa_jax.data.python_text --output DIR

The corpus is the language reference that `help()` shows and the docstrings of the standard library, about 2 MB. It is written as
parquet files with FineWeb's nine columns, so that the demo takes the same path as real data.
"""

import argparse
import ast
import hashlib
import inspect
import io
import platform
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq

from xsa_jax.files import write_bytes

FILES = 4
_LEAST_CHARACTERS = 60  # shorter docstrings are labels, not prose
_NOT_PROSE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
_SCHEMA = pa.schema([
    ("text", pa.string()), ("id", pa.string()), ("dump", pa.string()), ("url", pa.string()), ("date", pa.string()),
    ("file_path", pa.string()), ("language", pa.string()), ("language_score", pa.float64()), ("token_count", pa.int64()),
])  # fmt: skip


def documents() -> Iterator[tuple[str, str]]:
    """Yields (location, text) of each distinct document, in an order that depends only on the Python version."""
    seen = set()
    for location, text in (*_topics(), *_docstrings(Path(sysconfig.get_path("stdlib")))):
        text = inspect.cleandoc(text).strip()
        if len(text) >= _LEAST_CHARACTERS and text not in seen:
            seen.add(text)
            yield location, text


def write(output: Path) -> list[Path]:
    """Writes the corpus as `FILES` parquet files, and returns their paths. A file with the right content is not written again.

    Raises:
      OSError: the folder `output` cannot be written.
    """
    rows = [_row(location, text) for location, text in documents()]
    # Sorted by hash, so that every file holds a similar mixture.
    rows.sort(key=lambda row: str(row["id"]))
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(FILES):
        path = output / f"python_text_{index}.parquet"
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows[index::FILES], _SCHEMA), buffer, compression="zstd", row_group_size=500)
        if not path.exists() or path.read_bytes() != buffer.getvalue():
            write_bytes(path, buffer.getvalue())
        paths.append(path)
    return paths


def _topics() -> Iterator[tuple[str, str]]:
    for name in sorted(topics):
        yield f"pydoc_data/topics.py#{name}", topics[name]


def _docstrings(library: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(library.rglob("*.py")):
        location = path.relative_to(library)
        if _NOT_PROSE.isdisjoint(location.parts):
            for name, text in _docstrings_of_file(path):
                yield f"{location.as_posix()}#{name}", text


def _docstrings_of_file(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in the library's own strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # a template that only looks like Python
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", path.stem), text


def _row(location: str, text: str) -> dict[str, object]:
    version = platform.python_version()
    return {
        "text": text,
        "id": f"<urn:blake2b:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}>",
        "dump": f"python-{version}",
        "url": f"https://docs.python.org/{sys.version_info.major}.{sys.version_info.minor}/",
        "date": "",
        "file_path": location,
        "language": "en",
        "language_score": 1.0,
        "token_count": len(text.encode()),  # the count of the `bytes` tokenizer
    }


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m xsa_jax.data.python_text", description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=Path, help="the folder for the parquet files")
    args = parser.parse_args(argv)
    began = time.monotonic()
    try:
        paths = write(args.output)
    except OSError as error:
        print(f"python_text: --output {args.output}: {error}; expected a folder that can be written", file=sys.stderr)
        return 1
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    print(f"{rows:,} documents in {len(paths)} files under {args.output}, {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
