"""Log: what one recorded process left, whole or cut off, and the files that it visited from open to close.

Logs are headrace's own; of what another tracer saw there are visits alone.

The layout is native/record/log_layout.h's. A log ends wherever its process ended; slots that a killed
thread had claimed and not filled are passed over. Nothing in it is taken on trust. Descriptors are followed in
the order of the slots. Reads that go on where the one before ended, or go over the same bytes again, are one
range; a visit has as many ranges as it jumped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.insight.record.rhythm import Rhythm


SLOT: Final = np.dtype(
    [
        ("kind", "u1"), ("flags", "u1"), ("text_bytes", "<u2"), ("thread", "<u4"),
        ("begin_ns", "<i8"), ("offset", "<i8"), ("nbytes", "<i8"), ("seconds", "<f4"), ("fd", "<i4"),
    ]
)  # fmt: skip
_HEADER: Final = np.dtype(
    {
        "names": [
            "magic", "version", "process", "parent", "command_bytes", "began_ns", "unix_ns",
            "slots_max", "clock_ns", "used", "lost", "spent_ns", "blind",
        ],
        "formats": ["<u8", "<u4", "<u4", "<u4", "<u4", "<i8", "<i8", "<u8", "<i8"] + ["<u8"] * 4,
        "offsets": [0, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 88],
        "itemsize": 128,
    }
)  # fmt: skip
_MAGIC: Final = int.from_bytes(b"hrdrlog1", "little")
_VERSION: Final = 1
_HEADER_BYTES: Final = 64 << 10
_WINDOW_BYTES: Final = 256 << 10
_WINDOW_SLOTS: Final = _WINDOW_BYTES // SLOT.itemsize
_COMMAND: Final = 128, 1024
_TEXT_BYTES: Final = SLOT.itemsize - 8
_TEXT_SLOTS_MAX: Final = 4096 // _TEXT_BYTES + 1
_LOG_BYTES_MAX: Final = 8 << 30
SIZE_MAX: Final = 1 << 48
NS_MAX: Final = 1 << 61
_SECONDS_MAX: Final = 1e8


class CallKind(IntEnum):
    """What a slot is about."""

    NONE = 0
    TEXT = 1
    OPEN = 2
    READ = 3
    WRITE = 4
    SEEK = 5
    CLOSE = 6
    MAP = 7
    SYNC = 8
    STAT = 9
    PIPE_READ = 10
    PIPE_WRITE = 11
    WAIT = 12


class Flag(IntEnum):
    """Of an open; SOCKET: of what goes through pipes. UNTIMED, OPEN_UNTIMED: nobody knows when, how long."""

    FOR_WRITING = 1
    ADOPTED = 2
    STREAM = 4
    DIRECT = 8
    SOCKET = 16
    UNTIMED = 32
    OPEN_UNTIMED = 64


@dataclass(slots=True)
class Range:
    """Bytes that were read one after the other; `seconds` were spent within the calls."""

    start: int
    end: int
    begin_ns: int
    end_ns: int
    seconds: float
    thread: int


@dataclass(slots=True)
class Visit:
    """A file from its open to its close."""

    path: str
    process: int
    begin_ns: int
    end_ns: int
    open_s: float
    size: int
    flags: int
    position: int = 0
    ranges: list[Range] = field(default_factory=list)
    read_s: float = 0.0
    written: int = 0
    synced: bool = False
    mapped: int = 0  # bytes that were mapped; nobody knows which of them were touched

    @property
    def for_writing(self) -> bool:
        """Whether it was opened so that it may be changed."""
        return bool(self.flags & Flag.FOR_WRITING)

    def read(
        self, offset: int, nbytes: int, begin_ns: int, seconds: float, thread: int = 0
    ) -> None:
        """Note a read at an offset; -1: at the file's position. At its end, or in error, no bytes came."""
        end_ns = begin_ns + int(seconds * 1e9)
        self.end_ns = max(self.end_ns, end_ns)
        self.read_s += seconds
        if nbytes <= 0:
            return
        start = self.position if offset < 0 else offset
        end = start + nbytes
        if offset < 0:
            self.position = end
        last = self.ranges[-1] if self.ranges else None
        if last is not None and last.start <= start <= last.end:
            last.end, last.end_ns, last.seconds = max(last.end, end), end_ns, last.seconds + seconds
        else:
            self.ranges.append(Range(start, end, begin_ns, end_ns, seconds, thread))

    def write(self, nbytes: int, end_ns: int, *, synced: bool = False) -> None:
        """Note bytes that were written, perhaps on to the disk."""
        self.written += max(0, nbytes)
        self.synced = self.synced or synced
        self.end_ns = end_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLog:
    """One process."""

    process: int
    parent: int
    command: tuple[str, ...]
    visits: list[Visit]  # of files, in the order of their opens
    calls: int  # that were logged
    slots: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, SLOT))
    """dtype `SLOT`, without texts, in the order in which they were claimed; of headrace's own logs."""
    text_of: dict[int, str] = field(default_factory=dict)
    """The path of a slot, by its place in `slots`."""
    lost: int = 0  # calls that were not kept
    spent_s: float = 0.0  # what logging cost, estimated
    blind: int = 0  # programs that it started and that could not be seen
    messages_seen: bool = True
    """Whether what goes through pipes, and waits, would be among the slots."""


