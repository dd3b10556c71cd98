"""Looks: what stages, tuner and machine said over time: latencies of reads, knobs, decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.control.stalls import Evidence
from headrace.plane.stage import KNOBS, LATENCY_BUCKETS
from headrace.trace.format import finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from headrace.trace import RankTrace

__all__ = ["Decision", "Latencies", "decisions_of", "evidence_of", "knobs_of", "latencies_of"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the tuner."""

    at_s: float
    """Unix time."""
    rank: int
    action: str
    change: str
    """What it turned, in words; '' if nothing."""
    reason: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Latencies:
    """Reads that finished between two looks, by how long they took."""

    from_s: float
    """Unix time."""
    to_s: float
    counts: NDArray[np.float64]
    """Of `LATENCY_BUCKETS` buckets."""


def decisions_of(trace: RankTrace) -> Iterator[Decision]:
    """The tuner's decisions, in their order."""
    for event in trace.of_kind("decision"):
        before, after = _dict(event.get("before")), _dict(event.get("after"))
        turned = [
            f"{name} {finite(before.get(name)):,.0f} to {finite(after.get(name)):,.0f}"
            for name in KNOBS
            if before.get(name) != after.get(name)
        ]
        yield Decision(
            trace.unix_s(finite(event["at_s"])), trace.rank, _text(event.get("action")),
            ", ".join(turned), _text(event.get("reason")), _text(event.get("evidence")),
        )  # fmt: skip


def knobs_of(trace: RankTrace) -> dict[str, list[tuple[float, float]]]:
    """Where each knob stood over time: (Unix time, value), only those that there are."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in trace.of_kind("look"):
        knobs = _dict(event.get("knobs"))
        for name in KNOBS:
            if (value := finite(knobs.get(name))) > 0:
                found.setdefault(name, []).append((trace.unix_s(finite(event["at_s"])), value))
    return found


def latencies_of(trace: RankTrace) -> Iterator[Latencies]:
    """Reads between each two looks, of the stage that reads most."""
    before: tuple[float, NDArray[np.float64]] | None = None
    for event in trace.of_kind("look"):
        at_s = trace.unix_s(finite(event["at_s"]))
        counts = _histogram(_dict(event.get("stages")))
        if before is not None and at_s > before[0]:
            grown = counts - before[1]
            if np.any(grown < 0):  # a stage began anew
                grown = counts
            yield Latencies(before[0], at_s, grown)
        before = at_s, counts


def _histogram(stages: Mapping[str, Any]) -> NDArray[np.float64]:
    most: Mapping[str, Any] = {}
    reads = 0.0
    for stage in stages.values():
        found = _dict(_dict(stage).get("latency_us"))
        total = sum(finite(count) for count in found.values())
        if total > reads:
            most, reads = found, total
    counts = np.zeros(LATENCY_BUCKETS)
    for bucket, count in most.items():
        if isinstance(bucket, str) and bucket.isascii() and bucket.isdigit() and len(bucket) < 4:
            at = int(bucket)
            if at < LATENCY_BUCKETS:
                counts[at] = max(0.0, finite(count))
    return counts


def evidence_of(trace: RankTrace) -> Evidence:
    """What was known of the run beside its steps, when it was last looked at."""
    last: Mapping[str, Any] = next(iter(reversed(trace.of_kind("evidence"))), {})
    found = _dict(last.get("found"))
    plain = Evidence()
    told: dict[str, Any] = {}
    for field in fields(Evidence):
        value, known = found.get(field.name), getattr(plain, field.name)
        if isinstance(known, bool):
            told[field.name] = value is True
        elif isinstance(known, str):
            told[field.name] = value[:_TEXT_MAX] if isinstance(value, str) and value else known
        elif isinstance(value, (int, float)) and field.name in found:
            number = finite(value)
            told[field.name] = int(number) if isinstance(known, int) else number
    if told.get("source") not in ("local", "network", "peer"):
        told.pop("source", None)
    return Evidence(**told)


_TEXT_MAX: Final = 400


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:_TEXT_MAX] if isinstance(value, str) else ""
