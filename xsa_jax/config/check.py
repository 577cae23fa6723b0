"""Validation of a config: the declared bounds of each field, and constraints between fields."""

import math
from typing import Any

from xsa_jax.config.fields import fields
from xsa_jax.config.layer_selection import projecting_layers
from xsa_jax.config.schema import Config, XSAConfig
from xsa_jax.errors import ConfigError


def check(config: Config) -> None:
    """Checks the bounds of every field and the constraints between fields.

    Raises:
      ConfigError: a value is out of bounds or conflicts with another. The message names the field, its value and what is expected.
    """
    _check_bounds(config)
    _check_attention(config)
    _check_optimisation(config)
    _check_mesh(config)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_bounds(config: Config) -> None:
    for name, field in fields(type(config)).items():
        if field.type not in (int, float):
            continue
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        least = field.about.least
        if least is None:
            _require(math.isfinite(value), f"{name}={value!r}: expected a finite number")
            continue
        most = 2**31 if field.type is int else math.inf  # jax counts in int32
        _require(least <= value < most, f"{name}={value!r}: expected a finite number of at least {least}, and below {most}")


def _check_attention(config: Config) -> None:
    attention = config.attention
    projecting_layers(attention, config.model.num_layers)
    _require(
        attention.num_heads % attention.num_kv_heads == 0,
        f"attention.num_heads={attention.num_heads}: expected a multiple of attention.num_kv_heads={attention.num_kv_heads}",
    )
    _require(attention.head_dim % 2 == 0, f"attention.head_dim={attention.head_dim}: expected an even number (RoPE rotates pairs)")
    _check_xsa(attention.xsa)


def _check_xsa(xsa: XSAConfig) -> None:
    _require(
        xsa.strength == "fixed" or xsa.alpha == 1.0,
        f"attention.xsa.alpha={xsa.alpha} has no effect with attention.xsa.strength={xsa.strength!r}; set strength to 'fixed'",
    )
    _require(
        xsa.zero_rule == "exact" or xsa.eps > 0,
        f"attention.xsa.eps=0 with attention.xsa.zero_rule={xsa.zero_rule!r}: expected a positive eps",
    )


def _check_optimisation(config: Config) -> None:
    model, optim = config.model, config.optim
    _require(model.dropout < 1, f"model.dropout={model.dropout}: expected less than 1")
    _require(optim.eps > 0, f"optim.eps={optim.eps}: expected more than 0 (a parameter without gradient would become 0 / 0)")
    _require(optim.peak_lr > 0, f"optim.peak_lr={optim.peak_lr}: expected more than 0")
    _require(optim.beta1 < 1, f"optim.beta1={optim.beta1}: expected less than 1")
    _require(optim.beta2 < 1, f"optim.beta2={optim.beta2}: expected less than 1")
    _require(optim.final_lr_ratio <= 1, f"optim.final_lr_ratio={optim.final_lr_ratio}: expected at most 1")
    _require(
        optim.warmup_steps < config.train.num_steps,
        f"optim.warmup_steps={optim.warmup_steps}: expected fewer than train.num_steps={config.train.num_steps}",
    )


def _check_mesh(config: Config) -> None:
    model, attention, data, mesh = config.model, config.attention, config.data, config.mesh
    _require(mesh.data != 0, "mesh.data=0: expected a positive number, or -1 for all devices that are left")
    _require(mesh.fsdp != 0, "mesh.fsdp=0: expected a positive number, or -1 for the choice by the devices")
    fsdp = max(mesh.fsdp, 1)
    batch_shards = max(mesh.data, 1) * fsdp
    _require(
        data.batch_size % batch_shards == 0,
        f"data.batch_size={data.batch_size}: expected a multiple of mesh.data * mesh.fsdp = {batch_shards}",
    )
    split_by_tensor = (
        ("attention.num_heads", attention.num_heads), ("model.d_ff", model.d_ff), ("model.vocab_size", model.vocab_size)
    )  # fmt: skip
    for name, size in split_by_tensor:
        _require(size % mesh.tensor == 0, f"{name}={size}: expected a multiple of mesh.tensor={mesh.tensor}")
    _require(model.d_model % fsdp == 0, f"model.d_model={model.d_model}: expected a multiple of mesh.fsdp={fsdp}")
