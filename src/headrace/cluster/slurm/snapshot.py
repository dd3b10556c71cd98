"""Snapshot: a Slurm cluster at one moment, from what `scontrol --details show` prints, or once printed.

The text is the same from 20.11 to 25.x but for a few keys, is a quarter of the JSON, and says everywhere which
GPUs a job has on which node. It is scanned, not made into tables: there may be 50,000 jobs.
"""

from __future__ import annotations

import functools
import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.cluster.hostlist import expand_hosts
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.text import (
    blocks,
    gpu_count,
    job_state,
    mib,
    minutes,
    parse_gres,
    task_id,
    unix_seconds,
    value,
)
from headrace.cluster.snapshot import Allocation, ClusterSnapshot, Job, Node, Partition
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.cluster.executor import JobState
    from headrace.cluster.slurm.text import Gres


# -- nodes -----------------------------------------------------------------------------------------

_WORD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_REASON_BY = re.compile(r" \[[^\[\]]*@[^\[\]]*\]\Z")


def read_nodes(text: str) -> tuple[Node, ...]:
    """All nodes that `scontrol --details show nodes` prints.

    Raises:
        ClusterError: it prints something else.
    """
    return tuple(_node(block) for block in blocks(text, "NodeName"))


def _node(block: str) -> Node:
    # What comes behind is not read, but for the reason.
    end = block.find("\n   BootTime=")
    fields = dict(_WORD.findall(block[:end] if end > 0 else block))
    try:
        gres, used = parse_gres(fields.get("Gres", "")), parse_gres(fields.get("GresUsed", ""))
        return Node(
            name=fields["NodeName"],
            states=_node_states(fields.get("State", "")),
            cpus=int(fields.get("CPUTot", 0)),
            sockets=int(fields.get("Sockets", 1)),
            cores_per_socket=int(fields.get("CoresPerSocket", 1)),
            threads_per_core=int(fields.get("ThreadsPerCore", 1)),
            memory_mib=mib(fields.get("RealMemory", "")),
            gpus=sum(gpu.number for gpu in gres),
            gpu_type=next((gpu.type for gpu in gres if gpu.type), ""),
            gpus_allocated=_joined(used),
            cpus_allocated=int(fields.get("CPUAlloc", 0)),
            cpu_load=_decimal(fields.get("CPULoad", "N/A")),
            memory_allocated_mib=mib(fields.get("AllocMem", "")),
            memory_free_mib=mib(free) if (free := fields.get("FreeMem", "N/A")) != "N/A" else None,
            partitions=_names(fields.get("Partitions", "")),
            features=_names(fields.get("ActiveFeatures") or fields.get("AvailableFeatures") or ""),
            reason=_REASON_BY.sub("", value(block, "Reason")),
            architecture=fields.get("Arch", ""),
        )
    except (KeyError, ValueError) as e:
        raise _odd("node", block, e) from e


def _node_states(text: str) -> tuple[str, ...]:
    # "IDLE*+DRAIN": the star means that it does not respond.
    states: list[str] = []
    for word in text.split("+"):
        states.append(word.rstrip("*~#!%$@^-").lower())
        if "*" in word:
            states.append("not_responding")
    return tuple(dict.fromkeys(state for state in states if state))


# -- partitions ------------------------------------------------------------------------------------


def read_partitions(text: str) -> tuple[Partition, ...]:
    """All partitions that `scontrol show partitions` prints.

    Raises:
        ClusterError: it prints something else.
    """
    return tuple(_partition(block) for block in blocks(text, "PartitionName"))


def _partition(block: str) -> Partition:
    fields = dict(_WORD.findall(block))
    try:
        most = fields.get("MaxNodes", "UNLIMITED")
        return Partition(
            name=fields["PartitionName"],
            nodes=expand_hosts(fields.get("Nodes", "")),
            is_default=fields.get("Default") == "YES",
            state=fields.get("State", "UP").lower(),
            max_minutes=minutes(fields.get("MaxTime", "UNLIMITED")),
            default_minutes=minutes(fields.get("DefaultTime", "NONE")),
            max_nodes=int(most) if most.isdigit() else None,
            default_memory_per_cpu_mib=mib(fields.get("DefMemPerCPU", "")) or None,
            max_memory_per_cpu_mib=mib(fields.get("MaxMemPerCPU", "")) or None,
        )
    except (KeyError, ValueError) as e:
        raise _odd("partition", block, e) from e


# -- jobs ------------------------------------------------------------------------------------------

_FIRST = re.compile(
    r"JobId=(\d+)(?: ArrayJobId=(\d+))?(?: ArrayTaskId=(\S+))?(?: \w+=\S*)*? JobName=(.*)",
    re.DOTALL,
)
_DETAIL = re.compile(r"\n {5}Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES(?:_IDX)?=(\S*)")
_PER = re.compile(r"\n   TresPer(Job|Node|Socket|Task)=(\S+)")
_MEMORY = re.compile(r"(?:^|,)mem=([^,\s]+)")


