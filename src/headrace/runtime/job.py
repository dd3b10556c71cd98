"""JobIdentity: which job a process belongs to, and what the job has on this node, from its environment.

Slurm's words, or those of the executor that stands in for it (HEADRACE_JOB_*). What is not said, or not
in a form that makes sense, is not known: an environment may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAME_CHARACTERS_MAX", "JobIdentity", "clean", "identity_of", "local_ranks_of"]

NAME_CHARACTERS_MAX: Final = 128

_GPUS_MAX: Final = 1024
_CPUS_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """A job, as a process of it is told.

    Attributes:
        job_id: what the scheduler counts jobs with; tasks of an array have one each.
        alias: how people write it, if otherwise ("17_3" for a task of an array); "" if not.
        name: of the job.
        user: who submitted it.
        account: who pays.
        gpus: how many it has on this node.
        gpu_indices: which, as the node counts them; () if that is not said.
        cpus: how many it has on this node; 0 if that is not said.
        restarts: how often it was requeued.
        node: what the scheduler calls this node; "" if that is not said. One machine may be several nodes.
    """

    job_id: str
    alias: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    gpus: int = 0
    gpu_indices: tuple[int, ...] = ()
    cpus: int = 0
    restarts: int = 0
    node: str = ""


def identity_of(environment: Mapping[str, str]) -> JobIdentity | None:
    """The job that an environment tells of; None: none."""

    def said(*names: str) -> str:
        values = (environment.get(name, "") for name in names)
        return clean(next((value for value in values if value), ""))

    job_id = said("HEADRACE_JOB_ID", "SLURM_JOB_ID", "SLURM_JOBID")
    if not job_id:
        return None
    array, task = said("SLURM_ARRAY_JOB_ID"), said("SLURM_ARRAY_TASK_ID")
    indices = _indices(said("HEADRACE_JOB_GPUS", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"))
    return JobIdentity(
        job_id=job_id,
        alias=f"{array}_{task}" if array and task else "",
        name=said("HEADRACE_JOB_NAME", "SLURM_JOB_NAME"),
        user=said("SLURM_JOB_USER", "USER", "LOGNAME"),
        account=said("HEADRACE_JOB_ACCOUNT", "SLURM_JOB_ACCOUNT"),
        gpus=_gpus(environment, indices),
        gpu_indices=indices,
        cpus=_number(said("HEADRACE_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE"), _CPUS_MAX),
        restarts=_number(said("HEADRACE_JOB_RESTARTS", "SLURM_RESTART_COUNT"), 1 << 16),
        node=said("HEADRACE_NODE", "SLURMD_NODENAME"),
    )


def local_ranks_of(environment: Mapping[str, str]) -> int:
    """How many processes of this one's kind run on this node, as torchrun, MPI or Slurm say; 0: nobody says."""
    for name in (
        "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE",
    ):  # fmt: skip
        # Slurm's may say `2(x4)`: two on each of four nodes.
        found = _number(environment.get(name, "").partition("(")[0], 1024)
        if found:
            return found
    return 0


def clean(text: str) -> str:
    """A name as it may be kept and shown: bounded, without control characters or lone surrogates."""
    kept = "".join(c if c.isprintable() else "?" for c in text[:NAME_CHARACTERS_MAX])
    return kept.encode("utf-8", "replace").decode().strip()


def _gpus(environment: Mapping[str, str], indices: tuple[int, ...]) -> int:
    for name in ("HEADRACE_JOB_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        if environment.get(name):
            return _number(environment[name], _GPUS_MAX)
    if indices:
        return len(indices)
    # What the driver shows may be named by number or by UUID; "-1" and "NoDevFiles" hide all.
    visible = [word for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return 0 if visible[:1] in (["-1"], ["NoDevFiles"]) else min(len(visible), _GPUS_MAX)


def _indices(text: str) -> tuple[int, ...]:
    """`0,1` or `0-3,6`; () if it is neither."""
    found: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        low, high = _number(first, _GPUS_MAX, -1), _number(last, _GPUS_MAX, -1)
        if low < 0 or (dash and high < low):
            return ()
        found += range(low, (high if dash else low) + 1)
    return tuple(dict.fromkeys(found))[:_GPUS_MAX]


def _number(text: str, most: int, otherwise: int = 0) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return otherwise
    return min(int(text), most)
