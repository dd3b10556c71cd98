"""Arguments: one check for the whole numbers that orders, slices and states are made from."""

from __future__ import annotations

from operator import index as as_integer
from typing import Any

from headrace.errors import OrderError

__all__ = ["EPOCH_MAX", "SEED_MAX", "checked"]

SEED_MAX = (1 << 64) - 1

EPOCH_MAX = (1 << 32) - 1
"""Far more than is trained; small enough that epoch times rounds stays in 64 bits in practice."""


def checked(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as a plain int (numpy integers become ints) if it lies in [low, high].

    Raises:
        TypeError: the value is not a whole number.
        OrderError: the value is out of bounds; the message carries it.
    """
    try:
        number = as_integer(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected a whole number") from None
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise OrderError(f"{name} is {number}, expected {bounds}")
    return number
