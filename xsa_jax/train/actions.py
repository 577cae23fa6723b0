"""What a run does beside its steps: log, validate, save. Each is an action with a cadence of its own.

The caller of `xsa_jax.train.loop.train` chooses the actions, as functions that make one for a run: `(log, validate, save)`. A new
one (tasks, a profiler) is a function of this form, in this file or in the caller's; the loop does not change.
"""

import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.metrics import Metrics
from xsa_jax.train.setup import Data, Setup
from xsa_jax.train.state import TrainState
from xsa_jax.train.validate import validate as validate_rows

# Says why the run is to stop, or None while it is not. It is asked between steps and inside long actions.
Stopping = Callable[[], str | None]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run under way, as its actions see it."""

    setup: Setup
    data: Data
    workdir: pathlib.Path
    checkpoints: Checkpoints
    metrics: Metrics

    @contextlib.contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Lets data move between host and device, and leaves the time spent inside out of the step time."""
        with self.metrics.pause(step), jax.transfer_guard("allow"):
            yield


@dataclasses.dataclass(frozen=True)
class Moment:
    """The end of a step.

    Attributes:
      step: its number, from 1.
      state: the train state after it. The next step takes over its buffers, so an action must not keep it.
      values: the step's metrics, still on the device.
      last: whether it is the run's last step.
      stopping: see `Stopping`.
    """

    step: int
    state: TrainState
    values: Mapping[str, jax.Array]
    last: bool
    stopping: Stopping


@dataclasses.dataclass(frozen=True)
class Action:
    """Something that a run does after every `every`-th step (0: after none) and after the last.

    Attributes:
      run: what it does.
      every: steps between two times.
      on_stop: whether it is also done when the run stops before its last step.
    """

    run: Callable[[Moment], None]
    every: int
    on_stop: bool = False

    def due(self, moment: Moment) -> bool:
        """Whether it is to be done after this step."""
        return moment.last or (self.every > 0 and moment.step % self.every == 0)


ActionMaker = Callable[[Run], Action]


def log(run: Run) -> Action:
    """Takes the metrics of every step; `Metrics` writes those of every `train.log_every`-th."""
    return Action(lambda moment: run.metrics.add(moment.step, moment.values), every=1)


def validate(run: Run) -> Action:
    """Measures the loss on the held-out rows every `eval.every` steps. A stop interrupts it, except after the last step."""
    setup, data = run.setup, run.data

    def measure(moment: Moment) -> None:
        with run.paused(moment.step):
            rows: Iterator[Mapping[str, np.ndarray]] = data.held_out.iterate()
            if not moment.last:
                rows = itertools.takewhile(lambda _: not moment.stopping(), rows)
            sums = validate_rows(setup.evaluator, moment.state.params, rows, data.held_out.local_batch_size, setup.mesh)
        if moment.last or not moment.stopping():
            run.metrics.write(moment.step, "validation", sums.totals(data.bytes_per_token))

    return Action(measure, every=setup.config.eval.every)


def save(run: Run) -> Action:
    """Saves a checkpoint every `checkpoint.every` steps, and when the run stops."""

    def write(moment: Moment) -> None:
        with run.paused(moment.step):
            run.checkpoints.save(moment.step, moment.state, run.setup.config, run.data.training.state(moment.step))

    return Action(write, every=run.setup.config.checkpoint.every, on_stop=True)
