"""What a run reports while it runs: a JSONL file, TensorBoard events, and a line for people."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import tensorboardX

from xsa_jax.config import AttentionConfig, ModelConfig, TrainConfig
from xsa_jax.errors import UserError
from xsa_jax.files import write_text
from xsa_jax.progress import Progress

# Dense bfloat16 peak of one device, FLOP/s, by jax's device_kind in lower case; from the makers' data sheets.
_PEAK_FLOPS = {
    "tpu v4": 275e12, "tpu v5 lite": 197e12, "tpu v5e": 197e12, "tpu v5": 459e12, "tpu v5p": 459e12, "tpu v6 lite": 918e12,
    "tpu v6e": 918e12, "tpu7x": 2307e12, "nvidia a100-sxm4-40gb": 312e12, "nvidia a100-sxm4-80gb": 312e12,
    "nvidia h100 80gb hbm3": 989e12, "nvidia h100 pcie": 756e12, "nvidia h200": 989e12,
}  # fmt: skip


def train_flops_per_token(model: ModelConfig, attention: AttentionConfig, seq_len: int) -> float:
    """FLOPs of forward and backward for one token, by the usual count (PaLM, arXiv 2204.02311, appendix B).

    6 per matrix weight, and 12 * H * E per key and layer, masked keys counted too (a window bounds them). SA and XSA count the
    same: the projection adds no more than one key to each token, and one scale keeps their MFU comparable.
    """
    heads = attention.num_heads * attention.head_dim
    kv_heads = attention.num_kv_heads * attention.head_dim
    mlp = model.d_model * model.d_ff * (3 if model.mlp == "swiglu" else 2)
    weights = model.num_layers * (model.d_model * (2 * heads + 2 * kv_heads) + mlp) + model.d_model * model.vocab_size
    keys = min(seq_len, attention.window or seq_len)
    return 6.0 * weights + 12.0 * model.num_layers * heads * keys


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for this compute type, or None where the table does not know: no MFU rather than a guess."""
    return _PEAK_FLOPS.get(device_kind.lower()) if dtype == "bfloat16" else None


class Metrics:
    """Collects the metrics of steps and writes those of every `log_every`-th.

    `add` is handed device values and reads those of the step before: by then the next step is already running, so the device
    never waits for the host.

    Args:
      workdir: where `metrics.jsonl` and `tensorboard/` go; only process 0 writes.
      config: the `train` group of the run's config.
      start: the step that the run begins at. Records of later steps, from a life that was killed after its last save, are
        removed, so the file reads as one run.
      flops_per_token: FLOPs of a training step per token, for the MFU.
      peak: peak FLOP/s of all devices together; None where it is not known, and then there is no MFU.
      line_seconds: the time between two lines for people where the output is no terminal.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: TrainConfig,
        start: int,
        *,
        flops_per_token: float,
        peak: float | None,
        line_seconds: float = 15.0,
    ):
        self._config = config
        self._writes = jax.process_index() == 0
        self._flops, self._peak = flops_per_token, peak
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._step, self._time, self._tokens = start, time.perf_counter(), 0.0
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
        """Takes the metrics of update number `step` (from 1)."""
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Reads and, where it is their turn, writes the metrics that wait.

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
            mfu = rate * self._flops / self._peak if self._peak else None
            values |= {"step_time": seconds, "tokens_per_second": rate, "mfu": mfu}
        self._mark(step, now)
        self.write(step, "train", values, stays=not self._warm or step == self._config.num_steps)
        self._warm = True  # The first step holds the compilation: its time is nobody's step time.

    def write(self, step: int, split: str, values: Mapping[str, Any], stays: bool = True) -> None:
        """Writes one record and its line for people, which `stays` or is the next state of an updating line.

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

    @contextlib.contextmanager
    def pause(self, step: int) -> Iterator[None]:
        """Writes what waits, and leaves the time spent inside (an evaluation, a save) out of the step time."""
        self.flush()
        yield
        self._mark(step, time.perf_counter())

    def _mark(self, step: int, now: float) -> None:
        self._step, self._time, self._tokens = step, now, 0.0


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
    """The last step that `metrics.jsonl` tells of, 0 without one."""
    return max((step for step, _ in _records(workdir / "metrics.jsonl")), default=0)


def _rewind(path: pathlib.Path, start: int) -> None:
    write_text(path, "".join(line for step, line in _records(path) if step <= start))


def _records(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(step, line) of every record; what is none, such as a line that a kill cut short, is passed over."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield int(json.loads(line)["step"]), line + "\n"
        except (ValueError, TypeError, KeyError):
            continue