def read_jobs(text: str) -> tuple[Job, ...]:
    """All jobs that `scontrol --details show jobs` prints; what waits of an array is one of them.

    Raises:
        ClusterError: it prints something else.
    """
    starts = [0] if text.startswith("JobId=") else []
    at = text.find("\nJobId=")
    while at >= 0:
        starts.append(at + 1)
        at = text.find("\nJobId=", at + 1)
    jobs = []
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=False):
        try:
            jobs.append(_job(text, begin, end))
        except ValueError as e:
            raise _odd("job", text[begin:end], e) from e
    return tuple(jobs)


def _job(text: str, begin: int, end: int) -> Job:
    # The lines of a job always come in this order, so each is looked for behind the one before; what is missing
    # is a ValueError. Most lines are the same for many jobs: what they say is remembered by their text.
    find, index = text.find, text.index
    at = find("\n", begin, end)
    job_id, array_id, task, name = _first(text[begin:at])
    at = index("\n   UserId=", at, end) + 11
    user = text[at : find("(", at, end)]
    at = index("\n   Priority=", at, end) + 13
    blank = find(" ", at, end)
    priority = int(text[at:blank])
    at = find("\n", blank, end)
    account, qos = _paid_by(text[blank:at])
    at = index("\n   JobState=", at, end) + 13
    state, reason = _doing(text[at : find("\n", at, end)])
    at = index(" TimeLimit=", at, end) + 11
    limit = text[at : find(" ", at, end)]
    at = index("\n   SubmitTime=", at, end) + 15
    submitted = text[at : find(" ", at, end)]
    at = index("\n   StartTime=", at, end) + 14
    started = text[at : find(" ", at, end)]
    at = index("\n   Partition=", at, end) + 14
    partition = text[at : find(" ", at, end)]
    at = index("\n   NodeList=", at, end) + 13
    stop = index("\n", at, end)
    nodes = expand_hosts(text[at:stop])
    at = index("\n   NumNodes=", stop, end) + 13
    stop = find("\n   Socks", at, end)
    node_count, cpu_count, memory, gpus = _resources(text[at:stop])
    allocations = _allocations(text, stop, end) if nodes else ()
    if allocations:
        gpus = sum([a.gpu_count for a in allocations]) or gpus
    elif not gpus:
        gpus = _gpus_wanted(text[at:end], node_count)
    # By position: in half the time that it takes by name. Most times are one of a kind: not remembered.
    return Job(
        job_id if array_id is None else task_id(job_id, array_id, task), name, user, account, partition,
        state, reason, qos, nodes, allocations, node_count, cpu_count, gpus, memory,
        float(submitted) if submitted.isdigit() else unix_seconds(submitted),
        unix_seconds(started), minutes(limit), priority,
    )  # fmt: skip


def _first(line: str) -> tuple[str, str | None, str | None, str]:
    number, separator, name = line[6:].partition(" JobName=")
    if separator and number.isdigit():
        return number, None, None, name
    if (match := _FIRST.match(line)) is None:
        raise ValueError("no JobName")
    return match[1], match[2], match[3], match[4]


@functools.lru_cache(maxsize=4096)
def _paid_by(line: str) -> tuple[str, str]:
    """Of " Nice=0 Account=lab QOS=normal WCKey=*"."""
    fields = dict(_WORD.findall(line))
    account, qos = fields.get("Account", ""), fields.get("QOS", "")
    return "" if account == "(null)" else account, "" if qos == "(null)" else qos


@functools.lru_cache(maxsize=4096)
def _doing(line: str) -> tuple[JobState, str]:
    """Of "PENDING Reason=Priority Dependency=(null)"; blanks in reasons are written as underscores."""
    state, _, rest = line.partition(" Reason=")
    reason = re.split(r" (?:FailedNode|Dependency)=", rest, maxsplit=1)[0].replace("_", " ")
    return job_state(state), "" if reason == "None" else reason


@functools.lru_cache(maxsize=4096)
def _resources(lines: str) -> tuple[int, int, int, int]:
    """Nodes, CPUs, memory (MiB) and GPUs of "1-4 NumCPUs=8 ..." and of the lines of TRES below it.

    GPUs are 0 where TRES does not count them. From 23.02 on there are two lines, of what is asked and of what
    is had.
    """
    fields = dict(_WORD.findall(f"NumNodes={lines}"))
    tres = next(
        (t for t in map(fields.get, ("AllocTRES", "TRES", "ReqTRES")) if t and t != "(null)"), ""
    )
    memory = _MEMORY.search(tres)
    nodes = int(fields["NumNodes"].partition("-")[0])
    cpus = int(fields.get("NumCPUs", "0").partition("-")[0])
    return nodes, cpus, mib(memory[1]) if memory else 0, gpu_count(tres)


