"""scontrol: nodes, partitions and jobs as `scontrol --details show` prints them.

The text is the same from 20.11 to 25.x but for a few keys, is a quarter of the JSON, and says everywhere which
GPUs a job has on which node. Of a cluster's jobs, of which there may be 50,000, only the lines that are needed
are read on, and what they say alike is remembered. Of the few jobs that an executor asks for, it is all words.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.cluster.executor import JobState, JobStatus, fill_pattern
from headrace.cluster.notation import (
    compress_hosts,
    expand_hosts,
    expand_indices,
    gpu_count,
    job_state,
    mib,
    minutes,
    parse_gres,
    task_id,
    unix_seconds,
)
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.snapshot import Allocation, ClusterJob, ClusterSnapshot, Node, Partition
from headrace.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.cluster.notation import Gres

T = TypeVar("T")

# -- blocks of KEY=VALUE lines -------------------------------------------------------------------------

_WORD = re.compile(r"(?:^|\s)(\w+)=(\S*)")


def _blocks(text: str, key: str) -> list[str]:
    """The parts of a text that begin with a line of `KEY=`."""
    return [f"{key}={part.rstrip(chr(10))}" for part in f"\n{text}".split(f"\n{key}=")[1:]]


def _lines(block: str) -> dict[str, str]:
    """What the lines of a block say behind their first keys; of two with one key the first."""
    lines = [line.partition("\n")[0].partition("=") for line in block.split("\n   ")]
    return {key: rest for key, _, rest in reversed(lines)}


def _each(text: str, key: str, kind: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """What the blocks of a text say, each as `read` has it."""
    values = []
    for block in _blocks(text, key):
        try:
            values.append(read(block))
        except (KeyError, ValueError) as e:
            raise _unreadable(kind, block, e) from e
    return tuple(values)


def _unreadable(kind: str, block: str, error: Exception | None = None) -> ClusterError:
    begin = " ".join(block.split())[:160]
    why = f" ({error!r})" if error else ""
    return ClusterError(
        f"scontrol says of a {kind} what cannot be read{why}: {begin!r}.",
        next_step="Please report it with the version (`scontrol --version`).",
    )


# -- nodes -----------------------------------------------------------------------------------------

_REASON_BY = re.compile(r" \[[^\[\]]*@[^\[\]]*\]\Z")


def read_nodes(text: str) -> tuple[Node, ...]:
    """All nodes that `scontrol --details show nodes` prints."""
    return _each(text, "NodeName", "node", _node)


def _node(block: str) -> Node:
    # What comes behind is not read, but for the reason.
    end = block.find("\n   BootTime=")
    words = (block[:end] if end > 0 else block).split()
    fields = dict([word.split("=", 1) for word in words if "=" in word])
    gres, used = parse_gres(fields.get("Gres", "")), parse_gres(fields.get("GresUsed", ""))
    return Node(
        name=fields["NodeName"],
        states=_node_states(fields.get("State", "")),
        cpus=int(fields.get("CPUTot", 0)),
        threads_per_core=int(fields.get("ThreadsPerCore", 1)),
        memory_mib=mib(fields.get("RealMemory", "")),
        gpus=sum(gpu.number for gpu in gres),
        gpu_type=next((gpu.type for gpu in gres if gpu.type), ""),
        gpus_allocated=_joined(used),
        cpus_allocated=int(fields.get("CPUAlloc", 0)),
        cpu_load=float(load) if (load := fields.get("CPULoad", "N/A")) != "N/A" else None,
        memory_allocated_mib=mib(fields.get("AllocMem", "")),
        partitions=_names(fields.get("Partitions", "")),
        features=_names(fields.get("ActiveFeatures") or fields.get("AvailableFeatures") or ""),
        reason=_REASON_BY.sub("", _lines(block).get("Reason", "").rstrip()),
        architecture=fields.get("Arch", ""),
    )


def _names(text: str) -> tuple[str, ...]:
    return () if text in {"", "(null)"} else tuple(text.split(","))


def _node_states(text: str) -> tuple[str, ...]:
    # "IDLE*+DRAIN": the star means that it does not respond.
    words = text.lower().replace("*", "+not_responding+").split("+")
    return tuple(dict.fromkeys(filter(None, (word.rstrip("~#!%$@^-") for word in words))))


# -- partitions ------------------------------------------------------------------------------------


def read_partitions(text: str) -> tuple[Partition, ...]:
    """All partitions that `scontrol show partitions` prints."""
    return _each(text, "PartitionName", "partition", _partition)


def _partition(block: str) -> Partition:
    fields = dict(_WORD.findall(block))
    most = fields.get("MaxNodes", "UNLIMITED")
    return Partition(
        name=fields["PartitionName"],
        nodes=expand_hosts(fields.get("Nodes", "")),
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", "UP").lower(),
        max_minutes=minutes(fields.get("MaxTime", "UNLIMITED")),
        max_nodes=int(most) if most.isdigit() else None,
        max_memory_per_cpu_mib=mib(fields.get("MaxMemPerCPU", "")) or None,
    )


# -- jobs ------------------------------------------------------------------------------------------

_DETAIL = re.compile(r"\n {5}Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES(?:_IDX)?=(\S*)")
_PER = re.compile(r"\n   TresPer(Job|Node|Socket|Task)=(\S+)")
_MEMORY = re.compile(r"(?:^|,)mem=([^,\s]+)")


def read_jobs(text: str) -> tuple[ClusterJob, ...]:
    """All jobs that `scontrol --details show jobs` prints; what waits of an array is one of them."""
    return _each(text, "JobId", "job", _job)


def _job(block: str) -> ClusterJob:
    lines = _lines(block)
    ids, name = lines["JobId"].split(" JobName=", 1)
    priority, _, payers = lines["Priority"].partition(" ")
    account, qos = _paid_by(payers)
    state, reason = _doing(lines["JobState"])
    _, limit = lines["RunTime"].split(" TimeLimit=", 1)
    # Behind the nodes that it has there may be some that are planned: " SchedNodeList=node0".
    nodes = expand_hosts(lines["NodeList"].partition(" ")[0])
    # From 23.02 on there are two lines, of what is asked and of what is had.
    kinds = [lines.get(key, "(null)") for key in ("AllocTRES", "TRES", "ReqTRES")]
    tres = next((kind for kind in kinds if kind not in {"", "(null)"}), "")
    node_count, cpu_count, memory, gpus = _resources(lines["NumNodes"], tres)
    allocations = _allocations(block) if nodes else ()
    if allocations:
        gpus = sum([a.gpu_count for a in allocations]) or gpus
    elif not gpus:
        gpus = _gpus_wanted(block, node_count)
    # By position: in half the time that it takes by name.
    return ClusterJob(
        _task_of(ids), name, lines["UserId"].partition("(")[0], account,
        lines["Partition"].partition(" ")[0], state, reason, qos, nodes, allocations, node_count,
        cpu_count, gpus, memory, unix_seconds(lines["SubmitTime"].partition(" ")[0]),
        unix_seconds(lines["StartTime"].partition(" ")[0]), minutes(limit.partition(" ")[0]), int(priority),
    )  # fmt: skip


def _task_of(ids: str) -> str:
    """As users know a job of "17" or of "17 ArrayJobId=12 ArrayTaskId=3"."""
    number, _, array = ids.partition(" ")
    if not number.isdigit():
        raise ValueError(f"{number!r} is no number")
    fields = dict(_WORD.findall(array))
    return task_id(number, fields.get("ArrayJobId"), fields.get("ArrayTaskId"))


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
def _resources(line: str, tres: str) -> tuple[int, int, int, int]:
    """Nodes, CPUs, memory (MiB) and GPUs of "1-4 NumCPUs=8 ..." and TRES; no GPUs where that counts none."""
    nodes, cpus = (
        dict(_WORD.findall(f"NumNodes={line}")).get(key, "0") for key in ("NumNodes", "NumCPUs")
    )
    memory = _MEMORY.search(tres)
    had = mib(memory[1]) if memory else 0
    return int(nodes.partition("-")[0]), int(cpus.partition("-")[0]), had, gpu_count(tres)


def _allocations(block: str) -> tuple[Allocation, ...]:
    allocations = []
    for hosts, cpu_ids, memory, gres in _DETAIL.findall(block):
        gpus = parse_gres(gres)
        indices = gpus[0].indices if len(gpus) == 1 else _joined(gpus)
        count = sum([gpu.number for gpu in gpus])
        cpus = len(expand_indices(cpu_ids))
        part = (cpus, int(memory), count, indices)
        allocations += [Allocation(host, *part) for host in expand_hosts(hosts)]
    return tuple(allocations)


def _joined(gpus: tuple[Gres, ...]) -> tuple[int, ...]:
    return tuple(sorted({i for gpu in gpus for i in gpu.indices}))


def _gpus_wanted(block: str, nodes: int) -> int:
    """What a job that waits asks for, where TRES does not count GPUs (AccountingStorageTRES)."""
    for unit, tres in _PER.findall(block):
        if count := gpu_count(tres):
            if unit == "Task":
                tasks = re.search(r" NumTasks=(\d+)", block)
                return count * (int(tasks[1]) if tasks else 1)
            return count * (1 if unit == "Job" else nodes)
    return 0


# -- how jobs are and how they ended -------------------------------------------------------------------

TASKS_MAX = 10_000
"""So many tasks of an array that wait have an entry each; those of a larger one are one entry together."""

_NO_TASK = "4294967294"
"""What scontrol fills in as the number of a task that has none yet."""


def read_statuses(text: str) -> list[JobStatus]:
    """Of what `scontrol show job` prints, one for each task."""
    statuses = _each(text, "JobId", "job", _statuses)
    if not statuses and text.strip() and "No jobs" not in text:
        raise _unreadable("job", text)
    return [status for of_job in statuses for status in of_job]


def _statuses(block: str) -> list[JobStatus]:
    lines = _lines(block)
    if "WorkDir" not in lines:
        raise _unreadable("job, which is cut short,", block)
    ids, _, name = block.partition("\n")[0].partition(" JobName=")
    words = f"{ids} {block.partition(chr(10))[2]}"
    nodes = lines.get("NodeList", "").partition(" ")[0]
    fields = dict(_WORD.findall(words)) | {"Name": name, "NodeList": nodes}
    work, (_, reason) = lines["WorkDir"].rstrip(), _doing(lines["JobState"])
    status = JobStatus(**job_facts(fields), reason=reason, folder=Path(work) if work else None)
    job_ids, array_id, tasks = [status.job_id], fields.get("ArrayJobId"), fields.get("ArrayTaskId")
    if array_id and tasks is not None:
        try:
            numbers = expand_indices(tasks.partition("%")[0])
        except ValueError:  # "1,3,5,...": cut short, or too many
            numbers = ()
        if not 0 < len(numbers) <= TASKS_MAX:
            return [dataclasses.replace(status, job_id=task_id(status.job_id, array_id, tasks))]
        job_ids = [f"{array_id}_{task}" for task in numbers]
    pattern = lines.get("StdOut", "").rstrip()
    user = lines.get("UserId", "").partition("(")[0]
    of_tasks = [dataclasses.replace(status, job_id=job_id) for job_id in job_ids]
    return [
        dataclasses.replace(each, output=_output_path(pattern, each, user, status.job_id))
        for each in of_tasks
    ]


def job_facts(fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `JobStatus`, of what scontrol, sacct or a list of jobs completed says (scontrol's names).

    The exit code is None where Slurm says 0 of a script that did not end by itself.
    """
    state = job_state(fields["JobState"])
    exit_code, signal = (int(part or 0) for part in (fields.get("ExitCode") or "0:0").split(":"))
    is_known = state.is_over and not signal and (exit_code or state is JobState.COMPLETED)
    return {
        "job_id": fields["JobId"], "name": fields.get("Name", ""), "state": state,
        "nodes": expand_hosts(fields.get("NodeList", "")), "exit_code": exit_code if is_known else None,
        "signal": signal or None, "restarts": int(fields.get("Restarts") or 0),
        "submitted_s": unix_seconds(fields.get("SubmitTime", "")),
        "started_s": unix_seconds(fields.get("StartTime", "")),
        "ended_s": unix_seconds(fields.get("EndTime", "")) if state.is_over else None,
    }  # fmt: skip


