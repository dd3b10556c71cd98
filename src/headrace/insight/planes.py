"""Planes: what a controller says of all nodes, as `headrace top` shows it: who starves, and who is limited.

Plain functions of its state (`headrace control status --json`), as in `headrace.insight.top`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import cause_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    State = Mapping[str, Any]

__all__ = ["FlowRow", "PlaneRow", "PlanesBoard", "PlanesWatch"]

WINDOW_S: Final = 6.0
"""Rates are taken over so long."""

SILENT_REPORTS: Final = 3.0
"""A plane that has missed so many reports is silent."""

LIMITED_SHARE: Final = 0.9
"""Who uses more than this of what it may is limited by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneRow:
    """A node daemon."""

    name: str
    user: str
    pid: int
    clients: int
    silent: bool
    """It does not report."""
    lease_left_s: float
    held_bytes: float
    ram_bytes: float
    stalled: float
    """Training processes that wait, on average: seconds waited in all, per second."""
    cause: str
    """What they waited for most; ''."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRow:
    """A job on a file system, on all nodes together."""

    job: str
    file_system: str
    planes: int
    bytes_per_s: float
    granted_bytes_per_s: float | None
    """None: no limit."""
    reads_per_s: float
    granted_reads_per_s: float | None

    @property
    def limited(self) -> bool:
        """Whether it uses what it may."""
        pairs = (
            (self.bytes_per_s, self.granted_bytes_per_s),
            (self.reads_per_s, self.granted_reads_per_s),
        )
        return any(most is not None and used >= LIMITED_SHARE * most > 0 for used, most in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanesBoard:
    """All that is shown of a controller."""

    epoch: int
    policy_version: int
    degraded: str
    """Why it cannot write its database; ''."""
    decide_s: float
    planes: tuple[PlaneRow, ...]
    """Where most is lost first."""
    flows: tuple[FlowRow, ...]
    """Who reads most first."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        found = asdict(self)
        found["flows"] = [{**asdict(f), "limited": f.limited} for f in self.flows]
        return found


@dataclass(slots=True)
class PlanesWatch:
    """Remembers what is needed for rates; feed it a state and the time."""

    _seen: deque[tuple[float, State]] = field(default_factory=deque)

    def look(self, state: State, now_s: float) -> PlanesBoard:
        """The board at this moment.

        Args:
            state: what the controller says.
            now_s: monotonic.
        """
        while len(self._seen) > 1 and now_s - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        self._seen.append((now_s, state))
        then_s, before = self._seen[0]
        old = {_key(plane): plane for plane in before["planes"]}
        silent_s = SILENT_REPORTS * state["report_s"]
        planes = [
            _plane(plane, old.get(_key(plane)), now_s - then_s, silent_s)
            for plane in state["planes"]
        ]
        return PlanesBoard(
            epoch=state["epoch"],
            policy_version=state["policy_version"],
            degraded=state["degraded"],
            decide_s=state["decide_s"],
            planes=tuple(sorted(planes, key=lambda p: (-p.stalled, p.name, p.pid))),
            flows=_flows(state["planes"]),
        )


def _key(plane: State) -> tuple[Any, ...]:
    return plane["name"], plane["user"], plane["pid"]


def _plane(plane: State, before: State | None, seconds: float, silent_s: float) -> PlaneRow:
    then = {} if before is None else before["stall_s"]
    waited = {
        cause: max(0.0, total - then.get(cause, total)) for cause, total in plane["stall_s"].items()
    }
    most = max(waited, key=lambda cause: waited[cause], default="")
    return PlaneRow(
        name=plane["name"],
        user=plane["user"],
        pid=plane["pid"],
        clients=sum(plane["sessions"].values()),
        silent=plane["silent_s"] > silent_s,
        lease_left_s=plane["lease_left_s"],
        held_bytes=plane["held_bytes"],
        ram_bytes=plane["ram_bytes"],
        stalled=sum(waited.values()) / seconds if seconds else 0.0,
        cause=cause_of(most, by_node=True) if waited.get(most) else "",
    )


def _flows(planes: list[State]) -> tuple[FlowRow, ...]:
    together: dict[tuple[str, str], list[State]] = {}
    for plane in planes:
        for flow in plane["flows"]:
            together.setdefault((flow["job"], flow["file_system"]), []).append(flow)
    rows = [
        FlowRow(
            job=job,
            file_system=system,
            planes=len(flows),
            bytes_per_s=sum(flow["used"]["bytes_per_s"] for flow in flows),
            granted_bytes_per_s=_granted(flows, "bytes_per_s"),
            reads_per_s=sum(flow["used"]["reads_per_s"] for flow in flows),
            granted_reads_per_s=_granted(flows, "reads_per_s"),
        )
        for (job, system), flows in together.items()
    ]
    return tuple(sorted(rows, key=lambda r: (-r.bytes_per_s, r.job, r.file_system)))


def _granted(flows: list[State], resource: str) -> float | None:
    """What all may use together; None: one of them without limit."""
    granted = [flow["granted"][resource] for flow in flows]
    return None if None in granted else float(sum(granted))
