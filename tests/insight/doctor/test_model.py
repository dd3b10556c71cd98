"""The model: more of what helps never makes it slower, and nothing is faster than its parts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.insight.doctor.findings import (
    Curve,
    Work,
    ahead_rate,
    stall_of,
    torch_rate,
    torch_shares,
)

RATES = st.floats(1.0, 1e6)
TIMES = st.floats(0.0, 0.1)
WORKERS = st.integers(0, 64)


@st.composite
def curves(draw):
    depths = draw(st.lists(st.integers(1, 256), min_size=1, max_size=5, unique=True))
    return Curve.through([(float(d), draw(RATES)) for d in depths])


works = st.builds(
    Work, curve=curves(), cold=st.floats(0.0, 1.0), wait_factor=st.floats(0.5, 2.0),
    read_s=st.floats(1e-6, 0.01), cold_read_s=TIMES, ahead_s=st.floats(0.0, 0.01), decode_s=TIMES,
    collate_s=TIMES, ahead_collate_s=TIMES, cpus=st.floats(0.5, 128.0), others=st.floats(0.0, 64.0),
)  # fmt: skip


def at_least(a, b):
    return a >= b * (1 - 1e-6)


@given(curves(), st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_a_curve_never_falls_and_ends_flat(curve, a, b):
    low, high = sorted((a, b))
    assert curve.rate(low) <= curve.rate(high) <= curve.most
    assert curve.rate(1e9) == curve.most


@pytest.mark.parametrize(
    "points", [[], [(0.0, 1.0)], [(1.0, 0.0)], [(1.0, math.inf)], [(1.0, math.nan)]]
)
def test_a_curve_through_nonsense_is_refused(points):
    with pytest.raises(ValueError, match="expected positive"):
        Curve.through(points)


@given(works, WORKERS, WORKERS)
def test_more_workers_are_never_slower(work, a, b):
    few, many = sorted((a, b))
    assert at_least(torch_rate(work, many), torch_rate(work, few))
    assert at_least(ahead_rate(work, many), ahead_rate(work, few))


@given(works, WORKERS, st.floats(1.0, 10.0))
def test_what_takes_longer_is_never_faster(work, workers, factor):
    rate = torch_rate(work, workers)
    for name in ("decode_s", "collate_s", "read_s", "cold_read_s", "wait_factor"):
        slower = replace(work, **{name: getattr(work, name) * factor})
        assert at_least(rate, torch_rate(slower, workers)), name
    more_cpus = replace(work, cpus=work.cpus * factor)
    assert at_least(torch_rate(more_cpus, workers), rate)
    quicker = replace(
        work, curve=Curve(work.curve.depths, tuple(r * factor for r in work.curve.rates))
    )
    assert at_least(torch_rate(quicker, workers), rate)


@given(works, WORKERS)
def test_nothing_is_faster_than_its_parts(work, workers):
    customers = max(1, workers)
    for rate, cpu_s in (
        (torch_rate(work, workers), work.torch_cpu_s),
        (ahead_rate(work, workers), min(work.worker_cpu_s, work.torch_cpu_s)),
    ):
        assert rate >= 0.0
        assert rate * cpu_s <= min(customers, work.cpus) * (1 + 1e-6)
        if work.cold > 0:
            assert rate * work.cold <= work.curve.most * (1 + 1e-6)


@given(works, WORKERS)
def test_reading_ahead_is_never_slower(work, workers):
    assert at_least(ahead_rate(work, workers), min(torch_rate(work, workers), work.curve.most))


@given(works, WORKERS)
def test_shares_add_up(work, workers):
    shares = torch_shares(work, workers)
    assert all(part >= 0.0 for part in shares.values())
    assert sum(shares.values()) <= 1.0 + 1e-6
    if work.cold == 0.0:
        assert sum(shares.values()) == pytest.approx(1.0)


@given(works, WORKERS)
def test_all_workers_are_busy_at_the_rate(work, workers):
    """Its own equation, asked backwards: processors' part, and as many reads in flight as give the rest."""
    customers, rate = max(1, workers), torch_rate(work, workers)
    working = customers * sum(torch_shares(work, workers).values())
    waiting = (customers - working) / work.wait_factor
    if work.cold > 1e-6 and waiting > 1e-6:  # a smaller difference has few digits left
        assert at_least(work.curve.rate(waiting), rate * work.cold)


@given(works, st.floats(0.1, 256.0))
def test_processors_are_shared_fairly(work, wanted):
    got = work.share_of_cpus(wanted)
    assert 0.0 < got <= min(wanted, work.cpus) * (1 + 1e-9)


@given(st.floats(0.0, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_stall_is_a_share(rate, wanted, in_turn):
    assert 0.0 <= stall_of(rate, wanted, in_turn=in_turn) <= 1.0


def test_one_reader_of_a_slow_disk_waits_its_turn():
    """Ten milliseconds a read, ten a decode, one worker: fifty a second. Read ahead: a hundred."""
    work = Work(curve=Curve.through([(1.0, 100.0), (16.0, 1600.0)]), decode_s=0.01, read_s=1e-9)
    assert torch_rate(work, 1) == pytest.approx(50.0, rel=0.01)
    assert ahead_rate(work, 1) == pytest.approx(100.0, rel=0.01)


def test_workers_overlap_their_waits():
    curve = Curve.through([(1.0, 100.0), (4.0, 400.0), (64.0, 400.0)])
    work = Work(curve=curve, cpus=16.0, read_s=1e-9)
    assert [round(torch_rate(work, n)) for n in (0, 1, 2, 4, 8)] == [100, 100, 200, 400, 400]


def test_loading_and_training_in_turn():
    assert stall_of(1000.0, 1000.0, in_turn=True) == pytest.approx(0.5)
    assert stall_of(1000.0, 1000.0) == 0.0
    assert stall_of(500.0, 1000.0) == pytest.approx(0.5)
    assert stall_of(0.0, 10.0) == 1.0
