"""Way: how one batch came to its consumer: when it reached each point, and what it took there.

Stages stamp it as the batch passes them; `cut` then says what the batch was doing while somebody waited
for it. Moments are monotonic seconds, which all processes of a machine share.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Detour", "Way", "cut"]

now_s = time.perf_counter  # the clock of `time.monotonic`, and of the native core

_NOTHING: Final = (0.0,) * 8

_NO_BYTES: Final = (0,) * 5


class Way:
    """How one batch came. A moment of 0.0: it did not pass there, or that is not known.

    Attributes:
        taken_s: a thread that reads began with it.
        planned_s: its samples were found and their volumes open.
        begun_s: there was room for it, and its reads began.
        ready_s: its bytes were there.
        decoding_s: its first sample began to be decoded.
        decoded_s: its last sample was decoded.
        collated_s: its samples were put together.
        moved_s: it was in pinned memory, or on the device.
        room_s: how long its reads waited for room in the buffer; longer than anybody waited for it.
        held_s: how long a limit on rates held it back, after it had let the one before it go.
        reads: its reads from storage.
        read_s: seconds that they took, added up.
        open_s: of these, for opening files.
        depth: reads that were under way when each of these began, itself included, added up.
        quiet_reads: those that began while hardly any other was under way.
        quiet_s: seconds that these took, added up.
        work_s: seconds that threads spent on decoding it, added up.
        cpu_s: processor seconds of these.
        serial: whoever made it made nothing else meanwhile: no part hid behind another.
        bytes: by where they came from, in the order of `TIERS`.
        detours: what else the consumer's own thread waited for when it asked for this batch.
    """

    __slots__ = (
        "begun_s",
        "bytes",
        "collated_s",
        "cpu_s",
        "decoded_s",
        "decoding_s",
        "depth",
        "detours",
        "held_s",
        "moved_s",
        "open_s",
        "planned_s",
        "quiet_reads",
        "quiet_s",
        "read_s",
        "reads",
        "ready_s",
        "room_s",
        "serial",
        "taken_s",
        "work_s",
    )

    def __init__(self, native: Any = None) -> None:
        """Begin with what the native reader stamped.

        Args:
            native: a native batch; None, or one without stamps: nothing is known.
        """
        self.decoding_s = self.decoded_s = self.collated_s = self.moved_s = 0.0
        self.work_s = self.cpu_s = 0.0
        self.serial = False
        self.detours: Sequence[Detour] = ()
        stamps = getattr(native, "way", None)
        if stamps is None:
            self.taken_s = self.planned_s = self.begun_s = self.ready_s = 0.0
            self.room_s = self.held_s = self.read_s = self.open_s = self.quiet_s = 0.0
            self.reads = self.depth = self.quiet_reads = 0
            self.bytes: tuple[int, ...] = _NO_BYTES
            return
        (_, taken, planned, begun, ready, read, opened, self.reads, self.depth, quiet,
         self.quiet_reads, held, self.bytes) = stamps  # fmt: skip
        self.taken_s, self.planned_s, self.begun_s = taken * 1e-9, planned * 1e-9, begun * 1e-9
        self.ready_s = ready * 1e-9
        self.room_s = (begun - planned) * 1e-9 if planned else 0.0
        self.held_s = held * 1e-9
        self.read_s, self.open_s, self.quiet_s = read * 1e-9, opened * 1e-9, quiet * 1e-9

    @property
    def done_s(self) -> float:
        """When it could be handed over; 0.0: not known."""
        return self.moved_s or self.collated_s or self.decoded_s or self.ready_s

    @property
    def open_share(self) -> float:
        """Of the time of its reads, that for opening files."""
        return min(1.0, self.open_s / self.read_s) if self.read_s > 0.0 else 0.0

    def awaited(self, asked_s: float) -> tuple[Way, ...]:
        """What somebody waited for who asked for this batch then: its way if it was not done, and detours."""
        others = tuple(other for _, other in self.detours)
        return (self, *others) if self.done_s > asked_s or not others else others


Detour = tuple[float, Way]
"""Until when a consumer was busy with a later batch while its own was ready, and that batch's way."""


def cut(asked_s: float, delivered_s: float, way: Way | None) -> tuple[float, ...]:
    """Cut a wait into `PHASES`, which add up to it.

    Args:
        asked_s: when the consumer asked.
        delivered_s: when it had the batch.
        way: the batch's. None: nothing is known, and all is `read`.
    """
    if delivered_s <= asked_s:
        return _NOTHING
    if way is None or not way.done_s:
        return (0.0, 0.0, delivered_s - asked_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    if way.serial:
        return _shared_out(asked_s, delivered_s, way)
    found, at = _along(asked_s, delivered_s, way)
    for until, other in way.detours:
        if until > at:
            part, at = _along(at, min(until, delivered_s), other, whole=True)
            found = [one + more for one, more in zip(found, part, strict=True)]
    found[7] += delivered_s - at
    return tuple(found)


def _along(
    asked_s: float, delivered_s: float, way: Way, *, whole: bool = False
) -> tuple[list[float], float]:
    """What a batch did from a moment on, until it was done; and when that was.

    Args:
        asked_s: the moment.
        delivered_s: no later than this.
        way: the batch's.
        whole: until `delivered_s`: what comes after it was read counts as handing it over.
    """
    at = asked_s
    found = [0.0] * 8
    hold = 0.0
    if way.taken_s > at:
        hold, at = min(way.taken_s, delivered_s) - at, min(way.taken_s, delivered_s)
    if way.planned_s > at:
        end = min(way.planned_s, delivered_s)
        found[1], at = end - at, end
    if way.begun_s > at:
        end = min(way.begun_s, delivered_s)
        hold, at = hold + end - at, end
    found[0] = hold
    if way.ready_s > at:
        end = min(way.ready_s, delivered_s)
        opened = (end - at) * way.open_share
        found[1] += opened
        found[2], at = end - at - opened, end
    if whole:
        found[7] = delivered_s - at
        return found, delivered_s
    for phase, moment in enumerate(
        (way.decoding_s, way.decoded_s, way.collated_s, way.moved_s), start=3
    ):
        if moment > at:
            end = min(moment, delivered_s)
            found[phase], at = end - at, end
    return found, at


def _shared_out(asked_s: float, delivered_s: float, way: Way) -> tuple[float, ...]:
    """The wait for a batch that one process made from beginning to end, one thing after the other.

    Whatever of it the wait fell on, all of it took that process's time: it is shared out as that was.
    """
    done_s = min(max(asked_s, way.collated_s or way.decoded_s or way.ready_s), delivered_s)
    moved_s = min(max(done_s, way.moved_s), delivered_s)
    begun_s = way.taken_s or way.begun_s or way.decoding_s
    read_s = max(0.0, (way.ready_s or begun_s) - begun_s)
    opened_s = read_s * way.open_share
    decode_s = max(0.0, way.decoded_s - way.decoding_s)
    collate_s = max(0.0, way.collated_s - way.decoded_s)
    total_s = read_s + decode_s + collate_s
    scale = (done_s - asked_s) / total_s if total_s > 0.0 else 0.0
    hand_s = delivered_s - moved_s + (0.0 if scale else done_s - asked_s)
    return (
        0.0,
        opened_s * scale,
        (read_s - opened_s) * scale,
        0.0,
        decode_s * scale,
        collate_s * scale,
        moved_s - done_s,
        hand_s,
    )
