"""Actions: the one thing to do about a cause, and what it would gain. Pure.

Every gain is computed from what was measured, and says from what; where that needs a guess (how much nearer
storage serves), the guess is named.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.base.text import bytes_text
from headrace.control.stalls.lock import TURNS_MANY, turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.control.stalls.case import Case
    from headrace.control.stalls.evidence import Evidence
    from headrace.control.stalls.phases import Waits
    from headrace.control.stalls.reading import Reading

__all__ = ["Action", "action_for"]

Action = tuple[str, float, str]
"""What to do, the seconds that it would gain, and from what these are computed."""

_READS_MOST: Final = 256


def action_for(main: Cause, case: Case) -> Action:
    """The one thing to do about the largest cause."""
    seconds = case.causes[main]
    if main is Cause.PREFETCH:
        return _prefetch(seconds, case.waits, case.reading, case.seen)
    if main is Cause.LATENCY:
        return _latency(seconds, case.waits, case.reading, case.seen)
    if main is Cause.DECODE:
        return _decode(seconds, case.waits, case.seen)
    if main is Cause.SLOW_RANK:
        who = case.slowest or "the slowest rank"
        return (
            f"look at the verdict of {who}: this one had its data",
            seconds,
            "what this rank waited beyond its own data, step by step",
        )
    if _is_staged(case.seen) and main in (Cause.METADATA, Cause.BANDWIDTH, Cause.NETWORK):
        return _STAGED, seconds, _STAGED_GAIN
    return main.remedy, 0.0 if main is Cause.OTHER else seconds, _GAINS[main]


def _is_staged(seen: Evidence) -> bool:
    """Whether the nodes' own disks have the data already, or are about to."""
    return seen.file_system.startswith("headrace://")


_STAGED: Final = (
    "keep samples in memory (ram_bytes=): the data are staged already, and only what comes before that is "
    "done comes from their source"
)
_STAGED_GAIN: Final = (
    "all that was waited for reads, from the second epoch on, if memory holds the samples"
)


_GAINS: Final[Mapping[Cause, str]] = {
    Cause.POLICY: "how long reads were held back",
    Cause.METADATA: "the share of the reads' time that opening files took",
    Cause.BANDWIDTH: "all that was waited for bytes, from the second epoch on, if the nearer place keeps up",
    Cause.NETWORK: "all that was waited for the network, from the second epoch on",
    Cause.PEER: "all that was waited for other nodes, if a copy lies on this one",
    Cause.PYTHON: "the time for which batches waited for the interpreter's lock",
    Cause.COLLATE: "the time for which batches waited for being put together",
    Cause.TRANSFER: "the time for which batches waited for being copied",
    Cause.OTHER: "nothing: it is not known what this time was",
}
"""From what the gain is computed where the cause's remedy is the action."""


def _prefetch(seconds: float, waits: Waits, reading: Reading, seen: Evidence) -> Action:
    held_s = float(waits.room_s.sum())
    if seen.reads_set and reading.few:
        most = seen.reads_possible or _READS_MOST
        wanted = max(2, min(most, math.ceil(seen.reads_allowed * _need(waits))))
        gain = seconds * (1.0 - seen.reads_allowed / wanted) if wanted else 0.0
        return (
            (
                f"do not set reads_in_flight ({seen.reads_allowed}): headrace finds how many it takes, "
                f"about {wanted} here"
            ),
            gain,
            f"{wanted} reads at a time instead of {seen.reads_allowed}, each as fast as now",
        )
    given = f" (now {bytes_text(seen.buffer_bytes)})" if seen.buffer_bytes else ""
    return (
        f"give the loader more memory: a larger budget_bytes{given} lets reads begin earlier",
        min(seconds, held_s) if held_s else seconds,
        "how long reads that were waited for had been held back for want of room",
    )


def _need(waits: Waits) -> float:
    """How many times faster reading would have to be for nobody to wait."""
    stall_s = waits.stall_s
    worked_s = max(1e-9, waits.seconds - stall_s)
    return min(64.0, max(1.5, 1.1 * (stall_s + worked_s) / worked_s))


def _latency(seconds: float, waits: Waits, reading: Reading, seen: Evidence) -> Action:
    possible = seen.reads_possible or _READS_MOST
    now = max(reading.in_flight, 1.0)
    wanted = min(float(possible), now * _need(waits))
    if seen.reads_allowed and wanted > 1.2 * now and possible > seen.reads_allowed:
        return (
            (
                f"have about {wanted:.0f} reads in flight instead of {now:.0f}: leave tuning on "
                "(tune=True), or give reads_in_flight"
            ),
            seconds * (1.0 - now / wanted),
            f"{wanted:.0f} reads at a time, each as slow as now ({reading.latency_s * 1e3:.3g} ms)",
        )
    if _is_staged(seen):
        return _STAGED, seconds, _STAGED_GAIN
    return (
        Cause.LATENCY.remedy,
        seconds,
        "all that was waited for answers, from the second epoch on, if the nearer place keeps up",
    )


def _decode(seconds: float, waits: Waits, seen: Evidence) -> Action:
    threads, cpus = seen.decode_threads, seen.cpus
    idle = cpus * (1.0 - seen.cpu_share) if cpus and math.isfinite(seen.cpu_share) else 0.0
    if threads and turns(waits, seen) >= TURNS_MANY:
        running = threads * min(1.0, float(waits.cpu_s.sum() / waits.work_s.sum()))
        if (workers := round(running + idle)) >= 2:
            return (
                (
                    f"decode in {workers} worker processes (num_workers={workers}): decoding is Python "
                    "code, which threads run one at a time"
                ),
                seconds * max(0.0, 1.0 - running / workers),
                f"{workers} at a time instead of {running:.1f}",
            )
    if threads and idle >= 1.0:
        more = threads + math.floor(idle)
        return (
            f"decode in {more} threads or workers instead of {threads}: {idle:.1f} processors are idle",
            seconds * (1.0 - threads / more),
            f"{more} at a time instead of {threads}",
        )
    return (
        (
            "make decoding cheaper (smaller images, a decoder that scales while it decodes), or ask for more "
            "processors"
        ),
        0.5 * seconds,
        "a decoder twice as fast",
    )
