"""The arguments of attention that are more than one array or number, and what a mask means by position."""

import dataclasses
import functools
from typing import Literal, Protocol

import jax

from xsa_kernels.arguments import is_number, need

# A finite start for the running maximum of scores: where a block hides all its keys from a query, exp(-inf - LOWEST) is 0 and not
# NaN.
LOWEST = -1e30
LOG2E = 1.4426950408889634


@functools.partial(jax.tree_util.register_dataclass, data_fields=("segment_ids",), meta_fields=("causal", "window"))
@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Which keys a query sees, without a T x S array. The queries are the last T of the S tokens (usually T = S).

    Attributes:
      causal: token i sees j only where j <= i.
      window: token i sees j only where i - window < j, itself included; without `causal` also only where j < i + window.
      segment_ids: int32 [B, S]; token i sees j only where their ids are equal.
    """

    causal: bool = True
    window: int | None = None
    segment_ids: jax.Array | None = None


CAUSAL = MaskSpec()


@functools.partial(jax.tree_util.register_dataclass, data_fields=("alpha",), meta_fields=("zero_rule", "eps"))
@dataclasses.dataclass(frozen=True)
class Projection:
    """The XSA projection z = y - alpha * (y . v) / n2 * v, with v the token's own value.

    Source: "Exclusive Self Attention", arXiv 2603.09078; `alpha` and `zero_rule` are not in it.

    Attributes:
      alpha: how much of the component along v is removed: one number, or an array [H] with one per query head.
      zero_rule: how n2 avoids a division by zero. "clamp": max(|v|^2, eps). "add": |v|^2 + eps. "exact": |v|^2, and no projection
        where that is below the smallest normal float32.
      eps: see `zero_rule`; unused by "exact".
    """

    alpha: float | jax.Array = 1.0
    zero_rule: Literal["clamp", "add", "exact"] = "clamp"
    eps: float = 1e-12


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How one call of attention is divided over the axes of a mesh. Axes that the mesh does not have are ignored.

    Attributes:
      batch: the mesh axes over which the rows of the batch are split; one name, or several from the outermost to the innermost.
      heads: the mesh axis over which the heads are split.
      replicated: mesh axes along which every device is to do the same work.

    Raises:
      ValueError: for what is not the name of an axis, and for an axis that is named twice.
    """

    batch: tuple[str, ...] | str = ()
    heads: str | None = None
    replicated: tuple[str, ...] | str = ()

    def __post_init__(self) -> None:
        for field in ("batch", "replicated"):
            names = getattr(self, field)
            names = (names,) if isinstance(names, str) else names
            good = isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)
            need(good, f"sharding.{field}", names, "names of mesh axes")
            object.__setattr__(self, field, tuple(names))
        need(self.heads is None or isinstance(self.heads, str), "sharding.heads", self.heads, "None or the name of one mesh axis")
        need(len(set(self.named)) == len(self.named), "sharding", f"the axes {self.named}", "each axis once")

    @property
    def named(self) -> tuple[str, ...]:
        """All axes that have a meaning here."""
        return (*self.batch, *(() if self.heads is None else (self.heads,)), *self.replicated)


class Positions(Protocol):
    """The part of a mask that goes by position: a `MaskSpec`, or the `Settings` of a request."""

    @property
    def causal(self) -> bool: ...

    @property
    def window(self) -> int | None: ...


def visible(mask: Positions, query_position: jax.Array, key_position: jax.Array) -> jax.Array | None:
    """Whether a query sees a key, by position alone, in the common shape of the positions; None where all keys are seen."""
    seen = None
    if mask.causal:
        seen = key_position <= query_position
    if mask.window is not None:
        after_start = key_position > query_position - mask.window
        seen = after_start if seen is None else seen & after_start
        if not mask.causal:
            seen &= key_position < query_position + mask.window
    return seen


def check_projection(xsa: Projection | None) -> None:
    """Raises ValueError, naming the attribute, for what is no projection."""
    need(xsa is None or isinstance(xsa, Projection), "xsa", xsa, "None or a Projection")
    if xsa is not None:
        need(xsa.zero_rule in ("clamp", "add", "exact"), "xsa.zero_rule", xsa.zero_rule, "'clamp', 'add' or 'exact'")
        need(xsa.zero_rule == "exact" or (is_number(xsa.eps) and xsa.eps > 0), "xsa.eps", xsa.eps, "a positive Python number")
        need(is_number(xsa.alpha) or hasattr(xsa.alpha, "dtype"), "xsa.alpha", xsa.alpha, "a number or an array")
