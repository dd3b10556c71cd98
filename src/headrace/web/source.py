"""Watching: a real cluster, out of the agents' history, the scheduler and a controller; and traced runs.

The scheduler knows nodes, GPUs and jobs; the history knows how jobs fare; a controller knows what reads from
file systems now. Without a scheduler the nodes are those that agents tell of.

`TracedRuns` knows folders by name, and shows each by its report (`headrace.insight.report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from headrace.base.text import duration_text
from headrace.cluster.manifest import interruptions
from headrace.control.policy import policy_yaml
from headrace.errors import ControlError, HeadraceError, TelemetryError
from headrace.insight.report.figures import run_figures
from headrace.insight.report.page import report_page
from headrace.insight.usage import starving_of
from headrace.telemetry.accounts import BUCKET_S, FINE_S
from headrace.telemetry.history import (
    YOUNG_S,
    FileHistory,
    JobRecord,
    merged,
    open_history,
    running_parts,
)
from headrace.web.views import (
    JobFlow,
    cluster_of,
    file_system,
    job_page,
    nodes_of_agents,
    plain,
    plainly,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.control.client import Client
    from headrace.insight.usage import Starving
    from headrace.telemetry.metrics import PrometheusHistory
    from headrace.web.demo import DemoHistory
    from headrace.web.views import ClusterLayout, ClusterMoment

_T = TypeVar("_T")

DAY_S: Final = 86400.0
NOW_S: Final = 150.0  # what counts as now: agents write by the minute, and may write a minute late
RECENT_S: Final = 1800.0
JOB_S: Final = 6 * 3600.0
WINDOWS: Final = 15  # of a history that is asked window by window
KEPT_S: Final = {"history": 8.0, "layout": 15.0, "starving": 10.0, "flows": 5.0, "waits": 20.0}
"""What costs more than a look at the controller is asked for no more often."""

CONTROLLER_KEPT: Final = 450
"""Looks at the controller that are kept: at two seconds each, a quarter of an hour."""


class ClusterSource:
    """A real cluster.

    `history` is a folder of agents' files, the URL of a Prometheus, or what is asked as that is; `state`
    asks the controller for its `/v1/state`, and `layout` looks at the scheduler, where there are such.
    `folder_of` asks it for a job's working directory.
    """

    label = ""

    def __init__(
        self,
        history: str | DemoHistory,
        state: Callable[[], dict[str, Any]] | None = None,
        layout: Callable[[], ClusterLayout] | None = None,
        clock: Callable[[], float] = time.time,
        period_s: float = 2.0,
        *,
        folder_of: Callable[[str], Path | None] | None = None,
    ) -> None:
        self.period_s = period_s
        self.kept_s = dict(KEPT_S)
        self._given = history
        self._state = state
        self._layout = layout
        self._folder_of = folder_of
        self._clock = clock
        self._kept: dict[str, tuple[float, Any]] = {}
        self._states: deque[tuple[float, dict[str, Any]]] = deque(maxlen=CONTROLLER_KEPT)

    # -- what is asked ----------------------------------------------------------------------------

    def cluster(self) -> ClusterMoment:
        """Nodes, GPUs and running jobs now; raises HeadraceError if nothing can be seen."""
        notes: list[str] = []
        now, layout = self._clock(), None
        parts = self._try(notes, "history", lambda: self._history().parts(now - NOW_S, now))
        with contextlib.suppress(TelemetryError):  # a history may have gone meanwhile
            if parts == [] and isinstance(history := self._history(), FileHistory):
                ago = duration_text(max(0.0, now - history.written_s()))
                notes.append(
                    f"Agents wrote last {ago} ago: none runs any more, or none sees a job."
                )
        if self._layout is not None:
            layout = self._try(notes, "layout", self._layout)
        if self._state is not None:
            self._ask_controller(self._state, notes)
        if parts is None and layout is None:
            raise TelemetryError(" ".join(notes) or "nothing can be seen")
        records = running_parts(parts or [])
        if (
            layout is None or not layout.has_gpus
        ):  # a scheduler's nodes without GPUs say nothing of CPUs
            waiting = 0 if layout is None else layout.waiting
            layout = dataclasses.replace(nodes_of_agents(records), waiting=waiting)
        return cluster_of(layout, records, now, tuple(notes))

    def records(self) -> list[JobRecord]:
        """Jobs of the last day."""
        now = self._clock()
        return self._history().records(now - DAY_S, now)

    def starving(self) -> tuple[Starving, dict[str, JobRecord]]:
        """Who starved in the last day, and what is known of all jobs, by the ids that people write."""

        def rank() -> tuple[Starving, dict[str, JobRecord]]:
            records, now = self.records(), self._clock()
            by_id = {record.shown_id: record for record in records}
            return starving_of(records, now - DAY_S, now), by_id

        return self._once("starving", rank)

    def storage(self) -> list[dict[str, Any]]:
        """File systems, what weighs on them over time and the jobs behind it (`views.file_system`)."""
        if self._state is not None:
            self._ask_controller(self._state, [])
            if self._states:
                return self._once("flows", self._flows)
        return self._waits()

    def job(self, job_id: str) -> dict[str, Any] | None:
        """A job over time; None: nothing is known of it."""
        if not job_id:
            return None
        now = self._clock()
        records = self._history().records(0.0, now + DAY_S, job_id)
        if not records:
            return None
        record = max(records, key=lambda each: each.last_s)
        since_s = max(record.first_s, record.last_s - JOB_S)
        minutes = [
            (at, merged([("", each) for each in records])[0], _ran_s(record, at, seconds))
            for at, records, seconds in self._over_time(
                since_s, record.last_s, job_id, fine_until_s=record.first_s + YOUNG_S
            )
            if records
        ]
        lately = running_parts(self._history().parts(now - NOW_S, now, job_id))
        nodes = lately or self._history().parts(since_s, now, job_id)
        nodes = [part for part in nodes if part[0]]
        return job_page(
            record, minutes, nodes, running=bool(lately), went_on=self._interruptions(record)
        )

    def _interruptions(self, record: JobRecord) -> list[tuple[float, str]]:
        """Why a job's launches ended after which it went on, if its folder can be read here."""
        folder = self._folder_of(record.shown_id) if self._folder_of is not None else None
        if folder is None:
            return []
        known = folder, record.shown_id, record.restarts
        return interruptions(*known, record.first_s, record.last_s)

    # -- history ------------------------------------------------------------------------------------

    def _history(self) -> FileHistory | PrometheusHistory | DemoHistory:
        return open_history(self._given) if isinstance(self._given, str) else self._given

    def _over_time(
        self, since_s: float, until_s: float, job_id: str = "", *, fine_until_s: float = 0.0
    ) -> list[tuple[float, list[JobRecord], float]]:
        """Records over time: when, all that are known of then, and over how many seconds."""
        history = self._history()
        if isinstance(history, FileHistory):
            by_minute = history.minutes(since_s, until_s, job_id, fine_until_s=fine_until_s)
            is_fine = any(at % BUCKET_S for at in by_minute)  # older agents kept minutes alone
            fine_until_s = fine_until_s if is_fine else 0.0
            return [
                (at, records, float(FINE_S if at - at % BUCKET_S < fine_until_s else BUCKET_S))
                for at, records in by_minute.items()
            ]
        step = max(60.0, (until_s - since_s) / WINDOWS)
        count = max(1, round((until_s - since_s) / step))
        starts = [since_s + step * i for i in range(count)]
        return [(at, history.records(at, at + step, job_id), step) for at in starts]

    # -- file systems -------------------------------------------------------------------------------

    def _waits(self) -> list[dict[str, Any]]:
        """Who waits for which file system, where nobody says what is read from it."""
        now = self._clock()
        rows = self._once("waits", lambda: self._over_time(now - RECENT_S, now))
        by_system: dict[str, dict[str, tuple[JobRecord, list[float]]]] = {}
        for place, (_, records, seconds) in enumerate(rows):
            for record in records:
                for system, waited_s in record.waited_by_file_system.items():
                    jobs = by_system.setdefault(system, {})
                    line = jobs.setdefault(record.job_id, (record, [0.0] * len(rows)))[1]
                    line[place] += waited_s / seconds
        times = [at for at, _, _ in rows]
        flows = {
            name: [JobFlow(r.shown_id, r.name, r.user, line) for r, line in jobs.values()]
            for name, jobs in sorted(by_system.items())
        }
        return [
            file_system(name or "not known", times, of, unit="processes that wait")
            for name, of in flows.items()
        ]

    def _flows(self) -> list[dict[str, Any]]:
        """What is read from file systems, as the controller says."""
        states = list(self._states)
        lines: dict[str, dict[tuple[str, str], list[float]]] = {}
        capacity: dict[str, float | None] = {}
        for place, (_, state) in enumerate(states):
            for system in state["file_systems"]:
                capacity[system["name"]] = system["capacity"]["bytes_per_s"]
            for plane in state["planes"]:
                for flow in plane["flows"]:
                    jobs = lines.setdefault(flow["file_system"], {})
                    line = jobs.setdefault((flow["job"], plane["user"]), [0.0] * len(states))
                    line[place] += flow["used"]["bytes_per_s"] or 0.0
        times = [at for at, _ in states]
        flows = {
            name: [
                JobFlow(job, "", user, line) for (job, user), line in lines.get(name, {}).items()
            ]
            for name in sorted({*capacity, *lines})
        }
        return [file_system(n, times, of, capacity=capacity.get(n)) for n, of in flows.items()]

    def _ask_controller(self, state: Callable[[], dict[str, Any]], notes: list[str]) -> None:
        if self._states and self._clock() - self._states[-1][0] < 0.9 * self.period_s:
            return
        try:
            self._states.append((self._clock(), state()))
        except ControlError as e:
            notes.append(f"The controller does not answer: {e}")

    # -- keeping --------------------------------------------------------------------------------------

    def _once(self, what: str, make: Callable[[], _T]) -> _T:
        """What was made a moment ago, else made now; less often where making takes long."""
        until_s, kept = self._kept.get(what, (-1e9, None))
        began_s = time.monotonic()
        if began_s < until_s:
            return kept  # type: ignore[no-any-return]
        value, seconds = make(), self.kept_s[what]
        now = time.monotonic()
        if seconds:
            self._kept[what] = now + max(seconds, 10 * (now - began_s)), value
        return value

    def _try(self, notes: list[str], what: str, make: Callable[[], _T]) -> _T | None:
        """The same; None, and a note, where it cannot be had."""
        try:
            return self._once(what, make)
        except HeadraceError as e:
            notes.append(str(e))
            return None


