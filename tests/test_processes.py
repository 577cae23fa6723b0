"""train.py and eval.py in several processes on this host: the same results, one decision to stop, and no one waits for the dead."""

import contextlib
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.data.helpers import text_store, words
from tests.helpers import REPO
from tests.processes import STEPS, STOPPED, Processes, compiled, losses, store, train  # noqa: F401 fixtures
from xsa_jax.train.checkpoint import Checkpoints


@pytest.fixture
def launch(tmp_path, compiled) -> Iterator:
    started: list[Processes] = []

    def launch(name: str, arguments: Sequence[Sequence[str]], devices: int) -> Processes:
        started.append(Processes(tmp_path / name, compiled, arguments, devices))
        return started[-1]

    yield launch
    for processes in started:
        processes.kill()


def steps(workdir: pathlib.Path) -> list[int]:
    with Checkpoints(workdir) as checkpoints:
        return checkpoints.steps


def assert_same_run(found: pathlib.Path, expected: pathlib.Path) -> None:
    a, b = losses(found), losses(expected)
    assert a.keys() == b.keys()
    np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=2e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, compiled, store) -> pathlib.Path:
    """A run of one process with four devices."""
    folder = tmp_path_factory.mktemp("alone")
    processes = Processes(folder, compiled, [train(folder / "run", store)], devices=4)
    assert processes.wait() == [0], processes.texts()
    return folder / "run"


# Tensor shards over both processes make both hold every row.
@pytest.mark.parametrize(
    ("count", "mesh"),
    [(2, {"mesh.tensor": 4}), pytest.param(4, {"mesh.fsdp": 2, "mesh.tensor": 2}, marks=pytest.mark.long)],
    ids=["2x2 tensor", "4x1 fsdp and tensor"],
)
def test_any_number_of_processes_makes_the_same_run(launch, tmp_path, store, alone, count, mesh):
    workdir = tmp_path / "run"
    processes = launch("out", [train(workdir, store, mesh)] * count, 4)
    assert processes.wait() == [0] * count, processes.texts()
    assert_same_run(workdir, alone)
    assert all(text == "" for text in processes.texts()[1:]), "only process 0 prints"
    start = json.loads((workdir / "starts.jsonl").read_text())
    assert (start["processes"], start["hosts"]) == (count, [socket.gethostname()] * count)
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert all(record["input_wait_process"] in range(count) for record in records if "input_wait" in record)


def test_a_signal_to_one_process_stops_all_and_one_process_goes_on(launch, tmp_path, store, alone):
    """The stop is at one step on both, is no success, and the run ends as if nothing had been: with another mesh and alone."""
    workdir = tmp_path / "run"
    slow = {"mesh.fsdp": 2, "train.num_steps": 2000, "checkpoint.every": 1000, "eval.every": 0, "optim.schedule": "constant"}
    processes = launch("out", [train(workdir, store, slow)] * 2, 4)
    processes.wait_for_step(workdir, 2)
    processes.processes[1].send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):
        processes.processes[0].send_signal(signal.SIGUSR1)
    assert processes.wait(60) == [STOPPED] * 2, processes.texts()
    (saved,) = steps(workdir)
    assert f"saving step {saved}; the same command continues" in processes.texts()[0]
    more = {**slow, "mesh.fsdp": 1, "mesh.tensor": 2}
    going_on = launch("more", [train(workdir, store, more)], 2)
    going_on.wait_for(0, f"continuing from step {saved}")


# An fsdp mesh over both makes each process gather from the other.
@pytest.mark.parametrize(("victim", "mesh"), [(0, {"mesh.data": 4}), pytest.param(1, {"mesh.fsdp": 4}, marks=pytest.mark.long)])
def test_a_killed_process_ends_the_others_and_the_same_command_goes_on(launch, tmp_path, store, alone, victim, mesh):
    workdir = tmp_path / "run"
    arguments = [train(workdir, store, mesh)] * 2
    processes = launch("out", arguments, 4)
    processes.wait_for_step(workdir, 3)
    processes.processes[victim].kill()
    assert 0 not in processes.wait(60), processes.texts()
    again = launch("again", arguments, 4)
    assert again.wait() == [0, 0], again.texts()
    assert_same_run(workdir, alone)


def after(statement: str) -> list[str]:
    """Arguments of Python that run train.py after this statement."""
    return ["-c", f"import os, runpy; {statement}; runpy.run_path({str(REPO / 'train.py')!r}, run_name='__main__')"]


def failing(launch, arguments: Sequence[Sequence[str]], devices: int = 4) -> list[str]:
    """The last lines of processes that must all end with an error."""
    processes = launch("failing", arguments, devices)
    assert processes.wait(90) == [1] * len(arguments), processes.texts()
    assert not any("Traceback" in text for text in processes.texts())
    return [text.splitlines()[-1] for text in processes.texts()]


