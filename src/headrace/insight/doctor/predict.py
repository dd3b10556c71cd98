"""Predict: what torch's DataLoader and headrace's will deliver, from the findings. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.insight.doctor.findings import Expected
from headrace.insight.doctor.model import (
    MODEL_ERROR,
    Curve,
    Work,
    ahead_rate,
    stall_of,
    torch_rate,
    torch_shares,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.insight.doctor.findings import Findings

__all__ = [
    "AHEAD",
    "LATER",
    "TORCH",
    "UNCACHED",
    "byte_share",
    "expected_of",
    "fits_in_memory",
    "metadata_share",
    "storage_cause",
    "work_of",
]

TORCH: Final = "torch DataLoader"
AHEAD: Final = "headrace.torch.DataLoader"
LATER: Final = "later epochs"
"""From memory, where the data will lie then."""
UNCACHED: Final = "uncached"
"""From the device, though the data lie in memory now."""

_SAMPLE_S: Final = 8e-6
"""Processor time of torch's own code for a sample: the data set's `__getitem__`, lists, the fetcher."""

_FEW_READS: Final = 30
_FEW_ERROR: Final = 1.0
_MEMORY_SHARE: Final = 0.7
"""Of free memory: a data set that is larger pushes itself out of the page cache."""


def work_of(found: Findings) -> Work | None:
    """What a sample takes; None where the storage was not measured."""
    storage, plain, decode, cpu = found.storage, found.plain, found.decode, found.cpu
    if storage is None or not storage.points:
        return None
    curve = Curve.through([(float(p.depth), p.per_s) for p in storage.points])
    first = storage.points[0]
    read_s = plain.again_cpu_s if plain is not None else 0.0
    cold_read_s = max(read_s, plain.first_cpu_s if plain is not None else 0.0)
    out_bytes = decode.out_bytes if decode is not None else 0.0
    environment = found.environment
    return Work(
        curve=curve, cold=1.0 - (found.resident or 0.0), wait_factor=_wait_factor(found),
        read_s=read_s + _SAMPLE_S, cold_read_s=cold_read_s + _SAMPLE_S,
        ahead_s=min(storage.points[-1].cpu_s, first.cpu_s) if storage.cold else 0.0,
        decode_s=decode.sample_s if decode is not None else 0.0,
        collate_s=out_bytes / cpu.fresh_bytes_per_s if cpu is not None else 0.0,
        ahead_collate_s=out_bytes / cpu.used_bytes_per_s if cpu is not None else 0.0,
        cpus=environment.cpus if environment is not None else 1.0,
        others=cpu.others if cpu is not None else 0.0,
    )  # fmt: skip


def _wait_factor(found: Findings) -> float:
    """Plain reads wait longer than direct ones where they go to the device in several requests."""
    plain, storage = found.plain, found.storage
    if plain is None or storage is None or not storage.cold or (found.resident or 0.0) > 0.1:
        return 1.0
    point = storage.points[0]
    if point.depth != 1 or plain.reads < 8:
        return 1.0
    plain_wait_s = plain.first_s - plain.first_cpu_s
    wait_s = 1.0 / point.per_s
    return min(2.0, max(0.5, plain_wait_s / wait_s))


def fits_in_memory(found: Findings) -> bool:
    """Whether the page cache will hold all of the data once they were read."""
    if found.data is None or found.environment is None:
        return False
    return 0 < found.data.nbytes < _MEMORY_SHARE * found.environment.memory_free_bytes


@dataclass(frozen=True, slots=True)
class _Scene:
    """When: how a loader's name goes on, and what a sample takes then."""

    when: str
    work: Work


