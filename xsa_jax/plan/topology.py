"""Devices that are not here: those of a TPU slice or of a host of GPUs, as jax's compilers know them."""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xsa_jax.errors import UserError
from xsa_jax.parallel.chips import Chip, chip

_TPUS = ("v5e", "v5p", "v6e", "tpu7x")
_GPUS: dict[str, dict[str, Any]] = {
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB", "shared": 167936, "block_shared": 166912, "cores": 108, "fpus": 64, "cache": 41943040,
        "clock": 1.41, "capability": "major: 8",
    },
    "h100": {
        "name": "NVIDIA H100 80GB HBM3", "shared": 233472, "block_shared": 232448, "cores": 132, "fpus": 128, "cache": 52428800,
        "clock": 1.98, "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
    },
    "h200": {
        "name": "NVIDIA H200", "shared": 233472, "block_shared": 232448, "cores": 132, "fpus": 128, "cache": 52428800,
        "clock": 1.98, "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
    },
}  # fmt: skip
# What XLA's compiler for GPUs must know of a device that it cannot ask.
_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {block_shared}
  cuda_compute_capability {{ {capability} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  name: "{name}" device_vendor: "NVIDIA Corporation"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a topology such as "v5e:16x16" or "h200:8", to compile for.

    Raises:
      UserError: the name is not one of a topology, or the compiler for it is not installed.
    """
    name, _, size = topology.partition(":")
    if name in _TPUS and re.fullmatch(r"\d+x\d+(x\d+)?", size):
        return _tpus(topology, [int(n) for n in size.split("x")])
    if name in _GPUS and size.isdecimal() and int(size):
        return _gpus(_GPUS[name], int(size))
    raise UserError(
        f"--topology={topology}: expected a TPU slice such as v5e:16x16 or v5p:4x4x4 ({', '.join(_TPUS)}), or GPUs of one host "
        f"such as h200:8 ({', '.join(_GPUS)})"
    )


def chip_of(devices: Sequence[jax.Device]) -> Chip:
    """What the makers state of these devices."""
    found = chip(devices[0].device_kind)
    assert found is not None, devices[0].device_kind
    return found


def ring_bandwidth(ring: Sequence[jax.Device], devices: Sequence[jax.Device]) -> float:
    """Bytes/s that each device of a group sends while the group gathers an array.

    On a TPU a group has the links of each physical axis that it covers: both directions where the axis is closed to a ring, and
    half of that where it has ends, or the group covers a part of it.

    Args:
      ring: devices of the group.
      devices: all devices of the topology.
    """
    link = chip_of(ring).link
    if ring[0].platform != "tpu":
        return link
    covered, whole = _lengths(ring), _lengths(devices)
    axes = zip(covered, whole, _closed(whole), strict=True)
    return max(link / 2, sum(link if closed and n == length else link / 2 for n, length, closed in axes if n > 1))


def _lengths(devices: Sequence[jax.Device]) -> list[int]:
    return [int(n) for n in np.ptp(np.array([device.coords for device in devices]), axis=0) + 1]


def _closed(lengths: Sequence[int]) -> list[bool]:
    """Whether each physical axis has a link from its end to its start: axes of 16 in 2 dimensions, all in multiples of 4^3."""
    if lengths[2] == 1:
        return [n == 16 for n in lengths]
    return [all(n % 4 == 0 for n in lengths)] * 3


def _tpus(topology: str, lengths: list[int]) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('the compiler for TPUs is not installed: `make plan` installs it, or pip install "jax[tpu]"')
    # libtpu looks for a TPU of this host unless it is told otherwise.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    from jax.experimental import topologies

    closed: dict[str, Any] = {"wrap": (True,) * 3} if all(_closed([*lengths, 1][:3])) else {}
    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu", **closed).devices)
    except Exception as error:  # libtpu raises what it likes
        raise UserError(f"--topology={topology}: {str(error).splitlines()[0]}") from None


def _gpus(gpu: dict[str, Any], count: int) -> list[jax.Device]:
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise UserError("the compiler for GPUs is not installed: run this as `make plan`, which installs it")
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    xla_bridge.discover_pjrt_plugins()
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    stated = chip(gpu["name"])
    assert stated is not None, gpu["name"]
    target = _TARGET.format(**gpu, bandwidth=int(stated.bandwidth), memory=int(stated.memory))
    return list(topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}").devices)
