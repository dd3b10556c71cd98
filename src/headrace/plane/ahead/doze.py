"""Doze: when to leave files to the dataset, since all of them lie in the page cache anyway.

There a second thread and a second copy cost more than they save. Before anything is read ahead, and
again and again while nothing is, a few of the coming files are looked at: opened, and the kernel asked
where their bytes are. While files are read ahead, what was read tells as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import _native

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Doze"]


@dataclass(slots=True)
class Doze:
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
