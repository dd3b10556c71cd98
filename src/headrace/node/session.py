"""Session: one client as the daemon sees it: what it asked for, what it holds, how much it may.

Knows no sockets: messages in, `send` out. A client's requests are answered in any order; those that
would make it (or its job) hold more than the window wait until leases come back. A request larger
than the window is begun when nothing else is held, so that it always comes to its turn.

All clients together hold no more than a part of the machine's memory, or of the control group's
(`WindowBudget`): what would not fit is not begun, and clients read those batches directly.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.causes import Cause
from headrace.machine.host import available_memory
from headrace.node import wire
from headrace.node.wire import WireError
from headrace.plane.batch_trace import reading_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from msgspec import Struct
    from numpy.typing import NDArray

    from headrace import _native
    from headrace.node.jobs import ClientJob, JobTotals
    from headrace.node.rate_limits import Charge
    from headrace.node.served import ReadOutcome, ServedData
    from headrace.node.server import Server
    from headrace.node.tuning import ServedPlane

_log = logging.getLogger("headrace.node")

READS_MAX = 64
"""Batches of one job that are read at a time: how many others may stand before one's own."""


REQUESTS_MAX: Final = 4096
"""Requests of one client without an answer. A client that keeps to it needs no more memory than their
indices take."""

WAITING_BYTES_MAX: Final = 64 << 20  # bytes of the indices of those that wait
ALL_SHARE: Final = 4
"""All clients' windows are a quarter of the memory: samples that are kept have half of it."""

WINDOW_MIN: Final = 1 << 20


