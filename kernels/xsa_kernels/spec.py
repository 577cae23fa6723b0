"""What a call of attention asks for, as data."""

import dataclasses
import functools
import math
import numbers
from typing import Literal

import jax


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


def need(good: bool, argument: str, found: object, expected: str) -> None:
    """Raises ValueError unless `good`."""
    if not good:
        raise ValueError(f"{argument}: found {found}, expected {expected}")


def is_number(x: object) -> bool:
    """Whether it is a finite number that is known while a program is traced."""
    return isinstance(x, numbers.Real) and math.isfinite(x)


def check_projection(xsa: Projection | None) -> None:
    """Raises ValueError, naming the attribute, for what is no projection."""
    need(xsa is None or isinstance(xsa, Projection), "xsa", xsa, "None or a Projection")
    if xsa is not None:
        need(xsa.zero_rule in ("clamp", "add", "exact"), "xsa.zero_rule", xsa.zero_rule, "'clamp', 'add' or 'exact'")
        need(xsa.zero_rule == "exact" or (is_number(xsa.eps) and xsa.eps > 0), "xsa.eps", xsa.eps, "a positive Python number")
        need(is_number(xsa.alpha) or hasattr(xsa.alpha, "dtype"), "xsa.alpha", xsa.alpha, "a number or an array")
