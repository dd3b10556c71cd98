"""Accounting: jobs as the site's books have them: sacct where there is one, else the list of jobs completed.

`sacct --parsable2` has been the same since 20.11, and is a tenth of its JSON. A cluster without accounting
storage may still write each job that ends to a file (`JobCompType=jobcomp/filetxt`): it has no GPU where TRES
does not count them, and no steps.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.files import explained
from headrace.cluster.executor import JobStatus
from headrace.cluster.notation import gpu_count, mib, minutes, seconds, task_id
from headrace.cluster.slurm.scontrol import job_facts, read_config
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace.cluster.slurm.commands import Commands


COMPLETED_BYTES_MAX = 64 << 20
"""So much of the end of the list of jobs completed is read."""

FIELDS = {
    "JobID": "JobId", "JobIDRaw": "", "User": "", "Account": "", "Partition": "", "State": "JobState",
    "ExitCode": "", "Submit": "SubmitTime", "Start": "StartTime", "End": "EndTime", "ElapsedRaw": "",
    "TimelimitRaw": "TimeLimit", "NCPUS": "ProcCnt", "NNodes": "NodeCnt", "AllocTRES": "Tres",
    "NodeList": "", "TotalCPU": "", "MaxRSS": "", "NTasks": "", "QOS": "", "WorkDir": "", "Restarts": "",
    "JobName": "Name",
}  # fmt: skip
"""Of sacct, and what the list of jobs completed calls them. The name is last: it may hold a separator."""


class NoAccounting(ClusterError):
    """This cluster keeps no books."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedJob(JobStatus):
    """One job, or task of an array, as the books have it.

    Attributes:
        elapsed_s: that it had its resources.
        cpu_s: user and system time of all its processes; None where it was not measured.
        memory_peak_mib: the largest of its tasks'; None where it was not measured.
        gpu_count, cpu_count, node_count: that it had.
        memory_mib: that it had, of all nodes together; 0 where the books do not count it.
        task_count: the most that one of its steps had.
    """

    user: str
    account: str
    partition: str
    elapsed_s: float
    limit_minutes: int | None
    cpu_count: int
    gpu_count: int
    node_count: int
    cpu_s: float | None
    memory_peak_mib: int | None
    memory_mib: int = 0
    task_count: int = 1

    @property
    def gpu_hours(self) -> float:
        """GPUs times the hours that it had them."""
        return self.gpu_count * self.elapsed_s / 3600


def read_accounting(
    commands: Commands,
    since_s: float | None = None,
    until_s: float | None = None,
    *,
    job_ids: Sequence[str] = (),
) -> list[AccountedJob]:
    """Jobs that ran, or waited, at any time between two moments, from sacct or the list of jobs completed.

    Args:
        commands: how Slurm's commands are called.
        since_s: Unix seconds; by default a day ago, with `job_ids` any time.
        until_s: by default now.
        job_ids: only these; of an array all tasks.

    Raises:
        NoAccounting: the cluster has neither, or its list cannot be read by this user.
        ClusterError: sacct fails.
    """
    day_ago = time.time() - 86400
    # Steps have what processes used; `--allocations` would leave them out.
    options = ["--parsable2", "--noheader", "--duplicates"]
    if job_ids:
        options.append(f"--jobs={','.join(job_ids)}")
    else:
        options.append(f"--starttime={_local(day_ago if since_s is None else since_s)}")
        if until_s is not None:
            options.append(f"--endtime={_local(until_s)}")
        options.append("--allusers")
    try:
        return _sacct(commands, options)
    except NoAccounting:
        jobs = _completed(commands)
    begin = (0.0 if job_ids else day_ago) if since_s is None else since_s
    end = time.time() if until_s is None else until_s
    wanted = set(job_ids)
    return [
        job
        for job in jobs
        if (not wanted or job.job_id in wanted or job.job_id.partition("_")[0] in wanted)
        and (job.ended_s or end) >= begin
        and (job.submitted_s or begin) <= end
    ]


# -- sacct -----------------------------------------------------------------------------------------


def _sacct(
    commands: Commands, options: Sequence[str], fields: Sequence[str] = tuple(FIELDS)
) -> list[AccountedJob]:
    """Versions before 22.05 count no restarts."""
    try:
        text = commands.query("sacct", *options, f"--format={','.join(fields)}")
    except ClusterError as e:
        if "nvalid field" in e.message and "Restarts" in fields:
            return _sacct(commands, options, [field for field in FIELDS if field != "Restarts"])
        if "accounting storage is disabled" in e.message.lower() or "not installed" in e.message:
            raise NoAccounting(
                "This cluster has no accounting storage: sacct knows no jobs.",
                next_step="The history of headrace's agents knows those that it saw.",
            ) from e
        raise
    return read_sacct(text, fields)


def _local(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(unix_s))


