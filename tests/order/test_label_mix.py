"""Label mix: its formula term by term, its fixed points, and what it says of each kind of order."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OrderError
from headrace.order import (
    Balanced,
    Blocked,
    LabelMix,
    Opportunistic,
    Sequential,
    Shuffled,
    Weighted,
)
from headrace.order.hash import keyed

SORTED = np.repeat(np.arange(10, dtype=np.int16), 400)


def expected_of_shuffled(counts, size):
    """R(size) by its definition, every probability added up exactly."""
    n = sum(counts)
    total = Fraction(0)
    for k in counts:
        for x in range(max(0, size - (n - k)), min(k, size) + 1):
            p = Fraction(comb(k, x) * comb(n - k, size - x), comb(n, size))
            total += p * abs(Fraction(x, size) - Fraction(k, n))
    return total / 2


def by_definition(order, labels, size):
    """distance(size), written as the formula reads."""
    n = len(labels)
    classes, counts = np.unique(labels, return_counts=True)
    delivered = labels[order.indices(0, 0, n)]
    windows = [delivered[a : a + size] for a in range(0, n - size + 1, size)]
    seen = np.mean(
        [
            0.5 * sum(abs((w == c).mean() - k / n) for c, k in zip(classes, counts, strict=True))
            for w in windows
        ]
    )
    random = float(expected_of_shuffled(counts.tolist(), size))
    by_class = sum(k / n * (1 - max(k, size) / n) for k in counts.tolist())
    return (seen - random) / (by_class - random)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_the_numbers_are_those_of_the_formula(counts, data):
    labels = np.repeat(np.arange(len(counts)) - 1, counts)
    batch = data.draw(st.integers(2, max(2, len(labels) // 5)))
    order = data.draw(
        st.sampled_from(
            [Sequential(len(labels)), Shuffled(len(labels), 3), Blocked(len(labels), 5, 2, 3)]
        )
    )
    mix = LabelMix.of(order, labels, batch)
    half = len(labels) // 2
    sizes = [batch * 4**k for k in range(8) if batch * 4**k < half]
    assert mix.windows == (*sizes, max(half, batch))
    assert mix.classes == len(counts)
    for size, distance in zip(mix.windows, mix.distances, strict=True):
        by_class = sum(k * (1 - max(k, size) / sum(counts)) for k in counts) / sum(counts)
        if by_class - float(expected_of_shuffled(counts, size)) > 1e-6:
            assert distance == pytest.approx(by_definition(order, labels, size), abs=1e-6)
    assert mix.distance == pytest.approx(np.mean(mix.distances))


@pytest.mark.parametrize("batch", [16, 32, 100, 256])
def test_a_full_shuffle_is_0_and_sorted_by_class_is_1(batch):
    mixes = [Shuffled(4000, seed).label_mix(SORTED, batch).distance for seed in range(8)]
    assert abs(np.mean(mixes)) < 0.01
    assert Sequential(4000).label_mix(SORTED, batch).distance > 0.9
    single = np.repeat(np.arange(4), batch * 8)  # every batch is of one class
    assert Sequential(len(single)).label_mix(single, batch).distances[0] == pytest.approx(1)


def test_orders_are_ranked_as_they_mix():
    n = len(SORTED)
    mixed = SORTED[keyed(n, 5).range(0, n)]  # a shuffled pack
    same = Opportunistic(n, ((0, n // 2),), seed=1)
    values = [
        Blocked(n, 32, 4, seed=1).label_mix(mixed, 32).distance,
        Blocked(n, 4, 64, seed=1).label_mix(SORTED, 32).distance,
        Blocked(n, 16, 16, seed=1).label_mix(SORTED, 32).distance,
        Blocked(n, 32, 4, seed=1).label_mix(SORTED, 32).distance,
        same.label_mix(SORTED, 32).distance,
        Sequential(n).label_mix(SORTED, 32).distance,
    ]
    assert values == sorted(values)
    assert abs(values[0]) < 0.03
    assert same.label_mix(SORTED, 32, epoch=1).distance < 0.03  # a full shuffle from there on


def test_orders_that_change_the_mix_are_judged_by_their_own():
    skewed = np.repeat([0, 1, 2], [3000, 700, 300])
    assert -0.5 < Balanced(skewed, seed=1).label_mix(skewed, 30).distance < 0
    weights = np.where(skewed == 2, 10.0, 1.0)
    assert abs(Weighted(weights, seed=1).label_mix(skewed, 30).distance) < 0.05


def test_a_large_epoch_is_looked_at_in_part():
    n = 1 << 22
    labels = np.repeat(np.arange(1024, dtype=np.int16), n // 1024)
    for order, low, high in (
        (Shuffled(n, 1), -0.01, 0.01), (Blocked(n, 256, 16, 1), 0.6, 1), (Sequential(n), 0.95, 1),
    ):  # fmt: skip
        mix = LabelMix.of(order, labels, 256, samples=1 << 16)
        assert mix.windows == (256, 1024, 4096, 16384)
        assert low < mix.distance <= high


def test_what_has_no_classes_to_sort_is_0():
    for labels in (np.zeros(100, int), np.arange(100), np.full(100, -1)):
        assert Sequential(100).label_mix(labels, 10).distance == 0
    assert Sequential(1).label_mix([3], 1).distance == 0


@pytest.mark.parametrize(("batch", "window"), [(40, 40), (72, 72), (256, 72)])
def test_a_batch_of_more_than_half_the_epoch_is_the_window(batch, window):
    labels = np.repeat([0, 1, 2], 24)
    mix = Sequential(72).label_mix(labels, batch)
    assert mix.windows == (window,)
    assert (mix.distance == 0) == (window == 72)  # one batch has all classes, in any order
    assert Shuffled(72).label_mix(labels, 256).distance == 0


@pytest.mark.parametrize(
    ("labels", "batch"), [([1, 2], 4), ([0.5] * 8, 4), ([[1] * 8], 4), ([], 4), ([1] * 8, 0)]
)
def test_labels_and_batches_that_cannot_be_are_refused(labels, batch):
    with pytest.raises(OrderError):
        Shuffled(8).label_mix(labels, batch)
