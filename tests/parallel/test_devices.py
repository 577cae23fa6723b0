"""The default number of fsdp shards by kind of device. The meshes of real topologies are in tests/train/test_topology.py."""

import dataclasses
import itertools

import jax
import pytest

from tests.helpers import tiny_config
from xsa_jax.errors import ConfigError
from xsa_jax.parallel.devices import arrange, default_fsdp
from xsa_jax.parallel.mesh import make_mesh

pytestmark = pytest.mark.fast


@dataclasses.dataclass
class Fake:
    platform: str
    coords: tuple[int, ...] = ()
    process_index: int = 0


@dataclasses.dataclass
class InSlice(Fake):
    slice_index: int = 0


def slice_of(*lengths, number=0):
    return [InSlice("tpu", coords, slice_index=number) for coords in itertools.product(*(range(n) for n in lengths))]


@pytest.mark.parametrize(
    ("lengths", "fsdp"),
    [
        ((4, 4, 1), 16), ((16, 16, 1), 16), ((4, 4, 4), 16), ((8, 8, 1), 8), ((4, 4, 8), 8), ((2, 4, 1), 8), ((1, 1, 1), 1),
        ((2, 2, 4), 16),
    ],
)  # fmt: skip
def test_whole_physical_axes_of_a_tpu_slice_up_to_sixteen_chips(lengths, fsdp):
    assert default_fsdp(slice_of(*lengths), 1, 1024) == fsdp
    assert default_fsdp(slice_of(*lengths) + slice_of(*lengths, number=1), 1, 1024) == fsdp


def test_tensor_shards_take_their_part_and_the_rest_divides_batch_and_width():
    assert default_fsdp(slice_of(4, 4, 1), 4, 1024) == 4
    assert default_fsdp(slice_of(4, 4, 1), 32, 1024) == 1
    assert default_fsdp(slice_of(4, 4, 1), 1, 24) == 8
    assert default_fsdp(slice_of(4, 4, 1), 1, 7) == 1


@pytest.mark.parametrize(
    ("devices", "fsdp"),
    [
        ([Fake("gpu", process_index=0)] * 8, 8),
        ([Fake("gpu", process_index=i // 8) for i in range(16)], 8),
        # A process for each GPU: jax tells hosts apart by their slice index.
        ([InSlice("gpu", process_index=i, slice_index=i // 8) for i in range(16)], 8),
        ([Fake("gpu", process_index=i) for i in range(4)], 1),
        ([Fake("gpu")], 1),
        ([Fake("cpu")] * 8, 1),
    ],
)
def test_the_gpus_of_a_host_and_one_shard_on_cpus(devices, fsdp):
    assert default_fsdp(devices, 1, 1024) == fsdp


def test_a_slice_that_the_data_axis_does_not_divide():
    devices = [*slice_of(2, 2, 1), *slice_of(2, 2, 1, number=1)]
    with pytest.raises(ConfigError, match=r"mesh\.data=1: expected a multiple of the 2 slices"):
        arrange((1, 8, 1), devices)  # type: ignore[arg-type]


def test_fsdp_is_what_an_explicit_data_axis_leaves(monkeypatch):
    monkeypatch.setattr("xsa_jax.parallel.mesh.default_fsdp", lambda *_: pytest.fail("not asked for"))
    for data, tensor, fsdp in ((8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)):
        mesh = make_mesh(tiny_config({"mesh.data": data, "mesh.tensor": tensor}).mesh, 8, 32, jax.devices()[:8])
        assert mesh.devices.shape == (data, fsdp, tensor)


def test_the_chosen_size_is_named_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr("xsa_jax.parallel.mesh.default_fsdp", lambda *_: 3)
    config = tiny_config()
    with pytest.raises(ConfigError, match=r"mesh\.fsdp=-1 \(here 3\).*the 8 devices"):
        make_mesh(config.mesh, 8, 32, jax.devices()[:8])
