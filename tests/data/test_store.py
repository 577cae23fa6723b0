import json
import pickle
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.data.helpers import documents, number_store, text_store, words
from tests.helpers import subprocess_env
from xsa_jax.data.shard import ShardWriter
from xsa_jax.data.store import TokenStore, write_meta
from xsa_jax.errors import UserError


@pytest.fixture
def numbers(tmp_path):
    return number_store(tmp_path / "numbers", [[3, 4], [1], [5, 2, 2], [9]])


@pytest.mark.fast
def test_reads_over_shard_borders(numbers):
    split = numbers.split("train")
    assert (split.num_tokens, split.num_documents, split.num_bytes) == (26, 7, 26)
    for start in range(27):
        for stop in range(start, 27):
            assert split.read(start, stop).tolist() == list(range(start, stop))


@pytest.mark.fast
def test_starts_over_shard_borders(numbers):
    split = numbers.split("train")
    starts = [0, 3, 7, 8, 13, 15, 17]
    for start in range(27):
        for stop in range(start, 27):
            assert split.starts(start, stop).tolist() == [position for position in starts if start <= position < stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 27), (5, 4)])
def test_reading_outside(numbers, start, stop):
    with pytest.raises(IndexError, match="of 26"):
        numbers.split("train").read(start, stop)


@pytest.mark.fast
@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "uint32")])
def test_dtype_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    store = number_store(tmp_path / "store", [[4]], vocab_size)
    assert store.split("train").read(0, 4).dtype == dtype
    assert np.load(store.path / "train" / "00000.tokens.npy").dtype == dtype


def test_an_id_beyond_the_dtype_is_an_error_not_a_wrong_id(tmp_path):
    with pytest.raises(OverflowError):
        ShardWriter(tmp_path, "train", "00000", np.dtype(np.uint16)).add([[70_000]], 1)


def test_a_pickled_split_opens_its_files_itself(numbers):
    data = pickle.dumps(numbers.split("train"))
    assert len(data) < 1000
    assert pickle.loads(data).read(5, 9).tolist() == [5, 6, 7, 8]


PASS = """
import resource, sys
from xsa_jax.errors import UserError
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
try:
    store = TokenStore.open(sys.argv[1])
    for _ in range(2):
        loader = Loader(store, "train", seq_len=1, batch_size=1, documents="isolate", max_rows=10**9)
        print(sum(batch["tokens"][0, 0] for batch in loader.iterate()))
except UserError as error:
    print(error)
"""


def test_many_shards_need_few_descriptors(tmp_path):
    store = number_store(tmp_path / "numbers", [[2]] * 150)
    output = [
        subprocess.run([sys.executable, "-c", PASS, store.path, limit], env=subprocess_env(), capture_output=True, text=True)
        for limit in ("192", "64")
    ]
    assert output[0].stdout.split() == [str(sum(range(299)))] * 2, output[0].stderr
    assert ".npy: cannot be mapped into memory ([Errno 24] Too many open files" in output[1].stdout


def test_a_split_is_opened_once(numbers):
    assert numbers.split("train") is numbers.split("train")


def test_a_store_made_anew_in_the_same_place_is_read_anew(tmp_path):
    for text in ("old text", "new text"):
        store = text_store(tmp_path, [text])
        assert [store.tokenizer().decode(ids[:-1]) for ids in documents(store)] == [text]
        shutil.rmtree(store.path)


def test_nothing_under_its_final_name_before_commit(tmp_path):
    writer = ShardWriter(tmp_path, "train", "00000", np.dtype(np.uint16))
    writer.add([[1, 2]], 2)
    assert not list(tmp_path.rglob("*.npy"))
    writer.commit()
    assert {path.name for path in tmp_path.rglob("*.*")} == {"00000.tokens.npy", "00000.starts.npy"}


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ShardWriter(tmp_path, "train", "00000", np.dtype(np.uint16)) as writer:
        writer.add([[1] * 50], 50)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                writer.commit()
            writer.__exit__()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.rglob("*.*"))


def test_the_tokenizer_comes_with_the_store(tmp_path):
    store = text_store(tmp_path, ["some text"])
    assert store.tokenizer().decode(next(documents(store))) == "some text<|endoftext|>"
    assert (store.tokenizer_name, store.vocab_size, store.eot_id) == ("bytes", 257, 256)


def test_another_tokenizer_under_the_same_name(tmp_path, monkeypatch):
    store = text_store(tmp_path, ["some text"])
    monkeypatch.setattr("xsa_jax.data.tokenizer.Bytes.fingerprint", "another")
    with pytest.raises(UserError, match=r"utf8-bytes-eot256.*another"):
        store.tokenizer()


