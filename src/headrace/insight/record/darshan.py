"""Darshan: the visits of files that its logs tell of, as headrace's own recorder would have seen them.

Darshan counts the calls of each file in each process, and has the times of its first open and last read; with
DXT (`DXT_ENABLE_IO_TRACE=1`) it keeps each read besides. So of a file that a process opened once, counters say
all but where its reads lay; of one that was opened again, only the first open's time. What they leave out is
left out here, too, and said: flags mark visits whose times nobody knows, and files that were read at places
that nobody knows are none.

PyDarshan reads the files, which are compressed binaries, in a process of its own: damaged ones end it. What it
gives is checked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import numpy as np

from headrace.base.extras import import_extra
from headrace.base.text import counted
from headrace.errors import RecordError
from headrace.insight.record.job import is_data
from headrace.insight.record.log import (
    NS_MAX,
    SIZE_MAX,
    Flag,
    ImportedTrace,
    ProcessLog,
    Visit,
    damaged,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType


_PROCESS: Final = re.compile(r"_id\d+-(\d+)_")  # in the name of a log
_WHOLE: Final = 0.9
_AGAIN: Final = 2.0
"""Of a file's bytes: headers are read twice; more than that is reading at places that counters do not have."""
_VISITS_MAX: Final = 50_000_000
_SECONDS_MAX: Final = 1e9
_TIMES: Final = (
    *(f"F_{what}_{end}_TIMESTAMP" for what in ("OPEN", "READ", "WRITE") for end in ("START", "END")),
    "F_READ_TIME", "F_WRITE_TIME",
)  # fmt: skip
_TRACED_LEAST: Final = 0.99


class _Process(NamedTuple):
    """What one log is about: a process, or a job's ranks."""

    number: int
    parent: int  # -1: not known
    command: tuple[str, ...]
    begin_ns: int
    end_ns: int


class _Counted(NamedTuple):
    """A file in a process, or, of rank -1, in all of them."""

    name: str
    rank: int
    figures: dict[str, float]  # Darshan's counters and times by their names without the module's
    traced: list[dict[str, Any]]
    """DXT's records, of one rank each; empty: there are none, or not all reads are in them."""


