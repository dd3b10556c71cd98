"""Batch traces: when a batch passed each stage on its way to its consumer, and what a step waited for.

Stages stamp a `BatchTrace` as the batch passes them. `StepLog` keeps the traces of the last deliveries in a
ring of records, and cuts each wait, from the moment that the consumer asked until it had its batch, into
phases along the trace: the phases of a wait add up to it. Moments are monotonic, which all processes of a
machine share.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.base.text import counted
from headrace.machine.host import HostCounters, read_host
from headrace.order import combine_hashes, order_hash
from headrace.plane.interpreter import Contention, contention, delivered
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.plane.batch import Skipped

log = logging.getLogger("headrace")


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
        ("depth", "<u8"),  # reads under way when each of these began, itself included, added up
        ("quiet_ns", "<i8"),  # that those took that began while hardly any other was under way
        ("quiet_reads", "<u8"),  # these
        ("held_ns", "<i8"),  # a limit on rates held it back, after it had let the one before it go
        ("bytes", "<u8", (len(TIERS),)),  # by where they came from
    ]
)
"""How a batch was read: `BatchWay` of `native/io/batch.h`, which readers give as bytes. A moment of 0: it did
not pass there, or that is not known."""

NOT_READ: Final = bytes(READ.itemsize)  # nothing is known

PREPARED: Final = np.dtype(
    [
        ("started_s", "<f8"),  # of an epoch's first batch: the epoch had begun, workers and all
        ("decoding_s", "<f8"),  # its first sample began to be decoded
        ("decoded_s", "<f8"),  # its last sample was decoded
        ("collated_s", "<f8"),  # its samples were put together
        ("moved_s", "<f8"),  # it was in pinned memory, or on the device
        ("work_s", "<f8"),  # that threads spent on decoding it, added up
        ("cpu_s", "<f8"),  # processor time of these
        ("serial", "<f8"),  # not 0: whoever made it made nothing else meanwhile
    ]
)
"""What became of a batch after it was read; 0.0 as above."""

TRACE: Final = np.dtype(
    [
        *((name, "<f8") for name in ("taken_s", "planned_s", "begun_s", "ready_s")),
        ("room_s", "<f8"),  # its reads waited for room in the buffer, whoever waited for it
        *((name, "<f8") for name in ("held_s", "read_s", "open_s", "quiet_s")),
        *((name, "<f8") for name in ("reads", "depth", "quiet_reads")),
        *((name, "<f8") for name in PREPARED.names or ()),
    ]
)
"""A whole trace but for the bytes, in seconds."""


_TIMES: Final = struct.Struct("<8x6q")  # the first fields of `READ`, from `taken_ns` to `open_ns`
assert _TIMES.size == READ.fields["open_ns"][1] + 8  # type: ignore[index]
_REST: Final = bytes(READ.itemsize - _TIMES.size)


def read_record(begun_s: float, ready_s: float, read_s: float, open_s: float) -> bytes:
    """How a batch was read, for whoever reads it by himself.

    Returns:
        A record of dtype `READ`.
    """
    begun_ns, ready_ns = round(begun_s * 1e9), round(ready_s * 1e9)
    times = _TIMES.pack(
        begun_ns, begun_ns, begun_ns, ready_ns, round(read_s * 1e9), round(open_s * 1e9)
    )
    return times + _REST  # numpy's own way takes 2 us


def reading_of(record: bytes) -> tuple[float, float, float]:
    """When a batch was planned, its reads began, and its bytes were there, of a record of dtype `READ`."""
    _, planned_ns, begun_ns, ready_ns, _, _ = _TIMES.unpack_from(record)
    return planned_ns * 1e-9, begun_ns * 1e-9, ready_ns * 1e-9


class BatchTrace:
    """When one batch passed each stage.

    Attributes:
        interruptions: what else the consumer's own thread waited for when it asked for this batch.
        left_out: its samples that could not be delivered, in no order: threads that decode add theirs.
        others: as in `PREPARED`.
    """

    __slots__ = (
        "collated_s",
        "cpu_s",
        "decoded_s",
        "decoding_s",
        "interruptions",
        "left_out",
        "moved_s",
        "read",
        "serial",
        "started_s",
        "work_s",
    )

    def __init__(self, read: bytes = NOT_READ) -> None:
        self.read = read
        self.started_s = self.decoding_s = self.decoded_s = self.collated_s = self.moved_s = 0.0
        self.work_s = self.cpu_s = 0.0
        self.serial = False
        self.interruptions: Sequence[Interruption] = ()
        self.left_out: list[Skipped] = []


Interruption = tuple[float, bytes]
"""Until when a consumer was busy with a later batch while its own was ready, and how that one was read."""


def traces_of(read: NDArray[np.void], prepared: NDArray[np.void] | None = None) -> NDArray[np.void]:
    """Traces as records, in seconds.

    Args:
        read: dtype `READ`, shape (batches,).
        prepared: with all fields of `PREPARED`, shape (batches,); None: nothing became of them yet.

    Returns:
        Dtype `TRACE`, shape (batches,).
    """
    records = np.zeros(len(read), TRACE)
    for name in ("taken", "planned", "begun", "ready", "held", "read", "open", "quiet"):
        records[f"{name}_s"] = read[f"{name}_ns"] * 1e-9
    for name in ("reads", "depth", "quiet_reads"):
        records[name] = read[name]
    planned = read["planned_ns"] != 0
    records["room_s"] = np.where(planned, (read["begun_ns"] - read["planned_ns"]) * 1e-9, 0.0)
    if prepared is not None:
        for name in PREPARED.names or ():
            records[name] = prepared[name]
    return records


PHASES: Final = ("start", "hold", "open", "read", "queue", "decode", "collate", "transfer", "hand")
"""What an awaited batch was doing, in its order: `start`: the epoch began, and workers were started;
`hold`: its reads had not begun, for want of room, of the right to read, or of an earlier request; `open`:
paths were looked up and files opened; `read`: reads were under way; `queue`: its bytes waited for a thread
or process to decode them; `decode`; `collate`; `transfer`: to pinned memory or the device; `hand`: it was
ready, and on its way to its consumer."""

_START, _HOLD, _OPEN, _READ, _QUEUE, _DECODE, _COLLATE, _TRANSFER, _HAND = range(len(PHASES))


class Waits(NamedTuple):
    """What was waited for, at each of some deliveries."""

    phases: NDArray[np.float64]  # seconds, shape (deliveries, phases)
    room_s: NDArray[np.float64]
    """How long the reads that were waited for had waited for room; shape (deliveries,)."""
    held_s: NDArray[np.float64]  # how long a limit had held them back; shape (deliveries,)


class Interruptions(NamedTuple):
    """Detours: what consumers were busy with while their own batches were ready. One of each, at most."""

    rows: NDArray[np.int64]  # of which deliveries; shape (interruptions,)
    until_s: NDArray[np.float64]  # when each was over; shape (interruptions,)
    traces: NDArray[np.void]
    """How the batch that was waited for instead had come; dtype `TRACE`, shape (interruptions,)."""


def waits(
    asked_s: NDArray[np.float64],
    delivered_s: NDArray[np.float64],
    traces: NDArray[np.void],
    interruptions: Sequence[Interruptions] = (),
) -> Waits:
    """Cut waits into their phases.

    Args:
        asked_s: when the consumer asked for each batch, monotonic; shape (deliveries,).
        delivered_s: when it had it; shape (deliveries,).
        traces: dtype `TRACE`, shape (deliveries,). Nothing is known of a trace without a moment:
            all of its wait is `read`.
        interruptions: what else each was waited with: the first of each, the second, and so on.
    """
    done_s = _done_s(traces)
    delivered_s = np.maximum(asked_s, delivered_s)
    started_s = np.minimum(np.maximum(asked_s, traces["started_s"]), delivered_s)
    asked_s, start_s = started_s, started_s - asked_s
    phases, at = _walk(asked_s, delivered_s, traces, _UNTIL_DONE)
    straight = np.ones(len(traces), np.bool_)
    for first in interruptions[:1]:
        straight[first.rows] = False
    later = (done_s > asked_s) | straight
    room_s, held_s = traces["room_s"] * later, traces["held_s"] * later
    for rows, until_s, others in interruptions:
        room_s[rows] += others["room_s"]
        held_s[rows] += others["held_s"]
        end_s = np.minimum(until_s, delivered_s[rows])
        part, reached = _walk(at[rows], end_s, others, _UNTIL_READ)
        at[rows] = np.maximum(reached, end_s)
        part[:, _HAND] = at[rows] - reached  # once it was read, it was on its way
        phases[rows] += part
    phases[:, _HAND] += delivered_s - at
    phases = np.where(
        (traces["serial"] > 0.0)[:, None], _shared_out(asked_s, delivered_s, traces), phases
    )
    unknown = done_s == 0.0
    phases[unknown] = 0.0
    phases[unknown, _READ] = (delivered_s - asked_s)[unknown]
    phases[:, _START] = start_s
    return Waits(phases, room_s, held_s)


def _done_s(traces: NDArray[np.void]) -> NDArray[np.float64]:
    """When each could be handed over; 0.0: not known."""
    done_s = traces["moved_s"].copy()
    for name in ("collated_s", "decoded_s", "ready_s"):
        done_s = np.where(done_s > 0.0, done_s, traces[name])
    return done_s


def _open_share(traces: NDArray[np.void]) -> NDArray[np.float64]:
    """Of the time of its reads, that for opening files."""
    share = np.zeros(len(traces))
    np.divide(traces["open_s"], traces["read_s"], out=share, where=traces["read_s"] > 0.0)
    return np.minimum(share, 1.0)


_UNTIL_READ: Final = (
    (_HOLD, "taken_s"), (_OPEN, "planned_s"), (_HOLD, "begun_s"), (_READ, "ready_s"),
)  # fmt: skip
_UNTIL_DONE: Final = (
    *_UNTIL_READ,
    (_QUEUE, "decoding_s"), (_DECODE, "decoded_s"), (_COLLATE, "collated_s"), (_TRANSFER, "moved_s"),
)  # fmt: skip


def _walk(
    at_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    traces: NDArray[np.void],
    moments: Sequence[tuple[int, str]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Go along traces from moment to moment, no further than an end.

    Returns:
        Seconds in each phase, shape (batches, phases), and where each has got to.
    """
    phases = np.zeros((len(traces), len(PHASES)))
    for phase, name in moments:
        reached_s = np.maximum(at_s, np.minimum(traces[name], end_s))
        phases[:, phase] += reached_s - at_s
        at_s = reached_s
    opened_s = phases[:, _READ] * _open_share(traces)
    phases[:, _OPEN] += opened_s
    phases[:, _READ] -= opened_s
    return phases, at_s


