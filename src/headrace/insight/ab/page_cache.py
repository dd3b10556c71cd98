"""The page cache before a run: the files that will be read are put out of it, or into it, and looked at.

Without root, and without touching what is not ours: `posix_fadvise(DONTNEED)` for each file that the program
read, never the kernel's switch that empties the cache of the whole machine. What remains in memory is measured
and named. Names and attributes (dentries and inodes) stay, as does what a storage server has in its own memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.machine.mounts import Mount, mounts
from headrace.store.residency import resident_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    _Act = Callable[[int, int], int | None]

__all__ = ["Cached", "make_cold", "make_warm", "remote_kinds"]

_BLOCK: Final = 1 << 20
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_NAMES_MAX: Final = 3
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "glusterfs", "wekafs",
     "panfs", "orangefs", "afs", "virtiofs"}
)  # fmt: skip


@dataclass(slots=True)
class Cached:
    """What of some files lies in memory.

    Attributes:
        files: how many were looked at.
        nbytes: of these.
        resident: of these bytes, in memory; None where the kernel does not tell.
        not_cold: some files that were to be out of memory and are not, with the reason.
        gone: files that could not be opened.
    """

    files: int = 0
    nbytes: int = 0
    resident: int | None = 0
    not_cold: list[tuple[bytes, str]] = field(default_factory=list)
    gone: int = 0

    @property
    def share(self) -> float | None:
        """Of the bytes, as a fraction."""
        if self.resident is None:
            return None
        return self.resident / self.nbytes if self.nbytes else 0.0


def make_cold(files: Iterable[bytes]) -> Cached:
    """Put files out of the page cache, and look at what remains."""
    return _each(files, _evict, cold=True)


def make_warm(files: Iterable[bytes]) -> Cached:
    """Read what is not in the page cache, and look at what then is."""
    return _each(files, _read, cold=False)


def remote_kinds(files: Iterable[bytes]) -> list[str]:
    """File systems of files whose server has a memory of its own, which nobody here can empty."""
    table = _table()
    folders = {os.path.dirname(os.path.realpath(os.fsdecode(path))) for path in files}
    return sorted({kind for folder in folders if (kind := _kind_of(folder, table)) in _REMOTE})


def _table() -> list[Mount]:
    """What lies deeper hides what it lies in."""
    return sorted(mounts(), key=lambda mount: len(mount.point), reverse=True)


def _kind_of(folder: str, table: list[Mount]) -> str:
    for mount in table:
        if folder == mount.point or folder.startswith(mount.point.rstrip("/") + "/"):
            return mount.kind
    return ""


def _each(files: Iterable[bytes], act: _Act, *, cold: bool) -> Cached:
    found = Cached()
    for path in files:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            found.gone += 1
            continue
        try:
            size = os.fstat(fd).st_size
            if size:
                _one(found, path, fd, size, act, cold=cold)
        except OSError:
            found.gone += 1
        finally:
            os.close(fd)
    return found


def _one(found: Cached, path: bytes, fd: int, size: int, act: _Act, *, cold: bool) -> None:
    pages = act(fd, size)
    found.files += 1
    found.nbytes += size
    if pages is None or found.resident is None:
        found.resident = None
        return
    here = min(size, pages * _PAGE)
    found.resident += here
    if cold and here and len(found.not_cold) < _NAMES_MAX:
        found.not_cold.append((path, _why(path)))


def _evict(fd: int, size: int) -> int | None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    pages = resident_pages(fd, size)
    if pages:  # what is not written yet stays: write it
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = resident_pages(fd, size)
    return pages


def _read(fd: int, size: int) -> int | None:
    pages = resident_pages(fd, size)
    if pages is not None and pages * _PAGE < size:
        while os.read(fd, _BLOCK):
            pass
        pages = resident_pages(fd, size)
    return pages


def _why(path: bytes) -> str:
    kind = _kind_of(os.path.dirname(os.path.realpath(os.fsdecode(path))), _table())
    if kind in _IN_MEMORY:
        return f"it lies on {kind}, which is memory"
    return "another program uses it, or the file system keeps it"
