"""The files below one root, for all runs and jobs that open them, and the reads from their source.

What runs open next comes first, in their order, the runs in turn; the rest of the data set follows. How many
reads are in flight for both is the tuner's to say, as it is for a loader: towards it a root is a plane, whose
consumers are the programs. Nobody sees them wait: an open of an original is taken to last as long as a read of
ours, and all other time to be work. Larger files are read in pieces by threads of their own, after somebody
opened them.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.control.controller import Plane
from headrace.machine.host import is_remote
from headrace.node.files.copies import OVERHEAD_BYTES, PAGE, Copies, copy_bytes, sealed_copy
from headrace.node.files.tree import FAR_THREADS, IDENTITY, FileTree, TreeScan, identity
from headrace.node.served import Want
from headrace.plane.stage import ConsumerStats, StageStats, native_figures, own_knobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from headrace.node.files.copies import DescriptorBudget
    from headrace.node.files.disk_copies import DiskCopies
    from headrace.node.files.run import ProgramRun

_log = logging.getLogger("headrace.node")

READS_FIRST = 64  # reads in flight until the tuner knows better
QUEUED = 2  # files under way for each read in flight: none ends without a successor
LATENCY_READS = 16  # so many say how long a read takes
SILENCE_MAX_S = 2.0  # a program that opens nothing for longer neither waits nor works
BUFFER_BYTES = 128 << 20
BIG_BYTES = 16 << 20
"""Larger files are read in pieces, and not before somebody opened them or will soon."""

PIECE_BYTES = 1 << 20
PIECES = 8  # of one large file, read at a time
WAIT_S = 0.001
_ATTEMPTS = 3
_AGAIN_S = 0.05


@dataclass(slots=True, eq=False)
class _Demand:
    """What one run wants."""

    view: ProgramRun
    ahead: deque[int] = field(default_factory=deque)
    blocked: bool = False  # there was no room for the first of them
    rest: Iterator[int] | None = None
    tried: Iterator[int] | None = None  # the rest that was looked at last
    opened_s: float = field(default_factory=time.monotonic)  # when it opened files last


@dataclass(slots=True, eq=False)
class _Reading:
    path: bytes
    row: tuple[int, ...]
    job: Any  # a FileJob, or the Future of a check or of a large file


class FarReader:
    """Reads for one root. Thread-safe. Towards the controller it is the stage `ahead`."""

    name = "ahead"

    def __init__(self, root: bytes, copies: Copies, model: _native.SlowModel | None = None) -> None:
        self._copies = copies
        self._model = model
        self._root = root
        self._demands: dict[int, _Demand] = {}
        self._turn = 0
        self._reader: _native.FileReader | None = None
        self._pool = ThreadPoolExecutor(2, "headrace-node-large")
        self._attempts: dict[bytes, int] = {}
        self._again: deque[tuple[float, ProgramRun, int]] = deque()
        self._wake = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None
        self._allowed = READS_FIRST
        self._read: tuple[int, float] = (0, 0.0)
        self._latency_s = 0.0
        self._consumed = ConsumerStats()
        self.plane: Plane | None = None

    # -- the stage --------------------------------------------------------------------------------

    def stats(self) -> StageStats:
        """The native reader's; what was read has a copy at once."""
        native = {} if self._reader is None else self._reader.stats()
        return StageStats(
            name=self.name,
            samples=self._copies.figures.source_files,
            bytes=self._copies.figures.source_bytes,
            simulation="" if self._model is None else self._model.label,
            in_flight_s=native.get("busy_s", 0.0),
            **native_figures(native),
        )

    def knobs(self) -> Mapping[str, int]:
        """Reads in flight."""
        return {"reads_in_flight": self._allowed}

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Turn it; others belong to other stages.

        Raises ValueError if the value is not positive.
        """
        with self._wake:
            self._allowed = own_knobs(knobs, self.knobs()).get("reads_in_flight", self._allowed)
            if self._reader is not None:
                self._reader.turn(reads_in_flight=self._allowed)
            self._wake.notify_all()

    def consumer(self) -> ConsumerStats:
        """What all programs did: the mean of their waits and work, the sum of what they opened."""
        return self._consumed

    def opened(
        self, view: ProgramRun, files: int, nbytes: int, originals: int, processes: int
    ) -> None:
        """A run has opened files, some of them where they lie, in so many processes."""
        latency_s = self._latency_now()
        with self._wake:
            now = time.monotonic()
            demand = self._demands.setdefault(id(view), _Demand(view))
            seconds = min(SILENCE_MAX_S, now - demand.opened_s)
            demand.opened_s = now
            waited_s = min(seconds, originals * latency_s / max(1, processes))
            runs = sum(one.opened_s > now - SILENCE_MAX_S for one in self._demands.values())
            so_far = self._consumed
            self._consumed = ConsumerStats(
                waited_s=so_far.waited_s + waited_s / runs,
                worked_s=so_far.worked_s + (seconds - waited_s) / runs,
                batches=so_far.batches + files,
                samples=so_far.samples + files,
                bytes=so_far.bytes + nbytes,
            )

    def _latency_now(self) -> float:
        """Seconds that a read took lately; 0.0: nothing was read yet."""
        if self._reader is not None:
            stats = self._reader.stats()
            reads, busy_s = stats["reads"] - self._read[0], stats["busy_s"] - self._read[1]
            if reads >= LATENCY_READS:
                self._read = stats["reads"], stats["busy_s"]
                self._latency_s = busy_s / reads
        return self._latency_s

    # -- what runs ask ----------------------------------------------------------------------------

    def want(self, view: ProgramRun, files: NDArray[np.int64], *, anew: bool = False) -> None:
        """A run opens these next, in this order, after those that it wanted before (unless `anew`).

        None of them: it has opened some, and there may be room now.
        """
        with self._wake:
            demand = self._demands.setdefault(id(view), _Demand(view))
            if anew:
                demand.ahead.clear()
            demand.ahead.extend(files.tolist())
            demand.blocked = False
            if demand.ahead:
                self._go()

    def want_rest(self, view: ProgramRun, files: Iterator[int] | None) -> None:
        """A run opens these at some time; replaces what it said before."""
        with self._wake:
            self._demands.setdefault(id(view), _Demand(view)).rest = files
            self._go()

    def has_rest(self, view: ProgramRun) -> bool:
        """Whether some of what a run opens at some time was not looked at yet."""
        demand = self._demands.get(id(view))
        return demand is not None and demand.rest is not None

    def report(self) -> dict[str, Any]:
        """What the tuner does; {}: nothing was read yet."""
        from headrace.control.explain import plane_report

        return {} if self.plane is None else plane_report(self.plane, changes=12)

    def forget(self, view: ProgramRun) -> None:
        """A run is over."""
        with self._wake:
            self._demands.pop(id(view), None)
            self._again = deque(item for item in self._again if item[1] is not view)

    def close(self) -> None:
        """End the threads; a read that the storage never answers is left behind."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        if self.plane is not None:
            self.plane.close()
        if self._thread is not None:
            self._thread.join(5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _go(self) -> None:
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(
                target=self._work, name="headrace-node-files", daemon=True
            )
            self._thread.start()
            # What is read goes into copies, whose memory is the daemon's to share out.
            name = os.fsdecode(self._root)
            self.plane = Plane(
                f"files below {name}", [self], self.consumer, frozen=["buffer_bytes"], source=name,
                published=False,
            )  # fmt: skip
            self.plane.wake()
        self._wake.notify_all()

    # -- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        readings: deque[_Reading] = deque()
        try:
            while not self._ended:
                self._begin(readings)
                if readings:
                    self._finish(readings)
                else:
                    with self._wake:
                        waiting = any(
                            (demand.ahead and not demand.blocked) or demand.rest is not None
                            for demand in self._demands.values()
                        )
                        if not self._ended and not waiting:
                            self._wake.wait(_AGAIN_S if self._again else None)
        except Exception:  # noqa: BLE001 - programs go on without it
            _log.exception("%s is not read any more", os.fsdecode(self._root))
        finally:
            for reading in readings:
                self._copies.cancel(reading.path)
            if self._reader is not None:
                self._reader.close()

    def _begin(self, readings: deque[_Reading]) -> None:
        while not self._ended and len(readings) < QUEUED * self._allowed:
            item = self._next()
            if item is None:
                break
            reading = self._start(*item)
            if reading is not None:
                readings.append(reading)

    def _next(self) -> tuple[ProgramRun, int, bool] | None:
        """The next file to read: (run, number, whether it is opened soon)."""
        with self._wake:
            demands = list(self._demands.values())
            for k in range(len(demands)):
                demand = demands[(self._turn + k) % len(demands)]
                if demand.ahead and not demand.blocked:
                    self._turn += k + 1
                    return demand.view, demand.ahead.popleft(), True
            if self._again and self._again[0][0] <= time.monotonic():
                _, view, file = self._again.popleft()
                return view, file, False
            for demand in demands:
                if demand.rest is not None:
                    demand.tried = demand.rest
                    file = next(demand.rest, -1)
                    if file >= 0:
                        return demand.view, file, False
                    demand.rest = None
            return None

    def _start(self, view: ProgramRun, file: int, ahead: bool) -> _Reading | None:
        """Begin to read or check a file; None: there is nothing to do, or no room."""
        path = view.paths[file]
        row = view.identity(file)
        if not self._copies.wanted(path) or (ahead and not view.awaited(file)):
            return None
        job: Any
        left = self._copies.reserve_left(path, row)
        if left is not None:
            disk = self._copies.disk
            job = self._pool.submit(lambda: left if disk is not None and disk.check(left) else None)
        elif self._copies.reserve(path, row[2], (view, file) if ahead else None) is None:
            self._no_room(view, file, ahead=ahead)
            return None
        elif row[2] > BIG_BYTES:
            job = self._pool.submit(self._read_big, path, row)
        else:
            if self._reader is None:
                self._reader = _native.FileReader(
                    reads_in_flight=self._allowed,
                    buffer_bytes=BUFFER_BYTES,
                    simulate=self._model,
                    simulated_roots=[os.fsdecode(self._root)],
                )
            job = self._reader.submit([path], view.stats[file : file + 1, IDENTITY])
        return _Reading(path, row, job)

    def _no_room(self, view: ProgramRun, file: int, *, ahead: bool) -> None:
        """What comes soon waits until others were opened; the rest is left alone."""
        with self._wake:
            demand = self._demands.get(id(view))
            if demand is None or not self._copies.wanted(view.paths[file]):
                return
            if not ahead:
                if demand.rest is demand.tried:  # else there may be room now: it came anew
                    demand.rest = None
            elif copy_bytes(int(view.stats[file, 2])) <= self._copies.quota_bytes:
                demand.ahead.appendleft(file)
                demand.blocked = True

    def _finish(self, readings: deque[_Reading]) -> None:
        """Place what has been read; waits a little for the oldest."""
        first = readings[0]
        if isinstance(first.job, Future):
            if not first.job.done():
                time.sleep(WAIT_S / 5)
        else:
            first.job.wait(WAIT_S)
        for _ in range(len(readings)):
            reading = readings.popleft()
            of_thread = isinstance(reading.job, Future)
            if not (reading.job.done() if of_thread else reading.job.done):
                readings.append(reading)
            elif of_thread:
                self._take_future(reading)
            else:
                self._take(reading)

    def _take(self, reading: _Reading) -> None:
        batch = reading.job.wait(0.0)
        error = int(batch.errors[0])
        was = batch.dev[0], batch.ino[0], batch.size[0], batch.mtime_ns[0], batch.ctime_ns[0]
        if error == errno.ESTALE and self._once_more(reading):
            self._copies.cancel(reading.path)
            return
        if error == 0 and tuple(map(int, was)) != reading.row:
            error = errno.ESTALE
        if error:
            self._failed(reading, OSError(error, os.strerror(error)))
            return
        start = int(batch.offsets[0])
        self._place(reading, batch.data[start : start + int(batch.lengths[0])])

    def _once_more(self, reading: _Reading) -> bool:
        """Whether a file that was changed just now is to be read again; what it is now counts."""
        tries = self._attempts[reading.path] = self._attempts.get(reading.path, 0) + 1
        if tries > _ATTEMPTS:
            return False
        with self._wake:
            for demand in self._demands.values():
                file = demand.view.find(reading.path)
                if file >= 0:
                    self._again.append((time.monotonic() + _AGAIN_S, demand.view, file))
                    return True
        return False

    def _take_future(self, reading: _Reading) -> None:
        try:
            result = reading.job.result()
        except OSError as e:
            self._failed(reading, e)
            return
        if isinstance(result, int):
            if self._copies.reserved(reading.path) == "ram":
                self._count(reading)
                self._copies.place_memfd(reading.path, reading.row, result)
                return
            try:
                with mmap.mmap(result, reading.row[2], mmap.MAP_SHARED, mmap.PROT_READ) as data:
                    self._place(reading, data)
            finally:
                os.close(result)
        elif result is None:
            self._copies.damaged(reading.path)
            with self._wake:
                for demand in self._demands.values():
                    file = demand.view.find(reading.path)
                    if file >= 0:
                        demand.ahead.appendleft(file)
                        break
        else:
            self._copies.place_left(reading.path, reading.row, result)

    def _place(self, reading: _Reading, data: Any) -> None:
        self._count(reading)
        try:
            self._copies.place(reading.path, reading.row, data)
        except OSError as e:
            self._copies.figures.failed(f"{os.fsdecode(reading.path)}: {e}")

    def _count(self, reading: _Reading) -> None:
        self._copies.figures.source_files += 1
        self._copies.figures.source_bytes += reading.row[2]

    def _failed(self, reading: _Reading, error: OSError) -> None:
        """A file that cannot be read is left to the program, which will say so."""
        self._copies.cancel(reading.path)
        self._copies.spoiled.add(reading.path)
        self._copies.figures.failed(f"{os.fsdecode(reading.path)}: {error}")

    # -- large files ------------------------------------------------------------------------------

    def _read_big(self, path: bytes, row: tuple[int, ...]) -> int:
        """Read a large file in pieces into a sealed memfd."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if self._model is not None:
                self._model.open_delay()
            _same(fd, row)
            return sealed_copy(row[2], lambda copy: self._read_pieces(fd, copy, row))
        finally:
            os.close(fd)

    def _read_pieces(self, fd: int, copy: int, row: tuple[int, ...]) -> None:
        pieces = range(0, row[2], PIECE_BYTES)
        with ThreadPoolExecutor(PIECES, "headrace-node-piece") as pool:
            for _ in pool.map(lambda at: self._piece(fd, copy, at, row[2]), pieces):
                if self._ended:
                    raise OSError(errno.ECANCELED, "the daemon ends")
        _same(fd, row)
        if _native.changed_just_now(row[-1]):
            raise OSError(errno.ESTALE, "it was changed a moment ago")

    def _piece(self, fd: int, copy: int, at: int, size: int) -> None:
        end = min(size, at + PIECE_BYTES)
        if self._model is not None:
            error = self._model.read_delay(end - at)
            if error:
                raise OSError(error, os.strerror(error))
        while at < end and not self._ended:
            data = os.pread(fd, end - at, at)
            if not data:
                raise OSError(errno.ESTALE, "the file became shorter")
            at += os.pwrite(copy, data, at)


def _same(fd: int, row: tuple[int, ...]) -> None:
    """See that an open file is what it was.

    Raises:
        OSError: ESTALE: it is not.
    """
    if identity(os.fstat(fd)) != row:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


class RootFiles:
    """One root, by its resolved path; `model` is a simulated storage that it lies on.

    Attributes:
        far: whether copies are worth it: the file system is remote.
    """

    def __init__(
        self,
        path: bytes,
        *,
        descriptors: DescriptorBudget,
        disk: DiskCopies | None = None,
        model: _native.SlowModel | None = None,
    ) -> None:
        self.path = path
        self.model = model
        self.far = model is not None or is_remote(os.fsdecode(path))
        self.tree: FileTree | None = None  # what the last scan found; None: there was none
        self.copies = Copies(descriptors, disk)
        self.reader = FarReader(path, self.copies, model)
        self._counted: FileTree | None = None
        self._needed_bytes = 0
        self.users: dict[str, int] = {}  # runs that have it open, by job
        self.used_s = time.monotonic()

    def scan(self) -> TreeScan:
        """A scan that has not begun."""
        return TreeScan(self.path, threads=FAR_THREADS if self.far else 1, model=self.model)

    def enter(self, job: str) -> None:
        """A run of a job begins."""
        self.users[job] = self.users.get(job, 0) + 1
        self.used_s = time.monotonic()

    def leave(self, job: str) -> None:
        """It has ended."""
        self.used_s = time.monotonic()
        self.users[job] -= 1
        if not self.users[job]:
            del self.users[job]

    # -- a sharer of the daemon's memory ----------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Memory of copies."""
        return self.copies.held_bytes

    lingering_bytes = 0  # who still has a copy open, or mapped, has it to itself

    def want(self) -> Want:
        """What memory it could use."""
        if self.tree is not self._counted:
            self._counted = self.tree
            sizes = self.tree.stats[:, 2] if self.far and self.tree else np.zeros(0, int)
            pages = -(-sizes // PAGE) * PAGE
            self._needed_bytes = int(pages.sum()) + OVERHEAD_BYTES * len(sizes)
        return Want(self._needed_bytes, self.copies.held_bytes, frozenset(self.users), self.used_s)

    def set_quota(self, quota_bytes: int) -> None:
        """Hold at most so much from now on."""
        if quota_bytes != self.copies.quota_bytes:
            self.copies.set_quota(quota_bytes)

    def describe(self) -> dict[str, Any]:
        """Its state, for reports."""
        copies, figures, tree = self.copies, self.copies.figures, self.tree
        return {
            "root": self.path.decode(errors="replace"),
            "far": self.far,
            "files": len(tree) if tree is not None else 0,
            "unread": tree.unread if tree is not None else 0,
            "errors": [*(tree.errors if tree is not None else ()), *figures.errors],
            "jobs": sorted(self.users),
            "copies": len(copies),
            "quota_bytes": copies.quota_bytes,
            "held_bytes": copies.held_bytes,
            "disk_bytes": copies.disk_bytes,
            "disk_stopped": copies.disk_stopped,
            "in_flight": self.reader.stats().in_flight,
            "tuning": self.reader.report(),
            **{name: count for name, count in asdict(figures).items() if name != "errors"},
        }  # fmt: skip

    def close(self) -> None:
        """End reads, let go of copies in memory."""
        self.reader.close()
        self.copies.close()
