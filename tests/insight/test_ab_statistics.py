"""The statistics of a comparison: what they say is true as often as they say."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.insight.ab.comparison import PAIRS_LEAST, interval_of, is_narrow, t_95
from headrace.insight.ab.running import Side, turns

TIMES = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    # Two-sided 95 %, from the tables that every textbook has.
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (5, 2.5706),
        (10, 2.2281),
        (21, 2.0796),
        (30, 2.0423),
        (1000, 1.9623),
    ],
)
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert t_95(freedom) == pytest.approx(expected, abs=4e-4)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=12))
def test_the_ratio_lies_inside_and_sides_can_be_exchanged(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found, turned = interval_of(first, second), interval_of(second, first)
    assert found.low <= found.ratio * (1 + 1e-9)
    assert found.ratio <= found.high * (1 + 1e-9)
    assert turned.ratio == pytest.approx(1 / found.ratio)
    if found.low > 0 and math.isfinite(found.high):
        assert turned.low == pytest.approx(1 / found.high, rel=1e-6)
        assert found.high == pytest.approx(found.ratio * (1 + found.half_width), rel=1e-6)


@given(st.lists(TIMES, min_size=2, max_size=12), st.floats(0.01, 100))
def test_what_slows_both_sides_alike_changes_nothing(times, factor):
    """A machine that is slower for a while is so for both runs of a pair."""
    found = interval_of([2 * t for t in times], times)
    slower = interval_of([2 * t * factor for t in times], [t * factor for t in times])
    assert found.ratio == pytest.approx(2)
    assert slower.ratio == pytest.approx(2)
    assert slower.half_width == pytest.approx(0, abs=1e-9)


def test_one_pair_shows_nothing_and_no_pair_has_no_ratio():
    alone = interval_of([2.0], [1.0])
    assert (alone.ratio, alone.low, alone.high) == (2.0, 0.0, math.inf)
    assert not alone.faster
    assert not alone.slower
    assert not is_narrow(alone, 0.5)
    assert interval_of([], []) is None
    assert interval_of([1.0, 0.0], [1.0, 1.0]) is None
    with pytest.raises(ValueError, match="expected pairs"):
        interval_of([1.0], [])


def _pair(draw, true_log, noise):
    drift = draw.gauss(0, 0.3)  # of the machine: both sides have it
    return math.exp(true_log + drift + draw.gauss(0, noise)), math.exp(drift + draw.gauss(0, noise))


@pytest.mark.parametrize("pairs", [2, 3, 6, 12])
@pytest.mark.parametrize("ratio", [1.0, 2.3])
def test_an_interval_of_95_percent_holds_the_truth_95_times_in_100(pairs, ratio):
    draw, held, rounds = random.Random(7), 0, 3000
    for _ in range(rounds):
        first, second = zip(
            *(_pair(draw, math.log(ratio), 0.05) for _ in range(pairs)), strict=True
        )
        found = interval_of(first, second)
        held += found.low <= ratio <= found.high
    # Three standard deviations of such a count are 1.2 %.
    assert held / rounds == pytest.approx(0.95, abs=0.013)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
def test_stopping_at_a_narrow_interval_keeps_it_honest(noise):
    """The rule looks at the width alone; looking at significance would find differences in nothing."""
    draw, held, rounds, stopped = random.Random(3), 0, 400, Counter()
    for _ in range(rounds):
        first, second = [], []
        while not is_narrow(found := interval_of(first, second), 0.05) and len(first) < 200:
            a, b = _pair(draw, math.log(1.5), noise)
            first.append(a)
            second.append(b)
        held += found.low <= 1.5 <= found.high
        stopped[len(first)] += 1
    assert min(stopped) >= PAIRS_LEAST
    assert max(stopped) < 200
    assert held / rounds > 0.91


def test_stopping_at_the_first_significant_pair_would_not_be():
    """Why the rule is what it is: the same noise, and a stop as soon as 1 is outside."""
    draw, wrong, rounds = random.Random(5), 0, 200
    for _ in range(rounds):
        first, second = [], []
        for _ in range(40):
            a, b = _pair(draw, 0.0, 0.05)
            first.append(a)
            second.append(b)
            found = interval_of(first, second)
            if found.faster or found.slower:
                wrong += 1
                break
    assert wrong / rounds > 0.15


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_each_side_is_first_as_often_as_second(seed, blocks):
    order = list(itertools.islice(turns(seed), 2 * blocks))
    assert all(set(pair) == {Side.WITH, Side.WITHOUT} for pair in order)
    assert Counter(pair[0] for pair in order) == {Side.WITH: blocks, Side.WITHOUT: blocks}
    for k in range(0, 2 * blocks, 2):  # ABBA or BAAB
        assert order[k] == order[k + 1][::-1]
    assert order == list(itertools.islice(turns(seed), 2 * blocks))


def test_blocks_begin_with_either_side():
    begins = {next(turns(seed))[0] for seed in range(20)}
    assert begins == {Side.WITH, Side.WITHOUT}
