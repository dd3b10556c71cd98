"""Visits: a process's log as visits of files: opened, read here and there, closed.

Descriptors are followed in the order of the log's slots. Reads that go on where the one before ended, or go
over the same bytes again, are one range; a visit has as many ranges as it jumped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.insight.record.log import Flag, Kind

if TYPE_CHECKING:
    from headrace.insight.record.log import ProcessLog

__all__ = ["Range", "Visit", "visits_of"]

_ENDED: Final = 0
"""No bytes came: the file's end, or an error."""


@dataclass(slots=True)
class Range:
    """Bytes that were read one after the other.

    Attributes:
        seconds: within the calls.
    """

    start: int
    end: int
    begin_ns: int
    end_ns: int
    seconds: float
    reads: int
    thread: int


@dataclass(slots=True)
class Visit:
    """A file from its open to its close.

    Attributes:
        size: when it was opened.
        mapped: bytes that were mapped; nobody knows which of them were touched.
    """

    path: str
    process: int
    begin_ns: int
    open_s: float
    size: int
    flags: int
    position: int = 0
    ranges: list[Range] = field(default_factory=list)
    read_s: float = 0.0
    written: int = 0
    write_s: float = 0.0
    synced: bool = False
    end_ns: int = 0
    mapped: int = 0

    @property
    def for_writing(self) -> bool:
        """Whether it was opened so that it may be changed."""
        return bool(self.flags & Flag.FOR_WRITING)

    def note(  # noqa: PLR0917 - a slot's fields
        self, kind: int, offset: int, nbytes: int, begin_ns: int, seconds: float, thread: int
    ) -> None:
        """Note a call."""
        if kind == Kind.READ:
            start = self.position if offset < 0 else offset
            self._read(start, nbytes, begin_ns, seconds, thread)
            if offset < 0 and nbytes > 0:
                self.position = start + nbytes
        elif kind in {Kind.WRITE, Kind.SYNC}:
            self.written += max(0, nbytes) if kind == Kind.WRITE else 0
            self.synced = self.synced or kind == Kind.SYNC
            self.write_s += seconds
            self.end_ns = begin_ns + int(seconds * 1e9)
        elif kind == Kind.SEEK:
            self.position = offset
        elif kind == Kind.MAP:
            self.mapped = max(self.mapped, min(nbytes, max(0, self.size - offset)))

    def _read(self, start: int, nbytes: int, begin_ns: int, seconds: float, thread: int) -> None:
        end_ns = begin_ns + int(seconds * 1e9)
        self.end_ns = max(self.end_ns, end_ns)
        self.read_s += seconds
        if nbytes <= _ENDED:
            return
        last = self.ranges[-1] if self.ranges else None
        if last is not None and last.start <= start <= last.end:
            last.end = max(last.end, start + nbytes)
            last.end_ns, last.seconds = end_ns, last.seconds + seconds
            last.reads += 1
        else:
            self.ranges.append(Range(start, start + nbytes, begin_ns, end_ns, seconds, 1, thread))


def visits_of(log: ProcessLog) -> list[Visit]:
    """All visits of a process, in the order of their opens."""
    found: list[Visit] = []
    open_now: dict[int, Visit] = {}
    names = ("kind", "flags", "thread", "begin_ns", "offset", "nbytes", "seconds", "fd")
    columns = (log.slots[name].tolist() for name in names)
    for number, slot in enumerate(zip(*columns, strict=True)):
        kind, flags, thread, begin_ns, offset, nbytes, seconds, fd = slot
        if kind == Kind.OPEN:
            path = log.text_of.get(number)
            if path is None:
                open_now.pop(fd, None)
                continue
            visit = Visit(path, log.process, begin_ns, seconds, nbytes, flags, max(0, offset))
            visit.end_ns = begin_ns + int(seconds * 1e9)
            found.append(visit)
            open_now[fd] = visit
            continue
        if (now := open_now.get(fd)) is None:
            continue
        if kind == Kind.CLOSE:
            del open_now[fd]
        else:
            now.note(kind, offset, nbytes, begin_ns, seconds, thread)
    return found
