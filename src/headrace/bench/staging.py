"""Where the data lies before a run: in the page cache, evicted from it, or staged to another folder.

fadvise only drops clean pages that nobody maps, and may drop fewer than asked: whoever wants a cold start
measures what remains. A staged data set is copied to a folder, such as a node's local disk, read there, and
removed at the end; the ranks of a host share the work. Nothing is written or deleted but in a folder of its
own below the one that was given; a run that was killed leaves it, and the next one that stages the same data
set there goes on with it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.errors import BenchError
from headrace.store.output_file import write_error
from headrace.store.publish import check_free_space
from headrace.store.residency import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.bench.ranks import RankGroup


_COLD_SHARE_MOST = 0.02
"""More than this of the data still in the page cache is not a cold start."""


class Residency(NamedTuple):
    """What of some files lies in the page cache."""

    files: int
    nbytes: int
    resident_bytes: int | None
    """None where the kernel does not tell."""

    @property
    def share(self) -> float | None:
        """As a fraction of all bytes; None where nobody can tell."""
        if self.resident_bytes is None:
            return None
        return self.resident_bytes / self.nbytes if self.nbytes else 0.0

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"files": self.files, "bytes": self.nbytes, "share": self.share}


def residency_of(paths: Iterable[str], most: int | None = None) -> Residency:
    """Look at files; with `most`, at so many of them, evenly spread.

    Raises:
        BenchError: a file cannot be looked at.
    """
    chosen = list(paths)
    if most is not None and len(chosen) > most:
        chosen = [chosen[i * len(chosen) // most] for i in range(most)]
    total, resident = 0, list[int | None]()
    for path in chosen:
        try:
            total += os.stat(path).st_size
        except OSError as e:
            raise BenchError(f"{path} cannot be looked at: {e.strerror}.", path=path) from e
        resident.append(resident_bytes(path))
    known = [count for count in resident if count is not None]
    return Residency(len(chosen), total, sum(known) if len(known) == len(chosen) else None)


def evict(paths: Iterable[str]) -> None:
    """Put files out of the page cache, as far as the kernel does; dirty ones are written out first.

    Raises:
        BenchError: a file cannot be opened.
    """
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise BenchError(f"{path} cannot be opened: {e.strerror}.", path=path) from e
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


_THREADS: Final = 16
_DEADLINE_S: Final = 24 * 3600.0


def make_cold(paths: Sequence[str], most: int, what: str, next_step: str) -> Residency:
    """Evict files, and see that they are gone, of at most so many. Raises BenchError if they are not."""
    evict(paths)
    residency = residency_of(paths, most)
    share = residency.share
    if share is None or share > _COLD_SHARE_MOST:
        reason = "nobody can tell" if share is None else f"{share:.1%} is still there"
        message = f"{what} cannot be put out of the page cache: {reason}."
        raise BenchError(message, next_step=next_step)
    return residency


class Staged(NamedTuple):
    """A data set that was copied."""

    folder: str
    files: Mapping[str, list[str]]
    nbytes: int
    seconds: float
    removes: bool
    """Whether it is this rank that removes it: one of each host does."""

    def remove(self) -> None:
        """Remove the copy."""
        if self.removes:
            shutil.rmtree(self.folder, ignore_errors=True)


def stage_files(
    files: Mapping[str, Sequence[str]], root: str, folder: str, group: RankGroup
) -> Staged:
    """Copy a data set; all ranks call it. All of its folder is copied: formats have files beside the samples'.

    Raises:
        BenchError: the folder is in the data set's, or a rank is gone.
        VolumeError: the disk is full, or the operating system refuses.
    """
    root, folder = os.path.realpath(root), os.path.realpath(folder)
    if os.path.commonpath([root, folder]) in (root, folder):
        raise BenchError(
            f"{folder} cannot be staged to: it holds the data set's folder {root}, or lies in it.",
            path=folder,
            next_step="Give another folder, on a local disk.",
        )
    begin = time.perf_counter()
    hosts = group.broadcast(group.gather(socket.gethostname()))
    here = [rank for rank, host in enumerate(hosts) if host == hosts[group.place.rank]]
    mine = here.index(group.place.rank)
    digest = hashlib.sha256(root.encode()).hexdigest()
    place = os.path.join(folder, f"headrace-staged-{digest[:12]}")
    every = sorted(
        os.path.relpath(os.path.join(below, name), root)
        for below, _, names in os.walk(root)
        for name in names
    )
    names = every[mine :: len(here)]
    try:
        os.makedirs(place, exist_ok=True)
        check_free_space(Path(place), sum(os.stat(os.path.join(root, n)).st_size for n in names))
        with ThreadPoolExecutor(_THREADS, "stage") as pool:
            nbytes = sum(pool.map(lambda name: _copy(root, place, name), names))
    except OSError as e:
        raise write_error(e, str(e.filename or place)) from e
    group.barrier(_DEADLINE_S)
    moved = {
        split: [os.path.join(place, os.path.relpath(os.path.realpath(p), root)) for p in paths]
        for split, paths in files.items()
    }
    return Staged(place, moved, nbytes, time.perf_counter() - begin, mine == 0)


def _copy(root: str, place: str, name: str) -> int:
    """Copy a file unless it is there as it was; returns its bytes."""
    source, target = os.path.join(root, name), os.path.join(place, name)
    known = os.stat(source)
    try:
        there = os.stat(target)
    except FileNotFoundError:
        there = None
    if there and (there.st_size, there.st_mtime_ns) == (known.st_size, known.st_mtime_ns):
        return 0
    os.makedirs(os.path.dirname(target), exist_ok=True)
    partial = f"{target}.{os.getpid()}.partial"
    shutil.copyfile(source, partial)
    os.utime(partial, ns=(known.st_atime_ns, known.st_mtime_ns))
    os.replace(partial, target)
    return known.st_size
