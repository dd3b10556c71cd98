"""Problems of sharing, small ones that hypothesis draws and ones of one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from headrace.control.sharing import SharingProblem, decide

INF = math.inf


@dataclass(frozen=True)
class Case:
    problem: SharingProblem

    @staticmethod
    def of_jobs(demands, capacity, *, weight=None, cap=None, guarantee=None, priority=None):
        n = len(demands)

        def column(values, default):
            filled = [default] * n if values is None else values
            return np.array([[float(v), INF, INF] for v in filled])

        return Case(
            SharingProblem(
                capacity=np.array([[capacity, INF, INF]]),
                system=np.zeros(1, np.int64),
                user_weight=np.ones(1),
                user_cap=np.full((1, 3), INF),
                user_guarantee=np.zeros((1, 3)),
                user=np.zeros(n, np.int64),
                job_weight=np.array(weight or [1.0] * n, float),
                job_cap=column(cap, INF),
                job_guarantee=np.where(
                    np.isinf(column(guarantee, 0.0)), 0.0, column(guarantee, 0.0)
                ),
                priority=np.array(priority or [0] * n, np.int64),
                job=np.arange(n),
                demand=np.array([[float(d), 0.0, 0.0] for d in demands]),
                held=np.zeros(n, bool),
                grant=np.zeros((n, 3)),
            )
        )


def share(case):
    with np.errstate(all="raise", under="ignore"):
        return decide(case.problem)


@st.composite
def cases(draw, *, held=True, resources=2):
    rate = st.sampled_from([0.0, 1.0, 3.0, 10.0, 30.0, 100.0])
    limit = st.one_of(rate.filter(bool), st.just(INF))

    def rows(n, values):
        drawn = [[draw(values) for _ in range(resources)] for _ in range(n)]
        return np.array(drawn, float).reshape(n, resources)

    def integers(n, below):
        return np.array([draw(st.integers(0, below - 1)) for _ in range(n)], np.int64)

    systems, users = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    jobs, flows = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    weights = st.sampled_from([0.5, 1.0, 2.0, 7.0])
    job_cap, user_cap = rows(jobs, limit), rows(users, limit)
    return Case(
        SharingProblem(
            capacity=rows(systems, limit),
            system=integers(users, systems),
            user_weight=np.array([draw(weights) for _ in range(users)]),
            user_cap=user_cap,
            user_guarantee=np.minimum(rows(users, rate), user_cap),
            user=integers(jobs, users),
            job_weight=np.array([draw(weights) for _ in range(jobs)]),
            job_cap=job_cap,
            job_guarantee=np.minimum(rows(jobs, rate), job_cap),
            priority=integers(jobs, 3) - 1,
            job=integers(flows, jobs),
            demand=rows(flows, st.one_of(rate, st.just(INF))),
            held=np.array([held and draw(st.booleans()) for _ in range(flows)], bool),
            grant=rows(flows, rate),
        )
    )
