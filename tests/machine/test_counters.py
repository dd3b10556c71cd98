"""Counters wrap, begin anew, vanish, and are nonsense: what grew is never negative, and never a leap."""

import math

from hypothesis import given
from hypothesis import strategies as st

from headrace.machine.sensors import Growth, grown


@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 31) - 1))
def test_a_counter_of_32_bits_that_wraps_has_grown_by_what_was_added(before, added):
    if before <= 1 << 31:
        added = min(added, (1 << 32) - 1 - before)  # from the lower half nothing wraps
    assert grown(before, (before + added) % (1 << 32), 32) == added


def test_a_counter_that_begins_anew_counts_from_zero():
    assert grown(1000, 30) == 30
    assert grown(1000, 0) == 0
    assert grown(5e9, 30, 32) == 30


@given(st.floats(), st.floats(), st.sampled_from([32, 64]))
def test_growth_is_never_negative_nor_infinite(before, now, bits):
    growth = grown(before, now, bits)
    assert 0 <= growth < math.inf


def test_what_no_counter_shows_has_not_grown():
    assert grown(3e9, -1294967297.0, 32) == grown(-5.0, 3.0) == grown(math.nan, 1.0) == 0.0


def test_what_is_new_has_grown_by_nothing_and_what_comes_back_is_new():
    growth, key = Growth(), ("disk_reads", "sda")
    assert growth.since({key: 1e12}) == {key: 0.0}
    assert growth.since({key: 1e12 + 5}) == {key: 5.0}
    assert growth.since({}) == {}
    assert growth.since({key: 7.0}) == {key: 0.0}
