"""PageCacheAhead: reads files of a local disk into the page cache before a program opens them.

There a copy would cost memory and processor time for nothing: a real open of a file whose pages are
there is as fast as any. The kernel is asked for the pages (`WILLNEED`) and nothing is copied; measured on
110 kB files, that triples what a plain loop reads, where direct reads into copies did not even double it.

While all files that are looked at are in memory anyway, only a few are looked at.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from headrace.node.files.copies import AheadFigures
from headrace.store.residency import resident_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

FILE_BYTES_MAX = 64 << 20
"""Larger files are left to the kernel's own reading ahead."""

DOZE_AFTER = 64
"""So many files in a row were in memory already: only each `DOZE_STEP`th is looked at from now on."""

DOZE_STEP = 16

_NEW, _QUEUED, _AHEAD, _HOT = range(4)
_IDLE_S = 0.05


class PageCacheAhead:
    """Reads files of one run ahead.

    Args:
        paths: of all files, by number.
        sizes: int64, their bytes.
        threads: files in work at a time. Two keep an NVMe device busy where the inodes are in memory.
        idle: whether the program has opened nothing for a while, and the storage is free.
    """

    def __init__(
        self,
        paths: Sequence[bytes],
        sizes: NDArray[np.int64],
        *,
        threads: int = 4,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._paths = paths
        self._sizes = sizes
        self._states = np.zeros(len(paths), np.uint8)
        self._queue: deque[int] = deque()
        self._rest: deque[int] = deque()
        self._idle = idle
        self._wake = threading.Condition()
        self._ended = False
        self._hot_in_a_row = 0
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self.figures = AheadFigures()

    @property
    def bypassed(self) -> bool:
        """Whether all files that were looked at lately were in memory already."""
        return self._hot_in_a_row >= DOZE_AFTER

    def want(self, files: NDArray[np.int64]) -> None:
        """These files are opened next, in this order, after those that were wanted before."""
        new = files[(self._states[files] == _NEW) & (self._sizes[files] <= FILE_BYTES_MAX)]
        if self.bypassed:
            hot = new % DOZE_STEP > 0
            self._states[new[hot]] = _HOT
            self.figures.hot_files += int(hot.sum())
            new = new[~hot]
        if not len(new):
            return
        with self._wake:
            self._states[new] = _QUEUED
            self._queue.extend(new.tolist())
            self._start()
            self._wake.notify_all()

    def want_when_idle(self, files: NDArray[np.int64]) -> None:
        """These may be read while nothing else is to do."""
        with self._wake:
            self._rest = deque(files[self._sizes[files] <= FILE_BYTES_MAX].tolist())
            if self._rest:
                self._start()
            self._wake.notify_all()

    def opened(self, files: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The program has opened these; which of them had been read ahead."""
        ahead: NDArray[np.bool_] = self._states[files] == _AHEAD
        self._states[files] = _NEW
        return ahead

    def forget(self) -> None:
        """The program does not keep to the order: what was read ahead may be for nothing."""
        with self._wake:
            self._states[list(self._queue)] = _NEW
            self._queue.clear()
        ahead = np.flatnonzero(self._states == _AHEAD)
        self.figures.wasted_files += len(ahead)
        self.figures.wasted_bytes += int(self._sizes[ahead].sum())
        self._states[ahead] = _NEW

    def close(self) -> None:
        """End the threads; a look that the storage never answers is left behind."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(1.0)

    def _start(self) -> None:
        while len(self._threads) < self._threads_max and not self._ended:
            thread = threading.Thread(target=self._work, name="headrace-node-ahead", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._ended:
                    if self._rest and self._idle():
                        file = self._rest.popleft()
                        if self._states[file] == _NEW:
                            self._states[file] = _QUEUED
                            self._queue.append(file)
                        continue
                    self._wake.wait(_IDLE_S if self._rest else None)
                if self._ended:
                    return
                file = self._queue.popleft()
                wanted = self._states[file] == _QUEUED  # and not opened meanwhile
            if wanted:
                self._read(file)

    def _read(self, file: int) -> None:
        self._states[file] = _AHEAD
        try:
            hot = read_into_page_cache(self._paths[file])
        except OSError as e:  # the program will meet it too, and say so
            self.figures.failed(e)
            return
        self._hot_in_a_row = self._hot_in_a_row + 1 if hot else 0
        if hot:
            self._states[file] = _HOT
            self.figures.hot_files += 1
        else:
            self.figures.read_files += 1
            self.figures.read_bytes += int(self._sizes[file])


def read_into_page_cache(path: bytes) -> bool:
    """Ask for all pages of a file; whether they were there already.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        size = os.fstat(fd).st_size
        pages = resident_pages(fd, size) if size else 0
        if pages is not None and pages >= -(-size // mmap.PAGESIZE):
            return True
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_WILLNEED)
        return False
    finally:
        os.close(fd)
