import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from tests.data.helpers import words
from tests.helpers import SHARED_DATA
from xsa_jax.data import tokenizer
from xsa_jax.errors import UserError

SPECIAL = "<|endoftext|>"


@pytest.fixture
def json_file(tmp_path):
    """A small byte-level BPE whose saved file cuts, pads and adds an end-of-text token by itself, as real ones may."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[SPECIAL], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(words(50), trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"$A {SPECIAL}", special_tokens=[(SPECIAL, 0)])
    bpe.enable_truncation(8)
    bpe.enable_padding(length=16)
    bpe.save(str(tmp_path / "small.json"))
    return tmp_path / "small.json"


def check_contract(found):
    texts = ["plain words", "é 漢 \U0001f600", f"a {SPECIAL} b", SPECIAL, "\n\n tab\t" * 40]
    encoded = found.encode_batch(texts)
    assert [found.decode(ids) for ids in encoded] == texts
    assert all(0 <= token < found.vocab_size and token != found.eot_id for ids in encoded for token in ids)
    assert 0 <= found.eot_id < found.vocab_size
    assert found.decode([found.eot_id]) == SPECIAL


@pytest.mark.fast
def test_bytes():
    found = tokenizer.load("bytes")
    assert (found.vocab_size, found.eot_id) == (257, 256)
    assert found.encode_batch(["aé"]) == [[97, 0xC3, 0xA9]]
    check_contract(found)


@pytest.mark.fast
def test_json_file_encodes_text_as_text_whatever_it_was_saved_with(json_file):
    found = tokenizer.load(str(json_file))
    check_contract(found)
    assert found.name == "small.json"
    assert len(found.encode_batch(["x" * 500])[0]) > 16


def test_json_fingerprint_follows_the_content(json_file, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes(json_file.read_bytes())
    assert tokenizer.load(str(other)).fingerprint == tokenizer.load(str(json_file)).fingerprint
    changed = json.loads(json_file.read_text())
    changed["model"]["merges"].pop()
    other.write_text(json.dumps(changed))
    assert tokenizer.load(str(other)).fingerprint != tokenizer.load(str(json_file)).fingerprint


def test_json_without_end_of_text(tmp_path):
    path = tmp_path / "none.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(path))
    with pytest.raises(UserError, match=r"none\.json: found no end-of-text token; expected one of .*</s>"):
        tokenizer.load(str(path))


def test_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json: not a JSON file of the tokenizers library"):
        tokenizer.load(str(tmp_path / "x.json"))


@pytest.mark.parametrize("name", ["gpt3", "missing/tokenizer.json"])
def test_unknown_name(name):
    with pytest.raises(UserError, match="expected 'gpt2', 'bytes' or the path"):
        tokenizer.load(name)


def test_gpt2_without_files_and_network_says_what_to_do(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def no_network(name):
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError) as raised:
        tokenizer.load("gpt2")
    for part in (str(tmp_path / "cache"), "TIKTOKEN_CACHE_DIR=", "copy the folder", "--tokenizer bytes"):
        assert part in str(raised.value)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs GPT-2's files")
def test_gpt2(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tokenizers" / "tiktoken_cache"))
    found = tokenizer.load("gpt2")
    assert (found.vocab_size, found.eot_id) == (50257, 50256)
    assert found.encode_batch(["Hello world"]) == [[15496, 995]]
    check_contract(found)
    texts = words(50)
    same = tokenizer.load(str(SHARED_DATA / "tokenizers" / "gpt2_tokenizer.json"))
    assert same.encode_batch([*texts, SPECIAL]) == found.encode_batch([*texts, SPECIAL])
