"""The declarations of all config fields.

Each field is declared once, by `field` below, with its type, its default and the properties listed in `About`. The other modules
of this package derive the rest from these declarations: the ConfigDict that config files start from, validation, the rules for
continued and compared runs, the upgrade of stored configs, and docs/config.md. To add a field, declare it here with `before`, and
read it where it has an effect.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from xsa_kernels import registry

# The value of `before` for a field that every stored config holds.
ALWAYS_STORED: Any = object()


@dataclasses.dataclass(frozen=True)
class About:
    """The properties of a field other than its name, type and default.

    Attributes:
      doc: one line of documentation.
      least: least allowed value of a number; None for a field without a lower bound.
      choices: allowed values of a string; empty where its Literal type lists them, or where any string is allowed.
      may_change: whether a run may change the field when it is continued.
      may_differ: whether the field may differ between the runs of a comparison.
      keeps_weights: whether weights trained with one value may be used with another. Only `model` and `attention` fields use it.
      before: value that describes runs from before the field existed; ALWAYS_STORED for a field that every stored config holds.
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
    """The decoder except for its attention."""

    vocab_size: int = field(50304, "number of embedding rows; at least the store's vocabulary (GPT-2's 50257, padded)", least=2)
    num_layers: int = field(12, "number of layers", least=1)
    d_model: int = field(768, "width of the residual stream", least=1)
    d_ff: int = field(3072, "hidden width of the feed-forward", least=1)
    mlp: Literal["gelu", "swiglu"] = field("gelu", "feed-forward: `gelu` (two matrices) or `swiglu` (three matrices)")
    norm: Literal["layernorm", "rmsnorm"] = field("layernorm", "norm layer: `layernorm` or `rmsnorm`, with a scale and no bias")
    embed_norm: bool = field(True, "apply a norm to the embedding, as in the paper")
    tie_embeddings: bool = field(True, "use one matrix for embedding and output")
    logit_softcap: float = field(0.0, "soft cap c of the output logits: x becomes c tanh(x / c); 0 = off", least=0)
    dropout: float = field(0.0, "dropout rate of the embedding and of what each layer adds", least=0, keeps_weights=True)
    dtype: Literal["bfloat16", "float32"] = field(
        "bfloat16", "compute type; parameters, softmax and projection stay float32", keeps_weights=True
    )
    remat: Literal["none", "dots", "attention", "full", "offload", "auto"] = field(
        "none", "recomputed in the backward pass: `none`, `dots` (all but matmuls), `attention` (all but attention), "
        "`full`; `offload`: stores the inputs of attention and feed-forward in the host's memory; `auto`: the cheapest that fits",
        may_change=True, keeps_weights=True,
    )  # fmt: skip
    scan_unroll: int = field(
        0, "layers per iteration of the loop over layers; 0 = on a CPU all, if at most 8 and `remat` is `none`; otherwise 1",
        least=0, may_change=True, may_differ=True, keeps_weights=True, before=1,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class XSAConfig:
    """The removal of the component along the token's value. These fields have an effect only where `attention.kind` is `xsa`."""

    layers: str = field("all", "layers with XSA: `all`, `first:n`, `last:n`, `every:k`, or indices as `0,3,5`", may_differ=True)
    strength: Literal["full", "fixed", "learned"] = field(
        "full", "removed share: `full` (1), `fixed` (alpha), `learned` (per head: tanh of a gate that starts at 0)", may_differ=True
    )
    alpha: float = field(1.0, "removed share of the component where strength is `fixed`", may_differ=True)
    zero_rule: Literal["clamp", "add", "exact"] = field(
        "clamp", "divisor: `clamp` max(\\|v\\|^2, eps), `add` \\|v\\|^2 + eps, `exact` \\|v\\|^2 (a zero v removes nothing)",
        may_differ=True,
    )  # fmt: skip
    eps: float = field(1e-12, "eps of the zero rule", least=0, may_differ=True)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention of every layer."""

    kind: Literal["sa", "xsa"] = field("sa", "`sa` (plain self attention) or `xsa`", may_differ=True)
    impl: str = field(
        "auto", "attention implementation, see [kernels/README.md](../kernels/README.md); `auto` picks by device and features",
        choices=("auto", *registry.NAMES), may_change=True, may_differ=True, keeps_weights=True,
    )  # fmt: skip
    num_heads: int = field(12, "number of query heads", least=1, may_differ=True)
    num_kv_heads: int = field(12, "number of KV heads; below num_heads: grouped-query; 1: multi-query", least=1, may_differ=True)
    head_dim: int = field(64, "width of a head; an even number", least=2, may_differ=True)
    rope_theta: float = field(10_000.0, "base of the rotary frequencies", least=1, may_differ=True)
    qk_norm: bool = field(False, "normalise each query and key by an RMS norm with a scale", may_differ=True)
    window: int = field(0, "number of keys that a token sees, its own included; 0 = all up to its own", least=0, may_differ=True)
    logit_softcap: float = field(0.0, "soft cap c of the scores: x becomes c tanh(x / c); 0 = off", least=0, may_differ=True)
    sinks: bool = field(False, "add one learned sink logit per head", may_differ=True)
    value_residual: bool = field(False, "mix the first layer's values into each layer's, by one learned weight", may_differ=True)
    xsa: XSAConfig = dataclasses.field(default_factory=XSAConfig)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training text, and its division into batches."""

    path: str = field(
        "tokens", "folder of the token store that `python -m xsa_jax.data.prepare` wrote", may_change=True, may_differ=True
    )
    seq_len: int = field(2048, "context length T, in tokens", least=1)
    batch_size: int = field(256, "number of rows per step over all hosts", least=1)
    documents: Literal["ignore", "isolate"] = field(
        "ignore", "`ignore` treats the text as one stream, as NanoGPT does; `isolate` keeps attention and loss inside each document"
    )
    seed: int = field(0, "random seed of the data order", least=0)
    workers: int = field(0, "worker processes that read ahead; 0 = one thread instead", least=0, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    name: Literal["adamw"] = field("adamw", "optimiser: `adamw`")
    peak_lr: float = field(6e-4, "learning rate after warm-up", least=0)
    schedule: Literal["cosine", "constant"] = field("cosine", "`cosine` or `constant` learning rate after the linear warm-up")
    warmup_steps: int = field(2000, "number of warm-up steps; fewer than `train.num_steps`", least=0)
    final_lr_ratio: float = field(0.1, "final learning rate of the cosine schedule, relative to the peak", least=0)
    beta1: float = field(0.9, "AdamW's first-moment decay", least=0)
    beta2: float = field(0.95, "AdamW's second-moment decay", least=0)
    eps: float = field(1e-8, "AdamW's eps", least=0)
    weight_decay: float = field(0.1, "decoupled weight decay, on matrices only", least=0)
    clip_norm: float = field(1.0, "upper bound of the global gradient norm; 0 = no clipping", least=0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length of the run, its loss and its logging."""

    num_steps: int = field(200_000, "number of updates, and length of the cosine schedule", least=1)
    z_loss: float = field(0.0, "weight of log(Z)^2 in the loss, where Z is the softmax normaliser", least=0)
    loss_chunk_tokens: int = field(
        2048, "number of tokens whose logits are in the memory of a device at once, in whole positions of all its rows",
        least=1, may_change=True,
    )  # fmt: skip
    deterministic: bool = field(
        False, "on GPUs: compile for equal bits at every start, at a cost in speed; see docs/launch.md",
        may_change=True, may_differ=True, before=False,
    )  # fmt: skip
    log_every: int = field(10, "steps between records of the training loss", least=1, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation during training."""

    every: int = field(1000, "steps between validations; 0 = only after the last step", least=0, may_change=True, may_differ=True)
    tokens: int = field(1_048_576, "number of held-out tokens per validation", least=1, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The saving of checkpoints."""

    every: int = field(1000, "steps between saves", least=1, may_change=True, may_differ=True)
    keep_last: int = field(2, "number of latest checkpoints to keep", least=1, may_change=True, may_differ=True)
    keep_every: int = field(0, "also keep steps that are a multiple of this; 0 = none", least=0, may_change=True, may_differ=True)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The shape of the device mesh."""

    data: int = field(-1, "number of model replicas; -1 = as many as the devices allow", least=-1, may_change=True)
    fsdp: int = field(
        -1, "shards of parameters, optimiser state and batch; -1 = what `mesh.data` leaves, or, where that is -1 too, up to 16 "
        "chips of a TPU slice, the GPUs of a host, and 1 on a CPU",
        least=-1, may_change=True,
    )  # fmt: skip
    tensor: int = field(1, "number of shards of heads, feed-forward and vocabulary", least=1, may_change=True)


def _limit(default: float, doc: str) -> float:
    doc = f"{doc}; 0 = no limit"
    return field(default, doc, least=0, may_change=True, may_differ=True, before=default)


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """The longest times without progress, in seconds. Then each process prints where it is stuck, and all exit with an error."""

    start: float = _limit(1800.0, "seconds from the start to the compilation: agreement of the processes, restoring a checkpoint")
    compile: float = _limit(3600.0, "seconds to compile the train step, on the slowest process")
    step: float = _limit(1800.0, "seconds of one step, with its wait for data")
    save: float = _limit(3600.0, "seconds in which a save holds up the next step")
    validation: float = _limit(7200.0, "seconds of one validation")


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of one run."""

    seed: int = field(0, "random seed of the initial weights and of dropout; `data.seed` is that of the data order", least=0)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