def _shared_out(
    asked_s: NDArray[np.float64], delivered_s: NDArray[np.float64], traces: NDArray[np.void]
) -> NDArray[np.float64]:
    """Waits for batches that one process made from beginning to end, one thing after the other.

    Whatever of it a wait fell on, all of it took that process's time: it is shared out as that was.
    """
    done_s = traces["collated_s"]
    for name in ("decoded_s", "ready_s"):
        done_s = np.where(done_s > 0.0, done_s, traces[name])
    begun_s = traces["taken_s"]
    for name in ("begun_s", "decoding_s"):
        begun_s = np.where(begun_s > 0.0, begun_s, traces[name])
    ready_s = np.where(traces["ready_s"] > 0.0, traces["ready_s"], begun_s)
    done_s = np.minimum(np.maximum(asked_s, done_s), delivered_s)
    moved_s = np.minimum(np.maximum(done_s, traces["moved_s"]), delivered_s)
    read_s = np.maximum(0.0, ready_s - begun_s)
    decode_s = np.maximum(0.0, traces["decoded_s"] - traces["decoding_s"])
    collate_s = np.maximum(0.0, traces["collated_s"] - traces["decoded_s"])
    total_s = read_s + decode_s + collate_s
    scale = np.zeros(len(traces))
    np.divide(done_s - asked_s, total_s, out=scale, where=total_s > 0.0)
    opened_s = read_s * _open_share(traces)
    phases = np.zeros((len(traces), len(PHASES)))
    phases[:, _OPEN] = opened_s * scale
    phases[:, _READ] = (read_s - opened_s) * scale
    phases[:, _DECODE] = decode_s * scale
    phases[:, _COLLATE] = collate_s * scale
    phases[:, _TRANSFER] = moved_s - done_s
    phases[:, _HAND] = delivered_s - moved_s + np.where(scale > 0.0, 0.0, done_s - asked_s)
    return phases


