"""What the makers state of the devices of today, by jax's `device_kind`. A device that the table lacks has no MFU and no plan."""

from typing import NamedTuple


class Chip(NamedTuple):
    """One device as jax counts them. On TPU7x that is one of the two cores of a chip.

    Attributes:
      flops: peak FLOP/s for dense bfloat16.
      memory: usable bytes of device memory.
      bandwidth: bytes/s between the device and its memory.
      link: bytes/s that a device sends into a ring: on TPUs over both directions of one physical axis, on GPUs over NVLink.
      clock: Hz of a TPU's cores, which XLA's cycles are of; None: not stated by the maker.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    clock: float | None = None


_GiB = 2.0**30
# FLOP/s, memory and links are those of the makers' data sheets; memory of a TPU is what its compiler allows a program. Clocks of
# v5e, v5p and v6e follow from their peak FLOP/s, matrix units (4, 8, and 2 of four times the size) and products per cycle.
_CHIPS = {
    "tpu v4": Chip(275e12, 31.25 * _GiB, 1228e9, 90e9, 1.05e9),
    "tpu v5 lite": Chip(197e12, 15.75 * _GiB, 819e9, 90e9, 1.5e9),
    "tpu v5": Chip(459e12, 95.74 * _GiB, 2765e9, 180e9, 1.75e9),
    "tpu v6 lite": Chip(918e12, 31.25 * _GiB, 1640e9, 180e9, 1.75e9),
    "tpu7x": Chip(1153.5e12, 94.75 * _GiB, 3690e9, 200e9),
    "nvidia a100-sxm4-40gb": Chip(312e12, 40e9, 1555e9, 300e9),
    "nvidia a100-sxm4-80gb": Chip(312e12, 80e9, 2039e9, 300e9),
    "nvidia h100 80gb hbm3": Chip(989e12, 80e9, 3350e9, 450e9),
    "nvidia h100 pcie": Chip(756e12, 80e9, 2000e9, 64e9),
    "nvidia h200": Chip(989e12, 141e9, 4800e9, 450e9),
    "nvidia b200": Chip(2250e12, 180e9, 8000e9, 900e9),
}
_OTHER_NAMES = {"tpu v5e": "tpu v5 lite", "tpu v5p": "tpu v5", "tpu v6e": "tpu v6 lite"}


def chip(device_kind: str) -> Chip | None:
    """The table's row for one kind of device; None if it is unknown, since no number is better than a guess."""
    kind = device_kind.lower()
    return _CHIPS.get(_OTHER_NAMES.get(kind, kind))
