"""Verdict: the cause of every second that training waited for data. Pure.

The wait of each step comes cut into what its batch was doing meanwhile (`plane.batch_trace`). Here that becomes
causes that add up to all that was waited, how sure that is, what shows it, one thing to do about the
largest of them, and what that would gain. Every gain is computed from what was measured, and says from
what; where that needs a guess (how much nearer storage serves), the guess is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.base.text import bytes_text, counted
from headrace.control.stalls.pauses import besides, own_loop, pauses_of
from headrace.control.stalls.waits import (
    PROCESSORS_BUSY,
    TURNS_MANY,
    Evidence,
    by_sample,
    locked_out_s,
    lost_share,
    others_share,
    reading_of,
    sensible,
    slow_rank,
    taken,
    turns,
    waits_of,
)
from headrace.plane.batch_trace import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.control.stalls.waits import ReadWaits, StepWaits


@dataclass(frozen=True, slots=True)
class _Case:
    causes: Mapping[Cause, float]  # seconds by cause, the largest first
    waits: StepWaits
    reading: ReadWaits
    seen: Evidence
    slowest: str = ""  # the other rank that this one waited for most, as people call it; '': none.


_Action = tuple[str, float, str]
"""What to do, the seconds that it would gain, and from what these are computed."""

_READS_MOST: Final = 256


def _action_for(main: Cause, case: _Case) -> _Action:
    seconds = case.causes[main]
    own = {
        Cause.START: _start, Cause.PREFETCH: _prefetch, Cause.LATENCY: _latency, Cause.DECODE: _decode,
        Cause.MEMORY: _memory, Cause.OTHER: _other,
    }.get(main)  # fmt: skip
    if main is Cause.DECODE and 2.0 * case.reading.stood_s > seconds:
        return _wait_together(case.reading.stood_s, case)
    if own is not None:
        return own(seconds, case.waits, case.reading, case.seen)
    if main is Cause.SLOW_RANK:
        action = (
            f"look at the verdict of {case.slowest or 'the slowest rank'}: this one had its data"
        )
        return action, seconds, "what this rank waited beyond its own data, step by step"
    alone = main is Cause.STORAGE and not case.waits.reads.any()
    if _is_staged(case.seen) and main in _OF_SOURCE and not (alone and case.seen.decode_threads):
        return _STAGED, seconds, _STAGED_GAIN
    if alone:
        return _wait_together(seconds, case)
    return main.remedy, seconds, _GAINS[main]


_WORKERS_MOST: Final = 16
"""More are not advised: each is a process with the data set in it."""


def _wait_together(seconds: float, case: _Case) -> _Action:
    """Where a data set's own code waits for what it reads."""
    now, cpus, known = case.seen.decode_threads, case.seen.cpus, case.seen.without_storage
    first = "profile dataset[i]: what does it wait for, a sleep, a lock, a network call?"
    remedy = "" if known else f" If it is the storage, {Cause.STORAGE.remedy}"
    wanted = min(_WORKERS_MOST, math.ceil(now * _need(case.waits)))
    if wanted <= now:
        return f"{first}{remedy}", seconds, "all that samples stood still, if that goes away"
    warns = "; torch warns above the number of cores: they only wait" if 0 < cpus < wanted else ""
    answers = "what they wait for" if known else "the storage"
    action = (
        f"{first} Besides, let {wanted} workers wait at a time instead of {now} (num_workers={wanted}{warns}), "
        f"if {answers} answers so many at once: a lock does not.{remedy}"
    )
    how = f"{wanted} samples waited for at a time, each as long as now; nothing if it is a lock"
    return action, seconds * (1.0 - now / wanted), how


_OF_SOURCE: Final = (Cause.METADATA, Cause.STORAGE, Cause.BANDWIDTH, Cause.NETWORK)


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
}
"""From what the gain is computed where the cause's remedy is the action."""


def _start(seconds: float, waits: StepWaits, _: ReadWaits, _seen: Evidence) -> _Action:
    starts_s = waits.phases[:, PHASES.index("start")]
    first_s = float(starts_s[starts_s > 0.0][0])
    return Cause.START.remedy, seconds - first_s, "all starts but the first, which remains"


