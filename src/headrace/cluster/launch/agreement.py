"""Agreement: how the ranks of all nodes come to leave at the same step. See `page` for why it is right.

A plain state machine: it is told what came and what time it is, and says what to do.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Agreement", "Phase", "StopReason"]

HOLD_S = 5.0
"""A node that does not count its ranks in this time is left out: it is about to be lost."""


class Phase(StrEnum):
    """How far an agreement is."""

    HOLDING = "holding"
    LEAVING = "leaving"
    NOBODY = "nobody"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why the ranks are asked to leave.

    Attributes:
        text: for people.
        requeue: whether the job is to start again.
        number: the signal that was sent; 0: none.
        within_s: how long the ranks have.
    """

    text: str
    requeue: bool
    number: int
    within_s: float

    @property
    def cancels(self) -> bool:
        """Whether somebody wants the job to end for good."""
        return self.number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agreement:
    """One request to leave.

    Args:
        reason: for it.
        now_s: the time.

    Attributes:
        phase: how far it is.
        check: at which all leave, once that is known.
    """

    def __init__(self, reason: StopReason, now_s: float) -> None:
        self.reason = reason
        self.phase = Phase.HOLDING
        self.check = 0
        self._until_s = now_s + HOLD_S

    def counted(self, furthest: list[int | None], now_s: float) -> bool:
        """Told the nodes' counts (-1: no rank takes part; None: no answer yet); whether that decides it."""
        if self.phase is not Phase.HOLDING or (None in furthest and now_s < self._until_s):
            return False
        most = max((n for n in furthest if n is not None), default=-1)
        self.check = most + 1
        self.phase = Phase.LEAVING if self.check else Phase.NOBODY
        self._until_s = now_s + self.reason.within_s
        return True

    def late(self, now_s: float) -> bool:
        """Whether ranks that should have left have not."""
        if self.phase is Phase.LEAVING and now_s > self._until_s:
            self.phase = Phase.LATE
        return self.phase is Phase.LATE

    def overridden(self, reason: StopReason, now_s: float) -> None:
        """A later request that wants more: one that cancels beats one that requeues."""
        if reason.cancels and not self.reason.cancels:
            self.reason = reason
            self._until_s = min(self._until_s, now_s + reason.within_s)
        elif reason.number == self.reason.number == signal.SIGINT:
            self._until_s = now_s  # Ctrl-C a second time: now
