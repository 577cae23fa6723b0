"""The options that XLA compiles a train step with, by kind of device."""

import os
from collections.abc import Mapping

# The compiler for TPUs takes the values of flags as text, that for GPUs as Python values.
Option = str | bool | int

# Collective matmul divides a product into steps that pass operands round the ring. At the large batches per chip of training it
# costs more than it hides.
_NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Gathers that run beside the products around them, and in several of their steps. The names are those of MaxText's lists of flags
# for v6e and v5p.
_ASYNC_GATHERS = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}
# Gathers are not joined to the fusions that both cores of a chip share, where the device would wait for them.
_GATHERS_APART = {"xla_tpu_megacore_fusion_allow_ags": "false"}
# Collectives are started as early and awaited as late as their operands allow; jax's page on GPU performance advises it.
_LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}
# Sums in a fixed order, in place of atomic additions, and no choice of kernels by timing.
_DETERMINISTIC_GPU = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}

# Options by the start of jax's device_kind, in lower case. The first that fits counts.
_BY_KIND: dict[str, Mapping[str, Option]] = {
    "tpu v5 lite": _NO_WINDOWED_EINSUM,
    "tpu v5e": _NO_WINDOWED_EINSUM,
    "tpu v5": _NO_WINDOWED_EINSUM | _ASYNC_GATHERS | _GATHERS_APART,
    "tpu v6": _NO_WINDOWED_EINSUM | _ASYNC_GATHERS,
    "tpu": _NO_WINDOWED_EINSUM,
    "nvidia": _LATENCY_HIDING,
}


def compiler_options(device_kind: str, deterministic: bool = False) -> dict[str, Option]:
    """The options for one kind of device, without those that the user has set in XLA_FLAGS or LIBTPU_INIT_ARGS.

    Args:
      device_kind: jax's name of the device.
      deterministic: whether two starts of a run must give equal bits.
    """
    kind = device_kind.lower()
    options = dict(next((found for start, found in _BY_KIND.items() if kind.startswith(start)), {}))
    if deterministic and kind.startswith("nvidia"):
        options |= _DETERMINISTIC_GPU
    set_by_user = os.environ.get("XLA_FLAGS", "") + " " + os.environ.get("LIBTPU_INIT_ARGS", "")
    return {name: value for name, value in options.items() if f"--{name}" not in set_by_user}
