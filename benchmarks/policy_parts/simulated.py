"""Simulated workloads: no storage, no network. How well two ways of sharing use one capacity.

Jobs come and go, sleep and wake; what each could use is known here and to nobody else. Both
controllers see the same: what was used in each second, and headrace also who waited.
"""

from __future__ import annotations

import secrets
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.policy_parts.psfa import UNDECLARED, Psfa
from headrace.control.messages import API, Flow, Register, Report
from headrace.control.policy import parse_policy
from headrace.control.service.arbiter import Arbiter

CAPACITY = 1000.0
SIMULATED = "simulation: no storage, no network"


@dataclass(frozen=True)
class Workload:
    """What jobs could use in each second: [seconds, jobs]."""

    name: str
    demand: np.ndarray
    declared: np.ndarray


def workloads(seconds: int = 240, jobs: int = 20) -> list[Workload]:
    """Three kinds, with fixed seeds."""
    random = np.random.default_rng(11)
    most = random.choice([20.0, 60.0, 150.0, 400.0], jobs)
    steady = np.tile(most, (seconds, 1))
    bursts = steady.copy()
    for j in range(jobs):
        at = 0
        while at < seconds:
            busy, idle = random.integers(5, 25), random.integers(5, 40)
            bursts[at + busy : at + busy + idle, j] = 0.0
            at += busy + idle
    undeclared = np.where(random.random(jobs) < 0.5, UNDECLARED, most)
    return [
        Workload("steady, declared", steady, most),
        Workload("bursts, declared", bursts, most),
        Workload("bursts, half undeclared", bursts, undeclared),
    ]


def _score(demand: np.ndarray, rates: np.ndarray) -> dict[str, float]:
    """Shares of the capacity that could be used: idle, and given to those who did not use it."""
    used = np.minimum(rates, demand)
    usable = np.minimum(CAPACITY, demand.sum(axis=1))
    busy = usable > 0
    idle = np.maximum(usable - used.sum(axis=1), 0.0)
    waits = (demand > rates * 1.001 + 1e-6).any(axis=1)
    unused = np.maximum(rates - demand, 0.0).sum(axis=1) * waits
    fair = np.minimum(demand, CAPACITY / np.maximum((demand > 0).sum(axis=1), 1)[:, None])
    short = np.maximum(fair - used, 0.0).sum(axis=1)
    over = np.maximum(rates.sum(axis=1) - CAPACITY, 0.0)
    return {
        "idle_share": float(idle[busy].sum() / usable[busy].sum()),
        "false_allocation_share": float(unused.sum() / (CAPACITY * len(demand))),
        "below_fair_share": float(short[busy].sum() / usable[busy].sum()),
        "over_capacity_share": float(over.sum() / (CAPACITY * len(demand))),
    }


def _psfa(workload: Workload, collect_every: int) -> np.ndarray:
    names = [f"job-{j}" for j in range(workload.demand.shape[1])]
    declared = dict(zip(names, workload.declared.tolist(), strict=True))
    controller = Psfa(CAPACITY, collect_every)
    rate = np.full(len(names), CAPACITY / len(names))
    found = []
    for demand in workload.demand:
        found.append(rate)
        used = np.minimum(rate, demand)
        rates = controller.decide(dict(zip(names, used.tolist(), strict=True)), declared)
        rate = np.array([rates[name] for name in names])
    return np.array(found)


