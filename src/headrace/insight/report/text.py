"""Text: the report for a terminal, and as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.base.text import bytes_text, counted, duration_text, percent_text, seconds_text
from headrace.insight.report.figures import (
    PHASE_WORDS,
    TIER_WORDS,
    cause_word,
    phases_of,
    stall_of,
    tiers_of,
)
from headrace.insight.report.page import cards, headline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.insight.report.figures import TraceFigures

_RANKS_SHOWN = 8
_EPOCHS_SHOWN = 20
_DECISIONS_SHOWN = 5


def report_lines(run: TraceFigures) -> Iterator[str]:
    """The report in lines."""
    yield headline(run)
    if run.main is None:
        return
    yield ""
    for value, unit, what in cards(run):
        yield f"  {value + (' ' + unit if unit else ''):<14} {what}"
    waited_s = run.of("waited_s")
    if waited_s > 0:
        yield from _waits(run, waited_s)
    if tiers := tiers_of(run.total):
        yield ""
        yield "Bytes came from: " + ", ".join(
            f"{TIER_WORDS[t]} {bytes_text(n)}" for t, n in tiers.items()
        )
    yield from _epochs(run)
    yield from _ranks(run)
    if run.decisions:
        yield ""
        yield f"The tuner made {counted(len(run.decisions), 'decision')}; the last:"
        first, _ = run.span_s
        for one in run.decisions[-_DECISIONS_SHOWN:]:
            at = duration_text(max(0.0, one.at_s - first))
            yield f"  after {at}, rank {one.rank}: {one.action} {one.change}: {one.reason}".replace(
                " : ", ": "
            )
    if run.notes:
        yield ""
        for note in run.notes:
            yield f"! {note}"


def _waits(run: TraceFigures, waited_s: float) -> Iterator[str]:
    yield ""
    yield "What was waited for:"
    for cause, seconds in run.causes.items():
        if seconds >= 0.01 * waited_s:
            yield f"  {percent_text(seconds / waited_s):>7}  {cause_word(cause):<10} {cause.sentence}"
    found = [
        f"{PHASE_WORDS[p]} {percent_text(s / waited_s)}"
        for p, s in phases_of(run.total).items()
        if s > 0
    ]
    yield "What the awaited batches were doing: " + ", ".join(found)
    verdict = run.verdict
    if verdict is not None and verdict.action:
        yield ""
        yield f"What to do: {verdict.action}"
        if verdict.gain_s > 0:
            saved = f"{seconds_text(verdict.gain_s)} of {seconds_text(verdict.stall_s)}"
            yield f"  expected to save {saved} ({verdict.gain_from})"


def _epochs(run: TraceFigures) -> Iterator[str]:
    assert run.main is not None
    found = run.main.epochs()
    if len(found) > 1:
        yield ""
        yield "  epoch  took        waited   samples/s"
        for one in found[-_EPOCHS_SHOWN:]:
            rate = f"{one.of('samples') / one.seconds:,.0f}" if one.seconds > 0 else "-"
            yield f"  {one.epoch:>5}  {duration_text(one.seconds):<10} {percent_text(one.stall):>7} {rate:>11}"


def _ranks(run: TraceFigures) -> Iterator[str]:
    if len(run.ranks) > 1:
        yield ""
        yield "Ranks that waited most:"
        for rank in sorted(run.ranks, key=lambda rank: -stall_of(rank.total))[:_RANKS_SHOWN]:
            yield f"  rank {rank.rank:<5} {percent_text(stall_of(rank.total)):>7}  {rank.host}"


def report_document(run: TraceFigures) -> dict[str, Any]:
    """The report as plain values."""
    main = run.main
    return {
        "run": run.path,
        "headline": headline(run),
        "stall": stall_of(run.total),
        "seconds": run.seconds,
        "waited_s": run.of("waited_s"),
        "worked_s": run.of("worked_s"),
        "steps": int(run.of("steps")),
        "samples": int(run.of("samples")),
        "phases_s": phases_of(run.total),
        "causes_s": {cause.value: seconds for cause, seconds in run.causes.items()},
        "verdict": None if run.verdict is None else run.verdict.as_dict(),
        "bytes_by_tier": tiers_of(run.total),
        "epochs": [
            {"epoch": one.epoch, "seconds": one.seconds, "stall": one.stall, "samples": int(one.of("samples"))}
            for one in (main.epochs() if main else ())
        ],
        "ranks": [
            {"rank": rank.rank, "host": rank.host, "stall": stall_of(rank.total)} for rank in run.ranks
        ],
        "decisions": [
            {
                "at_unix_s": one.at_s, "rank": one.rank, "action": one.action, "change": one.change,
                "reason": one.reason, "evidence": one.evidence,
            }
            for one in run.decisions
        ],
        "notes": run.notes,
    }  # fmt: skip
