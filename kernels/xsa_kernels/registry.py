"""Every implementation: where it is, what it honours and how its values were checked. Plain data; nothing else decides this.

This module imports no jax, so that a program can ask what there is before it starts jax.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from xsa_kernels.arguments import check_numbers, is_size, need

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """What a call of attention asks for, as far as the choice of an implementation depends on it.

    Attributes:
      dtype: of q, by name or as any dtype object; one of `DTYPES`.
      head_dim: E.
      causal, window: as in `MaskSpec`.
      segments: whether there are segment ids.
      sinks: whether there are sinks.
      softcap: as for `attention`.
      lengths: (T, S) where they are known, () where not. Some implementations take only multiples of 128, or T = S.

    Raises:
      ValueError: naming the attribute.
    """

    dtype: Any
    head_dim: int
    causal: bool = True
    window: int | None = None
    segments: bool = False
    sinks: bool = False
    softcap: float | None = None
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        name = _dtype_name(self.dtype)
        need(name in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        need(is_size(self.head_dim), "head_dim", self.head_dim, "a positive integer")
        lengths = self.lengths
        good = isinstance(lengths, tuple | list) and len(lengths) in (0, 2) and all(is_size(length) for length in lengths)
        need(good, "lengths", lengths, "() or (T, S), positive integers")
        check_numbers(self.window, self.softcap)
        object.__setattr__(self, "dtype", name)
        object.__setattr__(self, "lengths", tuple(lengths))


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype, given as its name, a numpy dtype, a scalar type, or one of jax's."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(getattr(dtype, "dtype", None), "name", None)
    return str(name or getattr(dtype, "__name__", dtype))


# What a call may need, in the words of error messages and of the table.
FEATURES: dict[str, Callable[[Features], bool]] = {
    "mask.causal": lambda f: f.causal,
    "mask.causal=False": lambda f: not f.causal,
    "mask.window": lambda f: f.window is not None and f.causal,
    "mask.window with mask.causal=False": lambda f: f.window is not None and not f.causal,
    "mask.segment_ids": lambda f: f.segments,
    "sinks_H": lambda f: f.sinks,
    "softcap": lambda f: f.softcap is not None,
    "mask.causal with fewer queries than keys": lambda f: len(set(f.lengths)) > 1 and f.causal,
    "queries no multiple of 128": lambda f: any(length % 128 for length in f.lengths[:1]),
    "keys no multiple of 128": lambda f: any(length % 128 for length in f.lengths[1:]),
    "keys no multiple of 8": lambda f: any(length % 8 for length in f.lengths[1:]),
    "dtype=bfloat16": lambda f: f.dtype == "bfloat16",
    "dtype=float16": lambda f: f.dtype == "float16",
    "dtype=float32": lambda f: f.dtype == "float32",
    "dtype=float64": lambda f: f.dtype == "float64",
    "head_dim 64 or 128": lambda f: f.head_dim in (64, 128),
    "head_dim 80 or 96": lambda f: f.head_dim in (80, 96),
    "another multiple of 8 up to 256 as head_dim": lambda f: (
        f.head_dim % 8 == 0 and f.head_dim <= 256 and f.head_dim not in (64, 80, 96, 128)
    ),
    "a head_dim up to 256 that 8 does not divide": lambda f: f.head_dim % 8 != 0 and f.head_dim <= 256,
    "head_dim above 256": lambda f: f.head_dim > 256,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One implementation.

    Attributes:
      name: as in `attention(impl=...)`.
      path: "module:function" of a function (Request, Sharding | None) -> z_BTHE.
      checked: how its values were checked. "run": as it is, on a CPU, against the float64 oracle. "interpreted": the same, with its
        kernels interpreted; compilers for the device take them. "simulated": interpreted with jnp.dot in the place of the tensor
        cores. "compiled": values not at all.
      unsupported: the rows of `FEATURES` that it cannot honour.
      only_compiled: the rows whose values were not checked though others were.
      devices: the platforms that it runs on, interpreted on a CPU if need be; None: all.
      package: an optional package that it needs; None: only jax.
    """

    name: str
    path: str
    checked: Literal["run", "interpreted", "simulated", "compiled"]
    unsupported: tuple[str, ...] = ()
    only_compiled: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    package: str | None = None

    def installed(self) -> bool:
        """Whether its optional package is there, if it needs one."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def load(self) -> Callable:
        """The function at `path`. Its module is imported only now: the kernel compilers take a moment to load."""
        module, function = self.path.split(":")
        return getattr(importlib.import_module(module), function)

    def lacks(self, features: Features, device: str | None = None) -> list[str]:
        """What it cannot honour of `features`, the device's platform included where it is known."""
        elsewhere = device is not None and self.devices is not None and device not in self.devices
        return [f"device={device}"] * elsewhere + [name for name in self.unsupported if FEATURES[name](features)]

    def cell(self, feature: str) -> str:
        """The cell of the table: "-" where the implementation raises."""
        if feature in self.unsupported:
            return "-"
        return "compiled" if feature in self.only_compiled else self.checked


