"""Policies: whether coming files are read ahead, past the page cache, or left to the data set."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native
from headrace.machine.host import fits_in_free_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.plane.read_ahead.stage import Cold


@dataclass(slots=True)
class CacheBypass:
    """Pauses reading ahead while coming files lie in the page cache."""

    looks: int = 24
    """Files that are looked at: if one in ten were not resident, all but 8 % of looks would see it."""
    pause: int = 2048
    """Samples between two looks."""
    window: int = 128
    """Files that were read, between two verdicts on them."""
    resident_share: float = 0.98
    latency_s_max: float = 0.0005
    """Reads that take longer are worth hiding, also from the page cache: opening may be slow."""
    paused: bool = False
    _left: int = 0
    _seen: int = 0
    _bytes: int = 0
    _resident: int = 0

    def due(self) -> bool:
        """Whether to look before this sample is planned: at first, and while paused now and then."""
        if self._left > 0:
            self._left -= 1
            return False
        return self.paused or not self._seen + self._bytes

    def skips(self, samples: int) -> bool:
        """Whether so many samples need no look at all: paused, and the next look is not due."""
        if not self.paused or self._left < samples:
            return False
        self._left -= samples
        return True

    def look(self, paths: Iterable[str]) -> None:
        """Decide by where some of the coming files are.

        Args:
            paths: some of those that come until the next look; none: all stays as it is.
        """
        raw = [path.encode(errors="surrogateescape") for path in paths]
        self._left = self.pause
        if raw:
            resident, _ = _native.look_at_files(raw, self.latency_s_max * len(raw))
            self.paused = resident == len(raw)

    def note_served(self) -> bool:
        """A file was served; True when `judge` should be asked."""
        self._seen += 1
        return self._seen >= self.window

    def judge(self, total_bytes: int, resident_bytes: int, latency_s: float) -> None:
        """Decide by what was read since the last time.

        Args:
            total_bytes: bytes read since the start.
            resident_bytes: of them from the page cache.
            latency_s: the median read lately.
        """
        new = total_bytes - self._bytes
        resident = resident_bytes - self._resident
        self._seen = 0
        if not new:  # what was served had been read before the last verdict: nothing to judge by
            return
        self._bytes, self._resident = total_bytes, resident_bytes
        self.paused = resident >= self.resident_share * new and latency_s <= self.latency_s_max
        self._left = self.pause


@dataclass(slots=True)
class Usefulness:
    """Switches reading ahead off while most of what is read ahead is not used.

    After `window` files of which more than half were skipped or had changed, nothing is planned for
    `pause` samples; each time in a row the pause doubles.
    """

    window: int = 64
    pause: int = 2048
    pause_max: int = 1 << 20
    reason: str | None = None
    """Why it is off; None: it is on."""
    _good: int = 0
    _skipped: int = 0
    _changed: int = 0
    _left: int = 0
    _next_pause: int = 0

    def note(self, *, good: int = 0, skipped: int = 0, changed: int = 0) -> None:
        """Files that were planned have come to their end."""
        self._good += good
        self._skipped += skipped
        self._changed += changed
        total = self._good + self._skipped + self._changed
        if total < self.window:
            return
        if 2 * self._good >= total:
            self._next_pause = 0
        elif self.reason is None:
            self._next_pause = min(max(2 * self._next_pause, self.pause), self.pause_max)
            self._left = self._next_pause
            self.reason = (
                f"off for {self._left} samples: of the last {total} files read ahead {self._good} "
                f"were used, {self._skipped} were never opened and {self._changed} had changed"
            )
        self._good = self._skipped = self._changed = 0

    def admits(self) -> bool:
        """Whether one more sample may be planned."""
        if self.reason is None:
            return True
        self._left -= 1
        if self._left <= 0:
            self.reason = None
        return False


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
