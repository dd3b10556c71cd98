"""Wait: what batches were doing while somebody waited for them; for many at once.

Each wait, from the moment that the consumer asked until it had its batch, is cut along the way that this
batch took. The phases of a wait add up to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["PHASES", "Aside", "Waits", "waits"]

PHASES: Final = ("hold", "open", "read", "queue", "decode", "collate", "transfer", "hand")
"""What an awaited batch was doing, in its order: `hold`: its reads had not begun, for want of room, of
the right to read, or of an earlier request; `open`: paths were looked up and files opened; `read`: reads
were under way; `queue`: its bytes waited for a thread or process to decode them; `decode`; `collate`;
`transfer`: to pinned memory or the device; `hand`: it was ready, and on its way to its consumer."""

_HOLD, _OPEN, _READ, _QUEUE, _DECODE, _COLLATE, _TRANSFER, _HAND = range(len(PHASES))


class Waits(NamedTuple):
    """What was waited for, at each of some deliveries."""

    phases: NDArray[np.float64]
    """Seconds, shape (deliveries, phases)."""
    room_s: NDArray[np.float64]
    """How long the reads that were waited for had waited for room; shape (deliveries,)."""
    held_s: NDArray[np.float64]
    """How long a limit had held them back; shape (deliveries,)."""


class Aside(NamedTuple):
    """Detours: what consumers were busy with while their own batches were ready. One of each, at most."""

    rows: NDArray[np.int64]
    """Of which deliveries; shape (detours,)."""
    until_s: NDArray[np.float64]
    """When each was over; shape (detours,)."""
    came: NDArray[np.void]
    """How the batch that was waited for instead had come; dtype `WAY`, shape (detours,)."""


def waits(
    asked_s: NDArray[np.float64],
    delivered_s: NDArray[np.float64],
    came: NDArray[np.void],
    asides: Sequence[Aside] = (),
) -> Waits:
    """Cut waits into their phases.

    Args:
        asked_s: when the consumer asked for each batch, monotonic; shape (deliveries,).
        delivered_s: when it had it; shape (deliveries,).
        came: how each came, dtype `WAY`, shape (deliveries,). Nothing is known of a way without a moment:
            all of its wait is `read`.
        asides: what else each was waited with: the first detours, the second, and so on.
    """
    done_s = _done_s(came)
    delivered_s = np.maximum(asked_s, delivered_s)
    found, at = _along(asked_s, delivered_s, came)
    straight = np.ones(len(came), np.bool_)
    for first in asides[:1]:
        straight[first.rows] = False
    later = (done_s > asked_s) | straight
    room_s, held_s = came["room_s"] * later, came["held_s"] * later
    for rows, until_s, others in asides:
        room_s[rows] += others["room_s"]
        held_s[rows] += others["held_s"]
        part, reached = _aside(at[rows], np.minimum(until_s, delivered_s[rows]), others)
        found[rows] += part
        at[rows] = reached
    found[:, _HAND] += delivered_s - at
    found = np.where(
        (came["serial"] > 0.0)[:, None], _shared_out(asked_s, delivered_s, came), found
    )
    unknown = done_s == 0.0
    found[unknown] = 0.0
    found[unknown, _READ] = (delivered_s - asked_s)[unknown]
    return Waits(found, room_s, held_s)


def _done_s(came: NDArray[np.void]) -> NDArray[np.float64]:
    """When each could be handed over; 0.0: not known."""
    done_s = came["moved_s"].copy()
    for name in ("collated_s", "decoded_s", "ready_s"):
        done_s = np.where(done_s > 0.0, done_s, came[name])
    return done_s


def _open_share(came: NDArray[np.void]) -> NDArray[np.float64]:
    """Of the time of its reads, that for opening files."""
    share = np.zeros(len(came))
    np.divide(came["open_s"], came["read_s"], out=share, where=came["read_s"] > 0.0)
    return np.minimum(share, 1.0)


class _Walk:
    """Goes along ways from one moment to the next, no further than an end.

    Attributes:
        found: seconds in each phase so far, shape (ways, phases).
        at_s: where each has got to.
    """

    def __init__(self, at_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> None:
        self.found = np.zeros((len(at_s), len(PHASES)))
        self.at_s = at_s
        self._end_s = end_s

    def to(self, moment_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Go on to a moment, and return how long that took; 0 where it is past."""
        reached_s = np.maximum(self.at_s, np.minimum(moment_s, self._end_s))
        took_s: NDArray[np.float64] = reached_s - self.at_s
        self.at_s = reached_s
        return took_s

    def read(self, came: NDArray[np.void]) -> None:
        """Go on until all was read."""
        self.found[:, _HOLD] = self.to(came["taken_s"])
        self.found[:, _OPEN] = self.to(came["planned_s"])
        self.found[:, _HOLD] += self.to(came["begun_s"])
        reading_s = self.to(came["ready_s"])
        opened_s = reading_s * _open_share(came)
        self.found[:, _OPEN] += opened_s
        self.found[:, _READ] = reading_s - opened_s


