"""Words: a verdict as sentences. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.base.text import bytes_text
from headrace.control.stalls.lock import TURNS_MANY, turns

if TYPE_CHECKING:
    from headrace.control.stalls.case import Case
    from headrace.control.stalls.evidence import Evidence
    from headrace.control.stalls.phases import Waits
    from headrace.control.stalls.reading import Reading
    from headrace.control.stalls.verdict import Verdict

__all__ = ["evidence_words", "verdict_line", "verdict_text"]

_READ: Final = frozenset(
    (Cause.LATENCY, Cause.BANDWIDTH, Cause.PREFETCH, Cause.NETWORK, Cause.PEER)
)

_SHOWN: Final = 0.05
"""Causes of a smaller share are not explained."""


def evidence_words(case: Case) -> tuple[str, ...]:
    """What shows each cause that matters, the largest first."""
    seen = case.seen
    total = sum(case.causes.values())
    shown = [cause for cause, seconds in case.causes.items() if seconds >= _SHOWN * total]
    bytes_too = [cause for cause in shown if cause in _READ or cause is Cause.METADATA]
    # How reads went is said once.
    lines = [_line(cause, case) for cause in shown if cause not in bytes_too[1:]]
    if _READ & set(shown) and math.isfinite(seen.io_pressure):
        pressure = min(1.0, seen.io_pressure)
        lines.append(f"tasks of this node waited for I/O {pressure:.0%} of the time")
    if seen.simulation:
        lines.append(f"the storage is {seen.simulation}: its figures say nothing of a real one")
    if case.waits.dropped:
        lines.append(f"{case.waits.dropped:,} steps were left out: their figures make no sense")
    return tuple(lines)


def _line(cause: Cause, case: Case) -> str:
    if cause in _READ or cause is Cause.METADATA:
        return _reading_line(cause, case.waits, case.reading, case.seen)
    found = {
        Cause.POLICY: _policy_line,
        Cause.DECODE: _decode_line,
        Cause.PYTHON: _python_line,
        Cause.SLOW_RANK: _rank_line,
    }.get(cause)
    if found is not None:
        return found(case)
    if cause is Cause.OTHER:
        busy = case.seen.cpu_share
        told = f"; processors were {busy:.0%} busy" if math.isfinite(busy) else ""
        return f"part of the waiting lies in no phase that was measured, or in handing batches over{told}"
    return f"{cause.phrase} took that time while the batch was waited for"


def _policy_line(case: Case) -> str:
    given = case.seen.limit_bytes_per_s
    limit = f" ({bytes_text(given)}/s)" if given else ""
    return f"a rate limit{limit} held reads back for {float(case.waits.held_s.sum()):.3g} s in all"


def _decode_line(case: Case) -> str:
    work, cpu = float(case.waits.work_s.sum()), float(case.waits.cpu_s.sum())
    count = case.seen.decode_threads
    threads = f" in {count} threads or workers" if count else ""
    if not work:  # TensorFlow's own threads do not say
        return "decoding took that time while the batch was waited for"
    line = f"decoding took {work:.3g} s{threads}, {cpu:.3g} s of them on processors"
    waited = turns(case.waits, case.seen)
    if waited < TURNS_MANY:
        return line
    return f"{line}; its threads waited for one another's Python code {waited:.0%} of that time"


def _python_line(case: Case) -> str:
    seen = case.seen
    if not seen.interpreter_looks:
        return "batches were ready, and their hand-over took that time"
    return (
        f"another thread held the interpreter's lock at {seen.contended:.0%} of "
        f"{seen.interpreter_looks:,} looks"
    )


def _rank_line(case: Case) -> str:
    who = f" ({case.slowest})" if case.slowest else ""
    return f"after its batch was there this rank waited while another still waited for its own{who}"


def _reading_line(cause: Cause, waits: Waits, reading: Reading, seen: Evidence) -> str:
    reads = float(waits.reads.sum())
    if not reads:
        near = waits.tier_bytes()
        if near["ram"] + near["page_cache"] > 0.0:
            return "all bytes came out of memory, as fast as they are copied"
        return "how single reads went was not measured"
    idle = (
        f" ({reading.idle_latency_s * 1e3:.3g} ms while the storage was idle)"
        if reading.idle_latency_s
        else ""
    )
    allowed = f" of {seen.reads_allowed} allowed" if seen.reads_allowed else ""
    where = f" from {seen.file_system}" if seen.file_system else ""
    line = (
        f"{reads:,.0f} reads{where} took {reading.latency_s * 1e3:.3g} ms each{idle}, "
        f"{reading.in_flight:.1f}{allowed} were under way, {bytes_text(reading.bytes_per_s)}/s came"
    )
    if cause is Cause.METADATA:
        return f"files were opened for each sample; {line}"
    if cause is Cause.PREFETCH and float(waits.room_s.sum()) > 0.0:
        return f"{line}; reads waited {float(waits.room_s.sum()):.3g} s for room in the buffer"
    if cause is Cause.NETWORK and seen.remote_retries:
        return f"{line}; {seen.remote_retries:,} of {seen.remote_requests:,} requests were repeated"
    return line


def verdict_line(verdict: Verdict) -> str:
    """The stall and its largest causes, in part of a line."""
    if not verdict.stall_s or verdict.stall < 0.0005:
        return "stall 0.0 %"
    shown = [
        f"{cause.phrase}{'' if at == 0 and len(verdict.causes) == 1 else f' {verdict.share(cause):.0%}'}"
        for at, cause in enumerate(verdict.causes)
        if verdict.share(cause) >= 0.1
    ]
    return f"stall {100 * verdict.stall:.1f} % ({', '.join(shown[:3])})"


def verdict_text(verdict: Verdict) -> str:
    """A verdict for people."""
    label = f" [{verdict.simulation}]" if verdict.simulation else ""
    if not verdict.steps:
        return f"verdict{label}: no step was seen"
    head = (
        f"verdict{label}: training waited {verdict.stall_s:.3g} s of {verdict.seconds:.3g} s "
        f"({verdict.stall:.1%}), {verdict.steps:,} steps"
    )
    lines = [head, f"  {verdict.rank}"] if verdict.rank else [head]
    for cause, seconds in verdict.causes.items():
        if verdict.share(cause) >= 0.01:
            lines.append(
                f"  {cause.value:<10}{seconds:>9.3g} s  {verdict.share(cause):>4.0%}  {cause.sentence}"
            )
    if verdict.causes:
        lines.append(f"sure      {verdict.confidence:.0%}")
    for at, each in enumerate(verdict.evidence):
        lines.append(f"{'because' if at == 0 else '':<10}{each}")
    if verdict.action:
        share = verdict.gain_s / verdict.stall_s if verdict.stall_s else 0.0
        lines += [
            f"do this   {verdict.action}",
            (
                f"gain      up to {verdict.gain_s:.3g} s ({share:.0%} of the stall), computed from: "
                f"{verdict.gain_from}"
            ),
        ]
    else:
        lines.append("do this   nothing: data are there in time")
    return "\n".join(lines)