def _prefetch(seconds: float, waits: StepWaits, reading: ReadWaits, seen: Evidence) -> _Action:
    held_s = float(waits.room_s.sum())
    if seen.reads_set and reading.few:
        most = seen.reads_possible or _READS_MOST
        wanted = max(2, min(most, math.ceil(seen.reads_allowed * _need(waits))))
        gain = seconds * (1.0 - seen.reads_allowed / wanted) if wanted else 0.0
        action = (
            f"do not set reads_in_flight ({seen.reads_allowed}): headrace finds how many it takes, "
            f"about {wanted} here"
        )
        how = f"{wanted} reads at a time instead of {seen.reads_allowed}, each as fast as now"
        return action, gain, how
    given = f" (now {bytes_text(seen.buffer_bytes)})" if seen.buffer_bytes else ""
    return (
        f"give the loader more memory: a larger budget_bytes{given} lets reads begin earlier",
        min(seconds, held_s) if held_s else seconds,
        "how long reads that were waited for had been held back for want of room",
    )


def _need(waits: StepWaits) -> float:
    """How many times faster reading would have to be for nobody to wait."""
    stall_s = waits.stall_s
    worked_s = max(1e-9, waits.seconds - stall_s)
    return min(64.0, max(1.5, 1.1 * (stall_s + worked_s) / worked_s))


def _latency(seconds: float, waits: StepWaits, reading: ReadWaits, seen: Evidence) -> _Action:
    first = ""
    if seen.cpu_share >= PROCESSORS_BUSY:
        first = "first stop what else runs here, since an answer waits for a processor, too; "
    possible = seen.reads_possible or _READS_MOST
    now = max(reading.in_flight, 1.0)
    # An epoch of few reads has no more of them at once.
    wanted = min(float(possible), float(waits.reads.sum()), now * _need(waits))
    if seen.reads_allowed and wanted > 1.2 * now and possible > seen.reads_allowed:
        action = (
            f"{first}go on training: headrace finds how many reads in flight it takes, about {wanted:.0f} "
            f"instead of {now:.0f} (with tune=False, give reads_in_flight)"
        )
        how = (
            f"{wanted:.0f} reads at a time, each as slow as now ({reading.latency_s * 1e3:.3g} ms)"
        )
        return action, seconds * (1.0 - now / wanted), how
    if _is_staged(seen):
        return f"{first}{_STAGED}", seconds, _STAGED_GAIN
    return (
        f"{first}{Cause.LATENCY.remedy}",
        seconds,
        "all that was waited for answers, from the second epoch on, if the nearer place keeps up",
    )


_COMPUTED_LITTLE: Final = 0.5
"""Decoding that had a processor for less of its time waited for something."""


_IDLE_ENOUGH: Final = 0.6
"""Of a processor: another worker finds room there. A worker on one of two leaves a little less than 1."""


def _decode(seconds: float, waits: StepWaits, _: ReadWaits, seen: Evidence) -> _Action:
    threads, cpus = seen.decode_threads, seen.cpus
    idle = cpus * (1.0 - seen.cpu_share) if cpus and math.isfinite(seen.cpu_share) else 0.0
    work_s = float(waits.work_s.sum())
    computed = min(1.0, float(waits.cpu_s.sum()) / work_s) if work_s else 1.0
    if threads and turns(waits, seen) >= TURNS_MANY:
        running = threads * computed
        if (workers := round(running + idle)) >= 2:
            action = (
                f"decode in {workers} worker processes (num_workers={workers}): decoding is Python "
                "code, which threads run one at a time"
            )
            gain_s = seconds * max(0.0, 1.0 - running / workers)
            return action, gain_s, f"{workers} at a time instead of {running:.1f}"
    if threads and idle >= _IDLE_ENOUGH:
        # One more than whole processors are idle: what decodes in a part of one is not slower for it.
        more = threads + max(1, math.floor(idle))
        how = "" if seen.native_decode else f" (num_workers={more})"
        at_a_time = min(float(more), threads + idle)
        return (
            f"decode in {more} threads or workers{how} instead of {threads}: {idle:.1f} processors are idle",
            seconds * (1.0 - threads / at_a_time),
            f"{at_a_time:.3g} at a time instead of {threads}",
        )
    if seen.native_decode:
        keep = (
            ""
            if seen.kept_decoded
            else 'keep pictures decoded (keep="decoded" of headrace.Images), or '
        )
        action = (
            f"decode less: {keep}store them smaller (`headrace pack --images decoded,short=256`)"
        )
    else:
        action = (
            "make decoding and transforms cheaper: `headrace doctor FOLDER` says what native decoding of "
            "pictures (decode=headrace.Images(...), over their folder or a store) would gain; else profile "
            "dataset[i]"
        )
    if computed >= _COMPUTED_LITTLE:
        return f"{action}; or ask for more processors", 0.5 * seconds, "a decoder twice as fast"
    # Native decoders wait for nothing but a processor.
    unless = "" if seen.native_decode else " (unless it sleeps, reads or locks itself)"
    first = f"{_LESS_LOAD}: decoding had one for {max(0.01, computed):.0%} of its time{unless}"
    how = "decoding without what it waited, as slow as it is"
    return f"{first}; besides, {action}", seconds * (1.0 - computed), how


