"""The volumes of an open segment: where they are, whether they are the right ones, and descriptors.

Each volume is checked when the store is opened (existence, size, modification time of foreign files,
header of packed ones), so that a wrong one is found before training begins. Descriptors are opened
when first used; beyond a share of the process's limit each read opens and closes its own.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.base.files import open_file
from headrace.errors import CorruptStore, HeadraceError, SourceChanged, VolumeError
from headrace.store.format import PAGE_BYTES, corrupt
from headrace.store.sources.extents import read_fully
from headrace.store.volume_format import VolumeHeader, check_volume_header

if TYPE_CHECKING:
    from headrace.store.manifest import Segment, VolumeEntry

_PROBLEMS_SHOWN = 10


class Volumes:
    """The volumes of one segment.

    Args:
        folder: the store's folder, which relative paths start from.
        segment: the segment's manifest entry.
    """

    def __init__(self, folder: str, segment: Segment) -> None:
        self.entries = segment.volumes
        self.paths = [os.path.join(folder, v.path) for v in segment.volumes]
        self._segment_uuid = segment.uuid
        self._fds: dict[int, int] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._kept = max(0, (4096 if soft == resource.RLIM_INFINITY else soft) // 4 - 8)

    def problems(self) -> list[HeadraceError]:
        """What is wrong with the volumes, one error each."""
        found = []
        for number in range(len(self.entries)):
            try:
                self.check(number)
            except HeadraceError as e:
                found.append(e)
        return found

    def check_all(self) -> None:
        """Checks every volume.

        Raises:
            CorruptStore: a packed volume is missing, damaged, or another one stands in its place.
            SourceChanged: a foreign file is gone or not as it was.
            VolumeError: the system refuses to open one.
        """
        problems = self.problems()
        if len(problems) == 1:
            raise problems[0]
        if problems:
            shown = "".join(f"\n  {p.message}" for p in problems[:_PROBLEMS_SHOWN])
            more = len(problems) - _PROBLEMS_SHOWN
            tail = f"\n  and {more:,} more" if more > 0 else ""
            raise type(problems[0])(
                f"{len(problems):,} of {len(self.entries):,} volumes cannot be used:{shown}{tail}\n",
                path=problems[0].path,
                next_step=problems[0].next_step,
            )

    def check(self, number: int) -> None:
        """Checks one volume; errors as for `check_all`."""
        entry, path = self.entries[number], self.paths[number]
        if entry.kind == "tree":
            self._check_tree(path)
            return
        fd = self._open(number)
        try:
            check_file(entry, path, os.fstat(fd))
            if entry.kind == "packed":
                expected = VolumeHeader(
                    bytes.fromhex(entry.uuid or ""), bytes.fromhex(self._segment_uuid), number
                )
                check_volume_header(os.pread(fd, PAGE_BYTES, 0), expected, path)
        finally:
            os.close(fd)

    def borrow(self, number: int) -> tuple[int, bool]:
        """A descriptor of a file volume, and whether the caller must close it."""
        fd = self._fds.get(number)
        if fd is not None:
            return fd, False
        fd = self._open(number)
        try:
            check_file(self.entries[number], self.paths[number], os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        if len(self._fds) >= self._kept:
            return fd, True
        # No lock: of two threads that open the same volume, one keeps its descriptor.
        kept = self._fds.setdefault(number, fd)
        if kept is not fd:
            os.close(fd)
        return kept, False

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """Fills `view` from `offset` of a file volume; fewer bytes come at its end only.

        Raises:
            HeadraceError: as for `check_all`.
            OSError: the system refuses the read.
        """
        fd, close = self.borrow(number)
        try:
            return read_fully(fd, view, offset)
        finally:
            if close:
                os.close(fd)

    def read_unchecked(self, number: int, view: memoryview, offset: int) -> int:
        """As `read_into`, from a file that may be the wrong one: for `verify`, which says so itself."""
        fd = self._open(number)
        try:
            return read_fully(fd, view, offset)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the descriptors."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        # A store that is dropped without `close` leaves nothing open.
        for fd in getattr(self, "_fds", {}).values():
            with suppress(OSError):
                os.close(fd)

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them: (kind, path, bytes, mtime_ns or -1)."""
        return [
            (
                "tree" if entry.kind == "tree" else "file",
                os.fsencode(os.path.abspath(path)),
                entry.bytes or 0,
                -1 if entry.mtime_ns is None else entry.mtime_ns,
            )
            for entry, path in zip(self.entries, self.paths, strict=True)
        ]

    def _open(self, number: int) -> int:
        entry, path = self.entries[number], self.paths[number]
        try:
            if entry.kind == "packed":
                return open_file(path)
            # A source is where the user says, perhaps behind links.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except VolumeError:
            raise
        except OSError as e:
            raise _missing(entry.kind, path, e) from e

    def _check_tree(self, path: str) -> None:
        if os.path.isdir(path):
            return
        raise SourceChanged(
            f"{path}: the folder is gone, expected the files that were indexed there.",
            path=path,
            next_step="Put it back, or index the source where it is now.",
        )


@dataclass(frozen=True, slots=True)
class _Advice:
    packed: str = "Put the file back, or pack the source again."
    foreign: str = "Put the file back, or index the source again."


_ADVICE = _Advice()


def _missing(kind: str, path: str, e: OSError) -> HeadraceError:
    if e.errno in (errno.ENOENT, errno.ENOTDIR):
        if kind == "packed":
            return CorruptStore(
                f"{path}: the volume is missing.", path=path, next_step=_ADVICE.packed
            )
        return SourceChanged(
            f"{path}: the indexed file is missing.", path=path, next_step=_ADVICE.foreign
        )
    return VolumeError(
        f"{path}: cannot be opened: {e.strerror}.",
        path=path,
        errno=e.errno,
        next_step="Raise the limit of open files (ulimit -n)."
        if e.errno == errno.EMFILE
        else "Check the file's permissions and the disk.",
    )


def check_file(entry: VolumeEntry, path: str, status: os.stat_result) -> None:
    """Size of a file volume, and modification time of a foreign one, are as recorded."""
    if status.st_size != entry.bytes:
        if entry.kind == "packed":
            raise corrupt(
                path, "volume size in bytes", found=f"{status.st_size:,}",
                expected=f"{entry.bytes:,}", offset=min(status.st_size, entry.bytes or 0),
                next_step="Verify the store to see what is lost, and repair it from its source.",
            )  # fmt: skip
        raise SourceChanged(
            f"{path}: size in bytes is {status.st_size:,}, expected {entry.bytes:,}: the file "
            "changed after it was indexed.",
            path=path,
            next_step="Index the source again.",
        )
    if entry.mtime_ns is not None and status.st_mtime_ns != entry.mtime_ns:
        raise SourceChanged(
            f"{path}: modification time is {status.st_mtime_ns} ns, expected {entry.mtime_ns} ns: "
            "the file changed after it was indexed.",
            path=path,
            next_step="Index the source again.",
        )
