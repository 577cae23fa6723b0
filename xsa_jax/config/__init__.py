"""The config of a run.

`schema` declares the fields, `load` builds a config, `check` validates it, `rules` compares two, `stored` reads those of old runs,
and `table` prints them. A config file in `configs/` changes a few fields of `config_dict()`. The entry point then calls
`from_config_dict` once, which returns validated frozen dataclasses. All other code reads plain attributes. Nothing in this package
imports jax.
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
