"""JobEngine: reads the volumes of a job: from the owner, a replica, or the source.

Good reads are native from end to end (`FabricFailover` over `FabricInitiator`). A thread of ours follows
`job.json`: replicas that come, nodes that were away when the store was opened. Made anew in a forked
child, when it first reads.

The last resort is the source (`SourceReads`), an engine in Python behind the native one, entered only for
what the nodes cannot serve: a range of a share's volume is made of the samples that lie in it, which are
read from the source and cut as the directory says.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace import _native
from headrace.base.files import read_fully, write_all
from headrace.base.lifetime import Closing
from headrace.config import ReaderOptions
from headrace.errors import FabricError, HeadraceError, JobError, VolumeError
from headrace.fabric.engine import EngineOptions, FabricEngine
from headrace.fabric.host import HostOptions
from headrace.fabric.identity import HostIdentity
from headrace.io.batch_reader import BatchReader
from headrace.io.objects.faults import RemoteStats
from headrace.store.format import DATA_OFFSET
from headrace.store.segment import Volumes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.job.meeting import JobDocument, Meeting
    from headrace.store import Store
    from headrace.store.manifest import Segment

_THREADS = 4
_CHUNK_BYTES = 32 << 20
_CHUNK_RANGES = 1024


class SharePart(NamedTuple):
    """A segment of the job, as the source has it: its directory and its first sample there."""

    directory: _native.Directory
    base: int


class _Range(NamedTuple):
    """A range that somebody waits for; `begin` to `end - 1` are the share's samples that may lie in it."""

    number: int
    share: SharePart
    offset: int
    length: int
    begin: int
    end: int


