"""Accounts: an account for each job on this node: what it had, used, and waited for.

Fed with what was seen (`look`) and with what processes told (`told`); writes into a ledger. Knows neither
files nor sockets. Times are two: monotonic seconds for how long, Unix seconds for when.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.machine.sensors import grown
from headrace.telemetry.inference import Observed, infer
from headrace.telemetry.ledger import JobFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.base.job import JobIdentity
    from headrace.machine.gpu import GPU
    from headrace.telemetry.groups import GroupUse
    from headrace.telemetry.ledger import Ledger
    from headrace.telemetry.processes import JobProcesses
    from headrace.telemetry.told import Key, Told

__all__ = ["Accounts", "Now", "Seen"]

JOBS_MAX: Final = 256
"""At a time. More are not seen: their figures would not be bounded."""

TELLERS_MAX: Final = 4096

KEPT_S: Final = 900.0
"""Figures of a job that ended are told to Prometheus so long, as the node daemon's are."""

BEFORE_MAX_S: Final = 30 * 86400.0
"""A job that began before the agent did is believed so much."""

LINGER_S: Final = 10.0
"""A process that ended counts among its job's ranks so long."""

STALE: Final = 3.0
"""What is seen at a moment speaks for so many usual intervals at most."""


@dataclass(frozen=True, slots=True)
class Now:
    """A moment."""

    mono_s: float
    unix_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at the node found."""

    jobs: Mapping[str, JobProcesses]
    groups: Mapping[str, GroupUse]
    gpus: list[GPU]
    job_of: Callable[[int], str]
    """Of a process."""
    io_pressure_s: float | None
    """Grown since the last look, of the node; None: it is not told."""
    busiest: str
    """File system that the node waited for most since the last look; ''."""


@dataclass(slots=True)
class _Consumer:
    """A process with training steps."""

    ranks: int
    """Processes like it on this node, as it was told; 0: it was not."""
    ended_s: float | None = None


@dataclass(slots=True, eq=False)
class _Account:
    identity: JobIdentity
    uid: int
    facts: JobFacts
    until_s: float
    """Monotonic: the job's time is counted until here."""
    seen_s: float | None = None
    """Monotonic: when its processes were seen last."""
    told_s: float = 0.0
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    """Processes with training steps, by instance."""
    ended_s: float | None = None
    group: GroupUse | None = None
    asked: dict[str, float] = field(default_factory=dict)
    """Seconds that its processes waited for the node daemon, by file system: it may know why."""
    seen_gpus: int = 0

    @property
    def gpus(self) -> int:
        return self.identity.gpus or self.seen_gpus

    @property
    def gpus_per_consumer(self) -> float:
        told = (consumer.ranks for consumer in self.consumers.values())
        ranks = max([len(self.consumers), *told], default=0)
        return self.gpus / ranks if ranks else 0.0


