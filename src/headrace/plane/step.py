"""Step: what one delivery cost its consumer, and the log of the last ones."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.machine.host import HostCounters, read_host
from headrace.plane.interpreter import Contention, contention, delivered
from headrace.plane.stage import TIERS
from headrace.plane.wait import PHASES, Aside, waits
from headrace.plane.way import MADE, READ, Way, records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

_TOLD: Final = np.dtype(
    [
        ("epoch", "<u8"), ("step", "<u8"), ("position", "<u8"), ("order_hash", "<u8"), ("samples", "<u8"),
        ("asked_s", "<f8"), ("delivered_s", "<f8"),
        *((name, "<f8") for name in MADE.names or ()),
        # What had been seen in this process, up to this delivery.
        ("looks", "<f8"), ("contended", "<f8"), ("others_s", "<f8"),
        ("read", READ),
    ]
)  # fmt: skip
"""A delivery as it was told. What it means is worked out when somebody takes it."""

_PACKED: Final = struct.Struct(f"<5Q2d7d3d{READ.itemsize}s")
assert _PACKED.size == _TOLD.itemsize

_put: Final = _PACKED.pack_into


class StepLog:
    """The last steps of a loader: one thread adds, others take.

    Nothing is locked, and a step is no object: it is put into a ring of records with one call, and whoever
    takes steps copies them from there. Both happen while the interpreter's lock is held.

    Args:
        most: steps that are kept; older ones are dropped, and counted.

    Attributes:
        added: steps that were ever added.
        marks: what had been counted when the last passes began.
        first: is called once, by the next `came`: whoever takes steps can sleep until there are some.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        # Room for the one that is being put there, and for the one before the oldest, since when things were
        # seen: at first that is none.
        self._slots = most + 2
        self._ring = bytearray(self._slots * _PACKED.size)
        self._detours: deque[tuple[int, Sequence[Detour]]] = deque()
        self.added = 0
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.first: Callable[[], object] | None = None
        self._write(0, (0, 0, 0, 0), 0, (0.0, 0.0), _NOTHING)

    def _write(
        self,
        slot: int,
        place: tuple[int, int, int, int],
        samples: int,
        times: tuple[float, float],
        way: Way,
    ) -> None:
        looks, contended, _, others_s = contention()
        _put(
            self._ring, slot * _PACKED.size, *place, samples, *times,
            way.decoding_s, way.decoded_s, way.collated_s, way.moved_s, way.work_s, way.cpu_s, way.serial,
            looks, contended, others_s, way.read,
        )  # fmt: skip

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
        if way is None:
            way = _NOTHING
        elif way.detours:
            self._detours.append((self.added, way.detours))
            while self._detours[0][0] <= self.added - self._most:
                self._detours.popleft()
        self._write((self.added + 1) % self._slots, place, samples, times, way)
        self.added += 1
        if self.first is not None:
            first, self.first = self.first, None
            first()

    def since(self, seen: int) -> tuple[NDArray[np.void], int]:
        """Steps that were added after the first `seen`, as far as they are still there.

        Returns:
            The steps, read-only, dtype `STEP`, shape (steps,), and the number to ask with next time.
        """
        first, end, told = self._told(seen)
        if len(told) < 2:  # all of them may have been put over
            found = np.empty(0, STEP)
        else:
            detours = {at - first: each for at, each in list(self._detours) if first <= at < end}
            found = _rows_of(told, detours)
        found.flags.writeable = False
        return found, end

    def _told(self, seen: int) -> tuple[int, int, NDArray[np.void]]:
        """Steps since `seen`: the first one's number, that after the last's, and all, with the one before."""
        end = self.added
        first = max(seen, end - self._most)
        if first >= end:
            return seen, seen, np.empty(0, _TOLD)
        begin, stop = first % self._slots * _PACKED.size, (end + 1) % self._slots * _PACKED.size
        ring = self._ring
        raw = ring[begin:stop] if begin < stop else ring[begin:] + ring[:stop]
        told = np.frombuffer(raw, _TOLD)
        # Those that were put over others meanwhile.
        lost = max(0, self.added - self._most - first)
        return first + lost, end, told[lost:]


def _rows_of(told: NDArray[np.void], detours: Mapping[int, Sequence[Detour]]) -> NDArray[np.void]:
    """Work steps out.

    Args:
        told: dtype `_TOLD`, the one before the first, too; shape (deliveries + 1,).
        detours: by delivery.

    Returns:
        Dtype `STEP`, shape (deliveries,).
    """
    before, now = told[:-1], told[1:]
    rows = np.empty(len(now), STEP)
    for name in ("epoch", "step", "position", "order_hash", "samples", "asked_s", "delivered_s"):
        rows[name] = now[name]
    came = records(now["read"], now)
    found = waits(now["asked_s"], now["delivered_s"], came, _asides(detours))
    rows["waited_s"], rows["room_s"], rows["held_s"] = found.phases, found.room_s, found.held_s
    rows["bytes"] = now["read"]["bytes"]
    for name in _OF_THE_WAY:
        rows[name] = came[name]
    anew = now["looks"] < before["looks"]
    for name in ("looks", "contended", "others_s"):
        rows[name] = np.where(anew, now[name], np.maximum(0.0, now[name] - before[name]))
    return rows


_OF_THE_WAY: Final = (
    "reads", "read_s", "depth", "quiet_reads", "quiet_s", "work_s", "cpu_s", "serial",
)  # fmt: skip


def _asides(detours: Mapping[int, Sequence[Detour]]) -> list[Aside]:
    """The first detour of each delivery that has one, the second, and so on."""
    found: list[Aside] = []
    for turn in range(max(map(len, detours.values()), default=0)):
        those = [(row, *each[turn]) for row, each in detours.items() if len(each) > turn]
        rows, until_s, read = zip(*those, strict=True)
        came = records(np.frombuffer(b"".join(read), READ))
        found.append(Aside(np.array(rows), np.array(until_s, np.float64), came))
    return found
