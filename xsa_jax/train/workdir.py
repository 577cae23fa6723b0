"""The folder of a run: a lock that admits one run at a time, what its processes must agree on, and a record of each start."""

import contextlib
import fcntl
import json
import pathlib
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax

from xsa_jax.config import Config, flatten, to_dict
from xsa_jax.config.stored import to_stored
from xsa_jax.errors import UserError
from xsa_jax.files import write_json
from xsa_jax.parallel import agreement
from xsa_jax.parallel.distributed import host
from xsa_jax.parallel.mesh import describe
from xsa_jax.train.metrics import last_step

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@contextlib.contextmanager
def only_trainer(workdir: pathlib.Path) -> Iterator[None]:
    """A context that creates the folder and holds its lock. Process 0 does both, for all processes.

    Raises:
      UserError: the folder cannot be written, another run trains in it, or the processes do not share it.
    """
    with contextlib.ExitStack() as stack:
        problem = ""
        if jax.process_index() == 0:
            try:
                stack.enter_context(_lock(workdir))
            except UserError as error:
                problem = str(error)
        if problem := agreement.tell("lock", problem):
            raise UserError(problem)
        _check_shared(workdir)
        yield


@contextlib.contextmanager
def _lock(workdir: pathlib.Path) -> Iterator[None]:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: expected a folder that can be written, found: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{workdir}: another process is training in this folder; stop it or take another --workdir") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{workdir}: cannot be locked ({error.strerror}); see that no other process trains there", flush=True)
        yield


def _check_shared(workdir: pathlib.Path, seconds: float = 10.0) -> None:
    """Checks that all processes see one folder. Network file systems may show a new file seconds later."""
    if jax.process_count() == 1:
        return
    probe = workdir / f"probe.{secrets.token_hex(8)}"
    if jax.process_index() == 0:
        probe.touch()
    probe = workdir / agreement.tell("probe", probe.name)
    deadline = time.monotonic() + seconds
    while not (found := probe.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = [f"{index} ({host})" for index, (sees, host) in enumerate(agreement.collect("probe seen", [found, host()])) if not sees]
    if jax.process_index() == 0:
        probe.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"--workdir={workdir}: expected one folder that all processes share; a file of process 0 is not seen by process "
            f"{', '.join(blind)}. Name a folder on storage that all hosts mount"
        )


def agree_on_start(config: Config) -> None:
    """Checks that the processes of a run were started alike.

    Raises:
      UserError: the config, the code, the versions or the numbers of devices differ.
    """
    if jax.process_count() == 1:
        return
    facts: dict[str, Any] = {f"config.{name}": value for name, value in flatten(to_dict(config))}
    facts |= {"code": git_state(), "Python": platform.python_version(), **versions()}
    agreement.agree(
        "start", facts | {"number of devices": jax.local_device_count(), "kind of device": jax.devices()[0].device_kind}
    )


def check_nothing_lost(workdir: pathlib.Path) -> None:
    """Checks that a run without a checkpoint never completed one, so that starting at step 0 loses nothing.

    Raises:
      UserError: the metrics of the run continue past its second save, which starts only after the first save is complete.
    """
    reached = last_step(workdir)
    try:
        every = json.loads((workdir / "config.json").read_text())["checkpoint"]["every"]
    except (OSError, ValueError, TypeError, KeyError):  # no run was recorded here, so nothing can be lost
        return
    if reached > 2 * every:
        raise UserError(
            f"{workdir}: its metrics reach step {reached} with a save every {every}, but there is no checkpoint. Put the folder "
            f"'checkpoints' back, or take another --workdir to start anew"
        )


def record_start(workdir: pathlib.Path, config: Config, step: int, remat: str, compiler_options: Mapping[str, Any]) -> None:
    """Writes config.json, and appends a line to starts.jsonl. Only process 0 writes.

    Args:
      workdir: folder of the run.
      config: config of the run.
      step: step that the run starts at.
      remat: `model.remat`, or what `auto` chose.
      compiler_options: options that the train step is compiled with.
    """
    hosts = agreement.collect("hosts", host())
    if jax.process_index():
        return
    write_json(workdir / "config.json", to_stored(config))
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "command": sys.argv,
        "git": git_state(),
        "python": platform.python_version(),
        "versions": versions(),
        "devices": describe(jax.devices()),
        "processes": jax.process_count(),
        "hosts": hosts,
        "remat": remat,
        "compiler_options": dict(compiler_options),
    }
    with (workdir / "starts.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    return {name: metadata.version(name) for name in _PACKAGES}


def git_state() -> str:
    """The commit of this code, with "+changes" if files differ from it; "unknown" outside a git checkout."""
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    here = pathlib.Path(__file__).parent
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True).stdout.strip()
