"""The fields of the config, read from the dataclasses and not through `xsa_jax.config.fields`, and another value for each."""

import dataclasses
import typing
from typing import Any

from xsa_jax.config import Config


def _fields(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> declared type of every field."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= _fields(hint, f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


FIELDS = _fields()
NUMBERS = [name for name, hint in FIELDS.items() if hint in (int, float)]
# What must be set beside a field so that only the field itself is wrong.
BESIDE: dict[str, dict[str, Any]] = {"attention.xsa.alpha": {"attention.xsa.strength": "fixed"}}

# One other valid value for every field.
OTHER = {
    "seed": 1,
    "model.vocab_size": 64, "model.num_layers": 3, "model.d_model": 36, "model.d_ff": 50, "model.mlp": "swiglu",
    "model.norm": "rmsnorm", "model.embed_norm": False, "model.tie_embeddings": False, "model.logit_softcap": 30.0,
    "model.dropout": 0.1, "model.dtype": "bfloat16", "model.remat": "full", "model.scan_unroll": 2,
    "attention.kind": "xsa", "attention.impl": "reference", "attention.num_heads": 6, "attention.num_kv_heads": 1,
    "attention.head_dim": 8, "attention.rope_theta": 5e5, "attention.qk_norm": True, "attention.window": 4,
    "attention.logit_softcap": 50.0, "attention.sinks": True, "attention.value_residual": True,
    "attention.xsa.layers": "first:1", "attention.xsa.strength": "fixed", "attention.xsa.alpha": 0.5,
    "attention.xsa.zero_rule": "add", "attention.xsa.eps": 1e-6,
    "data.path": "other", "data.seq_len": 17, "data.batch_size": 4, "data.documents": "isolate", "data.seed": 1,
    "data.workers": 1,
    "optim.name": "adamw", "optim.peak_lr": 1e-4, "optim.schedule": "constant", "optim.warmup_steps": 3,
    "optim.final_lr_ratio": 0.5, "optim.beta1": 0.8, "optim.beta2": 0.99, "optim.eps": 1e-6, "optim.weight_decay": 0.2,
    "optim.clip_norm": 2.0,
    "train.num_steps": 30, "train.z_loss": 1e-4, "train.loss_chunk_tokens": 4, "train.log_every": 2, "train.deterministic": True,
    "eval.every": 5, "eval.tokens": 128,
    "checkpoint.every": 7, "checkpoint.keep_last": 3, "checkpoint.keep_every": 4,
    "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2,
    "watchdog.start": 10.0, "watchdog.compile": 11.0, "watchdog.step": 12.0, "watchdog.save": 13.0, "watchdog.validation": 14.0,
}  # fmt: skip
