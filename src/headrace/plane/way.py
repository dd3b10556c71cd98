"""Way: how one batch came to its consumer: when it reached each point, and what it took there.

Stages stamp it as the batch passes them; `plane.wait` then says what the batch was doing while somebody
waited for it. Moments are monotonic, which all processes of a machine share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["MADE", "NOT_READ", "READ", "WAY", "Detour", "Way", "read_between", "records"]

READ: Final = np.dtype(
    [
        ("submitted_ns", "<i8"),
        ("taken_ns", "<i8"),  # a thread that reads began with it
        ("planned_ns", "<i8"),  # its samples were found and their volumes open
        ("begun_ns", "<i8"),  # there was room for it, and its reads began
        ("ready_ns", "<i8"),  # its bytes were there
        ("read_ns", "<i8"),  # that its reads from storage took, added up
        ("open_ns", "<i8"),  # of these, for opening files
        ("reads", "<u8"),  # from storage
        (
            "depth",
            "<u8",
        ),  # reads that were under way when each of these began, itself included, added up
        ("quiet_ns", "<i8"),  # that those took that began while hardly any other was under way
        ("quiet_reads", "<u8"),  # these
        ("held_ns", "<i8"),  # a limit on rates held it back, after it had let the one before it go
        ("bytes", "<u8", (len(TIERS),)),  # by where they came from
    ]
)
"""How a batch was read: `BatchWay` of `native/io/batch.h`, which readers give as bytes. A moment of 0: it did
not pass there, or that is not known."""

NOT_READ: Final = bytes(READ.itemsize)
"""Nothing is known."""

MADE: Final = np.dtype(
    [
        ("decoding_s", "<f8"),  # its first sample began to be decoded
        ("decoded_s", "<f8"),  # its last sample was decoded
        ("collated_s", "<f8"),  # its samples were put together
        ("moved_s", "<f8"),  # it was in pinned memory, or on the device
        ("work_s", "<f8"),  # that threads spent on decoding it, added up
        ("cpu_s", "<f8"),  # processor time of these
        (
            "serial",
            "<f8",
        ),  # not 0: whoever made it made nothing else meanwhile, no part hid behind another
    ]
)
"""What became of a batch after it was read; 0.0 as above."""

WAY: Final = np.dtype(
    [
        *((name, "<f8") for name in ("taken_s", "planned_s", "begun_s", "ready_s")),
        (
            "room_s",
            "<f8",
        ),  # its reads waited for room in the buffer, longer than anybody waited for it
        *((name, "<f8") for name in ("held_s", "read_s", "open_s", "quiet_s")),
        *((name, "<f8") for name in ("reads", "depth", "quiet_reads")),
        *((name, "<f8") for name in MADE.names or ()),
    ]
)
"""The whole of it but bytes, in seconds."""


def read_between(begun_s: float, ready_s: float, read_s: float, open_s: float) -> bytes:
    """How a batch was read, for whoever reads it by himself.

    Args:
        begun_s: when its reads began, monotonic.
        ready_s: when its bytes were there.
        read_s: that its reads took.
        open_s: of that, for opening files.

    Returns:
        A record of dtype `READ`.
    """
    found = np.zeros((), READ)
    found["taken_ns"] = found["planned_ns"] = found["begun_ns"] = round(begun_s * 1e9)
    found["ready_ns"] = round(ready_s * 1e9)
    found["read_ns"], found["open_ns"] = round(read_s * 1e9), round(open_s * 1e9)
    return found.tobytes()


class Way:
    """How one batch came.

    Args:
        read: how it was read, as a record of dtype `READ`.

    Attributes:
        detours: what else the consumer's own thread waited for when it asked for this batch.
        others: as in `MADE`.
    """

    __slots__ = (
        "collated_s",
        "cpu_s",
        "decoded_s",
        "decoding_s",
        "detours",
        "moved_s",
        "read",
        "serial",
        "work_s",
    )

    def __init__(self, read: bytes = NOT_READ) -> None:
        self.read = read
        self.decoding_s = self.decoded_s = self.collated_s = self.moved_s = 0.0
        self.work_s = self.cpu_s = 0.0
        self.serial = False
        self.detours: Sequence[Detour] = ()


Detour = tuple[float, bytes]
"""Until when a consumer was busy with a later batch while its own was ready, and how that one was read."""


def records(read: NDArray[np.void], made: NDArray[np.void] | None = None) -> NDArray[np.void]:
    """Ways as records.

    Args:
        read: dtype `READ`, shape (ways,).
        made: with all fields of `MADE`, shape (ways,); None: nothing became of them yet.

    Returns:
        Dtype `WAY`, shape (ways,).
    """
    found = np.zeros(len(read), WAY)
    for name in ("taken", "planned", "begun", "ready", "held", "read", "open", "quiet"):
        found[f"{name}_s"] = read[f"{name}_ns"] * 1e-9
    for name in ("reads", "depth", "quiet_reads"):
        found[name] = read[name]
    planned = read["planned_ns"] != 0
    found["room_s"] = np.where(planned, (read["begun_ns"] - read["planned_ns"]) * 1e-9, 0.0)
    if made is not None:
        for name in MADE.names or ():
            found[name] = made[name]
    return found
