"""The config of a run: declared in `schema`, validated in `load`, compared in `rules`, read back from old runs in `stored`.

A config file in `configs/` changes a few fields of `config_dict()`; `from_config_dict` turns the result into frozen dataclasses
once, at the edge of the program. Everything behind that edge reads plain attributes that are known to fit together. Nothing in
this package imports jax.
"""

from xsa_jax.config.load import config_dict, flatten, from_config_dict, to_dict
from xsa_jax.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    XSAConfig,
)

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "TrainConfig",
    "XSAConfig",
    "config_dict",
    "flatten",
    "from_config_dict",
    "to_dict",
]
