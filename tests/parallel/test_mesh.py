"""The rules table and the mesh: sizes that do not fit are refused by name, and every logical axis lands where the table says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.helpers import mesh_of, model_of, tiny_config
from xsa_jax.errors import ConfigError
from xsa_jax.parallel.mesh import RULES, batch_rows, batch_sharding, constrain, put_batch, sharding
from xsa_jax.train.setup import assemble

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (8, 1, 1)),
        ({"mesh.fsdp": 2, "mesh.tensor": 2}, 8, (2, 2, 2)),
        ({"mesh.fsdp": 4}, 4, (1, 4, 1)),
        ({"mesh.data": 2, "mesh.tensor": 2}, 4, (2, 1, 2)),
    ],
)
def test_make_mesh(sizes, devices, shape):
    mesh = mesh_of(tiny_config(sizes), devices)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == shape


def test_all_devices_by_default():
    assert assemble(tiny_config()).mesh.devices.size == len(jax.devices()) == 8


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [({"mesh.data": 2, "mesh.fsdp": 2}, 8), ({"mesh.fsdp": 4}, 2), ({"mesh.tensor": 2}, 3), ({"mesh.data": 4}, 2)],
)
def test_sizes_that_do_not_multiply_to_the_devices(sizes, devices):
    with pytest.raises(ConfigError, match=rf"mesh\.data=.*mesh\.fsdp=.*mesh\.tensor=.*the {devices} devices"):
        mesh_of(tiny_config(sizes), devices)


def test_a_batch_that_the_filled_in_data_axis_does_not_divide():
    with pytest.raises(ConfigError, match=r"data\.batch_size=6: .*8 batch shards"):
        mesh_of(tiny_config({"data.batch_size": 6}), 8)


def test_where_each_logical_axis_lives():
    mesh = mesh_of(tiny_config({"mesh.fsdp": 2, "mesh.tensor": 2}), 8)

    def spec(axes, shape):
        return sharding(mesh, axes, shape).spec

    assert spec(("batch", None), (8, 17)) == P(("data", "fsdp"), None)
    assert spec(("layers", "embed", "heads", None), (2, 32, 4, 6)) == P(None, ("fsdp",), ("tensor",), None)
    assert spec(("vocab", None), (60, 32)) == P(("tensor", "fsdp"), None)
    # Rows of a vocabulary that tensor and fsdp shards do not divide: each fsdp shard keeps all of its tensor shard.
    assert spec(("vocab", None), (62, 32)) == P(("tensor",), None)
    assert spec(("embed", "kv_heads", None), (32, 2, 6)) == P(("fsdp",), ("tensor",), None)
    # One KV head on two tensor shards: both keep it.
    assert spec(("embed", "kv_heads", None), (32, 1, 6)) == P(("fsdp",), None, None)
    with pytest.raises(ValueError, match="do not fit"):
        spec(("batch",), (8, 17))


def test_the_model_uses_the_axes_of_the_table_and_no_others():
    axes = model_of(tiny_config({"model.tie_embeddings": False})).axes
    used = {axis for names in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)) for axis in names}
    assert used - {None} == RULES.keys() - {"batch"}


def test_constrain_pins_inside_a_mesh_and_does_nothing_outside():
    mesh = mesh_of(tiny_config({"mesh.fsdp": 2, "mesh.tensor": 2}), 8)
    x = jnp.ones((8, 4))
    assert constrain(x, "batch", None) is x
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, "batch", "mlp"))(x)
    assert y.sharding.is_equivalent_to(sharding(mesh, ("batch", "mlp"), (8, 4)), 2)
    assert not y.sharding.is_fully_replicated


@pytest.mark.parametrize("sizes", [{}, {"mesh.fsdp": 2, "mesh.tensor": 2}, {"mesh.tensor": 2}])
def test_a_batch_on_the_devices_is_the_batch(sizes):
    """What several processes hold of it is in tests/test_processes.py."""
    mesh = mesh_of(tiny_config(sizes), 8)
    rows = np.arange(16 * 3, dtype=np.int32).reshape(16, 3)
    assert batch_rows(mesh, 16) == tuple(range(16))
    with jax.transfer_guard("disallow"):
        put = put_batch(mesh, {"tokens": rows})["tokens"]
    np.testing.assert_array_equal(put, rows)
    assert put.sharding == batch_sharding(mesh)
