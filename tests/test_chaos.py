"""What hits one process of a run at a bad moment: signals in each phase, kills at random moments, a disk that is full."""

import contextlib
import random
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.helpers import REPO
from tests.processes import STOPPED, Processes, compiled, losses, store, train  # noqa: F401 fixtures
from xsa_jax.train.checkpoint import Checkpoints

KILLS = 20
LONG = {"train.num_steps": 3000, "optim.schedule": "constant", "eval.every": 0, "checkpoint.every": 2000}


@pytest.fixture
def launch(tmp_path, compiled) -> Iterator:
    started: list[Processes] = []

    def launch(name: str, arguments: Sequence[Sequence[str]], devices: int = 4) -> Processes:
        started.append(Processes(tmp_path / name, compiled, arguments, devices))
        return started[-1]

    yield launch
    for processes in started:
        processes.kill()


def after(statements: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The same arguments of Python, with statements that run before train.py."""
    run = f"runpy.run_path({str(REPO / 'train.py')!r}, run_name='__main__')"
    return ["-c", "\n".join(["import os, resource, runpy, time", *statements, run]), *arguments[1:]]


# Each makes one phase last long enough to be hit, and says when it has begun.
SLOW = "lambda *given: (os.write(2, b'in the phase\\n'), time.sleep(1.0), original(*given))[-1]"
PHASES = {
    "compile": ["import xsa_jax.train.setup as m", "original = m.Setup.compile", f"m.Setup.compile = {SLOW}"],
    "save": ["import xsa_jax.train.checkpoint as m", "original = m.Checkpoints.save", f"m.Checkpoints.save = {SLOW}"],
    "validation": ["import xsa_jax.train.actions as m", "original = m.validate_rows", f"m.validate_rows = {SLOW}"],
}


@pytest.mark.parametrize("phase", ["save", *(pytest.param(name, marks=pytest.mark.long) for name in ("compile", "validation"))])
def test_a_signal_in_any_phase_saves_one_step_on_all(launch, tmp_path, store, phase):
    changes = {**LONG, "checkpoint.every": 3} if phase == "save" else {**LONG, "eval.every": 3}
    run = launch("out", [after(PHASES[phase], train(tmp_path / "run", store, changes))] * 2)
    run.wait_for(1, "in the phase")
    run.processes[1].send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):
        run.processes[0].send_signal(signal.SIGTERM)
    assert run.wait(60) == [STOPPED] * 2, run.texts()
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.latest is not None
        assert f"saving step {checkpoints.latest}; the same command continues" in run.texts()[0]


@pytest.mark.long
def test_kills_at_random_moments_change_nothing(launch, tmp_path, store):
    """Process 0 or 1 is killed, in a step, a save or the start; the same command goes on, and the run ends bit-equal."""
    changes = {"train.num_steps": 40, "checkpoint.every": 5, "eval.every": 10, "mesh.fsdp": 2}
    whole = launch("whole", [train(tmp_path / "whole", store, changes)] * 2)
    begun = time.monotonic()
    assert whole.wait() == [0, 0], whole.texts()
    duration = time.monotonic() - begun
    rng = random.Random(0)
    for number in range(KILLS):
        hit = launch(f"hit{number}", [train(tmp_path / "run", store, changes)] * 2)
        time.sleep(rng.uniform(0.3, 0.9) * duration)
        hit.processes[rng.randrange(2)].kill()
        begun = time.monotonic()
        statuses = hit.wait(60)
        assert time.monotonic() - begun < 20
        if statuses == [0, 0]:  # it was faster
            break
    last = launch("last", [train(tmp_path / "run", store, changes)] * 2)
    assert last.wait() == [0, 0], last.texts()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_full_disk_on_one_process_ends_both(launch, tmp_path, store):
    arguments = train(tmp_path / "run", store, {**LONG, "checkpoint.every": 3, "mesh.fsdp": 4})
    full = ["resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"]  # bytes of a file
    run = launch("out", [arguments, after(full, arguments)])
    assert run.wait(100) == [1, 1], run.texts()
    for text in run.texts():
        assert "process 1" in text.splitlines()[-1] or "File too large" in text, text