def _allocations(text: str, begin: int, end: int) -> tuple[Allocation, ...]:
    allocations = []
    for hosts, cpu_ids, memory, gres in _DETAIL.findall(text, begin, end):
        gpus = parse_gres(gres)
        indices = gpus[0].indices if len(gpus) == 1 else _joined(gpus)
        count = sum([gpu.number for gpu in gpus])
        cpus = _count_indices(cpu_ids)
        allocations += [
            Allocation(host, cpus, int(memory), count, indices) for host in expand_hosts(hosts)
        ]
    return tuple(allocations)


def _joined(gpus: tuple[Gres, ...]) -> tuple[int, ...]:
    return tuple(sorted({i for gpu in gpus for i in gpu.indices}))


@functools.lru_cache(maxsize=4096)
def _count_indices(text: str) -> int:
    total = 0
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first.isdigit():
            total += int(last) - int(first) + 1 if dash else 1
    return total


def _gpus_wanted(block: str, nodes: int) -> int:
    """What a job that waits asks for, where TRES does not count GPUs (AccountingStorageTRES)."""
    for unit, tres in _PER.findall(block):
        if count := gpu_count(tres):
            if unit == "Task":
                tasks = re.search(r" NumTasks=(\d+)", block)
                return count * (int(tasks[1]) if tasks else 1)
            return count * (1 if unit == "Job" else nodes)
    return 0


# -- helpers ---------------------------------------------------------------------------------------


def _names(text: str) -> tuple[str, ...]:
    return () if text in {"", "(null)"} else tuple(text.split(","))


def _decimal(text: str) -> float | None:
    return float(text) if text != "N/A" else None


def _lines(block: str) -> Iterator[str]:
    return (line.strip() for line in block.splitlines() if line.strip())


def _odd(kind: str, block: str, error: Exception | None = None) -> ClusterError:
    begin = " ".join(_lines(block))[:160]
    why = f" ({error!r})" if error else ""
    return ClusterError(
        f"scontrol says of a {kind} what cannot be read{why}: {begin!r}.",
        next_step="Please report it with the version (`scontrol --version`).",
    )


# -- snapshots and recordings --------------------------------------------------------------------------

_CONFIG = re.compile(r"^(\w+)\s*= (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScontrolOutput:
    """What the commands printed.

    Attributes:
        nodes, jobs, partitions, config: of scontrol.
        taken_s: when, in Unix seconds.
    """

    nodes: str
    jobs: str
    partitions: str
    config: str
    taken_s: float

    def read(self) -> ClusterSnapshot:
        """What it says. Jobs that are over are left out.

        Raises:
            ClusterError: it cannot be read.
        """
        config = dict(_CONFIG.findall(self.config))
        # A hundred thousand objects that all stay: to look through them for garbage takes as long as to make
        # them.
        collected = gc.isenabled()
        gc.disable()
        try:
            nodes, jobs = read_nodes(self.nodes), read_jobs(self.jobs)
            partitions = read_partitions(self.partitions)
        finally:
            if collected:
                gc.enable()
        return ClusterSnapshot(
            cluster=config.get("ClusterName", "").strip(),
            version=config.get("SLURM_VERSION", "").strip(),
            taken_s=self.taken_s,
            nodes=nodes,
            partitions=partitions,
            jobs=tuple(job for job in jobs if not job.state.is_over),
        )


def record(commands: Commands | None = None, *, jobs: bool = True) -> ScontrolOutput:
    """Ask all commands at once.

    Args:
        commands: how they are called.
        jobs: ask for them; to lay out a request they are not needed, and there may be many.

    Raises:
        ClusterError: Slurm is missing, or does not answer.
    """
    commands = commands or Commands()
    asked = {
        "nodes": ("--details", "show", "nodes"),
        "jobs": ("--details", "show", "jobs"),
        "partitions": ("show", "partitions"),
        "config": ("show", "config"),
    }
    if not jobs:
        del asked["jobs"]
    taken_s = time.time()
    with ThreadPoolExecutor(len(asked)) as pool:
        texts = pool.map(lambda words: commands.query("scontrol", *words), asked.values())
        return ScontrolOutput(
            **{"jobs": "", **dict(zip(asked, texts, strict=True))}, taken_s=taken_s
        )


def read_snapshot(commands: Commands | None = None, *, jobs: bool = True) -> ClusterSnapshot:
    """The cluster as it is now.

    Args:
        commands: how Slurm's commands are called.
        jobs: ask for them.

    Raises:
        ClusterError: there is no Slurm, it does not answer in time, or says what cannot be read.
    """
    return record(commands, jobs=jobs).read()
