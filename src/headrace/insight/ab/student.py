"""Student's t: its distribution and quantiles, to the last digits that matter, without scipy. Pure.

The distribution is the regularised incomplete beta function (Abramowitz and Stegun 26.7.1), which is
computed by its continued fraction (26.5.8) with Lentz's method; quantiles are found by halving.
"""

from __future__ import annotations

import functools
import math

_TINY = 1e-300
_STEPS_MAX = 500
_HALVINGS = 200


def cumulative(t: float, freedom: int) -> float:
    """The chance of a value up to `t`.

    Args:
        t: any number.
        freedom: degrees of freedom, at least 1.
    """
    tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return tail if t < 0 else 1 - tail


@functools.lru_cache(maxsize=1024)
def quantile(chance: float, freedom: int) -> float:
    """The value up to which lies `chance`, between 0 and 1, of the distribution."""
    if not 0 < chance < 1 or freedom < 1:
        raise ValueError(
            f"chance {chance}, {freedom} degrees of freedom: expected 0..1, and 1 or more"
        )
    if chance < 0.5:
        return -quantile(1 - chance, freedom)
    low, high = 0.0, 1.0
    while cumulative(high, freedom) < chance:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if cumulative(middle, freedom) < chance:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a
    return front / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, _STEPS_MAX):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (_away_from_zero(1 + term * d))
        c = _away_from_zero(1 + term / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
