"""What every order promises, and the two simplest orders."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OrderError
from headrace.order import Balanced, Blocked, Mixed, Sequential, Shuffled, Subset, Weighted

LABELS = np.arange(97) % 7 - 1
ORDERS = {
    "sequential": Sequential(97),
    "shuffled": Shuffled(97, seed=5),
    "subset": Subset(np.arange(96, 36, -1), 97, seed=5),
    "stored subset": Subset(np.arange(90), 97, shuffle=False),
    "shuffled by network": Shuffled(5001, seed=5),
    "blocked": Blocked(97, block_samples=8, window_blocks=3, seed=5),
    "balanced": Balanced(LABELS, seed=5, epoch_length=130),
    "weighted": Weighted(np.arange(97), seed=5, epoch_length=60),
    "mixed": Mixed((Shuffled(60, seed=5), Sequential(37)), ((0, (7, 3)), (20, (1, 2))), stop=90),
    "mixed by batches": Mixed(
        (Shuffled(60), Sequential(37)), ((0, (3, 1)),), block=8, drawn=(3, 2)
    ),
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


@every_order
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_part_of_an_epoch_is_the_same_as_in_the_whole(order, data):
    epoch = data.draw(st.integers(0, 2**32 - 1))
    start = data.draw(st.integers(0, order.length))
    stop = data.draw(st.integers(start, order.length))
    whole = order.indices(epoch, 0, order.length)
    part = order.indices(epoch, start, stop)
    assert part.dtype == np.int64
    assert np.array_equal(part, whole[start:stop])
    assert whole.min() >= 0
    assert whole.max() < order.samples


@every_order
@given(start=st.integers(0, 6000), size=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_wrapped_starts_over_at_the_end(order, start, size):
    whole = order.indices(3, 0, order.length)
    positions = np.arange(start, start + size) % order.length
    assert np.array_equal(order.wrapped(3, start, start + size), whole[positions])


@every_order
def test_an_order_is_a_value(order):
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order
    assert hash(copy) == hash(order)
    assert copy.digest() == order.digest()
    assert np.array_equal(copy.indices(1, 0, 50), order.indices(1, 0, 50))
    described = json.loads(json.dumps(order.describe()))
    assert described == order.describe()
    assert described["samples"] == order.samples


def test_all_orders_differ():
    assert len({order.digest() for order in ORDERS.values()}) == len(ORDERS)
    assert Shuffled(97, seed=5) != Shuffled(97, seed=6)
    assert Shuffled(97) != Sequential(97)
    assert Shuffled(97) != 97


@every_order
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 1), "epoch is -1, expected 0 to 4294967295"),
        ((2**32, 0, 1), "epoch is 4294967296"),
        ((0, -1, 1), "start is -1"),
        ((0, 2, 1), "start is 2, expected 0 to 1"),
        ((0, 0, 9999), "stop is 9999, expected 0 to"),
    ],
)
def test_positions_out_of_bounds_are_named(order, arguments, message):
    with pytest.raises(ValueError, match=message):
        order.indices(*arguments)


@every_order
def test_a_position_is_a_whole_number(order):
    with pytest.raises(TypeError, match=r"stop is 1\.5, expected a whole number"):
        order.indices(0, 0, 1.5)


def test_sequential_is_the_data_as_it_lies():
    assert Sequential(10).indices(4, 2, 6).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("n", [1, 2, 97, 4096, 4097, 10_000])
def test_shuffled_delivers_every_sample_once_in_every_epoch(n):
    order = Shuffled(n, seed=1)
    for epoch in range(3):
        assert np.array_equal(np.sort(order.indices(epoch, 0, n)), np.arange(n))


def test_a_subset_delivers_the_chosen_once_shuffled_or_as_given():
    chosen = np.arange(96, 36, -1)
    shuffled, stored = Subset(chosen, 97, seed=1), Subset(chosen, 97, shuffle=False)
    epochs = [shuffled.indices(epoch, 0, 60) for epoch in range(2)]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [sorted(chosen.tolist())] * 2
    assert epochs[0].tolist() != epochs[1].tolist()
    assert stored.indices(1, 0, 60).tolist() == chosen.tolist()
    same = Subset(chosen, 97, seed=1, shuffle=np.True_)
    assert same.digest() == Subset(chosen, 97, seed=1, shuffle=1).digest() == shuffled.digest()
    with pytest.raises(OrderError, match="shuffle is 'no', expected True or False"):
        Subset(chosen, 97, shuffle="no")
    chosen[:] = 0  # the order has its own
    assert np.array_equal(shuffled.indices(0, 0, 60), epochs[0])


def test_a_huge_epoch_starts_at_once():
    order = Shuffled(2**48, seed=1)
    assert len(np.unique(order.indices(0, 2**48 - 100, 2**48))) == 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shuffled(0), "samples is 0, expected 1 to 281474976710656"),
        (lambda: Shuffled(2**48 + 1), "samples is 281474976710657"),
        (lambda: Shuffled(10, seed=-1), "seed is -1"),
        (lambda: Shuffled(10, seed=2**64), "seed is 18446744073709551616"),
        (lambda: Sequential(0), "samples is 0"),
        (lambda: Blocked(10, 0, 1), "block_samples is 0"),
        (lambda: Blocked(10, 1, 0), "window_blocks is 0"),
        (lambda: Subset([], 10), r"chosen has shape \(0,\)"),
        (lambda: Subset([True] * 10, 10), "type bool, expected indices"),
        (lambda: Subset([3, 10], 10), "chosen has 10, expected indices from 0 to 9"),
        (lambda: Subset([3, -1], 10), "chosen has -1"),
        (lambda: Subset([3, 4, 3], 10), "samples more than once"),
    ],
)
def test_wrong_parameters_are_named(make, message):
    with pytest.raises(OrderError, match=message):
        make()


def test_numpy_numbers_become_plain_ones():
    order = Shuffled(np.int64(10), seed=np.uint64(3))
    assert json.dumps(order.describe()) == '{"mode": "shuffled", "samples": 10, "seed": 3}'


def test_a_small_source_begins_its_orders_again_after_the_last_epoch():
    order = ORDERS["mixed"]
    whole = order.indices(2**32 - 1, 0, order.length)
    assert 0 <= whole.min() <= whole.max() < order.samples
