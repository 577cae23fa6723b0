"""The folder of a run: a lock that admits one trainer at a time, and a record of each start."""

import contextlib
import fcntl
import json
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata

import jax

from xsa_jax.config import Config
from xsa_jax.config.stored import to_stored
from xsa_jax.errors import UserError
from xsa_jax.files import write_json
from xsa_jax.parallel.mesh import describe
from xsa_jax.train.metrics import last_step

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@contextlib.contextmanager
def only_trainer(workdir: pathlib.Path) -> Iterator[None]:
    """A context that creates the folder, and holds its lock.

    Raises:
      UserError: the folder cannot be written, or another process trains in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: expected a folder that can be written, found: {error.strerror}") from None
    with lock:
        try:
            if jax.process_index() == 0:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{workdir}: another process is training in this folder; stop it or take another --workdir") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{workdir}: cannot be locked ({error.strerror}); see that no other process trains there", flush=True)
        yield


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


def record_start(workdir: pathlib.Path, config: Config, step: int) -> None:
    """Writes config.json, and appends a line to starts.jsonl. Only process 0 writes.

    Args:
      workdir: folder of the run.
      config: config of the run.
      step: step that the run starts at.
    """
    if jax.process_index():
        return
    write_json(workdir / "config.json", to_stored(config))
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "command": sys.argv,
        "git": git_state(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "devices": describe(jax.devices()),
        "processes": jax.process_count(),
    }
    with (workdir / "starts.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def git_state() -> str:
    """The commit of this code, with "+changes" if files differ from it; "unknown" outside a git checkout."""
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    here = pathlib.Path(__file__).parent
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True).stdout.strip()
