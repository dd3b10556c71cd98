"""Staging: the data set is copied to a folder, such as a node's local disk, read there, and removed at the end.

What it takes is part of the time to solution. The ranks of a host share the work. Nothing is written or deleted
but in a folder of its own below the one that was given; a run that was killed leaves it, and the next one that
stages the same data set there goes on with it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import BenchError
from headrace.store.output_file import write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.bench.emulate.group import Group

__all__ = ["Staged", "stage_files"]

_THREADS: Final = 16
_DEADLINE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Staged:
    """A data set that was copied.

    Attributes:
        files: of each split, where they are now.
        nbytes: that this rank copied.
        seconds: until all ranks were done.
    """

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


def stage_files(files: Mapping[str, Sequence[str]], root: str, folder: str, group: Group) -> Staged:
    """Copy a data set; all ranks call it.

    Args:
        files: of each split.
        root: the data set's folder: all that is in it is copied, since formats have files beside these.
        folder: where to.
        group: all ranks.

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
    place = os.path.join(
        folder, f"headrace-staged-{hashlib.sha256(root.encode()).hexdigest()[:12]}"
    )
    names = _names(root)[mine :: len(here)]
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


def _names(root: str) -> list[str]:
    """All files below a folder, relative to it."""
    return sorted(
        os.path.relpath(os.path.join(place, name), root)
        for place, _, found in os.walk(root)
        for name in found
    )


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
