r"""Randomness: how far an order is from a full shuffle, as two numbers.

**level** follows DeepIO (MASCOTS 2018), which compares an order's choices with those of a full
shuffle by their cross-entropy, as a share of a full shuffle against itself:

    Q(i)    = 1 / (n - i)                                       full shuffle of n samples
    P(i, r) = Nc / (Nf - Nc*r)  *  1 / (Nmem - (i mod Nmem))    what the order does
    level   = sum_i Q(i) * log2(1 / P(i, r))  /  sum_i Q(i) * log2(1 / Q(i))

i is the position and r = floor(i / Nmem) the round. For `Blocked`, Nf is the number of blocks, Nc
the blocks in a window, and Nmem the samples in a window, so Nc / (Nf - Nc*r) = Nmem / (n - Nmem*r);
a short last window has its own Nmem and a factor of 1. P = Q gives 1; P = 1, no choice at all,
gives 0.

The notes that we have on the paper write the sum as P * log2(1/Q). That cannot be the level meant:
P >= Q at every position, so it is never below 1, and it grows as the order gets less random. We
take the cross-entropy with its arguments exchanged, which keeps P, Q and the fixed points and lies
in [0, 1]. Two properties of P are inherited and should be known when reading the number. It charges
the choice of blocks to every position, as if each sample came from a block of its own, so it does
not see the block size and flatters small windows. And windows of a few samples, being nearly a
shuffle of single samples, score higher than windows of a few dozen; from there on the level rises
with the window. P is not a normalised distribution: compare levels of one data set only.

**entropy_share** is our own measure and has neither defect:

    entropy_share = log2(number of orders an epoch can have) / log2(n!)

For `Blocked` with windows w of b_w blocks and m_w samples (Nf blocks in all), every set of blocks
and every order in a window counts once:

    number of orders = Nf! / prod(b_w!) * prod(m_w!)

Orders that repeat or leave out samples have no DeepIO level (Q is a draw without replacement).
Their `level` is set to their `entropy_share`, which compares an epoch of L positions with
L/n * log2(n!) bits and is cut off at 1:

    Balanced:   log2 of (C! per round) * (m_c! / (m_c - draws left)! for the cycles of each class)
    Weighted:   L * sum_i w_i * log2(1 / w_i)    (weights scaled to sum to 1)

Sums over positions are never run over all positions: `_smooth_sum` adds the first terms exactly and
integrates the rest (Euler-Maclaurin), so n = 2^48 takes as long as n = 10^4. Factorials are lgamma.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lgamma, log
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Terms = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]

_EXACT_TERMS = 128  # terms of a sum that are added one by one before the rest is integrated
_NODES = 48  # Gauss-Legendre nodes of an integral
_DEEPIO = "DeepIO H/H_full: sum Q*log2(1/P) / sum Q*log2(1/Q)"
_REPEATING = "level = entropy_share: DeepIO's level needs each sample exactly once"


@dataclass(frozen=True, slots=True)
class Randomness:
    """Two measures of an order's randomness, each from 0 (fixed) to 1 (a full shuffle)."""

    level: float
    """DeepIO's randomisation level, or `entropy_share` where that is not defined."""

    entropy_share: float
    """log2(number of possible orders of an epoch) / log2(n!)."""

    formula: str
    """What `level` was computed by, with its parameters; print it beside the number."""

    @classmethod
    def of_shuffled(cls) -> Randomness:
        """Return the randomness of a full shuffle."""
        return cls(1.0, 1.0, f"{_DEEPIO}; P = Q")

    @classmethod
    def of_sequential(cls) -> Randomness:
        """Return the randomness of a fixed order."""
        return cls(0.0, 0.0, f"{_DEEPIO}; P = 1")

    @classmethod
    def of_blocked(cls, samples: int, block_samples: int, window_blocks: int) -> Randomness:
        """Return the randomness of shuffled blocks, shuffled again within windows."""
        return _of_blocked(samples, block_samples, window_blocks)

    @classmethod
    def of_opportunistic(cls, samples: int, resident: int, last: int = 0) -> Randomness:
        """Return the randomness of `resident` given samples before all others, and `last` after them.

        Each of the three groups is shuffled.
        """
        if resident in (0, samples):
            return cls.of_shuffled()
        # Windows, as of `Blocked`, but nobody chose what lies in them: their factor is 1.
        total = bits = 0.0
        behind = samples
        for count in filter(None, (resident, samples - resident - last, last)):
            behind -= count
            total += _share_of_sum(count, behind)
            bits += _log2_factorial(count)
        formula = (
            f"{_DEEPIO}; P = 1/(left of {resident} resident), then 1/(left of {samples - resident})"
        )
        if last:
            formula += f", of which {last} last"
        level = total / _full_sum(samples)
        return cls(min(1.0, level), min(1.0, bits / _log2_factorial(samples)), formula)

    @classmethod
    def of_balanced(
        cls,
        samples: int,
        length: int,
        class_counts: npt.NDArray[np.int64],
    ) -> Randomness:
        """Return the randomness of class-balanced draws; `class_counts` are samples per class."""
        classes = class_counts.size
        rounds = length / classes
        bits = rounds * _log2_factorial(classes)
        for count, classes_of_it in zip(*np.unique(class_counts, return_counts=True), strict=True):
            bits += int(classes_of_it) * _log2_draws(int(count), rounds)
        return cls._of_repeating(bits, samples, length)

    @classmethod
    def of_weighted(
        cls,
        weights: npt.NDArray[np.float64],
        length: int,
    ) -> Randomness:
        """Return the randomness of independent draws; `weights` need not sum to 1."""
        drawn = weights[weights > 0] / weights.sum()
        return cls._of_repeating(
            -length * float(np.sum(drawn * np.log2(drawn))), weights.size, length
        )

    @classmethod
    def _of_repeating(cls, bits: float, samples: int, length: int) -> Randomness:
        full = length / samples * _log2_factorial(samples)
        share = min(1.0, bits / full) if full else 1.0
        return cls(share, share, _REPEATING)


