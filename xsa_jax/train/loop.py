"""The training loop: it starts or continues a run, takes its steps, runs its actions, and stops."""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from xsa_jax.config import Config
from xsa_jax.parallel import agreement
from xsa_jax.parallel.lifeline import Lifeline
from xsa_jax.parallel.mesh import describe, put_batch
from xsa_jax.train import workdir as folder
from xsa_jax.train.actions import Action, ActionMaker, Moment, Run
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.flops import peak_flops
from xsa_jax.train.metrics import Metrics
from xsa_jax.train.setup import Data, Setup, assemble, open_data
from xsa_jax.train.state import TrainState
from xsa_jax.train.step import Step
from xsa_jax.train.stopping import Stopping


def train(
    config: Config,
    workdir: pathlib.Path,
    actions: Sequence[ActionMaker],
    lifeline: Lifeline | None = None,
    max_hours: float | None = None,
) -> str | None:
    """Trains until `train.num_steps`, continuing from the last committed checkpoint of `workdir` if there is one.

    On SIGTERM, ctrl-C, SIGHUP or SIGUSR1 to any process, and after `max_hours`, `train` finishes the current step, runs the actions
    that are due on a stop, such as saving, and returns. A second signal stops the process at once.

    Args:
      config: config of the run.
      workdir: folder of the run, shared by all processes.
      actions: makers of the actions, which run after each step in this order; see `xsa_jax.train.actions`.
      lifeline: connects the processes of the run; None for a process that is alone.
      max_hours: time after which the run stops; None = no limit.

    Returns:
      The reason of a stop before the last step; None if the run is complete.

    Raises:
      UserError: the config, token store, run folder or checkpoint cannot be used, or the processes of the run differ; the run is
        then unchanged. Or the loss is not finite, or a checkpoint cannot be written; earlier checkpoints are then kept.
    """
    lifeline = lifeline or Lifeline()
    limits = config.watchdog
    lifeline.at("start", limits.start)
    folder.agree_on_start(config)
    if config.model.remat == "auto":
        lifeline.at("compile", limits.compile)
    setup = assemble(config)
    lifeline.at("start", limits.start)
    agreement.agree("recomputation", {"model.remat": setup.model.config.remat})
    data = open_data(config, setup.mesh)
    agreement.agree("data", {"token store": data.training.store_hash})
    print(_summary(setup), flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.only_trainer(workdir))
        stopping = stack.enter_context(Stopping(setup.mesh, max_hours))  # before the checkpoints, whose last save outlasts the loop
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint, lifeline.fail_together))
        agreement.agree("checkpoints", {"newest checkpoint": checkpoints.latest})
        stack.enter_context(jax.set_mesh(setup.mesh))
        start, state = _first_state(setup, data, workdir, checkpoints)
        folder.record_start(workdir, config, start, setup.model.config.remat, setup.compiler_options)
        metrics = stack.enter_context(_metrics(setup, workdir, start, lifeline))
        run = Run(setup, data, workdir, checkpoints, metrics, lifeline)
        lifeline.at("compile", limits.compile)
        step = setup.compile()
        agreement.collect("compiled", None, limits.compile or 3600.0)  # the first collective waits only 30 s for a slower compiler
        batches = stack.enter_context(contextlib.closing(data.training.iterate(start)))
        stack.enter_context(jax.transfer_guard("disallow"))
        stack.enter_context(lifeline.ends_all())
        reason = _steps(run, step, start, state, batches, [make(run) for make in actions], stopping)
        lifeline.at("last save", limits.save)
        return reason


def _steps(
    run: Run,
    compiled: Step,
    start: int,
    state: TrainState,
    batches: Iterator[Mapping[str, np.ndarray]],
    actions: Sequence[Action],
    stopping: Stopping,
) -> str | None:
    setup, metrics = run.setup, run.metrics
    num_steps = setup.config.train.num_steps
    for step in range(start + 1, num_steps + 1):
        run.lifeline.at(f"step {step}", setup.config.watchdog.step)
        before = time.perf_counter()
        rows = next(batches)
        metrics.waited(time.perf_counter() - before)
        state, values = compiled(state, put_batch(setup.mesh, rows))
        moment = Moment(step, state, values, step == num_steps, stopping)
        for action in actions:
            if action.due(moment):
                action.run(moment)
        if not moment.last and (reason := stopping.poll()):
            for action in actions:
                if action.on_stop and not action.due(moment):
                    action.run(moment)
            metrics.say(f"{reason}: saving step {step}; the same command continues from there")
            return reason
    return None


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


def _metrics(setup: Setup, workdir: pathlib.Path, start: int, lifeline: Lifeline) -> Metrics:
    config, devices = setup.config, list(setup.mesh.devices.flat)
    peak = peak_flops(devices[0].device_kind, config.model.dtype)
    return Metrics(
        workdir,
        config.train,
        start,
        flops_per_token=setup.flops_per_token,
        peak=peak and peak * len(devices),
        slowest=lifeline.slowest,
    )


def _summary(setup: Setup) -> str:
    attention, data = setup.config.attention, setup.config.data
    kind = attention.kind if attention.kind == "sa" else f"xsa ({attention.xsa.strength}, layers {attention.xsa.layers})"
    devices = describe(list(setup.mesh.devices.flat))
    tokens = data.batch_size * data.seq_len
    return f"attention {kind}, {setup.num_parameters:,} parameters, {tokens:,} tokens a step, {devices}"
