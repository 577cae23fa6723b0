"""The validated configuration of one run.

A config file in `configs/` builds an `ml_collections.ConfigDict`; `from_config_dict` turns it into the frozen dataclasses
below, once, at the edge of the program. Everything behind that edge reads plain attributes that are known to fit together.
Defaults live in `configs/base.py` alone, so these classes have none.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal


class UserError(Exception):
    """Something the user gave (config, file, checkpoint, environment) cannot be used; the text says what and what to do."""


class ConfigError(UserError):
    """A config field that is unknown, of the wrong type, or impossible beside the others."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    num_layers: int
    d_model: int
    d_ff: int
    mlp: Literal["gelu", "swiglu"]
    norm: Literal["layernorm", "rmsnorm"]
    embed_norm: bool
    tie_embeddings: bool
    logit_softcap: float
    dropout: float
    dtype: Literal["bfloat16", "float32"]
    remat: Literal["none", "full", "dots", "attention"]


@dataclasses.dataclass(frozen=True)
class XSAConfig:
    """How the component along the token's own value is removed; read only where `attention.kind == "xsa"`."""

    layers: str
    strength: Literal["full", "fixed", "learned"]
    alpha: float
    zero_rule: Literal["clamp", "add", "exact"]
    eps: float


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    kind: Literal["sa", "xsa"]
    impl: Literal["auto", "reference", "xla", "cudnn", "splash", "tokamax", "tpu", "triton", "hopper"]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    qk_norm: bool
    window: int
    logit_softcap: float
    sinks: bool
    value_residual: bool
    xsa: XSAConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    path: str
    seq_len: int
    batch_size: int
    documents: Literal["ignore", "isolate"]
    seed: int
    workers: int


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw"]
    peak_lr: float
    schedule: Literal["cosine", "constant"]
    warmup_steps: int
    final_lr_ratio: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    num_steps: int
    z_loss: float
    loss_chunk: int
    log_every: int


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int
    keep_last: int
    keep_every: int


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int
    fsdp: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int
    model: ModelConfig
    attention: AttentionConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig


# What a run may change when it is continued; every other field is part of the experiment and must stay as it began.
RESUMABLE = (
    "attention.impl", "checkpoint.", "data.path", "data.workers", "eval.", "mesh.",
    "model.remat", "train.log_every", "train.loss_chunk",
)  # fmt: skip


def from_config_dict(tree: Mapping[str, Any]) -> Config:
    """Builds and checks the config.

    Args:
      tree: a ConfigDict, or the nested dict stored with a run.

    Raises:
      ConfigError: names the field, what was found and what was expected.
    """
    config = _build(Config, tree, "")
    _check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The nested dict of plain values that `from_config_dict` accepts; JSON can hold it."""
    return dataclasses.asdict(config)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted field name, value) in order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_resumable(stored: Mapping[str, Any], config: Config, run: str) -> None:
    """Refuses to continue a run under a config that would make it another experiment.

    Args:
      stored: the nested dict saved with the run.
      config: what is asked for now.
      run: how the message names the run.

    Raises:
      ConfigError: names each field that differs, with both values.
    """
    changed = _changes(stored, config, lambda name: not name.startswith(RESUMABLE))
    if changed:
        raise ConfigError(f"{run} was started with another config: {changed}. Use its values, or another --workdir")


def check_same_model(stored: Mapping[str, Any], config: Config, run: str) -> None:
    """Refuses to put a run's weights into another model: nothing in the weights shows whether they were trained with XSA.

    Raises:
      ConfigError: names each field that differs, with both values.
    """
    free = ("attention.impl", "model.dropout", "model.dtype", "model.remat")
    changed = _changes(stored, config, lambda name: name.startswith(("attention.", "model.")) and name not in free)
    if changed:
        raise ConfigError(f"{run} holds the weights of another model: {changed}. Build the model from the run's own config")


def _changes(stored: Mapping[str, Any], config: Config, matters: Callable[[str], bool]) -> str:
    old, new = dict(flatten(stored)), dict(flatten(to_dict(config)))
    return "; ".join(
        f"{name} (run: {old.get(name, '<absent>')!r}, now: {new.get(name, '<absent>')!r})"
        for name in sorted(old.keys() | new.keys())
        if matters(name) and old.get(name) != new.get(name)
    )


def xsa_layers(spec: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers project, per layer, for `attention.xsa.layers`.

    Accepts "all", "first:n", "last:n", "every:k" (layers k-1, 2k-1, ...) or a comma list of layer indices.

    Raises:
      ConfigError: when the text has none of these forms or names a layer that does not exist.
    """
    rule, _, argument = spec.partition(":")
    try:
        if spec == "all":
            chosen = set(range(num_layers))
        elif rule == "first":
            chosen = set(range(_positive(argument, num_layers)))
        elif rule == "last":
            chosen = set(range(num_layers - _positive(argument, num_layers), num_layers))
        elif rule == "every":
            step = _positive(argument, num_layers)
            chosen = set(range(step - 1, num_layers, step))
        else:
            chosen = {int(index) for index in spec.split(",")}
            if not chosen <= set(range(num_layers)):
                raise ValueError
    except ValueError:
        raise ConfigError(
            f"attention.xsa.layers={spec!r} with {num_layers} layers: expected 'all', 'first:n', 'last:n', 'every:k' "
            f"or a comma list of indices from 0 to {num_layers - 1}"
        ) from None
    return tuple(layer in chosen for layer in range(num_layers))


