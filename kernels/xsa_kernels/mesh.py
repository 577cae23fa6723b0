"""Attention under a mesh, by the names that the caller gives its axes."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from xsa_kernels.arguments import need
from xsa_kernels.request import Request
from xsa_kernels.spec import Sharding


def candidates(*arrays: Any) -> list[AbstractMesh]:
    """The ambient mesh, then those in the types of the arrays (or trees of arrays). Any of them may be empty."""
    leaves = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array)]
    return list(dict.fromkeys([jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in leaves)]))


def free_axes(mesh: AbstractMesh) -> dict[str, int]:
    """The sizes of the axes that are not yet Manual, by name."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual}


def check_no_explicit_axes(*arrays: Any) -> None:
    """Raises ValueError for a mesh with axes of type Explicit, be it the ambient one or that of the arrays' types."""
    for mesh in candidates(*arrays):
        kinds, expected = mesh.axis_types, "AxisType.Auto: jax.make_mesh(..., axis_types=...)"
        need(AxisType.Explicit not in kinds, "the mesh", f"axes of types {kinds}", expected)


def check(sharding: Sharding | None, request: Request) -> None:
    """Raises ValueError unless `sharding` says what every axis of the mesh is for, and the batch divides over its axes.

    It looks at the ambient mesh and at that of every array of the request; axes of type Explicit are refused.
    """
    check_no_explicit_axes(request)
    named, batch = (sharding.named, sharding.batch) if sharding else ((), ())
    for mesh in candidates(request):
        free = free_axes(mesh)
        unnamed = [f"{name!r} of size {size}" for name, size in free.items() if size > 1 and name not in named]
        need(
            not unnamed,
            "sharding",
            f"{sharding} under a mesh with the axes {', '.join(unnamed)}",
            "every mesh axis to be named in Sharding(batch=..., heads=..., replicated=...)",
        )
        sizes, B = {name: free[name] for name in batch if name in free}, request.q_BTHE.shape[0]
        shards = math.prod(sizes.values())
        expected = (
            f"a multiple of {shards}, since sharding.batch splits them over {sizes}: pad the batch, or move axes to replicated"
        )
        need(B % shards == 0, "q_BTHE", f"{B} batch rows", expected)


def on_mesh(attend: Callable[[Request], jax.Array], request: Request, sharding: Sharding | None) -> jax.Array:
    """`attend`, run by each device of the mesh on its own batch rows and heads: XLA cannot divide a kernel by itself.

    Raises:
      ValueError: when the heads do not divide over the mesh.
    """
    ambient, *of_types = candidates(request)
    mesh = next((mesh for mesh in (ambient, *of_types) if not mesh.empty), ambient)
    free, sharding = free_axes(mesh), sharding or Sharding()
    if not free:
        return attend(request)
    H, K = request.q_BTHE.shape[2], request.k_BSKE.shape[2]
    batch = tuple(name for name in sharding.batch if name in free)
    heads = sharding.heads if sharding.heads in free else None
    shards = 1 if heads is None else free[heads]
    need(
        H % shards == 0 and (K % shards == 0 or shards % K == 0),
        "q_BTHE",
        f"{H} heads over {K} KV heads",
        f"both to divide over the {shards} shards of sharding.heads '{heads}'",
    )
    one_kv_head = K % shards != 0  # fewer KV heads than shards: the query heads of a shard all read one of them

    def local(request: Request) -> jax.Array:
        if one_kv_head:
            head = lax.axis_index(heads) * K // shards
            kv = request.k_BSKE, request.v_BSKE, request.v_self_BTKE
            k, v, v_self = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, head, 1, axis=2), kv)
            request = dataclasses.replace(request, k_BSKE=k, v_BSKE=v, v_self_BTKE=v_self)
        return attend(request)

    queries = PartitionSpec(batch, None, heads)
    keys = PartitionSpec(batch, None, None if one_kv_head else heads)
    rows, per_head = PartitionSpec(batch), PartitionSpec(heads)
    specs: Any = (queries, keys, keys, keys, rows, per_head, per_head, request.settings)
    sharded = jax.shard_map(
        local,
        mesh=mesh if ambient.empty else None,
        in_specs=(Request(*specs),),
        out_specs=queries,
        axis_names=set(free),
        check_vma=False,
    )
    return sharded(request)
