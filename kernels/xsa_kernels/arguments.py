"""Checks of arguments. Every bad call raises ValueError in one form: "argument: found X, expected Y"."""

import math
import numbers


def need(good: bool, argument: str, found: object, expected: str) -> None:
    """Raises ValueError unless `good`."""
    if not good:
        raise ValueError(f"{argument}: found {found}, expected {expected}")


def is_number(x: object) -> bool:
    """Whether `x` is a finite number that is known while a program is traced."""
    return isinstance(x, numbers.Real) and math.isfinite(x)


def is_size(x: object) -> bool:
    """Whether `x` is a positive integer."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) >= 1


def check_numbers(window: object, softcap: object) -> None:
    """Raises ValueError for a window or a soft-cap of the wrong type or size."""
    need(window is None or is_size(window), "mask.window", window, "None or a Python integer of at least 1 (the token itself)")
    need(softcap is None or (is_number(softcap) and softcap > 0), "softcap", softcap, "None or a positive Python number")  # type: ignore[operator]
