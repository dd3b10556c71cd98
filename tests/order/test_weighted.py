"""Weighted order: frequencies follow the weights."""

import numpy as np
import pytest
from chi_square import limit, statistic

from headrace.errors import OrderError
from headrace.order import Weighted

DRAWS = 100_000


def counts_of(order, epoch=0):
    return np.bincount(order.indices(epoch, 0, order.length), minlength=order.samples)


@pytest.mark.parametrize("epoch", [0, 1, 4_000_000_000])
@pytest.mark.parametrize("scale", [1, 1e-300, 1e300])
def test_frequencies_follow_the_weights(epoch, scale):
    """p >= 1e-4: 20 weights from 1 to 20, 100,000 draws."""
    weights = np.arange(1.0, 21.0)
    order = Weighted(weights * scale, seed=2, epoch_length=DRAWS)
    expected = DRAWS * weights / weights.sum()
    assert statistic(counts_of(order, epoch), expected) < limit(19)


def test_draws_are_independent_of_their_neighbours():
    """p >= 1e-4: pairs of successive draws over 8 equal weights."""
    drawn = Weighted(np.ones(8), seed=2, epoch_length=DRAWS).indices(0, 0, DRAWS)
    pairs = np.bincount(drawn[:-1] * 8 + drawn[1:], minlength=64)
    assert statistic(pairs, (DRAWS - 1) / 64) < limit(63)


def test_weight_zero_never_comes():
    weights = np.zeros(50)
    weights[[3, 40]] = 1e-9, 1e9
    counts = counts_of(Weighted(weights, seed=1, epoch_length=DRAWS))
    assert counts[40] == DRAWS
    weights[3] = 1e9
    counts = counts_of(Weighted(weights, seed=1, epoch_length=DRAWS))
    assert counts[3] + counts[40] == DRAWS


def test_by_class_weighs_every_sample_by_its_class():
    """p >= 1e-4: six samples of three classes, one of no class."""
    labels = np.array([0, 0, 1, 2, 2, 2, -100])
    order = Weighted.by_class(labels, [1.0, 4.0, 0.5], seed=6, epoch_length=DRAWS)
    counts = counts_of(order)
    assert counts[-1] == 0
    weights = np.array([1, 1, 4, 0.5, 0.5, 0.5])
    assert statistic(counts[:-1], DRAWS * weights / weights.sum()) < limit(5)
    assert order == Weighted([*weights, 0], seed=6, epoch_length=DRAWS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weighted([1, -0.5]), r"weights\[1\] is -0\.5, expected a finite number"),
        (lambda: Weighted([1, float("nan")]), r"weights\[1\] is nan"),
        (lambda: Weighted([float("inf")]), r"weights\[0\] is inf"),
        (lambda: Weighted([0, 0]), "all 2 weights are 0"),
        (lambda: Weighted([]), "weights have shape"),
        (lambda: Weighted(3), r"weights have shape \(\)"),
        (lambda: Weighted([1], epoch_length=0), "epoch_length is 0"),
        (lambda: Weighted.by_class([0, 3], [1, 1]), "label 3 has no weight: .* holds 2"),
    ],
)
def test_wrong_parameters_are_named(make, message):
    with pytest.raises(OrderError, match=message):
        make()
