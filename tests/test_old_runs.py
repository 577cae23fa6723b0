"""Runs that version 0.1.0 made, before stored configs had a version, still continue, evaluate and compare.

tests/fixtures/runs_0.1.0 holds a pair of them as that version's train.py and eval.py left it: six steps of a model with one layer
of two channels, of which the checkpoint of step 3 was kept for the XSA run, and the token store that both read.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.helpers import REPO, subprocess_env
from xsa_jax import __version__
from xsa_jax.compare.comparison import compare

FIXTURE = REPO / "tests" / "fixtures" / "runs_0.1.0"


def command(program: str, *flags: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
    line = [sys.executable, str(REPO / program), *flags]
    return subprocess.run(line, cwd=folder, env=subprocess_env(), capture_output=True, text=True, timeout=300)


def records(run: pathlib.Path, split: str) -> dict[int, dict]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record for record in lines if record["split"] == split}


def flags_of_today() -> list[str]:
    """The flags that began the XSA run. The chunk of the loss counts tokens today: it is 16 positions of two rows."""
    began = json.loads((FIXTURE / "xsa" / "starts.jsonl").read_text())["command"]
    flags = [flag for flag in began if flag.startswith("--config.")]
    return [flag.replace("train.loss_chunk=16", "train.loss_chunk_tokens=32") for flag in flags]


@pytest.fixture(scope="module")
def continued(tmp_path_factory) -> pathlib.Path:
    """The folder of the copies, in which the XSA run was continued from its checkpoint to its end by the command that began it."""
    folder = tmp_path_factory.mktemp("old") / "runs"
    shutil.copytree(FIXTURE, folder)
    flags = flags_of_today()
    done = command("train.py", f"--config={REPO}/configs/smoke.py", "--workdir=xsa", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "continuing from step 3" in done.stdout
    return folder


def test_it_continues_as_it_would_have(continued):
    for split in ("train", "validation"):
        expected, found = records(FIXTURE / "xsa", split), records(continued / "xsa", split)
        assert found.keys() == expected.keys()
        for step, record in expected.items():
            assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-6), (split, step)
    assert sorted(int(path.name) for path in (continued / "xsa" / "checkpoints").iterdir()) == [3, 6]
    stored = json.loads((continued / "xsa" / "config.json").read_text())
    assert stored.pop("version") == __version__
    assert stored["model"].pop("scan_unroll") == 0  # newer than the run
    assert stored.pop("watchdog")
    assert stored["train"].pop("deterministic") is False
    assert stored["train"].pop("loss_chunk_tokens") == 32
    stored["train"]["loss_chunk"] = 16
    assert stored["mesh"]["fsdp"] == -1
    stored["mesh"]["fsdp"] = 1
    assert stored == json.loads((FIXTURE / "xsa" / "config.json").read_text())


def test_it_is_another_experiment_with_another_attention(continued):
    flags = [flag for flag in flags_of_today() if "kind" not in flag]
    done = command("train.py", f"--config={REPO}/configs/smoke.py", "--workdir=xsa", *flags, folder=continued)
    assert done.returncode == 1
    assert "attention.kind (run: 'xsa', now: 'sa')" in done.stderr


@pytest.mark.parametrize("step", [3, 6])
def test_it_evaluates(continued, step):
    done = command("eval.py", "--run=xsa", f"--step={step}", "--tokens=64", "--samples=0", "--output=e.json", folder=continued)
    assert done.returncode == 0, done.stderr
    found = json.loads((continued / "e.json").read_text())
    expected = records(FIXTURE / "xsa", "validation")[step]
    assert found["losses"][0]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    if step == 6:
        then = json.loads((FIXTURE / "xsa" / "eval" / "6.json").read_text())
        assert found["similarity"]["cosine"][0] == pytest.approx(then["similarity"]["cosine"][0], rel=1e-4)


def test_it_compares(tmp_path):
    markdown = compare([FIXTURE / "sa", FIXTURE / "xsa"], tmp_path / "report")
    losses = [json.loads((FIXTURE / kind / "eval" / "6.json").read_text())["losses"][0]["loss"] for kind in ("sa", "xsa")]
    line = next(line for line in markdown.splitlines() if line.startswith("| validation loss"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == [f"{losses[0]:.4f}", f"{losses[1]:.4f}", f"{losses[0] - losses[1]:+.4f}"]