_LESS_LOAD: Final = "stop what else runs here, or ask for more processors"


def _handed_s(waits: StepWaits) -> float:
    """For how long batches that were ready were waited for."""
    return float(waits.phases[:, PHASES.index("hand")].sum())


def _memory(seconds: float, _waits: StepWaits, _: ReadWaits, seen: Evidence) -> _Action:
    who = "bytes were in memory, and whoever copies them waits for a processor"
    busy = seen.cpu_share >= PROCESSORS_BUSY
    saver = "idle processors" if busy else "larger batches"
    how = f"the time that copies and messages took: the most that {saver} could save"
    return f"{_LESS_LOAD}: {who}" if busy else Cause.MEMORY.remedy, seconds, how


def _other(_seconds: float, waits: StepWaits, _: ReadWaits, seen: Evidence) -> _Action:
    if _handed_s(waits) <= waits.unknown_s.sum():
        return Cause.OTHER.remedy, 0.0, "not known: nobody measured what this time was"
    how = "not known: it was not measured which part of handing over takes the time"
    if seen.cpu_share >= PROCESSORS_BUSY:
        who = "batches were ready, and whoever hands them over waits for a processor"
        return f"{_LESS_LOAD}: {who}", 0.0, how
    return "use larger batches: they were ready, and handing each over takes its time", 0.0, how


_READ_CAUSES: Final = frozenset((
    Cause.STORAGE, Cause.LATENCY, Cause.BANDWIDTH, Cause.PREFETCH, Cause.MEMORY, Cause.NETWORK,
    Cause.PEER,
))  # fmt: skip

_SHOWN: Final = 0.05
"""Causes of a smaller share are not explained."""


def _evidence_lines(case: _Case) -> tuple[str, ...]:
    """What shows each cause that matters, the largest first."""
    seen = case.seen
    total = sum(case.causes.values())
    shown = [cause for cause, seconds in case.causes.items() if seconds >= _SHOWN * total]
    bytes_too = [cause for cause in shown if cause in _READ_CAUSES or cause is Cause.METADATA]
    # How reads went is said once.
    lines = [_cause_line(cause, case) for cause in shown if cause not in bytes_too[1:]]
    if _READ_CAUSES & set(shown) and math.isfinite(seen.io_pressure):
        pressure = min(1.0, seen.io_pressure)
        lines.append(f"tasks of this node waited for I/O {pressure:.0%} of the time")
    if seen.simulation:
        lines.append(f"the storage is {seen.simulation}: its figures say nothing of a real one")
    if case.waits.dropped:
        lines.append(f"{case.waits.dropped:,} steps were left out: their figures make no sense")
    return tuple(lines)


def _cause_line(cause: Cause, case: _Case) -> str:
    seen = case.seen
    each_s = case.causes[cause] / max(1, len(case.waits.phases))
    line = f"{cause.phrase} took {1e3 * each_s:.3g} ms of each batch's wait"
    if cause in _READ_CAUSES or cause is Cause.METADATA:
        line = _reading_line(cause, case)
        if cause is Cause.MEMORY or seen.cpu_share >= PROCESSORS_BUSY:
            line += _busy_text(seen)
    elif cause is Cause.POLICY:
        limit = f" ({bytes_text(seen.limit_bytes_per_s)}/s)" if seen.limit_bytes_per_s else ""
        line = f"a rate limit{limit} held reads back for {case.waits.held_s.sum():.3g} s in all"
    elif cause is Cause.DECODE:
        line = _decode_line(case)
    elif cause is Cause.PYTHON:
        line = "batches were ready, and their hand-over took that time"
        if looks := seen.interpreter_looks:
            of = counted(looks, "look")
            line = f"another thread held the interpreter's lock at {seen.contended:.0%} of {of}"
    elif cause is Cause.SLOW_RANK:
        who = f" ({case.slowest})" if case.slowest else ""
        line = f"after its batch was there this rank waited while another still waited for its own{who}"
    elif cause is Cause.OTHER:
        handed_s, unknown_s = _handed_s(case.waits), float(case.waits.unknown_s.sum())
        line = f"{handed_s:.3g} s: batches were ready, and were handed over (copies, processes' messages)"
        if unknown_s > _SHOWN * handed_s:
            line += f"; {unknown_s:.3g} s lie in no phase that is measured"
        line += _busy_text(seen)
    return line


