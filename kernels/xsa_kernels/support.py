"""What each implementation honours, how its values were checked, and which one "auto" takes. Nothing else decides this."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax


class Asked(NamedTuple):
    """What a call asks for, as far as the choice of an implementation depends on it."""

    dtype: str
    head_dim: int
    causal: bool
    window: int | None
    segments: bool
    sinks: bool
    softcap: float | None
    tail: bool
    lengths: tuple[int, ...]


# What a call may need, in the words of error messages and of the table.
FEATURES: dict[str, Callable[[Asked], bool]] = {
    "mask.causal": lambda a: a.causal,
    "mask.causal=False": lambda a: not a.causal,
    "mask.window": lambda a: a.window is not None and a.causal,
    "mask.window with mask.causal=False": lambda a: a.window is not None and not a.causal,
    "mask.segment_ids": lambda a: a.segments,
    "sinks_H": lambda a: a.sinks,
    "softcap": lambda a: a.softcap is not None,
    "mask.causal with fewer queries than keys": lambda a: a.tail and a.causal,
    "queries no multiple of 128": lambda a: any(length % 128 for length in a.lengths[:1]),
    "keys no multiple of 128": lambda a: any(length % 128 for length in a.lengths[1:]),
    "keys no multiple of 8": lambda a: any(length % 8 for length in a.lengths[1:]),
    "dtype=bfloat16": lambda a: a.dtype == "bfloat16",
    "dtype=float16": lambda a: a.dtype == "float16",
    "dtype=float32": lambda a: a.dtype == "float32",
    "dtype=float64": lambda a: a.dtype == "float64",
    "head_dim 64 or 128": lambda a: a.head_dim in (64, 128),
    "head_dim 80 or 96": lambda a: a.head_dim in (80, 96),
    "another multiple of 8 up to 256 as head_dim": lambda a: (
        a.head_dim % 8 == 0 and a.head_dim <= 256 and a.head_dim not in (64, 80, 96, 128)
    ),
    "a head_dim up to 256 that 8 does not divide": lambda a: a.head_dim % 8 != 0 and a.head_dim <= 256,
    "head_dim above 256": lambda a: a.head_dim > 256,
}


@dataclasses.dataclass(frozen=True)
class Support:
    """One implementation.

    Attributes:
      checked: how its values were. "run": as it is, on a CPU, against the float64 oracle. "interpreted": the same, with its kernels
        interpreted; compilers for the device take them. "simulated": interpreted with jnp.dot in the place of the tensor cores.
        "compiled": values not at all.
      lacks: the rows of `FEATURES` that it cannot honour.
      only_compiled: those whose values were not checked though others were.
      devices: the platforms that it runs on, interpreted on a CPU if need be; None: all.
    """

    checked: Literal["run", "interpreted", "simulated", "compiled"]
    lacks: tuple[str, ...] = ()
    only_compiled: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None

    def cell(self, feature: str) -> str:
        """The cell of the table: "-" where the implementation raises."""
        if feature in self.lacks:
            return "-"
        return "compiled" if feature in self.only_compiled else self.checked


SUPPORT = {
    "reference": Support("run"),
    "xla": Support("run"),
    "cudnn": Support(
        "compiled",
        (
            "mask.window with mask.causal=False",
            "mask.segment_ids",
            "softcap",
            "mask.causal with fewer queries than keys",
            "dtype=float32",
            "dtype=float64",
            "a head_dim up to 256 that 8 does not divide",
            "head_dim above 256",
        ),
        devices=("gpu",),
    ),
    "splash": Support(
        "interpreted",
        (
            "queries no multiple of 128",
            "keys no multiple of 128",
            "keys no multiple of 8",
            "dtype=float16",
            "dtype=float64",
            "head_dim above 256",
        ),
        devices=("tpu", "cpu"),
    ),
    # As it is on a CPU; tokamax's kernels themselves were not checked.
    "tokamax": Support(
        "run",
        (
            "mask.segment_ids",
            "dtype=float16",
            "dtype=float64",
            "head_dim above 256",
        ),
    ),
    "tpu": Support("interpreted", ("dtype=float16", "dtype=float64", "head_dim above 256"), devices=("tpu", "cpu")),
    "triton": Support("interpreted", ("dtype=float64", "head_dim above 256"), devices=("gpu", "cpu")),
    "hopper": Support(
        "simulated",
        (
            "dtype=float32",
            "dtype=float64",
            "another multiple of 8 up to 256 as head_dim",
            "a head_dim up to 256 that 8 does not divide",
            "head_dim above 256",
        ),
        only_compiled=("dtype=float16", "head_dim 80 or 96"),
        devices=("gpu",),
    ),
}

# In order of preference; "xla" where none of these honours the call. Only implementations whose values were checked belong here.
# On a GPU that rules out cuDNN: about 1.7 times as fast as a Triton kernel on Hopper, but it rounds y before it is projected.
AUTO = {"tpu": ("tpu",), "gpu": ("triton",)}


def lacking(impl: str, asked: Asked, device: str | None = None) -> list[str]:
    """What `impl` cannot honour of a call, the device's platform included where it is known."""
    support = SUPPORT[impl]
    elsewhere = device is not None and support.devices is not None and device not in support.devices
    return [f"device={device}"] * elsewhere + [feature for feature in support.lacks if FEATURES[feature](asked)]


def pick(asked: Asked, device: str | None = None) -> str:
    """What "auto" takes for a call on this machine, or on another platform."""
    device = _device() if device in (None, jax.default_backend()) else device
    return next((impl for impl in AUTO.get(device or "", ()) if not lacking(impl, asked)), "xla")


def _device() -> str:
    """The key of `AUTO` of the default device; "other" for a GPU that the kernels were not compiled for."""
    if jax.default_backend() != "gpu":
        return jax.default_backend()
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))  # "9.0"; an AMD chip has a name here
    return "gpu" if capability[:1].isdigit() and float(capability) >= 8 else "other"


def table() -> str:
    """The table of README.md: feature x implementation."""
    rows = [["", *SUPPORT], ["---"] * (len(SUPPORT) + 1)]
    rows += [[feature, *(support.cell(feature) for support in SUPPORT.values())] for feature in FEATURES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
