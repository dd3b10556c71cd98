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


@given(residents(), st.integers(0, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_every_sample_once_and_the_resident_first(given_residents, epoch, data):
    n, resident = given_residents
    order = Opportunistic(n, resident, seed=5, epochs=2)
    whole = order.indices(epoch, 0, n)
    assert np.array_equal(np.sort(whole), np.arange(n))
    near = np.zeros(n, bool)
    for a, b in resident:
        near[a:b] = True
    count = order.resident_samples
    assert count == near.sum()
    if epoch < 2:
        assert near[whole[:count]].all()
    else:
        assert np.array_equal(whole, Shuffled(n, seed=5).indices(epoch, 0, n))
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert np.array_equal(order.indices(epoch, start, stop), whole[start:stop])


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
