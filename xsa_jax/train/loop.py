"""One run, from a config to its last step: start or continue, step, report, validate, save."""

import contextlib
import itertools
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import jax

from xsa_jax.config import Config, ConfigError
from xsa_jax.data.loader import Loader
from xsa_jax.data.store import TokenStore
from xsa_jax.mesh import make_mesh, put_batch
from xsa_jax.model.transformer import Params, build
from xsa_jax.train import optim
from xsa_jax.train import workdir as folder
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.metrics import Metrics
from xsa_jax.train.state import abstract_state, init_state
from xsa_jax.train.step import make_step
from xsa_jax.train.validate import make_evaluator, validate


def train(config: Config, workdir: pathlib.Path) -> None:
    """Trains until `train.num_steps`, continuing from the last committed checkpoint of `workdir` if there is one.

    SIGTERM or ctrl-C saves after the step under way and returns; a second one stops at once.

    Raises:
      UserError: the config, token store, run folder or checkpoint cannot be used, and nothing of the run was changed; or the
        loss is not finite, or a checkpoint cannot be written, and the checkpoints before are kept.
    """
    model = build(config)
    store = open_store(config)
    loader, held_out = loaders(config, store)
    bytes_per_token = store.split("validation").bytes_per_token
    mesh = make_mesh(config)
    num_steps = config.train.num_steps
    lr = optim.schedule(config.optim, num_steps)
    tx = optim.optimizer(config.optim, num_steps, model.axes)
    abstract = abstract_state(model, tx, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step_fn = jax.jit(make_step(model, tx, lr, config), donate_argnums=0, out_shardings=(shardings, None))
    evaluator = make_evaluator(model)

    print(_summary(config, abstract.params), flush=True)

    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.only_trainer(workdir))
        received = stack.enter_context(_stop_signals())  # outside the checkpoints, which may still be writing when the loop ends
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint))
        stack.enter_context(jax.set_mesh(mesh))
        if checkpoints.latest is None:
            folder.check_nothing_lost(workdir)
            start, state = 0, init_state(model, tx, mesh)
            print(f"{workdir}: starting at step 0", flush=True)
        else:
            state, loader_state = checkpoints.restore(model, abstract)
            start = loader.check_state(loader_state)
            print(f"{workdir}: {'complete at' if start == num_steps else 'continuing from'} step {start}", flush=True)
        folder.record_start(workdir, config, start)
        metrics = stack.enter_context(Metrics(workdir, config, start, jax.devices()))
        batches = stack.enter_context(contextlib.closing(loader.iterate(start)))
        stack.enter_context(jax.transfer_guard("disallow"))

        for step in range(start + 1, num_steps + 1):
            state, values = step_fn(state, put_batch(mesh, next(batches)))
            metrics.add(step, values)
            done = step == num_steps
            if done or _due(step, config.eval.every):
                with metrics.pause(step), jax.transfer_guard("allow"):
                    # A stop does not wait for the rest of a validation, unless it is the last one.
                    rows = held_out.iterate() if done else itertools.takewhile(lambda _: not received, held_out.iterate())
                    sums = validate(evaluator, state.params, rows, held_out.local_batch_size, mesh)
                if done or not received:
                    metrics.write(step, "validation", sums.report(bytes_per_token))
            stop = bool(received)
            if done or stop or _due(step, config.checkpoint.every):
                with metrics.pause(step), jax.transfer_guard("allow"):
                    checkpoints.save(step, state, model, loader.state(step))
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


def _summary(config: Config, abstract_params: Params) -> str:
    attention, data = config.attention, config.data
    kind = attention.kind if attention.kind == "sa" else f"xsa ({attention.xsa.strength}, layers {attention.xsa.layers})"
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params))
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return f"attention {kind}, {parameters:,} parameters, {data.batch_size * data.seq_len:,} tokens a step, {devices}"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """A list that is empty until SIGTERM or SIGINT arrives; the second signal acts as it would without us."""
    received: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: Any) -> None:
        received.append(signal.Signals(number).name)
        give_back()

    for number in before:
        signal.signal(number, handle)
    try:
        yield received
    finally:
        give_back()
