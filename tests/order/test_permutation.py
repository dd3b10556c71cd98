"""The native permutation: a bijection, its inverse, and the plain Python reference."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_order import ReferencePermutation

from headrace.order import Permutation
from headrace.order.hash import SAMPLES_MAX

KEYS = st.integers(0, 2**64 - 1)
GOLDEN_SMALL = [8, 5, 2, 1, 7, 3, 9, 6, 4, 0]
GOLDEN_LARGE = [270490, 543216, 562534, 811132, 797924]
AROUND_POWERS = [2**k + d for k in (2, 5, 11, 12, 13, 16, 17) for d in (-1, 0, 1)]


def check_bijection(n, key):
    permutation = Permutation(n, key)
    indices = permutation.range(0, n)
    assert indices.dtype == np.int64
    assert np.array_equal(np.sort(indices), np.arange(n))
    assert np.array_equal(permutation.inverse(indices), np.arange(n))
    assert np.array_equal(permutation.at(np.arange(n)), indices)


@pytest.mark.parametrize("n", [1, 2, 3, *AROUND_POWERS, 100_003])
def test_every_index_comes_once_and_has_its_position(n):
    check_bijection(n, key=n)


@given(n=st.integers(1, 20_000), key=KEYS)
@settings(max_examples=60, deadline=None)
def test_bijection_for_any_size_and_key(n, key):
    check_bijection(n, key)


@given(n=st.integers(1, 3000) | st.integers(4090, 5000), key=KEYS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_native_equals_reference(n, key, data):
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, min(n, start + 50)))
    native, reference = Permutation(n, key), ReferencePermutation(n, key)
    indices = native.range(start, stop)
    assert indices.tolist() == reference.range(start, stop)
    assert [reference.inverse(int(i)) for i in indices] == list(range(start, stop))


@given(n=st.integers(1, SAMPLES_MAX), key=KEYS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_native_equals_reference_up_to_the_largest_size(n, key, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
    native, reference = Permutation(n, key), ReferencePermutation(n, key)
    indices = native.at(np.array(positions))
    assert indices.tolist() == [reference.at(p) for p in positions]
    assert native.inverse(indices).tolist() == positions
    assert ((indices >= 0) & (indices < n)).all()


@pytest.mark.parametrize("n", [SAMPLES_MAX, SAMPLES_MAX - 1, SAMPLES_MAX // 2 + 1, 2**40 + 7])
def test_the_ends_of_the_largest_sizes(n):
    permutation = Permutation(n, 11)
    for start, stop in [(0, 1000), (n - 1000, n)]:
        indices = permutation.range(start, stop)
        assert len(np.unique(indices)) == 1000
        assert indices.max() < n
        assert np.array_equal(permutation.inverse(indices), np.arange(start, stop))


@pytest.mark.parametrize("n", [1, 4096, 4097, 2**48])
def test_a_permutation_pickles(n):
    permutation = pickle.loads(pickle.dumps(Permutation(n, 2**64 - 1)))
    assert (permutation.n, permutation.key) == (n, 2**64 - 1)
    assert permutation.range(0, 1) == Permutation(n, 2**64 - 1).range(0, 1)


def test_the_sequence_never_changes_between_versions():
    """Saved states rely on it: a change here needs a new state version."""
    assert Permutation(10, 7).range(0, 10).tolist() == GOLDEN_SMALL
    assert Permutation(1_000_000, 7).range(0, 5).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Permutation(0, 1), "n is 0, expected 1 to 2^48"),
        (lambda: Permutation(-3, 1), "n is -3"),
        (lambda: Permutation(2**48 + 1, 1), "n is 281474976710657"),
        (lambda: ReferencePermutation(0, 1), "n is 0"),
        (lambda: Permutation(10, 1).range(-1, 3), "range is -1 to 3"),
        (lambda: Permutation(10, 1).range(5, 4), "range is 5 to 4"),
        (lambda: Permutation(10, 1).range(0, 11), "range is 0 to 11, .* <= 10"),
        (lambda: Permutation(10, 1).at(np.array([3, 10])), "position is 10, expected 0 to 9"),
        (lambda: Permutation(9999, 1).at(np.array([-1])), "position is -1, expected 0 to 9998"),
        (lambda: Permutation(10, 1).inverse(np.array([-5])), "index is -5"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message.replace("^", r"\^")):
        call()