@dataclass(slots=True)
class WindowBudget:
    """What all clients hold together."""

    bytes_max: int
    held_bytes: int = 0
    starved: bool = False  # somebody waits for what clients of other jobs hold

    def window(self, given_bytes: int) -> int:
        """A client's or a job's window: as given, but no more than half of all."""
        return max(WINDOW_MIN, min(given_bytes, self.bytes_max // 2))

    def fits(self, size_bytes: int) -> bool:
        """Whether so much more may be held; something always may where nothing is."""
        if not self.held_bytes or self.held_bytes + size_bytes <= self.bytes_max:
            return True
        self.starved = True
        return False


@dataclass(slots=True, eq=False)
class _Asked:
    """A request for a batch that has no answer yet."""

    ticket: int
    data: ServedData
    indices: NDArray[np.int64]
    size_bytes: int
    asked_s: float
    reserved_bytes: int = 0  # 0: it waits
    charge: Charge | None = None  # what was paid for it
    begun_s: float = 0.0
    held_s: float = 0.0  # that a limit on rates held it back, after it had let the one before it go


@dataclass(frozen=True, slots=True)
class _Lease:
    """A batch that the client may look at."""

    batch: _native.Batch
    held_bytes: int
    data: ServedData


_NUMBERED = (wire.Ask, wire.Open, wire.Files, wire.FilesAsked, wire.StatusAsked, wire.StopAsked)
"""Requests with a ticket of their own."""


class Session:
    """One client."""

    def __init__(self, host: Server, number: int, pid: int, send: Callable[..., None]) -> None:
        self._host = host
        self.number = number  # names it in logs and reports
        self.pid = pid  # 0: it is not known
        self._send = (
            send  # queues a message, with descriptors that stay open as long as an owner lives
        )
        self.job: ClientJob | None = None
        self.closed = False
        self.failed = False  # an answer was lost: it must be hung up on, or it would wait for ever
        self.leases: dict[int, _Lease] = {}
        self.held_bytes = 0
        self._last_ticket = 0
        self._data: dict[int, ServedData] = {}
        self._planes: set[ServedPlane] = set()  # that it told how its consumer fares
        self.requests: dict[int, _Asked] = {}  # all that have no answer, by ticket
        self.waiting: deque[_Asked] = deque()  # those of them that are not begun, the oldest first
        self.waiting_bytes = 0
        self._pumping = False
        self._has_files = False
        self._known: set[int] = set()  # buffers that the client has mapped
        self._announced: dict[int, set[int]] = {}  # slabs that it may have mapped, by data set
        self.behind: set[int] = set()  # data sets of which it has not been told everything
        self.reading = 0  # how many requests are begun and have no answer
        self._read_at_s = self._limited_since_s = 0.0
        self.batches = self.busy = 0
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            wire.Ask: self._ask,
            wire.Hurry: lambda request: self._hurry(request.ticket),
            wire.Release: lambda request: self._give_back(request.leases, abandoned=False),
            wire.Abandon: lambda request: self._give_back(request.leases, abandoned=True),
            wire.Open: lambda request: host.open(self, request),
            wire.Used: self._used,
            wire.Dropped: self._dropped,
            wire.Note: self._note,
            wire.Files: self._files,
            wire.FilesAsked: lambda request: self._report(request.ticket, host.files.report(self)),
            wire.StatusAsked: lambda request: self._report(request.ticket, host.describe(self)),
            wire.StopAsked: self._stop,
        }

    def handle(self, request: wire.Request) -> None:
        """Do what the client says. Raises WireError if it may not say that."""
        if self.job is None:
            self._hello(request)
            return
        handler = self._handlers.get(type(request))
        if handler is None:
            raise WireError(f"a second {type(request).__name__}")
        if isinstance(request, _NUMBERED):
            if request.ticket <= self._last_ticket:
                raise WireError(
                    f"ticket {request.ticket} after {self._last_ticket}: a message came twice"
                )
            self._last_ticket = request.ticket
        handler(request)

    def _report(
        self, ticket: int, state: Any, status: wire.ReplyStatus = wire.ReplyStatus.OK
    ) -> None:
        self._send(wire.DaemonReport(ticket, status, json.dumps(state).encode()))

    def _stop(self, request: wire.StopAsked) -> None:
        self._report(request.ticket, {}, wire.ReplyStatus.STOPPING)
        self._host.stop()

    def _hello(self, request: wire.Request) -> None:
        if not isinstance(request, wire.Hello):
            raise WireError(f"{type(request).__name__} before hello")
        ours = (wire.PROTOCOL, self._host.window_bytes, REQUESTS_MAX)
        if request.protocol != wire.PROTOCOL:
            text = f"the daemon speaks protocol {wire.PROTOCOL}, the client {request.protocol}"
            self._send(wire.Welcome(wire.ReplyStatus.VERSION, text, *ours))
            raise WireError(text)
        self.job = self._host.job(request.job)
        self.job.sessions.add(self)
        self._send(wire.Welcome(wire.ReplyStatus.OK, "", *ours))

    def _note(self, note: wire.Note) -> None:
        assert self.job is not None
        sessions = self.job.sessions
        if any(session.limited for session in sessions):
            under_way = Cause.POLICY
        elif any(session.reading for session in sessions):
            under_way = Cause.STORAGE
        elif any(session.waiting for session in sessions):
            under_way = Cause.WINDOW
        else:  # nothing is asked for: what the consumer waits for is its own workers
            under_way = Cause.DECODE
        self.job.totals.note(note, under_way)
        # Who asks for nothing consumes what others of its job ask for: its workers.
        asking = [self] if self._data else sessions
        planes = {data.tuning for session in asking for data in session.data()}
        self._planes |= planes
        for plane in planes:
            plane.note(self, note)

    def _files(self, request: wire.Files) -> None:
        if self._has_files:
            raise WireError("a second request for files")
        self._has_files = True
        self._host.files.serve(self, request)

    def say(self, message: Struct, fds: Sequence[int] = (), owner: object = None) -> None:
        """Queue a message for the client, with descriptors that stay open as long as `owner` lives."""
        if not self.closed:
            self._send(message, fds, owner)

    def opened(
        self, ticket: int, data: ServedData | None, status: wire.ReplyStatus, message: str
    ) -> None:
        """Answer `Open`."""
        if self.closed:
            return
        self._send(wire.Opened(ticket, status, message, data.number if data else 0))
        if data is None:
            return
        assert self.job is not None
        if data.number not in self._data:
            data.users[self.job.name] = data.users.get(self.job.name, 0) + 1
            self._data[data.number] = data
            self._planes.add(data.tuning)
            data.tuning.join(self)
        self.changed(data)

    # -- the cache, which the client has mapped -----------------------------------------------------

    def changed(self, data: ServedData) -> None:
        """Memory of a data set's cache came or went."""
        if data.number in self._data:
            self.behind.add(data.number)

    def announce(self) -> None:
        """Tell the client of memory that came or went."""
        for number in self.behind:
            self._announce(self._data[number])
        self.behind.clear()

    def _announce(self, data: ServedData) -> None:
        announced = self._announced.setdefault(data.number, set())
        slabs = data.slabs()
        gone = announced - {slab.identity for slab in slabs}
        if gone:
            announced -= gone
            self._send(wire.Gone(data.number, sorted(gone)))
        new = [slab for slab in slabs if slab.identity not in announced]
        for at in range(0, len(new), wire.FDS_MAX):
            some = new[at : at + wire.FDS_MAX]
            for slab in some:
                announced.add(slab.identity)
                data.mapped_by(self, slab)
            named = [(slab.identity, slab.number, slab.bytes) for slab in some]
            message = wire.Cache(data.number, data.samples_count, len(data.part_names), named)
            self._send(message, [slab.fd for slab in some], some)

    def _used(self, request: wire.Used) -> None:
        assert self.job is not None
        batches, samples, nbytes = request.batches, request.samples, request.bytes
        self._of(request.dataset).gathered(batches, samples, nbytes)
        self.job.totals.served(samples, nbytes, nbytes, batches)
        self.batches += batches

    def _dropped(self, request: wire.Dropped) -> None:
        data = self._of(request.dataset)
        for identity in request.identities:
            data.dropped_by(self, identity)
        self._host.share()

    def data(self) -> Collection[ServedData]:
        """The data sets that it has open."""
        return self._data.values()

    def _of(self, dataset: int) -> ServedData:
        data = self._data.get(dataset)
        if data is None:
            raise WireError(f"data set {dataset} is not open")
        return data

    # -- batches ----------------------------------------------------------------------------------

    def _ask(self, request: wire.Ask) -> None:
        self._give_back(request.released, abandoned=False)
        data = self._of(request.dataset)
        if len(request.indices) % 8 or len(request.indices) > 8 * wire.INDICES_MAX:
            raise WireError(f"indices of {len(request.indices)} bytes")
        waiting_bytes = self.waiting_bytes + len(request.indices)
        if len(self.requests) >= REQUESTS_MAX or waiting_bytes > WAITING_BYTES_MAX:
            raise WireError(f"more than {REQUESTS_MAX} requests wait")
        indices = np.frombuffer(request.indices, "<i8").astype(np.int64, copy=False)
        if len(indices) and not 0 <= indices.min() <= indices.max() < data.samples_count:
            raise WireError(f"indices {indices.min()} to {indices.max()} of {data.samples_count}")
        size = max(1, data.bytes_of(indices))
        asked = _Asked(request.ticket, data, indices, size, time.monotonic())
        self.requests[asked.ticket] = asked
        self.waiting.append(asked)
        self.waiting_bytes = waiting_bytes
        self.pump()

    def pump(self) -> None:
        """Begin requests that wait, as far as the windows reach."""
        if self._pumping:  # what is begun may end at once, and comes back here
            return
        self._pumping = True
        try:
            self._begin_waiting()
        finally:
            self._pumping = False

    def _begin_waiting(self) -> None:
        job = self.job
        while self.waiting and not self.closed and job is not None:
            asked = self.waiting[0]
            size = asked.size_bytes
            mine = not self.held_bytes or self.held_bytes + size <= self._host.window_bytes
            jobs = not job.held_bytes or job.held_bytes + size <= job.window_bytes
            if job.reading >= READS_MAX or not (mine and jobs and self._host.budget.fits(size)):
                return
            limits = self._host.rate_limits
            if limits is not None:
                asked.charge = limits.admit(self, job.name, asked.data, asked.indices)
                if asked.charge is None:  # the limits pump this session when they let it begin
                    self._limited_since_s = self._limited_since_s or time.monotonic()
                    return
            self.waiting.popleft()
            self.waiting_bytes -= asked.indices.nbytes
            if size > self._host.window_bytes and size > available_memory() // 2:
                del self.requests[asked.ticket]
                self._refuse(asked.ticket, f"{size} bytes are too many")
                continue
            asked.reserved_bytes = size
            self._begun(asked, job.totals)
            self._hold(size)
            job.reading += 1
            asked.data.ask(asked.indices, partial(self._done, asked))

    @property
    def limited(self) -> bool:
        """Whether it waits for what its job may take from a file system."""
        rate_limits = self._host.rate_limits
        return rate_limits is not None and rate_limits.holds(self)

    def _begun(self, asked: _Asked, totals: JobTotals) -> None:
        asked.begun_s = time.monotonic()
        if self._limited_since_s:
            asked.held_s = asked.begun_s - self._limited_since_s
            totals.took(Cause.POLICY, asked.held_s)
            self._limited_since_s = 0.0
        elif not self.reading:  # it waited for room, and for nothing that is read
            totals.took(Cause.WINDOW, asked.begun_s - max(asked.asked_s, self._read_at_s))
        self.reading += 1

    def _hold(self, size: int) -> None:
        assert self.job is not None
        self.held_bytes += size
        self.job.held_bytes += size
        self._host.budget.held_bytes += size

    def _done(self, asked: _Asked, outcome: ReadOutcome) -> None:
        """A read ended; the client may be gone."""
        try:
            self._answer(asked, outcome)
        except Exception:  # noqa: BLE001 - a mistake of ours must not cost others their answers
            _log.exception("client %d: batch %d has no answer", self.number, asked.ticket)
            self.failed = True

    def _answer(self, asked: _Asked, outcome: ReadOutcome) -> None:
        self._hold(-asked.reserved_bytes)
        assert self.job is not None
        crowded, self.job.reading = self.job.reading >= READS_MAX, self.job.reading - 1
        if self.closed or crowded:
            self._pump_others()
        if self.closed:
            return
        del self.requests[asked.ticket]
        self._count(asked, outcome)
        batch = outcome.batch
        if asked.charge is not None and outcome.bytes_read is not None:
            asked.charge.settle(outcome.bytes_read)
        if batch is None:
            self._refuse(asked.ticket, outcome.message)
        elif (memory := batch.shared) is None:
            self._refuse(asked.ticket, "not in shared memory")
        else:
            fd, buffer, capacity = memory
            batch.held(round(asked.held_s * 1e9))
            if buffer not in self._known:
                self._known.add(buffer)
                self._send(wire.Buffers([(buffer, capacity)]), (fd,), batch)
            self.leases[asked.ticket] = _Lease(batch, capacity, asked.data)
            self._hold(capacity)
            asked.data.tuning.leased_bytes += capacity
            self.batches += 1
            self._send(_samples(asked.ticket, buffer, batch, outcome.ram_bytes))
        self.pump()

    def _refuse(self, ticket: int, why: str) -> None:
        self._send(wire.Samples(ticket, wire.ReplyStatus.FAILED, why))

    def _count(self, asked: _Asked, outcome: ReadOutcome) -> None:
        assert self.job is not None
        totals, now = self.job.totals, time.monotonic()
        # Of reads at a time, each moment counts once; and not while the next is held back by a limit.
        at_s, end_s = max(asked.begun_s, self._read_at_s), min(now, self._limited_since_s or now)
        self.reading -= 1
        self._read_at_s = now
        planned_s = begun_s = ready_s = end_s
        if outcome.batch is None:
            totals.failed += 1
        else:
            estimated = asked.data.kept is not None
            size = int(outcome.batch.lengths.sum()) if estimated else asked.size_bytes
            totals.served(len(asked.indices), size, outcome.ram_bytes)
            planned_s, begun_s, ready_s = reading_of(outcome.batch.way)
        # One after the other: it waited for those before it, waited for room, was read, was handed on.
        reads = asked.data.tuning.held_back or Cause.STORAGE
        stages = (
            (planned_s, reads), (begun_s, Cause.PREFETCH), (ready_s, reads),
            (end_s, Cause.MEMORY if asked.data.kept is None else Cause.DECODE),
        )  # fmt: skip
        for stage_end_s, cause in stages:
            until_s = min(stage_end_s, end_s)
            totals.took(cause, max(0.0, until_s - at_s))
            at_s = max(at_s, until_s)

    def _hurry(self, ticket: int) -> None:
        """The client uses all that it has been given, and waits for this one."""
        asked = self.requests.get(ticket)
        assert self.job is not None
        # Who waits for others' reads, or behind requests of its own that are read, comes to its turn.
        comes = self.job.reading >= READS_MAX or self.limited
        if asked is not None and not asked.reserved_bytes and asked is not self.waiting[0]:
            comes = comes or any(a.reserved_bytes for a in self.requests.values())
        if asked is None or asked.reserved_bytes or comes:
            self._send(wire.Working(ticket, wire.ReplyStatus.WORKING))
            return
        # It waits for memory that only the client itself, or its job, can give back.
        del self.requests[ticket]
        self.waiting.remove(asked)
        self.waiting_bytes -= asked.indices.nbytes
        self.busy += 1
        self.job.totals.busy += 1
        self.job.totals.took(Cause.WINDOW, time.monotonic() - asked.asked_s)
        text = f"{self.held_bytes} bytes are held, the window is {self._host.window_bytes}"
        self._send(wire.Samples(ticket, wire.ReplyStatus.BUSY, text))

    def _give_back(self, leases: Collection[int], *, abandoned: bool) -> None:
        for ticket in leases:
            lease = self.leases.pop(ticket, None)
            if lease is None:
                raise WireError(f"lease {ticket} is not held: a message came twice")
            if abandoned:
                lease.batch.abandon()
            self._end(lease)
        if leases:
            self._pump_others()

    def _end(self, lease: _Lease) -> None:
        self._hold(-lease.held_bytes)
        lease.data.tuning.leased_bytes -= lease.held_bytes

    def _pump_others(self) -> None:
        """Something is free again."""
        budget = self._host.budget
        if budget.starved:
            budget.starved = False
            self._host.pump_all()
        elif self.job is not None:
            for session in tuple(self.job.sessions):
                session.pump()

    def retire(self, buffers: Sequence[int]) -> None:
        """Tell the client of buffers that are gone, if it has them."""
        gone = [b for b in buffers if b in self._known]
        self._known.difference_update(gone)
        for at in range(0, len(gone), wire.FDS_MAX):
            self._send(wire.Retired(gone[at : at + wire.FDS_MAX]))

    def close(self) -> None:
        """The client is gone. What it holds may be looked at still, by it or its children."""
        self.closed = True
        if self._has_files:
            self._host.files.end(self)
        if self._host.rate_limits is not None:
            self._host.rate_limits.forget(self)
        for lease in self.leases.values():
            lease.batch.abandon()
            self._end(lease)
        self.leases.clear()
        # What is being read for it is held until it comes: who comes and goes gets no more than others.
        self.requests.clear()
        self.waiting.clear()
        self.waiting_bytes = 0
        for plane in self._planes:
            plane.leave(self)
        job = self.job
        if job is None:
            return
        job.sessions.discard(self)
        for data in self._data.values():
            data.forget(self)
            data.users[job.name] -= 1
            if not data.users[job.name]:
                del data.users[job.name]
        self._pump_others()


def _samples(ticket: int, buffer: int, batch: _native.Batch, ram_bytes: int) -> wire.Samples:
    return wire.Samples(
        ticket, wire.ReplyStatus.OK, "", buffer, len(batch.data), batch.offsets.tobytes(),
        batch.lengths.tobytes(), batch.labels.tobytes(), ram_bytes, batch.way,
    )  # fmt: skip
