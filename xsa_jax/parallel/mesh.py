"""The device mesh, and the one table that maps logical axes to mesh axes.

Parameters and activations have logical axes ("embed", "heads", ...). Only this file names mesh axes, so another parallel layout is
another table and not another model. The attention kernels get their mesh axes from here too, by `attention_sharding`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from xsa_jax.config import MeshConfig
from xsa_jax.errors import ConfigError
from xsa_jax.parallel.devices import arrange, default_fsdp
from xsa_kernels import Sharding

# Logical axis -> mesh axes that split it. None: the axis is not split.
RULES: dict[str, tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "layers": None,
    "embed": ("fsdp",),
    "vocab": ("tensor", "fsdp"),  # whole rows of a table: a device gathers and reduces them without moving columns
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

Axes = tuple[str | None, ...]


def make_mesh(sizes: MeshConfig, batch_size: int, d_model: int, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh with axes (data, fsdp, tensor).

    Args:
      sizes: the `mesh` group of the config.
      batch_size: number of rows of a batch over all devices.
      d_model: width of the model.
      devices: devices of the mesh. They may belong to a topology description, without hardware.

    Raises:
      ConfigError: the product of the sizes is not the number of devices, the batch does not divide over the batch shards, or
        several TPU slices do not divide the data axis.
    """
    fsdp = sizes.fsdp
    if fsdp < 0 and sizes.data > 0:
        fsdp = max(1, len(devices) // (sizes.data * sizes.tensor))
    elif fsdp < 0:
        fsdp = default_fsdp(devices, sizes.tensor, math.gcd(batch_size, d_model))
    data = sizes.data if sizes.data > 0 else len(devices) // (fsdp * sizes.tensor)
    shape = (data, fsdp, sizes.tensor)
    if math.prod(shape) != len(devices):
        chosen = "" if sizes.fsdp > 0 else f" (here {fsdp})"
        raise ConfigError(
            f"mesh.data={sizes.data}, mesh.fsdp={sizes.fsdp}{chosen}, mesh.tensor={sizes.tensor}: expected sizes that multiply to "
            f"the {len(devices)} devices of this run"
        )
    if batch_size % (data * fsdp):
        raise ConfigError(f"data.batch_size={batch_size}: expected a multiple of the {data * fsdp} batch shards of this mesh")
    # Auto: the compiler moves data between shardings; constraints below only steer it.
    return Mesh(arrange(shape, devices), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def make_evaluation_mesh(d_model: int, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of all devices for a model of this width, with the weights split over the devices where the width allows."""
    shards = len(devices) if d_model % len(devices) == 0 else 1
    return make_mesh(MeshConfig(fsdp=shards), len(devices), d_model, devices)


def platform(mesh: Mesh) -> str:
    """The platform of a mesh's devices: "cpu", "gpu" or "tpu"."""
    found = mesh.devices.flat[0].platform
    return "gpu" if found in ("cuda", "rocm") else found


def traced_for() -> str | None:
    """The platform of the ambient mesh, of `jax.set_mesh` or `jax.sharding.use_abstract_mesh`; None without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else None


def describe(devices: Sequence[jax.Device]) -> str:
    """Devices in words, such as "8 x TPU v5 lite"."""
    return f"{len(devices)} x {devices[0].device_kind}"


def attention_sharding(*, whole_batch: bool = False) -> Sharding:
    """The mesh axes that split batch and heads, for the attention kernels.

    Args:
      whole_batch: whether every device computes all rows, as for a batch size that the mesh does not divide.
    """
    batch, (heads,) = RULES["batch"] or (), RULES["heads"] or (None,)  # the kernels split heads over one axis
    return Sharding(replicated=batch, heads=heads) if whole_batch else Sharding(batch=batch, heads=heads)


def sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array of `shape` with these logical axes.

    Raises:
      ValueError: the number of axes is not the number of dimensions.
    """
    return NamedSharding(mesh, _spec(mesh.shape, axes, shape))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of the arrays of a batch: their rows are split over the batch shards."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_rows(mesh: Mesh, batch_size: int) -> tuple[int, ...]:
    """The rows of a batch that the devices of this process hold, ascending.

    Two processes hold the same rows where the tensor axis spans both.

    Args:
      mesh: mesh of the run.
      batch_size: number of rows of the batch over all devices, a multiple of the number of batch shards.
    """
    here = _shards_here(mesh)
    size = batch_size // batch_shards(mesh)
    return tuple(row for shard in here for row in range(shard * size, (shard + 1) * size))


def put_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Global arrays of a batch, split over the batch shards.

    Args:
      mesh: mesh of the run.
      batch: the rows of this process, those of `batch_rows`, in arrays [rows, ...].
    """
    split_rows = batch_sharding(mesh)
    shards, here = batch_shards(mesh), _shards_here(mesh)

    def global_array(rows: np.ndarray) -> jax.Array:
        size = len(rows) // len(here)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # it is None for devices of other processes, for which jax does not call
            first = here.index((index[0].start or 0) // size) * size
            return rows[first : first + size]

        return jax.make_array_from_callback((size * shards, *rows.shape[1:]), split_rows, part)

    with jax.transfer_guard_host_to_device("allow"):
        return {name: global_array(rows) for name, rows in batch.items()}


def batch_shards(mesh: Mesh) -> int:
    """The number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"] or ())


def _shards_here(mesh: Mesh) -> list[int]:
    """The indices of the batch shards that devices of this process hold, ascending."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_shards(mesh),))
    return sorted({index[0].start or 0 for index in indices.values() if index is not None})


class VocabShard(NamedTuple):
    """The part of a table with one row per token of the vocabulary that a device holds, whole along the width.

    Attributes:
      table_VD: float32 rows of the tokens from `first` on. Where the vocabulary is not split these are all rows.
      first: id of the first token; 0 where the vocabulary is not split.
      axes: mesh axes that split the vocabulary, for `total` and `largest`; () where none does.
    """

    table_VD: jax.Array
    first: jax.Array | int
    axes: tuple[str, ...]

    def total(self, x: jax.Array) -> jax.Array:
        """The sum of x over the shards of the vocabulary."""
        return jax.lax.psum(x, self.axes) if self.axes else x

    def largest(self, x: jax.Array) -> jax.Array:
        """The elementwise maximum of x over the shards of the vocabulary, without a gradient."""
        x = jax.lax.stop_gradient(x)
        return jax.lax.pmax(x, self.axes) if self.axes else x


def with_vocab_table(function: Callable[..., Any], table_VD: jax.Array, dtype: DTypeLike, *rows: jax.Array) -> Any:
    """`function(shard, *rows)`, where each device of the mesh has its own rows of the batch, and a `VocabShard` of the table.

    Each device gathers its tensor shard of the table once, in the type `dtype`, and sums its gradient in float32 over all that the
    function does with it. The gradient is then reduced over the devices once, in `dtype`. XLA, left alone, moves both in each chunk
    of a loss.

    Args:
      function: function whose results have the batch as their first axis.
      table_VD: float32 table, of logical axes ("vocab", None).
      dtype: compute type.
      rows: arrays whose first axis is the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(VocabShard(table_VD, 0, ()), *rows)
    batch = tuple(axis for axis in RULES["batch"] or () if mesh.shape[axis] > 1)
    split = tuple(axis for axis in _mesh_axes(mesh.shape, "vocab", table_VD.shape[0]) or () if mesh.shape[axis] > 1)
    gathered, vocab = (tuple(axis for axis in split if (axis in batch) == wanted) for wanted in (True, False))

    def local(table_VD: jax.Array, *rows: jax.Array) -> Any:
        narrow_VD = jax.lax.pcast(table_VD.astype(dtype), tuple(axis for axis in batch if axis not in gathered), to="varying")
        if gathered:
            narrow_VD = jax.lax.all_gather(narrow_VD, gathered, axis=0, tiled=True)
        first = jax.lax.axis_index(vocab) * narrow_VD.shape[0] if vocab else 0
        return function(VocabShard(narrow_VD.astype(jnp.float32), first, vocab), *rows)

    by_rows = PartitionSpec(batch)
    specs = (PartitionSpec(split), *(by_rows for _ in rows))
    return jax.shard_map(local, in_specs=specs, out_specs=by_rows)(table_VD, *rows)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation by its logical axes. Outside `jax.set_mesh` it returns the activation unchanged."""
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
    # KV heads that the tensor shards do not divide, as in multi-query attention, are whole on each of them. So are the rows of a
    # vocabulary on each fsdp shard.
    if axis in ("kv_heads", "vocab"):
        while rule and size % math.prod(mesh_shape[name] for name in rule):
            rule = rule[:-1]
    return rule or None