def test_a_config_or_a_store_that_differs_is_one_line_on_each_process(launch, tmp_path, store):
    run = tmp_path / "run"
    first, second = failing(launch, [train(run, store, {"seed": seed, "optim.peak_lr": 0.1 + seed}) for seed in (0, 1)])
    assert first == second
    assert "config.seed is 0 on process 0, 1 on process 1" in first
    assert "config.optim.peak_lr is 0.1 on process 0, 1.1 on process 1" in first
    other = text_store(tmp_path / "other", words(80, seed=1), validation_fraction=0.2).path
    # One relative path that leads each process to another store, as on two hosts.
    here = [tmp_path / str(index) for index in range(2)]
    for folder, source in zip(here, (store, other), strict=True):
        folder.mkdir()
        (folder / "store").symlink_to(source)
    wrapped = [after(f"os.chdir({str(folder)!r})") for folder in here]
    first, second = failing(launch, [[*wrap, *train(run, pathlib.Path("store"))[1:]] for wrap in wrapped])
    assert first == second
    assert "the processes of this run differ: token store is" in first
    assert not run.exists()


def test_folders_that_are_not_shared_are_found_before_the_first_step(launch, tmp_path, store):
    first, second = failing(launch, [train(tmp_path / str(index), store) for index in range(2)])
    assert first == second
    assert "a file of process 0 is not seen by process 1" in first
    assert not (tmp_path / "0" / "checkpoints").exists()
    assert not list(tmp_path.glob("*/probe.*"))


def test_an_error_of_one_process_ends_all_with_its_reason(launch, tmp_path, store):
    """Process 1 has no store; process 0 has, and would wait for it."""
    processes = launch("failing", [train(tmp_path / "run", path) for path in (store, tmp_path / "nowhere")], 4)
    assert processes.wait(90) == [1, 1]
    for text in processes.texts():
        assert text.splitlines()[-1].startswith("error: process ")


def test_a_lock_held_is_the_verdict_of_all(launch, tmp_path, store):
    workdir = tmp_path / "run"
    workdir.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, time; f = open({str(workdir / 'lock')!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('held', flush=True); time.sleep(600)"], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        for line in failing(launch, [train(workdir, store)] * 2):
            assert "another process is training in this folder" in line
    finally:
        holder.kill()
        holder.wait()


def test_devices_that_differ_are_refused(launch, tmp_path, store):
    arguments = train(tmp_path / "run", store)
    more = [*after("os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=3'"), *arguments[1:]]
    for line in failing(launch, [arguments, more]):
        assert "number of devices is 2 on process 0, 3 on process 1" in line


def test_a_stuck_process_is_named_with_the_stacks_of_the_others(launch, tmp_path, store):
    """A stopped process stands for a host that hangs: it holds its connections and says nothing."""
    limits = {"train.num_steps": 5000, "optim.schedule": "constant", "eval.every": 0, "checkpoint.every": 4000, "watchdog.step": 4}
    processes = launch("out", [train(tmp_path / "run", store, limits)] * 2, 4)
    processes.wait_for_step(tmp_path / "run", 3)
    processes.processes[1].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert processes.processes[0].wait(60) == 1
    assert time.monotonic() - begun < 20
    text = processes.texts()[0]
    assert "no progress for" in text
    assert "process 1: step" in text
    assert "in _steps" in text, "the stacks of this process"


def test_an_evaluation_in_two_processes_counts_each_token_once(launch, tmp_path, store, alone):
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        shutil.copytree(alone, run)
    command = [
        str(REPO / "eval.py"),
        f"--store={store}",
        "--contexts=8",
        "--samples=2",
        "--sample_tokens=4",
        "--prompt=a",
        "--probe_rows=3",
    ]
    both = launch("two", [[*command, f"--run={runs[1]}"]] * 2, 4)
    assert both.wait() == [0, 0], both.texts()
    one = launch("one", [[*command, f"--run={runs[0]}"]], 4)
    assert one.wait() == [0], one.texts()
    found, expected = (json.loads((run / "eval" / f"{STEPS}.json").read_text()) for run in reversed(runs))
    assert [loss["tokens"] for loss in found["losses"]] == [loss["tokens"] for loss in expected["losses"]]
    np.testing.assert_allclose([loss["loss"] for loss in found["losses"]], [loss["loss"] for loss in expected["losses"]], rtol=2e-6)
    assert found["samples"] == expected["samples"]
    for name, values in expected["similarity"].items():
        np.testing.assert_allclose(found["similarity"][name], values, atol=1e-5, err_msg=name)
    assert "Traceback" not in both.texts()[1]
