r"""Label mix: how far the labels that come together are from those of the whole epoch.

`Randomness` counts which orders can come, and knows no labels. But an order that reads neighbours together
trains badly where neighbours are of one class, and as well as any where they are not. This number sees that:

    distance(w) = (T(w) - R(w)) / (S(w) - R(w))

    T(w)  what is seen: the mean over windows of w successive samples of the total variation distance
          1/2 sum_c |q_c - p_c|, where q_c and p_c are the shares of class c in the window and in the epoch
    R(w)  what a full shuffle has on average, since windows are small: 1/2 sum_c E|X_c/w - p_c|, where X_c is
          hypergeometric
    S(w)  what windows of one class each have: sum_c p_c * (1 - max(n*p_c, w) / n)

It is 0 for a full shuffle, 1 where each window is of one class, and below 0 where they are mixed more
evenly than by chance. Samples sorted by class have 1 if classes end where windows do, and less if windows lie
across two: 0.6 to 1. The mean deviation of a hypergeometric number has a closed form, since the sum
telescopes as de Moivre's of the binomial does (Diaconis and Zabell, Statistical Science 6, 1991): for K of n
samples in the class, and m the first whole number above w*K/n,

    E|X - w*K/n| = 2 * m * (n - K - w + m) / n * P(X = m)

Training feels windows of several sizes: batch normalisation feels one batch, momentum and Adam's averages
dozens of them, and what is forgotten again is a part of the epoch. So `LabelMix.distance` is the mean over
windows of 1, 4, 16, ... batches and of half an epoch. A batch of more than that is the only window: where it
holds the whole epoch, the mix is 0. The number is ours; `benchmarks/accuracy.py` compares it with what
networks learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import OrderError
from headrace.order.order import checked
from headrace.order.weighted import Balanced, Weighted, checked_labels

if TYPE_CHECKING:
    import numpy.typing as npt

    from headrace.order.order import Order

SAMPLES_MAX = 1 << 20  # an epoch of up to so many samples is looked at whole: it takes a second
_STEP = 4  # each window is so many times as long as the one before
_SPANS = 4  # of a longer epoch: how many of the longest windows are looked at, at even distances


@dataclass(frozen=True, slots=True)
class LabelMix:
    """How far windows of an epoch are from its mix of labels: 0: a full shuffle, 1: one class each."""

    distance: float
    """The mean of `distances`: the one to quote."""

    windows: tuple[int, ...]
    """Samples of a window: those of 1, 4, 16, ... batches, and half an epoch (or 2^18, if that is less), or
    one batch, if that is more."""

    distances: tuple[float, ...]
    """The distance of the windows of each size."""

    classes: int
    """Different labels."""

    @classmethod
    def of(
        cls,
        order: Order,
        labels: npt.ArrayLike,
        batch_size: int,
        *,
        epoch: int = 0,
        samples: int = SAMPLES_MAX,
    ) -> LabelMix:
        """Return the label mix of an epoch.

        Args:
            order: over as many samples as there are labels.
            labels: whole numbers, shape (n,); -1, for none, counts as a class.
            batch_size: samples of all ranks' batches together.
            epoch: which one.
            samples: how many to look at, roughly, where the epoch is longer; windows hold a quarter of it
                at most.

        Raises:
            OrderError: labels are not one whole number for each sample.
            ValueError: the epoch or the batch size is out of bounds.
        """
        array = np.asarray(labels)
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.size == 0:
            array = checked_labels(labels)  # raises
        if array.size != order.samples:
            raise OrderError(f"{array.size} labels are given for {order.samples} samples")
        batch_size = checked("batch_size", batch_size, 1)
        longest = min(order.length, max(min(order.length // 2, samples // _SPANS), batch_size))
        sizes = [batch_size]
        while sizes[-1] < longest:
            sizes.append(sizes[-1] * _STEP)
        sizes[-1] = longest
        pieces = [array[order.indices(epoch, a, b)] for a, b in _places(order, longest, samples)]
        codes, counts = _mix_of(order, array, pieces, samples)
        n = int(counts.sum())
        # A class that the sample of a large set does not show has no share.
        shares = np.append(counts / n, 0.0)
        distances = []
        for size in sizes:
            seen = _mean_distance([_coded(piece, codes) for piece in pieces], size, shares)
            random, by_class = _of_shuffled(counts, n, size), _of_sorted(counts, n, size)
            # With one class, or one sample of each, there is nothing to be sorted.
            some = by_class - random > 1e-9
            distances.append((seen - random) / (by_class - random) if some else 0.0)
        return cls(float(np.mean(distances)), tuple(sizes), tuple(distances), len(codes))


def _places(order: Order, longest: int, samples: int) -> list[tuple[int, int]]:
    """Positions (first, behind the last) of the epoch that are looked at."""
    if order.length <= samples:
        return [(0, order.length)]
    spans = max(1, min(samples, order.length) // longest)
    starts = np.linspace(0, order.length - longest, spans).astype(np.int64).tolist()
    return [(start, start + longest) for start in starts]


def _mix_of(
    order: Order, labels: npt.NDArray[Any], pieces: list[npt.NDArray[Any]], samples: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The classes of the epoch, ascending, and how many samples of each it has, at least 1."""
    whole = np.concatenate(pieces)
    if order.length == order.samples and not isinstance(order, (Balanced, Weighted)):
        whole = labels[:: -(-len(labels) // samples)]  # each comes once: the set's own mix
    codes, counts = np.unique(whole, return_counts=True)
    scale = max(1.0, order.length / whole.size)
    return codes, np.maximum(1, np.rint(counts * scale)).astype(np.int64)


def _coded(labels: npt.NDArray[Any], codes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Which of `codes` each label is; len(codes) for one that is not among them."""
    numbers = np.searchsorted(codes, labels)
    among = codes[np.minimum(numbers, len(codes) - 1)] == labels
    return np.where(among, numbers, len(codes))


def _mean_distance(
    pieces: list[npt.NDArray[np.int64]], size: int, shares: npt.NDArray[np.float64]
) -> float:
    """T(size); what fills no window is left out."""
    total, windows = 0.0, 0
    for piece in pieces:
        count = len(piece) // size
        window = np.repeat(np.arange(count), size)
        keys, seen = np.unique(window * len(shares) + piece[: count * size], return_counts=True)
        # Some classes have too much of what others lack: half of the sum is either.
        total += float(np.maximum(seen / size - shares[keys % len(shares)], 0.0).sum())
        windows += count
    return total / windows


def _of_shuffled(counts: npt.NDArray[np.int64], n: int, size: int) -> float:
    """R(size), for `counts` of `n` samples in each class."""
    deviation = 0.0
    for each, classes in zip(*np.unique(counts, return_counts=True), strict=True):
        k = int(each)
        m = size * k // n + 1
        if m <= min(k, size) and n - k - size + m > 0:
            log_p = _log_choose(k, m) + _log_choose(n - k, size - m) - _log_choose(n, size)
            deviation += int(classes) * 2 * m * (n - k - size + m) / n * exp(log_p)
    return deviation / size / 2


def _of_sorted(counts: npt.NDArray[np.int64], n: int, size: int) -> float:
    """S(size)."""
    return float((counts / n * (1 - np.maximum(counts, size) / n)).sum())


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
