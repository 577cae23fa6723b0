"""Real FineWeb-Edu and C4 documents through GPT-2's tokenizer; needs the data beside the repository."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import documents, settings
from tests.helpers import SHARED_DATA
from xsa_jax.data.loader import Loader
from xsa_jax.data.prepare import prepare
from xsa_jax.data.store import TokenStore

TEXT = SHARED_DATA / "text"
pytestmark = pytest.mark.skipif(not TEXT.exists(), reason="needs real text")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    output = tmp_path_factory.mktemp("real") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tokenizers" / "tiktoken_cache"))
        inputs = [str(TEXT / "fineweb_edu_150docs.parquet"), str(TEXT / "c4_*.parquet")]
        prepare(inputs, output, settings("gpt2", validation_fraction=0.02))
        yield TokenStore.open(output)


@pytest.mark.parametrize("name", ["fineweb_edu_150docs", "c4_train", "c4_validation"])
def test_token_counts_equal_the_column(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tokenizers" / "tiktoken_cache"))
    prepare([str(TEXT / f"{name}.parquet")], tmp_path / "store", settings("gpt2"))
    store = TokenStore.open(tmp_path / "store")
    table = pq.read_table(TEXT / f"{name}.parquet")
    assert [len(ids) - 1 for ids in documents(store)] == table["token_count"].to_pylist()
    assert store.split("train").num_bytes == sum(len(text.encode()) for text in table["text"].to_pylist())


def test_documents_come_back_as_they_were(store):
    store.verify()
    decode = store.tokenizer().decode
    texts = {decode(ids[:-1]) for split in ("train", "validation") for ids in documents(store, split)}
    wanted = {text for path in TEXT.glob("[cf]*.parquet") for text in pq.read_table(path)["text"].to_pylist()}
    assert texts == wanted


def test_it_loads(store):
    assert (store.split("train").dtype, store.eot_id) == (np.uint16, 50256)
    batch = next(Loader(store, "train", seq_len=1024, batch_size=8, documents="isolate").iterate())
    ends = np.cumsum(batch["tokens"] == 50256, axis=1)
    np.testing.assert_array_equal(batch["segment_ids"][:, 1:], ends[:, :-1])
    text = store.tokenizer().decode(batch["tokens"][0])
    assert text.count(" the ") > 5
