"""ColdChoice: whether files that are not in the page cache are read past it, or into it.

Reading past the page cache costs the least CPU; filling it costs about 0.5 CPU s/GB more on the test
machine, once, and spares the next epoch the device. So it is filled where the device is what everyone
waits for, if the dataset fits; a device that keeps up with its consumer is read again. Opens that wait
while reads are left to be started wait for the CPU, not for the device.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.machine.host import fits_in_free_memory

if TYPE_CHECKING:
    from headrace.plane.ahead.options import Cold

__all__ = ["ColdChoice"]

FIRST_FILES = 64
"""All wait for the first reads: they say nothing."""

WINDOW_FILES = 256

WAITED_SHARE = 0.25
"""Of a window's time: opens that wait longer are held up."""

BUSY_SHARE = 0.75
"""Of the reads that may be in flight: with more of them under way, the device is at its limit."""

BOUND_WINDOWS = 2
"""In a row that must say so."""


class ColdChoice:
    """Chooses between `direct` and `fill`; `auto` begins with the former, and changes once at most.

    Args:
        wanted: the user's choice.
        samples: of the dataset.
    """

    def __init__(self, wanted: Cold, samples: int) -> None:
        self.now = "direct" if wanted == "auto" else wanted
        self._open = wanted == "auto"
        self._samples = samples
        self._left = FIRST_FILES
        self._bound_windows = 0
        self._window: tuple[float, float, float] | None = None

    def note_served(self) -> bool:
        """A file was served; True when `judge` should be asked."""
        self._left -= self._open
        return self._open and self._left <= 0

    def judge(
        self, waited_s: float, busy_s: float, reads_in_flight: int, mean_bytes: float
    ) -> bool:
        """Decide by what happened since the last time.

        Args:
            waited_s: by all opens since the start.
            busy_s: sum over all reads since the start.
            reads_in_flight: as many as may be.
            mean_bytes: of a file.

        Returns:
            Whether `now` has changed.
        """
        before, self._window = self._window, (time.monotonic(), waited_s, busy_s)
        self._left = WINDOW_FILES
        if before is None:
            return False
        seconds, waited, busy = (a - b for a, b in zip(self._window, before, strict=True))
        held_up = waited > WAITED_SHARE * seconds
        bound = held_up and busy >= BUSY_SHARE * reads_in_flight * seconds
        self._bound_windows = self._bound_windows + 1 if bound else 0
        if self._bound_windows < BOUND_WINDOWS:
            return False
        self._open = False
        if not fits_in_free_memory(self._samples * mean_bytes):
            return False
        self.now = "fill"
        return True
