"""Step: what one delivery cost its consumer, and the log of the last ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.machine.host import HostCounters, read_host
from headrace.plane.interpreter import Contention, contention, delivered
from headrace.plane.stage import TIERS
from headrace.plane.wait import PHASES, waits
from headrace.plane.way import Way, records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.plane.way import Detour

__all__ = ["PHASES", "STEP", "Mark", "StepLog"]

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


MARKS: Final = 64


class Mark(NamedTuple):
    """What had been counted when a pass delivered its first batch."""

    epoch: int
    added: int
    """Steps that had been added."""
    at_s: float
    contention: Contention
    host: HostCounters


_NOTHING: Final = Way()

_BLOCK: Final = 256
"""Steps; smaller blocks are put together."""


class _Came(NamedTuple):
    """A delivery as it was told. What it means is worked out when somebody takes it."""

    place: tuple[int, int, int, int]
    """Epoch, step, position and order hash."""
    samples: int
    times: tuple[float, float]
    way: Way
    detours: Sequence[Detour]
    before: Contention
    """What had been seen at the delivery before."""
    now: Contention


class _Rows(NamedTuple):
    """Steps that were worked out already."""

    end: int
    """The number of the one after the last."""
    blocks: tuple[NDArray[np.void], ...]
    """Dtype `STEP`, one after the other."""


class StepLog:
    """The last steps of a loader: one thread adds, others take.

    Nothing is locked: whoever takes works out what nobody did before, and two who do so at the same time
    find the same.

    Args:
        most: steps that are kept; older ones are dropped, and counted.

    Attributes:
        added: steps that were ever added.
        marks: what had been counted when the last passes began.
        first: is called once, by the next `came`: whoever takes steps can sleep until there are some.
    """

    def __init__(self, most: int = 4096) -> None:
        # With their numbers: one may be added while others are taken, and none is to be lost or come twice.
        self._last: deque[tuple[int, _Came]] = deque(maxlen=most)
        self._done = _Rows(0, ())
        self.added = 0
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.first: Callable[[], object] | None = None
        self._seen = contention()

    def came(
        self,
        place: tuple[int, int, int, int],
        samples: int,
        times: tuple[float, float],
        way: Way | None = None,
    ) -> None:
        """Add the delivery of a batch, and forget the oldest if there is no room.

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
        detours: Sequence[Detour] = ()
        if way is None:
            way = _NOTHING
        elif way.detours:
            detours, way.detours = way.detours, ()  # one of them may be this way itself
        came = _Came(place, samples, times, way, detours, before, self._seen)
        self._last.append((self.added, came))
        self.added += 1
        if self.first is not None:
            first, self.first = self.first, None
            first()

    def since(self, seen: int) -> tuple[NDArray[np.void], int]:
        """Steps that were added after the first `seen`, as far as they are still there.

        Returns:
            The steps, read-only, dtype `STEP`, shape (steps,), and the number to ask with next time.
        """
        last = list(self._last)
        if not last:
            return np.empty(0, STEP), seen  # `added` may have grown meanwhile
        first, done = max(seen, last[0][0]), self._worked_out(last)
        parts, at = [], done.end
        for block in reversed(done.blocks):
            if at <= first:
                break
            at -= len(block)
            parts.append(block[max(0, first - at) :])
        parts = parts or [np.empty(0, STEP)]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])
        found.flags.writeable = False
        return found, max(seen, done.end)

    def _worked_out(self, last: Sequence[tuple[int, _Came]]) -> _Rows:
        """All of `last`, and perhaps some that came before or later."""
        done, end = self._done, last[-1][0] + 1
        if done.end >= end:
            return done
        blocks = done.blocks if done.end >= last[0][0] else ()
        new = _rows_of([came for _, came in last[-(end - done.end) :]])
        if blocks and len(blocks[-1]) + len(new) <= _BLOCK:
            new, blocks = np.concatenate((blocks[-1], new)), blocks[:-1]
        blocks, kept = (*blocks, new), sum(map(len, blocks)) + len(new)
        while kept - len(blocks[0]) >= len(last):
            kept -= len(blocks[0])
            blocks = blocks[1:]
        self._done = done = _Rows(end, blocks)
        return done


def _rows_of(came: Sequence[_Came]) -> NDArray[np.void]:
    """Steps of dtype `STEP`, shape (deliveries,)."""
    place, samples, times, ways, detours, before, now = zip(*came, strict=True)
    rows = np.empty(len(came), STEP)
    # Unsigned, as a hash may need all of 64 bits.
    for name, column in zip(
        ("epoch", "step", "position", "order_hash"), np.array(place, np.uint64).T, strict=True
    ):
        rows[name] = column
    rows["samples"] = samples
    asked_s, delivered_s = np.array(times, np.float64).T
    rows["asked_s"], rows["delivered_s"] = asked_s, delivered_s
    found = waits(asked_s, delivered_s, ways, detours)
    rows["waited_s"], rows["room_s"], rows["held_s"] = found.phases, found.room_s, found.held_s
    rows["bytes"] = [way.bytes for way in ways]
    table = records(ways)
    for name in _OF_THE_WAY:
        rows[name] = table[name]
    looks, contended, _, others_s = _since(np.array(before), np.array(now)).T
    rows["looks"], rows["contended"], rows["others_s"] = looks, contended, others_s
    return rows


_OF_THE_WAY: Final = (
    "reads", "read_s", "depth", "quiet_reads", "quiet_s", "work_s", "cpu_s", "serial",
)  # fmt: skip


def _since(before: NDArray[np.float64], now: NDArray[np.float64]) -> NDArray[np.float64]:
    """`Contention.since` of many, shape (deliveries, 4)."""
    anew = (now[:, 0] < before[:, 0])[:, None]
    return np.where(anew, now, np.maximum(0.0, now - before))
