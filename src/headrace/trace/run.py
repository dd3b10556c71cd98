"""Run: a run's folder read back, whatever became of the run and of the folder.

Nothing in the files is believed: lengths are checked before anything is made of them, and what is
damaged or no run's is a `TraceError`. A file that was cut off counts up to there, and says so.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.errors import TraceError
from headrace.machine.host import start_time, this_host
from headrace.plane.batch_trace import STEP
from headrace.trace.format import (
    EVENT,
    HEADER_BYTES_MAX,
    RANKS_MAX,
    RUN,
    STEPS,
    chunks,
    finite,
    json_object,
    read_header,
    steps_in,
    trace_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

RUN_FILE: Final = "run.json"

_FILE_BYTES_MAX: Final = 16 << 30
_FILES_MAX: Final = 1 << 17
_TEXT_MAX: Final = 4096
_TRACE_A_RUN: Final = (
    "Name the folder that HEADRACE_TRACE=DIR, headrace.loader(..., trace=DIR) or headrace read --trace DIR "
    "made; if none did, run once more with one of them."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RankTrace:
    """What one loader of one rank did, from its beginning to its end or where the file is cut off."""

    path: str
    rank: int
    world_size: int
    host: str = ""
    node: str = ""  # what the job calls it; "" if nobody said
    machine: str = ""  # `headrace.machine.host.this_host` there
    pid: int = 0
    started: int = 0  # when the process began, in ticks since that machine's boot
    process: str = ""
    """Identifies the process among all of all hosts: loaders of one process have the same."""
    began_unix_s: float = 0.0
    began_s: float = 0.0
    """The host's monotonic clock at that time: what the times of steps and events are to be compared with."""
    source: str = ""  # what the loader loads: a path or URL
    framework: str = ""
    fingerprint: str = ""  # identifies the data; "" where the order is not headrace's
    samples: int = 0  # in the data
    order: Mapping[str, Any] = field(default_factory=dict)
    """`Order.describe()`; {} where the order is not headrace's."""
    order_digest: str = ""
    length: int = 0  # positions of an epoch
    batch_size: int = 0
    tail: str = ""
    origin: str = ""
    """Where its first pass began: as a loaded `state` says, or at the `beginning`; "": not known."""
    steps: NDArray[np.void]  # dtype `headrace.plane.batch_trace.STEP`, as they were delivered
    events: tuple[dict[str, Any], ...] = ()
    """JSON objects with at least `kind` (text) and `at_s` (monotonic seconds)."""
    cut: str = ""
    """Why there is nothing after what is here; "" if the loader or the process ended properly."""

    @property
    def where(self) -> str:
        """The node, by the name that its job has for it, or else the host's."""
        return self.node or self.host

    def unix_s(self, monotonic_s: float) -> float:
        """When that was."""
        return self.began_unix_s + (monotonic_s - self.began_s)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, in their order."""
        return [event for event in self.events if event["kind"] == kind]

    def __repr__(self) -> str:
        cut = ", cut off" if self.cut else ""
        return f"RankTrace(rank {self.rank} of {self.world_size}, {len(self.steps):,} steps{cut})"

    @property
    def delivered(self) -> int:
        """Samples."""
        return int(self.steps["samples"].sum()) - int(self.steps["left_out"].sum())

    @property
    def lost(self) -> int:
        """Steps that came faster than they were written."""
        return int(sum(finite(event.get("steps")) for event in self.of_kind("lost")))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run:
    """A run: what it is, and what each rank did.

    A rank has several traces if it was resumed, or has several loaders.
    """

    path: str
    facts: Mapping[str, Any]
    """run.json: `headrace` (version), `command`, `began_unix_s`, `world_size`, `source`, ...; {} without it."""
    ranks: tuple[RankTrace, ...]

    def __repr__(self) -> str:
        ranks = {trace.rank for trace in self.ranks}
        steps = sum(len(trace.steps) for trace in self.ranks)
        return f"Run({self.path!r}, {len(ranks):,} ranks, {steps:,} steps)"

    def _repr_html_(self) -> str:
        from headrace.pages.html import card

        traces = [trace for trace in self.ranks if len(trace.steps)]
        steps = sum(len(trace.steps) for trace in traces)
        epochs = {n for trace in traces for n in np.unique(trace.steps["epoch"]).tolist()}
        rows: list[tuple[str, object]] = [
            ("data", ", ".join(sorted({trace.source for trace in traces})[:4]) or "-"),
            ("ranks", f"{len({trace.rank for trace in self.ranks}):,}"),
            ("steps", f"{steps:,}"),
            ("samples", f"{sum(trace.delivered for trace in traces):,}"),
            ("epochs", f"{len(epochs):,}"),
        ]
        waited_s = sum(float((t.steps["delivered_s"] - t.steps["asked_s"]).sum()) for t in traces)
        seconds = sum(float(t.steps["delivered_s"][-1] - t.steps["asked_s"][0]) for t in traces)
        cut = sum(bool(trace.cut) for trace in self.ranks)
        return card(
            f"Run: {self.path}", rows, waited=waited_s / seconds if seconds > 0 else None,
            note=f"{cut} of {len(self.ranks)} traces are cut off" if cut else "",
        )  # fmt: skip


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run's folder.

    Raises TraceError if it is no run's, or something in it is damaged, and OSError if it cannot be read.
    """
    path = os.fspath(folder)
    return Run(path=path, facts=run_facts(path), ranks=tuple(rank_traces(path)))