class SourceReads:
    """Reads ranges of shares' volumes from the source, which is opened when a process first needs it."""

    def __init__(self, open_source: Callable[[], Store], shares: dict[str, SharePart]) -> None:
        self._open_source = open_source
        self._shares = shares
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._reader: BatchReader | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.bytes = 0
        self.failure: HeadraceError | None = None

    def read(self, requests: Any) -> None:
        """Begins to read a batch (`headrace._native.RemoteRequests`) and returns."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "headrace-source")
            pool = self._pool
        offsets, lengths = requests.offsets.tolist(), requests.lengths.tolist()
        chunk: list[_Range] = []
        nbytes = 0
        for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            share = self._shares[os.fsdecode(requests.path(i))]
            first, last = _samples_of(share.directory, offset, offset + length)
            chunk.append(_Range(i, share, offset, length, first, last))
            nbytes += length
            if nbytes >= _CHUNK_BYTES or len(chunk) >= _CHUNK_RANGES:
                pool.submit(self._serve, requests, chunk)
                chunk, nbytes = [], 0
        if chunk:
            pool.submit(self._serve, requests, chunk)

    def turn(self, reads_in_flight: int) -> None:
        """The knob is the fabric's; the source's reader keeps its own depth."""

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            pool, reader, store = self._pool, self._reader, self._store
            self._pool = self._reader = self._store = None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        for opened in (reader, store):
            if opened is not None:
                opened.close()

    def _serve(self, requests: Any, ranges: list[_Range]) -> None:
        """Reads what a chunk of ranges needs, and hands it over."""
        try:
            self._fill(requests, ranges)
        except BaseException as e:
            if known := isinstance(e, HeadraceError):
                self.failure = e  # before somebody is woken who asks for it
            for each in ranges:
                requests.finish(each.number, 0, getattr(e, "errno", None) or errno.EIO)
            if not known:
                raise

    def _fill(self, requests: Any, ranges: list[_Range]) -> None:
        with self._lock:
            if self._store is None or self._reader is None:
                self._store = self._open_source()
                parts = list(range(len(self._store.parts)))
                self._reader = BatchReader(self._store.catalog, parts, ReaderOptions())
            store, reader = self._store, self._reader
        pieces = [np.arange(r.begin, r.end, dtype=np.int64) + r.share.base for r in ranges]
        wanted = np.unique(np.concatenate(pieces))
        batch = reader.submit(wanted).take() if len(wanted) else None
        failures = store.catalog.failures(batch) if batch is not None and batch.failed else ()
        bad = {failure["slot"]: failure["errno"] or errno.EIO for failure in failures}
        for each in ranges:
            if not requests.open(each.number):
                continue
            dest = np.frombuffer(requests.dest(each.number), np.uint8)
            code = _cut(each, dest, wanted, batch, bad)
            if not code:
                self.bytes += each.length
            requests.finish(each.number, 0 if code else each.length, code)


def _samples_of(directory: _native.Directory, begin: int, end: int) -> tuple[int, int]:
    """The samples of a share that lie between two offsets of its volume: (first, behind the last)."""

    def ends_behind(sample: int, offset: int) -> bool:
        extents = directory.extents_of(np.array([sample], np.int64))
        ends = extents["offset"] + extents["length"]
        # A sample without extents lies nowhere: it counts with those before.
        return len(ends) > 0 and int(ends.max()) > offset

    samples = range(directory.samples)
    first = bisect_left(samples, True, key=lambda sample: ends_behind(sample, begin))
    last = bisect_left(samples, True, key=lambda sample: ends_behind(sample, end - 1))
    return first, min(last + 1, directory.samples)


def _cut(
    wanted: _Range, dest: NDArray[np.uint8], indices: NDArray[np.int64], batch: Any,
    bad: dict[int, int],
) -> int:  # fmt: skip
    """Lays the samples of a range where its directory says; returns 0 or an errno value."""
    begin, end = wanted.offset, wanted.offset + wanted.length
    if begin < DATA_OFFSET:
        dest[: min(DATA_OFFSET - begin, len(dest))] = 0  # the header page: no sample's
    local = np.arange(wanted.begin, wanted.end, dtype=np.int64)
    if not len(local):
        dest[:] = 0
        return 0
    extents = wanted.share.directory.extents_of(local)
    places = np.searchsorted(indices, extents["sample"] + wanted.share.base)
    covered = 0
    for k in range(len(extents["length"])):
        slot = int(places[k]) * batch.parts + int(extents["part"][k])
        at, size = int(extents["offset"][k]), int(extents["length"][k])
        first, last = max(at, begin), min(at + size, end)
        if first >= last:
            continue
        if slot in bad:
            return bad[slot]
        start = int(batch.offsets[slot]) + first - at
        dest[first - begin : last - begin] = batch.data[start : start + last - first]
        covered = max(covered, last - begin)
    dest[covered:] = 0  # the padding behind the last sample
    return 0


_FOLLOW_S = 1.0
_FOLLOW_STAGED_S = 10.0
"""Once nothing is expected: every process of every node looks into the shared folder."""
_FOLLOWER_S = 5.0
"""What follows the job ends within this time: nothing is connected any more when it is waited for."""

# Engines inherited over a fork: their threads do not exist in the child, and ending them there would
# touch what the parent still uses.
_inherited: list[Any] = []


def volume_name(session: str, segment: int) -> str:
    """What a segment's volume is called, wherever it is read."""
    return f"headrace://{session}/share-{segment:04d}-0000"


def identity_of(session: str) -> HostIdentity:
    """Who a job's processes are to its targets: hosts that do not know the session are refused."""
    own = HostIdentity.of_machine().id
    return HostIdentity(f"nqn.2026-11.io.headrace:job:{session}", own)


def host_options(kato_ms: int) -> HostOptions:
    """How a job's targets are spoken to: they ask for no secret, whatever others are given."""
    return HostOptions(
        timeout_s=1.0, kato_ms=kato_ms, dhchap_secret=None, dhchap_controller_secret=None
    )


def connect_options() -> EngineOptions:
    """How a job's targets are read: one that is gone is given up soon, for there is another way.

    A black hole costs a command's deadline and one try to connect, a closed port 0.3 s: the step that
    waits stalls for less than 3 s.
    """
    return EngineOptions(
        host=host_options(10_000), command_timeout_s=1.5, give_up_s=0.3, read_deadline_s=60.0
    )


_READ_BYTES = 1 << 20
_ROUND_READS = 16
_COPY_S = 120.0


