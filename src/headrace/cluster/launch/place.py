"""Place: what a job has, and what its scheduler does for it: time left, lost nodes, a new start.

What a job has is read from the environment alone: Slurm says it in SLURM_* variables, other executors in
HEADRACE_JOB_*; without either the job is this machine. Times are asked as what is *left*, by the scheduler's
own clock, so that a node whose clock is wrong stops in time all the same.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.notation import expand_hosts, expand_indices, seconds
from headrace.cluster.slurm.commands import Commands
from headrace.errors import ClusterError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


REQUEUE_EXIT = 75
"""EX_TEMPFAIL: ends a job that asks its executor to start it again."""

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_HIDDEN = {"-1", "NoDevFiles"}
"""What stands for no GPU; Slurm says the latter to jobs that asked for none."""

_INSIDE = "Start `headrace launch` once, in the batch script or a shell of the allocation."
_SLURM = Commands(deadline_s=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """One node's view of a job.

    Attributes:
        scheduler: `slurm`, `ray`, `kubernetes`, `local` (headrace's executor of this machine) or `none`.
        job_id: as the scheduler prints it; of a task of an array, "17_3"; "" without a scheduler.
        nodes: their names, in the order of their indices.
        gpus_per_node: GPUs of this node that the job may use.
        tasks_per_node: as was asked for; None if it was not.
        cpus_per_node: CPUs of this node that the job may use.
        restarts: how often the job was requeued.
        end_s: when it will be ended, Unix seconds; None if not known, or Slurm is to be asked (`left_s`).
        can_requeue: whether an executor of ours starts it again when asked.
    """

    scheduler: str
    job_id: str
    nodes: tuple[str, ...]
    name: str = ""
    index: int = 0
    gpus_per_node: int = 0
    tasks_per_node: int | None = None
    cpus_per_node: int = 1
    restarts: int = 0
    end_s: float | None = None
    can_requeue: bool = False

    def __post_init__(self) -> None:
        if not self.nodes:
            raise LaunchError("The job has no nodes.")
        if not 0 <= self.index < len(self.nodes):
            raise LaunchError(
                f"This node's index is {self.index}, expected 0 to {len(self.nodes) - 1}: the job has "
                f"{len(self.nodes)} nodes.",
                next_step=_INSIDE,
            )

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> JobPlace:
        """This process's, from its environment."""
        given = os.environ if environment is None else environment
        if "HEADRACE_JOB_NODES" in given:
            return _of_local(given)
        if "SLURM_JOB_ID" in given:
            return _of_slurm(given)
        return cls(
            scheduler="none", job_id="", nodes=(socket.gethostname(),),
            gpus_per_node=_gpu_count(given, machine_gpus()), cpus_per_node=len(os.sched_getaffinity(0)),
        )  # fmt: skip

    def left_s(self) -> float | None:
        """Seconds until the job is ended; None if it is not, or nobody says."""
        if self.scheduler != "slurm":
            return None if self.end_s is None else self.end_s - time.time()
        text = _ask("squeue", "--noheader", f"--jobs={_slurm_id()}", "--format=%L")
        try:
            return seconds(text.strip(), bare_s=1)
        except ValueError:  # "INVALID"
            return None

    def is_requeued_when_asked(self) -> bool:
        """Whether the scheduler would start the job again."""
        if self.scheduler != "slurm":
            return self.can_requeue
        # An interactive allocation has nothing that could be started again.
        facts = _ask("scontrol", "show", "job", _slurm_id()).split()
        return {"Requeue=1", "BatchFlag=1"} <= set(facts)

    def silent_nodes(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those nodes that the scheduler cannot reach either, by its last look."""
        if self.scheduler != "slurm":
            return ()
        text = _ask("sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N %T")
        states = dict(line.split() for line in text.splitlines())
        silent = {node for node, state in states.items() if state.endswith("*") or "down" in state}
        return tuple(name for name in names if name in silent)

    def keep_nodes(self, keep: Sequence[str]) -> str:
        """Takes all other nodes out of the running job; why that cannot be done, "" if it is.

        Slurm ends a job that has a node which does not answer, after SlurmdTimeout, and does not start it again
        before: a job that has given the node up goes on, or starts again at once.
        """
        if self.scheduler != "slurm":
            return ""
        with tempfile.TemporaryDirectory() as folder:  # scontrol writes scripts where it is
            return _refusal(f"JobId={_slurm_id()}", f"NodeList={','.join(keep)}", folder)

    def requeue(self, lost: Collection[str] = ()) -> None:
        """Has the job start again; under Slurm this ends the process soon.

        Args:
            lost: nodes on which it is not to start, as long as others are left.
        """
        if self.scheduler != "slurm":
            return  # our exit status says it
        job = _slurm_id()
        # Only a job that waits can be told which nodes it may not have, and by then Slurm ends what ran in it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            _SLURM.run("scontrol", "requeue", job)
        except ClusterError as e:
            raise LaunchError(
                f"Job {job} cannot be requeued: {e.message}",
                next_step="Submit it again: it goes on from its checkpoint.",
            ) from e
        if excluded := self._excluded(lost):
            _refusal(f"JobId={job}", f"ExcNodeList={','.join(excluded)}")

    def _excluded(self, lost: Collection[str]) -> list[str]:
        """The nodes that the job may not start on from now on; none if it needs them all to start at all."""
        text = _ask("scontrol", "show", "job", _slurm_id())
        facts = dict(word.split("=", 1) for word in text.split() if "=" in word)
        excluded = {*lost, *expand_hosts(facts.get("ExcNodeList", ""))}
        partition = f"--partition={facts.get('Partition', '')}"
        there = _ask("sinfo", "--noheader", "--Node", partition, "--format=%N").split()
        enough = len(set(there) - excluded) >= len(self.nodes)
        return sorted(excluded) if lost and enough else []


def job_key() -> str:
    """The secret by which a job's pods know each other."""
    try:
        return Path(os.environ["HEADRACE_JOB_FILES"], "key").read_text().strip()
    except (KeyError, OSError) as e:
        raise LaunchError(f"The job's secret cannot be read: {e}.", next_step=_INSIDE) from e


# -- what Slurm says -----------------------------------------------------------------------------------


def _slurm_id() -> str:
    # Of an array's task the number that Slurm gave it, which every command takes.
    return os.environ.get("SLURM_JOB_ID", "")


def _ask(*command: str) -> str:
    """What a command answers; "" where it does not."""
    try:
        return _SLURM.query(*command)
    except ClusterError:
        return ""


def _refusal(job: str, change: str, folder: str | None = None) -> str:
    """Why a job cannot be changed; "" if it was."""
    try:
        _SLURM.run("scontrol", "update", job, change, directory=folder)
    except ClusterError as e:
        return e.message
    return ""


# -- what the environment says -------------------------------------------------------------------------


def job_number(given: Mapping[str, str]) -> str:
    """The job's, as its scheduler prints it: "17", "17_3" of a task of an array; "" without a scheduler."""
    if "HEADRACE_JOB_NODES" in given:
        return given.get("HEADRACE_JOB_ID", "")
    array, task = given.get("SLURM_ARRAY_JOB_ID"), given.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else given.get("SLURM_JOB_ID", "")


def _of_slurm(given: Mapping[str, str]) -> JobPlace:
    nodes = _names(given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST") or "")
    if not nodes:
        raise LaunchError(
            f"SLURM_JOB_ID is {given['SLURM_JOB_ID']!r}, but SLURM_JOB_NODELIST names no nodes.",
            next_step=_INSIDE,
        )
    node_count = _number(given, "SLURM_JOB_NUM_NODES")
    if node_count is not None and node_count != len(nodes):
        raise LaunchError(
            f"SLURM_JOB_NODELIST={given.get('SLURM_JOB_NODELIST')!r} names {len(nodes)} nodes, "
            f"SLURM_JOB_NUM_NODES says {node_count}.",
            next_step="One of them was changed in the script; Slurm sets both.",
        )
    gpus = _number(given, "SLURM_GPUS_ON_NODE")
    if gpus is None:
        listed = given.get("SLURM_STEP_GPUS") or given.get("SLURM_JOB_GPUS")
        try:
            gpus = len(expand_indices(listed)) if listed else _gpu_count(given)
        except ValueError as e:
            raise LaunchError(f"The job's GPUs cannot be understood: {e}.") from e
    # "8(x4),4": the smallest number is what every node has.
    cpus = [int(n) for n in re.findall(r"(?:^|,)(\d+)", given.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    return JobPlace(
        scheduler="slurm", job_id=job_number(given), name=given.get("SLURM_JOB_NAME", ""), nodes=nodes,
        index=_number(given, "SLURM_NODEID") or 0, gpus_per_node=gpus,
        tasks_per_node=_number(given, "SLURM_NTASKS_PER_NODE"),
        cpus_per_node=min(cpus, default=0) or _number(given, "SLURM_CPUS_ON_NODE") or 1,
        restarts=_number(given, "SLURM_RESTART_COUNT") or 0,
    )  # fmt: skip


def _of_local(given: Mapping[str, str]) -> JobPlace:
    gpus = _number(given, "HEADRACE_JOB_GPUS_PER_NODE")
    return JobPlace(
        scheduler=given.get("HEADRACE_JOB_SCHEDULER", "local"),
        job_id=job_number(given),
        name=given.get("HEADRACE_JOB_NAME", ""),
        nodes=_names(given["HEADRACE_JOB_NODES"]) or (socket.gethostname(),),
        index=_number(given, "HEADRACE_JOB_NODE_INDEX") or 0,
        gpus_per_node=_gpu_count(given) if gpus is None else gpus,
        tasks_per_node=_number(given, "HEADRACE_JOB_TASKS_PER_NODE"),
        cpus_per_node=_number(given, "HEADRACE_JOB_CPUS_PER_NODE") or len(os.sched_getaffinity(0)),
        restarts=_number(given, "HEADRACE_JOB_RESTARTS") or 0,
        end_s=_seconds(given, "HEADRACE_JOB_END_S"),
        can_requeue=given.get("HEADRACE_JOB_REQUEUE") == "1",
    )


def _names(text: str) -> tuple[str, ...]:
    try:
        return expand_hosts(text)
    except ValueError as e:
        raise LaunchError(f"The job's list of nodes cannot be understood: {e}.") from e


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name) or ""
    if text and not text.isdigit():
        raise LaunchError(f"{name} is {text!r}, expected a number.", next_step=_INSIDE)
    return int(text) if text else None


def _seconds(given: Mapping[str, str], name: str) -> float | None:
    try:
        return float(given[name]) if given.get(name) else None
    except ValueError as e:
        raise LaunchError(f"{name} is {given[name]!r}, expected Unix seconds.") from e


def _gpu_count(given: Mapping[str, str], default: int = 0) -> int:
    visible = visible_gpus(given)
    return default if visible is None else len(visible[1])


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    """The variable that says which GPUs a process sees, and what it names; None where none says."""
    for name in GPU_VARIABLES:
        if name in environment:
            gpus = (word.strip() for word in environment[name].split(","))
            return name, tuple(
                itertools.takewhile(lambda gpu: gpu not in _HIDDEN, filter(None, gpus))
            )
    return None


def machine_gpus() -> int:
    """How many GPUs NVIDIA's driver shows on this machine."""
    return sum(re.fullmatch(r"nvidia\d+", p.name) is not None for p in Path("/dev").glob("nvidia*"))