def _ran_s(record: JobRecord, at: float, seconds: float) -> float:
    """How much of a stretch a job was there."""
    return max(1.0, min(at + seconds, record.last_s) - max(at, record.first_s))


class ControllerPolicies:
    """A controller's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self.where = f"at {client.endpoint.url}"

    def current(self) -> dict[str, Any]:
        """`version` and `text`; raises ControlError if it cannot be had."""
        with self._lock:
            reply = self._client.document("GET", "/v1/policy")
        return {"version": reply["version"], "text": policy_yaml(reply["policy"], ascii_only=True)}

    def put(self, text: str, *, dry_run: bool) -> dict[str, Any]:
        """What a policy changes: `version`, `applied`, `changes` and `unknown`.

        Raises PolicyError if something is wrong with it, Refusal if the controller says so, and
        ControlError if nobody answers.
        """
        path = "/v1/policy?dry_run=1" if dry_run else "/v1/policy"
        with self._lock:
            reply = self._client.document("PUT", path, text.encode())
        return {key: plainly(reply[key]) for key in ("version", "applied", "changes", "unknown")}

    def close(self) -> None:
        """Let go of the controller."""
        with self._lock:
            self._client.close()


# -- traced runs ---------------------------------------------------------------------------------------

PREFIX: Final = "run:"
"""What the id of a traced run begins with, where jobs have the scheduler's number."""


class TracedRuns:
    """Folders of runs, by their names."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [Path(folder).absolute() for folder in folders]

    def by_id(self) -> dict[str, Path]:
        """What there is now, by id."""
        by_id: dict[str, Path] = {}
        for folder in self._folders:
            inside: list[Path] = []
            with contextlib.suppress(OSError):
                inside = [] if _is_run(folder) else sorted(filter(_is_run, folder.iterdir()))
            for path in inside or [folder]:
                name, number = f"{PREFIX}{plain(path.name)}", 2
                while name in by_id:
                    name, number = f"{PREFIX}{plain(path.name)} {number}", number + 1
                by_id[name] = path
        return by_id

    def page(self, name: str) -> str | None:
        """A run's report as HTML, as far as its traces are written; None: there is no such run.

        Raises TraceError if it is damaged, and OSError if it cannot be read.
        """
        path = self.by_id().get(name)
        return None if path is None else report_page(run_figures(str(path)))


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file()
