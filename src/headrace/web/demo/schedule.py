"""Schedule: who had which GPUs when, in a cluster that is made up. Plain functions of a seed.

Jobs come at random, take whole nodes or a part of one, the first in line first, with a look a little
further down the line for one that fits.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.web.demo.words import MODELS, PARTITIONS, SIZES, user_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DAY_S", "DemoJob", "Plan", "plan"]

DAY_S: Final = 86400.0
LAST_S: Final = 27 * 3600.0
"""So long jobs come; what is shown as now begins after a day."""

LOOK_AHEAD: Final = 40


@dataclass(slots=True)
class DemoJob:
    """A job of the plan; times are seconds of the plan."""

    number: int
    name: str
    user: str
    partition: int
    gpus: int
    came_s: float
    seconds: float
    began_s: float = np.inf
    places: NDArray[np.int32] | None = None
    """Its GPUs, by their number in the cluster; None: it never began."""

    @property
    def ended_s(self) -> float:
        """When its GPUs were free again."""
        return self.began_s + self.seconds

    @property
    def job_id(self) -> str:
        """As the scheduler would count."""
        return str(118_000 + self.number)


@dataclass(frozen=True, slots=True)
class Plan:
    """Nodes and jobs.

    Attributes:
        names: of nodes.
        partition: of each node, its number in `PARTITIONS`.
        gpus: of each node.
        jobs: all, in the order in which they came.
    """

    names: list[str]
    partition: list[int]
    gpus: int
    jobs: list[DemoJob]


class _Pool:
    """Free GPUs of a partition's nodes."""

    def __init__(self, first: int, count: int, gpus: int) -> None:
        self._gpus = gpus
        self._free = {node: list(range(gpus)) for node in range(first, first + count)}
        self._by_free: list[set[int]] = [set() for _ in range(gpus + 1)]
        self._by_free[gpus] = set(self._free)

    def take(self, wanted: int) -> NDArray[np.int32] | None:
        """GPUs for a job; None: not now."""
        if wanted >= self._gpus:
            whole = self._by_free[self._gpus]
            count = wanted // self._gpus
            if len(whole) < count:
                return None
            return np.concatenate([self._give(node, self._gpus) for node in sorted(whole)[:count]])
        for left in range(wanted, self._gpus + 1):
            if self._by_free[left]:
                return self._give(min(self._by_free[left]), wanted)
        return None

    def _give(self, node: int, count: int) -> NDArray[np.int32]:
        free = self._free[node]
        self._by_free[len(free)].discard(node)
        taken, self._free[node] = free[:count], free[count:]
        self._by_free[len(self._free[node])].add(node)
        return np.array([node * self._gpus + gpu for gpu in taken], np.int32)

    def back(self, places: NDArray[np.int32]) -> None:
        """A job is over."""
        for place in places.tolist():
            node, gpu = divmod(place, self._gpus)
            free = self._free[node]
            self._by_free[len(free)].discard(node)
            heapq.heappush(free, gpu)
            self._by_free[len(free)].add(node)


def plan(seed: int, nodes: int, gpus: int, jobs: int) -> Plan:
    """A plan.

    Args:
        seed: the same gives the same.
        nodes: all together.
        gpus: of each.
        jobs: that come within `LAST_S`.
    """
    random = np.random.default_rng(seed)
    counts = [max(1, round(share * nodes)) for _, _, share in PARTITIONS]
    counts[0] += nodes - sum(counts)
    names, partition = [], []
    for number, (_, prefix, _) in enumerate(PARTITIONS):
        names += [f"{prefix}{at + 1:0{len(str(nodes))}d}" for at in range(counts[number])]
        partition += [number] * counts[number]
    made = _jobs(random, jobs, counts, gpus)
    first = 0
    for number, count in enumerate(counts):
        _run([job for job in made if job.partition == number], _Pool(first, count, gpus))
        first += count
    return Plan(names, partition, gpus, made)


def _jobs(random: np.random.Generator, count: int, nodes: list[int], gpus: int) -> list[DemoJob]:
    came = np.sort(random.uniform(-0.04 * LAST_S, LAST_S, count).clip(0.0))
    sizes = random.choice([s for s, _ in SIZES], count, p=[p for _, p in SIZES])
    # As many GPU-hours as there are.
    seconds = np.exp(random.normal(0.0, 0.9, count))
    seconds *= 1.0 * sum(nodes) * gpus * LAST_S / float((seconds * sizes).sum())
    users = user_names(max(4, count // 60))
    whose = (len(users) * random.beta(0.7, 1.8, count)).astype(int)
    where = random.choice(len(nodes), count, p=np.array(nodes) / sum(nodes))
    models = random.integers(0, len(MODELS), count)
    return [
        DemoJob(
            number=i, name=MODELS[models[i]], user=users[whose[i]], partition=int(where[i]),
            gpus=int(min(sizes[i], max(1, nodes[where[i]] // 3) * gpus)), came_s=float(came[i]),
            seconds=float(np.clip(seconds[i], 240.0, 9 * 3600.0)),
        )
        for i in range(count)
    ]  # fmt: skip


def _run(jobs: list[DemoJob], pool: _Pool) -> None:
    """Let jobs of one partition have their GPUs, one after the other."""
    line: deque[DemoJob] = deque()
    ends: list[tuple[float, int, DemoJob]] = []
    at = 0
    while at < len(jobs) or ends:
        come_s = jobs[at].came_s if at < len(jobs) else np.inf
        end_s = ends[0][0] if ends else np.inf
        now = min(come_s, end_s)
        if now > LAST_S and at >= len(jobs):
            return
        if come_s <= end_s:
            line.append(jobs[at])
            at += 1
        else:
            over = heapq.heappop(ends)[2]
            assert over.places is not None
            pool.back(over.places)
        for _ in range(min(LOOK_AHEAD, len(line))):
            job = line[0]
            places = pool.take(job.gpus)
            line.popleft()
            if places is None:
                line.append(job)
                continue
            job.began_s, job.places = now, places
            heapq.heappush(ends, (job.ended_s, job.number, job))
