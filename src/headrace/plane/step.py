"""Step: what one delivery cost its consumer, and the log of the last ones.

Each wait, from the moment that the consumer asked until it had its batch, is cut along the path that
this batch took: what it was doing while somebody waited for it. The phases of a wait add up to it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from headrace.machine.host import HostCounters, read_host
from headrace.plane.interpreter import Contention, contention, delivered
from headrace.plane.stage import TIERS
from headrace.plane.way import cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.plane.way import Way

__all__ = ["PHASES", "STEP", "Mark", "Step", "StepLog"]

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
        # What the wait alone does not show: the same batch, before somebody waited for it.
        ("room_s", "<f4"),  # reads that were waited for had waited for room in the buffer
        ("held_s", "<f4"),  # a limit on rates had held them back
        ("reads", "<u4"),  # from storage
        ("read_s", "<f4"),  # that these took, added up
        ("depth", "<u8"),  # reads under way when each of them began, itself included, added up
        ("quiet_reads", "<u4"),  # those that began while hardly any other was under way
        ("quiet_s", "<f4"),  # that these took, added up
        ("work_s", "<f4"),  # of threads that decoded it, added up
        ("cpu_s", "<f4"),  # their processor time
        ("serial", "?"),  # whoever made it made nothing else meanwhile
        # Since the step before: looks for the interpreter's lock, those at which it was taken, and the
        # processor time of Python threads of others meanwhile.
        ("looks", "<u4"),
        ("contended", "<u4"),
        ("others_s", "<f4"),
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
    room_s: float = 0.0
    held_s: float = 0.0
    reads: int = 0
    read_s: float = 0.0
    depth: int = 0
    quiet_reads: int = 0
    quiet_s: float = 0.0
    work_s: float = 0.0
    cpu_s: float = 0.0
    serial: bool = False
    looks: int = 0
    contended: int = 0
    others_s: float = 0.0


_NO_BYTES: Final = (0,) * len(TIERS)


MARKS: Final = 64


class Mark(NamedTuple):
    """What had been counted when a pass delivered its first batch."""

    epoch: int
    added: int
    """Steps that had been added."""
    at_s: float
    contention: Contention
    host: HostCounters


_Came: TypeAlias = (
    "tuple[tuple[int, int, int, int], int, tuple[float, float], Way | None, Contention, Contention]"
)
"""A delivery as it was told: place, samples, times, way, and what had been seen before it and at it."""


class StepLog:
    """The last steps of a loader: one thread adds, others take.

    Args:
        most: steps that are kept; older ones are dropped, and counted.

    Attributes:
        added: steps that were ever added.
        marks: what had been counted when the last passes began.
        first: is called once, by the next `add`: whoever takes steps can sleep until there are some.
    """

    def __init__(self, most: int = 4096) -> None:
        # With their numbers: one may be added while others are taken, and none is to be lost or come twice.
        self._last: deque[tuple[int, Step | _Came]] = deque(maxlen=most)
        self.added = 0
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.first: Callable[[], object] | None = None
        self._seen = contention()

    def add(self, step: Step | _Came) -> None:
        """Add one, and forget the oldest if there is no room."""
        self._last.append((self.added, step))
        self.added += 1
        if self.first is not None:
            first, self.first = self.first, None
            first()

    def came(
        self,
        place: tuple[int, int, int, int],
        samples: int,
        times: tuple[float, float],
        way: Way | None = None,
    ) -> None:
        """Add the delivery of a batch. What it means is worked out when somebody takes it.

        Args:
            place: epoch, step, position and order hash.
            samples: positions that it was asked for, those included whose sample was left out.
            times: when it was asked for, and delivered.
            way: how it came, which is complete; None: that is not known.
        """
        if place[1] == 0:
            self.marks.append(
                Mark(place[0], self.added, times[0], contention(), read_host(times[0]))
            )
        delivered(times[1], self)
        before, self._seen = self._seen, contention()
        came = place, samples, times, way, before, self._seen
        if way is None or not way.detours:
            self.add(came)
            return
        self.add(_step_of(came))
        way.detours = ()  # one of them may be this way itself

    def since(self, seen: int) -> tuple[NDArray[np.void], int]:
        """Steps that were added after the first `seen`, as far as they are still there.

        Returns:
            The steps, dtype `STEP`, shape (steps,), and the number to ask with next time.
        """
        last = list(self._last)
        if not last:
            return np.empty(0, STEP), max(seen, self.added)
        begin = max(0, seen - last[0][0])
        steps = [step if isinstance(step, Step) else _step_of(step) for _, step in last[begin:]]
        return np.array(steps, STEP), max(seen, last[-1][0] + 1)


def _step_of(came: _Came) -> Step:
    (epoch, step, position, hashed), samples, (asked_s, delivered_s), way, before, now = came
    waited_s = cut(asked_s, delivered_s, way)
    if way is None:
        return Step(epoch, step, position, samples, hashed, asked_s, delivered_s, waited_s,
                    _NO_BYTES)  # fmt: skip
    awaited = way.awaited(asked_s)
    room_s = sum(each.room_s for each in awaited)
    held_s = sum(each.held_s for each in awaited)
    seen = now.since(before)
    return Step(
        epoch, step, position, samples, hashed, asked_s, delivered_s, waited_s, way.bytes,
        room_s, held_s, way.reads, way.read_s, way.depth, way.quiet_reads, way.quiet_s, way.work_s,
        way.cpu_s, way.serial, seen.looks, seen.contended, seen.others_s,
    )  # fmt: skip