STEP: Final = np.dtype(
    [
        ("epoch", "<u4"),
        ("step", "<u4"),  # within the epoch's pass, from 0
        ("position", "<u8"),  # global position of its first sample
        ("samples", "<u4"),  # asked for: positions that it took
        ("order_hash", "<u8"),  # of these samples at these positions; sums over an epoch
        ("left_out", "<u4"),  # of these samples, those that could not be delivered
        ("left_out_hash", "<u8"),  # theirs: what is delivered has `order_hash` less this one
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


class LeftOut(NamedTuple):
    """A sample that was to come at a position, and could not be delivered."""

    epoch: int
    step: int
    position: int
    sample: Skipped

    @property
    def order_hash(self) -> int:
        """Its share of its step's order hash."""
        return order_hash(self.position, np.array([self.sample.index], np.int64))


def _places_of(
    samples: Sequence[Skipped], place: tuple[int, int, int, int], asked: NDArray[np.int64]
) -> list[LeftOut]:
    """Where in its step each sample was to come; of one that comes there again, the first place is taken."""
    epoch, step, first, _ = place
    left_out, taken = [], Counter[int]()
    for sample in samples:
        slots = np.flatnonzero(asked == sample.index)
        slot = int(slots[taken[sample.index]])
        taken[sample.index] += 1
        left_out.append(LeftOut(epoch, step, first + slot, sample))
    return sorted(left_out, key=lambda each: each.position)


MARKS: Final = 64


class PassMark(NamedTuple):
    """What had been counted when a pass delivered its first batch."""

    epoch: int
    added: int  # steps that had been added
    at_s: float
    contention: Contention
    host: HostCounters


_NOTHING: Final = BatchTrace()

_NUMBERS: Final = (
    "epoch", "step", "position", "order_hash", "samples", "left_out", "left_out_hash",
)  # fmt: skip

_DELIVERY: Final = np.dtype(
    [
        *((name, "<u8") for name in _NUMBERS),
        ("asked_s", "<f8"), ("delivered_s", "<f8"),
        *((name, "<f8") for name in PREPARED.names or ()),
        # What had been seen in this process, up to this delivery.
        ("looks", "<f8"), ("contended", "<f8"), ("others_s", "<f8"),
        ("read", READ),
    ]
)  # fmt: skip
"""A delivery as it was added. What it means is worked out when somebody takes it."""

_PACKED: Final = struct.Struct(f"<7Q2d8d3d{READ.itemsize}s")
assert _PACKED.size == _DELIVERY.itemsize

_put: Final = _PACKED.pack_into


def _nobody_writes() -> None:
    pass


class StepLog:
    """The last steps of a loader: one thread adds, others take.

    Nothing is locked, and a step is no object: it is put into a ring of records with one call, and whoever
    takes steps copies them from there. Both happen while the interpreter's lock is held.

    Attributes:
        marks: what had been counted when the last passes began.
        left_out: the last samples that were left out, until somebody takes them from there.
        first: is called once, by the next `add`: whoever takes steps can sleep until there are some.
        settle: returns when whoever writes steps has written those so far.
        resumed: whether the loader was told, by a state, where to go on.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        # Room for the one that is being put there, and for the one before the oldest, since when things were
        # seen: at first that is none.
        self._slots = most + 2
        self._ring = bytearray(self._slots * _PACKED.size)
        self._interruptions: deque[tuple[int, Sequence[Interruption]]] = deque()
        self._warned = False
        self.added = 0  # steps that were ever added
        self.marks: deque[PassMark] = deque(maxlen=MARKS)
        self.left_out: deque[LeftOut] = deque(maxlen=most)
        self.first: Callable[[], object] | None = None
        self.settle: Callable[[], object] = _nobody_writes
        self.resumed = False
        self._write(0, (0, 0, 0, 0), (0, 0, 0), (0.0, 0.0), _NOTHING)

    def _write(
        self,
        slot: int,
        place: tuple[int, int, int, int],
        samples: tuple[int, int, int],
        times: tuple[float, float],
        trace: BatchTrace,
    ) -> None:
        looks, contended, _, others_s = contention()
        _put(
            self._ring, slot * _PACKED.size, *place, *samples, *times,
            trace.started_s, trace.decoding_s, trace.decoded_s, trace.collated_s, trace.moved_s,
            trace.work_s, trace.cpu_s, trace.serial,
            looks, contended, others_s, trace.read,
        )  # fmt: skip

    def add(
        self,
        place: tuple[int, int, int, int],
        samples: int,
        times: tuple[float, float],
        trace: BatchTrace | None = None,
        asked: NDArray[np.int64] | None = None,
    ) -> None:
        """Add the delivery of a batch, and forget the oldest if there is no room.

        Args:
            place: epoch, step, position and order hash.
            samples: positions that it was asked for, those included whose sample was left out.
            times: when it was asked for, and delivered.
            trace: complete; None: it is not known.
            asked: the samples themselves, where some of them may be left out; int64, shape (samples,).
        """
        if place[1] == 0:
            self.marks.append(
                PassMark(place[0], self.added, times[0], contention(), read_host(times[0]))
            )
        delivered(times[1], self, made_here=trace is not None and trace.serial)
        if trace is None:
            trace = _NOTHING
        elif trace.interruptions:
            self._interruptions.append((self.added, trace.interruptions))
            while self._interruptions[0][0] <= self.added - self._most:
                self._interruptions.popleft()
        numbers = samples, 0, 0
        if trace.left_out and asked is not None:
            self.warn_once(trace.left_out)
            left_out = _places_of(trace.left_out, place, asked)
            hashed = combine_hashes(*(each.order_hash for each in left_out))
            numbers = samples, len(left_out), hashed
            self.left_out.extend(left_out)
        self._write((self.added + 1) % self._slots, place, numbers, times, trace)
        self.added += 1
        if self.first is not None:
            first, self.first = self.first, None
            first()

    def warn_once(self, left_out: Sequence[Skipped]) -> None:
        """The first time that a delivery lacks samples, say so."""
        if left_out and not self._warned:
            self._warned = True
            log.warning(
                "on_error='skip' has left out %s so far; the loader's skipped lists all. The first: %s",
                counted(len(left_out), "sample"), left_out[0].reason,
            )  # fmt: skip

    def since(self, seen: int) -> tuple[NDArray[np.void], int]:
        """Steps that were added after the first `seen`, as far as they are still there.

        Returns:
            The steps, read-only, dtype `STEP`, shape (steps,), and the number to ask with next time.
        """
        first, end, deliveries = self._deliveries_since(seen)
        if len(deliveries) < 2:  # all of them may have been put over
            steps = np.empty(0, STEP)
        else:
            interruptions = {
                at - first: each for at, each in list(self._interruptions) if first <= at < end
            }
            steps = _rows_of(deliveries, interruptions)
        steps.flags.writeable = False
        return steps, end

    def _deliveries_since(self, seen: int) -> tuple[int, int, NDArray[np.void]]:
        """Steps since `seen`: the first one's number, that after the last's, and all, with the one before."""
        end = self.added
        first = max(seen, end - self._most)
        if first >= end:
            return seen, seen, np.empty(0, _DELIVERY)
        begin, stop = first % self._slots * _PACKED.size, (end + 1) % self._slots * _PACKED.size
        ring = self._ring
        raw = ring[begin:stop] if begin < stop else ring[begin:] + ring[:stop]
        deliveries = np.frombuffer(raw, _DELIVERY)
        # Those that were put over others meanwhile.
        lost = max(0, self.added - self._most - first)
        return first + lost, end, deliveries[lost:]


def _rows_of(
    deliveries: NDArray[np.void], interruptions: Mapping[int, Sequence[Interruption]]
) -> NDArray[np.void]:
    """Work steps out.

    `deliveries` has dtype `_DELIVERY`, and the one before the first, too. Returns dtype `STEP`, one fewer.
    """
    before, now = deliveries[:-1], deliveries[1:]
    rows = np.empty(len(now), STEP)
    for name in (*_NUMBERS, "asked_s", "delivered_s"):
        rows[name] = now[name]
    traces = traces_of(now["read"], now)
    cut = waits(now["asked_s"], now["delivered_s"], traces, _by_turn(interruptions))
    rows["waited_s"], rows["room_s"], rows["held_s"] = cut.phases, cut.room_s, cut.held_s
    rows["bytes"] = now["read"]["bytes"]
    for name in _COPIED:
        rows[name] = traces[name]
    anew = now["looks"] < before["looks"]
    for name in ("looks", "contended", "others_s"):
        rows[name] = np.where(anew, now[name], np.maximum(0.0, now[name] - before[name]))
    return rows


_COPIED: Final = (
    "reads", "read_s", "depth", "quiet_reads", "quiet_s", "work_s", "cpu_s", "serial",
)  # fmt: skip


def _by_turn(interruptions: Mapping[int, Sequence[Interruption]]) -> list[Interruptions]:
    """The first detour of each delivery that has one, the second, and so on."""
    turns: list[Interruptions] = []
    for turn in range(max(map(len, interruptions.values()), default=0)):
        those = [(row, *each[turn]) for row, each in interruptions.items() if len(each) > turn]
        rows, until_s, read = zip(*those, strict=True)
        traces = traces_of(np.frombuffer(b"".join(read), READ))
        turns.append(Interruptions(np.array(rows), np.array(until_s, np.float64), traces))
    return turns