def _busy_text(seen: Evidence) -> str:
    known = math.isfinite(seen.cpu_share)
    return f"; processors were {seen.cpu_share:.0%} busy" if known else ""


_OWN_CODE: Final = "your data set's __getitem__ (or decode=): decoding and transforms"


def _decode_line(case: _Case) -> str:
    work, cpu = float(case.waits.work_s.sum()), float(case.waits.cpu_s.sum())
    count = case.seen.decode_threads
    threads = f" in {counted(count, 'thread or worker', 'threads or workers')}" if count else ""
    stood_s = case.reading.stood_s
    if 2.0 * stood_s > case.causes[Cause.DECODE]:
        return (
            "your data set's __getitem__: it slept, locked or waited for something, for a processor perhaps, "
            f"and training for it for {stood_s:.3g} s, but for no storage ({case.seen.without_storage})"
        )
    if not work:  # TensorFlow's own threads do not say
        return "decoding took that time while the batch was waited for"
    what = "decoding" if case.seen.native_decode else _OWN_CODE
    line = f"{what} took {work:.3g} s{threads}, {cpu:.3g} s of them on processors"
    line += by_sample(cpu, case.waits)
    waited = turns(case.waits, case.seen)
    if waited < TURNS_MANY:
        return line
    return f"{line}; its threads waited for one another's Python code {waited:.0%} of that time"


def _reading_line(cause: Cause, case: _Case) -> str:
    waits, reading, seen = case.waits, case.reading, case.seen
    reads = float(waits.reads.sum())
    if cause is Cause.MEMORY:
        tiers = waits.tier_bytes()
        share = (tiers["ram"] + tiers["page_cache"]) / sum(tiers.values())
        which = "all" if share == 1.0 else f"{share:.0%} of the"
        return f"{which} bytes came out of memory, as fast as they are copied"
    if not reads:
        return (
            f"training waited {case.causes[cause]:.3g} s for samples that stood still, and did not compute: "
            "what for was not measured"
        )
    idle = ""
    if reading.idle_latency_s:
        idle = f" ({reading.idle_latency_s * 1e3:.3g} ms while the storage was idle)"
    allowed = f" of {seen.reads_allowed} allowed" if seen.reads_allowed else ""
    where = f" from {seen.file_system}" if seen.file_system else ""
    line = (
        f"{reads:,.0f} reads{where} took {reading.latency_s * 1e3:.3g} ms each{idle}, "
        f"{reading.in_flight:.1f}{allowed} were under way, {bytes_text(reading.bytes_per_s)}/s came"
    )
    if cause is Cause.METADATA:
        return f"files were opened for each sample; {line}"
    if cause is Cause.PREFETCH and waits.room_s.sum() > 0.0:
        return f"{line}; reads waited {waits.room_s.sum():.3g} s for room in the buffer"
    if cause is Cause.NETWORK and seen.remote_retries:
        return f"{line}; {seen.remote_retries:,} of {seen.remote_requests:,} requests were repeated"
    return line


_UNSEEN_SHORT: Final = "storage or waits of your data set's own code"
"""Here nobody saw the reads."""


def verdict_line(verdict: Verdict) -> str:
    """The stall and its largest causes, in part of a line."""
    if not verdict.stall_s or verdict.stall < 0.0005:
        return "stall 0.0 %"
    alone = len(verdict.causes) == 1
    shown = [
        said if alone else f"{said} {verdict.share(cause):.0%}"
        for cause in verdict.causes
        if verdict.share(cause) >= 0.1
        for said in [_UNSEEN_SHORT if cause is Cause.STORAGE else cause.phrase]
    ]
    return f"stall {100 * verdict.stall:.1f} % ({', '.join(shown[:3])})"


