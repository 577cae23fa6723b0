"""The metrics that a run reports: a JSONL file, TensorBoard events, and lines on stdout."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import tensorboardX

from xsa_jax.config import TrainConfig
from xsa_jax.errors import UserError
from xsa_jax.files import write_text
from xsa_jax.progress import Progress
from xsa_jax.train.flops import Flops


class Metrics:
    """Collects the metrics of every step, and writes those of every `log_every`-th step.

    `add` receives the metrics of a step as device values, and reads those of the previous step. The newer step is already running
    at that time, so the device never waits for the host.

    Args:
      workdir: folder of `metrics.jsonl` and `tensorboard/`. Only process 0 writes.
      config: the `train` group of the run's config.
      start: step that the run starts at. Records of later steps are removed, so that the file reads as one run. An earlier process
        leaves such records if it is killed after its last save.
      flops_per_token: FLOPs of a training step per token, for the MFU and the HFU.
      peak: peak FLOP/s of all devices together; None if it is unknown, and then there is neither.
      slowest: function from this process's seconds by name to those of the slowest process; see `Lifeline.slowest`.
      line_seconds: interval in seconds between two lines where the output is not a terminal.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: TrainConfig,
        start: int,
        *,
        flops_per_token: Flops,
        peak: float | None,
        slowest: Callable[[Mapping[str, float]], Mapping[str, Any]] = lambda seconds: seconds,
        line_seconds: float = 30.0,
    ):
        self._config = config
        self._writes = jax.process_index() == 0
        self._flops, self._peak, self._slowest = flops_per_token, peak, slowest
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._step, self._time, self._tokens, self._waited = start, time.perf_counter(), 0.0, 0.0
        self._warm = False
        if self._writes:
            path = workdir / "metrics.jsonl"
            _rewind(path, start)
            self._file = path.open("a", buffering=1)
            self._board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)
            self._progress = Progress(config.num_steps, start, unit="step", seconds=line_seconds, stream=sys.stdout)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.flush()
        if self._writes:
            self._progress.close()
            self._file.close()
            self._board.close()

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step, and flushes those of the previous step.

        Args:
          step: number of the step, from 1.
          metrics: device scalars, as the train step returns them.

        Raises:
          UserError: the loss or the gradient of the previous step is not finite.
        """
        self.flush()
        self._pending = (step, metrics)

    def waited(self, seconds: float) -> None:
        """Counts time in which this process waited for its input. Records hold the mean per step, `input_wait`, in seconds."""
        self._waited += seconds

    def flush(self) -> None:
        """Reads the pending metrics, and writes them if their step is to be logged.

        Raises:
          UserError: the loss or the gradient is not finite.
        """
        if self._pending is None:
            return
        (step, device_values), self._pending = self._pending, None
        values: dict[str, Any] = {name: float(value) for name, value in jax.device_get(dict(device_values)).items()}
        self._tokens += values.pop("tokens")
        _check_finite(step, "train", values)
        if step % self._config.log_every and step != self._config.num_steps and self._warm:
            return
        now = time.perf_counter()
        if self._warm:
            seconds = (now - self._time) / (step - self._step)
            rate = self._tokens / (now - self._time)
            mfu, hfu = (rate * flops / self._peak if self._peak else None for flops in self._flops)
            values |= {"tokens_per_second": rate, "mfu": mfu, "hfu": hfu}
            values |= self._slowest({"step_time": seconds, "input_wait": self._waited / (step - self._step)})
        self._start_interval(step, now)
        self.write(step, "train", values, stays=not self._warm or step == self._config.num_steps)
        self._warm = True  # The first step includes the compilation, so its time is not a step time.

    def write(self, step: int, split: str, values: Mapping[str, Any], stays: bool = True) -> None:
        """Writes one record and its line on stdout.

        Args:
          step: number of the step.
          split: "train" or "validation".
          values: metrics by name.
          stays: whether the line stays on a terminal; otherwise the next one replaces it.

        Raises:
          UserError: the loss is not finite.
        """
        _check_finite(step, split, values)
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        for name, value in values.items():
            if isinstance(value, float):
                self._board.add_scalar(f"{split}/{name}", value, step)
        line = _line(step, self._config.num_steps, split, values)
        if stays:
            self._progress.print(line)
        else:
            self._progress.update(step, f"loss {values['loss']:.4f}, {values['tokens_per_second']:,.0f} tokens/s", line)

    def say(self, line: str) -> None:
        """Prints a line that stays, beside the updating line of a terminal."""
        if self._writes:
            self._progress.print(line)

    @contextlib.contextmanager
    def pause(self, step: int) -> Iterator[None]:
        """A context, such as that of a validation or a save, whose time is excluded from the step time. It flushes first."""
        self.flush()
        yield
        self._start_interval(step, time.perf_counter())

    def _start_interval(self, step: int, now: float) -> None:
        self._step, self._time, self._tokens, self._waited = step, now, 0.0, 0.0


def _check_finite(step: int, split: str, values: Mapping[str, Any]) -> None:
    """Stops a run before it saves weights that no later step can mend."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(values.get(name, 0.0)):
            raise UserError(
                f"step {step}: the {split} {name} is {values[name]} and the run will not recover; its checkpoints from before "
                f"are kept. Lower optim.peak_lr, lengthen optim.warmup_steps, or look at the data"
            )


def _line(step: int, num_steps: int, split: str, values: Mapping[str, Any]) -> str:
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}", f"{split} loss {values['loss']:.4f}"]
    if "bits_per_byte" in values:
        parts.append(f"bits/byte {values['bits_per_byte']:.4f}")
    if "grad_norm" in values:
        parts += [f"grad {values['grad_norm']:.2f}", f"lr {values['lr']:.2e}"]
    if "step_time" in values:
        parts += [f"{values['tokens_per_second']:,.0f} tokens/s", f"{1e3 * values['step_time']:.0f} ms/step"]
        parts.append(f"MFU {100 * values['mfu']:.1f}%" if values["mfu"] is not None else "MFU unknown")
        left = int((num_steps - step) * values["step_time"])
        parts.append(f"left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")
    return "  ".join(parts)


def last_step(workdir: pathlib.Path) -> int:
    """The last step that `metrics.jsonl` records; 0 if there is none."""
    return max((step for step, _ in _records(workdir / "metrics.jsonl")), default=0)


def _rewind(path: pathlib.Path, start: int) -> None:
    write_text(path, "".join(line for step, line in _records(path) if step <= start))


def _records(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (step, line) of every record, and skips invalid lines, such as one that a kill cut short."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield int(json.loads(line)["step"]), line + "\n"
        except (ValueError, TypeError, KeyError):
            continue