def expected_of(found: Findings, workers: int, wanted_per_s: float | None) -> tuple[Expected, ...]:
    """Both loaders as things are now; from memory, if the data will lie there; from the device, if they do.

    Args:
        found: the findings.
        workers: of both loaders.
        wanted_per_s: samples a second that the model could take.
    """
    work = work_of(found)
    if work is None:
        return ()
    scenes = [_Scene("", work)]
    if work.cold > 0.1 and fits_in_memory(found):
        scenes.append(_Scene(LATER, work.from_memory()))
    if work.cold < 0.9 and found.storage is not None and found.storage.cold:
        scenes.append(_Scene(UNCACHED, work.from_device()))
    error = _error(found)
    expected: list[Expected] = []
    for scene in scenes:
        for loader, rate in (
            (TORCH, torch_rate(scene.work, workers)),
            (AHEAD, ahead_rate(scene.work, workers)),
        ):
            in_turn = workers == 0 and loader == TORCH
            stall = None if wanted_per_s is None else stall_of(rate, wanted_per_s, in_turn=in_turn)
            expected.append(
                Expected(
                    loader=loader, when=scene.when, workers=workers, per_s=rate,
                    low_per_s=rate / (1 + error), high_per_s=rate * (1 + error),
                    cause=_cause(found, scene.work, loader, workers, rate), stall=stall,
                )
            )  # fmt: skip
    return tuple(expected)


def _error(found: Findings) -> float:
    assert found.storage is not None
    return _FEW_ERROR if _fewest(found.storage.points) < _FEW_READS else MODEL_ERROR


def _fewest(points: Sequence[object]) -> int:
    return min(getattr(point, "reads", 0) for point in points)


def _cause(found: Findings, work: Work, loader: str, workers: int, rate: float) -> str:
    """What holds a loader back."""
    if loader == TORCH:
        shares = torch_shares(work, workers)
        if shares.wait >= 0.5:
            return storage_cause(found, work.curve.depth(rate * work.cold))
        parts = {
            Cause.DECODE: shares.decode,
            Cause.COLLATE: shares.collate,
            Cause.PYTHON: shares.read,
        }
        if work.cold > 0 and shares.wait > max(parts.values()):
            return storage_cause(found, work.curve.depth(rate * work.cold))
        return max(parts, key=lambda cause: parts[cause]).value
    if work.cold > 0 and rate >= 0.98 * work.curve.most / work.cold:
        return storage_cause(found, work.curve.depths[-1])
    cpu = {
        Cause.DECODE: work.decode_s, Cause.COLLATE: work.ahead_collate_s,
        Cause.PYTHON: work.read_s + work.cold * work.ahead_s,
    }  # fmt: skip
    return max(cpu, key=lambda cause: cpu[cause]).value


def storage_cause(found: Findings, depth: float) -> str:
    """Why the storage is slow, with so many reads in flight: opens, bytes, or each answer.

    Opens: what is left when files are open already. Bytes: what is left when only 4 KiB are read, of
    importance only where more reads in flight bring no more.
    """
    storage, data = found.storage, found.data
    assert storage is not None
    if data is not None and data.kind == "object":
        return Cause.NETWORK.value
    if metadata_share(found) > 0.5:
        return Cause.METADATA.value
    curve = Curve.through([(float(p.depth), p.per_s) for p in storage.points])
    full = curve.rate(max(1.0, depth)) >= 0.7 * curve.most
    if full and byte_share(found) > 0.5:
        return Cause.BANDWIDTH.value
    return Cause.LATENCY.value


def metadata_share(found: Findings) -> float:
    """Share of a read's time that looking up and opening take.

    By how long an open takes, and by how much faster files are read that are open: a look-up may cost more
    than the open that follows it.
    """
    storage, opens = found.storage, found.opens
    if storage is None or opens is None or not storage.points:
        return 0.0
    first = storage.points[0]
    shares = [first.per_s / max(1, first.depth) / opens.one_per_s]
    if storage.opened is not None:
        same = [p.per_s for p in storage.points if p.depth == storage.opened.depth]
        shares += [1.0 - rate / storage.opened.per_s for rate in same]
    return min(1.0, max(0.0, *shares))


def byte_share(found: Findings) -> float:
    """Share of a read's time at the deepest that depends on how many bytes it has."""
    storage = found.storage
    if storage is None or storage.opened is None or storage.small is None:
        return 0.0
    return max(0.0, 1.0 - storage.opened.per_s / storage.small.per_s)
