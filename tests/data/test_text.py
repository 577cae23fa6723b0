import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import words, write_invalid_utf8, write_json_lines, write_parquet
from xsa_jax.data import text
from xsa_jax.errors import UserError


def read(path, on_error="fail"):
    reader = text.Reader(path, on_error)
    return [document for batch in reader.batches() for document in batch], reader


def assert_named(path, reason, *parts, kept, count=1):
    """Fatal by default and named; skipped on demand, counted, named, and nothing else lost."""
    with pytest.raises(UserError) as raised:
        read(path)
    for part in (str(path), "--on-error skip", *parts):
        assert part in str(raised.value)
    found, reader = read(path, "skip")
    assert found == kept
    assert dict(reader.skipped) == {reason: count}
    assert all(part in reader.named[0] for part in (str(path), *parts))


@pytest.mark.fast
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_reads_every_format(tmp_path, name):
    texts = words(600)
    (write_parquet if name.endswith("parquet") else write_json_lines)(tmp_path / name, texts)
    found, reader = read(tmp_path / name)
    assert found == texts
    assert reader.fraction == 1.0
    assert not reader.skipped


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_reads_every_text_type(tmp_path, kind):
    texts = words(10)
    data = [item.encode() for item in texts] if "binary" in str(kind) else texts
    assert read(write_parquet(tmp_path / "a.parquet", data, kind))[0] == texts


def test_reads_the_text_column_alone_of_nine(tmp_path):
    names = ["text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count"]
    pq.write_table(pa.table({name: [f"{name} {row}" for row in range(5)] for name in names}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == [f"text {row}" for row in range(5)]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_batches_are_bounded(tmp_path, name):
    texts = words(2 * text.BATCH_DOCUMENTS + 3)
    path = tmp_path / name
    write_parquet(path, texts, rows_per_group=10**6) if name == "a.parquet" else write_json_lines(path, texts)
    reader = text.Reader(path, "fail")
    sizes, fractions = zip(*[(len(batch), reader.fraction) for batch in reader.batches()], strict=True)
    assert sizes == (text.BATCH_DOCUMENTS, text.BATCH_DOCUMENTS, 3)
    assert list(fractions) == sorted(fractions)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_empty_documents_are_counted_and_never_fatal(tmp_path, name):
    texts = ["one", "", "two", None, " \n", "three"]
    (write_parquet if name == "a.parquet" else write_json_lines)(tmp_path / name, texts)
    found, reader = read(tmp_path / name)
    assert found == ["one", "two", "three"]
    assert reader.skipped == {"empty": 3}
    assert "row 1" in reader.named[0] or "line 2" in reader.named[0]


def test_truncated_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", words(50))
    path.write_bytes(path.read_bytes()[:-20])
    assert_named(path, "unreadable_file", "truncated", kept=[])


def test_corrupt_row_group(tmp_path):
    texts = words(12)
    path = write_parquet(tmp_path / "a.parquet", texts)
    column = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle] ^= 0xFF
    path.write_bytes(data)
    assert_named(path, "corrupt", "rows 4 to 7", kept=texts[:4] + texts[8:], count=4)


def test_missing_column(tmp_path):
    pq.write_table(pa.table({"content": ["a", "b"], "id": ["1", "2"]}), tmp_path / "a.parquet")
    assert_named(tmp_path / "a.parquet", "no_text", "'text'", "content, id", kept=[], count=2)


def test_text_column_of_another_type(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [1, 2, 3], pa.int64())
    assert_named(path, "no_text", "int64", kept=[], count=3)


def test_parquet_that_is_not_utf8(tmp_path):
    path = write_invalid_utf8(tmp_path / "a.parquet", [b"good", b"bad \xff here", "fé".encode()])
    assert_named(path, "not_utf8", "row 1", "byte 4", kept=["good", "fé"])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "\xff"}', "not_utf8", "UTF-8"),
        (b'{"text": "\\ud800"}', "not_utf8", "surrogates"),
        (b'{"text": "cut', "not_json", "JSON"),
        (b'{"body": "x"}', "no_text", "'text'"),
        (b'{"text": 7}', "no_text", "'text'"),
        (b'["text"]', "no_text", "'text'"),
        (b"[" * 100_000, "not_json", "recursion"),
    ],
)
def test_bad_line(tmp_path, line, reason, detail):
    path = write_json_lines(tmp_path / "a.jsonl", ["one", b"", line, "two"])
    assert_named(path, reason, "line 3", detail, kept=["one", "two"])


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_truncated_stream(tmp_path, suffix):
    texts = words(2000)
    path = write_json_lines(tmp_path / f"a.jsonl.{suffix}", texts)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="truncated"):
        read(path)
    found, reader = read(path, "skip")
    assert 0 < len(found) < len(texts)
    assert found == texts[: len(found)]
    assert reader.skipped == {"unreadable_file": 1}


def test_names_only_so_many_problems_but_counts_all(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", [""] * (text.NAMED_MOST + 5))
    _, reader = read(path)
    assert reader.skipped == {"empty": text.NAMED_MOST + 5}
    assert len(reader.named) == text.NAMED_MOST


def test_expand_keeps_order_sorts_globs_and_drops_repeats(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "z.parquet", "odd[1].jsonl", "notes.md"):
        (tmp_path / name).touch()
    found = text.expand([str(tmp_path / "z.parquet"), str(tmp_path / "?.*"), str(tmp_path / "odd[1].jsonl")])
    assert [path.name for path in found] == ["z.parquet", "a.jsonl", "b.jsonl", "odd[1].jsonl"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("none/*.parquet", "no such file"), ("gone.jsonl", "no such file"), (".", "folder"), ("notes.md", "expected one of .parquet")],
)
def test_expand_errors(tmp_path, monkeypatch, pattern, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").touch()
    with pytest.raises(UserError, match=message):
        text.expand([pattern])