def _output_path(pattern: str, status: JobStatus, user: str, number: str) -> Path | None:
    """Most versions fill in the pattern, some leave parts of it."""
    if pattern in {"", "(null)"}:
        return None
    if task := status.job_id.partition("_")[2]:
        pattern = pattern.replace(_NO_TASK, task)
    node = status.nodes[0] if status.nodes else ""
    name = fill_pattern(pattern, status.job_id, status.name, user, node, number=number)
    return Path(name if "%" in pattern else pattern)


# -- snapshots and recordings --------------------------------------------------------------------------


def read_config(text: str) -> dict[str, str]:
    """What `scontrol show config` prints."""
    return dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))


def snapshot_of(
    *, nodes: str, partitions: str, config: str, taken_s: float, jobs: str = ""
) -> ClusterSnapshot:
    """What `scontrol show` printed of each, and when (Unix seconds). Jobs that are over are left out."""
    settings = read_config(config)
    # A hundred thousand objects that all stay: to look through them for garbage takes as long as to make them.
    collected = gc.isenabled()
    gc.disable()
    try:
        listed = tuple(job for job in read_jobs(jobs) if not job.state.is_over)
        known = read_nodes(nodes), read_partitions(partitions), listed
    finally:
        if collected:
            gc.enable()
    cluster, version = (settings.get(key, "").strip() for key in ("ClusterName", "SLURM_VERSION"))
    return ClusterSnapshot(cluster, version, taken_s, *known)