def run_facts(folder: str) -> dict[str, Any]:
    """What run.json says; {} if the run died before it was written.

    Raises TraceError if this is no run's folder.
    """
    path = Path(folder, RUN_FILE)
    try:
        data = _bytes_of(str(path), RUN.bytes_max)
    except (FileNotFoundError, NotADirectoryError):
        if _names(folder):
            return {}
        raise TraceError(
            f"{folder} is no run's folder: it has neither {RUN_FILE} nor a rank's trace.",
            path=folder, next_step=_TRACE_A_RUN,
        ) from None  # fmt: skip
    RUN.decode(bytes(data), str(path))
    return json_object(bytes(data), str(path), "the file")


def rank_traces(folder: str) -> Iterator[RankTrace]:
    """Read one file after the other, in the order of ranks: for who needs only one at a time.

    Raises TraceError if one is damaged.
    """
    for name in _names(folder):
        yield _read(str(Path(folder, name)), name)


def _names(folder: str) -> list[str]:
    numbered: list[tuple[tuple[int, int], str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if (number := trace_number(entry.name)) is not None:
                    numbered.append((number, entry.name))
                if len(numbered) > _FILES_MAX:
                    raise TraceError(f"{folder} has more than {_FILES_MAX:,} traces.", path=folder)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise TraceError(f"{folder} is no folder.", path=folder, next_step=_TRACE_A_RUN) from e
    return [name for _, name in sorted(numbered)]


def _bytes_of(path: str, most: int) -> memoryview:
    """A plain file's bytes; nothing that could block or be endless is opened."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            plain = stat.S_ISREG(status.st_mode)
            what = f"{status.st_size:,} bytes" if plain else "no plain file"
            raise TraceError(f"{path}: it is {what}, expected at most {most:,} bytes.", path=path)
        return memoryview(file.read(most))


def _read(path: str, name: str) -> RankTrace:
    rank, _ = trace_number(name) or (0, 0)
    data = _bytes_of(path, _FILE_BYTES_MAX)
    parsed = read_header(bytes(data[:HEADER_BYTES_MAX]), path)
    if parsed is None:
        cut = "it was cut off at its beginning"
        return RankTrace(path=path, rank=rank, world_size=0, steps=np.empty(0, STEP), cut=cut)
    header, begin = parsed
    steps: list[NDArray[np.void]] = []
    events: list[dict[str, Any]] = []
    end = begin
    for kind, payload, after in chunks(data, begin, path):
        if kind == STEPS:
            steps.append(steps_in(payload, end, path))
        elif kind == EVENT:
            events.append(_event(payload, path))
        end = after
    facts = _facts(header, path, rank)
    return RankTrace(
        path=path, **facts,
        steps=np.concatenate(steps) if steps else np.empty(0, STEP),
        events=tuple(events), cut=_cut(facts, events, end, len(data)),
    )  # fmt: skip


def _event(payload: memoryview, path: str) -> dict[str, Any]:
    event = json_object(bytes(payload), path, "an event")
    if not isinstance(event.get("kind"), str) or finite(event.get("at_s"), -1.0) < 0:
        raise TraceError(f"{path}: an event has no kind or no time.", path=path)
    return event


def _cut(facts: Mapping[str, Any], events: list[dict[str, Any]], end: int, size: int) -> str:
    if end < size:
        return f"it was cut off in the middle: the last {size - end:,} bytes are no whole chunk"
    last = next((event for event in reversed(events) if event["kind"] == "end"), None)
    if last is None:
        unknown = "the process has not ended yet, or was killed"
        if facts["machine"] != this_host() or not facts["started"] or not facts["pid"]:
            return unknown
        if start_time(facts["pid"]) == facts["started"]:
            return "the process has not ended yet"
        try:
            os.kill(facts["pid"], 0)
        except PermissionError:  # somebody else's, of which little is to be seen
            return unknown
        except OSError:
            pass
        return "the process was killed, or crashed"
    why = str(last.get("why", ""))[:_TEXT_MAX]
    return "" if why in ("closed", "exit") else why


def _facts(header: Mapping[str, Any], path: str, rank: int) -> dict[str, Any]:
    """The header's fields, each of its type and within bounds; raises TraceError if one is not."""
    facts: dict[str, Any] = {}
    for name, kind in _FIELDS.items():
        value = header.get(name, kind())
        right = type(value) is kind or (kind is float and type(value) is int)
        if not right or not _bounded(value):
            raise TraceError(f"{path}: its {name} is {str(value)[:60]!r}.", path=path)
        facts[name] = value
    if facts["rank"] != rank or not 0 <= rank < max(1, facts["world_size"]) <= RANKS_MAX:
        claim = f"{facts['rank']} of {facts['world_size']}"
        raise TraceError(f"{path}: it says that it is rank {claim}.", path=path)
    return facts


def _bounded(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _TEXT_MAX
    if isinstance(value, (int, float)):
        return finite(value, -1.0) >= 0
    return True


_TEXTS: Final = (
    "host", "node", "machine", "process", "source", "framework", "fingerprint", "order_digest", "tail",
    "origin",
)  # fmt: skip
_COUNTS: Final = ("rank", "world_size", "pid", "started", "samples", "length", "batch_size")
_FIELDS: Final[dict[str, type]] = {
    **dict.fromkeys(_TEXTS, str), **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(("began_unix_s", "began_s"), float), "order": dict,
}  # fmt: skip