def read_log(path: Path) -> ProcessLog:
    """Read a process's log; raises RecordError if it is no log, or damaged."""
    try:
        size = path.stat().st_size
        raw = np.fromfile(path, np.uint8) if _HEADER_BYTES <= size <= _LOG_BYTES_MAX else None
    except OSError as e:
        raise RecordError(f"{path} cannot be read: {e.strerror}.", path=str(path)) from e
    if raw is None:
        raise damaged(path, f"has {size:,} bytes, expected {_HEADER_BYTES:,} to {_LOG_BYTES_MAX:,}")
    header = raw[: _HEADER.itemsize].view(_HEADER)[0]
    if int(header["magic"]) != _MAGIC:
        raise damaged(path, "does not begin as a log does, expected hrdrlog1")
    if int(header["version"]) != _VERSION:
        raise damaged(path, f"has version {header['version']}, expected version {_VERSION}")
    # Whole windows, each of whole slots, as far as they were used.
    windows = raw[_HEADER_BYTES:][: (len(raw) - _HEADER_BYTES) // _WINDOW_BYTES * _WINDOW_BYTES]
    whole = windows.reshape(-1, _WINDOW_BYTES)[:, : _WINDOW_SLOTS * SLOT.itemsize]
    slots = whole.reshape(-1).view(SLOT)[: int(header["used"])]
    at = np.flatnonzero(_makes_sense(slots))
    begin, most = _COMMAND
    words = raw[begin : begin + min(int(header["command_bytes"]), most)].tobytes()
    process, calls, text_of = int(header["process"]), slots[at], _texts(slots, at)
    return ProcessLog(
        process=process, parent=int(header["parent"]),
        command=tuple(map(os.fsdecode, words.rstrip(b"\0").split(b"\0"))),
        visits=_visits(process, calls, text_of), calls=len(calls), slots=calls, text_of=text_of,
        lost=int(header["lost"]), blind=int(header["blind"]),
        spent_s=(int(header["spent_ns"]) + 2 * int(header["clock_ns"]) * len(at)) / 1e9,
    )  # fmt: skip


def _makes_sense(slots: NDArray[np.void]) -> NDArray[np.bool_]:
    """Calls, without what none can have had: sums of such numbers would leave their types."""
    kind, seconds, begin = slots["kind"], slots["seconds"], slots["begin_ns"]
    sound: NDArray[np.bool_] = (kind >= CallKind.OPEN) & (kind <= CallKind.WAIT)
    sound &= np.isfinite(seconds) & (seconds >= 0) & (seconds < _SECONDS_MAX)
    sound &= (begin >= 0) & (begin < NS_MAX)
    for name in ("offset", "nbytes"):
        sound &= (slots[name] >= -SIZE_MAX) & (slots[name] <= SIZE_MAX)
    return sound


def _texts(slots: NDArray[np.void], at: NDArray[np.intp]) -> dict[int, str]:
    """Paths by the place of their slot among those at `at`; one that is not whole is left out."""
    texts: dict[int, str] = {}
    is_text = slots["kind"] == CallKind.TEXT
    data = np.ascontiguousarray(slots).view(np.uint8).reshape(-1, SLOT.itemsize)
    lengths = slots["text_bytes"][at].tolist()
    for number, (place, length) in enumerate(zip(at.tolist(), lengths, strict=True)):
        count = -(-length // _TEXT_BYTES)
        first, end = place + 1, place + 1 + count
        if 0 < count <= _TEXT_SLOTS_MAX and end <= len(slots) and is_text[first:end].all():
            text = data[first:end, SLOT.itemsize - _TEXT_BYTES :].tobytes()
            texts[number] = os.fsdecode(text[:length])
    return texts


def _visits(  # noqa: C901 - a case for each kind of call
    process: int, slots: NDArray[np.void], text_of: Mapping[int, str]
) -> list[Visit]:
    visits: list[Visit] = []
    open_now: dict[int, Visit] = {}
    names = ("kind", "flags", "thread", "begin_ns", "offset", "nbytes", "seconds", "fd")
    columns = (slots[name].tolist() for name in names)
    for number, slot in enumerate(zip(*columns, strict=True)):
        kind, flags, thread, begin_ns, offset, nbytes, seconds, fd = slot
        end_ns = begin_ns + int(seconds * 1e9)
        visit = open_now.get(fd)
        if kind == CallKind.OPEN:
            open_now.pop(fd, None)
            if (path := text_of.get(number)) is not None:
                times = begin_ns, end_ns, seconds
                open_now[fd] = Visit(path, process, *times, nbytes, flags, max(0, offset))
                visits.append(open_now[fd])
        elif visit is None:
            continue
        elif kind == CallKind.CLOSE:
            del open_now[fd]
        elif kind == CallKind.READ:
            visit.read(offset, nbytes, begin_ns, seconds, thread)
        elif kind == CallKind.WRITE:
            visit.write(nbytes, end_ns)
        elif kind == CallKind.SYNC:
            visit.write(0, end_ns, synced=True)
        elif kind == CallKind.SEEK:
            visit.position = offset
        elif kind == CallKind.MAP:
            visit.mapped = max(visit.mapped, min(nbytes, max(0, visit.size - offset)))
    return visits


def damaged(path: Path, what: str) -> RecordError:
    """The error of a file that cannot be read."""
    return RecordError(f"{path}: {what}.", path=str(path))


@dataclass(kw_only=True)
class ImportedTrace:
    """What another tracer wrote about a job."""

    logs: list[ProcessLog]
    command: tuple[str, ...]
    wall_s: float
    rhythm: Rhythm | None = None  # of steps that were traced, without a batch; None: none were
    notes: list[str]  # what the tracer does not say
