"""Limits, in a time that the test makes."""

import numpy as np
import pytest

from headrace.plane.rate_limit import BURST_S, Cost, Limit


class Consumer:
    """Takes all it can get of a limit, in batches."""

    def __init__(self, limit, batch, now=0.0):
        self.limit, self.batch, self.now = limit, batch, now
        self.taken = []

    def until(self, end, late=0.0):
        while True:
            wait_s = self.limit.wait_s(self.batch, self.now)
            if wait_s:
                self.limit.hold(self, self.batch, self.now)
                self.now += wait_s + late
                self.limit.let_go(self, self.now)
            if self.now >= end:
                return
            self.limit.spend(self.batch)
            self.taken.append((self.now, self.batch.bytes))


def most_and_least(taken, window_s, end):
    """Bytes in the windows that hold most and least, beginning at each batch."""
    at = np.array([when for when, _ in taken])
    before = np.concatenate([[0.0], np.cumsum([size for _, size in taken])])
    begins = at[at + window_s <= end]
    found = before[np.searchsorted(at, begins + window_s)] - before[np.searchsorted(at, begins)]
    return found.max(), found.min()


@pytest.mark.parametrize("late", [0.0, 0.004, 0.02])
@pytest.mark.parametrize("batch", [1000, 20_000])
def test_a_cap_is_kept_within_2_percent_over_any_5_s(batch, late):
    rate = 1_000_000
    limit = Limit(0.0)
    limit.set_rates((rate, None, None), 0.0)
    consumer = Consumer(limit, Cost(batch, 1))
    consumer.until(15.0, late)
    most, least = most_and_least(consumer.taken, 5.0, 15.0)
    assert most <= 1.02 * 5 * rate + batch
    assert least >= 0.98 * 5 * rate - batch
    assert BURST_S <= 0.1


def test_operations_are_limited_beside_bytes():
    limit = Limit(0.0)
    limit.set_rates((1e6, 10.0, 5.0), 0.0)
    consumer = Consumer(limit, Cost(10.0, 1.0))
    consumer.until(10.0)
    assert len(consumer.taken) == pytest.approx(100, abs=3)
    usage = limit.take_usage(10.0)
    assert usage.held_s[1] == pytest.approx(10.0, abs=0.2)  # it is the reads that held it
    assert usage.held_s[0] == usage.held_s[2] == 0.0
    # Metadata is another bucket: nothing was taken of it.
    assert limit.wait_s(Cost(metadata=1.0), 10.0) == 0.0


def test_what_was_not_needed_is_paid_back():
    limit = Limit(0.0)
    limit.set_rates((100.0, None, None), 0.0)
    limit.spend(Cost(1000.0))
    assert limit.wait_s(Cost(1.0), 0.0) == pytest.approx(10.0)
    limit.spend(Cost(-1000.0))
    assert limit.wait_s(Cost(1.0), 0.0) == 0.0
    assert limit.take_usage(1.0).used == (0.0, 0.0, 0.0)


def test_what_is_paid_back_late_does_not_make_usage_negative():
    limit = Limit(0.0)
    limit.spend(Cost(10.0))
    assert limit.take_usage(1.0).used[0] == 10.0
    limit.spend(Cost(-4.0))
    assert limit.take_usage(2.0).used[0] == 0.0
    limit.spend(Cost(5.0))
    assert limit.take_usage(3.0).used[0] == 1.0


def test_a_limit_can_be_turned_at_run_time():
    limit = Limit(0.0)
    assert not limit.limited
    limit.set_rates((10.0, None, None), 0.0)
    limit.spend(Cost(10.0))
    limit.set_rates((1000.0, None, None), 0.0)
    assert limit.wait_s(Cost(1.0), 0.0) == pytest.approx(0.01)
    limit.set_rates((None, None, None), 0.0)
    assert limit.wait_s(Cost(1.0), 0.0) == 0.0
    with pytest.raises(ValueError, match="bytes_per_s is 0"):
        limit.set_rates((0, None, None), 0.0)
    assert not limit.limited


def test_who_waits_and_how_long_is_told():
    limit = Limit(0.0)
    limit.set_rates((10.0, None, None), 0.0)
    limit.spend(Cost(100.0))
    limit.hold("one", Cost(5.0), 1.0)
    limit.hold("two", Cost(7.0), 2.0)
    usage = limit.take_usage(3.0)
    assert usage.waiting == (12.0, 0.0, 0.0)
    assert usage.held_s == (2.0, 0.0, 0.0)
    limit.let_go("one", 4.0)
    limit.let_go("two", 5.0)
    assert limit.take_usage(9.0).held_s == (2.0, 0.0, 0.0)
    assert limit.take_usage(10.0).idle