def _along(
    asked_s: NDArray[np.float64], delivered_s: NDArray[np.float64], came: NDArray[np.void]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What batches did from when they were asked for until they were done; and when that was."""
    walk = _Walk(asked_s, delivered_s)
    walk.read(came)
    for phase, name in (
        (_QUEUE, "decoding_s"), (_DECODE, "decoded_s"), (_COLLATE, "collated_s"), (_TRANSFER, "moved_s"),
    ):  # fmt: skip
        walk.found[:, phase] = walk.to(came[name])
    return walk.found, walk.at_s.copy()


def _aside(
    at_s: NDArray[np.float64], until_s: NDArray[np.float64], came: NDArray[np.void]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What later batches did while the consumer was busy with them; after it was read, that is `hand`."""
    walk = _Walk(at_s, until_s)
    walk.read(came)
    walk.found[:, _HAND] = walk.to(until_s)
    return walk.found, walk.at_s


def _shared_out(
    asked_s: NDArray[np.float64], delivered_s: NDArray[np.float64], came: NDArray[np.void]
) -> NDArray[np.float64]:
    """Waits for batches that one process made from beginning to end, one thing after the other.

    Whatever of it a wait fell on, all of it took that process's time: it is shared out as that was.
    """
    made_s = came["collated_s"]
    for name in ("decoded_s", "ready_s"):
        made_s = np.where(made_s > 0.0, made_s, came[name])
    begun_s = came["taken_s"]
    for name in ("begun_s", "decoding_s"):
        begun_s = np.where(begun_s > 0.0, begun_s, came[name])
    ready_s = np.where(came["ready_s"] > 0.0, came["ready_s"], begun_s)
    done_s = np.minimum(np.maximum(asked_s, made_s), delivered_s)
    moved_s = np.minimum(np.maximum(done_s, came["moved_s"]), delivered_s)
    read_s = np.maximum(0.0, ready_s - begun_s)
    decode_s = np.maximum(0.0, came["decoded_s"] - came["decoding_s"])
    collate_s = np.maximum(0.0, came["collated_s"] - came["decoded_s"])
    total_s = read_s + decode_s + collate_s
    scale = np.zeros(len(came))
    np.divide(done_s - asked_s, total_s, out=scale, where=total_s > 0.0)
    opened_s = read_s * _open_share(came)
    found = np.zeros((len(came), len(PHASES)))
    found[:, _OPEN] = opened_s * scale
    found[:, _READ] = (read_s - opened_s) * scale
    found[:, _DECODE] = decode_s * scale
    found[:, _COLLATE] = collate_s * scale
    found[:, _TRANSFER] = moved_s - done_s
    found[:, _HAND] = delivered_s - moved_s + np.where(scale > 0.0, 0.0, done_s - asked_s)
    return found
