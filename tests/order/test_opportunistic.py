"""Opportunistic order: what is resident first, everything once, and how random that is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OrderError
from headrace.order import Opportunistic, Shuffled


@st.composite
def residents(draw):
    n = draw(st.integers(1, 300))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=10)))
    pairs = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    return n, pairs


@given(residents(), st.integers(0, 6), st.integers(0, 5), st.data())
@settings(max_examples=300, deadline=None)
def test_every_sample_once_and_no_part_first_twice(given_residents, epoch, epochs, data):
    n, resident = given_residents
    order = Opportunistic(n, resident, seed=5, epochs=epochs)
    count = order.resident_samples
    wholes = [order.indices(e, 0, n) for e in range(7)]
    assert all(np.array_equal(np.sort(whole), np.arange(n)) for whole in wholes)
    near = np.zeros(n, bool)
    for a, b in resident:
        near[a:b] = True
    assert count == near.sum()
    fulls = [np.array_equal(w, Shuffled(n, seed=5).indices(e, 0, n)) for e, w in enumerate(wholes)]
    if count in (0, n) or not epochs:
        assert all(fulls)
    else:
        assert near[wholes[0][:count]].all()
        begins = min(epochs, -(-n // count))
        assert all(fulls[begins:])
        firsts = [wholes[0][:count]]
        for e in range(1, min(begins, 7)):
            size = min(count, n - e * count)
            # What the epoch before ended with, and nothing of what was first in any.
            assert set(wholes[e][:size]) == set(wholes[e - 1][n - size :])
            firsts.append(wholes[e][:size])
        assert len(np.unique(np.concatenate(firsts))) == sum(map(len, firsts))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert np.array_equal(order.indices(epoch, start, stop), wholes[epoch][start:stop])


def test_a_first_epoch_alone_is_as_it_always_was():
    """States that older versions saved go on."""
    order = Opportunistic(10, ((2, 5),), seed=1)
    assert order.indices(0, 0, 10).tolist() == [3, 2, 4, 5, 8, 6, 0, 7, 9, 1]
    assert order.digest() == "96edd474f202d6c8"


def test_epochs_and_seeds_differ():
    orders = [Opportunistic(500, ((10, 200),), seed=seed, epochs=3) for seed in (0, 1)]
    epochs = {tuple(o.indices(e, 0, 500)) for o in orders for e in range(3)}
    assert len(epochs) == 6


def test_randomness_is_that_of_two_shuffles():
    full = Opportunistic(1000, ((0, 1000),)).randomness()
    assert (full.level, full.entropy_share) == (1.0, 1.0)
    half = Opportunistic(1000, ((0, 500),)).randomness()
    # log2(500! * 500!) / log2(1000!)
    assert half.entropy_share == pytest.approx(0.8833, abs=1e-3)
    assert 0.5 < half.level < 1.0
    exact = sum(np.log2(m) / (m + 500) for m in range(1, 501))
    exact += sum(np.log2(m) / m for m in range(1, 501))
    assert half.level == pytest.approx(exact / sum(np.log2(m) / m for m in range(1, 1001)), 1e-6)
    again = Opportunistic(1000, ((0, 300),), epochs=9).randomness()
    # log2(300! * 400! * 300!) / log2(1000!)
    assert again.entropy_share == pytest.approx(0.8170, abs=1e-3)
    assert again.level < Opportunistic(1000, ((0, 300),)).randomness().level
    few = Opportunistic(1000, ((0, 10),)).randomness()
    assert few.entropy_share > half.entropy_share


@pytest.mark.parametrize("resident", [((5, 11),), ((4, 6), (5, 8)), ((6, 8), (1, 2)), ((-1, 3),)])
def test_ranges_that_cannot_be_are_refused(resident):
    with pytest.raises(OrderError):
        Opportunistic(10, resident)


def test_orders_over_other_residents_differ():
    one, other = (Opportunistic(10, ((0, k),)) for k in (3, 4))
    assert one != other
    assert one.digest() != other.digest()
    assert one == Opportunistic(10, ((0, 3), (5, 5)))