def _headrace(workload: Workload, pace_s: float) -> np.ndarray:
    """One plane that reports every `pace_s`; returns what each job might use in each interval."""
    jobs = workload.demand.shape[1]
    policy = parse_policy(
        f"file_systems: {{fs: {{paths: [/fs], capacity: {{bytes_per_s: {CAPACITY}}}}}}}"
    )
    arbiter = Arbiter(policy, "simulated", 1, 0.0)
    lease = arbiter.register(Register(API, "n", "u", 1, secrets.token_hex(16)), 0.0)
    rate = np.full(jobs, CAPACITY / jobs)
    found = []
    steps = round(1 / pace_s)
    for step, demand in enumerate(np.repeat(workload.demand, steps, axis=0)):
        found.append(rate)
        flows = []
        for j in range(jobs):
            waits = float(demand[j] > rate[j] * 1.001)
            flows.append(
                Flow(
                    f"job-{j}", "fs", (float(min(rate[j], demand[j])) * pace_s, 0.0, 0.0),
                    (waits * float(demand[j]), 0.0, 0.0), (waits * pace_s, 0.0, 0.0),
                )
            )  # fmt: skip
        lease = arbiter.report(lease.plane, Report(step + 1, pace_s, flows), (step + 1) * pace_s)
        granted = {grant.job: grant.rates[0] for grant in lease.grants}
        rate = np.array([granted.get(f"job-{j}") or 0.0 for j in range(jobs)])
    return np.array(found)


def compare() -> list[dict[str, Any]]:
    """Both on every workload."""
    rows = []
    for workload in workloads():
        fine = np.repeat(workload.demand, 4, axis=0)
        for name, demand, rates in (
            ("headrace, a report a second", workload.demand, _headrace(workload, 1.0)),
            ("headrace, four a second", fine, _headrace(workload, 0.25)),
            ("PSFA, a cycle a second", workload.demand, _psfa(workload, 5)),
            ("PSFA, looking every cycle", workload.demand, _psfa(workload, 1)),
        ):
            rows.append(
                {"workload": workload.name, "sharing": name, "label": SIMULATED}
                | _score(demand, rates)
            )
    return rows


def decision_time(planes: int = 1000, jobs: int = 5000, rounds: int = 15) -> dict[str, Any]:
    """Seconds for one decision, everything counted, and for one report."""
    random = np.random.default_rng(5)
    rules = ", ".join(f"job-{j}: {{weight: {1 + j % 3}}}" for j in range(0, jobs, 3))
    policy = parse_policy(
        "file_systems:\n"
        "  a: {paths: [/a], capacity: {bytes_per_s: 20G, reads_per_s: 1M, metadata_per_s: 100k}}\n"
        "  b: {paths: [/b], capacity: {bytes_per_s: 5G}}\n"
        f"jobs: {{{rules}}}"
    )
    arbiter = Arbiter(policy, "simulated", 1, 0.0)
    leases = [
        arbiter.register(Register(API, f"n{p}", f"u{p % 200}", 1, secrets.token_hex(16)), 0.0)
        for p in range(planes)
    ]
    on = [[*range(p, jobs, planes), int(random.integers(jobs))] for p in range(planes)]
    reports = []
    for p in range(planes):
        flows = []
        for j in sorted(set(on[p])):
            used = float(random.integers(0, 50_000_000))
            waits = float(random.random() < 0.5)
            flows.append(
                Flow(
                    f"job-{j}", "ab"[j % 2], (used, used / 1e5, 1.0), (waits * 1e6, 0.0, 0.0),
                    (waits, 0.0, 0.0),
                )
            )  # fmt: skip
        reports.append(flows)
    began = time.perf_counter()
    for p in range(planes):
        arbiter._count_flows(leases[p].plane, Report(1, 1.0, reports[p]), 0.5)  # noqa: SLF001
    count_s = (time.perf_counter() - began) / planes
    times, cpu = [], []
    for i in range(rounds):
        arbiter._stale, arbiter._decided_at = True, -1e9  # noqa: SLF001
        began, cpu_s = time.perf_counter(), time.thread_time()
        arbiter.decide(1.0 + i * 1e-3)
        times.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - cpu_s)
    return {
        "label": SIMULATED, "planes": planes, "jobs": len(arbiter.jobs()),
        "flows": sum(arbiter.jobs().values()), "first_s": times[0],
        "median_s": statistics.median(times[1:]), "max_s": max(times[1:]),
        "median_cpu_s": statistics.median(cpu[1:]),
        "count_one_report_s": count_s,
    }  # fmt: skip
