"""The order hash: additive, sensitive, and equal in C++ and Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_order import reference_order_hash

from headrace.order import Shuffled, combine_hashes, order_hash
from headrace.order.hash import derive_key, mix64, mix64_array, uniform

INDICES = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30)
POSITIONS = st.integers(0, 2**48)


@given(start=POSITIONS, indices=INDICES)
def test_native_equals_reference(start, indices):
    native = order_hash(start, np.array(indices, np.int64))
    assert native == reference_order_hash(start, indices)


@given(start=POSITIONS, indices=INDICES, data=st.data())
def test_partial_hashes_add_up(start, indices, data):
    cut = data.draw(st.integers(0, len(indices)))
    array = np.array(indices, np.int64)
    parts = order_hash(start, array[:cut]), order_hash(start + cut, array[cut:])
    assert combine_hashes(*parts) == order_hash(start, array)


@pytest.mark.parametrize("change", ["swap", "repeat", "drop", "shift"])
def test_every_mistake_changes_the_hash(change):
    indices = Shuffled(500, seed=3).indices(0, 0, 500)
    seen = {order_hash(0, indices)}
    for at in range(499):
        wrong, start = indices.copy(), 0
        if change == "swap":
            wrong[[at, at + 1]] = wrong[[at + 1, at]]
        elif change == "repeat":
            wrong[at + 1] = wrong[at]
        elif change == "drop":
            wrong = np.delete(wrong, at)
        else:
            start = at + 1
        seen.add(order_hash(start, wrong))
    assert len(seen) == 500


def test_a_strided_view_is_hashed_by_its_values():
    array = np.arange(20)
    assert order_hash(5, array[::2]) == reference_order_hash(5, range(0, 20, 2))


@given(values=st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_mix64_is_the_same_for_arrays(values):
    assert mix64_array(np.array(values, np.uint64)).tolist() == [mix64(v) for v in values]


@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32 - 2))
@settings(max_examples=50)
def test_keys_of_epochs_seeds_and_purposes_differ(seed, epoch):
    near = {
        derive_key(seed, 1, epoch),
        derive_key(seed, 1, epoch + 1),
        derive_key(seed, 2, epoch),
        derive_key(seed, 1, epoch, 0),
        derive_key((seed + 1) % 2**64, 1, epoch),
    }
    assert len(near) == 5


def test_uniform_numbers_lie_in_the_unit_interval():
    numbers = uniform(9, np.arange(100_000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # Mean of 100,000: standard error 0.00091; 4 of them is p < 1e-4.
    assert abs(numbers.mean() - 0.5) < 0.0037
