"""Opens: which files the programs of a run opened, when, and how long they read them.

A library that is preloaded notes it in shared memory (`native/opens`) and changes nothing else. It stands
alone, or before the shim that serves files: then it sees what the program asked for, not where it came from.
It does not see what the shim cannot see (docs/howto/run.md), nor reads through a mapping or io_uring, nor what
another program reads from a descriptor that it was handed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from headrace.base.lifetime import Closing
from headrace.posix.launch import preloading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OPENS_VARIABLE: Final = "HEADRACE_OPENS"  # where programs look for the log
_CAPACITY: Final = 256 << 20
"""Bytes of the log: about two million opens. Memory is used only where it is written."""

_HEADER: Final = struct.Struct("<QIIQQQ24x")
_RECORD: Final = struct.Struct("<IIIIIIqqQQQqQ")
_LOG_MAGIC: Final = 0x31676C6F6E706F68
_RECORD_MAGIC: Final = 0x4E45504F
_VERSION: Final = 1
_PATH_MAX: Final = 1 << 13


@dataclass(frozen=True, slots=True)
class FileOpen:
    """One open, and what was read before its descriptor was closed; times are of CLOCK_MONOTONIC."""

    path: bytes  # absolute, as the program wrote it behind its working folder, without `.` and `..`
    flags: int  # as `open` has them
    process: int
    thread: int
    began_ns: int
    open_ns: int
    reads: int
    read_bytes: int
    read_ns: int
    last_ns: int  # when the last read ended; 0: none was seen
    mapped: int  # how often it was mapped into memory; what is read that way is not seen

    @property
    def writes(self) -> bool:
        """Whether it may write."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


@dataclass(frozen=True, slots=True)
class LoggedOpens:
    """What a log holds."""

    opens: list[FileOpen]  # by the time at which they began
    dropped: int  # opens that the log had no room for


class OpenLog(Closing):
    """The log of one run, with room for so many bytes of records. Leaving it lets go of the memory.

    Raises OSError if the system gives no shared memory.
    """

    def __init__(self, capacity_bytes: int = _CAPACITY) -> None:
        self._fd = os.memfd_create("headrace-opens", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, _HEADER.size + capacity_bytes)
            head = _HEADER.pack(_LOG_MAGIC, _VERSION, 0, capacity_bytes, 0, 0)
            os.pwrite(self._fd, head, 0)
            # Programs map it only when nobody can take it from under them.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            os.close(self._fd)
            raise

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """The log that another process made, by its descriptor, which becomes this one's."""
        log = cls.__new__(cls)
        log._fd = fd  # noqa: SLF001 - one of our own
        return log

    @property
    def fd(self) -> int:
        """Its descriptor, for a process that is to inherit it."""
        return self._fd

    def close(self) -> None:
        """Let go of the memory; programs that still write keep theirs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """An environment in which programs are recorded, as long as this process lives.

        What `before` preloads comes after the recorder.
        """
        inode = os.fstat(self._fd).st_ino
        address = f"/proc/{os.getpid()}/fd/{self._fd}:{inode}"
        return preloading(before, "opens") | {OPENS_VARIABLE: address}

    def read(self) -> LoggedOpens:
        """What was noted until now."""
        with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as memory:
            _, _, _, _, head, dropped = _HEADER.unpack_from(memory)
            end = min(len(memory), _HEADER.size + head)
            opens = sorted(_records(memory, end), key=lambda one: one.began_ns)
        return LoggedOpens(opens, dropped)


def _records(memory: mmap.mmap, end: int) -> Iterator[FileOpen]:
    """Records up to `end`. Whoever was killed while it wrote one costs that one: the next is looked for."""
    at = _HEADER.size
    while at + _RECORD.size <= end:
        fields = _RECORD.unpack_from(memory, at)
        magic, nbytes, process, thread, flags, path_bytes = fields[:6]
        whole = (_RECORD.size + path_bytes + 7) & ~7
        if magic != _RECORD_MAGIC or path_bytes > _PATH_MAX or nbytes != whole:
            at += 8
            continue
        raw = memory[at + _RECORD.size : at + _RECORD.size + path_bytes]
        yield FileOpen(os.path.normpath(raw), flags, process, thread, *fields[6:])
        at += nbytes
