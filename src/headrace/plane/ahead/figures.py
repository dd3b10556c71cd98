"""What a ReadAhead counts about itself, and when it judges that its plan is of no use."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Figures", "Judge"]


@dataclass(slots=True)
class Figures:
    """Counts since the start. One `planned` file ends as exactly one of the others, up to `late`."""

    planned: int = 0
    served: int = 0
    skipped: int = 0
    """Nobody opened it before its turn had passed."""
    changed: int = 0
    """It was no longer what had been read, or the read met an error: opened directly."""
    late: int = 0
    """Opened before its read had begun, or a read that took too long: opened directly."""
    unplanned: int = 0
    """Files that samples opened though nobody had planned them (counted while learning)."""
    bytes_served: int = 0
    wait_s: float = 0.0
    """How long opens waited for reads that had begun."""


@dataclass(slots=True)
class Judge:
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
    _next_pause: int = field(default=0)

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
