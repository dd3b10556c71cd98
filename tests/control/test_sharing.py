"""Fair sharing: pure functions, held against slow ones and against what they promise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.shared_out import Case, cases, share
from headrace.control.sharing import demand_after, fill

RATES = [0.0, 1.0, 2.0, 5.0, 10.0, 40.0, 1000.0]


@st.composite
def filled(draw):
    n = draw(st.integers(0, 8))
    groups = draw(st.integers(1, 3))
    low = [draw(st.sampled_from([0.0, 0.0, 1.0, 5.0])) for _ in range(n)]
    high = [max(a, draw(st.sampled_from([*RATES, math.inf]))) for a in low]
    return (
        np.array([draw(st.integers(0, groups - 1)) for _ in range(n)], np.int64),
        np.array([draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) for _ in range(n)]),
        np.array(low),
        np.array(high),
        np.array([draw(st.sampled_from([*RATES, math.inf])) for _ in range(groups)]),
    )


def slowly(weight, low, high, amount):
    """One group, by bisection."""
    if low.sum() > amount:
        return low * amount / low.sum()
    if high.sum() <= amount:
        return high
    a, b = 0.0, 1e9
    for _ in range(200):
        level = (a + b) / 2
        a, b = (level, b) if np.clip(level * weight, low, high).sum() < amount else (a, level)
    return np.clip(a * weight, low, high)


@settings(max_examples=100, deadline=None)
@given(filled())
def test_filling_equals_bisection(given_):
    group, weight, low, high, amount = given_
    shares = fill(*given_)
    for g in range(len(amount)):
        mine = group == g
        if mine.any():
            expected = slowly(weight[mine], low[mine], high[mine], amount[g])
            np.testing.assert_allclose(shares[mine], expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_what_is_shared_out_keeps_to_every_bound(case):
    shares = share(case)
    p = case.problem
    tolerance = 1e-6
    reserved = np.where(p.held[:, None], p.grant, 0.0)
    for s in range(len(p.capacity)):
        jobs = np.flatnonzero(p.system[p.user] == s)
        flows = np.isin(p.job, jobs)
        most = np.maximum(p.capacity[s], reserved[flows].sum(axis=0))
        assert np.all(shares.jobs[jobs].sum(axis=0) <= most + tolerance)
    for j in range(len(p.user)):
        held = reserved[p.job == j].sum(axis=0)
        assert np.all(shares.jobs[j] <= np.maximum(p.job_cap[j], held) + tolerance)
        total = shares.flows[p.job == j].sum(axis=0)
        assert np.all(total <= np.maximum(shares.jobs[j], held) + tolerance)
    assert np.all(shares.flows[p.held] == p.grant[p.held])
    assert np.all(shares.flows >= 0)


@settings(max_examples=60, deadline=None)
@given(cases(held=False))
def test_nothing_idles_while_anybody_waits(case):
    """What a job lacks is for want of capacity or because of a cap, its own or its user's."""
    shares, p = share(case), case.problem
    demand = np.zeros(shares.jobs.shape)
    np.add.at(demand, p.job, p.demand)
    for r in range(demand.shape[1]):
        for j in range(len(p.user)):
            want = min(demand[j, r], p.job_cap[j, r])
            if shares.wanted[j, r] >= want * (1 - 1e-6) - 1e-6:
                continue
            mates = p.user == p.user[j]
            user_full = shares.wanted[mates, r].sum() >= p.user_cap[p.user[j], r] * (1 - 1e-6)
            system = p.system[p.user[j]]
            there = np.isin(p.user, np.flatnonzero(p.system == system))
            full = shares.wanted[there, r].sum() >= p.capacity[system, r] * (1 - 1e-6)
            assert full or user_full


@settings(max_examples=60, deadline=None)
@given(cases(held=False))
def test_who_wants_nothing_gets_nothing_while_anybody_waits(case):
    shares, p = share(case), case.problem
    demand = np.zeros(shares.jobs.shape)
    np.add.at(demand, p.job, p.demand)
    assert np.all(shares.wanted <= demand + 1e-6)
    idle = demand == 0
    assert np.all(shares.wanted[idle] == 0)


def shares_of(*demands, capacity=100.0, **columns):
    """Jobs of one user on one file system, one plane each; bytes alone."""
    shares = share(Case.of_jobs(demands, capacity, **columns))
    return shares.wanted[:, 0].round(6).tolist()


INF = math.inf


@pytest.mark.parametrize(
    ("demands", "columns", "expected"),
    [
        ((INF, INF), {}, [50, 50]),
        ((INF, INF), {"weight": [3, 1]}, [75, 25]),
        ((10, INF), {}, [10, 90]),
        ((INF, INF, 10), {"weight": [2, 1, 1]}, [60, 30, 10]),
        ((INF, INF), {"cap": [20, INF]}, [20, 80]),
        ((INF, INF), {"guarantee": [70, 0]}, [70, 30]),
        ((30, INF), {"guarantee": [70, 0]}, [30, 70]),
        ((0, INF), {"guarantee": [70, 0]}, [0, 100]),
        ((INF, INF), {"priority": [1, 0]}, [100, 0]),
        ((60, INF), {"priority": [1, 0]}, [60, 40]),
        ((INF, INF), {"priority": [1, 0], "guarantee": [0, 25]}, [75, 25]),
        ((INF, INF, INF), {"priority": [-1, 0, 0]}, [0, 50, 50]),
        ((INF, INF), {"guarantee": [90, 60]}, [60, 40]),
    ],
)
def test_what_the_words_of_a_policy_mean(demands, columns, expected):
    assert shares_of(*demands, **columns) == pytest.approx(expected)


def test_what_nobody_wants_is_ready_for_whoever_wakes():
    shares = share(Case.of_jobs((10, 0), 100.0))
    assert shares.wanted[:, 0].tolist() == [10, 0]
    assert shares.jobs[:, 0].tolist() == [50, 50]


@pytest.mark.parametrize(
    ("before", "used", "held_s", "waiting", "expected"),
    [
        (0.0, 100.0, 0.0, 0.0, 105.0),
        (1000.0, 0.0, 0.0, 0.0, 62.5),
        (INF, 100.0, 0.0, 0.0, 105.0),
        (0.0, 100.0, 0.5, 0.0, INF),
        (0.0, 0.0, 0.0, 5.0, INF),
        (1.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_demand_is_what_was_used_unless_it_waited(before, used, held_s, waiting, expected):
    assert demand_after(before, used, 1.0, held_s, waiting) == pytest.approx(expected)
