"""Way: how one batch came to its consumer: when it reached each point, and what it took there.

Stages stamp it as the batch passes them; `plane.wait` then says what the batch was doing while somebody
waited for it. Moments are monotonic seconds, which all processes of a machine share.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["WAY", "Detour", "Way", "records"]

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


Detour = tuple[float, Way]
"""Until when a consumer was busy with a later batch while its own was ready, and that batch's way."""


_MOMENTS: Final = (
    "taken_s", "planned_s", "begun_s", "ready_s", "decoding_s", "decoded_s", "collated_s", "moved_s",
    "room_s", "held_s", "reads", "read_s", "open_s", "depth", "quiet_reads", "quiet_s", "work_s", "cpu_s",
    "serial",
)  # fmt: skip

WAY: Final = np.dtype([(name, "<f8") for name in _MOMENTS])
"""A way as a record: all of its attributes but bytes and detours."""

_read = attrgetter(*_MOMENTS)


def records(ways: Iterable[Way]) -> NDArray[np.void]:
    """Ways as records of dtype `WAY`, shape (ways,)."""
    table = np.array([_read(way) for way in ways], np.float64).reshape(-1, len(_MOMENTS))
    return table.view(WAY)[:, 0]
