"""ColdChoice: whether files that are not in the page cache are read past it, or into it.

Reading past the page cache costs the least CPU; filling it costs about 0.5 CPU s/GB more on the test
machine, once, and spares the next epoch the device. So it is filled where the device is what everyone
waits for, if the dataset fits; a device that keeps up with its consumer is read again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.plane.ahead.memory import fits_in_free_memory

if TYPE_CHECKING:
    from headrace.plane.ahead.options import Cold

__all__ = ["ColdChoice"]

FIRST_FILES = 64
"""All wait for the first reads: they say nothing."""

WINDOW_FILES = 256

WAITED_SHARE = 0.25
"""Of a window's time: more, and the device is what holds the consumer up."""


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
        self._began = 0.0
        self._waited_s = 0.0

    def note(self, waited_s: float, mean_bytes: float) -> bool:
        """A file was served.

        Args:
            waited_s: by all opens since the start, in seconds.
            mean_bytes: of a file.

        Returns:
            Whether `now` has changed.
        """
        if not self._open:
            return False
        self._left -= 1
        if self._left:
            return False
        now = time.monotonic()
        bound = waited_s - self._waited_s > WAITED_SHARE * (now - self._began)
        if self._began and bound:
            self._open = False
            if fits_in_free_memory(self._samples * mean_bytes):
                self.now = "fill"
                return True
        self._left, self._began, self._waited_s = WINDOW_FILES, now, waited_s
        return False