_ENTRIES = (
    Implementation(name="reference", path="xsa_kernels.reference:attention", checked="run"),
    Implementation(name="xla", path="xsa_kernels.xla.xla:attention", checked="run"),
    Implementation(
        name="cudnn",
        path="xsa_kernels.vendors.cudnn:attention",
        checked="compiled",
        unsupported=(
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
    Implementation(
        name="splash",
        path="xsa_kernels.vendors.splash:attention",
        checked="interpreted",
        unsupported=(
            "queries no multiple of 128",
            "keys no multiple of 128",
            "keys no multiple of 8",
            "dtype=float16",
            "dtype=float64",
            "head_dim above 256",
        ),
        devices=("tpu", "cpu"),
    ),
    # Checked as it is on a CPU; tokamax's kernels themselves were not checked.
    Implementation(
        name="tokamax",
        path="xsa_kernels.vendors.tokamax:attention",
        checked="run",
        unsupported=("mask.segment_ids", "dtype=float16", "dtype=float64", "head_dim above 256"),
        package="tokamax",
    ),
    Implementation(
        name="tpu",
        path="xsa_kernels.tpu:attention",
        checked="interpreted",
        unsupported=("dtype=float16", "dtype=float64", "head_dim above 256"),
        devices=("tpu", "cpu"),
    ),
    Implementation(
        name="triton",
        path="xsa_kernels.gpu.triton:attention",
        checked="interpreted",
        unsupported=("dtype=float64", "head_dim above 256"),
        devices=("gpu", "cpu"),
    ),
    Implementation(
        name="hopper",
        path="xsa_kernels.gpu.hopper:attention",
        checked="simulated",
        unsupported=(
            "dtype=float32",
            "dtype=float64",
            "another multiple of 8 up to 256 as head_dim",
            "a head_dim up to 256 that 8 does not divide",
            "head_dim above 256",
        ),
        only_compiled=("dtype=float16", "head_dim 80 or 96"),
        devices=("gpu",),
    ),
)
IMPLEMENTATIONS = {implementation.name: implementation for implementation in _ENTRIES}
NAMES = tuple(IMPLEMENTATIONS)

if TYPE_CHECKING:
    Impl = str
else:
    Impl = Literal[("auto", *NAMES)]

# What "auto" prefers on each platform; "xla" where none of these honours the call. Only implementations whose values were checked
# belong here. On a GPU that rules out cuDNN: about 1.7 times as fast as a Triton kernel on Hopper, but it rounds y before it is
# projected.
AUTO = {"tpu": ("tpu",), "gpu": ("triton",)}


def choose(impl: str, features: Features, platform: str, device: str | None = None) -> Implementation:
    """`impl` itself, or what "auto" takes.

    Args:
      impl: a name, or "auto".
      features: what is asked for.
      platform: the key of `AUTO`.
      device: the platform that the implementation has to run on, where that is known.

    Raises:
      ValueError: where `impl` is unknown, not installed, or cannot honour the features or the device.
    """
    need(impl in ("auto", *NAMES), "impl", impl, f"'auto' or one of {', '.join(NAMES)}")
    if impl == "auto":
        impl = next((name for name in AUTO.get(platform, ()) if not IMPLEMENTATIONS[name].lacks(features)), "xla")
    chosen = IMPLEMENTATIONS[impl]
    package = chosen.package
    need(chosen.installed(), "impl", f"{impl!r}, which is not installed", f"another, or the package: pip install {package}")
    lacks = chosen.lacks(features, device)
    able = [repr(other.name) for other in _ENTRIES if not other.lacks(features, device)]
    need(not lacks, "impl", f"{impl!r}, which cannot honour {', '.join(lacks)}", f"one that can: {', '.join(able)}")
    return chosen


def table() -> str:
    """The table of README.md: feature x implementation."""
    rows = [["", *NAMES], ["---"] * (len(NAMES) + 1)]
    rows += [[feature, *(implementation.cell(feature) for implementation in _ENTRIES)] for feature in FEATURES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
