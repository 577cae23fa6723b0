"""eval.py as people use it: on a run that train.py made, and misused. Each call is a process of its own."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.data.helpers import text_store
from tests.helpers import REPO, subprocess_env
from xsa_jax.data.store import read_meta, write_meta
from xsa_jax.errors import UserError
from xsa_jax.evaluate import generate, loss, report
from xsa_jax.evaluate.restore import restore
from xsa_jax.evaluate.similarity import similarity

STEPS = 6
TEXTS = [f"{i}: the cat sat on mat {i * i % 97}. " * (1 + i % 4) for i in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A run of XSA with documents kept apart, the store it was trained on, and one that another tokenizer made."""
    folder = tmp_path_factory.mktemp("eval")
    text_store(folder / "text", TEXTS, validation_fraction=0.3)
    shutil.copytree(folder / "text" / "store", folder / "other")
    train = [
        sys.executable, REPO / "train.py", f"--config={REPO}/configs/smoke.py", "--workdir=run",
        "--config.data.path=text/store", "--config.data.documents=isolate", "--config.attention.kind=xsa",
        f"--config.train.num_steps={STEPS}", "--config.checkpoint.every=3",
    ]  # fmt: skip
    subprocess.run(list(map(str, train)), env=subprocess_env(), cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


def evaluate(folder: pathlib.Path, *flags: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPO / "eval.py"), *map(str, flags)]
    return subprocess.run(command, env=subprocess_env(), cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def evaluated(folder):
    done = evaluate(folder, "--run=run", "--contexts=8,64", "--samples=2", "--prompt=the", "--sample_tokens=5")
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "run" / "eval" / f"{STEPS}.json").read_text())


@pytest.mark.fast
def test_reports_the_latest_checkpoint(folder, evaluated):
    done, result = evaluated
    assert result["step"] == STEPS
    assert result["config"] == json.loads((folder / "run" / "config.json").read_text())
    assert [entry["context"] for entry in result["losses"]] == [32, 8, 64]
    assert [sample["prompt"] for sample in result["samples"]] == ["the", "the"]
    assert np.shape(result["similarity"]["cosine"]) == (2, 4)
    assert np.abs(result["similarity"]["cosine_xsa"]).max() < 1e-5
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    trained = next(record for record in records if record["split"] == "validation" and record["step"] == STEPS)
    for name in ("loss", "bits_per_byte", "perplexity", "tokens"):
        assert result["losses"][0][name] == pytest.approx(trained[name], rel=1e-5), name
    assert f"{result['losses'][0]['loss']:.4f}" in done.stdout
    assert done.stderr == ""
    assert (folder / "run" / "eval" / f"{STEPS}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "run" / "eval").iterdir()) == [f"{STEPS}.json", f"{STEPS}.png"]


def test_eight_devices_find_the_same_in_an_earlier_step(folder, evaluated):
    store = str(folder / "text" / "store")
    restored = restore(folder / "run", 3, store)
    assert (restored.step, dict(restored.mesh.shape)) == (3, {"data": 1, "fsdp": 8, "tensor": 1})
    latest = restore(folder / "run", None, store)
    sums = loss.position_sums(latest, 32, 2048)
    assert sums.loss() == pytest.approx(evaluated[1]["losses"][0]["loss"], rel=1e-5)
    assert restored.params["embed"].shape == latest.params["embed"].shape
    assert not np.array_equal(restored.params["embed"], latest.params["embed"])


def test_eight_devices_take_any_number_of_rows_and_samples(folder, evaluated):
    """Neither has to divide over the devices: every device then computes all rows."""
    many = restore(folder / "run", None, str(folder / "text" / "store"))
    alone = dataclasses.replace(many, params=jax.device_put(many.params, jax.devices()[0]))
    probe = next(many.held_out(32, 3, 3).iterate())
    found, expected = (similarity(one.model, one.params, probe) for one in (many, alone))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)
    texts, same = (generate.samples(one, "the", 3, 4, 0.0, 0, 0) for one in (many, alone))
    assert texts == same
    assert len(texts) == 3


@pytest.mark.parametrize("item", ["-3", "0", "x", ""])
def test_contexts_are_positive_numbers(item):
    assert report.contexts(["8", "16"]) == [8, 16]
    with pytest.raises(UserError, match=f"--contexts: found '{item}'"):
        report.contexts(["8", item])


def test_a_store_that_is_not_found_from_here(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^text/store: no such folder; it is the data.path of .*run, .* with --store$"):
        restore(folder / "run")


def test_a_store_of_another_tokenizer_is_refused(folder):
    meta = read_meta(folder / "other")
    shards = {name: split["shards"] for name, split in meta["splits"].items()}
    described = meta["tokenizer"] | {"fingerprint": "another"}
    write_meta(folder / "other", described, meta["dtype"], meta["eot"], shards, meta["made"])
    with pytest.raises(UserError, match=r"other: made with tokenizer 'bytes' \(fingerprint another\); .*run was trained on"):
        restore(folder / "run", None, str(folder / "other"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run=nowhere"], "nowhere: expected a run"),
        (["--run=run", "--step=4"], "no finished checkpoint of step 4; there are 3, 6"),
        (["--run=run", "--bogus=3"], "bogus"),
        (["--step=3"], "--run"),
        (["--run=run", "3"], "unexpected arguments ['3']"),
        (["--run=run", "--output=x.png"], "--output=x.png: expected a name that ends in .json"),
        (["--run=run", "--sample_tokens=300"], "300 new tokens: expected at least 1, and fewer than the 32 of the context"),
        (["--run=damaged"], "damaged/checkpoints/6: this checkpoint cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(folder, evaluated, flags, message):
    if "--run=damaged" in flags:
        shutil.copytree(folder / "run", folder / "damaged", ignore=shutil.ignore_patterns("eval"))
        for file in (folder / "damaged" / "checkpoints" / str(STEPS) / "params").rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = evaluate(folder, *flags)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
