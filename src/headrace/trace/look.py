"""Look: what a plane's stages, its tuner and this machine say, as events of a trace."""

from __future__ import annotations

import resource
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from headrace.machine.sensors import Reading, all_sensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.control.controller import Change, Plane
    from headrace.machine.sensors import SensorKey
    from headrace.plane.stage import StageStats

__all__ = ["HostLook", "decision", "planes_look"]

_DIGITS: Final = 6


def planes_look(plane: Plane, now: float) -> dict[str, Any] | None:
    """What consumer and stages have done so far, and where the knobs stand; None: they are gone.

    Totals since the loader began, zeros left out: `consumer`, `stages` (by name) and `knobs`.
    """
    found = plane.now()
    if found is None:
        return None
    consumer, stages = found
    return {
        "kind": "look",
        "at_s": round(now, _DIGITS),
        "consumer": _plain(asdict(consumer)),
        "stages": {stage.name: _stage(stage) for stage in stages},
        "knobs": _plain(asdict(plane.knobs)),
    }


def _stage(stage: StageStats) -> dict[str, Any]:
    named = {f.name: getattr(stage, f.name) for f in fields(stage) if f.name not in _NOT_PLAIN}
    found = _plain(named)
    if stage.bytes_by_tier:
        found["bytes_by_tier"] = dict(stage.bytes_by_tier)
    if stage.reads:
        found["latency_us"] = {str(at): n for at, n in enumerate(stage.latency_us) if n}
    if stage.remote is not None:
        remote = asdict(stage.remote)
        remote.pop("latency_us")
        found["remote"] = _plain(remote)
    return found


_NOT_PLAIN: Final = ("name", "bytes_by_tier", "latency_us", "remote")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in values.items()
        if value
    }


def decision(change: Change, began_s: float) -> dict[str, Any]:
    """A decision of the tuner.

    Args:
        change: as the plane keeps it.
        began_s: when the plane was first watched, monotonic.
    """
    return {
        "kind": "decision",
        "at_s": round(began_s + change.at_s, _DIGITS),
        "action": change.action,
        "before": asdict(change.before),
        "after": asdict(change.after),
        "reason": change.reason,
        "evidence": change.evidence,
    }


class HostLook:
    """Asks this machine's sensors; remembers what they said last."""

    def __init__(self) -> None:
        self._sensors = all_sensors()
        self._at_s = 0.0
        self._cpu_s = 0.0
        self.look(0.0)

    def look(self, now: float) -> dict[str, Any]:
        """What grew since the last look, and gauges as they are, by the sensors' names: `disk_busy_s/nvme0n1`.

        `seconds` is how long that was; `process_cpu_s` is of this process and its children that have ended.
        """
        grown: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for sensor in self._sensors:
            try:
                reading = sensor.read()
            except OSError:
                reading = Reading()
            grown |= _named(reading.grown.items())
            gauges |= _named(reading.gauges.items())
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
        grown["process_cpu_s"] = round(cpu_s - self._cpu_s, _DIGITS)
        seconds, self._at_s, self._cpu_s = now - self._at_s, now, cpu_s
        return {
            "kind": "host",
            "at_s": round(now, _DIGITS),
            "seconds": round(seconds, _DIGITS),
            "grown": grown,
            "gauges": gauges,
        }


def _named(found: Iterable[tuple[SensorKey, float]]) -> dict[str, float]:
    return {
        f"{name}/{of}" if of else name: round(value, _DIGITS)
        for (name, of), value in found
        if value
    }