def read_snapshot(commands: Commands | None = None, *, jobs: bool = True) -> ClusterSnapshot:
    """The cluster as it is now; all commands are asked at once."""
    query, taken_s = (commands or Commands()).query, time.time()
    show = [("show", "partitions"), ("show", "config"), ("--details", "show", "nodes")]
    show += [("--details", "show", "jobs")] if jobs else []
    with ThreadPoolExecutor() as pool:
        texts = {words[-1]: pool.submit(query, "scontrol", *words) for words in show}
    return snapshot_of(**{what: text.result() for what, text in texts.items()}, taken_s=taken_s)


def node_here(commands: Commands, host: str, name: str = "") -> Node | None:
    """The node of this name or, without one, that the machine of this host name is; None: there is none.

    Raises:
        ClusterError: it is several, or slurmctld does not answer.
    """
    show = ("scontrol", "show", "aliases", host)
    names = [name] if name else commands.query(*show).split()
    if len(names) > 1:
        raise ClusterError(
            f"Slurm calls {host} {compress_hosts(names)}, {len(names)} nodes.",
            next_step="Say which of them this is: HEADRACE_NODE=NAME headrace agent start.",
        )
    if not names:
        return None
    shown = commands.query("scontrol", "--details", "show", "node", *names)
    return next(iter(read_nodes(shown)), None)