@pytest.mark.fast
@pytest.mark.parametrize("policy", ["end", "start", "both", "none"])
def test_end_of_text_policies(tmp_path, policy):
    texts = words(7)
    store = text_store(tmp_path, texts, eot=policy)
    before, after = policy in ("start", "both"), policy in ("end", "both")
    ids = [[256] * before + list(text.encode()) + [256] * after for text in texts]
    assert list(documents(store)) == ids
    split = store.split("train")
    assert split.num_bytes == sum(len(text.encode()) for text in texts)
    assert split.bytes_per_token == split.num_bytes / sum(map(len, ids))
    assert store.meta["eot"] == policy
    store.verify()


@pytest.mark.parametrize(
    ("documents", "policy"),
    [
        ([[1, 9], [2]], "end"),  # lost
        ([[1, 9, 9], [2, 9]], "end"),  # doubled
        ([[1, 9, 9], [2]], "end"),  # one lost and one doubled: the count alone would not tell
        ([[1, 9], [2, 9]], "start"),
        ([[9, 1, 9], [9, 9, 2]], "both"),
        ([[1, 9]], "none"),
    ],
)
def test_verify_finds_lost_and_doubled_end_of_text(tmp_path, documents, policy):
    writer = ShardWriter(tmp_path, "train", "00000", np.dtype(np.uint16))
    writer.add(documents, 2)
    described = {"name": "numbers", "fingerprint": "-", "vocab_size": 10, "eot_id": 9}
    write_meta(tmp_path, described, "uint16", policy, {"train": [writer.commit()]}, {})
    with pytest.raises(UserError, match=f"00000: . end-of-text tokens in .*--eot {policy}"):
        TokenStore.open(tmp_path).verify()


def test_hash_follows_the_content_alone(tmp_path):
    same = [text_store(tmp_path / name, words(5)) for name in ("a", "b")]
    other = text_store(tmp_path / "c", words(5, seed=1))
    policy = text_store(tmp_path / "d", words(5), eot="start")
    assert same[0].hash == same[1].hash
    assert len({same[0].hash, other.hash, policy.hash}) == 3


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("name", ["00000.tokens.npy", "00001.starts.npy"])
@pytest.mark.parametrize("change", [lambda data: data[:-2], lambda data: data + b"\0", lambda data: b"", lambda data: data[:40]])
def test_shard_of_another_size(tmp_path, name, change):
    store = text_store(tmp_path, words(6), files=2)
    damage(store.path / "train" / name, change)
    with pytest.raises(UserError, match=f"{name}.*prepare the store anew"):
        TokenStore.open(store.path).verify()


def test_open_finds_a_short_shard_without_reading_it(tmp_path):
    store = text_store(tmp_path, words(6))
    damage(store.path / "train" / "00000.tokens.npy", lambda data: data[:-2])
    with pytest.raises(UserError, match=r"00000\.tokens\.npy"):
        TokenStore.open(store.path)


def test_shard_missing(tmp_path):
    store = text_store(tmp_path, words(6))
    (store.path / "train" / "00000.tokens.npy").unlink()
    with pytest.raises(UserError, match=r"00000\.tokens\.npy: missing"):
        TokenStore.open(store.path)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["00000.tokens.npy", "00001.starts.npy"])
def test_verify_finds_one_changed_bit(tmp_path, name):
    store = text_store(tmp_path, words(6), files=2)
    damage(store.path / "train" / name, lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    with pytest.raises(UserError, match=f"{name[:5]}: its content changed"):
        TokenStore.open(store.path).verify()


def edited(**fields):
    return lambda meta: meta | fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edited(format=99), "format 99; this version reads format 1"),
        (edited(eot="none"), "was edited or damaged"),
        (lambda meta: meta | {"tokenizer": meta["tokenizer"] | {"eot_id": 3}}, "was edited or damaged"),
        (lambda meta: {key: meta[key] for key in meta if key != "splits"}, "damaged .*splits"),
        (lambda meta: [], "damaged"),
    ],
)
def test_meta_edited(tmp_path, change, message):
    store = text_store(tmp_path, words(3))
    meta = store.path / "meta.json"
    meta.write_text(json.dumps(change(json.loads(meta.read_text()))))
    with pytest.raises(UserError, match=rf"meta\.json: .*{message}"):
        TokenStore.open(store.path)


def test_meta_cut_short(tmp_path):
    store = text_store(tmp_path, words(3))
    damage(store.path / "meta.json", lambda data: data[:50])
    with pytest.raises(UserError, match=r"meta\.json: damaged"):
        TokenStore.open(store.path)


def test_no_store(tmp_path):
    with pytest.raises(UserError, match=r"no token store here .*python -m xsa_jax\.data\.prepare"):
        TokenStore.open(tmp_path)


def test_unfinished_store(tmp_path):
    (tmp_path / "work").mkdir()
    with pytest.raises(UserError, match="did not finish; run the same prepare command again"):
        TokenStore.open(tmp_path)


def test_no_such_split(tmp_path):
    store = text_store(tmp_path, words(3))
    with pytest.raises(UserError, match=r"no 'validation' split; it has train\..*--validation-fraction 0"):
        store.split("validation")
