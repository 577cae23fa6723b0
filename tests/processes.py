"""Several processes of train.py or eval.py on this host, and the small run that they make."""

import json
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import pytest

from tests.data.helpers import text_store, words
from tests.helpers import REPO, subprocess_env, tiny_flags

STEPS = 8
STOPPED = 75


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> pathlib.Path:
    return text_store(tmp_path_factory.mktemp("data") / "store", words(80), validation_fraction=0.2).path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> pathlib.Path:
    """Where the processes of a file of tests keep what they compile."""
    return tmp_path_factory.mktemp("compiled")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(process: subprocess.Popen, output: pathlib.Path, text: str, seconds: float = 240.0) -> None:
    """Waits until a running process has written this text to its output."""
    deadline = time.monotonic() + seconds
    while not output.exists() or text not in output.read_text():
        assert time.monotonic() < deadline, f"{text!r} did not come in {output}"
        assert process.poll() is None, f"ended before {text!r} came in {output}"
        time.sleep(0.02)


class Processes:
    """The processes of one start: `count` of them, with `devices` devices in all."""

    def __init__(self, folder: pathlib.Path, compiled: pathlib.Path, arguments: Sequence[Sequence[str]], devices: int):
        count = len(arguments)
        address = f"127.0.0.1:{free_port()}"
        folder.mkdir(parents=True, exist_ok=True)
        env = subprocess_env(
            devices // count, JAX_COORDINATOR_BIND_ADDRESS=address, JAX_COMPILATION_CACHE_DIR=str(compiled),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )  # fmt: skip
        self.outputs = [folder / f"output{index}" for index in range(count)]
        self.processes = []
        for index, given in enumerate(arguments):
            cluster = [f"--coordinator={address}", f"--num_processes={count}", f"--process_id={index}"]
            with self.outputs[index].open("w") as output:
                command = [sys.executable, *given, *cluster]
                self.processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=output))

    def wait(self, seconds: float = 240.0) -> list[int]:
        """The exit statuses; at a timeout the outputs are shown."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n--\n".join(self.texts())) from None

    def texts(self) -> list[str]:
        """What each process printed, without the lines of the library that connects them."""
        lines = [output.read_text().splitlines(keepends=True) for output in self.outputs]
        return ["".join(line for line in one if not line.startswith("[Gloo]")) for one in lines]

    def wait_for(self, index: int, text: str) -> None:
        """Waits until the output of one process has this text."""
        wait_for(self.processes[index], self.outputs[index], text)

    def wait_for_step(self, workdir: pathlib.Path, step: int) -> None:
        """Waits until the metrics of the run have this step."""
        wait_for(self.processes[0], workdir / "metrics.jsonl", f'"step": {step},')

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def train(workdir: pathlib.Path, store: pathlib.Path, changes: Mapping[str, object] = {}) -> list[str]:
    config = {
        "attention.kind": "xsa", "model.vocab_size": 260, "model.dropout": 0.1, "data.path": store, "data.documents": "isolate",
        "train.num_steps": STEPS, "eval.every": 4, "checkpoint.every": 2, "checkpoint.keep_last": 10, **changes,
    }  # fmt: skip
    return [str(REPO / "train.py"), f"--config={REPO}/configs/smoke.py", f"--workdir={workdir}", *tiny_flags(config)]


def losses(workdir: pathlib.Path) -> dict[tuple[str, int], float]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {(record["split"], record["step"]): record["loss"] for record in records}
