"""Step: what one delivery cost its consumer, and the log of the last ones.

Each wait, from the moment that the consumer asked until it had its batch, is cut along the path that
this batch took: what it was doing while somebody waited for it. The phases of a wait add up to it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PHASES", "STEP", "Step", "StepLog"]

PHASES: Final = ("hold", "open", "read", "queue", "decode", "collate", "transfer", "hand")
"""What an awaited batch was doing, in its order: `hold`: its reads had not begun, for want of room, of
the right to read, or of an earlier request; `open`: paths were looked up and files opened; `read`: reads
were under way; `queue`: its bytes waited for a thread or process to decode them; `decode`; `collate`;
`transfer`: to pinned memory or the device; `hand`: it was ready, and on its way to its consumer."""

STEP: Final = np.dtype(
    [
        ("epoch", "<u4"),
        ("step", "<u4"),  # within the epoch's pass, from 0
        ("position", "<u8"),  # global position of its first sample
        ("samples", "<u4"),
        ("order_hash", "<u8"),  # of these samples at these positions; sums over an epoch
        ("asked_s", "<f8"),  # monotonic
        ("delivered_s", "<f8"),
        ("waited_s", "<f4", (len(PHASES),)),
        ("bytes", "<u8", (len(TIERS),)),
    ]
)
"""One step as a record of fixed size."""


class Step(NamedTuple):
    """One delivery; the fields of `STEP`, in its order."""

    epoch: int
    step: int
    position: int
    samples: int
    order_hash: int
    asked_s: float
    delivered_s: float
    waited_s: tuple[float, ...]
    bytes: tuple[int, ...]


class StepLog:
    """The last steps of a loader: one thread adds, others take.

    Args:
        most: steps that are kept; older ones are dropped, and counted.

    Attributes:
        added: steps that were ever added.
    """

    def __init__(self, most: int = 4096) -> None:
        self._last: deque[Step] = deque(maxlen=most)
        self.added = 0

    def add(self, step: Step) -> None:
        """Add one, and forget the oldest if there is no room."""
        self._last.append(step)
        self.added += 1

    def since(self, seen: int) -> tuple[NDArray[np.void], int]:
        """Steps that were added after the first `seen`, as far as they are still there.

        Returns:
            The steps, dtype `STEP`, shape (steps,), and the number to ask with next time.
        """
        added, last = self.added, list(self._last)
        # One may have been added between the two looks: it comes again rather than being lost.
        fresh = max(0, min(len(last), added - seen))
        return np.array([tuple(step) for step in last[len(last) - fresh :]], STEP), added
