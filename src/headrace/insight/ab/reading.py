"""Reading: which of a program's opens are its data, and below which folders they lie.

A Python program opens thousands of files before its first sample: modules, libraries, the time zone. None of
these is data. What remains, and was not written by the run itself, is.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from headrace.posix.opens import Open

__all__ = ["ROOTS_MAX", "Reading", "folders_of", "is_data", "reading_of"]

ROOTS_MAX: Final = 16
"""Folders that headrace is told to serve, at most."""

_SYSTEM: Final = tuple(
    os.fsencode(f"/{name}/")
    for name in (
        "proc", "sys", "dev", "etc", "lib", "lib64", "bin", "sbin", "usr/lib", "usr/lib64", "usr/bin",
        "usr/libexec", "usr/local/lib", "usr/share/zoneinfo", "usr/share/locale", "usr/share/misc",
        "usr/share/mime", "usr/share/fonts", "var/lib", "var/cache", "run",
    )
)  # fmt: skip
_CODE: Final = re.compile(
    rb"/(?:site-packages|dist-packages|__pycache__|python3\.\d+|\.git|\.venv)/"
    rb"|\.(?:py|pyc|pyi|pyx|pth|so|sh|ipynb)$|\.so\.[\d.]+$|/pyvenv\.cfg$"
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one run read of its data.

    Attributes:
        opens: process and path of each, by time.
        written: files that it opened for writing.
        first_ns: when the first of them was opened (CLOCK_MONOTONIC); None when none was.
        nbytes: what calls returned; reads through a mapping are not seen.
        busy_ns: time spent opening and reading, over all threads.
        readers: threads that read.
        mapped: files that were mapped into memory.
        dropped: opens that the log had no room for.
    """

    opens: tuple[tuple[int, bytes], ...]
    written: frozenset[bytes]
    first_ns: int | None
    nbytes: int
    busy_ns: int
    readers: int
    mapped: int
    dropped: int = 0

    @property
    def files(self) -> tuple[bytes, ...]:
        """Each file once, in the order of its first open."""
        return tuple(dict.fromkeys(path for _, path in self.opens))

    def below(self, roots: Sequence[str]) -> Reading:
        """With the opens alone that lie below folders; the other figures stay."""
        folders = _spellings(roots)
        return replace(self, opens=tuple(one for one in self.opens if one[1].startswith(folders)))


def reading_of(
    opens: Sequence[Open],
    *,
    not_data: Collection[bytes] = (),
    roots: Sequence[str] = (),
    dropped: int = 0,
) -> Reading:
    """What of a run's opens is data.

    Args:
        opens: all, by time.
        not_data: files that are the program itself.
        roots: folders below which data lies; without any, what is not code or the system's is data.
        dropped: how many are not among them.
    """
    written = frozenset(one.path for one in opens if one.writes and not _is_system(one.path))
    below = _spellings(roots)
    data = [
        one
        for one in opens
        if not one.writes
        and one.path not in written
        and one.path not in not_data
        and (one.path.startswith(below) if below else is_data(one.path))
    ]
    return Reading(
        tuple((one.process, one.path) for one in data),
        written,
        data[0].began_ns if data else None,
        sum(one.read_bytes for one in data),
        sum(one.open_ns + one.read_ns for one in data),
        len({(one.process, one.thread) for one in data}),
        sum(one.mapped > 0 for one in data),
        dropped,
    )


def _spellings(roots: Sequence[str]) -> tuple[bytes, ...]:
    """How paths below folders may begin."""
    spelled = {path for root in roots for path in (os.path.abspath(root), os.path.realpath(root))}
    return tuple(os.fsencode(path).rstrip(b"/") + b"/" for path in sorted(spelled))


def is_data(path: bytes) -> bool:
    """Whether a file may be data: it is neither code nor the system's."""
    return not _is_system(path) and _CODE.search(path) is None


def _is_system(path: bytes) -> bool:
    return path.startswith(_SYSTEM)


def folders_of(files: Iterable[bytes], avoid: Collection[bytes] = ()) -> list[str]:
    """Folders below which files lie: few, and without much else below them.

    Sisters become their parent where they are most of what is in it (`train`, `val`): so a data set's own
    folder is found, and not the home folder that it lies in.

    Args:
        files: absolute paths.
        avoid: folders that must not be among them, nor lie below one: the working folder.

    Returns:
        At most `ROOTS_MAX`, those with the most files first.
    """
    counts = Counter(os.path.dirname(path) for path in files)
    total = sum(counts.values())
    # A list of labels beside a data set's folder is not worth serving all that lies there.
    folders = {
        folder: count
        for folder, count in counts.items()
        if folder not in (b"", b"/")
        and (count * 100 >= total or not any(_is_below(other, folder) for other in counts))
    }
    while merged := _merge(folders, avoid):
        folders = merged
    ranked = sorted(folders, key=lambda folder: (-folders[folder], folder))
    return [os.fsdecode(folder) for folder in ranked[:ROOTS_MAX]]


def _merge(folders: dict[bytes, int], avoid: Collection[bytes]) -> dict[bytes, int] | None:
    """One step towards fewer folders; None where there is none."""
    for folder in folders:
        if below := [other for other in folders if _is_below(other, folder)]:
            rest = {name: count for name, count in folders.items() if name not in below}
            rest[folder] += sum(folders[other] for other in below)
            return rest
    sisters = Counter(os.path.dirname(folder) for folder in folders)
    for parent, count in sisters.most_common():
        if count < 2 or parent == b"/" or any(_is_below(a, parent) or a == parent for a in avoid):
            continue
        if count * 2 >= _folders_in(parent):
            rest = {f: n for f, n in folders.items() if os.path.dirname(f) != parent}
            rest[parent] = sum(n for f, n in folders.items() if os.path.dirname(f) == parent)
            return rest
    return None


def _is_below(path: bytes, folder: bytes) -> bool:
    return path.startswith(folder.rstrip(b"/") + b"/")


def _folders_in(folder: bytes) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.is_dir(follow_symlinks=True) for entry in entries)
    except OSError:
        return 0
