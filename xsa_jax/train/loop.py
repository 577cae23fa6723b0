"""The training loop: it starts or continues a run, takes its steps, runs its actions, and stops."""

import contextlib
import pathlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xsa_jax.config import Config
from xsa_jax.parallel.mesh import describe, put_batch
from xsa_jax.train import workdir as folder
from xsa_jax.train.actions import Action, ActionMaker, Moment, Run, Stopping
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.metrics import Metrics, peak_flops, train_flops_per_token
from xsa_jax.train.setup import Data, Setup, assemble, open_data
from xsa_jax.train.state import TrainState


def train(config: Config, workdir: pathlib.Path, actions: Sequence[ActionMaker]) -> None:
    """Trains until `train.num_steps`, continuing from the last committed checkpoint of `workdir` if there is one.

    On SIGTERM or ctrl-C, `train` finishes the current step, runs the actions that are due on a stop, such as saving, and returns.
    A second signal stops the process at once.

    Args:
      config: config of the run.
      workdir: folder of the run.
      actions: makers of the actions, which run after each step in this order; see `xsa_jax.train.actions`.

    Raises:
      UserError: the config, token store, run folder or checkpoint cannot be used; the run is then unchanged. Or the loss is not
        finite, or a checkpoint cannot be written; earlier checkpoints are then kept.
    """
    setup = assemble(config)
    data = open_data(config)
    print(_summary(setup), flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.only_trainer(workdir))
        stopping = stack.enter_context(_stop_signals())  # before the checkpoints, whose last save outlasts the loop
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint))
        stack.enter_context(jax.set_mesh(setup.mesh))
        start, state = _first_state(setup, data, workdir, checkpoints)
        folder.record_start(workdir, config, start)
        metrics = stack.enter_context(_metrics(setup, workdir, start))
        run = Run(setup, data, workdir, checkpoints, metrics)
        batches = stack.enter_context(contextlib.closing(data.training.iterate(start)))
        stack.enter_context(jax.transfer_guard("disallow"))
        _steps(run, start, state, batches, [make(run) for make in actions], stopping)


def _steps(
    run: Run,
    start: int,
    state: TrainState,
    batches: Iterator[Mapping[str, np.ndarray]],
    actions: Sequence[Action],
    stopping: Stopping,
) -> None:
    setup, metrics = run.setup, run.metrics
    num_steps = setup.config.train.num_steps
    for step in range(start + 1, num_steps + 1):
        state, values = setup.step(state, put_batch(setup.mesh, next(batches)))
        moment = Moment(step, state, values, step == num_steps, stopping)
        for action in actions:
            if action.due(moment):
                action.run(moment)
        if not moment.last and (reason := stopping()):
            for action in actions:
                if action.on_stop and not action.due(moment):
                    action.run(moment)
            metrics.say(f"{reason}: saving step {step}; the same command continues from there")
            break


def _first_state(setup: Setup, data: Data, workdir: pathlib.Path, checkpoints: Checkpoints) -> tuple[int, TrainState]:
    """The step number and the train state that the run starts with."""
    if checkpoints.latest is None:
        folder.check_nothing_lost(workdir)
        print(f"{workdir}: starting at step 0", flush=True)
        return 0, setup.init_state()
    state, loader_state = checkpoints.restore(setup.config, setup.abstract_state)
    start = data.training.check_state(loader_state)
    status = "complete at" if start == setup.config.train.num_steps else "continuing from"
    print(f"{workdir}: {status} step {start}", flush=True)
    return start, state


def _metrics(setup: Setup, workdir: pathlib.Path, start: int) -> Metrics:
    config, devices = setup.config, list(setup.mesh.devices.flat)
    peak = peak_flops(devices[0].device_kind, config.model.dtype)
    return Metrics(
        workdir,
        config.train,
        start,
        flops_per_token=train_flops_per_token(config.model, config.attention, config.data.seq_len),
        peak=peak and peak * len(devices),
    )


def _summary(setup: Setup) -> str:
    attention, data = setup.config.attention, setup.config.data
    kind = attention.kind if attention.kind == "sa" else f"xsa ({attention.xsa.strength}, layers {attention.xsa.layers})"
    devices = describe(list(setup.mesh.devices.flat))
    tokens = data.batch_size * data.seq_len
    return f"attention {kind}, {setup.num_parameters:,} parameters, {tokens:,} tokens a step, {devices}"


@contextlib.contextmanager
def _stop_signals() -> Iterator[Stopping]:
    """Makes the first SIGTERM or SIGINT a reason to stop. A second signal reaches the previous handlers."""
    received: list[str] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore_handlers() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, _frame: Any) -> None:
        received.append(signal.Signals(number).name)
        restore_handlers()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield lambda: received[0] if received else None
    finally:
        restore_handlers()
