"""One run, from a config to its last step: start or continue, step, report, validate, save."""

import contextlib
import fcntl
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from xsa_jax.config import Config, ConfigError, UserError, check_resumable, to_dict
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore
from xsa_jax.mesh import make_mesh, put_batch
from xsa_jax.model.transformer import build
from xsa_jax.train import optim
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.metrics import Metrics
from xsa_jax.train.state import abstract_state, init_state
from xsa_jax.train.step import make_step
from xsa_jax.train.validate import make_evaluator, validate


def train(config: Config, workdir: pathlib.Path) -> None:
    """Trains until `train.num_steps`, continuing from the last committed checkpoint of `workdir` if there is one.

    SIGTERM or ctrl-C saves after the step under way and returns; a second one stops at once.

    Raises:
      UserError: the config, token store or run folder cannot be used; nothing of the run was changed.
    """
    model = build(config)
    store = open_store(config)
    loader, held_out = loaders(config, store)
    bytes_per_token = store.split("validation").bytes_per_token
    tokenizer = store.meta["tokenizer"]["fingerprint"]  # weights mean nothing under another
    mesh = make_mesh(config)
    num_steps = config.train.num_steps
    lr = optim.schedule(config.optim, num_steps)
    tx = optim.optimizer(config.optim, num_steps, model.axes)
    abstract = abstract_state(model, tx, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step_fn = jax.jit(make_step(model, tx, lr, config), donate_argnums=0, out_shardings=(shardings, None))
    evaluator = make_evaluator(model)

    with _only_trainer(workdir, config), Checkpoints(workdir, config.checkpoint) as checkpoints, jax.set_mesh(mesh):
        start = checkpoints.latest or 0
        if start:
            state, loader_state = checkpoints.restore(model, abstract)
            loader.check_state(loader_state)
            print(f"{workdir}: {'complete at' if start == num_steps else 'continuing from'} step {start}", flush=True)
        else:
            state = init_state(model, tx, mesh)
        _record_start(workdir, config, start)

        with (
            Metrics(workdir, config, start, jax.devices()) as metrics,
            contextlib.closing(loader.iterate(start)) as batches,
            _stop_signals() as received,
            jax.transfer_guard("disallow"),
        ):
            for step in range(start + 1, num_steps + 1):
                state, values = step_fn(state, put_batch(mesh, next(batches)))
                metrics.add(step, values)
                stop, done = bool(received), step == num_steps
                if done or _due(step, config.eval.every):
                    with metrics.pause(step), jax.transfer_guard("allow"):
                        sums = validate(evaluator, state.params, held_out.iterate(), held_out.local_batch_size, mesh)
                    metrics.write(step, "validation", sums.report(bytes_per_token))
                if done or stop or _due(step, config.checkpoint.every):
                    with metrics.pause(step), jax.transfer_guard("allow"):
                        checkpoints.save(step, state, model, loader.state(step) | {"tokenizer": tokenizer})
                if stop:
                    print(f"{received[0]}: saving step {step}; the same command continues from there", flush=True)
                    break


def open_store(config: Config) -> TokenStore:
    """The token store of the run.

    Raises:
      UserError: there is none, it is damaged, or its vocabulary does not fit the model's.
    """
    store = TokenStore.open(config.data.path)
    if store.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: expected at least the {store.vocab_size} of {config.data.path} "
            f"(tokenizer {store.tokenizer_name})"
        )
    return store


def loaders(config: Config, store: TokenStore) -> tuple[Loader, Loader]:
    """The endless shuffled training rows, and one pass in order over the first `eval.tokens` tokens held out."""
    data = config.data
    host: dict[str, int] = {"shard_index": jax.process_index(), "shard_count": jax.process_count()}
    training = Loader(
        store, "train", seq_len=data.seq_len, batch_size=data.batch_size, seed=data.seed, documents=data.documents,
        workers=data.workers, **host,
    )  # fmt: skip
    held_out = Loader(
        store, "validation", seq_len=data.seq_len, batch_size=data.batch_size, documents=data.documents,
        max_rows=max(1, config.eval.tokens // data.seq_len), **host,
    )  # fmt: skip
    return training, held_out


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextlib.contextmanager
def _only_trainer(workdir: pathlib.Path, config: Config) -> Iterator[None]:
    """Holds the run folder for this process and refuses to continue another experiment in it."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: expected a folder that can be written, found: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{workdir}: another process is training in this folder; stop it or take another --workdir") from None
        stored = workdir / "config.json"
        if stored.exists():
            check_resumable(json.loads(stored.read_text()), config, str(workdir))
        yield


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """A list that is empty until SIGTERM or SIGINT arrives; the second signal acts as it would without us."""
    received: list[str] = []

    def handle(number: int, _frame: Any) -> None:
        received.append(signal.Signals(number).name)
        for sent, handler in before.items():
            signal.signal(sent, handler)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record_start(workdir: pathlib.Path, config: Config, start: int) -> None:
    """Stores the config, and one line per start: command, code, versions, devices."""
    if jax.process_index():
        return
    scratch = workdir / "config.json.tmp"
    scratch.write_text(json.dumps(to_dict(config), indent=2) + "\n")
    os.replace(scratch, workdir / "config.json")
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": start,
        "command": sys.argv,
        "git": _git_state(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
    with (workdir / "starts.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def _git_state() -> str:
    """The commit of the code at work, with "+changes" when files differ from it."""
    try:
        return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    here = pathlib.Path(__file__).parent
    return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True).stdout.strip()
