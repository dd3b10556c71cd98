"""Accounts: an account for each job on this node: what it had, used, and waited for.

Fed with what was observed (`observe`) and with what processes report (`report`); writes into a ledger: totals
for Prometheus, amounts by minute for the history. Knows neither files nor sockets. Times are two: monotonic
seconds for how long, Unix seconds for when.

Bounded: jobs that ended are forgotten after a while, and when the history cannot be written for long, the
oldest minutes that wait are added up in one.

A job that does not use headrace has its waiting inferred (`infer`): nobody measures its steps, so this is a
judgement, and is called `inferred` wherever it is shown.

- A GPU that is idle while tasks of its job wait for I/O (PSI) is taken to wait for storage, for as long as
  both are so.
- A GPU that is idle while the job's CPUs are busy is taken to wait for decoding.
- Without a GPU to look at, a job waits for storage while tasks wait for I/O and its CPUs do little.

What is neither is not said to be I/O: a GPU may be idle for many reasons.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.base.causes import Cause
from headrace.machine.sensors import grown
from headrace.telemetry.history import ENDED, PEAKS, UNENDED, YOUNG_S
from headrace.telemetry.processes import GroupUse, fuller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace.base.job import JobIdentity
    from headrace.machine.sensors import GPU
    from headrace.telemetry.messages import FigureKey, JobNotice, ProcessReport
    from headrace.telemetry.processes import JobProcesses

CPU_BUSY = 0.85  # a job that uses more than this share of its CPUs is held up by them

CPU_LITTLE = 0.5


def infer(
    seconds: float,
    gpu_busy: float | None = None,
    io_pressure: float | None = None,
    cpu_share: float | None = None,
) -> dict[Cause, float]:
    """Seconds of an interval that a job probably waited, by cause.

    What is not known is None: the share of time in which its GPUs worked, on average, and in which at least
    one task waited for I/O, and the share of its CPUs in use.
    """
    pressure, cpu = min(1.0, max(0.0, io_pressure or 0.0)), cpu_share or 0.0
    if gpu_busy is None:
        free = max(0.0, 1.0 - cpu) if cpu < CPU_LITTLE else 0.0
        shares = {Cause.STORAGE: min(pressure, free)}
    else:
        idle = 1.0 - min(1.0, max(0.0, gpu_busy))
        storage = min(idle, pressure)
        shares = {Cause.STORAGE: storage, Cause.DECODE: idle - storage if cpu > CPU_BUSY else 0.0}
    return {cause: share * seconds for cause, share in shares.items() if share > 0.0}


BUCKET_S: Final = 60  # the history has amounts by the minute
FINE_S: Final = 10  # and of a job's first minutes by ten seconds: jobs that are tried are short
NODE: Final = ""  # the "job" that stands for the whole node
WAITING_MAX: Final = 200_000  # entries that wait to be written: about 30 MB
Entry = tuple[int, str, str, str, str]  # start of its stretch, job, figure, label, file system


@dataclass(slots=True)
class JobFacts:
    """What is known of a job on this node, beside its figures."""

    identity: JobIdentity
    user: str
    first_s: float
    last_s: float
    measured: bool = False  # headrace reports how its steps fare


@dataclass(slots=True)
class PendingWrites:
    """What waits to be written."""

    amounts: dict[Entry, float] = field(default_factory=dict)
    jobs: dict[str, JobFacts] = field(default_factory=dict)
    reports: dict[str, tuple[str, float, dict[FigureKey, float]]] = field(default_factory=dict)
    """By instance: the job, when it reported, and its figures: the next report counts from there."""

    def __bool__(self) -> bool:
        return bool(self.amounts or self.jobs or self.reports)


class Ledger:
    """Adds up. One thread at a time."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str, str], float] = {}
        """For Prometheus; the node's own are here alone."""
        self.gauges: dict[tuple[str, str], float] = {}  # of the node, as they are now
        self.began_s: dict[str, float] = {}  # when jobs began, in Unix seconds
        self._pending = PendingWrites()

    def add(  # noqa: PLR0917 - what, how much, when, of what: the same order everywhere
        self, job: str, name: str, amount: float, now_s: float, label: str = "", system: str = ""
    ) -> None:
        """Add to a figure."""
        key = (job, name, label, system)
        if amount > 0.0 and job != NODE:
            start = int(now_s // BUCKET_S) * BUCKET_S
            if start < self.began_s.get(job, 0.0) + YOUNG_S:
                start = int(now_s // FINE_S) * FINE_S
            entry, amounts = (start, *key), self._pending.amounts
            amounts[entry] = _joined(name, amounts.get(entry), amount)
        if amount > 0.0 or job == NODE:  # a device that does nothing is there
            self.totals[key] = _joined(name, self.totals.get(key), amount)

    def know(self, job: str, facts: JobFacts) -> None:
        """Remember what is known of a job."""
        self._pending.jobs[job] = facts

    def remember(
        self, instance: str, job: str, now_s: float, figures: dict[FigureKey, float]
    ) -> None:
        """Remember what a process reported, so that nothing is counted twice."""
        self._pending.reports[instance] = (job, now_s, figures)

    def forget(self, jobs: Iterable[str]) -> None:
        """Drop the totals of jobs that ended a while ago. The history keeps them."""
        ended = set(jobs)
        self.began_s = {job: at for job, at in self.began_s.items() if job not in ended}
        self.totals = {key: value for key, value in self.totals.items() if key[0] not in ended}

    def take(self) -> PendingWrites:
        """What waits to be written; waits no more."""
        pending, self._pending = self._pending, PendingWrites()
        return pending

    def give_back(self, pending: PendingWrites) -> None:
        """It could not be written: it waits again, with what was added meanwhile."""
        newer, self._pending = self._pending, pending
        for entry, amount in newer.amounts.items():
            pending.amounts[entry] = _joined(entry[2], pending.amounts.get(entry), amount)
        pending.jobs |= newer.jobs
        pending.reports |= newer.reports
        if len(pending.amounts) > WAITING_MAX:
            pending.amounts = _coarser(pending.amounts)

    @property
    def waiting(self) -> int:
        """Entries that wait to be written."""
        return len(self._pending.amounts)


def _joined(name: str, before: float | None, amount: float) -> float:
    if before is None:
        return amount
    return max(before, amount) if name in PEAKS else before + amount


def _coarser(amounts: dict[Entry, float]) -> dict[Entry, float]:
    """The older half of the minutes as one."""
    minutes = sorted({entry[0] for entry in amounts})
    until = minutes[len(minutes) // 2]
    coarser: dict[Entry, float] = {}
    for (minute, job, name, label, system), amount in amounts.items():
        entry = (max(minute, until), job, name, label, system)
        coarser[entry] = _joined(name, coarser.get(entry), amount)
    return coarser


JOBS_MAX: Final = 256  # At a time. More are not seen: their figures would not be bounded
PROCESSES_MAX: Final = 4096  # whose last report is remembered
STEPS_MAX: Final = 1024  # of a job, whose CPU time is remembered

KEPT_S: Final = 900.0
"""Figures of a job that ended are served to Prometheus so long, as the node daemon's are."""

BEFORE_MAX_S: Final = 30 * 86400.0  # a job that began before the agent did is believed so much
LINGER_S: Final = 10.0  # a process that ended counts among its job's ranks so long
STALE: Final = 3.0  # what is seen at a moment speaks for so many usual intervals at most


EXPECTED_S: Final = 30.0  # after a job's prolog its first process is looked for so long


class NodeShape(NamedTuple):
    """What a node has for jobs."""

    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0


class Now(NamedTuple):
    """A moment."""

    mono_s: float
    unix_s: float


class Observation(NamedTuple):
    """The node at a moment."""

    jobs: Mapping[str, JobProcesses]
    groups: Mapping[str, GroupUse]
    gpus: list[GPU]
    job_of: Callable[[int], str]  # the job of a process
    io_pressure_s: float | None
    """Grown since the last look, of the node; None: the kernel does not say."""
    busiest: str  # file system that the node waited for most since the last look; ''
    shape: NodeShape = NodeShape()


class _Consumer(NamedTuple):
    """A process with training steps; `ranks` like it are on this node, as its launcher said (0: it did not)."""

    ranks: int
    ended_s: float | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _Account(JobFacts):
    """A job, and how it fares; times are monotonic ones."""

    uid: int
    until_s: float  # its time is counted until here
    seen_s: float | None = None  # when its processes were seen last
    reported_s: float = 0.0
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    """Processes with training steps, by instance."""
    ended_s: float | None = None
    group: GroupUse | None = None
    node_waits: dict[str, float] = field(default_factory=dict)
    """Seconds that its processes waited for the node daemon, by file system: it may know why."""
    seen_gpus: int = 0
    known_before: bool = False
    """An agent before this one counted it: how much its processes had used then is not known."""
    announced: bool = False  # Slurm's prolog said that it begins; so all its time is looked at
    cpu_s: float = 0.0  # CPU time that was counted
    steps: dict[str, float] = field(default_factory=dict)
    """By step, the CPU time of all its processes that have ended, as the tasks' epilogs say."""
    busy: tuple[float, int] | None = None
    """How many of its GPUs worked at the last look, and of how many; None: nobody knows."""
    busy_gpus: set[int] = field(default_factory=set)  # those that have worked

    @property
    def gpus(self) -> int:
        return self.identity.gpus or self.seen_gpus

    @property
    def gpus_per_consumer(self) -> float:
        ranks = max([len(self.consumers), *(each.ranks for each in self.consumers.values())])
        return self.gpus / ranks if ranks else 0.0


class Accounts:
    """The jobs of this node."""

    def __init__(
        self,
        ledger: Ledger,
        user_of: Callable[[int], str],
        reports: Mapping[str, dict[FigureKey, float]] | None = None,
        last_seen: Mapping[str, float] | None = None,
        usual_s: float = 5.0,
    ) -> None:
        self._ledger = ledger
        self._user_of = user_of
        self._before: dict[str, dict[FigureKey, float]] = dict(reports or {})
        self._last_seen = dict(last_seen or {})
        self._usual_s = usual_s
        self._accounts: dict[str, _Account] = {}
        self.refused = 0  # reports of processes on somebody else's job

    @property
    def running(self) -> list[str]:
        """Jobs that run now."""
        return [job for job, account in self._accounts.items() if account.ended_s is None]

    def expecting(self, mono_s: float) -> bool:
        """Whether a job was announced and has no process yet."""
        return any(
            account.announced and account.seen_s is None and account.ended_s is None
            and mono_s - account.until_s < EXPECTED_S
            for account in self._accounts.values()
        )  # fmt: skip

    def facts(self) -> dict[str, JobFacts]:
        """What is known of the jobs, those that ended lately too."""
        return dict(self._accounts)

    def waiting_for_node(self) -> list[str]:
        """Jobs that waited for the node daemon since `explain_node` was called last."""
        return [job for job, account in self._accounts.items() if account.node_waits]

    # -- what processes report --------------------------------------------------------------------

    def report(self, report: ProcessReport, now: Now) -> None:
        """Count what a process reports, beyond its report before."""
        account = self._account(report.identity, report.uid, report.began_s, now)
        if account is None or report.uid not in (0, account.uid):
            self.refused += 1
            return
        figures, before = report.figures, self._before.get(report.instance, {})
        if report.instance not in self._before and len(self._before) >= PROCESSES_MAX:
            self._before.pop(next(iter(self._before)))
        self._before[report.instance] = figures
        lives = {(UNENDED, "", ""): 1.0} if report.consumer and not report.ended else {}
        self._ledger.remember(report.instance, report.identity.job_id, now.unix_s, figures | lives)
        account.identity = fuller(account.identity, report.identity)
        account.ended_s = None
        account.reported_s = now.mono_s
        if report.consumer:
            account.measured = True
            ended_s = now.mono_s if report.ended else None
            account.consumers[report.instance] = _Consumer(report.local_ranks, ended_s)
        self._count(account, now)
        for key, amount in figures.items():
            new = grown(before.get(key, 0.0), amount)
            if new > 0.0 and (report.consumer or key[0] == "tier_bytes"):
                self._add(account, key, new, now)

    def _add(self, account: _Account, key: FigureKey, new: float, now: Now) -> None:
        name, label, system = key
        job = account.identity.job_id
        if name == "stall_s":
            if label == Cause.NODE:
                account.node_waits[system] = account.node_waits.get(system, 0.0) + new
                return
            lost = new * account.gpus_per_consumer
            self._ledger.add(job, "lost_gpu_s", lost, now.unix_s, label, system)
        self._ledger.add(job, name, new, now.unix_s, label, system)

    # -- what Slurm's prolog and epilogs say ------------------------------------------------------

    def notice(self, notice: JobNotice, now: Now) -> None:
        """Count what a job's beginning, its end or the end of a task on this node says."""
        job, account = notice.identity.job_id, self._accounts.get(notice.identity.job_id)
        trusted = notice.sender in (0, os.geteuid())
        if notice.kind == "begin" and trusted:
            if account is not None and account.ended_s is not None:
                # Requeued, under the same number: what passed in between it did not have.
                account.until_s, account.seen_s, account.ended_s = now.mono_s, None, None
                account.cpu_s, account.group, account.busy = 0.0, None, None
                account.steps.clear()
            account = self._account(notice.identity, notice.uid, now.unix_s, now)
            if account is not None:
                account.announced, account.reported_s = True, now.mono_s
                self._ledger.know(job, account)
            return
        owned = account is not None and notice.kind == "step" and notice.sender == account.uid
        if account is None or not (trusted or owned):
            self.refused += 1
            return
        account.identity = fuller(account.identity, notice.identity)
        if notice.kind == "step" and len(account.steps) < STEPS_MAX:
            known_s = account.steps.get(notice.step, 0.0)
            account.steps[notice.step] = max(known_s, notice.cpu_s)
            # Processes that ended between two looks. Nobody can have used more than there was.
            most_s = (now.unix_s - account.first_s) * (account.identity.cpus or os.cpu_count() or 1)
            missing_s = min(sum(account.steps.values()), most_s) - account.cpu_s
            if not account.known_before and missing_s > 0.0:
                account.cpu_s += missing_s
                self._ledger.add(job, "cpu_s", missing_s, now.unix_s)
        elif notice.kind == "end" and account.ended_s is None:
            seconds = self._count(account, now)
            self._watch(account, min(seconds, STALE * self._usual_s), now)
            self._over(account, now)

    def explain_node(self, shares: Mapping[str, Mapping[Cause, float]], now: Now) -> None:
        """Say why jobs waited for the node daemon: seconds by job and cause, lately, as it knows them.

        What the daemon does not know is `storage`.
        """
        for job, account in self._accounts.items():
            waits, account.node_waits = account.node_waits, {}
            known = {c: s for c, s in shares.get(job, {}).items() if s > 0.0}
            causes = known or {Cause.STORAGE: 1.0}
            total = sum(causes.values())
            for system, seconds in waits.items():
                for cause, share in causes.items():
                    key = ("stall_s", cause, system)
                    self._add(account, key, seconds * share / total, now)

    # -- what is observed -------------------------------------------------------------------------

    def observe(self, node: Observation, seconds: float, now: Now) -> None:
        """Count what a look at the node saw."""
        for job, processes in node.jobs.items():
            account = self._account(processes.identity, processes.uid, processes.began_s, now)
            if account is None:
                continue
            account.identity = fuller(account.identity, processes.identity)
            fresh = account.seen_s is None
            account.seen_s, account.ended_s = now.mono_s, None
            counted_s = self._count(account, now)
            # Of a job that nobody announced, what it did before is not known.
            before_s = counted_s if account.announced else 0.0
            watched_s = before_s if fresh else seconds
            self._use(account, processes, node, watched_s, now, fresh=fresh)
            if job not in node.groups:
                account.group = None
        self._end(node, now)

    def _use(
        self,
        account: _Account,
        processes: JobProcesses,
        node: Observation,
        seconds: float,
        now: Now,
        *,
        fresh: bool,
    ) -> None:
        """What a job used since the look before; at the first look, since it began."""
        job, use, add = account.identity.job_id, processes.use, self._ledger.add
        cpu_s, memory_bytes, pressure_s = use.cpu_s, use.memory_bytes, node.io_pressure_s
        if (group := node.groups.get(job)) is not None:
            before = account.group or GroupUse()
            if group.cpu_s is not None:
                # At the first look the processes' sum is nearer the truth than nothing.
                then = before.cpu_s
                cpu_s = grown(then, group.cpu_s) if then is not None else group.cpu_s
            memory_bytes = group.memory_bytes if group.memory_bytes is not None else memory_bytes
            if group.io_pressure_s is not None:
                then = before.io_pressure_s
                pressure_s = grown(then, group.io_pressure_s) if then is not None else 0.0
            account.group = group
        identity, shape = account.identity, node.shape
        cpu_s, read_bytes, written_bytes = (
            0.0 if fresh and account.known_before else amount
            for amount in (cpu_s, use.read_bytes, use.written_bytes)
        )
        account.cpu_s += cpu_s
        for name, amount in (
            ("cpu_s", cpu_s), ("memory_bytes", memory_bytes), ("read_bytes", read_bytes),
            ("written_bytes", written_bytes), ("io_pressure_s", min(seconds, pressure_s or 0.0)),
            ("memory_asked_bytes", identity.memory_bytes), ("node_cpus", shape.cpus),
            ("node_memory_bytes", shape.memory_bytes), ("node_gpus", shape.gpus),
        ):  # fmt: skip
            add(job, name, amount, now.unix_s)
        if identity.partition:
            add(job, "partition", 1.0, now.unix_s, identity.partition)
        busy = self._gpus(account, processes, node, min(seconds, STALE * self._usual_s), now)
        if account.measured or seconds <= 0.0:
            return
        cpus = account.identity.cpus or os.cpu_count() or 1
        pressure = None if pressure_s is None else pressure_s / seconds
        waited = infer(seconds, busy, pressure, cpu_s / (cpus * seconds))
        for cause, inferred_s in waited.items():
            system = node.busiest if cause is Cause.STORAGE else ""
            add(job, "inferred_s", inferred_s, now.unix_s, cause, system)
            add(job, "inferred_gpu_s", inferred_s * account.gpus, now.unix_s, cause, system)

    def _gpus(
        self,
        account: _Account,
        processes: JobProcesses,
        node: Observation,
        seconds: float,
        now: Now,
    ) -> float | None:
        """Count what its GPUs did; how busy they were, None if that is not known."""
        indices, add = set(account.identity.gpu_indices), self._ledger.add
        job = account.identity.job_id
        mine = [
            gpu
            for gpu in node.gpus
            if gpu.index in indices
            or not processes.pids.isdisjoint(gpu.processes)
            or any(node.job_of(pid) == job for pid in gpu.processes)
        ]
        account.seen_gpus = max(account.seen_gpus, len(mine))
        add(job, "gpus", account.gpus, now.unix_s)
        add(job, "gpu_memory_bytes", sum(gpu.memory_bytes or 0.0 for gpu in mine), now.unix_s)
        add(
            job,
            "gpu_memory_asked_bytes",
            sum(g.memory_total_bytes or 0.0 for g in mine),
            now.unix_s,
        )
        known = {gpu.index: gpu.busy for gpu in mine if gpu.busy is not None}
        # A GPU that it has and does not use is idle, not unknown.
        account.busy = (sum(known.values()), max(len(known), account.gpus)) if known else None
        account.busy_gpus |= {index for index, busy in known.items() if busy > 0.0}
        add(job, "gpus_used", len(account.busy_gpus), now.unix_s)
        self._watch(account, seconds, now)
        return account.busy[0] / account.busy[1] if account.busy else None

    def _watch(self, account: _Account, seconds: float, now: Now) -> None:
        """Count what its GPUs did for some seconds, as they did at the last look."""
        if account.busy is not None:
            busy, count = account.busy
            job = account.identity.job_id
            self._ledger.add(job, "gpu_watched_s", count * seconds, now.unix_s)
            self._ledger.add(job, "gpu_busy_s", busy * seconds, now.unix_s)

    # -- accounts ---------------------------------------------------------------------------------

    def _account(
        self, identity: JobIdentity, uid: int, began_s: float, now: Now
    ) -> _Account | None:
        """The account of a job; None: there is no room for another."""
        account = self._accounts.get(identity.job_id)
        if account is not None:
            return account
        if len(self._accounts) >= JOBS_MAX:
            return None
        known_until_s = self._last_seen.get(identity.job_id, 0.0)
        first_s = min(now.unix_s, max(began_s, now.unix_s - BEFORE_MAX_S))
        self._ledger.began_s[identity.job_id] = first_s
        # What an agent before this one counted is in the history.
        counted_s = min(now.unix_s, max(first_s, known_until_s))
        account = self._accounts[identity.job_id] = _Account(
            identity, self._user_of(uid) or identity.user, first_s, counted_s,
            uid=uid, until_s=now.mono_s - (now.unix_s - counted_s), known_before=known_until_s > 0.0,
        )  # fmt: skip
        return account

    def _count(self, account: _Account, now: Now) -> float:
        """Count a job's time up to now; how much that is."""
        seconds = now.mono_s - account.until_s
        if seconds <= 0.0:
            return 0.0
        account.until_s = now.mono_s
        account.last_s = now.unix_s
        job = account.identity.job_id
        self._ledger.add(job, "seconds", seconds, now.unix_s)
        self._ledger.add(job, "gpu_s", seconds * account.gpus, now.unix_s)
        self._ledger.add(job, "cpus_s", seconds * account.identity.cpus, now.unix_s)
        self._ledger.know(job, account)
        return seconds

    def _end(self, node: Observation, now: Now) -> None:
        """Jobs that are gone end; those that ended long ago are forgotten."""
        forgotten = []
        for job, account in self._accounts.items():
            # Ranks that end together share the GPUs to the end.
            for instance, consumer in list(account.consumers.items()):
                if consumer.ended_s is not None and now.mono_s - consumer.ended_s >= LINGER_S:
                    del account.consumers[instance]
            quiet = now.mono_s - account.reported_s > STALE * self._usual_s
            if job not in node.jobs and (account.seen_s is not None or quiet):
                if account.ended_s is None:
                    self._over(account, now)
                elif now.mono_s - account.ended_s > KEPT_S:
                    forgotten.append(job)
        for job in forgotten:
            self._last_seen[job] = self._accounts.pop(job).last_s
        if forgotten:
            self._ledger.forget(forgotten)

    def _over(self, account: _Account, now: Now) -> None:
        account.ended_s = now.mono_s
        self._ledger.add(account.identity.job_id, ENDED, now.unix_s, now.unix_s)

    def end_all(self, now: Now) -> None:
        """Nobody looks any more, since the one job that was to be looked at ends."""
        for account in self._accounts.values():
            if account.ended_s is None:
                self._over(account, now)
