"""The folder of a run: one trainer at a time in it, and the record of what was started there."""

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
from xsa_jax.train.metrics import last_step

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@contextlib.contextmanager
def only_trainer(workdir: pathlib.Path) -> Iterator[None]:
    """Makes the folder, and holds it for this run while the context lasts.

    Raises:
      UserError: it cannot be written, or another process trains in it.
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
    """For a run without a checkpoint: refuses to start over where there must have been one.

    Raises:
      UserError: the run's metrics go on past its second save, which began only after the first was whole.
    """
    reached = last_step(workdir)
    try:
        every = json.loads((workdir / "config.json").read_text())["checkpoint"]["every"]
    except (OSError, ValueError, TypeError, KeyError):  # no run was recorded here, so there is nothing to compare with
        return
    if reached > 2 * every:
        raise UserError(
            f"{workdir}: its metrics reach step {reached} with a save every {every}, but there is no checkpoint. Put the folder "
            f"'checkpoints' back, or take another --workdir to start anew"
        )


def record_start(workdir: pathlib.Path, config: Config, step: int) -> None:
    """Stores the config, and one line for this start: command, code, versions, devices."""
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
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
    with (workdir / "starts.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def git_state() -> str:
    """The commit of the code at work, with "+changes" when files differ from it; "unknown" outside a checkout."""
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    here = pathlib.Path(__file__).parent
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True).stdout.strip()