class _Counters:
    """The files of all logs of a job."""

    def __init__(self) -> None:
        self.visits: dict[tuple[int, int], list[Visit]] = defaultdict(list)  # by process and rank
        self.reach: dict[str, int] = {}
        self.without_places: dict[str, float] = {}
        self._again: list[tuple[list[Visit], str, int, int]] = []
        """Files that were opened more than once: a process's visits, name, when first, how often."""
        self._opens = 0

    def take(self, process: _Process, file: _Counted) -> None:
        """Add a file; raises ValueError if its figures make no sense."""
        about = file.figures
        opens, read = max(1, int(about["OPENS"])), about["BYTES_READ"]
        reach = int(about["MAX_BYTE_READ"]) + 1
        if not all(-1 <= n <= SIZE_MAX for n in (opens, read, reach, about["BYTES_WRITTEN"])):
            what = f"{opens:,} opens and {read:,} bytes read up to {reach:,}"
            raise ValueError(f"{file.name} has {what}")
        self._opens += opens
        if self._opens > _VISITS_MAX:
            raise ValueError(f"files were opened more than {_VISITS_MAX:,} times")
        if read > 0:
            self.reach[file.name] = max(self.reach.get(file.name, 0), reach)
        for traced in file.traced:
            of_rank = max(1, round(opens / len(file.traced)))
            visits = self.visits[process.number, traced["rank"]]
            visits += _traced_visits(process, traced, of_rank)
        visits = self.visits[process.number, max(0, file.rank)]
        if read > 0 and not file.traced:
            if _WHOLE * reach <= read / opens <= _AGAIN * reach:
                self._whole(visits, process, file, opens)
            else:
                self.without_places[file.name] = read
        if about["BYTES_WRITTEN"] > 0:
            visits += _writes(process, file, opens)

    def _whole(self, visits: list[Visit], process: _Process, file: _Counted, opens: int) -> None:
        """A file that was read through at each open; when, is known of one that was opened once."""
        about, reach = file.figures, int(file.figures["MAX_BYTE_READ"]) + 1
        at = {
            key: process.begin_ns + int(about[f"F_{key}_TIMESTAMP"] * 1e9)
            for key in ("OPEN_START", "OPEN_END", "READ_START", "READ_END")
        }
        if opens > 1 or file.rank < 0:
            self._again.append((visits, file.name, at["OPEN_START"], opens))
            return
        open_s = max(0, at["OPEN_END"] - at["OPEN_START"]) / 1e9
        # The last byte came at the end, however long the calls took.
        reads = [(reach - 1, 1, at["READ_END"], 0.0)]
        if reach > 1:
            reads.insert(0, (0, reach - 1, at["READ_START"], about["F_READ_TIME"]))
        visits.append(_visit(file.name, (0, at["OPEN_START"], open_s), reads))

    def logs(self, processes: Sequence[_Process]) -> list[ProcessLog]:
        """A log for each rank of each process, and for parents that have none."""
        span_ns = 1 + max(p.end_ns for p in processes) - min(p.begin_ns for p in processes)
        for visits, name, first_ns, opens in self._again:  # each epoch in the order of the first
            for epoch in range(opens):
                began = min(first_ns + epoch * span_ns, NS_MAX - 1)
                read = 0, self.reach[name], began, 0.0
                visits.append(_visit(name, (Flag.UNTIMED, began, 0.0), [read]))
        commands = {p.parent: p.command for p in processes if p.parent >= 0}
        commands |= {p.number: p.command for p in processes}
        parents = {p.number: p.parent for p in processes}
        everybody = dict.fromkeys([*self.visits, *((n, 0) for n in commands)])
        numbers = {process: number for number, process in enumerate(everybody, 1)}
        logs = []
        for process, number in numbers.items():
            visits = sorted(self.visits[process], key=lambda each: each.begin_ns)
            for visit in visits:
                visit.process, visit.size = number, self.reach.get(visit.path, 0)
            parent = numbers.get((parents.get(process[0], -1), 0), -1)
            logs.append(ProcessLog(
                process=number, parent=parent, command=commands[process[0]], visits=visits,
                calls=sum(1 + len(visit.ranges) for visit in visits), messages_seen=False,
            ))  # fmt: skip
        return logs


def _visit(
    name: str, opened: tuple[int, int, float], reads: list[tuple[int, int, int, float]]
) -> Visit:
    """An open (flags, when, for how long), and reads (offset, bytes, when, for how long)."""
    flags, begin_ns, open_s = opened
    visit = Visit(name, 0, begin_ns, begin_ns + int(open_s * 1e9), open_s, 0, flags)
    for read in reads:
        visit.read(*read)
    return visit


def _traced_visits(process: _Process, traced: dict[str, Any], opens: int) -> Iterator[Visit]:
    """DXT's reads of a file: which are of which open, the longest pauses between them say."""
    reads = traced["reads"]
    for begin, end, offset, nbytes in reads:
        sound = 0 <= begin <= end < _SECONDS_MAX and 0 <= offset <= SIZE_MAX
        if not sound or nbytes > SIZE_MAX:
            what = f"a read of {nbytes:,} bytes at {offset:,}, {begin} s"
            raise ValueError(f"{traced['name']} has {what}")
    columns = np.array(reads, np.float64).reshape(-1, 4)
    pauses = columns[1:, 0] - columns[:-1, 1]
    cuts = np.sort(np.argsort(pauses, kind="stable")[::-1][: opens - 1]) + 1
    for part in np.split(np.arange(len(reads)), cuts):
        timed = [
            (offset, nbytes, process.begin_ns + int(begin * 1e9), end - begin)
            for begin, end, offset, nbytes in (reads[i] for i in part.tolist())
        ]
        if timed:
            yield _visit(traced["name"], (Flag.OPEN_UNTIMED, timed[0][2], 0.0), timed)


