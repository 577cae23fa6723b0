import itertools
import json
import multiprocessing
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.data.helpers import number_store, text_store, words
from tests.helpers import subprocess_env
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import Split, TokenStore
from xsa_jax.errors import UserError

T, B = 4, 4


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Documents of 1 to 7 tokens over three shards; the token at position p is p, so each row says where it stands."""
    lengths = [[1 + (3 * i + shard) % 7 for i in range(12)] for shard in range(3)]
    return number_store(tmp_path_factory.mktemp("loader") / "numbers", lengths)


def make(store, **changes):
    return Loader(store, "train", **({"seq_len": T, "batch_size": B, "seed": 3} | changes))


def take(loader, count, start=0):
    return list(itertools.islice(loader.iterate(start), count))


def row_numbers(batches):
    """The row that each line of the batches is, in one list, checked to be that row whole."""
    numbers = []
    for batch in batches:
        first = batch["tokens"][:, :1]
        np.testing.assert_array_equal(batch["tokens"], first + np.arange(batch["tokens"].shape[1]))
        numbers += (first[:, 0] // (batch["tokens"].shape[1] - 1)).tolist()
    return numbers


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype == np.int32
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.fast
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(store):
    loader = make(store)
    rows = loader.num_rows
    assert rows == (store.split("train").num_tokens - 1) // T
    stream = row_numbers(take(loader, 3 * rows // B + 1))
    epochs = [stream[start : start + rows] for start in (0, rows, 2 * rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(rows))


def test_no_seed_repeats_the_epochs_of_another(store):
    rows = make(store).num_rows
    epochs = []
    for seed in range(4):
        stream = row_numbers(take(make(store, seed=seed, batch_size=1), 3 * rows))
        epochs += [tuple(stream[start : start + rows]) for start in (0, rows, 2 * rows)]
    assert len(set(epochs)) == 12


@pytest.mark.fast
@pytest.mark.parametrize("seq_len", [1, 3, 8, 16])
def test_any_context_length_from_the_same_store(store, seq_len):
    batches = take(make(store, seq_len=seq_len, max_rows=10**9), 10**9)
    last = (store.split("train").num_tokens - 1) // seq_len
    assert row_numbers(batches) == list(range(last))
    assert batches[0]["tokens"].shape == (B, seq_len + 1)
    assert batches[0].keys() == {"tokens"}


@pytest.mark.fast
def test_segment_ids_count_document_starts_inside_the_row(store):
    split = store.split("train")
    starts = set(split.starts(0, split.num_tokens).tolist())
    for batch in take(make(store, documents="isolate"), 20):
        for tokens, segments in zip(batch["tokens"].tolist(), batch["segment_ids"].tolist(), strict=True):
            assert segments == [sum(p in starts for p in range(tokens[0] + 1, t + 1)) for t in tokens]


def test_real_documents_are_told_apart(tmp_path):
    texts = words(6)
    loader = Loader(text_store(tmp_path, texts), "train", seq_len=700, batch_size=1, documents="isolate", max_rows=1)
    (batch,) = loader.iterate()
    tokens, segments = batch["tokens"][0], batch["segment_ids"][0]
    for index in range(segments[-1]):
        assert bytes(tokens[segments == index][:-1].tolist()).decode() == texts[index]


@pytest.mark.fast
@pytest.mark.parametrize("start", [0, 1, 8, 9, 30])
def test_starting_anywhere_continues_the_stream(store, start):
    loader = make(store, documents="isolate")
    assert_same(take(loader, 5, start), take(loader, start + 5)[start:])


def test_starting_far_in_reads_nothing_before(store, monkeypatch):
    loader = make(store)
    reads = []
    read = Split.read
    monkeypatch.setattr(Split, "read", lambda self, a, b: reads.append(a) or read(self, a, b))
    take(loader, 1, start=10**9)
    assert 0 < len(reads) <= 4 * B


CONTINUE = """
import json, sys
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import Split, TokenStore

path, workers, count, state = json.loads(sys.argv[1])
loader = Loader(TokenStore.open(path), "train", seq_len=4, batch_size=4, seed=3, documents="isolate", workers=workers)
start = loader.check_state(state)
batches = loader.iterate(start)
found = [{name: array.tolist() for name, array in next(batches).items()} for _ in range(count)]
batches.close()
print(json.dumps([found, loader.state(start + count)]))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_continued_again_and_again_in_new_processes_over_epoch_ends(store, workers):
    straight = take(make(store, documents="isolate"), 16)
    epoch = make(store).num_rows / B
    assert 3 < epoch < 9, "each of the two continuations below should cross an epoch end"
    state, found = make(store, documents="isolate").state(3), straight[:3]
    for count in (7, 6):
        argument = json.dumps([str(store.path), workers, count, state])
        run = [sys.executable, "-c", CONTINUE, argument]
        output = subprocess.run(run, env=subprocess_env(), check=True, capture_output=True, text=True)
        assert not output.stderr
        batches, state = json.loads(output.stdout)
        found += [{name: np.array(values, np.int32) for name, values in batch.items()} for batch in batches]
    assert_same(found, straight)
    assert state["step"] == 16


