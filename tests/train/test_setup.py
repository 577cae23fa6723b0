"""The assembly of a run: one for loop, benchmarks and compilers alike, whether its devices are here or not."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from tests.helpers import REPO, assembled, random_batch, subprocess_env, tiny_config
from xsa_jax.errors import UserError
from xsa_jax.parallel.mesh import put_batch
from xsa_jax.train import setup, step_time

XSA = {"attention.kind": "xsa"}


@pytest.mark.fast
def test_what_is_lowered_from_shapes_is_what_runs():
    run = assembled(tiny_config({**XSA, "mesh.fsdp": 2, "mesh.tensor": 2}), 8)
    with jax.set_mesh(run.mesh):
        real = run.step.lower(run.init_state(), put_batch(run.mesh, random_batch(run.config))).as_text()
    assert run.lower().as_text() == real


@pytest.mark.fast
@pytest.mark.parametrize("documents", ["ignore", "isolate"])
def test_the_batch_is_that_of_the_loader(documents):
    run = assembled(tiny_config({"data.documents": documents}))
    found = {name: (leaf.shape, leaf.dtype.name) for name, leaf in run.abstract_batch().items()}
    names = ["tokens"] if documents == "ignore" else ["tokens", "segment_ids"]
    assert found == dict.fromkeys(names, ((8, 17), "int32"))


@pytest.mark.fast
def test_it_assembles_and_lowers_for_a_chip_that_is_not_here(monkeypatch):
    """Neither the devices nor the backend of this machine are asked for, and the program holds the TPU's own kernels."""
    abstract = jax.sharding.AbstractMesh(
        (1, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, abstract_device=tpu_device()
    )  # fmt: skip
    real = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    monkeypatch.setattr(setup, "make_mesh", lambda *_: real)
    monkeypatch.setattr(setup, "platform", lambda _: "tpu")
    monkeypatch.setattr(Mesh, "abstract_mesh", property(lambda _: abstract))
    for name in ("devices", "default_backend", "local_devices", "device_count"):
        monkeypatch.setattr(jax, name, lambda *_, name=name: pytest.fail(f"jax.{name}() was called"))
    config = tiny_config({**XSA, "data.seq_len": 128, "mesh.fsdp": 2, "mesh.tensor": 2, "attention.head_dim": 64})
    text = setup.assemble(config, [object()] * 4).lower().as_text()
    assert text.count("tpu_custom_call") >= 2
    assert "xsa_forward" in text
    assert "xsa_backward" in text


def tpu_device():
    """What jax knows of a TPU v5e without having one."""
    from jax._src.mesh import AbstractDevice

    return AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"grain", "orbax", "ml_collections", "tensorboardX", "matplotlib", "pyarrow"}:
            raise ImportError(f"{name} is not on this machine")
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.fast
def test_a_step_runs_without_grain_orbax_and_ml_collections(tmp_path):
    """As benchmarks/device.sh runs it on a borrowed machine, where nothing of ours is installed."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    env = subprocess_env()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    command = [sys.executable, str(REPO / "benchmarks" / "train_step.py"), "--steps=1", f"--out={tmp_path / 'out.json'}"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| xla | xsa |" in done.stdout
    blocked = subprocess.run(
        [sys.executable, "-c", "import orbax.checkpoint"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert "orbax is not on this machine" in blocked.stderr


@pytest.mark.fast
def test_step_times_alternate_and_are_ratios_of_pairs(monkeypatch):
    order, clock = [], {"sa": iter([9.0, 9.0, 9.0, 1.0, 2.0, 4.0]), "xsa": iter([9.0, 9.0, 9.0, 1.5, 2.0, 12.0])}

    class Fake:
        def __init__(self, name):
            self.name = name

        def seconds(self):
            order.append(self.name)
            return next(clock[self.name])

    times = step_time.alternate({"sa": Fake("sa"), "xsa": Fake("xsa")}, 3)
    assert order == ["sa", "xsa"] * (step_time.WARMUP + 3)
    assert times == {"sa": [1.0, 2.0, 4.0], "xsa": [1.5, 2.0, 12.0]}
    assert step_time.ratios(times) == {"sa": 1.0, "xsa": 1.5}  # the median of 1.5, 1 and 3


def test_step_times_of_stored_runs(tmp_path):
    pair = [str(REPO / "tests" / "fixtures" / "runs_0.1.0" / kind) for kind in ("sa", "xsa")]
    output = tmp_path / "times.json"
    command = [sys.executable, "-m", "xsa_jax.train.step_time", *pair, "--pairs=3", f"--output={output}"]
    done = subprocess.run(command, env=subprocess_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{pair[0]}: 1.000 of the first run's step time, median of 3 alternating steps" in done.stdout
    assert output.exists()
    with pytest.raises(UserError, match=r"nowhere/config.json: cannot be read .*; train.py writes it"):
        step_time.measure([tmp_path / "nowhere", tmp_path], 1)
    with pytest.raises(UserError, match="found 1 run; expected two or more"):
        step_time.measure([tmp_path], 1)
    with pytest.raises(SystemExit):
        step_time.main([*pair, "--pairs=0", f"--output={output}"])


@pytest.mark.fast
def test_auto_is_the_first_policy_that_fits_or_of_two_the_one_of_fewer_cycles(monkeypatch):
    config = tiny_config({"model.remat": "auto", "model.num_layers": 12, "data.seq_len": 64})
    assert assembled(config).model.config.remat == "none"  # a CPU has no limit
    needed = {}
    for policy in ("dots", "attention", "full"):
        run = assembled(tiny_config({"model.remat": policy, "model.num_layers": 12, "data.seq_len": 64}))
        needed[policy] = setup.device_bytes(run.compile())
    assert needed["full"] < needed["attention"] < needed["dots"]
    for policy, size in needed.items():
        monkeypatch.setattr(setup, "_device_memory", lambda _, size=size: size / setup._USABLE)
        run = assembled(config)
        assert run.model.config.remat == policy
        assert run.config is config
    monkeypatch.setattr(setup, "_device_memory", lambda _: 1e12)
    for estimates, policy in (([7, 5], "attention"), ([5, 7], "dots"), ([7, 7], "dots")):  # `full` is not asked
        left = iter(estimates)
        with monkeypatch.context() as patch:
            patch.setattr(setup, "_cycles", lambda _, left=left: next(left))
            patch.setattr(setup, "platform", lambda _: "tpu")
            patch.setattr(setup, "check_implementation", lambda *_, **__: None)
            assert assembled(config).model.config.remat == policy
    monkeypatch.setattr(setup, "_device_memory", lambda _: 1000.0)
    with pytest.raises(UserError, match=r"model\.remat='auto': no policy fits the 0\.0 GiB of a cpu"):
        assembled(config)