def _writes(process: _Process, file: _Counted, opens: int) -> Iterator[Visit]:
    """What was written, evenly over the opens: their sum is all that is known."""
    about = file.figures
    first, last = (about[f"F_WRITE_{key}_TIMESTAMP"] for key in ("START", "END"))
    nbytes, seconds = int(about["BYTES_WRITTEN"] / opens), about["F_WRITE_TIME"] / opens
    synced = about.get("FSYNCS", 0) + about.get("FDSYNCS", 0) > 0
    for number in range(opens):
        began_ns = process.begin_ns + int((first + (last - first) * number / opens) * 1e9)
        visit = _visit(file.name, (Flag.FOR_WRITING, began_ns, 0.0), [])
        visit.write(nbytes, began_ns + int(seconds * 1e9), synced=synced)
        yield visit


def import_darshan(files: Sequence[Path]) -> ImportedTrace:
    """Read the logs of one job.

    Raises RecordError if one is damaged, or most was read at places that they do not have, and MissingPackage
    if PyDarshan is not installed.
    """
    import_extra("darshan", f"reading {files[0]}")
    counters, notes, processes = _Counters(), list[str](), list[_Process]()
    at = 0
    with tempfile.TemporaryFile() as answers:
        program = "import sys; from headrace.insight.record.darshan import dump; dump(sys.argv[1:])"
        words = [sys.executable, "-c", program, *map(str, files)]
        ended = subprocess.run(  # noqa: S603 - ourselves
            words, stdin=subprocess.DEVNULL, stdout=answers, check=False
        )
        answers.seek(0)
        try:
            for line in answers:
                message = json.loads(line)
                if "process" in message:
                    processes.append(_process(message["process"], files[at].name, -2 - at))
                elif "figures" in message:
                    counters.take(processes[-1], _file(message, notes))
                else:
                    _look_for_errors(message["errors"], notes)
                    at += 1
        except (ValueError, KeyError, IndexError) as e:
            raise damaged(files[min(at, len(files) - 1)], str(e)) from e
    if at < len(files):
        raise damaged(files[at], f"PyDarshan cannot read it (it ended with {ended.returncode})")
    _refuse_without_places(files[0], counters, notes)
    if len(processes) > 1 and all(p.parent < 0 for p in processes):
        notes.append(
            "these logs do not say who started whom: each process counts as one that trains"
        )
    notes.append(
        "Darshan's logs have no steps: where workers read, the batch and computing time are not known"
    )
    wall_ns = max(p.end_ns for p in processes) - min(p.begin_ns for p in processes)
    return ImportedTrace(
        logs=counters.logs(processes), command=processes[0].command, wall_s=wall_ns / 1e9,
        notes=list(dict.fromkeys(notes)),
    )  # fmt: skip


def _process(about: dict[str, Any], log: str, unnamed: int) -> _Process:
    named = _PROCESS.search(log)
    begin_ns, end_ns = (
        about[f"{end}_time_sec"] * 10**9 + about[f"{end}_time_nsec"] for end in ("start", "end")
    )
    if not 0 <= begin_ns <= end_ns < NS_MAX:
        raise ValueError(f"the job ran from {begin_ns} to {end_ns} ns: no such times")
    number, parent = (
        int(named[1]) if named else unnamed,
        int(about["metadata"].get("fork_parent", -1)),
    )
    return _Process(number, parent, tuple(about["exe"].split()), begin_ns, end_ns)


def _file(message: dict[str, Any], notes: list[str]) -> _Counted:
    """A file of a log, with times from 0: Darshan's may be less by what a clock differs."""
    name, figures, traced = message["name"], message["figures"], message["traced"]
    for title in _TIMES:
        if not -1e-3 < figures[title] < _SECONDS_MAX:
            raise ValueError(f"{name}: {title} is {figures[title]}, expected seconds from 0")
        figures[title] = max(0.0, figures[title])
    has = sum(nbytes for one in traced for *_, nbytes in one["reads"])
    if traced and has < _TRACED_LEAST * figures["BYTES_READ"]:
        notes.append("DXT's memory was full: some files have counters alone")
        traced = []
    return _Counted(name, message["rank"], figures, traced)


