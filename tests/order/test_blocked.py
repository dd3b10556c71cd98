"""Blocked order: exactly once, whole blocks in windows, windows that can be asked for."""

import numpy as np
import pytest
from chi_square import limit, statistic
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.order import Blocked

SHAPES = {
    "n": st.integers(1, 600),
    "block_samples": st.integers(1, 50),
    "window_blocks": st.integers(1, 12),
    "epoch": st.integers(0, 5),
}


def windows_of(order, epoch, start, stop):
    """The bounds of every window that overlaps positions `start` to `stop - 1`."""
    windows = []
    while start < stop:
        windows.append(order.window_at(epoch, start))
        start = windows[-1][1]
    return windows


@given(**SHAPES)
@settings(max_examples=200, deadline=None)
def test_every_sample_once_and_windows_hold_whole_blocks(n, block_samples, window_blocks, epoch):
    order = Blocked(n, block_samples, window_blocks, seed=9)
    indices = order.indices(epoch, 0, n)
    assert np.array_equal(np.sort(indices), np.arange(n))

    windows = windows_of(order, epoch, 0, n)
    assert windows[0][0] == 0
    assert windows[-1][1] == n
    assert [start for start, _ in windows[1:]] == [stop for _, stop in windows[:-1]]
    for number, (start, stop) in enumerate(windows):
        inside = np.sort(indices[start:stop])
        blocks = np.unique(inside // block_samples)
        whole = [np.arange(b * block_samples, min((b + 1) * block_samples, n)) for b in blocks]
        assert np.array_equal(inside, np.concatenate(whole))
        last = number == len(windows) - 1
        assert len(blocks) == window_blocks or (last and len(blocks) <= window_blocks)


@given(**SHAPES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_position_gives_its_window(n, block_samples, window_blocks, epoch, data):
    order = Blocked(n, block_samples, window_blocks, seed=9)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, n))
    whole = windows_of(order, epoch, 0, n)
    for position in (start, max(start, stop - 1)):
        low, high = order.window_at(epoch, position)
        assert low <= position < high
        assert (low, high) in whole
    overlapping = [w for w in whole if w[0] < stop and w[1] > start] if start < stop else []
    assert windows_of(order, epoch, start, stop) == overlapping


def test_the_short_block_can_come_anywhere():
    order = Blocked(10, block_samples=4, window_blocks=1, seed=0)
    sizes = {tuple(b - a for a, b in windows_of(order, epoch, 0, 10)) for epoch in range(30)}
    assert sizes == {(2, 4, 4), (4, 2, 4), (4, 4, 2)}


def test_places_are_uniform_over_epochs():
    """p >= 1e-4 (chi_square.py): each of 12 samples in each of 12 places, one block short."""
    n, epochs = 12, 6000
    order = Blocked(n, block_samples=4, window_blocks=2, seed=1)
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), order.indices(epoch, 0, n)] += 1
    # Blocks move as wholes, so cells are correlated: single cells are compared instead.
    deviation = (counts - epochs / n) / np.sqrt(epochs / n * (1 - 1 / n))
    assert np.abs(deviation).max() < 5  # 144 cells at p < 6e-7 each
    assert statistic(counts[0], epochs / n) < limit(n - 1)


def test_a_window_larger_than_the_data_is_a_full_shuffle():
    order = Blocked(1000, block_samples=10, window_blocks=10_000)
    assert windows_of(order, 0, 0, 1000) == [(0, 1000)]
    assert order.randomness().level == 1.0
    assert order.randomness().entropy_share == 1.0


def test_a_huge_data_set_is_looked_up_in_constant_memory():
    order = Blocked(2**48 - 5, block_samples=1 << 10, window_blocks=1 << 30, seed=2)
    indices = order.indices(7, 2**47, 2**47 + 1000)
    assert len(np.unique(indices)) == 1000
    low, high = order.window_at(7, 2**47)
    assert high - low in {2**40, 2**40 - 5}


@pytest.mark.parametrize("position", [-1, 100])
def test_a_position_outside_has_no_window(position):
    with pytest.raises(ValueError, match=f"position is {position}, expected 0 to 99"):
        Blocked(100, 10, 2).window_at(0, position)