def _verdict_text(verdict: Verdict) -> str:
    label = f" [{verdict.simulation}]" if verdict.simulation else ""
    if verdict.steps < _STEPS_FEWEST:
        seen = f"{counted(verdict.steps, 'step')}, at least {_STEPS_FEWEST} are needed"
        rank = verdict.rank and f"\n  {verdict.rank}"
        return f"verdict{label}: too few steps to say what was waited for: {seen}{rank}"
    head = (
        f"verdict{label}: training waited {verdict.stall_s:.3g} s of {verdict.seconds:.3g} s "
        f"({verdict.stall:.1%}), {verdict.steps:,} steps"
    )
    own = verdict.pauses or own_loop(verdict.seconds, verdict.stall_s, verdict.steps)
    lines = [head, *(f"  {each}" for each in (verdict.rank, own) if each)]
    for cause, seconds in verdict.causes.items():
        if verdict.share(cause) >= 0.01:
            lines.append(
                f"  {cause.value:<10}{seconds:>9.3g} s  {verdict.share(cause):>4.0%}  {cause.sentence}"
            )
    if verdict.causes:
        unclear = "" if verdict.confidence >= _CLEAR else ": no clear cause"
        lines.append(f"sure      {verdict.confidence:.0%}{unclear}")
    for at, each in enumerate(verdict.evidence):
        lines.append(f"{'because' if at == 0 else '':<10}{each}")
    if verdict.action:
        share = verdict.gain_s / verdict.stall_s if verdict.stall_s else 0.0
        gain = f"up to {verdict.gain_s:.3g} s ({share:.0%} of the stall)"
        lines.append(f"do this   {verdict.action}")
        known = verdict.gain_s > 0.0
        lines.append(f"gain      {f'{gain}, computed from: ' if known else ''}{verdict.gain_from}")
    else:
        lines.append("do this   nothing: data are there in time")
    return "\n".join(lines)


NEGLIGIBLE: Final = 0.02
"""A stall of less than this share of the time needs no action."""

_CLEAR: Final = 0.5
"""Whoever is less sure has found no cause."""

_STEPS_FEWEST: Final = 5
"""Fewer show how a loader starts, and nothing else."""

