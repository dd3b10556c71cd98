"""PRISMA's published autotuner, re-implemented as a baseline; it turns the same knobs as ours.

As published: after 15 seconds, sample the buffer's occupancy at each insert and erase; every 100 ms,
if there are at least 10 samples, take truncated mean and deviation; stop for good when the buffer
is full and calm, else add a thread or ten files of buffer. A "thread" is a read in flight, a "file" a
sample. Occupancy is looked at every two milliseconds instead of at each insert. The most threads are
the hardware threads of its own test bed.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.plane.stage import Stage

WARM_UP_S = 15.0
INTERVAL_S = 0.1
SAMPLES_MIN = 10
FULL, EMPTY, CALM = 80, 30, 20
THREADS_FIRST, THREADS_MAX = 1, 40
FILES_FIRST, FILES_STEP, FILES_MAX = 10, 10, 100


def decide(occupancy: list[float], threads: int, files: int) -> tuple[int, int] | None:
    """Threads and files of buffer after a look at occupancies in percent; None: tuning ends for good."""
    mean, deviation = int(statistics.fmean(occupancy)), int(statistics.pstdev(occupancy))
    if mean >= FULL and deviation <= CALM:
        return None
    if mean <= EMPTY or deviation <= CALM:
        return min(THREADS_MAX, threads + 1), files
    return threads, min(FILES_MAX, files + FILES_STEP)


class PrismaTuner(threading.Thread):
    """Turns a stage's knobs as PRISMA does."""

    def __init__(self, stage: Stage, file_bytes: int, *, warm_up_s: float = WARM_UP_S) -> None:
        super().__init__(daemon=True)
        self.ending = threading.Event()
        self._stage = stage
        self._file_bytes = file_bytes
        self._warm_up_s = warm_up_s
        self._threads, self._files = THREADS_FIRST, FILES_FIRST
        self._turn()

    def _turn(self) -> None:
        self._stage.turn(
            {"reads_in_flight": self._threads, "buffer_bytes": self._files * self._file_bytes}
        )

    def run(self) -> None:
        self.ending.wait(self._warm_up_s)
        occupancy: list[float] = []
        next_look = time.monotonic() + INTERVAL_S
        while not self.ending.wait(0.002):
            ready = self._stage.stats().ready_bytes
            occupancy.append(min(100.0, 100.0 * ready / (self._files * self._file_bytes)))
            if time.monotonic() < next_look or len(occupancy) < SAMPLES_MIN:
                continue
            next_look = time.monotonic() + INTERVAL_S
            turned = decide(occupancy, self._threads, self._files)
            occupancy.clear()
            if turned is None:
                return
            self._threads, self._files = turned
            self._turn()
