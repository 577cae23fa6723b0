import collections
import os
import re
import shutil

import pytest

from tests.data.helpers import documents, files_of, settings, text_store, words, write_json_lines, write_parquet
from xsa_jax.data.prepare import main, prepare
from xsa_jax.data.store import TokenStore
from xsa_jax.errors import UserError


@pytest.fixture
def texts_folder(tmp_path):
    """Three files, one of them without a document for the validation split's sake."""
    for index in range(3):
        write_json_lines(tmp_path / f"{index}.jsonl", words(40, seed=index))
    return tmp_path


def begin(folder, **chosen):
    """An interrupted preparation: the first of two files is done, the second is broken."""
    write_json_lines(folder / "0.jsonl", words(5))
    (folder / "1.jsonl").write_bytes(b"not JSON\n")
    with pytest.raises(UserError, match=r"1\.jsonl: line 1"):
        prepare([str(folder / "*.jsonl")], folder / "store", settings(**chosen))


@pytest.mark.fast
def test_every_document_is_in_exactly_one_split_as_its_text_decides(tmp_path):
    texts = words(400)
    one = text_store(tmp_path / "one", texts, files=1, validation_fraction=0.3)
    many = text_store(tmp_path / "many", texts[::-1], files=3, validation_fraction=0.3)
    decode = one.tokenizer().decode
    found = {name: sorted(decode(ids[:-1]) for ids in documents(one, name)) for name in ("train", "validation")}
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert 80 < len(found["validation"]) < 160
    assert sorted(decode(ids[:-1]) for ids in documents(many, "validation")) == found["validation"]
    larger = text_store(tmp_path / "larger", texts, validation_fraction=0.5)
    assert set(found["validation"]) < {decode(ids[:-1]) for ids in documents(larger, "validation")}


def test_copies_of_a_document_stay_on_one_side(tmp_path):
    store = text_store(tmp_path, words(50) * 3, files=3, validation_fraction=0.5)
    sides = [collections.Counter(map(tuple, documents(store, name))) for name in ("train", "validation")]
    assert set(sides[0]).isdisjoint(sides[1])
    assert set((sides[0] + sides[1]).values()) == {3}


def test_workers_change_no_byte(texts_folder):
    pattern = texts_folder / "*.jsonl"
    prepare([str(pattern)], texts_folder / "one", settings(validation_fraction=0.1), workers=1)
    prepare([str(pattern)], texts_folder / "two", settings(validation_fraction=0.1), workers=2)
    assert files_of(texts_folder / "one") == files_of(texts_folder / "two")
    assert {name.split("/")[0] for name in files_of(texts_folder / "one")} == {"meta.json", "train", "validation"}


def test_a_broken_input_can_be_mended_or_skipped_without_starting_over(tmp_path):
    begin(tmp_path)
    assert not list((tmp_path / "store").rglob("*.tmp"))
    done = (tmp_path / "store" / "train" / "00000.tokens.npy").stat().st_mtime_ns
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    prepare([str(tmp_path / "*.jsonl")], tmp_path / "other", settings(on_error="skip"))
    assert TokenStore.open(tmp_path / "other").meta["made"]["skipped"] == {"not_json": 1}
    (tmp_path / "1.jsonl").write_text('{"text": "mended by hand"}\n')
    prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings())
    assert TokenStore.open(tmp_path / "store").split("train").num_documents == 6
    assert (tmp_path / "store" / "train" / "00000.tokens.npy").stat().st_mtime_ns == done


@pytest.mark.fast
def test_an_input_that_changed_after_it_was_read_is_refused(tmp_path):
    begin(tmp_path)
    write_json_lines(tmp_path / "0.jsonl", words(6))
    with pytest.raises(UserError, match=r"half-made.*input 0\.jsonl changed \(it had \d+ bytes of .*, now \d+ bytes of"):
        prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings())
    store = text_store(tmp_path / "finished", words(3))
    write_json_lines(tmp_path / "finished" / "0.jsonl", words(4))
    with pytest.raises(UserError, match=r"finished.*input 0\.jsonl changed"):
        prepare([str(tmp_path / "finished" / "*.jsonl")], store.path, settings())


@pytest.mark.fast
def test_an_input_that_was_only_touched_is_the_same(tmp_path):
    begin(tmp_path)
    os.utime(tmp_path / "0.jsonl", (0, 0))
    (tmp_path / "1.jsonl").write_text('{"text": "mended"}\n')
    meta = prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings())
    os.utime(tmp_path / "0.jsonl", (1, 1))
    assert prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings()) == meta


