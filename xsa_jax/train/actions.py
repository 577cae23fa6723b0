"""The periodic actions of a run: log, validate, save. Each has its own cadence.

The caller of `xsa_jax.train.loop.train` passes an action maker for each action: `(log, validate, save)`. An action maker is a
function that makes the action of a run. To add an action, such as a profiler, write its maker here or in the caller's file. The
loop does not change.
"""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from xsa_jax.parallel.lifeline import Lifeline
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.metrics import Metrics
from xsa_jax.train.setup import Data, Setup
from xsa_jax.train.state import TrainState
from xsa_jax.train.stopping import Stopping
from xsa_jax.train.validate import validate as validate_rows


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run in progress that its actions use.

    Attributes:
      setup: the assembled run.
      data: loaders of the training and the held-out text.
      workdir: folder of the run.
      checkpoints: checkpoints of the run.
      metrics: metrics of the run.
      lifeline: connection to the other processes of the run.
    """

    setup: Setup
    data: Data
    workdir: pathlib.Path
    checkpoints: Checkpoints
    metrics: Metrics
    lifeline: Lifeline

    @contextlib.contextmanager
    def paused(self, step: int, doing: str, seconds: float) -> Iterator[None]:
        """A context that allows transfers between host and device, and excludes its time from the step time.

        Args:
          step: number of the step after which it happens.
          doing: a word or two for what happens.
          seconds: the longest time that it may take; 0 = no limit.
        """
        self.lifeline.at(f"{doing} after step {step}", seconds)
        with self.metrics.pause(step), jax.transfer_guard("allow"):
            yield


@dataclasses.dataclass(frozen=True)
class Moment:
    """The end of a step.

    Attributes:
      step: number of the step, from 1.
      state: train state after the step. The next step donates its buffers, so an action must not keep it.
      values: metrics of the step, still on the device.
      last: whether the step is the last one of the run.
      stopping: the decision to stop. Long actions poll it, all processes at the same points.
    """

    step: int
    state: TrainState
    values: Mapping[str, jax.Array]
    last: bool
    stopping: Stopping


@dataclasses.dataclass(frozen=True)
class Action:
    """A function that a run calls after every `every`-th step and after the last step.

    Attributes:
      run: the function to call.
      every: number of steps between two calls; 0 = only after the last step.
      on_stop: whether the function is also called when the run stops before its last step.
    """

    run: Callable[[Moment], None]
    every: int
    on_stop: bool = False

    def due(self, moment: Moment) -> bool:
        """Whether the function is to be called after this step."""
        return moment.last or (self.every > 0 and moment.step % self.every == 0)


ActionMaker = Callable[[Run], Action]


def log(run: Run) -> Action:
    """Passes the metrics of every step to `Metrics`, which writes those of every `train.log_every`-th step."""
    return Action(lambda moment: run.metrics.add(moment.step, moment.values), every=1)


def validate(run: Run) -> Action:
    """Measures the held-out loss every `eval.every` steps. A stop interrupts the measurement, except after the last step."""
    setup, data = run.setup, run.data

    def measure(moment: Moment) -> None:
        with run.paused(moment.step, "validation", setup.config.watchdog.validation):
            rows: Iterator[Mapping[str, np.ndarray]] = data.held_out.iterate()
            if not moment.last:
                rows = itertools.takewhile(lambda _: not moment.stopping.poll(), rows)
            sums = validate_rows(setup.evaluator, moment.state.params, rows, len(data.held_out.rows), setup.mesh)
        if moment.last or not moment.stopping.reason:
            run.metrics.write(moment.step, "validation", sums.totals(data.bytes_per_token))

    return Action(measure, every=setup.config.eval.every)


def save(run: Run) -> Action:
    """Saves a checkpoint every `checkpoint.every` steps and when the run stops."""

    def write(moment: Moment) -> None:
        with run.paused(moment.step, "save", run.setup.config.watchdog.save):
            run.checkpoints.save(moment.step, moment.state, run.setup.config, run.data.training.state(moment.step))

    return Action(write, every=run.setup.config.checkpoint.every, on_stop=True)