def _positive(text: str, most: int) -> int:
    value = int(text)
    if not 1 <= value <= most:
        raise ValueError
    return value


def _build(cls: Any, tree: Mapping[str, Any], prefix: str) -> Any:
    if not isinstance(tree, Mapping) and not hasattr(tree, "items"):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: expected a group of fields, found {tree!r}")
    hints = typing.get_type_hints(cls)
    given = dict(tree.items())
    for name in given:
        if name not in hints:
            raise ConfigError(f"{prefix}{name}: unknown field; known here: {', '.join(hints)}")
    for name in hints:
        if name not in given:
            raise ConfigError(f"{prefix}{name}: missing")
    return cls(**{name: _value(hint, given[name], prefix + name) for name, hint in hints.items()})


def _value(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{name}.")
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name}={value!r}: expected {hint.__name__}, found {type(value).__name__}")
    return value


# The least value of each number.
_AT_LEAST = types.MappingProxyType({
    "model.vocab_size": 2, "model.num_layers": 1, "model.d_model": 1, "model.d_ff": 1,
    "model.logit_softcap": 0, "model.dropout": 0,
    "attention.num_heads": 1, "attention.num_kv_heads": 1, "attention.head_dim": 2, "attention.rope_theta": 1,
    "attention.window": 0, "attention.logit_softcap": 0, "attention.xsa.eps": 0,
    "data.seq_len": 1, "data.batch_size": 1, "data.seed": 0, "data.workers": 0,
    "optim.peak_lr": 0, "optim.warmup_steps": 0, "optim.final_lr_ratio": 0, "optim.beta1": 0,
    "optim.beta2": 0, "optim.eps": 0, "optim.weight_decay": 0, "optim.clip_norm": 0,
    "train.num_steps": 1, "train.z_loss": 0, "train.loss_chunk": 1, "train.log_every": 1,
    "eval.every": 0, "eval.tokens": 1,
    "checkpoint.every": 1, "checkpoint.keep_last": 1, "checkpoint.keep_every": 0,
    "mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1,
    "seed": 0,
})  # fmt: skip


def _check(config: Config) -> None:
    fields = dict(flatten(to_dict(config)))
    for name, least in _AT_LEAST.items():
        most = 2**31 if isinstance(fields[name], int) else float("inf")  # jax counts in int32
        if not least <= fields[name] < most:
            raise ConfigError(f"{name}={fields[name]!r}: expected a finite number of at least {least}, and below {most}")

    model, attention, data, optim, mesh = config.model, config.attention, config.data, config.optim, config.mesh
    xsa_layers(attention.xsa.layers, model.num_layers)

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(message)

    need(
        attention.num_heads % attention.num_kv_heads == 0,
        f"attention.num_heads={attention.num_heads}: expected a multiple of attention.num_kv_heads={attention.num_kv_heads}",
    )
    need(attention.head_dim % 2 == 0, f"attention.head_dim={attention.head_dim}: expected an even number (RoPE rotates pairs)")
    need(math.isfinite(attention.xsa.alpha), f"attention.xsa.alpha={attention.xsa.alpha}: expected a finite number")
    need(
        attention.xsa.strength == "fixed" or attention.xsa.alpha == 1.0,
        f"attention.xsa.alpha={attention.xsa.alpha} has no effect with "
        f"attention.xsa.strength={attention.xsa.strength!r}; set strength to 'fixed'",
    )
    need(
        attention.xsa.zero_rule == "exact" or attention.xsa.eps > 0,
        f"attention.xsa.eps=0 with attention.xsa.zero_rule={attention.xsa.zero_rule!r}: expected a positive eps",
    )
    need(model.dropout < 1, f"model.dropout={model.dropout}: expected less than 1")
    need(optim.eps > 0, f"optim.eps={optim.eps}: expected more than 0 (a parameter without gradient would become 0 / 0)")
    need(optim.peak_lr > 0, f"optim.peak_lr={optim.peak_lr}: expected more than 0")
    need(optim.beta1 < 1, f"optim.beta1={optim.beta1}: expected less than 1")
    need(optim.beta2 < 1, f"optim.beta2={optim.beta2}: expected less than 1")
    need(optim.final_lr_ratio <= 1, f"optim.final_lr_ratio={optim.final_lr_ratio}: expected at most 1")
    need(
        optim.warmup_steps < config.train.num_steps,
        f"optim.warmup_steps={optim.warmup_steps}: expected fewer than train.num_steps={config.train.num_steps}",
    )
    need(mesh.data != 0, "mesh.data=0: expected a positive number, or -1 for all devices that are left")
    rows = max(mesh.data, 1) * mesh.fsdp
    need(data.batch_size % rows == 0, f"data.batch_size={data.batch_size}: expected a multiple of mesh.data * mesh.fsdp = {rows}")
    for name in ("attention.num_heads", "model.d_ff", "model.vocab_size"):
        size = fields[name]
        need(size % mesh.tensor == 0, f"{name}={size}: expected a multiple of mesh.tensor={mesh.tensor}")
    need(model.d_model % mesh.fsdp == 0, f"model.d_model={model.d_model}: expected a multiple of mesh.fsdp={mesh.fsdp}")
