"""Every field of a run's config, each with its one home.

A field is declared once, by `field` below, with all that is ever asked about it: type, default, allowed values, meaning, whether a
run may change it when it is continued, whether runs that are compared may differ in it, whether weights depend on it, and what
runs from before it existed had in its place. Everything else (the ConfigDict that config files start from, validation, the rules
for continued and compared runs, the upgrade of stored configs, docs/config.md) is derived from these declarations by the other
modules of this package. A new field is a line here and its use where it has an effect; give it `before`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from xsa_kernels import registry

# Stands for the value `before` of a field that has always been there.
ALWAYS_STORED: Any = object()


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of a field beside its name, type and default.

    Attributes:
      doc: one line of documentation.
      least: the least value of a number; None where any finite number will do.
      choices: the allowed values of a string; empty where a Literal type or nothing bounds it.
      may_change: whether a continued run may change the field.
      may_differ: whether runs that are compared may differ in it.
      keeps_weights: whether weights trained under one value may be used under another. It is asked of `model` and `attention` only.
      before: the value that runs from before the field had; ALWAYS_STORED for a field that every stored run has.
    """

    doc: str
    least: float | None = None
    choices: Sequence[str] = ()
    may_change: bool = False
    may_differ: bool = False
    keeps_weights: bool = False
    before: Any = ALWAYS_STORED


