"""How Slurm writes times, sizes, GPUs and states, and the blocks of KEY=VALUE lines that `scontrol` prints."""

from __future__ import annotations

import functools
import re
import time
from typing import NamedTuple

from headrace.cluster.executor import JobState
from headrace.cluster.hostlist import expand_indices

_NOTHING = frozenset({"", "(null)", "N/A", "n/s", "Unknown", "None", "NONE", "Partition_Limit"})
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "NOT_SET"})
_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_SIZE = re.compile(r"([\d.]+)([KMGTP]?)[nc]?i?B?\Z")


class Gres(NamedTuple):
    """GPUs of one type; `indices` is empty where Slurm does not say which."""

    type: str
    number: int
    indices: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def minutes(text: str) -> int | None:
    """Of a time as `seconds` takes it, rounded up; None: no limit, or none said.

    Raises:
        ValueError: it is no time.
    """
    duration = seconds(text)
    return None if duration is None else -(-duration // 60)


def seconds(text: str) -> int | None:
    """Of "30" (minutes), "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS"; None: no limit, or none said.

    Raises:
        ValueError: it is none of these.
    """
    if text in _NOTHING or text.upper() in _UNLIMITED:
        return None
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in (*parts, *([days] if dash else ()))):
        raise ValueError(f"{text!r} is no time")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minute, second = (*numbers, 0, 0)[:3]
        return (int(days) * 24 + hours) * 3600 + minute * 60 + second
    if len(numbers) == 1:
        return numbers[0] * 60
    hours, minute, second = (0, *numbers) if len(numbers) == 2 else tuple(numbers)
    return hours * 3600 + minute * 60 + second


@functools.lru_cache(maxsize=65536)
def unix_seconds(text: str) -> float | None:
    """Of "1795332994", or of "2026-11-22T07:36:33" in this machine's zone; None where none is said.

    Raises:
        ValueError: it is neither.
    """
    if text.isdigit():
        return float(text) if text != "0" else None
    if text in _NOTHING:
        return None
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


@functools.lru_cache(maxsize=4096)
def mib(text: str) -> int:
    """Of "16000", "16000M", "62.50G", "2Tn"; 0 where none is said.

    Raises:
        ValueError: it is no size.
    """
    if text in _NOTHING or text in _UNLIMITED:
        return 0
    if (match := _SIZE.match(text)) is None:
        raise ValueError(f"{text!r} is no size of memory")
    return int(float(match[1]) * _UNITS[match[2]])


@functools.lru_cache(maxsize=16384)
def parse_gres(text: str) -> tuple[Gres, ...]:
    """The GPUs in "gpu:h100:2(IDX:0-1),shard:4", "gpu:8(S:0-1)", "gres/gpu:h100=4", "gpu(IDX:0)".

    Raises:
        ValueError: a count or an index is no number.
    """
    gpus = []
    for part in _outside_brackets(text):
        name, bracket, rest = part.partition("(")
        name = name.removeprefix("gres:").removeprefix("gres/")
        words = [word for word in re.split("[:=]", name) if word]
        if not words or words[0] != "gpu":
            continue
        counted = words[-1][:1].isdigit() and len(words) > 1
        indices: tuple[int, ...] = ()
        if bracket and (match := re.search(r"IDX:([\d,-]+)", rest)):
            indices = expand_indices(match[1])
        count = _count(words[-1]) if counted else len(indices) or 1
        kind = words[1] if len(words) > 1 + counted else ""
        gpus.append(Gres(kind, count, indices))
    return tuple(gpus)


def gpu_count(tres: str) -> int:
    """GPUs in "cpu=4,mem=8G,gres/gpu=2,gres/gpu:h100=2" (counted once) or in "gpu:h100:2,gpu:a100:1"."""
    gpus = parse_gres(tres)
    total = [gpu.number for gpu in gpus if not gpu.type]
    # AllocTRES says the sum and, where a site asks for it, each type.
    return total[0] if total and "=" in tres else sum(gpu.number for gpu in gpus)


_OTHER_STATES = {
    "REQUEUE_HOLD": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "STAGE_OUT": JobState.COMPLETING,
    "SIGNALING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "UPDATE_DB": JobState.RUNNING,
    "EXPEDITING": JobState.PENDING,
    "STOPPED": JobState.SUSPENDED,
    "REVOKED": JobState.CANCELLED,
}


@functools.lru_cache(maxsize=1024)
def job_state(text: str) -> JobState:
    """Of "RUNNING", "CANCELLED by 1000", "CANCELLED+"."""
    word = text.split(maxsplit=1)[0].rstrip("+").upper() if text.strip() else ""
    if word in JobState.__members__:
        return JobState[word]
    return _OTHER_STATES.get(word, JobState.UNKNOWN)


def _count(word: str) -> int:
    factor = {"K": 1000, "M": 1000**2}.get(word[-1].upper(), 1)
    return int(word[:-1] if factor > 1 else word) * factor


def _outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^(]*\))", text) if text not in _NOTHING else []


# -- blocks of KEY=VALUE lines -------------------------------------------------------------------------


def blocks(text: str, key: str) -> list[str]:
    """The parts of a text that begin with a line of `KEY=`."""
    if not text.startswith(f"{key}="):
        begin = text.find(f"\n{key}=")
        if begin < 0:
            return []
        text = text[begin + 1 :]
    return [f"{key}={part}" for part in text[len(key) + 1 :].split(f"\n{key}=")]


def value(block: str, key: str, default: str = "") -> str:
    """The value of a key that stands first in its line, up to the line's end."""
    begin = block.find(f"\n   {key}=")
    if begin < 0:
        return default
    begin += len(key) + 5
    return (
        block[begin : block.find("\n", begin)].rstrip()
        if "\n" in block[begin:]
        else block[begin:].rstrip()
    )


def task_id(job_id: str, array_id: str | None, task: str | None) -> str:
    """As users know it: "17", "17_3", "17_[4-9]"."""
    if not array_id or task is None:
        return job_id
    task = task.partition("%")[0]
    return f"{array_id}_{task}" if task.isdigit() else f"{array_id}_[{task}]"
