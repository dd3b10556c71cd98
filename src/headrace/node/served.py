"""ServedData: one data set that the daemon has open: its chain of stages, and the reads under way.

All of it happens in the daemon's loop, which the pipeline rings when batches are done, in whatever order they
are; only copies of megabytes are made in threads. A sample that somebody reads already is not read again:
whoever asks for the very same batch gets it too, and whoever asks for some of its samples waits until they are
in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import HeadraceError, VolumeError
from headrace.node.tuning import ServedPlane
from headrace.plane.pipeline import Pipeline, bytes_of, is_far
from headrace.plane.rate_limit import Cost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from headrace import _native
    from headrace.base.loop import Loop
    from headrace.config import ReaderOptions, TierOptions
    from headrace.plane.images import Images
    from headrace.plane.tiers import MemoryPending
    from headrace.store import Store

_log = logging.getLogger("headrace.node")

READS_MAX = 1 << 30

GATHER_HERE_MAX = 1 << 20  # a batch of fewer bytes is put together in the loop: 100 us
KEEPING_MAX = 64 << 20
"""Bytes that were handed out and wait to be copied into the memory for samples. With more, batches are handed
out when they have been copied; what is near, and read for one job alone, is left for the next epoch."""

LABEL_MAX = 40

_CLOSED = "the data set was closed"

_SLAB_SLACK = 4 << 20

_OF_REMOTE = ("requests", "retries", "hedges", "hedges_won", "failures")
"""What is reported of an object store, see `RemoteStats`."""


@dataclass(frozen=True, slots=True)
class Want:
    """What memory a data set, or the files of a root, could use."""

    needed_bytes: int  # for all samples or files
    held_bytes: int  # what it has now
    jobs: frozenset[str]  # who uses it; empty: nobody
    used_s: float  # when it was last used; any clock


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How a read ended."""

    batch: _native.Batch | None  # None: it failed
    message: str = ""
    ram_bytes: int = 0
    bytes_read: int | None = None
    """Bytes that came from the source rather than the page cache; None: not known."""


@dataclass(slots=True, eq=False)
class _Reading:
    """A batch that is being read."""

    number: int
    key: bytes
    indices: NDArray[np.int64]
    begun_s: float
    pending: MemoryPending
    waiters: list[Callable[[ReadOutcome], None]] = field(default_factory=list)
    postponed: list[_Postponed] = field(default_factory=list)
    part_of: _Postponed | None = None
    """What nobody else reads of a batch that waits for others' reads."""


@dataclass(slots=True, eq=False)
class _Postponed:
    """A request for samples that others read; it goes on when they have come."""

    indices: NDArray[np.int64]
    done: Callable[[ReadOutcome], None]
    others: int = 0  # reads that it waits for
    bytes_read: int = 0  # from the source, for it alone, meanwhile

    def answer(self, outcome: ReadOutcome) -> None:
        """The whole batch is there."""
        if outcome.bytes_read is not None and self.bytes_read:
            outcome = replace(outcome, bytes_read=outcome.bytes_read + self.bytes_read)
        self.done(outcome)


