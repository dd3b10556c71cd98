"""Arbiter: what the controller knows of its planes, and the leases that it gives them.

No socket, no thread, no file, no clock: the caller passes the time of a monotonic clock. A report comes
in, a lease goes out. A plane that is silent keeps what its lease gave it until that ends, and then has
nothing; nobody else is given it before.

All flows are rows of a table, so that deciding about thousands takes milliseconds. A flow is what one
plane reads for one job on one file system. Jobs, users and file systems are numbered anew only when somebody
comes or goes, or the policy changes.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.control.messages import Grant, Lease, Place, PlaneState
from headrace.control.policy import OTHER, PRIORITIES, RESOURCES, Policy, SharedFileSystem
from headrace.control.service.auth import Refused
from headrace.control.sharing import SharingProblem, SharingResult, decide, demand_after
from headrace.plane.stage import LATENCY_BUCKETS, latency_bucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from headrace.control.messages import Flow, Register, Report
    from headrace.control.policy import Rates

PLANES_MAX = 10_000
FLOWS_MAX = 200_000

REPORT_S = 0.25
"""How often planes report while there are few: an unused share is seen and handed on within two."""
REPORT_S_MAX = 2.0
REPORTS_PER_S = 400  # what a controller answers without trouble, on a quarter of a core
SILENT_AFTER = 3.0  # a plane that has not reported for so many times its pace is silent
SILENT_S_MIN = 2.5  # a node that is busy may be late
IDLE_S = 30.0  # a flow that neither used nor wanted anything for so long is forgotten
DECIDE_SHARE = 0.1
"""Deciding takes at most this part of the time: however many planes report, it is not done anew."""

RATE_MIN = 1.0  # a rate of 0 could not be waited for


R = len(RESOURCES)
_FIRST_ROWS = 64

FlowKey = tuple[int, str, str, str]  # plane's number, user, job, file system


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Who is who, while nobody comes or goes."""

    systems: list[str]  # names by number
    problem: SharingProblem  # what does not change from one decision to the next
    system_of_flow: NDArray[np.int64]  # [flows]
    plane_of_flow: NDArray[np.int64]  # [flows] planes' numbers


