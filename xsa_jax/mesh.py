"""Devices as a named mesh, and the one table that says where each logical axis lives on it.

Parameters and activations name their axes logically ("embed", "heads", ...). Only this file knows mesh axes, so another
parallel layout is another table, not another model.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xsa_jax.config import Config, ConfigError

# Logical axis -> mesh axes. None: the axis is whole on every device.
RULES: dict[str, tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "layers": None,
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

Axes = tuple[str | None, ...]


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor) over `devices`, all of them by default.

    Raises:
      ConfigError: when the sizes do not multiply to the number of devices, or the batch does not divide.
    """
    devices = jax.devices() if devices is None else devices
    sizes = config.mesh
    data = sizes.data if sizes.data > 0 else len(devices) // (sizes.fsdp * sizes.tensor)
    shape = (data, sizes.fsdp, sizes.tensor)
    if math.prod(shape) != len(devices):
        raise ConfigError(
            f"mesh.data={sizes.data}, mesh.fsdp={sizes.fsdp}, mesh.tensor={sizes.tensor}: expected sizes that multiply to the "
            f"{len(devices)} devices of this run"
        )
    if config.data.batch_size % (data * sizes.fsdp):
        raise ConfigError(
            f"data.batch_size={config.data.batch_size}: expected a multiple of the {data * sizes.fsdp} batch shards of this mesh"
        )
    # Auto: the compiler moves data between shardings; constraints below only steer it.
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=devices)


def sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Where an array of `shape` with these logical axes lives."""
    return NamedSharding(mesh, _spec(mesh.shape, axes, shape))


def put_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows of a batch, as global arrays split over the batch shards."""
    return {
        name: jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(RULES["batch"])), rows)
        for name, rows in batch.items()
    }


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to its logical axes; outside `jax.set_mesh` it does nothing, so the model also runs without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(mesh.shape, axes, x.shape))


def _spec(mesh_shape, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} do not fit an array of shape {shape}")
    return PartitionSpec(*(_mesh_axes(mesh_shape, axis, size) for axis, size in zip(axes, shape, strict=True)))


def _mesh_axes(mesh_shape, axis: str | None, size: int) -> tuple[str, ...] | None:
    rule = RULES[axis] if axis is not None else None
    # Fewer KV heads than tensor shards (multi-query attention): every shard keeps them all.
    if rule is None or (axis == "kv_heads" and size % math.prod(mesh_shape[name] for name in rule)):
        return None
    return rule