class ServedData:
    """Serves batches of one data set. All methods are for the daemon's loop alone."""

    def __init__(
        self,
        number: int,
        store: Store,
        part_names: Sequence[str],
        kept: Images | None = None,
        *,
        options: ReaderOptions,
        tiers: TierOptions,
        gathering: Executor,
        keeping: Executor,
        loop: Loop,
    ) -> None:
        self.number = number  # names it in messages
        self.store = store
        self.source_path, self.samples_count = store.path, len(store)
        self.part_names = tuple(part_names)
        self.users: dict[str, int] = {}  # sessions that have it open, by job
        self.used_s = time.monotonic()
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self.pipeline = Pipeline(
                store, options, self.part_names, tiers=tiers, done_fd=self._done_fd, kept=kept
            )
            self.chain = self.pipeline.begin()
        except BaseException:
            os.close(self._done_fd)
            raise
        assert self.chain.ram is not None  # `tiers` gives it a byte at least
        self._ram = self.chain.ram
        self.kept = kept  # what is done to its pictures, which are decoded once for all clients
        self.label = label_of(store.path, store.fingerprint) + ("-decoded" if kept else "")
        # Of a sample, as it is delivered; of pictures a guess, until some came.
        self._sample_bytes = store.nbytes / max(1, len(store))
        if kept is not None and kept.keep_short is not None:
            self._sample_bytes = min(16.0 * self._sample_bytes, 4.0 * kept.keep_short**2)
        self.tuning = ServedPlane(
            number, self.label, self.pipeline, options, loop.call_soon, source=store.path
        )
        self._deadline_s = options.deadline_s
        self._gathering = gathering  # threads that put batches together
        self._keeping = keeping  # a thread that copies what may as well be left
        self._loop = loop
        loop.register(self._done_fd, self._done)
        # Zeros that were never written to take no memory. 0: nobody reads the sample.
        self._reader_of = np.zeros(len(store), np.int32)
        self._readings: dict[int, _Reading] = {}
        self._by_key: dict[bytes, _Reading] = {}
        self._unread: dict[int, _Reading] = {}  # of these, those that are not done
        self._next = 1
        self._closed = False
        self._slabs_version = 0
        # By identity, memory of the cache that clients have been told of: its bytes, and who has it.
        self._mapped: dict[int, tuple[int, set[object]]] = {}
        self.batches = self.samples = self.bytes = self.ram_bytes = 0
        self.gathered_batches = self.gathered_bytes = 0
        self.shared_batches = self.postponed = self.failed = self.left = 0
        self._keeping_bytes = 0
        self._far = is_far(store, options) or kept is not None  # nobody decodes twice

    def bytes_of(self, indices: NDArray[np.int64]) -> int:
        """Bytes of these samples as they are delivered, all parts counted; of decoded ones an estimate."""
        if self.kept is not None:
            return int(len(indices) * self._sample_bytes)
        return bytes_of(self.store, indices)

    def want(self) -> Want:
        """What memory it could use."""
        data_bytes = int(self._sample_bytes * self.samples_count)
        needed = data_bytes + data_bytes // 8 + _SLAB_SLACK
        return Want(needed, self.held_bytes, frozenset(self.users), self.used_s)

    @property
    def held_bytes(self) -> int:
        """Memory of samples that are held."""
        return self._ram.held_bytes

    def set_quota(self, quota_bytes: int) -> None:
        """Hold at most so much from now on."""
        self._ram.turn({"cache_bytes": max(1, quota_bytes)})

    def cost_of(self, indices: NDArray[np.int64]) -> Cost:
        """What would come from the source for a batch now: not what tiers hold, nor what is being read."""
        if indices.tobytes() in self._by_key:
            return Cost()
        missing = self.chain.missing(indices)
        if self._keeps():
            missing = missing[self._reader_of[missing] == 0]
        if not len(missing):
            return Cost()
        return Cost(bytes_of(self.store, missing), len(missing))

    # -- memory that clients map -------------------------------------------------------------------

    def slabs(self) -> list[_native.Slab]:
        """The index and the slabs of the cache, as they are now."""
        return self._ram.cache.slabs()

    def slabs_changed(self) -> bool:
        """Whether any came or went since the last call."""
        version = self._ram.cache.version
        changed, self._slabs_version = version != self._slabs_version, version
        return changed

    def mapped_by(self, holder: object, slab: _native.Slab) -> None:
        """A client is told of a slab, and will map it."""
        self._mapped.setdefault(slab.identity, (slab.bytes, set()))[1].add(holder)

    def dropped_by(self, holder: object, identity: int) -> None:
        """A client has it mapped no more."""
        _, holders = self._mapped.get(identity, (0, set()))
        holders.discard(holder)
        if not holders:
            self._mapped.pop(identity, None)

    def forget(self, holder: object) -> None:
        """A client is gone, and its mappings with it."""
        for identity in tuple(self._mapped):
            self.dropped_by(holder, identity)

    @property
    def lingering_bytes(self) -> int:
        """Memory that was given back here, and that clients still have mapped."""
        now = {slab.identity for slab in self.slabs()}
        return sum(nbytes for identity, (nbytes, _) in self._mapped.items() if identity not in now)

    def gathered(self, batches: int, samples: int, nbytes: int) -> None:
        """A client has gathered so much by itself."""
        self.used_s = time.monotonic()
        self.batches += batches
        self.samples += samples
        self.bytes += nbytes
        self.ram_bytes += nbytes
        self.gathered_batches += batches
        self.gathered_bytes += nbytes

    # -- reads -------------------------------------------------------------------------------------

    def ask(self, indices: NDArray[np.int64], done: Callable[[ReadOutcome], None]) -> None:
        """Read a batch of indices that all are in the data set; `done` is called in the loop, once."""
        self.used_s = time.monotonic()
        same = self._by_key.get(indices.tobytes())
        if same is not None:
            self.shared_batches += 1
            same.waiters.append(done)
            return
        numbers = self._reader_of[indices]
        if not numbers.any() or not self._keeps():
            self._begin(indices, [done])
            return
        self.postponed += 1
        # What nobody reads is read meanwhile; who asks for it then waits for that.
        postponed = _Postponed(indices, done)
        missing = self._ram.missing(indices[numbers == 0])
        if len(missing):
            self._begin(missing, [], postponed)
        others = set(self._reader_of[indices].tolist()) - {0}
        postponed.others = len(others)
        for number in others:
            self._readings[number].postponed.append(postponed)

    def _keeps(self) -> bool:
        """Whether what is read now will probably be in memory afterwards."""
        quota = self._ram.knobs()["cache_bytes"]
        fits = quota > 1.05 * self._sample_bytes * self.samples_count
        return fits or self._ram.held_bytes < quota * 7 // 8

    def _begin(
        self,
        indices: NDArray[np.int64],
        waiters: list[Callable[[ReadOutcome], None]],
        part_of: _Postponed | None = None,
    ) -> None:
        try:
            if self._closed:
                raise VolumeError(_CLOSED)  # noqa: TRY301
            pending = self._ram.submit(indices)
        except Exception as e:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            outcome = self._failed(e)
            self.failed += len(waiters)
            for waiter in waiters:
                self._loop.call_soon(partial(waiter, outcome))
            return
        number, self._next = self._next, self._next % READS_MAX + 1
        reading = _Reading(
            number, indices.tobytes(), indices, time.monotonic(), pending, waiters, part_of=part_of
        )
        self._readings[number] = reading
        self._by_key[reading.key] = reading
        if pending.job is not None:  # else it is in memory: nobody need wait for it
            self._reader_of[indices] = number
        if pending.done:
            self._take(reading)
        else:
            self._unread[number] = reading

    def _done(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._done_fd)
        self.look()

    def look(self) -> None:
        """Take what is done, and give up what takes longer than the deadline."""
        late_s = time.monotonic() - self._deadline_s
        for number, reading in tuple(self._unread.items()):
            if reading.pending.done:
                del self._unread[number]
                self._take(reading)
            elif reading.begun_s < late_s:
                del self._unread[number]
                text = (
                    f"a batch of {len(reading.indices)} samples was not read within "
                    f"{self._deadline_s:g} s: it waits for {reading.pending.waits_for}"
                )
                self._finish(reading, ReadOutcome(None, text))

    def _take(self, reading: _Reading) -> None:
        crowded = self._keeping_bytes > KEEPING_MAX and not self._may_leave
        large = len(reading.indices) * self._sample_bytes >= GATHER_HERE_MAX
        copied = reading.pending.ram_bytes > 0 and large
        # The local disk's tier reads again what was damaged there, and so may wait.
        if crowded or copied or self.chain.disk is not None:
            self._gathering.submit(self._take_there, reading, crowded)
        else:  # shorter than the way to a thread and back
            self._finish(reading, self._taken(reading.pending))

    @property
    def _may_leave(self) -> bool:
        """Whether samples may be left for the next epoch: they are near, and nobody else wants them."""
        return not self._far and len(self.users) <= 1

    def _take_there(self, reading: _Reading, keep: bool) -> None:
        """Runs in a thread."""
        outcome = self._taken(reading.pending)
        try:
            if keep:
                reading.pending.keep()
        finally:
            self._loop.call_soon(lambda: self._finish(reading, outcome))

    def _taken(self, pending: MemoryPending) -> ReadOutcome:
        try:
            batch = pending.hand_over()
            if batch.failed:
                failure = self.store.catalog.failures(batch)[0]
                index = int(batch.indices[failure["slot"] // batch.parts])
                return ReadOutcome(None, str(self.store.failure_error(index, failure)))
        except Exception as e:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            return self._failed(e)
        # Of what the local disk has read, the statistics say nothing of their own.
        read = int(batch.stats["bytes_read"]) if self.chain.disk is None else None
        return ReadOutcome(batch, "", pending.ram_bytes, read)

    def _failed(self, error: Exception) -> ReadOutcome:
        if isinstance(error, (HeadraceError, OSError)):
            return ReadOutcome(None, str(error))
        if not self._closed:  # what a closed reader gives up is no failure
            _log.exception("data set %d: a batch failed", self.number)
        return ReadOutcome(None, f"{type(error).__name__}: {error}")

    def _finish(self, reading: _Reading, outcome: ReadOutcome) -> None:
        if self._by_key.get(reading.key) is reading:
            del self._by_key[reading.key]
        if outcome.batch is None:
            self.failed += len(reading.waiters)
        else:
            size = int(outcome.batch.lengths.sum())
            if self.kept is not None and outcome.batch.samples:
                self._sample_bytes += 0.1 * (size / outcome.batch.samples - self._sample_bytes)
            self.batches += len(reading.waiters)
            self.samples += outcome.batch.samples * len(reading.waiters)
            self.bytes += size * len(reading.waiters)
            self.ram_bytes += outcome.ram_bytes + size * max(0, len(reading.waiters) - 1)
        if reading.part_of is not None:
            reading.part_of.bytes_read += outcome.bytes_read or 0
        for waiter in reading.waiters:
            waiter(outcome)
        pending = reading.pending
        size = 0 if pending.read is None or self._closed else pending.read.data.nbytes
        if size and (self._keeping_bytes <= KEEPING_MAX or not self._may_leave):
            self._keeping_bytes += size
            threads = self._keeping if self._may_leave else self._gathering
            threads.submit(self._keep, reading, size)
            return
        self.left += len(reading.indices) if size else 0
        pending.read = None
        self._release(reading)

    def _keep(self, reading: _Reading, size: int) -> None:
        """Runs in a thread."""
        try:
            reading.pending.keep()
        finally:
            self._loop.call_soon(lambda: self._kept(reading, size))

    def _kept(self, reading: _Reading, size: int) -> None:
        self._keeping_bytes -= size
        self._release(reading)

    def _release(self, reading: _Reading) -> None:
        """Its samples are in memory, if there is room: who waits for them goes on."""
        self._readings.pop(reading.number, None)
        mine = reading.indices[self._reader_of[reading.indices] == reading.number]
        self._reader_of[mine] = 0
        for postponed in reading.postponed:
            postponed.others -= 1
            if postponed.others:
                continue
            same = self._by_key.get(postponed.indices.tobytes())
            if same is not None:
                same.waiters.append(postponed.answer)
            else:
                self._begin(postponed.indices, [postponed.answer])

    def report(self) -> dict[str, Any]:
        """Its figures, for `headrace node status`."""
        source = self.chain.source.stats()
        reader = self.chain.active.stats()
        disk, cache = self.chain.disk, None
        if disk is not None:
            cached = disk.report()
            cache = {"samples": cached.samples, "of_samples": cached.of_samples}
        tiers = {tier: int(count) for tier, count in source["bytes_by_tier"].items()}
        for stage in self.chain.stages:
            for tier, count in stage.stats().bytes_by_tier.items():
                tiers[tier] = tiers.get(tier, 0) + count
        tiers["ram"] = tiers.get("ram", 0) + self.gathered_bytes  # by clients, out of this memory
        remote = self.pipeline.stats().remote
        decoded = [s.stats() for s in self.chain.stages if s.name == "decode"]
        return {
            "name": self.label,
            "path": self.store.path,
            "fingerprint": self.store.fingerprint,
            "parts": list(self.part_names),
            "samples": len(self.store),
            "jobs": dict(self.users),
            "held_samples": self._ram.held_samples,
            "held_bytes": self.held_bytes,
            "lingering_bytes": self.lingering_bytes,
            "quota_bytes": self._ram.knobs()["cache_bytes"],
            "delivered_batches": self.batches,
            "delivered_samples": self.samples,
            "delivered_bytes": self.bytes,
            "ram_bytes": self.ram_bytes,
            "gathered_batches": self.gathered_batches,
            "gathered_bytes": self.gathered_bytes,
            "source_bytes": sum(map(int, source["bytes_by_tier"].values())),
            "source_samples_bytes": int(source["delivered_bytes"]),
            "shared_batches": self.shared_batches,
            "postponed_batches": self.postponed,
            "failed_batches": self.failed,
            "left_samples": self.left,
            "reading": len(self._readings),
            "bytes_by_tier": tiers,
            "tuning": self.tuning.report(),
            "decoded": {"pictures": decoded[0].samples, "busy_s": decoded[0].busy_s}
            if decoded
            else None,
            "held_back": self.tuning.held_back.phrase if self.tuning.held_back else "",
            "cache": cache,
            "remote": remote and {name: getattr(remote, name) for name in _OF_REMOTE},
            "reads": {
                "count": int(source["reads"]),
                "seconds": float(source["in_flight_s"]),
                "in_flight": int(reader["in_flight"]),
                "in_flight_max": int(reader["reads_in_flight"]),
                "buffer_bytes": int(reader["buffer_bytes"]),
                "buffered_bytes": int(reader["buffered_bytes"]),
                "latency_us": [int(count) for count in source["latency_us"]],
            },
        }

    def close(self) -> None:
        """End reading: what was not read has failed. Batches that were handed out stay valid."""
        self._closed = True
        self.tuning.close()
        self._loop.unregister(self._done_fd)
        unread, self._unread = tuple(self._unread.values()), {}
        for reading in unread:
            self._finish(reading, ReadOutcome(None, _CLOSED))
        self.pipeline.close()
        self.store.close()
        os.close(self._done_fd)


def label_of(path: str, fingerprint: str) -> str:
    """What a data set is called where nobody should read its whole path: its last part, and which it is."""
    if "://" in path:  # what is asked for with it may be secret
        path = path.partition("?")[0]
    last = path.rstrip("/").rpartition("/")[2]
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in last)
    return f"{kept[:LABEL_MAX] or 'data'}-{fingerprint.rpartition(':')[2][:8]}"