def _look_for_errors(errors: str, notes: list[str]) -> None:
    """What PyDarshan's library printed: it goes on with what it has."""
    for line in filter(None, errors.splitlines()):
        if line == _PARTIAL:
            notes.append("Darshan's memory was full: it left files out (DARSHAN_MODMEM)")
        elif line.startswith("Error: Invalid DXT POSIX module version"):
            notes.append("PyDarshan is too old for the DXT of these logs: counters alone are taken")
        else:
            raise ValueError(f"PyDarshan: {line.removeprefix('Error: ').rstrip('.')}")


def _refuse_without_places(path: Path, counters: _Counters, notes: list[str]) -> None:
    lost = {n: b for n, b in counters.without_places.items() if is_data(os.fsencode(n))}
    others = set(counters.reach) - set(counters.without_places)
    kept = sum(counters.reach[name] for name in others if is_data(os.fsencode(name)))
    where = "at places that counters do not have"
    if sum(lost.values()) > kept:
        name = max(lost, key=lambda name: lost[name])
        raise RecordError(
            f"{path}: {counted(len(lost), 'file')}, such as {name}, were read {where}.",
            path=str(path), next_step="Run the job with DXT, too: DXT_ENABLE_IO_TRACE=1.",
        )  # fmt: skip
    if lost:
        notes.append(f"{counted(len(lost), 'file')} read {where} are left out")


# -- the process that reads --------------------------------------------------------------------------

_PARTIAL: Final = "partial"


def dump(paths: Sequence[str]) -> None:
    """Print what PyDarshan reads of logs as lines of JSON: of each its process, its files, and the errors.

    Its library may end the process over a damaged log, or delete what it takes for that log's name: it gets
    the name of a descriptor.
    """
    backend = import_extra("darshan.backend.cffi_backend", "reading Darshan's logs")
    for path in paths:
        with open(path, "rb") as log, tempfile.TemporaryFile() as errors:
            os.dup2(errors.fileno(), 2)
            try:
                for message in _messages(backend, f"/proc/self/fd/{log.fileno()}"):
                    _say(sys.stdout, json.dumps(message))
            except (ValueError, KeyError, RuntimeError) as e:
                _say(sys.stderr, f"Error: {e}")
            sys.stderr.flush()
            errors.seek(0)
            _say(sys.stdout, json.dumps({"errors": errors.read(4096).decode(errors="replace")}))
            sys.stdout.flush()
    os._exit(0)  # what damaged logs have left of its memory is not looked at again


def _say(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")


def _messages(backend: ModuleType, path: str) -> Iterator[dict[str, Any]]:
    handle = backend.log_open(path)
    if not handle["handle"]:
        raise ValueError("it is no log of Darshan")
    yield {"process": backend.log_get_job(handle) | {"exe": backend.log_get_exe(handle)}}
    modules, names = backend.log_get_modules(handle), backend.log_get_name_records(handle)
    traced: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in _records(backend.log_get_dxt_record, handle, "DXT_POSIX"):
        keys = ("start_time", "end_time", "offset", "length")
        reads = [[s[key] for key in keys] for s in record["read_segments"] if s["length"] > 0]
        one = {"rank": record["rank"], "name": names.get(record["id"], ""), "reads": sorted(reads)}
        traced[record["id"]].append(one)
    for module in {"POSIX", "STDIO"} & set(modules):
        if modules[module]["partial_flag"]:
            _say(sys.stderr, _PARTIAL)
        titles = [*backend.counter_names(module), *backend.fcounter_names(module)]
        titles = [title.removeprefix(f"{module}_") for title in titles]
        for record in _records(backend.log_get_generic_record, handle, module):
            name, rank = names.get(record["id"], ""), record["rank"]
            values = [*record["counters"].tolist(), *record["fcounters"].tolist()]
            parts = traced.get(record["id"], []) if module == "POSIX" else []
            if name.startswith("/"):  # else <STDIN> and the like
                yield {
                    "name": name, "rank": rank, "figures": dict(zip(titles, values, strict=True)),
                    "traced": [one for one in parts if rank in (-1, one["rank"])],
                }  # fmt: skip


def _records(read: Callable[..., Any], handle: dict[str, Any], module: str) -> Iterator[Any]:
    while (record := read(handle, module)) is not None:
        yield record
