"""Randomness: known points, the sums against brute force, and time that does not grow with n."""

from itertools import permutations
from math import factorial, log2
from time import perf_counter

import numpy as np
import pytest

from headrace.order import Balanced, Blocked, Randomness, Sequential, Shuffled, Weighted


def brute_level(n, block_samples, window_blocks):
    """The published sum, position by position."""
    blocks = -(-n // block_samples)
    window_blocks = min(window_blocks, blocks)
    window = min(window_blocks * block_samples, n)
    rounds = -(-blocks // window_blocks)
    total = 0.0
    for i in range(n):
        r = min(i // window, rounds - 1)
        memory = window if r < rounds - 1 else n - r * window
        p = memory / (n - window * r) / (memory - (i - r * window))
        total += log2(1 / p) / (n - i)
    return total / sum(log2(m) / m for m in range(1, n + 1))


def test_a_full_shuffle_is_1_and_a_fixed_order_0():
    for n in (1, 2, 1000, 2**48):
        assert (Shuffled(n).randomness().level, Shuffled(n).randomness().entropy_share) == (1, 1)
        fixed = Sequential(n).randomness()
        assert (fixed.level, fixed.entropy_share) == (0, 0)
        single = Blocked(n, 1, 1).randomness()
        assert single.level == pytest.approx(1, abs=1e-6)
        assert single.entropy_share == pytest.approx(1)


@pytest.mark.parametrize(
    ("n", "block_samples", "window_blocks"),
    [(10_000, 64, 4), (9999, 7, 300), (5000, 1, 100), (20_000, 1000, 7), (300, 100, 2), (7, 2, 2)],
)
def test_the_level_is_the_published_sum(n, block_samples, window_blocks):
    level = Blocked(n, block_samples, window_blocks).randomness().level
    assert level == pytest.approx(brute_level(n, block_samples, window_blocks), abs=1e-6)


def sequences(n, block_samples, window_blocks):
    """Every sequence that a blocked order of whole blocks can have."""
    blocks = [range(at, at + block_samples) for at in range(0, n, block_samples)]
    all_of = set()
    for order in permutations(blocks):
        beginnings = [()]
        for at in range(0, len(order), window_blocks):
            window = [sample for block in order[at : at + window_blocks] for sample in block]
            beginnings = [
                (*begun, *shuffled) for begun in beginnings for shuffled in permutations(window)
            ]
        all_of.update(beginnings)
    return all_of


@pytest.mark.parametrize(
    ("n", "block_samples", "window_blocks"),
    [(6, 2, 2), (6, 2, 1), (6, 3, 1), (6, 1, 2), (8, 2, 2), (6, 2, 3)],
)
def test_the_share_of_the_entropy_counts_the_sequences(n, block_samples, window_blocks):
    share = Blocked(n, block_samples, window_blocks).randomness().entropy_share
    possible = len(sequences(n, block_samples, window_blocks))
    assert share == pytest.approx(log2(possible) / log2(factorial(n)))


@pytest.mark.parametrize("n", [100_000, 2**30, 2**40])
def test_larger_windows_are_more_random(n):
    values = [Blocked(n, 64, 2**k).randomness() for k in range(n.bit_length())]
    shares = [value.entropy_share for value in values]
    assert shares == sorted(shares)
    levels = [value.level for value in values[2:]]  # windows of 256 samples and more
    assert levels == sorted(levels)
    assert all(0 < value.level <= 1 and 0 < value.entropy_share <= 1 for value in values)
    assert values[-1].level == 1.0


def test_larger_blocks_leave_fewer_orders():
    shares = [Blocked(2**20, 2**k, 2 ** (12 - k)).randomness().entropy_share for k in range(13)]
    assert shares == sorted(shares, reverse=True)


def test_the_entropy_share_counts_the_orders_there_are():
    """5 samples in blocks of 2, windows of 1 block: 3! x 2! x 2! of 5! orders."""
    order = Blocked(5, 2, 1, seed=0)
    orders = {tuple(order.indices(epoch, 0, 5).tolist()) for epoch in range(2000)}
    assert len(orders) == 24
    assert order.randomness().entropy_share == pytest.approx(log2(24) / log2(factorial(5)))
    assert len(set(permutations(range(5)))) == 120


def test_enormous_data_is_measured_at_once():
    started = perf_counter()
    for n in (2**40, 2**48):
        Blocked(n, 4096, 1000).randomness()
        Blocked(n, 1, 2).randomness()
    assert perf_counter() - started < 1


def test_balanced_and_weighted_report_their_entropy_share():
    rng = np.random.default_rng(1)
    even = Balanced(np.arange(10_000) % 10).randomness()
    skewed = Balanced(np.where(np.arange(10_000) < 9990, 0, 1)).randomness()
    assert 0.9 < even.entropy_share < 1
    assert skewed.entropy_share < even.entropy_share
    equal = Weighted(np.ones(10_000)).randomness()
    assert equal.level == 1
    few = Weighted(np.eye(1, 10_000)[0]).randomness()
    assert few.level == pytest.approx(0)
    assert 0.5 < Weighted(rng.pareto(1, 10_000)).randomness().level < 1
    assert "entropy_share" in few.formula


def test_the_formula_names_its_parameters():
    formula = Blocked(1000, 10, 5).randomness().formula
    assert formula.endswith("Nf=100, Nc=5, Nmem=50, n=1000")
    assert isinstance(Blocked(1000, 10, 5).randomness(), Randomness)
