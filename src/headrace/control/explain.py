"""Explain: what the data planes of this process do, who waits for whom, and what was tuned and why."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, overload

from headrace.base.text import bytes_text, duration_text
from headrace.control.controller import CHANGES_KEPT, planes
from headrace.control.history import STALL_BAD
from headrace.control.stalls.live import verdict_on
from headrace.plane.stage import KNOBS, latency_percentile_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.control.controller import Plane
    from headrace.control.history import PlaneWindow
    from headrace.control.stalls.verdict import Verdict
    from headrace.plane.stage import StageStats

CHANGES_SHOWN = 12

_MOSTLY = 0.5  # of the time: who waits for less is not bound by what it waits for

VERDICTS = {
    "consumer-bound": "the consumer is the slower side: data are ready when it asks",
    "storage-bound": "for the storage",
    "decode-bound": "for decoding and transforms",
    "memory-bound": "for bytes that are in memory already: copying is the limit",
    "node-bound": "for the node daemon: `headrace node status` says what that waits for",
    "idle": "nothing was delivered lately",
}


class Explanation:
    """What `explain` says of planes: text for people, a dictionary for programs."""

    def __init__(self, planes: Sequence[dict[str, Any]]) -> None:
        self._planes = list(planes)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {"planes": self._planes}

    def __str__(self) -> str:
        if not self._planes:
            return "No loader of a store is or was at work in this process: hr.explain(loader) knows others."
        each = "each by itself; `headrace report` adds them up, explain(loader) tells of one"
        head = [f"{len(self._planes)} loaders, {each}"] if len(self._planes) > 1 else []
        return "\n\n".join([*head, *map(_text, self._planes)])

    def __repr__(self) -> str:
        return str(self)


@overload
def explain() -> Explanation: ...
@overload
def explain(loader: object, *, epoch: int | None = ...) -> Verdict: ...
def explain(loader: object = None, *, epoch: int | None = None) -> Explanation | Verdict:
    """Tell why training waited for a loader; or what all data planes of this process do.

    Costs milliseconds, and may be called from any thread.

    Args:
        loader: the cause of every second that was waited for its batches, what shows it, and what to do.
            None: what each data plane does, and what the tuner did and why, as the controller saw it
            last; planes that ended recently are told as well.
        epoch: of this loader, only this one; None: its last steps.

    Returns:
        Print it, or take its `as_dict()`.

    Raises:
        TypeError: it is no loader of headrace's.
    """
    if loader is not None:
        rank = str(getattr(getattr(loader, "_loader", loader), "ranks", ""))
        alone = rank.removesuffix(" so far") == "rank 0 of 1"
        return replace(verdict_on(loader, epoch=epoch), rank="" if alone else rank)
    working, ended = planes()
    return Explanation([plane_report(plane) for plane in (*ended, *working)])


def verdict(window: PlaneWindow, stages: Sequence[StageStats]) -> str:
    """Who is the slower side: a key of `VERDICTS`."""
    if window.batches == 0 and window.waited_s == 0.0:
        return "idle"
    if window.batches and window.stall <= STALL_BAD:
        return "consumer-bound"
    decoding_s = window.decode_busy_s + window.decode_wait_s
    if decoding_s and window.decode_busy_s > 0.85 * decoding_s:
        return "decode-bound"
    if any(s.name == "node" and s.bytes > 2 * s.bytes_by_tier.get("ram", 0) for s in stages):
        return "node-bound"
    if window.reads == 0 and window.batches and stages:
        return "memory-bound"
    return "storage-bound"


def plane_report(plane: Plane, changes: int = CHANGES_KEPT) -> dict[str, Any]:
    """What is known of a plane, as plain values; of its changes the last ones."""
    window = plane.window()
    stages = plane.stages
    slower_side = verdict(window, stages)
    limits, knobs = plane.limits, plane.knobs
    return {
        "name": plane.name,
        "ended": plane.ended,
        "tuning": plane.enabled,
        "verdict": slower_side,
        "simulation": next((stage.simulation for stage in stages if stage.simulation), ""),
        "consumer": asdict(plane.consumer),
        "recent": {
            "seconds": window.seconds,
            "samples_per_s": window.rate,
            "bytes_per_s": window.bytes / window.seconds if window.seconds else 0.0,
            "stall": window.stall,
            "reads_per_s": window.read_rate,
            "reads_in_flight": window.in_flight,
            "latency_s_p50": window.latency_percentile_s(0.5),
            "latency_s_p99": window.latency_percentile_s(0.99),
        },
        "knobs": {
            name: {
                "value": getattr(knobs, name),
                "low": getattr(limits, name).low,
                "high": getattr(limits, name).high,
                "limit_from": limits.origins.get(name, "default"),
                "frozen": name in plane.frozen,
            }
            for name in KNOBS
            if getattr(knobs, name)
        },
        "stages": [_stage(stage) for stage in stages],
        "doing": f"{plane.action}: {plane.reason}" if plane.action else "",
        "changes": [
            {
                "at_s": round(change.at_s, 3),
                "action": change.action,
                "turned": {
                    name: [getattr(change.before, name), value]
                    for name, value in change.after.changes_from(change.before).items()
                },
                "reason": change.reason,
                "evidence": change.evidence,
            }
            for change in tuple(plane.changes)[-changes:]
        ],
    }


def _stage(stage: StageStats) -> dict[str, Any]:
    document = asdict(stage)
    document["bytes_by_tier"] = dict(stage.bytes_by_tier)
    document |= _percentiles(document.pop("latency_us"))
    if stage.remote is not None:
        document["remote"] |= _percentiles(document["remote"].pop("latency_us"))
        del document["remote"]["refreshes"]
    return document


def _percentiles(counts: Sequence[int]) -> dict[str, float]:
    return {
        "latency_s_p50": latency_percentile_s(counts, 0.5),
        "latency_s_p99": latency_percentile_s(counts, 0.99),
    }


# -- as text ---------------------------------------------------------------------------------------


def _block(label: str, *lines: str) -> list[str]:
    """Lines, the first behind what they are about."""
    return [f"  {label if at == 0 else '':<10}{line}".rstrip() for at, line in enumerate(lines)]


def _text(plane: dict[str, Any]) -> str:
    state = "ended" if plane["ended"] else "at work"
    title = f"{plane['name']} ({state}, {'tuned' if plane['tuning'] else 'not tuned'})"
    if plane["simulation"]:
        title += f": {plane['simulation'].upper()}, no real storage"
    recent, consumer = plane["recent"], plane["consumer"]
    lines = [
        title,
        *_block("verdict", _verdict_line(plane["verdict"], recent["stall"])),
        *_block(
            "consumer",
            f"{recent['samples_per_s']:,.0f} samples/s, {bytes_text(recent['bytes_per_s'])}/s, "
            f"waits {recent['stall']:.1%} of its time for data (last {recent['seconds']:.1f} s); "
            f"in all it waited {duration_text(consumer['waited_s'])} for data, and worked or took over ready "
            f"batches {duration_text(consumer['worked_s'])}",
        ),
        *_block("storage", _storage_line(recent)),
        *_block("stages", *_stage_lines(plane["stages"])),
        *_block("knobs", *_knob_lines(plane["knobs"])),
        *_block("story", *_story(plane)),
    ]
    return "\n".join(lines)


def _verdict_line(verdict: str, stall: float) -> str:
    """Who is the slower side, and by how much."""
    text = VERDICTS[verdict]
    if not text.startswith("for "):
        return f"{verdict}: {text}"
    if stall < _MOSTLY:
        mostly = "mostly the consumer's own work, or its taking over of ready batches"
        return f"{mostly}; {stall:.1%} of its time it waits {text}"
    return f"{verdict}: {stall:.1%} of its time the consumer waits {text}"


def _storage_line(recent: dict[str, Any]) -> str:
    last = f"(last {recent['seconds']:.1f} s)"
    if not recent["reads_per_s"]:
        return f"this process read nothing from storage {last}"
    return (
        f"{recent['reads_per_s']:,.0f} reads/s, {recent['reads_in_flight']:.1f} in flight, "
        f"{recent['latency_s_p50'] * 1e3:.3g} ms (median), "
        f"{recent['latency_s_p99'] * 1e3:.3g} ms (99 %) {last}"
    )


def _stage_lines(stages: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    by_daemon = any(stage["name"] == "node" for stage in stages)
    for stage in stages:
        if stage["name"] == "node":
            lines.append(
                f"node: the node daemon read {bytes_text(stage['bytes'])}; "
                f"waited for it {duration_text(stage['wait_input_s'])}; its work: headrace node status"
            )
        elif not by_daemon or stage["busy_s"]:  # behind the daemon only where that is gone
            lines.append(
                f"{stage['name']}: its threads together worked {stage['busy_s']:.1f} s, "
                f"had nothing to do {stage['wait_input_s']:.1f} s, "
                f"waited for room {stage['wait_output_s']:.1f} s; "
                f"holds {bytes_text(stage['buffered_bytes'])}, {bytes_text(stage['ready_bytes'])} of it ready"
            )
        tiers = {name: count for name, count in stage["bytes_by_tier"].items() if count}
        total = sum(tiers.values())
        if total:
            shares = (f"{name} {bytes_text(n)} ({n / total:.0%})" for name, n in tiers.items())
            lines.append(f"{stage['name']} read from {', '.join(shares)}")
        if stage["remote"] is not None:
            lines.append(f"{stage['name']} {_remote(stage['remote'])}")
    return lines


def _remote(remote: dict[str, Any]) -> str:
    text = (
        f"asked remote volumes {remote['requests']:,} times for {remote['reads']:,} reads, "
        f"{bytes_text(remote['bytes'])} in all, {remote['latency_s_p50'] * 1e3:.3g} ms (median), "
        f"{remote['latency_s_p99'] * 1e3:.3g} ms (99 %); "
        f"{remote['in_flight']} of at most {remote['reads_in_flight']} in flight, "
        f"{remote['waiting']} waiting; {remote['retries']} repeated, {remote['failures']} given up"
    )
    if remote["hedges"]:
        text += f"; {remote['hedges']} sent twice, {remote['hedges_won']} answered sooner for it"
    met = ", ".join(f"{name} ({count})" for name, count in remote["faults"].items())
    return f"{text}; met {met}" if met else text


def _knob_lines(knobs: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, knob in knobs.items():
        bound = f"at most {_value(name, knob['high'])} ({knob['limit_from']})"
        why = "set explicitly: left alone" if knob["frozen"] else bound
        lines.append(f"{name} {_value(name, knob['value'])}, {why}")
    return lines


def _story(plane: dict[str, Any]) -> list[str]:
    changes = plane["changes"]
    lines = []
    hidden = len(changes) - CHANGES_SHOWN
    if hidden > 0:
        lines.append(f"{hidden} earlier changes")
    for change in changes[-CHANGES_SHOWN:]:
        turned = ", ".join(
            f"{name} {_value(name, old)} -> {_value(name, new)}"
            for name, (old, new) in change["turned"].items()
        )
        entry = f"{change['at_s']:8.1f} s  {change['action']}: "
        entry += f"{turned}; {change['reason']}" if turned else change["reason"]
        lines += [entry, f"{'':12}[{change['evidence']}]"]
    if plane["doing"] and not plane["ended"]:
        lines.append(f"     now    {plane['doing']}")
    return lines


def _value(name: str, value: int) -> str:
    return bytes_text(value) if name == "buffer_bytes" else str(value)