def field(default: Any, doc: str, **about: Any) -> Any:
    """Declares a config field with its default and one line of documentation; see `About` for the rest."""
    return dataclasses.field(default=default, metadata={"about": About(doc, **about)})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The decoder, its attention apart."""

    vocab_size: int = field(50304, "rows of the embedding; at least the store's vocabulary (GPT-2's 50257, padded)", least=2)
    num_layers: int = field(12, "number of layers", least=1)
    d_model: int = field(768, "width of the residual stream", least=1)
    d_ff: int = field(3072, "width inside the feed-forward", least=1)
    mlp: Literal["gelu", "swiglu"] = field("gelu", "`gelu`, or `swiglu` (three matrices)")
    norm: Literal["layernorm", "rmsnorm"] = field("layernorm", "`layernorm` or `rmsnorm`, with a scale and no bias")
    embed_norm: bool = field(True, "the paper's extra norm after the embedding")
    tie_embeddings: bool = field(True, "one matrix for embedding and output")
    logit_softcap: float = field(0.0, "c: output logits x become c tanh(x / c); 0 = off", least=0)
    dropout: float = field(0.0, "probability, on the embedding and on what each layer adds", least=0, keeps_weights=True)
    dtype: Literal["bfloat16", "float32"] = field(
        "bfloat16", "compute type; parameters, softmax and projection stay float32", keeps_weights=True
    )
    remat: Literal["none", "full", "dots", "attention"] = field(
        "none", "what the backward pass finds stored: `none` (everything), `dots`, `attention`, `full` (nothing)",
        may_change=True, keeps_weights=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class XSAConfig:
    """How the component along the token's own value is removed; read only where `attention.kind` is `xsa`."""

    layers: str = field("all", "layers that project: `all`, `first:n`, `last:n`, `every:k`, or indices as `0,3,5`", may_differ=True)
    strength: Literal["full", "fixed", "learned"] = field(
        "full", "`full`, `fixed` (by alpha), or `learned` (per head: tanh of a gate that starts at 0)", may_differ=True
    )
    alpha: float = field(1.0, "share of the component that is removed when strength is `fixed`", may_differ=True)
    zero_rule: Literal["clamp", "add", "exact"] = field(
        "clamp", "\\|v\\|^2 becomes: `clamp` max(\\|v\\|^2, eps), `add` \\|v\\|^2 + eps, `exact` itself (a zero v removes nothing)",
        may_differ=True,
    )  # fmt: skip
    eps: float = field(1e-12, "eps of the zero rule", least=0, may_differ=True)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Attention of every layer."""

    kind: Literal["sa", "xsa"] = field("sa", "`sa` (plain self attention) or `xsa`", may_differ=True)
    impl: str = field(
        "auto", "implementation, see [kernels/README.md](../kernels/README.md); `auto` picks by device and features",
        choices=("auto", *registry.NAMES), may_change=True, may_differ=True, keeps_weights=True,
    )  # fmt: skip
    num_heads: int = field(12, "query heads", least=1, may_differ=True)
    num_kv_heads: int = field(12, "KV heads; fewer than query heads: grouped queries; 1: multi-query", least=1, may_differ=True)
    head_dim: int = field(64, "width of a head; even", least=2, may_differ=True)
    rope_theta: float = field(10_000.0, "base of the rotary frequencies", least=1, may_differ=True)
    qk_norm: bool = field(False, "RMS norm of each query and key, with a scale", may_differ=True)
    window: int = field(0, "keys that a token sees, itself included; 0 = all before it", least=0, may_differ=True)
    logit_softcap: float = field(0.0, "c: scores x become c tanh(x / c); 0 = off", least=0, may_differ=True)
    sinks: bool = field(False, "one learned sink logit per head", may_differ=True)
    value_residual: bool = field(False, "mix the first layer's values into each layer's, by one learned weight", may_differ=True)
    xsa: XSAConfig = dataclasses.field(default_factory=XSAConfig)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Training text and how it is cut into batches."""

    path: str = field(
        "tokens", "folder of the token store that `python -m xsa_jax.data.prepare` wrote", may_change=True, may_differ=True
    )
    seq_len: int = field(2048, "context length T, in tokens", least=1)
    batch_size: int = field(256, "rows per step over all hosts", least=1)
    documents: Literal["ignore", "isolate"] = field(
        "ignore", "`ignore`: one stream, as NanoGPT; `isolate`: attention and loss stay inside a document"
    )
    seed: int = field(0, "random seed of the data order", least=0)
    workers: int = field(0, "processes that read ahead; 0 = a thread of this one", least=0, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """Optimiser and learning-rate schedule."""

    name: Literal["adamw"] = field("adamw", "optimiser; `adamw`")
    peak_lr: float = field(6e-4, "learning rate after warm-up", least=0)
    schedule: Literal["cosine", "constant"] = field("cosine", "`cosine` or `constant`, both after a linear warm-up")
    warmup_steps: int = field(2000, "steps of linear warm-up; fewer than `train.num_steps`", least=0)
    final_lr_ratio: float = field(0.1, "end of the cosine over its peak", least=0)
    beta1: float = field(0.9, "AdamW's first-moment decay", least=0)
    beta2: float = field(0.95, "AdamW's second-moment decay", least=0)
    eps: float = field(1e-8, "AdamW's eps", least=0)
    weight_decay: float = field(0.1, "decoupled weight decay, on matrices only", least=0)
    clip_norm: float = field(1.0, "largest norm of the global gradient; 0 = no clipping", least=0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of the run, loss and logging."""

    num_steps: int = field(200_000, "number of updates, and length of the cosine", least=1)
    z_loss: float = field(0.0, "weight of log(Z)^2 in the loss", least=0)
    loss_chunk: int = field(128, "positions of each row whose logits exist at once", least=1, may_change=True)
    log_every: int = field(10, "steps between records of the training loss", least=1, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    every: int = field(1000, "steps between validations; 0 = only after the last", least=0, may_change=True, may_differ=True)
    tokens: int = field(1_048_576, "held-out tokens per validation", least=1, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Saves."""

    every: int = field(1000, "steps between saves", least=1, may_change=True, may_differ=True)
    keep_last: int = field(2, "number of latest saves that are kept", least=1, may_change=True, may_differ=True)
    keep_every: int = field(0, "also keep every multiple of this for good; 0 = none", least=0, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices as a mesh."""

    data: int = field(-1, "replicas of the model; -1 = all devices that are left", least=-1, may_change=True)
    fsdp: int = field(1, "shards of parameters and optimiser state, each with its own rows", least=1, may_change=True)
    tensor: int = field(1, "shards of heads, feed-forward and vocabulary", least=1, may_change=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of one run."""

    seed: int = field(0, "random seed of the initial weights and of dropout; the data order has its own", least=0)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
