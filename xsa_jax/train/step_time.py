"""Step times of runs relative to each other, measured by letting their compiled steps take turns in one process.

    python -m xsa_jax.train.step_time runs/sa runs/xsa --output runs/step_time.json

Runs that are trained one after the other meet different loads of the machine, so the ratio of their step times is noise. Here,
step n of each run directly follows step n of the previous run. The command reports the median ratio of such pairs of steps. It does
not change the runs: the steps start from fresh weights and read random tokens.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xsa_jax.config.stored import digest, from_stored
from xsa_jax.errors import UserError
from xsa_jax.files import write_json
from xsa_jax.parallel.mesh import batch_rows, describe, put_batch
from xsa_jax.parallel.process import prepare_process
from xsa_jax.train.setup import Setup, assemble
from xsa_jax.train.state import TrainState

WARMUP = 3  # number of first steps that are not measured


class Stepper:
    """The compiled step of one run with a state and a batch to run it on.

    Attributes:
      setup: the assembled run.
      compiled: compiled train step of the run.
      loss: loss of the last step, in nats per token; nan before the first.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.loss = float("nan")
        shape = setup.abstract_batch()["tokens"].shape
        ids = np.random.default_rng(0).integers(0, setup.config.model.vocab_size, shape, dtype=np.int32)
        ids = ids[list(batch_rows(setup.mesh, shape[0]))]
        batch = {name: ids if name == "tokens" else np.zeros_like(ids) for name in setup.abstract_batch()}
        with jax.set_mesh(setup.mesh):
            self._state: TrainState = setup.init_state()
            self._batch = put_batch(setup.mesh, batch)
            self.compiled = setup.compile()

    def seconds(self) -> float:
        """Runs one more step, and returns its time in seconds."""
        start = time.perf_counter()
        self._state, metrics = self.compiled(self._state, self._batch)
        self.loss = float(metrics["loss"])
        return time.perf_counter() - start


def alternate(steppers: Mapping[str, Stepper], pairs: int) -> dict[str, list[float]]:
    """Runs `pairs` steps of each stepper in turn, after `WARMUP` steps, and returns their times in seconds by name."""
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for n in range(WARMUP + pairs):
        for name, stepper in steppers.items():
            seconds = stepper.seconds()
            times[name] += [seconds] if n >= WARMUP else []
    return times


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Step time of each run relative to the first run: the median over pairs of steps."""
    first = next(iter(times.values()))
    return {name: statistics.median(a / b for a, b in zip(seconds, first, strict=True)) for name, seconds in times.items()}


def measure(runs: Sequence[pathlib.Path], pairs: int) -> dict[str, Any]:
    """Measures the step times of runs relative to the first run, and returns the content of the output file.

    Args:
      runs: folders of training runs.
      pairs: number of measured steps of each run.

    Raises:
      UserError: a folder holds no run, or a config does not fit this machine.
    """
    if len(runs) < 2:
        raise UserError(f"found {len(runs)} run; expected two or more, whose steps can take turns")
    steppers = {}
    for run in runs:
        path = run / "config.json"
        try:
            stored = json.loads(path.read_text())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); train.py writes it") from None
        except ValueError as error:
            raise UserError(f"{path}: not JSON ({error}); restore the file") from None
        steppers[str(run.resolve())] = Stepper(assemble(from_stored(stored, str(path))))
    if len(steppers) < len(runs):
        raise UserError("the same run is given twice; name each run once")
    times = alternate(steppers, pairs)
    return {
        "method": "compiled train steps taking turns in one process; median over pairs of the time over the first run's",
        "pairs": pairs,
        "devices": describe(jax.devices()),
        "jax": jax.__version__,
        "configs": {name: digest(stepper.setup.config) for name, stepper in steppers.items()},
        "ratios": ratios(times),
    }


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a positive integer")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m xsa_jax.train.step_time", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs; the first one is the reference")
    parser.add_argument("--pairs", type=_positive, default=30, help="number of measured steps of each run (%(default)s)")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="JSON file, for python -m xsa_jax.compare --step_times")
    args = parser.parse_args(argv)
    prepare_process()
    try:
        result = measure(args.runs, args.pairs)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.output, result)
    except (UserError, OSError) as error:
        print(f"step_time: {error}", file=sys.stderr)
        return 1
    for run, ratio in zip(args.runs, result["ratios"].values(), strict=True):
        print(f"{run}: {ratio:.3f} of the first run's step time, median of {args.pairs} alternating steps")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