_STEPS_ENOUGH: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why training waited."""

    seconds: float
    """That were looked at, from the first request to the last delivery."""
    stall_s: float
    """Of them, waited for data: here or, through a slow rank, elsewhere."""
    causes: Mapping[Cause, float]
    """Seconds by cause, the largest first; they add up to `stall_s`."""
    confidence: float
    """0 to 1: how sure the division is."""
    evidence: tuple[str, ...]
    """What shows it, in words."""
    action: str
    """One thing to do; '' where the stall is negligible."""
    gain_s: float
    """What that would save, of `stall_s`."""
    gain_from: str
    """How that was computed."""
    steps: int
    dropped: int = 0
    """Steps whose figures made no sense."""
    simulation: str = ""
    """`simulated lustre` where the storage is not real."""
    rank: str = ""
    """`rank 1 of 2 by torchrun`: whose loader it is, and by whose word; '' where nobody has asked."""
    pauses: str = ""
    """Where the training loop itself stood, which is no stall; '' if it hardly did."""

    @property
    def main(self) -> Cause | None:
        """The largest cause; None: nothing was waited for, or there are too few steps to say."""
        return next(iter(self.causes), None) if self.steps >= _STEPS_FEWEST else None

    @property
    def stall(self) -> float:
        """Share of the time."""
        return min(1.0, self.stall_s / self.seconds) if self.seconds > 0.0 else 0.0

    def share(self, cause: Cause) -> float:
        """Of the stall."""
        return self.causes.get(cause, 0.0) / self.stall_s if self.stall_s > 0.0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {
            "stall": self.stall,
            "cause": self.main.value if self.main else None,
            "causes": {cause.value: seconds for cause, seconds in self.causes.items()},
            "evidence": list(self.evidence),
        }

    def __str__(self) -> str:
        return _verdict_text(self)


def verdict_of(
    steps: NDArray[np.void],
    evidence: Evidence | None = None,
    ranks: Sequence[NDArray[np.void]] | Mapping[int, NDArray[np.void]] = (),
) -> Verdict:
    """Say why a rank waited for data.

    Args:
        steps: of this rank, dtype `STEP` (fields that are missing are not known), shape (steps,).
        evidence: what else is known of the same stretch.
        ranks: the steps of the other ranks that it goes on together with, by their numbers if these are
            known.
    """
    seen = (evidence or Evidence()).sane()
    waits = waits_of(steps, in_process=seen.in_process)
    reading = reading_of(waits, seen)
    by_cause = {cause: float(each.sum()) for cause, each in _divided(waits, reading, seen).items()}
    others = ranks if isinstance(ranks, Mapping) else dict(enumerate(ranks))
    other_s, at = slow_rank(steps, list(others.values())) if others else (0.0, None)
    by_cause[Cause.SLOW_RANK] += other_s
    stall_s = sum(by_cause.values())
    largest_first = sorted(by_cause, key=lambda each: -by_cause[each])
    causes = {cause: by_cause[cause] for cause in largest_first if by_cause[cause] > 0.0}
    slowest = "" if at is None else f"rank {list(others)[at]}"
    if slowest and others is not ranks:
        slowest += " of those given"
    case = _Case(causes, waits, reading, seen, slowest)
    main = next(iter(causes), None)
    seconds = max(waits.seconds, stall_s - other_s)
    enough = len(waits.phases) >= _STEPS_FEWEST
    needed = main is not None and enough and stall_s > NEGLIGIBLE * seconds
    nothing = ("", 0.0, "")
    action, gain_s, gain_from = _action_for(main, case) if needed and main else nothing
    pauses = pauses_of(steps[sensible(steps)], seconds)
    shared = seen.cpu_share >= PROCESSORS_BUSY and seen.decode_threads > 0
    action = besides(action, seconds, stall_s, shared=shared)
    if pauses and pauses.seconds <= other_s:
        pauses = None  # it was another rank that these steps waited for
    if pauses and pauses.seconds - other_s > stall_s:
        action = (
            f"look at what your own loop does {pauses.where}: a validation, a checkpoint, a log? "
            "Of several ranks, it may have waited there for another"
        )
        gain_s, gain_from = (
            0.0,
            f"up to {pauses.seconds:.3g} s, time of the loop's own and not of waiting",
        )
    return Verdict(
        seconds=seconds,
        stall_s=stall_s,
        causes=causes,
        confidence=_confidence(causes, stall_s, reading, len(waits.phases)),
        evidence=_evidence_lines(case),
        action=action,
        gain_s=max(0.0, min(gain_s, stall_s)),
        gain_from=gain_from,
        steps=len(waits.phases),
        dropped=waits.dropped,
        simulation=seen.simulation,
        pauses=str(pauses or ""),
    )


def causes_by_step(
    steps: NDArray[np.void], evidence: Evidence | None = None
) -> NDArray[np.float64]:
    """The causes of each step's own wait, as `verdict_of` adds them up; a slower rank is not looked for.

    Returns:
        Seconds, shape (steps, causes), in the order of `Cause`. Steps whose figures make no sense have none.
    """
    seen = (evidence or Evidence()).sane()
    waits, good = waits_of(steps, in_process=seen.in_process), sensible(steps)
    by_step = np.zeros((len(steps), len(Cause)))
    for at, each in enumerate(_divided(waits, reading_of(waits, seen), seen).values()):
        by_step[good, at] = each
    return by_step


def _divided(
    waits: StepWaits, reading: ReadWaits, seen: Evidence
) -> dict[Cause, NDArray[np.float64]]:
    """Each step's wait by cause, shape (steps,) each; all causes are there, in their order."""
    phase = dict(zip(PHASES, waits.phases.T, strict=True))
    making = phase["queue"] + phase["decode"]
    lost = making * lost_share(waits, seen)
    locked = phase["hand"] * taken(waits, seen)
    # A batch that is ready and cannot be handed over, since decoding has the lock, waits for decoding.
    python = locked * others_share(waits, unseen=1.0)
    more = {
        Cause.START: phase["start"],
        Cause.METADATA: phase["open"],
        Cause.DECODE: making - lost + locked - python,
        Cause.PYTHON: lost + python + locked_out_s(waits, seen),
        Cause.COLLATE: phase["collate"],
        Cause.TRANSFER: phase["transfer"],
        Cause.OTHER: phase["hand"] - locked + waits.unknown_s,
    }
    nothing = np.zeros(len(waits.phases))
    read = reading.seconds
    return {each: read.get(each, nothing) + more.get(each, nothing) for each in Cause}


def _confidence(
    causes: Mapping[Cause, float], stall_s: float, reading: ReadWaits, steps: int
) -> float:
    if stall_s <= 0.0:
        return 1.0
    sure = {
        Cause.STORAGE: reading.sure,
        Cause.LATENCY: reading.sure,
        Cause.BANDWIDTH: reading.sure,
        Cause.PREFETCH: 0.9,
        Cause.PYTHON: 0.85,
        Cause.SLOW_RANK: 0.85,
        Cause.OTHER: 0.0,
    }
    total = sum(seconds * sure.get(cause, 0.95) for cause, seconds in causes.items()) / stall_s
    return total * min(1.0, 0.5 + 0.5 * steps / _STEPS_ENOUGH)
