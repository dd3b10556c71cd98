"""Balanced order: equal counts, every member used before any comes again."""

import numpy as np
import pytest
from chi_square import limit, statistic
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OrderError
from headrace.order import Balanced


@given(
    labels=st.lists(st.integers(-1, 6), min_size=1, max_size=80).filter(lambda x: max(x) >= 0),
    length=st.integers(1, 200),
    epoch=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_counts_of_classes_differ_by_at_most_one(labels, length, epoch):
    array = np.array(labels)
    order = Balanced(array, seed=3, epoch_length=length)
    drawn = array[order.indices(epoch, 0, length)]
    assert drawn.min() >= 0
    counts = [np.count_nonzero(drawn == c) for c in order.classes]
    assert max(counts) - min(counts) <= 1
    for start in range(0, length, len(counts)):
        in_round = drawn[start : start + len(counts)]
        assert len(np.unique(in_round)) == len(in_round)


def test_every_member_comes_once_before_any_comes_again_through_epochs():
    labels = np.array([0] * 3 + [1] * 10)
    order = Balanced(labels, seed=1, epoch_length=8)  # 4 rounds an epoch, no round cut short
    drawn = np.concatenate([order.indices(epoch, 0, 8) for epoch in range(15)])
    for members in (np.arange(3), np.arange(3, 13)):
        sequence = drawn[np.isin(drawn, members)]
        cycles = sequence.reshape(-1, len(members))  # 60 draws: 20 cycles of 3, 6 cycles of 10
        assert np.array_equal(np.sort(cycles, axis=1), np.tile(members, (len(cycles), 1)))
        assert len(np.unique(cycles, axis=0)) > 1


def test_the_order_of_classes_in_a_round_is_uniform():
    """p >= 1e-4: the six orders of three classes over 3,000 rounds."""
    labels = np.arange(9) % 3
    order = Balanced(labels, seed=4, epoch_length=9000)
    rounds = labels[order.indices(0, 0, 9000)].reshape(-1, 3)
    counts = np.unique(rounds @ [9, 3, 1], return_counts=True)[1]
    assert len(counts) == 6
    assert statistic(counts, 500) < limit(5)


def test_epoch_length_is_n_by_default_and_negative_labels_never_come():
    order = Balanced(np.array([5, -1, -7, 5, 2]), seed=1)
    assert order.length == 5
    assert order.classes.tolist() == [2, 5]
    assert set(order.indices(0, 0, 5).tolist()) <= {0, 3, 4}


def test_many_classes():
    labels = np.arange(20_000) % 5000
    order = Balanced(labels, seed=1)
    indices = order.indices(0, 0, 20_000)
    assert np.array_equal(np.sort(indices), np.arange(20_000))  # four of each: one full cycle
    assert np.array_equal(order.indices(0, 4990, 5010), indices[4990:5010])


def test_labels_are_part_of_the_description():
    assert Balanced([0, 1, 1]) == Balanced(np.array([0, 1, 1], np.int32))
    assert Balanced([0, 1, 1]).digest() != Balanced([0, 0, 1]).digest()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Balanced([-1, -1]), "all 2 labels are negative"),
        (lambda: Balanced(np.array([], int)), "labels have shape"),
        (lambda: Balanced([[1, 2]]), r"labels have shape \(1, 2\)"),
        (lambda: Balanced([0.5]), "dtype float64"),
        (lambda: Balanced(np.array([2**63], np.uint64)), "a label is 9223372036854775808"),
        (lambda: Balanced([1], epoch_length=0), "epoch_length is 0"),
        (
            lambda: Balanced([1], epoch_length=2**48).indices(2**32 - 1, 0, 1),
            "epoch is 4294967295: .* draws pass",
        ),
    ],
)
def test_wrong_parameters_are_named(make, message):
    with pytest.raises(OrderError, match=message):
        make()
