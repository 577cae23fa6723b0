"""Step time of the 0.7B model with and without XSA, on one device.

    python benchmarks/train_step.py --out benchmarks/results/gpu_train_step.json

A step computes the loss, the gradients, the clipping and AdamW's update, on random tokens. SA and XSA take turns in one process,
and medians are reported. The script needs only jax, flax and optax, because the machines it is meant for have neither
ml_collections nor grain nor orbax. On a CPU the model is tiny.
"""

import argparse
import pathlib
import statistics
import sys
import time
from typing import Any

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import _record
from configs import paper
from xsa_jax.config import Config, from_config_dict, to_dict
from xsa_jax.train.setup import assemble
from xsa_jax.train.step_time import Stepper, alternate
from xsa_kernels import registry

TINY = {
    "model.vocab_size": 256, "model.num_layers": 2, "model.d_model": 64, "model.d_ff": 128,
    "attention.num_heads": 2, "attention.num_kv_heads": 2, "attention.head_dim": 32,
    "data.seq_len": 64, "data.batch_size": 2, "train.loss_chunk_tokens": 64,
}  # fmt: skip


def config_of(kind: str, impl: str, batch_size: int, tiny: bool) -> Config:
    """The paper's 0.7B config on one device, or a tiny config of the same structure."""
    tree = to_dict(Config())
    changes: dict[str, Any] = paper.overrides("0p7b") | {"data.batch_size": batch_size} | (TINY if tiny else {})
    for name, value in (changes | {"attention.kind": kind, "attention.impl": impl}).items():
        group, field = name.split(".")
        tree[group][field] = value
    return from_config_dict(tree)


def tflop(stepper: Stepper) -> float:
    """TFLOP of the matrix products in one step: 6 FLOP per parameter and token, and those of causal attention."""
    model, attention, data = stepper.setup.config.model, stepper.setup.config.attention, stepper.setup.config.data
    tokens = data.batch_size * data.seq_len
    # Attention has two matrix products in the forward pass and five in the backward pass, thus 3.5 times those of the forward pass.
    attention_flop = 3.5 * 4 * model.num_layers * attention.num_heads * attention.head_dim * data.seq_len / 2
    return (6 * stepper.setup.num_parameters + attention_flop) * tokens / 1e12


def measure(impl: str, batch_size: int, steps: int, tiny: bool) -> list[dict[str, Any]]:
    """Measures SA and XSA in turn, and returns one row for each."""
    devices = jax.devices()[:1]
    steppers = {kind: Stepper(assemble(config_of(kind, impl, batch_size, tiny), devices)) for kind in ("sa", "xsa")}
    times = alternate(steppers, steps)
    rows = []
    for kind, stepper in steppers.items():
        median = statistics.median(times[kind])
        data = stepper.setup.config.data
        rows.append({
            "implementation": impl, "kind": kind, "parameters": stepper.setup.num_parameters, "ms": 1e3 * median,
            "tokens/s": data.batch_size * data.seq_len / median, "TFLOP/s": tflop(stepper) / median,
            "speed / sa": statistics.median(a / b for a, b in zip(times["sa"], times[kind], strict=True)),
            "temporary GB": stepper.compiled.memory_analysis().temp_size_in_bytes / 1e9, "loss": stepper.loss,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", type=lambda text: text.split(","), default=["cudnn", "triton"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="time after which no further implementation is started")
    parser.add_argument("--out")
    args = parser.parse_args()
    start, tiny = time.monotonic(), jax.default_backend() == "cpu"
    rows: list[dict[str, Any]] = []
    for impl in ["xla"] if tiny else args.implementations:
        if impl not in registry.NAMES or time.monotonic() - start > args.seconds:
            print(f"not measured: {impl} ({'out of time' if impl in registry.NAMES else 'attention.impl does not know it'})")
            continue
        rows += measure(impl, args.batch_size, args.steps, tiny)
        _record.write(args.out, "train_step", rows)
    print(_record.table(rows, list(rows[0]) if rows else []))


if __name__ == "__main__":
    main()
