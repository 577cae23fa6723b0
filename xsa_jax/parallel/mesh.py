"""Devices as a named mesh, and the one table that says where each logical axis lives on it.

Parameters and activations name their axes logically ("embed", "heads", ...). Only this file names mesh axes, so another parallel
layout is another table and not another model. The attention kernels are told from here too, by `attention_sharding`.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xsa_jax.config import MeshConfig
from xsa_jax.errors import ConfigError
from xsa_kernels import Sharding

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


def make_mesh(sizes: MeshConfig, batch_size: int, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh (data, fsdp, tensor) over `devices`, which may be those of a topology that is not here.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices, or the batch does not divide.
    """
    data = sizes.data if sizes.data > 0 else len(devices) // (sizes.fsdp * sizes.tensor)
    shape = (data, sizes.fsdp, sizes.tensor)
    if math.prod(shape) != len(devices):
        raise ConfigError(
            f"mesh.data={sizes.data}, mesh.fsdp={sizes.fsdp}, mesh.tensor={sizes.tensor}: expected sizes that multiply to the "
            f"{len(devices)} devices of this run"
        )
    if batch_size % (data * sizes.fsdp):
        raise ConfigError(f"data.batch_size={batch_size}: expected a multiple of the {data * sizes.fsdp} batch shards of this mesh")
    # Auto: the compiler moves data between shardings; constraints below only steer it.
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=devices)


def platform(mesh: Mesh) -> str:
    """The platform of a mesh's devices: "cpu", "gpu" or "tpu"."""
    found = mesh.devices.flat[0].platform
    return "gpu" if found in ("cuda", "rocm") else found


def attention_sharding(*, whole_batch: bool = False) -> Sharding:
    """What the attention kernels are told of the mesh: which of its axes split the batch, and which the heads.

    Args:
      whole_batch: every device computes all rows, for batches that the mesh need not divide.
    """
    batch, (heads,) = RULES["batch"] or (), RULES["heads"] or ()
    return Sharding(replicated=batch, heads=heads) if whole_batch else Sharding(batch=batch, heads=heads)


def sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Where an array of `shape` with these logical axes lives."""
    return NamedSharding(mesh, _spec(mesh.shape, axes, shape))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where the arrays of a batch live: their rows are split over the batch shards."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def put_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows of a batch, as global arrays split over the batch shards."""
    where = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(where, rows) for name, rows in batch.items()}


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation to its logical axes; outside `jax.set_mesh` it does nothing, so the model also runs without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(mesh.shape, axes, x.shape))


def _spec(mesh_shape: Mapping[str, int], axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} do not fit an array of shape {shape}")
    return PartitionSpec(*(_mesh_axes(mesh_shape, axis, size) for axis, size in zip(axes, shape, strict=True)))


def _mesh_axes(mesh_shape: Mapping[str, int], axis: str | None, size: int) -> tuple[str, ...] | None:
    rule = RULES[axis] if axis is not None else None
    # Fewer KV heads than tensor shards (multi-query attention): every shard keeps them all.
    if rule is None or (axis == "kv_heads" and size % math.prod(mesh_shape[name] for name in rule)):
        return None
    return rule
