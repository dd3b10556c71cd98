"""Table: all flows as columns, so that deciding about thousands takes milliseconds.

A flow is what one plane reads for one job on one file system. Rows are reused; whoever goes leaves a
free one. Jobs, users and file systems are numbered anew only when somebody comes or goes, or
the policy changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.control.policy import OTHER, PRIORITIES, RESOURCES, SharedFileSystem
from headrace.control.sharing import SharingProblem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from headrace.control.policy import Policy, Rates

R = len(RESOURCES)
_FIRST_ROWS = 64

FlowKey = tuple[int, str, str, str]
"""Plane's number, user, job, file system."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Who is who, while nobody comes or goes."""

    rows: NDArray[np.int64]  # [flows] rows in use
    systems: list[str]  # names by number
    problem: SharingProblem  # what does not change from one decision to the next
    system_of_flow: NDArray[np.int64]  # [flows]
    plane_of_flow: NDArray[np.int64]  # [flows] planes' numbers


class Table:
    """The flows.

    Attributes:
        used: [rows, R] per second, in the last interval.
        demand: [rows, R] estimates, infinite for all it can get.
        grant: [rows, R] what the plane was last told; infinite: no limit.
        target: [rows, R] what was last decided.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._row: dict[FlowKey, int] = {}
        self._free: list[int] = []
        self.used = np.zeros((_FIRST_ROWS, R))
        self.demand = np.zeros((_FIRST_ROWS, R))
        self.grant = np.zeros((_FIRST_ROWS, R))
        self.target = np.zeros((_FIRST_ROWS, R))
        self._next = 0
        self._numbers: _Numbers | None = None

    def __len__(self) -> int:
        return len(self._row)

    @property
    def keys(self) -> Iterable[FlowKey]:
        """All flows."""
        return self._row.keys()

    def set_policy(self, policy: Policy) -> None:
        """Go by another policy from now on."""
        self._policy = policy
        self._numbers = None

    def row(self, key: FlowKey) -> int:
        """The row of a flow, made if there is none: it has nothing and wants nothing."""
        known_row = self._row.get(key)
        if known_row is not None:
            return known_row
        if self._free:
            row = self._free.pop()
        else:
            row, self._next = self._next, self._next + 1
            if row >= len(self.used):
                self._grow()
        for column in (self.used, self.demand, self.grant, self.target):
            column[row] = 0.0
        self._row[key] = row
        self._numbers = None
        return row

    def _grow(self) -> None:
        for name in ("used", "demand", "grant", "target"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def remove(self, key: FlowKey) -> None:
        """Forget a flow."""
        self._free.append(self._row.pop(key))
        self._numbers = None

    def numbers(self) -> _Numbers:
        """Who is who now."""
        if self._numbers is None:
            self._numbers = self._number()
        return self._numbers

    def problem(self, silent: Sequence[int]) -> SharingProblem:
        """What is to be decided; silent planes, by their numbers, keep what they have."""
        known = self.numbers()
        return replace(
            known.problem,
            demand=self.demand[known.rows],
            held=np.isin(known.plane_of_flow, silent),
            grant=self.outstanding(),
        )

    def outstanding(self) -> NDArray[np.float64]:
        """[flows, R] what each may use: its grant; where that has no limit, what it uses."""
        rows = self.numbers().rows
        grant = self.grant[rows]
        return np.where(np.isfinite(grant), grant, self.used[rows])

    def _number(self) -> _Numbers:
        keys = list(self._row)
        policy = self._policy
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
            _integers(self._row[key] for key in keys), systems, problem,
            _integers(number_of[key[3]] for key in keys), _integers(key[0] for key in keys),
        )  # fmt: skip


def _integers(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _rates(values: Iterable[Rates], missing: float) -> NDArray[np.float64]:
    return np.array([rates.values(missing) for rates in values], np.float64).reshape(-1, R)
