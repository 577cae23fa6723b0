"""Which GPUs a process takes, as launchers describe the host, and what the start of several processes refuses.

Real starts of several processes are in tests/test_processes.py.
"""

import pytest

from xsa_jax.errors import UserError
from xsa_jax.parallel import distributed

pytestmark = pytest.mark.fast


def slurm(local: int, tasks: str, node: int = 0, **more: str) -> dict[str, str]:
    return {"SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node), **more}


def openmpi(local: int, count: int, **more: str) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(count), **more}


@pytest.fixture
def eight(tmp_path):
    """What the driver of a host with eight GPUs lists."""
    for index in range(8):
        (tmp_path / f"0000:{index:02}:00.0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (slurm(0, "1(x2)"), None),  # one process per node: it takes them all
        (slurm(3, "8(x2)"), [3]),  # one process per GPU
        (slurm(1, "2"), [4, 5, 6, 7]),
        (slurm(1, "8,2", node=1), [4, 5, 6, 7]),
        (slurm(3, "8", CUDA_VISIBLE_DEVICES="3"), None),  # --gpus-per-task=1: Slurm has chosen already
        (slurm(1, "2", CUDA_VISIBLE_DEVICES="0,1,2,3"), [2, 3]),
        (slurm(1, "2", CUDA_VISIBLE_DEVICES=""), None),
        (openmpi(0, 1), None),
        (openmpi(7, 8), [7]),
        (openmpi(1, 4), [2, 3]),
    ],
)
def test_the_gpus_of_a_process(eight, env, expected):
    assert distributed.local_devices(env, eight) == expected


def test_a_host_without_gpus(tmp_path):
    assert distributed.local_devices(slurm(1, "2"), tmp_path / "absent") is None


def test_gpus_that_do_not_divide(eight):
    with pytest.raises(UserError, match="8 visible GPUs for 3 processes; expected a number of processes that divides"):
        distributed.local_devices(openmpi(0, 3), eight)


def test_a_host_that_is_alone_needs_nothing(monkeypatch):
    monkeypatch.setattr(distributed.jax.distributed, "initialize", None)  # not to be called
    distributed.start()
    distributed.start(num_processes=1)


def test_one_task_of_slurm_is_alone(monkeypatch):
    monkeypatch.setattr(distributed.jax.distributed, "initialize", None)
    for name, value in {"JOB_ID": "1", "STEP_NODELIST": "n1", "NTASKS": "1", "PROCID": "0", **{}}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    distributed.start()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coordinator": "a:1"}, "--num_processes, --process_id: not given; expected all"),
        ({"num_processes": 2, "process_id": 0}, "--coordinator: not given"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "--coordinator=a: expected host:port"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "--process_id=2: expected 0 to --num_processes - 1 = 1"),
    ],
)
def test_incomplete_or_impossible_arguments(given, message):
    with pytest.raises(UserError, match=message):
        distributed.start(**given)


def test_slurms_short_form():
    assert distributed._slurm_tasks("2(x3),1,8") == [2, 2, 2, 1, 8]
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE=2x3"):
        distributed._slurm_tasks("2x3")
