"""The real train step compiles, with the options for the chip, for TPU slices that are not here, on meshes of any shape.

Run as a program it prints what it finds for one topology.
"""

import collections
import importlib.util
import os
import subprocess
import sys

import pytest

from tests.helpers import subprocess_env
from tests.kernels.gpu_aot import missing

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}

# `make gates` installs libtpu and requires it: there a gate that finds none fails.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and "GATES" not in os.environ,
    reason='install libtpu: pip install "jax[tpu]", or run make gates',
)


def printed(*arguments: str) -> list[str]:
    """The lines that this file prints as a program."""
    env = subprocess_env()
    env.pop("XLA_FLAGS", None)  # those of the tests: they tell the compiler not to optimise
    command = [sys.executable, "-m", "tests.train.test_topology", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@needs_libtpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_the_train_step_compiles(chip):
    """Attention runs forward once in each of two layers, except under `full`: `dots` keeps its outputs because they have names."""
    assert printed("step", TOPOLOGIES[chip]) == [
        "sa dots: attention_backward 2, attention_forward 2",
        "xsa attention: xsa_backward 2, xsa_forward 2",
        "xsa full: xsa_backward 2, xsa_forward 4",
        "xsa offload: xsa_backward 2, xsa_forward 2, and some in the host's memory",
    ]


@pytest.mark.skipif(bool(missing()) and "GATES" not in os.environ, reason=f"install {missing()}, or run make gates")
def test_the_train_step_compiles_for_gpus():
    """With the options for GPUs: their compiler takes values of another type than that for TPUs."""
    assert printed("gpus", "h200:4") == ["sa dots: gathers and reductions", "xsa attention: gathers and reductions"]


@needs_libtpu
def test_meshes_of_any_shape():
    """Every product of powers of two on every topology, and by default fsdp on whole physical axes."""
    assert printed("meshes", "v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:2x2x2") == [
        "v5e:4x4: 15 of 15, by default 1 16 1 over chips 4 4 1",
        "v5e:16x16: 45 of 45, by default 16 16 1 over chips 16 1 1",
        "v5p:2x2x4: 15 of 15, by default 1 16 1 over chips 2 2 4",
        "v5p:4x4x4: 28 of 28, by default 4 16 1 over chips 4 4 1",
        "v6e:8x8: 28 of 28, by default 8 8 1 over chips 8 1 1",
        "tpu7x:2x2x2: 15 of 15, by default 2 8 1 over chips 2 2 1",
    ]


def program_of(topology: str, kind: str, policy: str, **train: object):
    from xsa_jax.config import Config, from_config_dict, to_dict
    from xsa_jax.parallel import hlo
    from xsa_jax.plan.topology import devices_of
    from xsa_jax.train.setup import assemble

    tree = to_dict(Config())
    tree["model"] |= {"num_layers": 2, "d_model": 256, "d_ff": 512, "vocab_size": 1024, "remat": policy}
    impl = "auto" if topology.startswith("v") else "triton"
    tree["attention"] |= {"kind": kind, "num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "impl": impl}
    tree["data"] |= {"seq_len": 512, "batch_size": 4}
    tree["mesh"] |= {"fsdp": 2, "tensor": 2}
    tree["train"] |= train
    compiled = assemble(from_config_dict(tree), devices_of(topology)).compile()
    return hlo.read(compiled.as_text() or ""), compiled.memory_analysis()


def step(topology: str) -> None:
    for kind, policy in (("sa", "dots"), ("xsa", "attention"), ("xsa", "full"), ("xsa", "offload")):
        program, memory = program_of(topology, kind, policy)
        runs = collections.Counter()
        for kernel in program.kernels:
            runs[kernel.name] += kernel.times
        found = [f"{name} {times}" for name, times in sorted(runs.items())]
        found += ["and some in the host's memory"] if memory.host_temp_size_in_bytes else []
        print(f"{kind} {policy}: {', '.join(found)}", flush=True)


def gpus(topology: str) -> None:
    for kind, policy, deterministic in (("sa", "dots", False), ("xsa", "attention", True)):
        found = {c.kind for c in program_of(topology, kind, policy, deterministic=deterministic)[0].collectives}
        moves = "gathers and reductions" if {"all-gather", "all-reduce"} <= found else str(found)
        print(f"{kind} {policy}: {moves}", flush=True)


def meshes(topologies: list[str]) -> None:
    import numpy as np

    from xsa_jax.config import MeshConfig
    from xsa_jax.parallel.mesh import make_mesh
    from xsa_jax.plan.topology import devices_of

    for topology in topologies:
        devices = devices_of(topology)
        powers = [2**n for n in range(len(devices).bit_length())]
        shapes = [(data, len(devices) // data // tensor, tensor) for data in powers for tensor in powers]
        shapes = [shape for shape in shapes if shape[1] > 0]
        made = [make_mesh(MeshConfig(*shape), 1024, 2048, devices) for shape in shapes]
        correct = sum(mesh.devices.shape == shape for mesh, shape in zip(made, shapes, strict=True))
        default = make_mesh(MeshConfig(), 1024, 2048, devices)
        chips = np.ptp(np.array([device.coords for device in default.devices[0, :, 0]]), axis=0) + 1
        print(f"{topology}: {correct} of {len(shapes)}, by default", *default.devices.shape, "over chips", *chips, flush=True)


if __name__ == "__main__":
    what, *topologies = sys.argv[1:]
    if what == "meshes":
        meshes(topologies)
    else:
        {"step": step, "gpus": gpus}[what](*topologies)
