"""train.py as people use it: started, killed at bad moments, stopped politely, misused. Each run is a process of its own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.helpers import REPO, assembled, assert_trees_equal, subprocess_env
from xsa_jax.config.stored import from_stored
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.state import TrainState

STEPS = 24
SENTENCES = ("the cat sat on the mat", "a dog ran far away", "no two rows of this text are alike", "and so on it goes")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": f"{i}: {SENTENCES[i % 4]} {i * i % 97}. " * 3}) for i in range(64)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    command = ["-m", "xsa_jax.data.prepare", "--input", "text.jsonl", "--tokenizer", "bytes", "--output", "tokens"]
    subprocess.run(
        [sys.executable, *command, "--validation-fraction", "0.2"],
        cwd=folder,
        env=subprocess_env(),
        check=True,
        capture_output=True,
    )
    return folder / "tokens"


def command(workdir: pathlib.Path, store: pathlib.Path, *flags: str) -> list[str]:
    return [
        sys.executable, str(REPO / "train.py"), f"--config={REPO}/configs/smoke.py", f"--workdir={workdir}",
        f"--config.data.path={store}", "--config.attention.kind=xsa", f"--config.train.num_steps={STEPS}",
        "--config.train.log_every=1", "--config.checkpoint.every=3", "--config.model.dropout=0.1", *flags,
    ]  # fmt: skip


def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    # Every life of a run compiles the same programs: compile them once.
    return subprocess_env(
        JAX_COMPILATION_CACHE_DIR=str(tmp_path.parent / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )


def run(tmp_path, workdir, store, *flags) -> subprocess.CompletedProcess:
    return subprocess.run(command(workdir, store, *flags), env=environment(tmp_path), capture_output=True, text=True, timeout=300)


def start(tmp_path, workdir, store, *flags) -> subprocess.Popen:
    # To a file: a pipe that nobody reads would stop the run once it is full.
    with (tmp_path / "output").open("w") as output:
        return subprocess.Popen(command(workdir, store, *flags), env=environment(tmp_path), stdout=output, stderr=output)


def records(workdir: pathlib.Path, split: str) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def wait_for_step(process: subprocess.Popen, workdir: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 240
    path = workdir / "metrics.jsonl"
    while time.monotonic() < deadline:
        assert process.poll() is None, (workdir.parent / "output").read_text()
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} did not come")


def restored(workdir: pathlib.Path) -> tuple[TrainState, dict]:
    config = from_stored(json.loads((workdir / "config.json").read_text()), "config.json")
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.restore(config, assembled(config).abstract_state)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, store) -> pathlib.Path:
    """A run that nothing disturbed."""
    tmp_path = tmp_path_factory.mktemp("straight")
    done = run(tmp_path, tmp_path / "run", store)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "run"


def test_a_run_learns_and_leaves_its_record(straight):
    losses = [record["loss"] for record in records(straight, "train")]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    validation = records(straight, "validation")
    assert [record["step"] for record in validation] == [10, 20, STEPS]
    assert validation[-1]["perplexity"] == pytest.approx(np.exp(validation[-1]["loss"]))
    begun = json.loads((straight / "starts.jsonl").read_text())
    assert begun["step"] == 0
    assert begun["versions"]["jax"] == jax.__version__
    assert "--config.attention.kind=xsa" in begun["command"]
    assert any(name.startswith("events") for name in os.listdir(straight / "tensorboard"))
    with Checkpoints(straight) as checkpoints:
        assert checkpoints.steps == [21, 24]  # keep_last = 2


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_killed_twice_equals_straight(tmp_path, store, straight, workers):
    workdir = tmp_path / "run"
    # A save at every step: the kill falls into the middle of one.
    flags = [f"--config.data.workers={workers}", "--config.checkpoint.every=1"]
    for step in (5, 14):
        process = start(tmp_path, workdir, store, *flags)
        wait_for_step(process, workdir, step)
        process.kill()
        process.wait()
    done = run(tmp_path, workdir, store, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing from step" in done.stdout

    (state, loader_state), (expected, expected_loader) = restored(workdir), restored(straight)
    assert_trees_equal(state, expected)  # parameters, moments, counters, random state
    assert loader_state == expected_loader
    strip = lambda rows: [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in rows]  # noqa: E731
    assert strip(records(workdir, "train")) == strip(records(straight, "train"))
    assert len((workdir / "starts.jsonl").read_text().splitlines()) == 3
    assert not [name for name in os.listdir(workdir / "checkpoints") if "tmp" in name]


def test_the_stream_that_a_resumed_run_reads_is_the_one_it_left(store, straight):
    _, loader_state = restored(straight)
    make = lambda: Loader(TokenStore.open(store), "train", seq_len=32, batch_size=8, seed=0)  # noqa: E731
    loader = make()
    assert loader.check_state(loader_state) == STEPS
    assert loader.num_rows < STEPS * 8  # so the run crossed an epoch end
    whole = loader.iterate()
    for _ in range(STEPS):
        next(whole)
    np.testing.assert_array_equal(next(make().iterate(STEPS))["tokens"], next(whole)["tokens"])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGINT, signal.SIGUSR1))]
)
def test_a_polite_stop_saves_and_continues_exactly(tmp_path, store, straight, number):
    workdir = tmp_path / "run"
    process = start(tmp_path, workdir, store, "--config.checkpoint.every=1000")
    wait_for_step(process, workdir, 4)
    process.send_signal(number)
    process.wait(timeout=120)
    output = (tmp_path / "output").read_text()
    assert process.returncode == 75, output  # not 0: `train.py && eval.py` must not evaluate half a run
    assert f"{number.name}: saving step" in output
    assert run(tmp_path, workdir, store).returncode == 0
    assert_trees_equal(restored(workdir)[0], restored(straight)[0])


def test_a_finished_run_is_left_alone(tmp_path, store, straight):
    before = (straight / "metrics.jsonl").read_text()
    done = run(tmp_path, straight, store)
    assert done.returncode == 0
    assert f"complete at step {STEPS}" in done.stdout
    assert (straight / "metrics.jsonl").read_text() == before


def test_another_attention_variant_is_refused_naming_both(tmp_path, store, straight):
    before = sorted(os.walk(straight))
    done = run(tmp_path, straight, store, "--config.attention.kind=sa")
    assert done.returncode == 1
    assert "attention.kind (run: 'xsa', now: 'sa')" in done.stderr
    assert sorted(os.walk(straight)) == before


def test_a_second_trainer_in_the_same_folder_is_refused(tmp_path, store):
    workdir = tmp_path / "run"
    first = start(tmp_path, workdir, store)
    wait_for_step(first, workdir, 1)
    first.send_signal(signal.SIGSTOP)  # so that it is still there when the second comes
    second = run(tmp_path, workdir, store)
    first.kill()
    first.wait()
    assert second.returncode == 1
    assert "another process is training in this folder" in second.stderr


@pytest.mark.fast
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.attention.kind=linear"], "attention.kind='linear': expected one of 'sa', 'xsa'"),
        (["--config.attention.knd=sa"], "unknown field"),
        (["--config.train.loss_chunk=16"], "unknown field: 'loss_chunk'; set train.loss_chunk_tokens, which counts tokens"),
        (["--config.data.seq_len=many"], "seq_len"),
        (["--config.data.path=nowhere"], "nowhere: no token store here"),
        (["--config.model.vocab_size=100"], "model.vocab_size=100: expected at least the 257"),
        (["--config.mesh.tensor=2"], "expected sizes that multiply to the 1 devices"),
        (["--config.attention.impl=cudnn"], "attention.impl='cudnn'"),
        (["--config.data.seq_len=100000"], "data.seq_len"),
        (["--config=missing.py"], "missing.py"),
        (["stray"], "unexpected arguments ['stray']"),
        (["--num_processes=2"], "--coordinator, --process_id: not given; expected all of"),
        (["--coordinator=here", "--num_processes=2", "--process_id=0"], "--coordinator=here: expected host:port"),
        (["--coordinator=here:1", "--num_processes=2", "--process_id=2"], "--process_id=2: expected 0 to"),
    ],
)
def test_misuse_is_one_clear_line(tmp_path, store, flags, message):
    done = run(tmp_path, tmp_path / "run", store, *flags)
    assert done.returncode == 1
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
