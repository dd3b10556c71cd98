"""JobReport: what a job had, used and waited for, for the end of its log; and what to do about its waiting.

headrace: job 4711 (resnet) of ann, 2 nodes, 2:03:11, measured
  GPU-hours    16.42 had, 4.91 lost to waiting for data (30 %)
  GPUs         worked 63 % of the time, 41.2 GB of memory at most
  ...
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import WORTH_NAMING, Cause
from headrace.base.text import bytes_text, counted, duration_text
from headrace.errors import TelemetryError
from headrace.plane.stage import TIER_WORDS
from headrace.telemetry.history import LITTLE, JobRecord, open_history
from headrace.telemetry.waste import WASTE, Booked, JobUse, Used, use_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_STAGED: Final = "headrace://"  # what a job's staged data are known by, as a file system

_STAGED_HELP: Final = (
    "its data are staged: what the first epoch waited for, the next need not; after that, keep samples in "
    "memory (ram_bytes=)"
)
_NEARER: Final = (Cause.STORAGE, Cause.METADATA, Cause.LATENCY, Cause.BANDWIDTH, Cause.NETWORK)
"""Whose remedy is to have the data staged."""

_FROM_STORAGE: Final = (*_NEARER, Cause.PEER)


def hint_of(record: JobRecord) -> str:
    """One line about what a job waited for most, and what helps."""
    share = record.stall
    if record.has_few_steps:
        return (
            f"{counted(round(record.total('batches')), 'step')}, of all ranks together, are too few to say "
            "whether it waits for data"
        )
    if share is None:
        return (
            "nothing is known of its steps: read through headrace (hr.loader, headrace.torch.DataLoader, "
            "headrace run) to have stalls measured"
        )
    use = record.gpu_use
    if share < LITTLE:
        if use is not None and use < 0.5:
            return (
                f"data were there in time, yet the GPUs worked {use:.0%} of the time: "
                "the step itself is the limit (batch size, host-side work, synchronisation)"
            )
        if not record.measured:
            return (
                "from outside nothing was seen to wait for storage; what steps wait for, only loaders of "
                "headrace's tell"
            )
        return "data were there in time; nothing to do"
    cause = next(iter(record.waited), Cause.OTHER)
    remedy = cause.remedy
    # Where the job had no GPU, no hours of one were lost anywhere.
    on = record.lost_by_file_system or record.waited_by_file_system
    systems = [name for name, s in on.items() if name and s > 0]
    where = f" on {systems[0]}" if systems and cause in _FROM_STORAGE else ""
    if cause in _NEARER and systems and systems[0].startswith(_STAGED):
        remedy = _STAGED_HELP
    sure = "" if record.measured else ", probably"
    return f"it waited for {cause.phrase}{where} {share:.0%} of its time{sure}: {remedy}"


_SHOWN = 6
_FACTS: Final = (
    "job_id",
    "alias",
    "name",
    "user",
    "account",
    "first_s",
    "last_s",
    "restarts",
    "unended",
)
_TOTALS: Final = ("samples", "cpu_s", "memory_bytes", "read_bytes", "written_bytes")


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job's report."""

    record: JobRecord
    skipped: tuple[str, ...] = ()
    booked: Booked | None = None  # what the scheduler's books say of it, where there are some
    failed: bool = False

    @property
    def hint(self) -> str:
        """What helps against its waiting; '' where the job failed: that comes first."""
        return "" if self.failed else hint_of(self.record)

    @property
    def use(self) -> JobUse:
        """What it had and used."""
        return use_of(self.record, self.booked)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values; times in seconds, memory and data in bytes."""
        record, use = self.record, self.use
        waited = record.waited
        return {
            **{name: getattr(record, name) for name in _FACTS},
            "nodes": list(record.nodes),
            "seconds": self._wall_s,
            "quality": record.quality,
            "partition": record.partition,
            "gpu_hours": use.gpu.had / 3600,
            "gpu_hours_lost": sum(record.lost.values()) / 3600,
            "cpu_hours": use.cpu.had / 3600,
            **use.as_dict(),
            "memory_asked_bytes": use.memory.had / use.seconds if use.seconds else 0.0,
            "advice": list(use.advice),
            "gpu_memory_bytes": record.total("gpu_memory_bytes"),
            "stall": record.stall,
            "stall_s": waited,
            "worked_s": record.total("worked_s"),
            "gpu_hours_lost_by_cause": {c: s / 3600 for c, s in record.lost.items()},
            "gpu_hours_lost_by_file_system": {
                n: s / 3600 for n, s in record.lost_by_file_system.items()
            },
            "bytes_by_tier": record.by_label("tier_bytes"),
            **{name: record.total(name) for name in _TOTALS},
            "hint": self.hint,
            "skipped": list(self.skipped),
        }

    @property
    def _wall_s(self) -> float:
        return max(0.0, self.record.last_s - self.record.first_s)

    def text(self) -> str:
        """For people; lines of at most 100 characters where names are not longer."""
        record = self.record
        job = f"job {record.shown_id}" + (f" ({record.name})" if record.name else "")
        user = f" of {record.user}" if record.user else ""
        nodes, took = counted(len(record.nodes), "node"), duration_text(self._wall_s)
        again = f", {counted(record.restarts, 'restart')}" if record.restarts else ""
        lines = [f"headrace: {job}{user}, {nodes}, {took}{again}, stalls {record.quality}"]
        lines += [f"  {label:<12} {text}" for label, text in self._rows() if text]
        lines += [f"  {'not read':<12} {name}" for name in self.skipped]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str]]:
        record, use = self.record, self.use
        lost_h, had_h = sum(record.lost.values()) / 3600, use.gpu.had / 3600
        hours = gpus = ""
        if had_h:
            lost = f"{hours_text(lost_h)} lost to waiting for data ({lost_h / had_h:.0%})"
            hours = f"{hours_text(had_h)} had, {lost}"
            worked = _share(use.gpu, "worked {} of the time", "not known how much they worked")
            peak, size = (record.total(f"gpu_memory{word}_bytes") for word in ("", "_asked"))
            of = f" of {bytes_text(size)}" if size else ""
            gpus = f"{worked}, {bytes_text(peak)}{of} of memory at most" if peak else worked
        cpus = use.cpu.had / use.seconds if use.seconds else 0.0
        of_cpus = f"{counted(round(cpus), 'CPU')} a node"
        share = _share(use.cpu, f"{{}} of {of_cpus}", of_cpus)
        used, had = hours_text(use.cpu.used / 3600), hours_text(use.cpu.had / 3600)
        cpu = f"{used} hours used" if use.cpu.used or cpus else ""
        if cpus:  # nobody says what a launch by hand had
            cpu += f" of {had} had, {share}"
        most = record.total("memory_bytes")
        memory = f"{bytes_text(most)} at most on a node" if most or use.memory.had else ""
        if use.memory.had:
            asked = bytes_text(use.memory.had / use.seconds)
            memory += ", " + _share(
                use.memory, f"{{}} of the {asked} asked for", f"{asked} asked for"
            )
        wasted = [
            f"{kind} {hours_text(seconds / 3600)}"
            for kind, seconds in zip(WASTE, use.waste, strict=True)
            if seconds > 0.005 * max(use.gpu.had, use.seconds)
        ]
        # What hardly waits, or for how long nobody knows, has no causes to speak of; inferred, less is noise.
        least = WORTH_NAMING if record.measured else LITTLE
        waits = record.stall is not None and record.stall >= least
        lost_on = {name or "?": s for name, s in record.lost_by_file_system.items()}
        return [
            ("GPU-hours", hours),
            ("GPUs", gpus),
            ("CPU", cpu),
            ("memory", memory),
            ("wasted", f"GPU-hours: {', '.join(wasted)}" if wasted else ""),
            ("next time", "; ".join(use.advice)),
            ("steps", self._steps()),
            ("not told", self._not_told()),
            ("stall", _list(_shares(record.waited)) if waits else ""),
            ("bytes read", _list(_sizes(record.by_label("tier_bytes")))),
            ("lost on", _list(_shares(lost_on)) if waits else ""),
            ("hint", self.hint),
        ]

    def _steps(self) -> str:
        record = self.record
        if record.stall is None and not record.has_few_steps:
            return ""
        waited_s = sum(record.waited.values())
        text = f"waited {waited_s:,.1f} s"
        if record.measured:
            least = "at least " if record.unended else ""
            samples = f"{least}{record.total('samples'):,.0f} samples"
            text += f", worked {record.total('worked_s'):,.1f} s over all ranks, {samples}"
        if record.stall is None:
            return f"{text}: too few to give a share"
        return f"{text}: {record.stall:.1%} of their time stalled"

    def _not_told(self) -> str:
        if not self.record.unended:
            return ""
        who = counted(self.record.unended, "process", "processes")
        return (
            f"what {who} did in the last 2 s: killed, still running, or not heard by a busy agent"
        )


def job_report(history: Path | str, job_id: str, since_s: float = 0.0) -> JobReport:
    """A job's report, from its beginning to now, by its number or as people write it ("17_3").

    What was seen before `since_s` does not count: another cluster, or one that was set up anew, gives the
    same numbers again.

    Raises TelemetryError if there is no history, or it knows no such job.
    """
    opened = open_history(history)
    records = opened.records(since_s, time.time() + 86400.0, job_id)
    if not records:
        raise TelemetryError(
            f"{history}: nothing is known of job {job_id}.",
            path=str(history),
            next_step="See which are known: headrace starving --last 7d. Others had no agent on their nodes: "
            "headrace agent start --history DIR.",
        )
    # Of several attempts under one number, what was seen last.
    record = max(records, key=lambda each: each.last_s)
    record.first_s = max(record.first_s, since_s)
    return JobReport(record, tuple(opened.skipped))


def hours_text(hours: float) -> str:
    """12.3 -> '12.30', 0.0042 -> '0.0042': two or more digits that count."""
    if hours == 0.0 or hours >= 0.095:
        return f"{hours:,.1f}" if hours >= 100 else f"{hours:.2f}"
    return f"{hours:.2g}" if hours >= 1e-4 else "under 0.0001"


def _share(used: Used, text: str, unknown: str) -> str:
    """How much was used, where that is known for nearly all of it; else of how much it is not known."""
    if used.share is not None:
        return text.format(f"{used.share:.0%}")
    return f"{unknown}: seen for {used.coverage or 0.0:.0%} of it"


def _shares(seconds: Mapping[Cause, float] | Mapping[str, float]) -> list[str]:
    total = sum(seconds.values()) or 1.0
    return [f"{name} {s / total:.0%}" for name, s in seconds.items() if s / total >= 0.005]


def _sizes(amounts: dict[str, float]) -> list[str]:
    total = sum(amounts.values())
    return [
        f"{TIER_WORDS.get(name, name)} {bytes_text(n)} ({n / total:.0%})"
        for name, n in amounts.items()
        if n
    ]


def _list(words: list[str]) -> str:
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
