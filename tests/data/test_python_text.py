import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import documents, settings
from tests.helpers import subprocess_env
from xsa_jax.data import python_text
from xsa_jax.data.prepare import prepare
from xsa_jax.data.store import TokenStore


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    output = tmp_path_factory.mktemp("corpus")
    assert python_text.main(["--output", str(output)]) == 0
    return sorted(output.iterdir())


def test_files_look_like_fineweb(corpus):
    assert [path.name for path in corpus] == [f"python_text_{index}.parquet" for index in range(4)]
    for path in corpus:
        file = pq.ParquetFile(path)
        columns = "text id dump url date file_path language language_score token_count"
        assert file.schema_arrow.names == columns.split()
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
        assert file.schema_arrow.field("token_count").type == pa.int64()


def test_it_is_about_two_megabytes_of_distinct_english(corpus):
    rows = pa.concat_tables(pq.read_table(path) for path in corpus).to_pydict()
    texts = rows["text"]
    assert 1.5e6 < sum(map(len, texts)) < 4e6
    assert len(set(texts)) == len(texts) == len(set(rows["id"]))
    assert any(" generator " in text for text in texts)
    assert sum(where.startswith("pydoc_data") for where in rows["file_path"]) > 50
    words = " ".join(texts).split()
    assert 0.03 < sum(word == "the" for word in words) / len(words) < 0.1


def test_it_is_the_same_every_time(corpus, tmp_path):
    run = [sys.executable, "-m", "xsa_jax.data.python_text", "--output", str(tmp_path)]
    subprocess.run(run, env=subprocess_env(PYTHONHASHSEED="1"), check=True, capture_output=True)
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == [path.read_bytes() for path in corpus]


def test_files_that_hold_it_already_are_left_alone(tmp_path):
    paths = python_text.write(tmp_path)
    prepare([str(tmp_path / "*.parquet")], tmp_path / "store", settings())
    paths[1].write_bytes(b"cut short")
    before = [path.stat().st_mtime_ns for path in paths]
    content = paths[0].read_bytes()
    python_text.write(tmp_path)
    after = [path.stat().st_mtime_ns for path in paths]
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True, True]
    assert paths[0].read_bytes() == content
    prepare([str(tmp_path / "*.parquet")], tmp_path / "store", settings())


def test_an_output_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert python_text.main(["--output", str(tmp_path / "file")]) == 1
    assert re.fullmatch(r"python_text: --output .*file: .*File exists.*; expected a folder .*\n", capsys.readouterr().err)


def test_it_prepares(corpus, tmp_path):
    prepare([str(corpus[0].parent / "*.parquet")], tmp_path / "store", settings(validation_fraction=0.05))
    store = TokenStore.open(tmp_path / "store")
    store.verify()
    assert store.meta["made"]["skipped"] == {}
    counts = sorted(len(ids) - 1 for split in ("train", "validation") for ids in documents(store, split))
    assert counts == sorted(count for path in corpus for count in pq.read_table(path)["token_count"].to_pylist())
