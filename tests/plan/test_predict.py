"""What a plan is made of: cycles of kernels, bandwidth of groups, the candidates of a search, and the errors of the command."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import REPO, subprocess_env, tiny_config
from xsa_jax.errors import UserError
from xsa_jax.parallel.hlo import Kernel
from xsa_jax.plan import kernels
from xsa_jax.plan.kernels import kernel_cycles
from xsa_jax.plan.search import candidates
from xsa_jax.plan.topology import devices_of, ring_bandwidth

pytestmark = pytest.mark.fast


@dataclasses.dataclass
class Chip:
    coords: tuple[int, int, int]
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"


def chips(*lengths, kind="TPU v5 lite"):
    return np.array([Chip(coords, kind) for coords in itertools.product(*(range(n) for n in lengths))]).reshape(lengths)


def test_bundles_at_the_stored_length_are_the_stored_ones():
    stored = json.loads(kernels.STORED.read_text())["chips"]
    for chip, kind in {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}.items():
        for name, (direction, variant) in kernels._KERNELS.items():
            expected = stored[chip][direction][variant]["weighted"]
            assert kernel_cycles(Kernel(name, (1, 1, 4096, 128), 1), kind) == expected


def test_bundles_of_other_shapes():
    def cycles(shape, times=1):
        return kernel_cycles(Kernel("xsa_forward", shape, times), "TPU v5 lite")

    # Two blocks of queries: three pairs of blocks, of which two are on the diagonal.
    assert cycles((1, 1, 2048, 128)) == 3 * 193 + 2 * 153 + 4078 + 2 * 2991
    assert cycles((3, 4, 2048, 128), 24) == 12 * 24 * cycles((1, 1, 2048, 128))
    assert cycles((1, 1, 2048, 96)) == cycles((1, 1, 2048, 128)) == cycles((1, 1, 2048, 256)) / 2
    assert cycles((1, 1, 512, 128)) == cycles((1, 1, 1024, 128)) / 4
    with pytest.raises(UserError, match=r"kernel other on TPU v5 lite: tpu_bundles\.json holds no bundles"):
        kernel_cycles(Kernel("other", (1, 1, 2048, 128), 1), "TPU v5 lite")
    with pytest.raises(UserError, match="kernel xsa_forward on TPU v4"):
        kernel_cycles(Kernel("xsa_forward", (1, 1, 2048, 128), 1), "TPU v4")


def test_bandwidth_of_a_group():
    pod = chips(16, 16, 1)
    everyone = list(pod.flat)
    assert ring_bandwidth(list(pod[:, 3, 0]), everyone) == 90e9  # a whole axis, whose ends meet
    assert ring_bandwidth(everyone, everyone) == 180e9
    assert ring_bandwidth(list(pod[:4, 3, 0]), everyone) == 45e9  # a part of an axis
    small = chips(4, 4, 1)
    assert ring_bandwidth(list(small.flat), list(small.flat)) == 90e9  # two axes with ends
    assert ring_bandwidth(list(small[:, 0, 0]), list(small.flat)) == 45e9
    cube = chips(4, 4, 4, kind="TPU v5")
    assert ring_bandwidth(list(cube[0].flat), list(cube.flat)) == 360e9
    assert ring_bandwidth(list(cube.flat), list(cube.flat)) == 540e9
    flat = chips(2, 2, 4, kind="TPU v5")
    assert ring_bandwidth(list(flat[0, 0]), list(flat.flat)) == 90e9


def test_candidates_of_a_search():
    config = tiny_config({"data.batch_size": 16, "model.dtype": "bfloat16"})
    found = candidates(config, 16, 1e9, default=8)
    assert [c.fsdp for c in found] == [8, 8, 4, 4, 16, 16, 2, 2, 1, 1]
    assert [c.remat for c in found] == ["none", "dots"] * 5
    assert candidates(config, 16, 1e3, default=8) == []
    assert candidates(tiny_config({"data.batch_size": 8}), 16, 1e9, default=8) == []  # a row is not divided
    # Little memory: only many shards, and more recomputation.
    assert [(c.fsdp, c.remat) for c in candidates(config, 16, 2e4, default=8)] == [(16, "attention"), (16, "full")]


@pytest.mark.parametrize("name", ["v5e", "v5e:16", "v9:4x4", "h200", "h200:0", "v5e:4x4x", "tpu:4x4", ""])
def test_a_topology_that_is_none(name):
    with pytest.raises(UserError, match=f"--topology={name}: expected a TPU slice such as"):
        devices_of(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "flag --topology=None: Flag --topology must have a value other than None"),
        (["--topology=v5e:4x4", "--mesh=rows=4"], "error: --mesh: found 'rows=4', expected sizes such as data=16"),
        (["--topology=v5e:4x4", "--mesh=fsdp=x"], "error: --mesh: found 'fsdp=x'"),
        (["--topology=v5e", "--mesh=fsdp=4"], "error: --topology=v5e: expected a TPU slice"),
        (["--topology=v5e:4x4", "--mesh=fsdp=4", "--search"], "error: --search chooses data and fsdp itself"),
        (["--topology=v5e:4x4", "--config.mesh.rows=4"], "error: --config.mesh.rows=4: unknown field"),
        (["--topology=v5e:4x4", "--config.model.d_model=7", "--mesh=fsdp=4"], "error: model.d_model=7"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    command = [sys.executable, "-m", "xsa_jax.plan", "--config", str(REPO / "configs" / "smoke.py"), *arguments]
    done = subprocess.run(command, env=subprocess_env(), cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
