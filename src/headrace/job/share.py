"""Share: which samples a node stages, how they lie in its volume, the copy from the source, and the exports.

Shares are contiguous ranges of the source's order, as equal in bytes as samples allow, so the global
order is the source's. A share is one packed segment of one volume, whose layout follows from sizes
alone (docs/format.md): samples back to back behind the header page. Its directory can therefore be
published before a byte is copied; what it lacks is checksums, unless the source has them.

The copy (`Stager`) reads batches ahead natively and writes them one behind the other, so one mark says what
is there: it is moved after each batch, and the target answers reads beyond it as unwritten. Checksums are
taken on the way where the source has none.

A node exports its share's directory and volume (`NodeExports`), and perhaps a checked copy of a neighbour's.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.base.files import write_all
from headrace.base.lifetime import Closing
from headrace.config import ReaderOptions
from headrace.errors import CorruptSample, VolumeError
from headrace.fabric.engine import FabricEngine
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target, TargetOptions
from headrace.io.batch_reader import BatchReader
from headrace.job.engine import connect_options, copy_namespace, identity_of
from headrace.job.local_files import LocalFile
from headrace.store.directory import DirectoryColumns, join_names, write_directory
from headrace.store.format import VolumeHeader, padded_size, volume_uuid
from headrace.store.manifest import VolumeEntry, segment_of_header
from headrace.store.segment_writer import Placer
from headrace.store.summary import sample_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from headrace.io.batch_reader import PendingBatch
    from headrace.job.meeting import SharePlace
    from headrace.store import Store
    from headrace.store.manifest import Segment

_ONE_VOLUME_BYTES = 1 << 46  # a share is one volume: one namespace, one mark of what is written


@dataclass(slots=True)
class NodeShare:
    """The samples `begin` to `end - 1` of a source, and their layout in a volume of whole pages."""

    begin: int
    end: int
    columns: DirectoryColumns
    volume_bytes: int

    @property
    def samples(self) -> int:
        """How many."""
        return self.end - self.begin

    @property
    def data_bytes(self) -> int:
        """Of the samples themselves."""
        return int(self.columns.length.sum())


def cut_shares(store: Store, nodes: int) -> list[tuple[int, int]]:
    """The ranges [begin, end) of all nodes, balanced by bytes; the same everywhere.

    A node may get no samples where there are fewer samples than nodes.
    """
    sizes = np.concatenate([sizes for _, sizes in sample_sizes(store)])
    # A sample belongs to the node in whose part its middle lies: no share is off by more than half of
    # a sample. Empty samples count a little, or a million of them would be one node's.
    weight = sizes.astype(np.float64) + 1.0
    ends = np.cumsum(weight)
    node = np.minimum(((ends - weight / 2) / ends[-1] * nodes).astype(np.int64), nodes - 1)
    cuts = np.searchsorted(node, np.arange(nodes + 1))
    return list(pairwise(cuts.tolist()))


def plan_share(store: Store, begin: int, end: int) -> NodeShare:
    """Lays out the samples `begin` to `end - 1` of an open source."""
    kept = [p for s in store.segments if (p := _piece(store, s, begin, end)) is not None]
    names, offsets = join_names([name for p in kept for name in p["names"]])
    length = np.concatenate([p["length"] for p in kept]).astype(np.uint64)
    counts = np.concatenate([p["counts"] for p in kept])
    part = np.concatenate([p["part"] for p in kept])
    checked = all(p["crc"] is not None for p in kept)
    placer = Placer(_ONE_VOLUME_BYTES)
    place = placer.place(counts, length)
    firsts = np.zeros(end - begin + 1, np.uint64)
    np.cumsum(counts.astype(np.uint64), out=firsts[1:])
    part_names = tuple(os.fsencode(p) for p in store.parts)
    labels, classes = store.labels, store.classes
    columns = DirectoryColumns(
        names, offsets, place.volume, place.offset, length,
        crc=np.concatenate([p["crc"] for p in kept]).astype(np.uint32) if checked else None,
        first_extent=firsts if int(firsts[-1]) != end - begin else None,
        part=part.astype(np.uint16) if len(part_names) > 1 else None,
        part_names=part_names,
        labels=None if labels is None else np.asarray(labels[begin:end]),
        class_names=None if classes is None else tuple(os.fsencode(c) for c in classes),
        columns={name: np.asarray(values[begin:end]) for name, values in store.columns.items()},
    )  # fmt: skip
    return NodeShare(begin, end, columns, padded_size(placer.ends[-1]))


def _piece(store: Store, segment: Any, begin: int, end: int) -> dict[str, Any] | None:
    """What one segment of the source adds to a share."""
    first = max(begin - segment.base, 0)
    last = min(end - segment.base, segment.directory.samples)
    if first >= last:
        return None
    wanted = np.arange(first, last, dtype=np.int64)
    extents = segment.directory.extents_of(wanted)
    numbers = [store.parts.index(os.fsdecode(p)) for p in segment.directory.part_names]
    part = np.array(numbers, np.int64)[extents["part"]]
    order = np.lexsort((part, extents["sample"]))  # as batches have them
    return {
        "names": segment.directory.names(wanted),
        "length": extents["length"][order],
        "counts": np.bincount(extents["sample"] - first, minlength=last - first).astype(np.int64),
        "part": part[order],
        "crc": extents["crc"][order] if segment.directory.has_crc else None,
    }


def write_share_directory(
    share: NodeShare, fd: int, crc: NDArray[np.uint32] | None = None
) -> tuple[Segment, bytes]:
    """Writes a share's directory into an open empty file, with checksums where the source has none.

    Returns the manifest's entry, and the volume's header page.
    """
    columns = share.columns if crc is None else replace(share.columns, crc=crc)
    header = write_directory(columns, fd)
    uuid = volume_uuid(header.uuid, 0)
    volume = VolumeEntry("packed", "segment-0000-0000.hrv", share.volume_bytes, uuid=uuid.hex())
    source = {"kind": "share", "begin": share.begin, "end": share.end}
    entry = segment_of_header("segment-0000.hrd", header, (volume,), source)
    return entry, VolumeHeader(uuid, header.uuid, 0).to_page()


BATCH_BYTES = 8 << 20
BATCH_SAMPLES = 8192
PIECE_BYTES = 16 << 20
LARGE_BYTES = 64 << 20  # a sample above this is copied in pieces instead of being held in memory
_BLOCK_BYTES = 512


class Stager:
    """Copies one share into its volume, an open file that is as large as the share says.

    `move_mark` is told how many bytes of the volume are there; whole blocks until the end.

    Attributes:
        samples_done, bytes_done: copied so far.
        crc: (extents,) uint32, of what is copied.
    """

    def __init__(
        self,
        source: Store,
        share: NodeShare,
        fd: int,
        move_mark: Callable[[int], None],
        options: ReaderOptions | None = None,
    ) -> None:
        self._source = source
        self._share = share
        self._fd = fd
        self._move_mark = move_mark
        self._options = options or ReaderOptions()
        self._firsts = share.columns.firsts.astype(np.int64)
        self.samples_done = 0
        self.bytes_done = 0
        self.source_bytes = 0  # read from the source, gaps and repeated reads included
        self.crc = np.zeros(share.columns.extents, np.uint32)

    def run(self, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Copies what is not copied yet; whether all is there: `go_on`, asked after each batch, may stop it.

        Raises HeadraceError if a sample cannot be read, or the disk refuses it.
        """
        parts = list(range(len(self._source.parts)))
        reader = BatchReader(self._source.catalog, parts, self._options)
        ahead: deque[tuple[int, int, PendingBatch | None]] = deque()
        plans = self._plans()
        try:
            while True:
                while len(ahead) <= reader.batches_ahead and (plan := next(plans, None)):
                    begin, end, large = plan
                    wanted = np.arange(begin, end, dtype=np.int64) + self._share.begin
                    ahead.append((begin, end, None if large else reader.submit(wanted)))
                if not ahead:
                    break
                begin, end, pending = ahead.popleft()
                if pending is None:
                    self._copy_large(begin)
                else:
                    self._copy(begin, end, pending.take())
                extents, columns = int(self._firsts[end]), self._share.columns
                last = extents - 1
                written = int(columns.offset[last] + columns.length[last]) if extents else 0
                self._move_mark(written // _BLOCK_BYTES * _BLOCK_BYTES)
                if not go_on():
                    return False
        finally:
            reader.close()
        return True

    def _plans(self) -> Iterator[tuple[int, int, bool]]:
        """Samples that are read together: (begin, end, whether it is one large one)."""
        before = np.zeros(len(self._share.columns.length) + 1, np.int64)
        np.cumsum(self._share.columns.length.astype(np.int64), out=before[1:])
        ends = before[self._firsts]
        begin, n = self.samples_done, self._share.samples
        while begin < n:
            end = int(np.searchsorted(ends, ends[begin] + BATCH_BYTES, side="right")) - 1
            end = min(max(end, begin + 1), begin + BATCH_SAMPLES, n)
            yield begin, end, end == begin + 1 and int(ends[end] - ends[begin]) > LARGE_BYTES
            begin = end

    def _copy(self, begin: int, end: int, batch: _native.Batch) -> None:
        if batch.failed:
            failure = self._source.catalog.failures(batch)[0]
            sample = int(batch.indices[failure["slot"] // batch.parts])
            raise self._source.failure_error(sample, failure)
        first, last = int(self._firsts[begin]), int(self._firsts[end])
        columns = self._share.columns
        counts = np.diff(self._firsts[begin : end + 1])
        slots = np.repeat(np.arange(end - begin, dtype=np.int64), counts) * batch.parts
        if columns.part is not None:
            slots += columns.part[first:last].astype(np.int64)
        lengths = columns.length[first:last].astype(np.int64)
        nbytes = int(lengths.sum())
        if not np.array_equal(batch.lengths[slots], lengths) or int(batch.lengths.sum()) != nbytes:
            raise AssertionError("the source's sizes changed under an open store")
        at = int(columns.offset[first]) if last > first else 0
        try:
            checksums = _native.write_samples(self._fd, at, batch, np.arange(end - begin))
        except VolumeError as e:  # `disk_errors` says where, and what to do
            code = e.errno or errno.EIO
            raise OSError(code, os.strerror(code)) from e
        if columns.crc is None:
            self.crc[first:last] = checksums[slots]
        self.samples_done = end
        self.bytes_done += nbytes
        self.source_bytes += max(nbytes, int(batch.stats["bytes_read"]))

    def _copy_large(self, sample: int) -> None:
        columns = self._share.columns
        for extent in range(int(self._firsts[sample]), int(self._firsts[sample + 1])):
            size, at, value = int(columns.length[extent]), int(columns.offset[extent]), 0
            part = None if columns.part is None else columns.part_names[int(columns.part[extent])]
            for start in range(0, size, PIECE_BYTES):
                piece = self._source.read(self._share.begin + sample, start, PIECE_BYTES, part)
                write_all(self._fd, piece, at + start)
                value = crc32c(piece, value)
                self.bytes_done += len(piece)
                self.source_bytes += len(piece)
            stated = columns.crc
            if stated is not None and int(stated[extent]) != value:
                # A range's checksum is nobody's but ours to compare.
                index = self._share.begin + sample
                raise CorruptSample(
                    f"{self._source.path}: the checksum of sample {index} is {value:08x}, expected "
                    f"{int(stated[extent]):08x}.",
                    path=self._source.path,
                    index=index,
                    next_step=f"headrace verify {self._source.path} lists every bad sample.",
                )
            self.crc[extent] = value
        self.samples_done = sample + 1


# -- what a node exports -------------------------------------------------------------------------------

_ASSOCIATIONS_MAX = 4096  # each process of each node has one with every target


class NodeExports(Closing):
    """A target with one subsystem, for this session's hosts only.

    Raises FabricError if the address cannot be listened on.
    """

    def __init__(self, session: str, node: int, host: str, port: int = 0) -> None:
        # A server that is started again is another subsystem: nobody must take its files for the old.
        self.nqn = f"nqn.2026-11.io.headrace:job:{session}:node-{node}:{secrets.token_hex(4)}"
        self.subsystem = Subsystem(self.nqn, hosts=[identity_of(session).nqn])
        self.target = Target(
            [self.subsystem], (host, port), TargetOptions(associations_max=_ASSOCIATIONS_MAX)
        )

    @property
    def address(self) -> str:
        """`host:port` as URLs have it."""
        host, port = self.target.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def add(self, file: LocalFile, written: int | None = None) -> tuple[int, str]:
        """Exports a file; only its first `written` bytes if given. Returns its NSID and URL."""
        namespace = self.subsystem.add(file.path)
        if written is not None:
            self.subsystem.exports.set_written(namespace.nsid, written)
        return namespace.nsid, f"nvme+tcp://{self.address}/{self.nqn}?ns={namespace.nsid}"

    def set_written(self, nsid: int, nbytes: int) -> None:
        """Moves a namespace's mark."""
        self.subsystem.exports.set_written(nsid, nbytes)

    def close(self) -> None:
        """Serves no longer."""
        self.target.close()
        self.subsystem.close()


def copy_share(
    session: str,
    place: SharePlace,
    entry: Segment,
    local: str,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[LocalFile, LocalFile] | None:
    """Copies a staged share from its owner: the directory and the volume; None if `go_on` says stop.

    Raises FabricError if the owner does not answer any more, and CorruptSample if what came is not
    what the directory says.
    """
    urls = (place.directory, place.volumes[0])
    sizes = (entry.directory_bytes, int(entry.volumes[0].bytes or 0))
    what = "the share cannot be copied"
    with FabricEngine(identity_of(session), connect_options()) as fabric, ExitStack() as undo:
        directory, volume = (undo.enter_context(LocalFile(local, size)) for size in sizes)
        for url, size, file in zip(urls, sizes, (directory, volume), strict=True):
            if not copy_namespace(fabric, url, size, file.fd, what=what, go_on=go_on):
                return None
        _check(directory, volume)
        undo.pop_all()
    return directory, volume


def _check(directory_file: LocalFile, volume: LocalFile) -> None:
    """Compares every sample with its checksum: a copy must not be trusted less than its owner."""
    directory = _native.Directory.from_fd(directory_file.fd, directory_file.path)
    if not directory.has_crc:
        return
    for start in range(0, directory.samples, BATCH_SAMPLES):
        stop = min(start + BATCH_SAMPLES, directory.samples)
        extents = directory.extents_of(np.arange(start, stop, dtype=np.int64))
        for sample, offset, length, crc in zip(
            extents["sample"].tolist(), extents["offset"].tolist(), extents["length"].tolist(),
            extents["crc"].tolist(), strict=True,
        ):  # fmt: skip
            value = crc32c(os.pread(volume.fd, length, offset)) if length else 0
            if value != crc:
                raise CorruptSample(
                    f"{volume.path}: sample {sample} of the copy has the checksum {value:08x}, "
                    f"expected {crc:08x}.",
                    path=volume.path,
                    offset_bytes=offset,
                    next_step="The network or a disk flips bits: look at both nodes.",
                )
