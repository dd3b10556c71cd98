"""Told: what a process says of its loaders, as it came in a datagram, checked. See `control/publishing.py`.

Whoever sent it may be broken or hostile: what is not exactly a message is refused, names are cleaned, and
numbers are finite and not negative. Who sent it is the kernel's word, not the message's.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

from headrace.base.causes import cause_of
from headrace.base.job import JobIdentity, clean

__all__ = ["MESSAGE_BYTES_MAX", "Key", "Told", "told_of"]

MESSAGE_BYTES_MAX: Final = 1 << 14
FILE_SYSTEMS_MAX: Final = 32
NAMES_MAX: Final = 24

Key = tuple[str, str, str]
"""Name of a figure, its label (a cause, a tier, ""), and the file system or ""."""

_WORD: Final = re.compile(r"[a-z][a-z0-9_ -]{0,31}")
_INSTANCE: Final = re.compile(r"[0-9a-f]{32}")
_MOST: Final = 1e18


@dataclass(frozen=True, slots=True)
class Told:
    """What a process has done since it began."""

    instance: str
    pid: int
    uid: int
    identity: JobIdentity
    consumer: bool
    """Training steps run in it; else it works for a process where they do."""
    ended: bool
    began_s: float
    local_ranks: int
    """Processes like it on this node, as it was told; 0: it was not."""
    figures: dict[Key, float]


def told_of(message: bytes, pid: int, uid: int) -> Told:
    """Read a message.

    Args:
        message: one datagram.
        pid: who sent it.
        uid: whose process that is.

    Raises:
        ValueError: it is none; says where it is wrong.
    """
    if len(message) > MESSAGE_BYTES_MAX:
        raise ValueError(f"more than {MESSAGE_BYTES_MAX} bytes")
    try:
        found = json.loads(message)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"no JSON: {e}") from None
    if not isinstance(found, dict) or found.get("v") != 1:
        raise ValueError("no message of version 1")
    instance = found.get("instance")
    if not isinstance(instance, str) or not _INSTANCE.fullmatch(instance):
        raise ValueError("instance is not 32 hex digits")
    figures: dict[Key, float] = {
        (name, "", ""): _amount(found.get(name), name)
        for name in ("worked_s", "batches", "samples")
    }
    for system, told in _table(found.get("file_systems"), "file_systems", FILE_SYSTEMS_MAX).items():
        for name in ("stall_s", "tier_bytes"):
            amounts = _table(_table(told, "file system", 8).get(name, {}), name, NAMES_MAX)
            for label, amount in amounts.items():
                if not _WORD.fullmatch(label):
                    raise ValueError(f"{name} has a name that is no word")
                word = cause_of(label).value if name == "stall_s" else label
                key = name, word, clean(system)
                figures[key] = figures.get(key, 0.0) + _amount(amount, name)
    return Told(
        instance=instance,
        pid=pid,
        uid=uid,
        identity=_identity(found.get("job")),
        consumer=found.get("consumer") is True,
        ended=found.get("ended") is True,
        began_s=_amount(found.get("began_s"), "began_s"),
        local_ranks=int(min(1024, _amount(found.get("local_ranks", 0), "local_ranks"))),
        figures=figures,
    )


def _identity(told: Any) -> JobIdentity:
    job = _table(told, "job", 16)

    def text(name: str) -> str:
        value = job.get(name, "")
        if not isinstance(value, str):
            raise ValueError(f"job.{name} is no text")  # noqa: TRY004 - of a message, not of a caller
        return clean(value)

    indices = job.get("gpu_indices", [])
    if not isinstance(indices, list) or len(indices) > 1024:
        raise ValueError("job.gpu_indices is no list of numbers")
    job_id = text("job_id")
    if not job_id:
        raise ValueError("job.job_id is empty")
    return JobIdentity(
        job_id=job_id,
        alias=text("alias"),
        name=text("name"),
        user=text("user"),
        account=text("account"),
        gpus=int(min(1024, _amount(job.get("gpus", 0), "job.gpus"))),
        gpu_indices=tuple(int(min(1024, _amount(i, "job.gpu_indices"))) for i in indices),
        cpus=int(min(1 << 16, _amount(job.get("cpus", 0), "job.cpus"))),
        restarts=int(min(1 << 16, _amount(job.get("restarts", 0), "job.restarts"))),
        node=text("node"),
    )


def _table(value: Any, name: str, most: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise ValueError(f"{name} is no table of at most {most} entries")
    return value


def _amount(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number")  # noqa: TRY004 - of a message, not of a caller
    if not (math.isfinite(value) and 0 <= value <= _MOST):
        raise ValueError(f"{name} is out of bounds")
    return float(value)
