"""Room: how much clients may hold together, from the memory that there is.

Windows are given in bytes, and many clients may use theirs up; the machine, or the control group that
the daemon is in, may have less. What would not fit is not begun: clients read those batches directly.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Room"]

ALL_SHARE = 4
"""A quarter of the memory: samples that are kept have half of it."""

WINDOW_MIN = 1 << 20


@dataclass(slots=True)
class Room:
    """What all clients hold together.

    Attributes:
        starved: somebody waits for what clients of other jobs hold.
    """

    bytes_max: int
    held_bytes: int = 0
    starved: bool = False

    @classmethod
    def within(cls, available_bytes: int) -> Room:
        """A part of the memory that is available when the daemon starts."""
        return cls(max(WINDOW_MIN, available_bytes // ALL_SHARE))

    def window(self, given_bytes: int) -> int:
        """A client's or a job's window: as given, but no more than half of all."""
        return max(WINDOW_MIN, min(given_bytes, self.bytes_max // 2))

    def fits(self, size_bytes: int) -> bool:
        """Whether so much more may be held; something always may where nothing is."""
        if not self.held_bytes or self.held_bytes + size_bytes <= self.bytes_max:
            return True
        self.starved = True
        return False
