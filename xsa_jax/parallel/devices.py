"""Which devices are neighbours: the default number of fsdp shards, and the arrangement of devices in a mesh."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from xsa_jax.errors import ConfigError

# By default at most this many shards. 16 of today's chips hold the state of a model of some billions of weights, and more of them
# gather each layer for fewer tokens.
_MOST_SHARDS = 16


def default_fsdp(devices: Sequence[jax.Device], tensor: int, divides: int) -> int:
    """The number of fsdp shards for a config that leaves it to the devices.

    On TPUs the shards are the chips of whole physical axes of the slice, so that the gathers of a group share no link with those of
    another. On GPUs they are the devices of one host, which have the fast links. On a CPU there is one.

    Args:
      devices: all devices of the run.
      tensor: number of tensor shards, which take their part of the devices.
      divides: number that the shards must divide: a common divisor of the batch size and the width of the model.
    """
    if devices[0].platform == "cpu":
        return 1
    if devices[0].platform == "tpu":
        wanted = 1
        for length in sorted(_physical_axes(devices), reverse=True):
            wanted = wanted * length if wanted * length <= _MOST_SHARDS else wanted
    else:
        wanted = min(_MOST_SHARDS, len(devices) // _slices(devices))
    return math.gcd(max(1, wanted // tensor), divides)


def arrange(shape: tuple[int, int, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array of this shape (data, fsdp, tensor), so that neighbours on its axes are neighbours on the network.

    Raises:
      ConfigError: there are several TPU slices, and they do not divide the data axis.
    """
    slices = _slices(devices)
    # Without splits most shapes fail on slices of three dimensions.
    if devices[0].platform != "tpu" or slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, fsdp, tensor = shape
    if data % slices:
        raise ConfigError(
            f"mesh.data={data}: expected a multiple of the {slices} slices of this run, because only the data axis goes over the "
            f"network between slices"
        )
    inside, between = (data // slices, fsdp, tensor), (slices, 1, 1)
    return mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)


def _slice(device: jax.Device) -> int:
    """The index of a device's TPU slice, or of its host of GPUs, which jax knows where each GPU has a process of its own too."""
    return getattr(device, "slice_index", 0 if device.platform == "tpu" else device.process_index)


def _slices(devices: Sequence[jax.Device]) -> int:
    return len({_slice(device) for device in devices})


def _physical_axes(devices: Sequence[jax.Device]) -> list[int]:
    """The lengths of a TPU slice along its physical axes, in chips."""
    coordinates = np.array([device.coords for device in devices if _slice(device) == _slice(devices[0])])
    return [int(length) for length in np.ptp(coordinates, axis=0) + 1]