class Table:
    """The flows: row by row what each used, wants, was told and is to get; each of shape [flows, R]."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.keys: list[FlowKey] = []  # of all flows, by row
        self._row: dict[FlowKey, int] = {}
        self._columns = np.zeros((4, _FIRST_ROWS, R))
        self._numbers: _Numbers | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def used(self) -> NDArray[np.float64]:
        """Per second, in the last interval."""
        return self._columns[0, : len(self)]

    @property
    def demand(self) -> NDArray[np.float64]:
        """Estimates, infinite for all it can get."""
        return self._columns[1, : len(self)]

    @property
    def grant(self) -> NDArray[np.float64]:
        """What the plane was last told; infinite: no limit."""
        return self._columns[2, : len(self)]

    @property
    def target(self) -> NDArray[np.float64]:
        """What was last decided."""
        return self._columns[3, : len(self)]

    def set_policy(self, policy: Policy) -> None:
        """Go by another policy from now on."""
        self._policy = policy
        self._numbers = None

    def row(self, key: FlowKey) -> int:
        """The row of a flow, made if there is none: it has nothing and wants nothing."""
        if key in self._row:
            return self._row[key]
        row = self._row[key] = len(self)
        if row == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, row] = 0.0
        self.keys.append(key)
        self._numbers = None
        return row

    def remove(self, key: FlowKey) -> None:
        """Forget a flow; the last one takes its row."""
        row, last = self._row.pop(key), self.keys.pop()
        if last != key:
            self.keys[row], self._row[last] = last, row
            self._columns[:, row] = self._columns[:, len(self)]
        self._numbers = None

    def numbers(self) -> _Numbers:
        """Who is who now."""
        if self._numbers is None:
            self._numbers = self._number()
        return self._numbers

    def problem(self, silent: Sequence[int]) -> SharingProblem:
        """What is to be decided; silent planes, by their numbers, keep what they have."""
        known = self.numbers()
        held = np.isin(known.plane_of_flow, silent)
        return replace(known.problem, demand=self.demand, held=held, grant=self.outstanding())

    def outstanding(self) -> NDArray[np.float64]:
        """[flows, R] what each may use: its grant; where that has no limit, what it uses."""
        return np.where(np.isfinite(self.grant), self.grant, self.used)

    def _number(self) -> _Numbers:
        keys, policy = self.keys, self._policy
        systems = sorted({*policy.file_systems, OTHER, *(key[3] for key in keys)})
        users = sorted({(key[3], key[1]) for key in keys})
        jobs = sorted({(key[3], key[1], key[2]) for key in keys})
        number_of = {name: i for i, name in enumerate(systems)}
        user_of = {name: i for i, name in enumerate(users)}
        job_of = {name: i for i, name in enumerate(jobs)}
        at_user = [policy.user(user).on(system) for system, user in users]
        at_job = [policy.job(job, user).on(system) for system, user, job in jobs]
        nothing = SharedFileSystem()
        capacities = (policy.file_systems.get(name, nothing).capacity for name in systems)
        flows = len(keys)
        problem = SharingProblem(
            capacity=_rates(capacities, np.inf),
            system=_integers(number_of[s] for s, _ in users),
            user_weight=np.array([r.weight for r in at_user], np.float64),
            user_cap=_rates((r.cap for r in at_user), np.inf),
            user_guarantee=_rates((r.guarantee for r in at_user), 0.0),
            user=_integers(user_of[s, u] for s, u, _ in jobs),
            job_weight=np.array([r.weight for r in at_job], np.float64),
            job_cap=_rates((r.cap for r in at_job), np.inf),
            job_guarantee=_rates((r.guarantee for r in at_job), 0.0),
            priority=_integers(PRIORITIES[r.priority] for r in at_job),
            job=_integers(job_of[key[3], key[1], key[2]] for key in keys),
            demand=np.zeros((flows, R)),
            held=np.zeros(flows, bool),
            grant=np.zeros((flows, R)),
        )
        return _Numbers(
            systems, problem,
            _integers(number_of[key[3]] for key in keys), _integers(key[0] for key in keys),
        )  # fmt: skip


def _integers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _rates(values: Iterable[Rates], missing: float) -> NDArray[np.float64]:
    return np.array([rates.values(missing) for rates in values], np.float64).reshape(-1, R)


@dataclass(slots=True, eq=False)
class PlaneRecord:
    """One plane."""

    key: str  # known to the plane alone
    number: int  # names it for everybody else
    name: str
    user: str
    pid: int
    instance: str
    reported_s: float  # when it was last heard, on the caller's clock
    until_s: float  # when its lease ends
    sequence: int = 0
    reports: int = 0
    state: PlaneState = field(default_factory=PlaneState)
    seen: dict[FlowKey, float] = field(default_factory=dict)  # when each flow last did something
    held_s: dict[FlowKey, float] = field(default_factory=dict)


class Arbiter:
    """Decides for all planes. Not thread-safe."""

    def __init__(self, policy: Policy, reign: str, epoch: int, now: float) -> None:
        self.policy = policy
        self.policy_version = 0
        self.reign = reign
        self.epoch = epoch
        self.reports = self.refused = self.expired = self.decisions = 0
        self.decide_s = self.decide_s_max = self.decide_s_sum = 0.0
        self.decide_us = [0] * LATENCY_BUCKETS
        self._table = Table(policy)
        self._planes: dict[str, PlaneRecord] = {}
        self._instances: dict[str, PlaneRecord] = {}
        self._next = 1
        self._decided_at = now - 1e9
        self._stale = True
        self.shares: SharingResult | None = None
        self._warm_up(now)

    # -- planes -----------------------------------------------------------------------------------

    def register(self, message: Register, now: float) -> Lease:
        """Register a plane, or one that comes again; raises Refused if there are too many."""
        before = self._instances.get(message.instance)
        if before is not None:
            self._remove(before)
        elif len(self._planes) >= PLANES_MAX:
            self.refused += 1
            raise Refused(503, f"{PLANES_MAX} planes are registered already")
        plane = PlaneRecord(
            secrets.token_hex(16), self._next, message.name, message.user, message.pid,
            message.instance, now, now + self.policy.lease_s,
        )  # fmt: skip
        self._enter(plane, ((g.job, g.file_system, g.rates) for g in message.holds), now)
        self._stale = True
        return self._lease(plane, now)

    def _enter(
        self,
        plane: PlaneRecord,
        grants: Iterable[tuple[str, str, Iterable[float | None]]],
        now: float,
    ) -> None:
        """Count a plane with what it may use already."""
        self._next += 1
        self._planes[plane.key] = plane
        self._instances[plane.instance] = plane
        for job, system, rates in grants:
            row = self._flow(plane, (plane.number, plane.user, job, system), now)
            self._table.grant[row] = [math.inf if rate is None else rate for rate in rates]

    def report(self, key: str, message: Report, now: float) -> Lease:
        """Count a plane's report; returns what it may use.

        Raises Refused if it is not known (404: register again), or says something twice (409).
        """
        plane = self._planes.get(key)
        if plane is None:
            self.refused += 1
            raise Refused(404, "no such plane: register first")
        if message.sequence <= plane.sequence:
            self.refused += 1
            what = f"report {message.sequence} after {plane.sequence}: replayed, or late"
            raise Refused(409, what)
        plane.sequence = message.sequence
        plane.reports += 1
        self.reports += 1
        if now - plane.reported_s > self._silent_s:
            self.shares = None  # it was held to what it had: decide anew
        plane.reported_s = now
        plane.state = message.state
        seconds = max(message.seconds, 1e-3)
        reported: set[FlowKey] = set()
        for flow in message.flows:
            flow_key = (plane.number, plane.user, flow.job, flow.file_system)
            reported.add(flow_key)
            self._count_flow(plane, flow_key, flow, seconds, now)
        for flow_key in [k for k in plane.seen if k not in reported]:
            self._rest(plane, flow_key, now)
        return self._lease(plane, now)

    def leave(self, key: str) -> None:
        """Forget a plane that ends, and free what it had; raises Refused if it is not known."""
        plane = self._planes.get(key)
        if plane is None:
            raise Refused(404, "no such plane")
        self._remove(plane)
        self._stale = True

    def expire(self, now: float) -> None:
        """Forget planes whose lease has ended: what they had is free."""
        for plane in [p for p in self._planes.values() if now > p.until_s]:
            self.expired += 1
            self._remove(plane)
            self._stale = True

    def _remove(self, plane: PlaneRecord) -> None:
        for key in plane.seen:
            self._table.remove(key)
        plane.seen.clear()
        del self._planes[plane.key]
        if self._instances.get(plane.instance) is plane:
            del self._instances[plane.instance]

    def _flow(self, plane: PlaneRecord, key: FlowKey, now: float) -> int:
        if key not in plane.seen and len(self._table) >= FLOWS_MAX:
            raise Refused(503, f"{FLOWS_MAX} flows are known already")
        plane.seen.setdefault(key, now)
        return self._table.row(key)

    def _count_flow(
        self, plane: PlaneRecord, key: FlowKey, flow: Flow, seconds: float, now: float
    ) -> None:
        row = self._flow(plane, key, now)
        plane.held_s[key] = plane.held_s.get(key, 0.0) + max(flow.held_s)
        demand, held = self._table.demand[row], any(flow.waiting)
        amounts = zip(flow.used, flow.waiting, flow.held_s, strict=True)
        for r, (used, waiting, held_s) in enumerate(amounts):
            demand[r] = demand_after(float(demand[r]), used, seconds, held_s, waiting, held=held)
            self._table.used[row, r] = used / seconds
        if held or any(flow.used):
            plane.seen[key] = now
        self._stale = True

    def _rest(self, plane: PlaneRecord, key: FlowKey, now: float) -> None:
        """A flow of which the plane says nothing: nobody uses it."""
        row = self._table.row(key)
        self._table.used[row] = 0.0
        self._table.demand[row] = 0.0
        self._stale = True
        if now - plane.seen[key] > IDLE_S:
            self._table.remove(key)
            del plane.seen[key]
            plane.held_s.pop(key, None)

    # -- deciding ---------------------------------------------------------------------------------

    @property
    def report_s(self) -> float:
        """How often planes shall report."""
        pace = min(REPORT_S_MAX, max(REPORT_S, len(self._planes) / REPORTS_PER_S))
        return min(pace, self.policy.lease_s / 4)

    def set_policy(self, policy: Policy, version: int) -> None:
        """Go by another policy; planes hear of it when they next report."""
        self.policy = policy
        self.policy_version = version
        self._table.set_policy(policy)
        self._stale = True

    def _warm_up(self, now: float) -> None:
        """Decide once for nothing: the first time, numpy's parts are loaded."""
        self.decide(now)
        self._stale = True
        self.decide(now + REPORT_S_MAX)
        self.decide_s_max = self.decide_s
        self.decide_s_sum, self.decide_us = 0.0, [0] * LATENCY_BUCKETS
        self._decided_at, self._stale = now - 1e9, True

    def decide(self, now: float) -> SharingResult:
        """Share everything out anew, unless that was done a moment ago."""
        self.expire(now)
        fresh = now - self._decided_at < min(self.decide_s / DECIDE_SHARE, REPORT_S_MAX)
        if self.shares is not None and fresh and len(self.shares.flows) == len(self._table):
            return self.shares
        if self._stale or self.shares is None:
            began = time.thread_time()  # a busy machine must not make it decide less often
            limit = self._silent_s
            silent = [p.number for p in self._planes.values() if now - p.reported_s > limit]
            self.shares = decide(self._table.problem(silent))
            self._table.target[:] = self.shares.flows
            self.decide_s = time.thread_time() - began
            self.decide_s_max = max(self.decide_s_max, self.decide_s)
            self.decide_s_sum += self.decide_s
            self.decide_us[latency_bucket(self.decide_s)] += 1
            self.decisions += 1
            self._decided_at = now
            self._stale = False
        return self.shares

    @property
    def _silent_s(self) -> float:
        return max(SILENT_S_MIN, SILENT_AFTER * self.report_s)

    def _lease(self, plane: PlaneRecord, now: float) -> Lease:
        self.decide(now)
        policy = self.policy
        rates = self._granted(plane) if plane.seen else ()
        grants = [Grant(*k[2:], _lease_rates(r)) for k, r in zip(plane.seen, rates, strict=True)]
        plane.until_s = now + policy.lease_s
        expired = policy.when_expired
        caches = {
            job: rule.cache_bytes
            for job in {key[2] for key in plane.seen}
            if (rule := policy.job(job, plane.user)).cache_bytes is not None
        }
        return Lease(
            plane.key, self.reign, self.epoch, plane.sequence, policy.lease_s, self.report_s,
            None if expired is None else _lease_rates(np.array(expired.values(math.inf))),
            [Place(name, list(fs.paths)) for name, fs in policy.file_systems.items() if fs.paths],
            grants, caches,
        )  # fmt: skip

    def _granted(self, plane: PlaneRecord) -> NDArray[np.float64]:
        """What the plane is told now: its target, as far as others do not hold it still."""
        table, numbers = self._table, self._table.numbers()
        mine = np.array([table.row(key) for key in plane.seen], np.int64)
        outstanding = table.outstanding()
        outstanding[mine] = 0.0
        problem = numbers.problem
        granted = table.target[mine]
        groups = (numbers.system_of_flow, problem.capacity), (problem.job, problem.job_cap)
        for group, amount in groups:
            granted = np.minimum(granted, _headroom(group, amount, outstanding, granted, mine))
        table.grant[mine] = granted
        return granted

    # -- for those who watch ----------------------------------------------------------------------

    def outstanding(self, now: float) -> list[dict[str, Any]]:
        """Leases that run, for the database: whoever rules next must not hand them out again."""
        table = self._table
        return [
            {
                "name": plane.name, "user": plane.user, "pid": plane.pid, "instance": plane.instance,
                "left_s": max(0.0, plane.until_s - now),
                "grants": [
                    [*key[2:], list(_named(table.grant[table.row(key)]).values())] for key in plane.seen
                ],
            }
            for plane in self._planes.values()
        ]  # fmt: skip

    def adopt(self, planes: Iterable[dict[str, Any]], now: float) -> None:
        """Take over leases that the controller before this one gave: they may run still."""
        for given in planes:
            plane = PlaneRecord(
                secrets.token_hex(16), self._next, given["name"], given["user"], given["pid"],
                given["instance"], now - 1e9, now + given["left_s"],
            )  # fmt: skip
            self._enter(plane, given["grants"], now)

    def users(self) -> set[str]:
        """Users that planes have reported."""
        return {plane.user for plane in self._planes.values()}

    def jobs(self) -> set[str]:
        """Jobs that planes have reported."""
        return {job for _, _, job, _ in self._table.keys}

    def describe(self, now: float) -> dict[str, Any]:
        """Everything that is known now, as plain values."""
        own = (
            "reign", "epoch", "policy_version", "report_s", "reports", "refused", "expired",
            "decisions", "decide_s", "decide_s_max", "decide_s_sum",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in own},
            "lease_s": self.policy.lease_s,
            "decide_us": list(self.decide_us),
            "planes": [self._describe(plane, now) for plane in self._planes.values()],
            "file_systems": self._systems(),
        }

    def _describe(self, plane: PlaneRecord, now: float) -> dict[str, Any]:
        state, table = plane.state, self._table
        flows = [
            {
                "job": key[2], "file_system": key[3], "used": _named(table.used[row]),
                "demand": _named(table.demand[row]), "granted": _named(table.grant[row]),
                "held_s": plane.held_s.get(key, 0.0),
            }
            for key, row in ((key, table.row(key)) for key in plane.seen)
        ]  # fmt: skip
        return {
            "number": plane.number, "name": plane.name, "user": plane.user, "pid": plane.pid,
            "reports": plane.reports, "silent_s": max(0.0, min(now - plane.reported_s, 1e6)),
            "lease_left_s": max(0.0, plane.until_s - now), "flows": flows,
            "held_bytes": state.held_bytes, "ram_bytes": state.ram_bytes,
            "delivered_bytes": state.delivered_bytes, "stall_s": state.stall_s,
            "sessions": state.sessions,
        }  # fmt: skip

    def _systems(self) -> list[dict[str, Any]]:
        numbers = self._table.numbers()
        used = self._table.used
        grant = self._table.outstanding()
        return [
            {
                "name": name,
                "capacity": _named(numbers.problem.capacity[i]),
                "used": _named(used[numbers.system_of_flow == i].sum(axis=0)),
                "granted": _named(grant[numbers.system_of_flow == i].sum(axis=0)),
            }
            for i, name in enumerate(numbers.systems)
            if name != OTHER or np.any(numbers.system_of_flow == i)
        ]


def _headroom(
    group: NDArray[np.int64],
    amount: NDArray[np.float64],
    outstanding: NDArray[np.float64],
    wanted: NDArray[np.float64],
    mine: NDArray[np.int64],
) -> NDArray[np.float64]:
    """[mine, R] the most each may be told, so that its group's amount is not handed out twice."""
    own = group[mine]
    room = np.full(wanted.shape, np.inf)
    for r in range(wanted.shape[1]):
        if not np.any(np.isfinite(amount[own, r])):
            continue
        taken = np.bincount(group, outstanding[:, r], len(amount))
        asked = np.bincount(own, wanted[:, r], len(amount))
        left = np.maximum(amount[:, r] - taken, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            part = np.where(asked > left, left / np.where(asked > 0, asked, 1.0), 1.0)
        room[:, r] = np.where(part[own] < 1.0, wanted[:, r] * part[own], np.inf)
    return room


def _lease_rates(values: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    a, b, c = (None if math.isinf(v) else max(RATE_MIN, float(v)) for v in values)
    return a, b, c


def _named(values: NDArray[np.float64]) -> dict[str, float | None]:
    pairs = zip(RESOURCES, values, strict=True)
    return {name: None if math.isinf(v) else float(v) for name, v in pairs}
