"""DFTracer: the visits of files that its traces tell of, as headrace's own recorder would have seen them.

DFTracer writes a line of JSON for each call, and, where a program uses its `ai_logging`, for each batch that it
fetches. Files are told by name, not by descriptor, and their sizes are not in it: a file is as large as it was
read. Files that are mapped into memory, and reads by io_uring, it does not see.

Lines are read one by one, with bounds on lines, names and numbers; what is damaged is an error, and a trace
that was cut off is read as far as it goes.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace.errors import RecordError
from headrace.insight.record.log import (
    NS_MAX,
    SIZE_MAX,
    Flag,
    ImportedTrace,
    ProcessLog,
    Visit,
    damaged,
)
from headrace.insight.record.rhythm import FETCH, rhythm_of_fetches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_LINE_BYTES_MAX: Final = 1 << 20
_TRACE_BYTES_MAX: Final = 64 << 30
_NAMES_MAX: Final = 50_000_000
_NAME_LENGTH_MAX: Final = 4096
_NUMBER_MAX: Final = 1 << 32

_OPENS: Final = ("open", "openat", "fopen", "creat")
_MOVES: Final = ("read", "pread", "fread", "write", "pwrite", "fwrite")
_EPOCHS: Final = ("epoch", "epoch.block")
_EVALUATIONS: Final = ("evaluate", "valid", "validation", "test")


class _Event(NamedTuple):
    name: str
    category: str
    host: str
    process: int
    thread: int
    begin_ns: int
    nanoseconds: int
    arguments: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1e9

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.nanoseconds


_Process = tuple[str, int]  # its host and number


class _Follower:
    """Events of all processes of a job, in the order of their files."""

    def __init__(self) -> None:
        self.calls = Counter[_Process]()
        self.visits: dict[_Process, list[Visit]] = defaultdict(list)
        """Of files by what stands for their names."""
        self.names: dict[str, str] = {}
        self.commands: dict[_Process, tuple[str, str, int]] = {}
        """(command, working folder, parent), the first two by what stands for them."""
        self.fetches: dict[_Process, list[tuple[int, int, int]]] = defaultdict(list)
        self.spans: dict[_Process, list[tuple[str, int, int]]] = defaultdict(list)
        self.reach: dict[str, int] = {}
        self.unsized = 0
        self._open: dict[tuple[_Process, str], list[tuple[int, Visit]]] = defaultdict(list)
        """(thread, visit) of the opens of a file that are not closed yet."""

    def take(self, event: _Event) -> None:
        of = event.host, event.process
        begin, end = event.begin_ns, event.end_ns
        if event.name == "start" and event.category == "dftracer":
            words = (str(event.arguments.get(key, "")) for key in ("cmd_hash", "cwd"))
            self.commands[of] = (*words, _integer(event.arguments.get("ppid", -1), -1))
        elif event.category == "dataloader" and event.name == "fetch.iter":
            step = event.arguments.get("step", event.arguments.get("count", -1))
            self.fetches[of].append((begin, end, _integer(step, -1)))
        elif event.category == "pipeline":
            self.spans[of].append((event.name, begin, end))
        elif event.category in ("POSIX", "STDIO"):
            self._call(event, of)

    def _call(self, event: _Event, of: _Process) -> None:
        about, name = event.arguments, event.name.removesuffix("64")
        key = about.get("fhash", about.get("fname"))
        if not isinstance(key, str | int):
            return
        key = str(key)
        if "fhash" not in about:  # versions before 1.1
            self.names[key] = key
        self.calls[of] += 1
        opens = self._open[of, key]
        if name in _OPENS:
            if _integer(about.get("ret"), 0) >= 0:
                times = event.begin_ns, event.end_ns, event.seconds
                visit = Visit(key, event.process, *times, 0, _flags(about, name))
                opens.append((event.thread, visit))
                self.visits[of].append(visit)
            return
        # Of opens that are not closed, the thread's own, or the last.
        visits = [v for thread, v in opens if thread == event.thread] or [v for _, v in opens]
        if not visits:
            return
        visit = visits[-1]
        if name in ("close", "fclose"):
            opens[:] = [one for one in opens if one[1] is not visit]
        elif name in ("fsync", "fdatasync"):
            visit.write(0, event.end_ns, synced=True)
        elif name in ("lseek", "fseek"):
            _seek(event, visit)
        elif name in _MOVES:
            self._move(event, visit)

    def _move(self, event: _Event, visit: Visit) -> None:
        about, name = event.arguments, event.name
        nbytes = _integer(about.get("ret"), None)
        if nbytes is None:
            self.unsized += 1
            return
        if name.startswith("f"):
            nbytes *= _integer(about.get("size"), 1)
        offset = _integer(about.get("offset"), -1) if name.startswith("p") else -1
        begin = offset if offset >= 0 else visit.position
        if not -1 <= nbytes <= SIZE_MAX - begin or offset < -1:
            raise ValueError(f"{name} has {nbytes:,} bytes at {begin:,}: more than any file has")
        if "write" in name:
            visit.write(nbytes, event.end_ns)
            return
        visit.read(offset, nbytes, event.begin_ns, event.seconds, event.thread)
        if nbytes > 0:
            self.reach[visit.path] = max(self.reach.get(visit.path, 0), begin + nbytes)


def _seek(event: _Event, visit: Visit) -> None:
    """Fseek returns no position: one that is not from the begin is not known."""
    about = event.arguments
    offset = _integer(about.get("offset"), -1) if about.get("whence") == os.SEEK_SET else -1
    if event.name.startswith("lseek"):
        offset = _integer(about.get("ret"), offset)
    if 0 <= offset <= SIZE_MAX:
        visit.position = offset


def _flags(about: dict[str, Any], name: str) -> int:
    given = _integer(about.get("flags"), 0)
    writing = bool(given & os.O_ACCMODE) or name.startswith("creat")
    mode = about.get("mode")
    if name.startswith("fopen") and isinstance(mode, str):
        writing = any(letter in mode for letter in "wa+")
    return Flag.FOR_WRITING * writing | Flag.DIRECT * bool(given & os.O_DIRECT)


def _integer(value: Any, otherwise: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def import_dftracer(files: Sequence[Path]) -> ImportedTrace:
    """Read the traces of one job.

    Raises RecordError if one is damaged, or none has reads whose sizes are known.
    """
    follower, notes = _Follower(), list[str]()
    first_ns, last_ns = NS_MAX, 0
    for path in files:
        for event in _events(path, follower.names, notes):
            first_ns = min(first_ns, event.begin_ns)
            last_ns = max(last_ns, event.end_ns)
            try:
                follower.take(event)
            except ValueError as e:
                raise damaged(path, str(e)) from e
    if not follower.reach:
        raise _no_reads(files, follower)
    everybody = dict.fromkeys([*follower.commands, *follower.calls, *follower.fetches])
    numbers = {process: number for number, process in enumerate(everybody, 1)}
    logs = [_log(follower, process, numbers) for process in numbers]
    rhythm = rhythm_of_fetches({numbers[of]: _fetches(follower, of) for of in follower.fetches})
    if follower.unsized:
        what = "reads and writes have no size in the trace: they are left out"
        notes.append(f"{follower.unsized:,} {what}")
    if rhythm is None:
        notes.append(
            "the trace has no steps (ai_logging's fetch.iter): where workers read, the batch and "
            "computing time are not known"
        )
    command = next((log.command for log in logs if any(log.command)), tuple[str, ...]())
    return ImportedTrace(
        logs=logs, command=command, wall_s=(last_ns - first_ns) / 1e9, rhythm=rhythm, notes=notes
    )


def _log(follower: _Follower, process: _Process, numbers: dict[_Process, int]) -> ProcessLog:
    """What a process did; files whose names are not in the trace are left out."""
    words, folder, parent = follower.commands.get(process, ("", "", -1))
    names, visits = follower.names, list[Visit]()
    for visit in sorted(follower.visits[process], key=lambda each: each.begin_ns):
        if (name := names.get(visit.path)) is not None:
            visit.process, visit.size = numbers[process], follower.reach.get(visit.path, 0)
            visit.path = os.path.join(names.get(folder, ""), name)
            visits.append(visit)
    return ProcessLog(
        process=numbers[process], parent=numbers.get((process[0], parent), -1),
        command=tuple(names.get(words, "").split(";")), visits=visits,
        calls=follower.calls[process], messages_seen=False,
    )  # fmt: skip


def _no_reads(files: Sequence[Path], follower: _Follower) -> RecordError:
    what = f"{files[0]}: the trace has no reads of files"
    step = "Trace the calls, too: DFTRACER_INIT=PRELOAD or FUNCTION, DFTRACER_DATA_DIR=all."
    if follower.unsized:
        what += f" whose size is known ({follower.unsized:,} have none)"
        step = "Trace again with DFTRACER_INC_METADATA=1."
    elif follower.fetches:
        what += ", only steps"
    return RecordError(f"{what}.", path=str(files[0]), next_step=step)


def _events(path: Path, names: dict[str, str], notes: list[str]) -> Iterator[_Event]:
    """The events of a file; a last line that is not whole is left out, with a note."""
    total, number = 0, 0
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            while line := file.readline(_LINE_BYTES_MAX + 1):
                number, total = number + 1, total + len(line)
                if len(line) > _LINE_BYTES_MAX or total > _TRACE_BYTES_MAX:
                    most = f"{_LINE_BYTES_MAX:,} bytes, and {_TRACE_BYTES_MAX:,} of all lines"
                    raise damaged(path, f"line {number:,} has more than {most}")
                written = line.strip().removesuffix(b",")
                if written in (b"", b"[", b"]"):
                    continue
                if not line.endswith(b"\n") and not written.endswith(b"}"):
                    notes.append(f"{path.name} is cut off in line {number:,}")
                    return
                event = _event_of(written, names)
                if event is not None:
                    yield event
    except EOFError:
        notes.append(f"{path.name} is cut off after line {number:,}")
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        raise damaged(path, f"line {number:,}: {e}") from e
    except (OSError, zlib.error) as e:
        raise damaged(path, f"cannot be read: {e}") from e


def _event_of(line: bytes, names: dict[str, str]) -> _Event | None:
    """An event that took time; None for others. Names of files go into `names`.

    Raises ValueError, TypeError, OverflowError, RecursionError if the line is none.
    """
    event = json.loads(line)
    about = event.get("args", {}) if isinstance(event, dict) else None
    if not isinstance(about, dict) or not isinstance(event.get("name"), str):
        raise TypeError("expected an object with a name and args")
    if event.get("ph") in (4, "M"):
        _note_name(event["name"], about, names)
        return None
    if event.get("ph") not in (1, "X"):
        return None
    numbers = [event.get(key, 0) for key in ("ts", "dur", "pid", "tid")]
    if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
        raise ValueError(f"ts, dur, pid and tid are {numbers}, expected numbers from 0")
    begin_ns, took_ns = round(numbers[0] * 1000), round(numbers[1] * 1000)
    if begin_ns >= NS_MAX or took_ns >= NS_MAX or numbers[2] >= _NUMBER_MAX:
        raise ValueError(f"ts, dur, pid are {numbers[:3]}: no such time or process")
    return _Event(
        event["name"], str(event.get("cat", "")), str(about.get("hhash", "")), int(numbers[2]),
        int(numbers[3]) & 0xFFFFFFFF, begin_ns, took_ns, about,
    )  # fmt: skip


def _note_name(kind: str, about: dict[str, Any], names: dict[str, str]) -> None:
    name, key = about.get("name"), about.get("value")
    if kind == "CM" and name == "time_metric" and key != "US":
        raise ValueError(f"times are in {key}, expected microseconds (US)")
    if kind in ("FH", "SH") and isinstance(name, str) and isinstance(key, str | int):
        if len(name) > _NAME_LENGTH_MAX or "\0" in name or len(names) >= _NAMES_MAX:
            raise ValueError(f"{name[:80]!r} is no name of a file, or one of too many")
        names[str(key)] = name


def _fetches(follower: _Follower, of: tuple[str, int]) -> NDArray[np.void]:
    """When a process asked for each batch of training and had it, dtype `FETCH`."""
    spans = follower.spans[of]
    epochs = np.sort([begin for name, begin, _ in spans if name in _EPOCHS])
    evaluations = [(begin, end) for name, begin, end in spans if name in _EVALUATIONS]
    rows: list[tuple[float, float, int]] = []
    epoch, last = 0, -1
    for begin, end, step in sorted(follower.fetches[of]):
        if any(a <= begin < b for a, b in evaluations):
            continue
        if 0 <= step <= last:
            epoch += 1
        last = step
        number = int(np.searchsorted(epochs, begin, "right")) if len(epochs) else epoch
        rows.append((begin / 1e9, end / 1e9, number))
    return np.array(rows, FETCH)
