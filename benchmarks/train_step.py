"""How long a training step of the 0.7B model takes with XSA and without, on one device.

    python benchmarks/train_step.py --out benchmarks/results/gpu_train_step.json

The whole step: loss, gradients, clip, AdamW. Random tokens; SA and XSA take turns in one process; medians. Its config is a
plain dict, because the machines it is meant for have neither ml_collections nor grain. On a CPU the model is tiny.
"""

import argparse
import pathlib
import statistics
import sys
import time
import typing

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import _record
from xsa_jax.config import AttentionConfig, from_config_dict
from xsa_jax.mesh import make_mesh, put_batch
from xsa_jax.model.transformer import build
from xsa_jax.train import optim
from xsa_jax.train.state import abstract_state, init_state
from xsa_jax.train.step import make_step

IMPLEMENTATIONS = typing.get_args(typing.get_type_hints(AttentionConfig)["impl"])


def config_tree(kind: str, impl: str, batch_size: int, tiny: bool) -> dict[str, typing.Any]:
    """`configs/{kind}_0p7b.py` for one device."""
    tree: dict[str, typing.Any] = {
        "seed": 0,
        "model": {
            "vocab_size": 50304, "num_layers": 24, "d_model": 1536, "d_ff": 6144, "mlp": "gelu", "norm": "layernorm",
            "embed_norm": True, "tie_embeddings": True, "logit_softcap": 0.0, "dropout": 0.0, "dtype": "bfloat16",
            "remat": "attention",
        },
        "attention": {
            "kind": kind, "impl": impl, "num_heads": 16, "num_kv_heads": 16, "head_dim": 96, "rope_theta": 10_000.0,
            "qk_norm": False, "window": 0, "logit_softcap": 0.0, "sinks": False, "value_residual": False,
            "xsa": {"layers": "all", "strength": "full", "alpha": 1.0, "zero_rule": "clamp", "eps": 1e-12},
        },
        "data": {
            "path": "tokens", "seq_len": 2048, "batch_size": batch_size, "documents": "ignore", "seed": 0, "workers": 0,
        },
        "optim": {
            "name": "adamw", "peak_lr": 2.5e-4, "schedule": "cosine", "warmup_steps": 2000, "final_lr_ratio": 0.1, "beta1": 0.9,
            "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0,
        },
        "train": {"num_steps": 200_000, "z_loss": 0.0, "loss_chunk": 128, "log_every": 10},
        "eval": {"every": 1000, "tokens": 1_048_576},
        "checkpoint": {"every": 1000, "keep_last": 2, "keep_every": 0},
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    }  # fmt: skip
    if tiny:
        tree["model"] |= {"vocab_size": 256, "num_layers": 2, "d_model": 64, "d_ff": 128}
        tree["attention"] |= {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
        tree["data"] |= {"seq_len": 64, "batch_size": 2}
        tree["train"] |= {"loss_chunk": 32}
    return tree


class Contender:
    """One compiled step and its state."""

    def __init__(self, kind: str, impl: str, batch_size: int, tiny: bool):
        self.config = config = from_config_dict(config_tree(kind, impl, batch_size, tiny))
        self.mesh = make_mesh(config, jax.devices()[:1])
        model = build(config)
        lr = optim.schedule(config.optim, config.train.num_steps)
        tx = optim.optimizer(config.optim, config.train.num_steps, model.axes)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx, self.mesh))
        step = jax.jit(make_step(model, tx, lr, config), donate_argnums=0, out_shardings=(shardings, None))
        rows, tokens = config.data.batch_size, config.data.seq_len + 1
        ids = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, tokens), dtype=np.int32)
        with jax.set_mesh(self.mesh):
            self.state = init_state(model, tx, self.mesh)
            self.batch = put_batch(self.mesh, {"tokens": ids})
            self.compiled = step.lower(self.state, self.batch).compile()
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def step(self) -> tuple[float, float]:
        """(seconds, loss) of one step."""
        start = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch)
        loss = float(metrics["loss"])
        return time.perf_counter() - start, loss

    def tflop(self) -> float:
        """Matrix products of one step: 6 per parameter and token, and causal attention."""
        model, attention, data = self.config.model, self.config.attention, self.config.data
        tokens = data.batch_size * data.seq_len
        pairs = 3.5 * 4 * model.num_layers * attention.num_heads * attention.head_dim * data.seq_len / 2
        return (6 * self.parameters + pairs) * tokens / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", type=lambda text: text.split(","), default=["cudnn", "triton"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further implementation after so long")
    parser.add_argument("--out")
    args = parser.parse_args()
    start, tiny = time.monotonic(), jax.default_backend() == "cpu"
    rows = []
    for impl in ["xla"] if tiny else args.implementations:
        if impl not in IMPLEMENTATIONS or time.monotonic() - start > args.seconds:
            print(f"not measured: {impl} ({'out of time' if impl in IMPLEMENTATIONS else 'attention.impl does not know it'})")
            continue
        contenders = {kind: Contender(kind, impl, args.batch_size, tiny) for kind in ("sa", "xsa")}
        times: dict[str, list[float]] = {kind: [] for kind in contenders}
        losses = {}
        for n in range(args.steps + 2):
            for kind, contender in contenders.items():
                seconds, losses[kind] = contender.step()
                times[kind] += [seconds] if n >= 2 else []
        for kind, contender in contenders.items():
            median = statistics.median(times[kind])
            memory = contender.compiled.memory_analysis()
            rows.append({
                "implementation": impl, "kind": kind, "parameters": contender.parameters, "ms": 1e3 * median,
                "tokens/s": contender.batch["tokens"].shape[0] * contender.config.data.seq_len / median,
                "TFLOP/s": contender.tflop() / median,
                "speed / sa": statistics.median(a / b for a, b in zip(times["sa"], times[kind], strict=True)),
                "temporary GB": memory.temp_size_in_bytes / 1e9, "loss": losses[kind],
            })  # fmt: skip
            print(rows[-1], flush=True)
        del contenders
        _record.write(args.out, "train_step", rows)
    print(_record.table(rows, list(rows[0]) if rows else []))


if __name__ == "__main__":
    main()