def copy_namespace(
    fabric: FabricEngine,
    url: str,
    size: int,
    fd: int,
    *,
    what: str,
    go_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Copies the first `size` bytes of a namespace into a file; False if `go_on`, asked between reads, says so.

    Raises:
        FabricError: the target does not answer any more, or has fewer bytes; the message says `what` fails.
    """
    fabric.open(url)
    data = np.empty(min(size, _READ_BYTES * _ROUND_READS), np.uint8)
    for start in range(0, size, len(data) or 1):
        if not go_on():
            return False
        stop = min(start + len(data), size)
        offsets = np.arange(start, stop, _READ_BYTES, dtype=np.int64)
        lengths = np.minimum(_READ_BYTES, stop - offsets)
        got = fabric.read_many(url, offsets, lengths, data[: stop - start], _COPY_S)
        if not np.array_equal(got, lengths):
            code = -int(got.min()) if int(got.min()) < 0 else 0
            raise FabricError(f"{url}: {what}: {os.strerror(code) if code else 'it is shorter'}.")
        write_all(fd, data[: stop - start], start)
    return True


class _Live:
    """What one process has: connections, the native engine, the last resort."""

    def __init__(self, session: str, source: SourceReads) -> None:
        self.pid = os.getpid()
        self.source = source
        self.fabric = FabricEngine(identity_of(session), connect_options())
        self.native = _native.FabricFailover(self.fabric.native, source)
        self.opened: set[str] = set()

    def open(self, url: str, silent: set[str]) -> bool:
        """Makes a place readable; False while its node does not answer, which is then not asked again."""
        target = url.partition("?")[0]
        if url not in self.opened and target not in silent:
            try:
                self.fabric.open(url)
                self.opened.add(url)
            except VolumeError:
                silent.add(target)
        return url in self.opened

    def close(self) -> None:
        self.native.close()
        self.fabric.close()
        self.source.close()


class JobEngine(Closing):
    """Reads a job's volumes. Thread-safe."""

    def __init__(
        self,
        meeting: Meeting,
        document: JobDocument,
        own: int | None,
        shares: Sequence[SharePart],
        open_source: Callable[[], Store],
    ) -> None:
        self._meeting = meeting
        self._document = document  # as it was when the store was opened
        self._own = own  # this node's rank, whose places come first; None: it is none of the job's
        self._shares = {volume_name(document.session, k): share for k, share in enumerate(shares)}
        self._open_source = open_source
        self._lock = threading.Lock()
        self._live: _Live | None = None
        self._stop = threading.Event()
        self._follower: threading.Thread | None = None
        self._closed = False
        self.reads_in_flight = EngineOptions().reads_in_flight

    @property
    def native(self) -> _native.FabricFailover:
        """What the native reader reads with: the engine of this process.

        Raises JobError if the store is closed.
        """
        return self._running().native

    def fetch(self, name: str, offset: int, dest: memoryview) -> int:
        """Reads one range of a volume and waits for it; returns the bytes that came.

        Raises VolumeError if nobody could serve it.
        """
        if not len(dest):
            return 0
        live = self._running()
        where = np.array([offset], np.int64), np.array([len(dest)], np.int64)
        got = int(live.native.read_many(name, *where, np.frombuffer(dest, np.uint8), 300.0)[0])
        if got < 0:
            why = f" ({live.source.failure.message})" if live.source.failure else ""
            raise VolumeError(
                f"{name}: bytes {offset:,} to {offset + len(dest):,} cannot be read from any node or "
                f"from the source: {os.strerror(-got)}{why}.",
                path=name,
                offset_bytes=offset,
                errno=-got,
            )
        return got

    def figures(self) -> dict[str, int]:
        """What this process has read, by who served it.

        `reads` and `bytes`: the first place that was asked. `*_elsewhere`: another node. `*_last`: the
        source. `unwritten`: reads that a node did not have yet.
        """
        live = self._own_live()
        return {} if live is None else live.native.figures()

    def stats(self) -> RemoteStats:
        """The same, in the words of loaders' statistics."""
        figures = self.figures()
        served = ("reads", "reads_elsewhere", "reads_last")
        return RemoteStats(
            reads=sum(figures.get(name, 0) for name in served),
            bytes=sum(figures.get(name.replace("reads", "bytes"), 0) for name in served),
            peer_bytes=figures.get("bytes", 0) + figures.get("bytes_elsewhere", 0),
            retries=figures.get("reads_elsewhere", 0) + figures.get("reads_last", 0),
            failures=figures.get("failed", 0),
        )  # fmt: skip

    def reason_of(self, failure: Mapping[str, Any]) -> None:
        """There is no story behind a failed read but its errno value."""

    def turn(self, reads_in_flight: int) -> None:
        """Sets how many commands are in flight at once."""
        self.reads_in_flight = reads_in_flight
        if (live := self._own_live()) is not None:
            live.fabric.native.turn(reads_in_flight)

    def close(self) -> None:
        """Ends connections and threads; later reads fail with ECANCELED."""
        self._stop.set()
        with self._lock:
            self._closed = True
            live, follower = self._live, self._follower
            self._live = self._follower = None
        if live is None:
            return
        if live.pid != os.getpid():
            _inherited.append(live)
            return
        live.close()
        # It opens nothing any more; what it was connecting is closed when it has ended.
        if follower is not None and follower is not threading.current_thread():
            follower.join(_FOLLOWER_S)

    # -- this process's own -----------------------------------------------------------------------

    def _own_live(self) -> _Live | None:
        live = self._live
        return live if live is not None and live.pid == os.getpid() else None

    def _running(self) -> _Live:
        if self._live is not None and self._live.pid != os.getpid():
            # The lock may be held for ever: its holder does not exist here.
            _inherited.append((self._live, self._lock, self._stop))
            self._lock, self._stop, self._live = threading.Lock(), threading.Event(), None
            self._follower = None
        with self._lock:
            if self._closed:
                raise JobError(f"{self._meeting.folder}: the job's store is closed.")
            if self._live is None:
                source = SourceReads(self._open_source, dict(self._shares))
                self._live = _Live(self._document.session, source)
                self._settle(self._live, self._document)
                self._follower = threading.Thread(
                    target=self._follow, args=(self._live, self._stop), daemon=True,
                    name="headrace-job",
                )  # fmt: skip
                self._follower.start()
            return self._live

    def _settle(self, live: _Live, document: JobDocument) -> bool:
        """Tells the native engine which places there are; whether all of them answer."""
        complete, silent = True, set[str]()
        for k, segment in enumerate(document.segments):
            # A copy on this very node is the nearest.
            places = sorted(segment.places, key=lambda p: p.node != self._own)
            urls = [p.volumes[0] for p in places]
            reached = [url for url in urls if live.open(url, silent)]
            complete = complete and len(reached) == len(urls)
            live.native.add_volume(volume_name(document.session, k), reached)
        return complete

    def _follow(self, live: _Live, stop: threading.Event) -> None:
        """Takes up what comes later: replicas, and nodes that were away."""
        settled, complete, state = self._document.generation, False, self._document.state
        while not stop.wait(_FOLLOW_STAGED_S if complete and state == "staged" else _FOLLOW_S):
            with contextlib.suppress(HeadraceError, OSError):
                latest = self._meeting.job()
                if latest is None or latest.session != self._document.session:
                    continue
                if latest.generation != settled or not complete:
                    complete = self._settle(live, latest)
                    settled, state = latest.generation, latest.state


class JobVolumes(Volumes):
    """The volume of one segment of a job.

    Which bytes stand there is sure without a look at its header page: the target's name has the job's
    session in it, and the directory has a checksum of every sample once the share is staged. `local` is a
    descriptor of the whole volume on this node, which the volumes then own.
    """

    def __init__(
        self, session: str, number: int, entry: Segment, engine: JobEngine, local: int | None = None
    ) -> None:
        super().__init__("", entry)
        self.paths = [volume_name(session, number)]
        self.engine = engine
        if local is not None:
            self._fds[0] = local

    @property
    def local(self) -> bool:
        """Whether it is read from this node's disk."""
        return 0 in self._fds

    def problem(self, number: int) -> HeadraceError | None:
        """None that could be seen without reading."""

    def read_into(self, number: int, view: memoryview, offset: int) -> int:
        """As `Volumes.read_into`."""
        if self.local:
            return read_fully(self._fds[0], view, offset)
        return self.engine.fetch(self.paths[number], offset, view)

    read_unchecked = read_into

    def borrow(self, number: int) -> tuple[int, bool]:
        """The descriptor of a local volume; raises JobError if it is read over the fabric and has none."""
        if self.local:
            return self._fds[number], False
        raise JobError(f"{self.paths[number]} is read over the fabric and has no descriptor.")

    def native(self) -> list[tuple[str, bytes, int, int]]:
        """As `headrace._native.Catalog` wants them."""
        nbytes = self.entries[0].bytes or 0
        if self.local:
            # By descriptor: the file may have no name, or lose it while we read.
            return [("file", b"/proc/self/fd/%d" % self._fds[0], nbytes, -1)]
        return [("remote", os.fsencode(self.paths[0]), nbytes, -1)]