def test_workers_change_nothing_and_end_with_the_iterator(store):
    plain, parallel = make(store, documents="isolate"), make(store, documents="isolate", workers=2)
    batches = parallel.iterate(2)
    assert_same(list(itertools.islice(batches, 9)), take(plain, 9, start=2))
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert not multiprocessing.active_children()
    whole = [list(make(store, max_rows=10**9, workers=workers).iterate()) for workers in (0, 2)]
    assert_same(whole[1], whole[0])


@pytest.mark.fast
@pytest.mark.parametrize("rows", [(0, 1), (2, 3), (1, 3), (0, 1, 2, 3), (2,)])
def test_chosen_rows_are_those_rows_of_each_batch(store, rows):
    """As two processes need them, each half of the batch, and also where a process has shards that are no neighbours."""
    alone = take(make(store, documents="isolate"), 20)
    chosen = take(make(store, documents="isolate", rows=rows), 20)
    assert_same(chosen, [{name: array[list(rows)] for name, array in batch.items()} for batch in alone])
    assert_same(take(make(store, documents="isolate", rows=rows), 3, start=9), chosen[9:12])


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 8, 33])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_pass_has_every_row_once_and_equal_steps_on_every_host(store, rows, count):
    shares = [range(host * B // count, (host + 1) * B // count) for host in range(count)]
    loaders = [make(store, max_rows=rows, rows=share) for share in shares]
    hosts = [list(loader.iterate()) for loader in loaders]
    assert {len(batches) for batches in hosts} == {loaders[0].num_batches} == {-(-rows // B)}
    for step in range(loaders[0].num_batches):
        found = row_numbers(batches[step] for batches in hosts)
        assert sorted(found) == list(range(step * B, min(step * B + B, rows)))
    assert all(batch["tokens"].shape[1] == T + 1 for batches in hosts for batch in batches)
    assert all(len(batch["tokens"]) == B // count for batches in hosts for batch in batches[:-1])


@pytest.mark.fast
def test_the_state_is_small_and_serves_any_number_of_hosts(store):
    loader = make(store, rows=(2, 3), workers=2)
    state = json.loads(json.dumps(loader.state(12345)))
    assert len(json.dumps(state)) < 300
    assert make(store, rows=(3,)).check_state(state) == 12345


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, r"seed \(checkpoint: 3, now: 4\)"),
        ({"seq_len": 8}, r"seq_len \(checkpoint: 4, now: 8\)"),
        ({"batch_size": 8}, r"batch_size \(checkpoint: 4, now: 8\)"),
        ({"documents": "isolate"}, r"documents \(checkpoint: 'ignore', now: 'isolate'\)"),
        ({"max_rows": 9}, r"max_rows \(checkpoint: None, now: 9\)"),
    ],
)
def test_a_state_of_another_stream_is_refused(store, change, message):
    state = make(store).state(5)
    with pytest.raises(UserError, match=f"data stream is another one: {message}\\."):
        make(store, **change).check_state(state)


def test_a_state_of_another_store_or_split_is_refused(tmp_path):
    one, other = (text_store(tmp_path / str(seed), words(20, seed), validation_fraction=0.5) for seed in range(2))
    state = make(one).state(5)
    assert state["tokenizer"] == "utf8-bytes-eot256"
    with pytest.raises(UserError, match=rf"store \(checkpoint: '{one.hash}', now: '{other.hash}'\)"):
        make(other).check_state(state)
    validation = Loader(one, "validation", seq_len=T, batch_size=B, seed=3)
    with pytest.raises(UserError, match=r"split .*'train', now: 'validation'"):
        validation.check_state(state)


def test_a_moved_store_is_the_same_store(store, tmp_path):
    state = make(store).state(5)
    moved = TokenStore.open(shutil.copytree(store.path, tmp_path / "moved"))
    assert make(moved).check_state(state) == 5


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 141}, r"has 141 tokens; expected at least the 142 of one row of data\.seq_len=141"),
        ({"batch_size": 0}, r"data\.batch_size=0"),
        ({"max_rows": 0}, "max_rows=0"),
    ],
)
def test_impossible_loaders(store, change, message):
    with pytest.raises(UserError, match=message):
        make(store, **change)


def test_fewer_rows_than_a_batch_still_train(store):
    loader = make(store, seq_len=50)
    assert loader.num_rows == 2
    assert [sorted(row_numbers([batch])) for batch in take(loader, 3)] == [[0, 0, 1, 1]] * 3