def test_an_input_changed_without_changing_its_size_is_refused(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", ["one"])
    prepare([str(tmp_path / "0.jsonl")], tmp_path / "store", settings())
    write_json_lines(tmp_path / "0.jsonl", ["two"])
    os.utime(tmp_path / "0.jsonl", (0, 0))
    with pytest.raises(UserError, match=r"finished.*input 0\.jsonl changed"):
        prepare([str(tmp_path / "0.jsonl")], tmp_path / "store", settings())


def test_a_store_with_skipped_documents_is_not_one_without(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", ["one", b"{"])
    prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings(on_error="skip"))
    with pytest.raises(UserError, match="on_error was 'skip', now 'fail'"):
        prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings())


def test_a_failure_in_a_worker_is_the_same_error(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", words(5))
    (tmp_path / "1.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"1\.jsonl: line 1: not UTF-8"):
        prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings(), workers=2)


CHANGES = [
    ({"eot": "start"}, "eot was 'end', now 'start'"),
    ({"validation_fraction": 0.5}, "validation_fraction was 0.0, now 0.5"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_changed_setting_is_refused_before_and_after_the_end(tmp_path, change, message):
    begin(tmp_path)
    with pytest.raises(UserError, match=f"half-made store made otherwise: {re.escape(message)}"):
        prepare([str(tmp_path / "*.jsonl")], tmp_path / "store", settings(**change))
    store = text_store(tmp_path / "finished", words(3))
    before = files_of(store.path)
    with pytest.raises(UserError, match=f"finished store made otherwise: {re.escape(message)}"):
        prepare([str(tmp_path / "finished" / "*.jsonl")], store.path, settings(**change))
    assert files_of(store.path) == before


def test_another_list_of_inputs_is_refused(tmp_path):
    store = text_store(tmp_path, words(3))
    write_json_lines(tmp_path / "more.jsonl", words(2))
    with pytest.raises(UserError, match=r"inputs had 1 files \(0\.jsonl\), now 2 files \(0\.jsonl, more\.jsonl\)"):
        prepare([str(tmp_path / "*.jsonl")], store.path, settings())


def test_another_tokenizer_is_refused(tmp_path, monkeypatch):
    store = text_store(tmp_path, words(3))
    monkeypatch.setattr("xsa_jax.data.tokenizer.Bytes.fingerprint", "another")
    with pytest.raises(UserError, match=r"tokenizer was .*utf8-bytes-eot256.* now .*another"):
        prepare([str(tmp_path / "*.jsonl")], store.path, settings())


def test_a_finished_store_is_found_and_left_alone(tmp_path):
    store = text_store(tmp_path, words(3))
    before = {path: path.stat().st_mtime_ns for path in store.path.rglob("*")}
    assert prepare([str(tmp_path / "*.jsonl")], store.path, settings()) == store.meta
    assert {path: path.stat().st_mtime_ns for path in store.path.rglob("*")} == before


def test_a_folder_with_other_things_is_refused(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", words(3))
    with pytest.raises(UserError, match=r"not empty \(it has 0\.jsonl\)"):
        prepare([str(tmp_path / "0.jsonl")], tmp_path, settings())


def test_two_at_once_are_refused(tmp_path):
    import fcntl

    write_json_lines(tmp_path / "0.jsonl", words(3))
    (tmp_path / "store").mkdir()
    descriptor = os.open(tmp_path / "store", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another prepare is writing here"):
            prepare([str(tmp_path / "0.jsonl")], tmp_path / "store", settings())
    finally:
        os.close(descriptor)
    prepare([str(tmp_path / "0.jsonl")], tmp_path / "store", settings())


def test_skips_by_reason_and_names_what_it_skipped(tmp_path, capsys):
    write_json_lines(tmp_path / "a.jsonl", ["one", "", b"{", "two"])
    (tmp_path / "b.parquet").write_bytes(b"nothing like it")
    write_parquet(tmp_path / "c.parquet", ["three"])
    arguments = ["--input", str(tmp_path / "*.*"), "--tokenizer", "bytes", "--output", str(tmp_path / "store")]
    assert main([*arguments, "--on-error", "skip", "--workers", "1", "--validation-fraction", "0"]) == 0
    store = TokenStore.open(tmp_path / "store")
    assert [store.tokenizer().decode(ids[:-1]) for ids in documents(store)] == ["one", "two", "three"]
    assert store.meta["made"]["skipped"] == {"empty": 1, "not_json": 1, "unreadable_file": 1}
    named = (tmp_path / "store" / "skipped.txt").read_text().splitlines()
    assert [re.search(r"([abc]\.\w+: \w+ \d|b.parquet)", line).group() for line in named] == [
        "a.jsonl: line 2",
        "a.jsonl: line 3",
        "b.parquet",
    ]
    table = capsys.readouterr().out
    for part in (r"train +3 +14 +11", "skipped empty +1", "skipped not_json +1", "skipped unreadable_file +1", store.hash):
        assert re.search(part, table)


@pytest.mark.fast
def test_nothing_at_all_is_an_error(tmp_path):
    write_json_lines(tmp_path / "0.jsonl", ["", " "])
    with pytest.raises(UserError, match=r"no document in 1 files \(0\.jsonl\); skipped: \{'empty': 2\}"):
        prepare([str(tmp_path / "0.jsonl")], tmp_path / "store", settings())


def test_an_empty_validation_split_is_a_warning(tmp_path, capsys):
    write_json_lines(tmp_path / "0.jsonl", words(3))
    arguments = [
        "--input",
        str(tmp_path / "0.jsonl"),
        "--tokenizer",
        "bytes",
        "--output",
        str(tmp_path / "store"),
        "--workers",
        "1",
    ]
    assert main([*arguments, "--validation-fraction", "1e-9"]) == 0
    assert "WARNING: no document fell into the validation split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--validation-fraction", "2"], "--validation-fraction 2.0: expected"),
        (["--workers", "0"], "--workers 0: expected at least 1"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    write_json_lines(tmp_path / "0.jsonl", words(3))
    assert main(["--input", str(tmp_path / "0.jsonl"), "--tokenizer", "bytes", "--output", str(tmp_path / "s"), *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"prepare: {message}")


def test_the_command_line_reports_errors_in_one_line(tmp_path, capsys):
    assert main(["--input", str(tmp_path / "gone.jsonl"), "--tokenizer", "bytes", "--output", str(tmp_path / "s")]) == 1
    assert re.fullmatch(r"prepare: --input .*gone\.jsonl: no such file; .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_that_cannot_be_a_folder(tmp_path, capsys, name):
    write_json_lines(tmp_path / "0.jsonl", words(3))
    (tmp_path / "file").touch()
    arguments = ["--input", str(tmp_path / "0.jsonl"), "--tokenizer", "bytes", "--output", str(tmp_path / name)]
    assert main(arguments) == 1
    assert re.fullmatch(r"prepare: --output .*: cannot be made \(.*\); expected a folder.*\n", capsys.readouterr().err)


def test_verify_says_that_a_store_is_intact_or_damaged(tmp_path, capsys):
    store = text_store(tmp_path, words(5))
    assert main(["--verify", "--output", str(store.path)]) == 0
    assert capsys.readouterr().out.endswith(f"{store.path}: OK, every shard holds what was written\n")
    tokens = store.path / "train" / "00000.tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"zz")
    assert main(["--verify", "--output", str(store.path)]) == 1
    assert re.fullmatch(r"prepare: .*00000: its content changed .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments", [[], ["--input", "x.jsonl"], ["--verify", "--input", "x.jsonl"], ["--verify", "--tokenizer", "bytes"]]
)
def test_either_makes_or_verifies(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["--output", "tokens", *arguments])
    assert "--input and --tokenizer to make a store, or --verify alone" in capsys.readouterr().err


def test_special_tokens_spelled_in_text_add_no_end_of_text(tmp_path):
    store = text_store(tmp_path, ["a <|endoftext|> b", "<|endoftext|>"])
    store.verify()
    assert store.tokenizer().decode(next(documents(store))[:-1]) == "a <|endoftext|> b"


def test_inputs_of_several_flags_add_up(tmp_path):
    files = [write_json_lines(tmp_path / f"{i}.jsonl", words(20, seed=i)) for i in range(3)]
    chosen = ["--input", str(files[0]), str(files[1]), "--input", str(files[2]), "--validation-fraction", "0.2"]
    assert main([*chosen, "--tokenizer", "bytes", "--output", str(tmp_path / "s")]) == 0
    store = TokenStore.open(tmp_path / "s")
    assert sum(store.split(name).num_documents for name in ("train", "validation")) == 60