@lru_cache(maxsize=64)
def _of_blocked(samples: int, block_samples: int, window_blocks: int) -> Randomness:
    blocks = -(-samples // block_samples)
    window_blocks = min(window_blocks, blocks)
    window_samples = min(window_blocks * block_samples, samples)
    windows = -(-blocks // window_blocks)
    last_blocks = blocks - (windows - 1) * window_blocks
    # The short block can lie in any window; it is counted in the last.
    last_samples = samples - (windows - 1) * window_samples
    bits = (
        _log2_factorial(blocks)
        - (windows - 1) * _log2_factorial(window_blocks)
        - _log2_factorial(last_blocks)
        + (windows - 1) * _log2_factorial(window_samples)
        + _log2_factorial(last_samples)
    )
    full = _log2_factorial(samples)
    formula = f"{_DEEPIO}; Nf={blocks}, Nc={window_blocks}, Nmem={window_samples}, n={samples}"
    level = _level_of_windows(samples, window_samples, windows, last_samples)
    return Randomness(level, min(1.0, bits / full) if full else 1.0, formula)


def _level_of_windows(samples: int, window: int, windows: int, last: int) -> float:
    """Return DeepIO's level for `windows - 1` windows of `window` samples and one of `last`."""
    full = _full_sum(samples)
    if windows == 1 or full == 0.0:
        return 1.0

    def window_sum(number: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum one window's Q * log2(1/P), for windows numbered from the end."""
        behind = last + (number - 1) * window  # samples that come after this window

        def terms(left: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            """For `left` samples left in the window, itself included: (left, windows)."""
            choices = left[:, None] * ((behind + window) / window)
            return np.log2(choices) / (behind + left[:, None])

        return _smooth_sum(terms, window)

    return min(1.0, (_full_sum(last) + float(_smooth_sum(window_sum, windows - 1))) / full)


def _full_sum(samples: int) -> float:
    """Return the sum of Q * log2(1/Q): log2(m) / m for m = 1 to `samples`."""
    return _share_of_sum(samples, 0)


def _share_of_sum(count: int, behind: int) -> float:
    """Return the sum over `count` samples that are shuffled among themselves, before `behind` others."""
    return float(_smooth_sum(lambda left: np.log2(left) / (left + behind), count))


def _smooth_sum(terms: Terms, count: int) -> npt.NDArray[np.float64]:
    """Add f(1) + ... + f(count) for an f that is smooth in log(k), in constant time.

    Args:
        terms: takes k, float64 of shape (m,), and returns f(k), shape (m,) or (m, columns).
        count: the number of terms.

    Returns:
        The sum of each column. The first terms are added exactly; the rest is the Euler-Maclaurin
        formula up to its first derivative, with the integral by Gauss-Legendre in log(k).
    """
    head = min(count, _EXACT_TERMS)
    values = terms(np.arange(1.0, head + 1.0))
    total: npt.NDArray[np.float64] = values.sum(axis=0)
    if count == head:
        return total
    low, high = log(head), log(count)
    nodes, weights = _gauss_legendre(_NODES)
    k = np.exp((high + low) / 2 + (high - low) / 2 * nodes)
    integral = np.tensordot(weights * k * ((high - low) / 2), terms(k), axes=1)
    first, first_up, last_down, last = terms(np.array([head, head + 1, count - 1, count], float))
    slopes = (last - last_down) - (first_up - first)
    # f(head) is in the head's sum already, so half of it goes.
    rest: npt.NDArray[np.float64] = total + integral + (last - first) / 2 + slopes / 12
    return rest


@lru_cache(maxsize=1)
def _gauss_legendre(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    # On first use: numpy.polynomial is not loaded by `import numpy`.
    return np.polynomial.legendre.leggauss(count)


def _log2_factorial(n: int) -> float:
    return lgamma(n + 1) / log(2)


def _log2_draws(count: int, draws: float) -> float:
    """Return log2 of the ways to draw `draws` times from `count` samples, cycle by cycle."""
    if count == 1:
        return 0.0
    cycles, left = divmod(draws, count)
    return cycles * _log2_factorial(count) + (lgamma(count + 1) - lgamma(count - left + 1)) / log(2)
