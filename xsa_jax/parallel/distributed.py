"""The start of a run's processes: each one finds the others, and the devices that are its own.

jax detects TPU pods, Slurm, OpenMPI and Kubernetes jobs. A host that belongs to no cluster is alone, and needs nothing of this.
"""

import os
import pathlib
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

import jax

from xsa_jax.errors import UserError

# The nodes of a large job are up minutes apart.
_INITIALIZATION_SECONDS = 600
# A process that dies closes its connection, or is missed by `xsa_jax.parallel.lifeline`. This is for a host that vanishes. Threads
# of jax send the heartbeats, so that a busy interpreter is not taken for dead.
_HEARTBEAT_SECONDS = 60
# Processes that have finished leave together. One that fails does not wait, see `xsa_jax.parallel.lifeline`.
_SHUTDOWN_SECONDS = 60


def start(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the processes of a run. It comes before any other use of jax.

    Without arguments the cluster is detected. JAX_COORDINATOR_BIND_ADDRESS names the address that process 0 listens on; without it
    process 0 listens on all its interfaces.

    Args:
      coordinator: "host:port" of process 0, where jax detects no cluster.
      num_processes: number of processes; 1 stands for a process that is alone, and turns detection off.
      process_id: index of this process, from 0.

    Raises:
      UserError: the arguments are incomplete, or the processes do not find each other.
    """
    if num_processes == 1:
        return
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    absent = [name for name, value in given.items() if value is None]
    if absent and len(absent) < len(given):
        raise UserError(
            f"{', '.join(absent)}: not given; expected all of {', '.join(given)}, or none where the cluster is detected"
        )
    if absent and not _cluster_detected():
        return
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator={coordinator}: expected host:port of process 0, such as 10.0.0.1:1234")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id}: expected 0 to --num_processes - 1 = {num_processes - 1}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    detection: dict[str, Any] = {} if absent else {"cluster_detection_method": "deactivate"}
    devices = local_devices(os.environ)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids=devices,
            initialization_timeout=_INITIALIZATION_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            **detection,
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the processes of this run did not find each other: {reason}. Check that all have started, and that the coordinator's "
            f"port is free and reachable from every host"
        ) from error
    if devices is None:
        jax.config.update("jax_cuda_visible_devices", "all")  # detection leaves each process one GPU, also where it is alone


def local_devices(env: Mapping[str, str], driver: pathlib.Path = pathlib.Path("/proc/driver/nvidia/gpus")) -> list[int] | None:
    """The GPUs of this process among those that it can see: its share, where several processes of one host see the same ones.

    Args:
      env: environment variables, of which those of Slurm and OpenMPI count the processes of this host.
      driver: folder in which the NVIDIA driver lists the GPUs of the host.

    Returns:
      Indices among the visible GPUs. None stands for all: the process is alone on its host, or is given its own GPU by the
      scheduler, or there is no GPU.

    Raises:
      UserError: the GPUs do not divide over the processes of this host.
    """
    here = _processes_of_this_host(env)
    if here is None or here[1] == 1:
        return None
    index, count = here
    named = env.get("CUDA_VISIBLE_DEVICES")
    visible = len([name for name in named.split(",") if name]) if named is not None else len(list(driver.glob("*")))
    if visible == 0 or (visible == 1 and named is not None):
        return None
    if visible % count:
        raise UserError(
            f"this host has {visible} visible GPUs for {count} processes; expected a number of processes that divides the GPUs: "
            f"start one process per host, or one per GPU"
        )
    share = visible // count
    return list(range(index * share, (index + 1) * share))


def _processes_of_this_host(env: Mapping[str, str]) -> tuple[int, int] | None:
    """The index of this process among those of its host, and their number; None where no launcher says so."""
    if "OMPI_COMM_WORLD_LOCAL_RANK" in env:
        return int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if "SLURM_LOCALID" in env and "SLURM_STEP_TASKS_PER_NODE" in env:
        return int(env["SLURM_LOCALID"]), _slurm_tasks(env["SLURM_STEP_TASKS_PER_NODE"])[int(env.get("SLURM_NODEID", "0"))]
    return None


def _slurm_tasks(text: str) -> list[int]:
    """Slurm's short form, such as "2(x3),1", as the number of tasks of each node."""
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text}: expected Slurm's form, such as 8 or 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _cluster_detected() -> bool:
    """Whether jax detects a cluster of more than one process."""
    from jax._src.clusters import ClusterEnv  # jax has no public name for what `jax.distributed.initialize` detects

    found = next((env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present()), None)
    try:
        return found is not None and found.get_process_count() > 1
    except Exception as error:  # each environment raises errors of its own, such as those of Kubernetes' API
        assert found is not None
        raise UserError(
            f"{found.name}: looks like a cluster, but the number of processes is unknown ({error}). Give --coordinator, "
            f"--num_processes and --process_id, or --num_processes=1 for a process that is alone"
        ) from error


def only_first_prints() -> None:
    """Keeps the standard output of every process but the first from being seen. Errors go to standard error, from all of them."""
    if process_index():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 it stays open as long as the process lives


def client() -> Any:
    """The client of the coordination service that holds small values for all processes; None for a process that is alone."""
    return _state().client


def process_index() -> int:
    """The index of this process. Unlike `jax.process_index` it needs no device, for which all processes must be there."""
    return _state().process_id


def process_count() -> int:
    """The number of processes, in the same way."""
    return _state().num_processes or 1


def _state() -> Any:
    from jax._src import distributed  # jax has no public name for its key-value store

    return distributed.global_state


def host() -> str:
    """The name of this host."""
    return socket.gethostname()