class Accounts:
    """The jobs of this node.

    Args:
        ledger: is written to.
        user_of: the name of a user id.
        tellers: what processes had told when the history was written last.
        last_seen: until when (Unix seconds) the history knows of jobs.
        usual_s: between looks.
    """

    def __init__(
        self,
        ledger: Ledger,
        user_of: Callable[[int], str],
        tellers: Mapping[str, dict[Key, float]] | None = None,
        last_seen: Mapping[str, float] | None = None,
        usual_s: float = 5.0,
    ) -> None:
        self._ledger = ledger
        self._user_of = user_of
        self._before: dict[str, dict[Key, float]] = dict(tellers or {})
        self._last_seen = dict(last_seen or {})
        self._usual_s = usual_s
        self._accounts: dict[str, _Account] = {}
        self.refused = 0
        """Messages of processes that spoke for somebody else's job."""

    @property
    def running(self) -> int:
        """Jobs that run now."""
        return sum(account.ended_s is None for account in self._accounts.values())

    def facts(self) -> dict[str, JobFacts]:
        """What is known of the jobs, those that ended lately too."""
        return {job: account.facts for job, account in self._accounts.items()}

    def asking(self) -> list[str]:
        """Jobs that waited for the node daemon since `explain_node` was called last."""
        return [job for job, account in self._accounts.items() if account.asked]

    # -- what processes tell ----------------------------------------------------------------------

    def told(self, told: Told, now: Now) -> None:
        """Count what a process tells, beyond what it told before."""
        job = told.identity.job_id
        account = self._account(told.identity, told.uid, told.began_s, now)
        if account is None or told.uid not in (0, account.uid):
            self.refused += 1
            return
        before = self._before.get(told.instance, {})
        if told.instance not in self._before and len(self._before) >= TELLERS_MAX:
            self._before.pop(next(iter(self._before)))
        self._before[told.instance] = told.figures
        self._ledger.remember(told.instance, job, now.unix_s, told.figures)
        account.identity = account.facts.identity = _fuller(account.identity, told.identity)
        account.ended_s = None
        account.told_s = now.mono_s
        if told.consumer:
            account.facts.measured = True
            ended_s = now.mono_s if told.ended else None
            account.consumers[told.instance] = _Consumer(told.local_ranks, ended_s)
        self._count(account, now, now.mono_s)
        for (name, label, system), amount in told.figures.items():
            new = grown(before.get((name, label, system), 0.0), amount)
            if new > 0.0 and (told.consumer or name == "tier_bytes"):
                self._tell(account, (name, label, system), new, now)

    def _tell(self, account: _Account, key: Key, new: float, now: Now) -> None:
        name, label, system = key
        job = account.identity.job_id
        if name == "stall_s":
            if label == Cause.NODE:
                account.asked[system] = account.asked.get(system, 0.0) + new
                return
            lost = new * account.gpus_per_consumer
            self._ledger.add(job, "lost_gpu_s", lost, now.unix_s, label, system)
        self._ledger.add(job, name, new, now.unix_s, label, system)

    def explain_node(self, shares: Mapping[str, Mapping[Cause, float]], now: Now) -> None:
        """Say why jobs waited for the node daemon.

        Args:
            shares: by job, the seconds it waited lately, by cause, as the daemon knows them. What the
                daemon does not know is `storage`.
            now: this moment.
        """
        for job, account in self._accounts.items():
            asked, account.asked = account.asked, {}
            causes = {c: s for c, s in shares.get(job, {}).items() if s > 0.0} or {
                Cause.STORAGE: 1.0
            }
            total = sum(causes.values())
            for system, seconds in asked.items():
                for cause, share in causes.items():
                    key = ("stall_s", cause, system)
                    self._tell(account, key, seconds * share / total, now)

    # -- what is seen -----------------------------------------------------------------------------

    def look(self, seen: Seen, seconds: float, now: Now) -> None:
        """Count what a look found.

        Args:
            seen: the node.
            seconds: since the look before.
            now: this moment.
        """
        for job, processes in seen.jobs.items():
            account = self._account(processes.identity, processes.uid, processes.began_s, now)
            if account is None:
                continue
            account.identity = account.facts.identity = _fuller(
                account.identity, processes.identity
            )
            fresh = account.seen_s is None
            account.seen_s, account.ended_s = now.mono_s, None
            self._count(account, now, now.mono_s)
            self._use(account, processes, seen, 0.0 if fresh else seconds, now)
            if job not in seen.groups:
                account.group = None
        self._end(seen, now)

    def _use(
        self, account: _Account, processes: JobProcesses, seen: Seen, seconds: float, now: Now
    ) -> None:
        """What a job used since the look before."""
        job, use, add = account.identity.job_id, processes.use, self._ledger.add
        cpu_s, memory_bytes, pressure_s = use.cpu_s, use.memory_bytes, seen.io_pressure_s
        group, before = seen.groups.get(job), account.group
        if group is not None:
            if group.cpu_s is not None:
                # At the first look the processes' sum is nearer the truth than nothing.
                then = None if before is None else before.cpu_s
                cpu_s = grown(then, group.cpu_s) if then is not None else group.cpu_s
            memory_bytes = group.memory_bytes if group.memory_bytes is not None else memory_bytes
            if group.io_pressure_s is not None:
                then = None if before is None else before.io_pressure_s
                pressure_s = grown(then, group.io_pressure_s) if then is not None else 0.0
            account.group = group
        add(job, "cpu_s", cpu_s, now.unix_s)
        add(job, "read_bytes", use.read_bytes, now.unix_s)
        add(job, "written_bytes", use.written_bytes, now.unix_s)
        add(job, "memory_bytes", memory_bytes, now.unix_s)
        add(job, "io_pressure_s", min(seconds, pressure_s or 0.0), now.unix_s)
        busy = self._gpus(account, processes, seen, min(seconds, STALE * self._usual_s), now)
        if account.facts.measured or seconds <= 0.0:
            return
        cpus = account.identity.cpus or os.cpu_count() or 1
        waited = infer(
            Observed(
                seconds=seconds,
                gpu_busy=busy,
                io_pressure=None if pressure_s is None else pressure_s / seconds,
                cpu_share=cpu_s / (cpus * seconds),
            )
        )
        for cause, inferred_s in waited.items():
            system = seen.busiest if cause is Cause.STORAGE else ""
            add(job, "inferred_s", inferred_s, now.unix_s, cause, system)
            add(job, "inferred_gpu_s", inferred_s * account.gpus, now.unix_s, cause, system)

    def _gpus(
        self, account: _Account, processes: JobProcesses, seen: Seen, seconds: float, now: Now
    ) -> float | None:
        """Count what its GPUs did; how busy they were, None if that is not known."""
        indices = set(account.identity.gpu_indices)
        job = account.identity.job_id
        mine = [
            gpu
            for gpu in seen.gpus
            if gpu.index in indices
            or not processes.pids.isdisjoint(gpu.processes)
            or any(seen.job_of(pid) == job for pid in gpu.processes)
        ]
        account.seen_gpus = max(account.seen_gpus, len(mine))
        self._ledger.add(job, "gpus", account.gpus, now.unix_s)
        self._ledger.add(
            job, "gpu_memory_bytes", sum(gpu.memory_bytes or 0.0 for gpu in mine), now.unix_s
        )
        known = [gpu.busy for gpu in mine if gpu.busy is not None]
        if not known:
            return None
        # A GPU that it has and does not use is idle, not unknown.
        count = max(len(known), account.gpus)
        self._ledger.add(job, "gpu_watched_s", count * seconds, now.unix_s)
        self._ledger.add(job, "gpu_busy_s", sum(known) * seconds, now.unix_s)
        return sum(known) / count

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
        # What an agent before this one counted is in the history.
        counted_s = min(now.unix_s, max(first_s, known_until_s))
        facts = JobFacts(identity, self._user_of(uid) or identity.user, first_s, counted_s)
        account = _Account(identity, uid, facts, now.mono_s - (now.unix_s - counted_s))
        self._accounts[identity.job_id] = account
        return account

    def _count(self, account: _Account, now: Now, until_s: float) -> None:
        """Count a job's time up to a moment."""
        seconds = until_s - account.until_s
        if seconds <= 0.0:
            return
        account.until_s = until_s
        account.facts.last_s = now.unix_s - (now.mono_s - until_s)
        job = account.identity.job_id
        self._ledger.add(job, "seconds", seconds, now.unix_s)
        self._ledger.add(job, "gpu_s", seconds * account.gpus, now.unix_s)
        self._ledger.know(job, account.facts)

    def _end(self, seen: Seen, now: Now) -> None:
        """Jobs that are gone end; those that ended long ago are forgotten."""
        gone = []
        for job, account in self._accounts.items():
            # Ranks that end together share the GPUs to the end.
            account.consumers = {
                instance: consumer
                for instance, consumer in account.consumers.items()
                if consumer.ended_s is None or now.mono_s - consumer.ended_s < LINGER_S
            }
            quiet = now.mono_s - account.told_s > STALE * self._usual_s
            if job not in seen.jobs and (account.seen_s is not None or quiet):
                if account.ended_s is None:
                    account.ended_s = now.mono_s
                if now.mono_s - account.ended_s > KEPT_S:
                    gone.append(job)
        for job in gone:
            self._last_seen[job] = self._accounts.pop(job).facts.last_s
        if gone:
            self._ledger.forget(gone)


def _fuller(one: JobIdentity, other: JobIdentity) -> JobIdentity:
    """The identity that says more."""
    return max(one, other, key=lambda each: (bool(each.user), each.gpus, bool(each.name)))
