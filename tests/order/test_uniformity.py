"""Nothing we can measure tells the permutations from random ones. Fixed keys; see chi_square.py."""

from itertools import permutations
from math import factorial

import numpy as np
import pytest
from chi_square import limit, statistic

from headrace.order import Permutation, Shuffled

CELLS = 16
SIZES = [64, 1000, 4096, 4097, 5000, 8192, 8193, 65_536, 100_003]


def cell(values, n):
    return values * CELLS // n


def cell_statistic(pairs, n):
    """Chi-square of CELLS x CELLS counts over (x, y) pairs that are permutations of [0, n).

    Rows and columns are fixed within each permutation, so the degrees of freedom are (CELLS-1)^2,
    and the variance is that of draws without replacement: the factor (n-1)/n.
    """
    counts = np.zeros((CELLS, CELLS))
    for x, y in pairs:
        counts += np.bincount(cell(x, n) * CELLS + cell(y, n), minlength=CELLS**2).reshape(
            CELLS, CELLS
        )
    rows = counts.sum(axis=1, keepdims=True)
    columns = counts.sum(axis=0, keepdims=True)
    return statistic(counts, rows * columns / counts.sum()) * (n - 1) / n


def epochs_of(n, count):
    order = Shuffled(n, seed=2026)
    return [order.indices(epoch, 0, n) for epoch in range(count)]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_sets_come_in_every_order_equally_often(n):
    orders = {order: i for i, order in enumerate(permutations(range(n)))}
    draws = 200 * factorial(n)
    seen = [orders[tuple(Shuffled(n, seed=1).indices(e, 0, n).tolist())] for e in range(draws)]
    counts = np.bincount(seen, minlength=len(orders))
    assert statistic(counts, 200) < limit(len(orders) - 1)


@pytest.mark.parametrize("n", SIZES)
def test_every_index_lands_everywhere_equally_often(n):
    pairs = [(np.arange(n), indices) for indices in epochs_of(n, 40)]
    assert cell_statistic(pairs, n) < limit((CELLS - 1) ** 2)


@pytest.mark.parametrize("n", SIZES)
def test_one_epoch_says_nothing_about_the_next(n):
    epochs = epochs_of(n, 40)
    pairs = list(zip(epochs[:-1:2], epochs[1::2], strict=True))
    assert cell_statistic(pairs, n) < limit((CELLS - 1) ** 2)


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_in_the_order_are_not_neighbours_in_the_data(n, lag):
    counts = np.zeros(CELLS)
    for indices in epochs_of(n, 40):
        steps = (indices[lag:] - indices[:-lag]) % n
        counts += np.bincount(cell(steps - 1, n - 1), minlength=CELLS)
    widths = np.bincount(cell(np.arange(n - 1), n - 1), minlength=CELLS)
    assert statistic(counts, counts.sum() * widths / (n - 1)) < limit(CELLS - 1)


@pytest.mark.parametrize("distance", [1, 2, 32, 64, 128, 4096])
def test_two_positions_of_the_smallest_network_part_in_every_way(distance):
    """Over keys, the XOR of two positions' indices is uniform over all but 0.

    This is where a Feistel network with too few rounds shows: positions that differ in one half
    only (13 bits: 7 high, 6 low) would keep part of their difference.
    """
    n, keys = 8192, 30_000
    pair = np.array([100, 100 ^ distance])
    indices = np.array([Permutation(n, key).at(pair) for key in range(keys)])
    differences = indices[:, 0] ^ indices[:, 1]
    assert (differences > 0).all()
    for part in (differences >> 6, differences & 127):
        counts = np.bincount(part, minlength=128)
        expected = np.full(128, 64.0)
        expected[0] = 63  # a difference of 0 is impossible
        assert statistic(counts, expected * keys / (n - 1)) < limit(127)


@pytest.mark.parametrize("n", [4097, 1 << 20])
def test_one_bit_of_the_key_changes_everything(n):
    first = Permutation(n, 12345).range(0, 4096)
    for bit in (0, 1, 31, 63):
        other = Permutation(n, 12345 ^ (1 << bit)).range(0, 4096)
        # Equal places are Poisson with mean 4096 / n <= 1: more than 8 has p < 1e-5.
        assert (first == other).sum() <= 8


def test_epochs_and_seeds_all_differ():
    firsts = {
        tuple(Shuffled(1000, seed).indices(epoch, 0, 20).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(firsts) == 400