def read_sacct(text: str, fields: Iterable[str] = FIELDS) -> list[AccountedJob]:
    """Of `sacct --parsable2 --noheader --format=` with these fields, steps included.

    A requeued job comes once for each time that it ran: the last one counts, with `restarts`.
    """
    names = [FIELDS[field] or field for field in fields]
    jobs: dict[str, list[dict[str, str]]] = {}
    times: dict[str, int] = {}
    for line in filter(str.strip, text.splitlines()):
        cells = line.split("|", len(names) - 1)
        if len(cells) < len(names):
            raise ClusterError(
                f"sacct says {line[:160]!r}, expected {len(names)} fields.",
                next_step="Please report it with the version (`sacct --version`).",
            )
        row = dict(zip(names, cells, strict=True))
        job_id, step, _ = row["JobId"].partition(".")
        if step:
            jobs.setdefault(job_id, []).append(row)
            continue
        times[job_id] = times.get(job_id, -1) + 1
        jobs[job_id] = [row]
    accounted = []
    for job_id, repeats in times.items():
        row, *steps = jobs[job_id]
        try:
            if not row.get("Restarts", "").isdigit():
                row["Restarts"] = str(repeats)
            accounted.append(_accounted(row, steps))
        except (KeyError, ValueError) as e:
            raise ClusterError(f"sacct says of job {job_id} what cannot be read: {e!r}.") from e
    return accounted


def _accounted(row: dict[str, str], steps: Iterable[dict[str, str]] = ()) -> AccountedJob:
    facts = job_facts(row)
    began, ended = facts["started_s"], facts["ended_s"]
    elapsed = max(0.0, ended - began) if began and ended else 0.0
    steps = tuple(steps)
    memory = re.search(r"\bmem=([^,]+)", row.get("Tres", ""))
    rss = [mib(size) if size[-1].isalpha() else int(size) >> 20
           for step in steps if (size := step.get("MaxRSS"))]  # fmt: skip
    return AccountedJob(
        **facts, user=row.get("User", ""), account=row.get("Account", ""), partition=row.get("Partition", ""),
        elapsed_s=float(row["ElapsedRaw"] or 0) if "ElapsedRaw" in row else elapsed,
        limit_minutes=minutes(row.get("TimeLimit", "")), cpu_count=int(row.get("ProcCnt") or 0),
        gpu_count=gpu_count(row.get("Tres", "")) or gpu_count(row.get("Gres", "")),
        node_count=int(row.get("NodeCnt") or 0), cpu_s=_cpu_seconds(row.get("TotalCPU", "")),
        memory_peak_mib=max(rss, default=None), memory_mib=mib(memory[1]) if memory else 0,
        task_count=max((int(step.get("NTasks") or 1) for step in steps), default=1),
        folder=Path(row["WorkDir"]) if row.get("WorkDir") else None,
    )  # fmt: skip


def _cpu_seconds(text: str) -> float | None:
    """Of "1-02:03:04", "02:03.456"; zero is what sacct says where nothing was measured."""
    whole, _, fraction = text.partition(".")
    return (seconds(whole, bare_s=1) or 0) + float(f"0.{fraction or 0}") or None


# -- the list of jobs completed --------------------------------------------------------------------

_KEY = re.compile(
    r"(JobId|UserId|GroupId|Name|JobState|Partition|TimeLimit|StartTime|EndTime|NodeList|NodeCnt|ProcCnt|"
    r"WorkDir|ReservationName|Tres|Gres|Account|QOS|WcKey|Cluster|SubmitTime|EligibleTime|ArrayJobId|"
    r"ArrayTaskId|DerivedExitCode|ExitCode)="
)


def _completed(commands: Commands) -> list[AccountedJob]:
    settings = read_config(commands.query("scontrol", "show", "config"))
    if "filetxt" not in settings.get("JobCompType", ""):
        raise NoAccounting(
            "This cluster has neither accounting storage nor a list of jobs completed: nothing is known of "
            "jobs that slurmctld forgot.",
            next_step="The history of headrace's agents knows those that it saw.",
        )
    path = Path(settings.get("JobCompLoc", "").strip())
    next_step = "It lies on the machine of slurmctld, and may be its user's alone."
    what = "the list of jobs completed cannot be read"
    with explained(NoAccounting, path, what, next_step), path.open("rb") as f:
        size = f.seek(0, 2)
        f.seek(max(0, size - COMPLETED_BYTES_MAX))
        if f.tell():
            f.readline()  # it may be cut
        text = f.read(COMPLETED_BYTES_MAX).decode(errors="replace")
    # A job that started again has a line for each end of it: the last one counts, as of sacct's.
    return list({job.job_id: job for job in read_completed(text.splitlines())}.values())


def read_completed(lines: Iterable[str]) -> Iterator[AccountedJob]:
    """Of the lines that jobcomp/filetxt writes. What is no such line, or is being written, is left out."""
    for line in lines:
        # A name may hold blanks: a value ends where the next key begins.
        parts = [part.strip() for part in _KEY.split(line)[1:]]
        row = dict(zip(parts[::2], parts[1::2], strict=True))
        if not row.keys() >= {"StartTime", "EndTime", "ExitCode"}:
            continue
        with contextlib.suppress(KeyError, ValueError):
            row["JobId"] = task_id(row["JobId"], row.get("ArrayJobId"), row.get("ArrayTaskId"))
            row["User"] = row.get("UserId", "").partition("(")[0]
            yield _accounted(row)
