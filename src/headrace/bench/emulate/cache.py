"""The page cache: how much of a data set lies in it, and putting it out, file by file and without root.

fadvise only drops clean pages that nobody maps, and may drop fewer than asked: whoever wants a cold start
measures what remains.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import BenchError
from headrace.store.residency import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Residency", "evict", "residency_of"]

_EVERY = 1024
"""Files between two calls of progress."""


@dataclass(frozen=True, slots=True)
class Residency:
    """What of some files lies in the page cache.

    Attributes:
        resident_bytes: None where the kernel does not tell.
    """

    files: int
    nbytes: int
    resident_bytes: int | None

    @property
    def share(self) -> float | None:
        """As a fraction of all bytes; None where nobody can tell."""
        if self.resident_bytes is None:
            return None
        return self.resident_bytes / self.nbytes if self.nbytes else 0.0


def residency_of(paths: Iterable[str], most: int | None = None) -> Residency:
    """Look at files; with `most`, at so many of them, evenly spread.

    Raises:
        BenchError: a file cannot be looked at.
    """
    found = list(paths)
    if most is not None and len(found) > most:
        found = [found[i * len(found) // most] for i in range(most)]
    total, resident = 0, 0
    for path in found:
        try:
            total += os.stat(path).st_size
        except OSError as e:
            raise BenchError(f"{path} cannot be looked at: {e.strerror}.", path=path) from e
        here = resident_bytes(path)
        if here is None:
            return Residency(len(found), total, None)
        resident += here
    return Residency(len(found), total, resident)


def evict(paths: Iterable[str], progress: Callable[[int], None] | None = None) -> None:
    """Put files out of the page cache, as far as the kernel does; dirty ones are written out first.

    Raises:
        BenchError: a file cannot be opened.
    """
    for number, path in enumerate(paths):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise BenchError(f"{path} cannot be opened: {e.strerror}.", path=path) from e
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        if progress is not None and number % _EVERY == 0:
            progress(number)
