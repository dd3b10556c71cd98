"""Packing: one segment made of a source's samples.

Threads read ahead in the source's order, and one writer appends (`segment_writer`). What an interrupted
run has packed is not packed again.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.checksum import crc32c
from headrace.errors import SourceChanged, SourceError
from headrace.store.directory import (
    DirectoryColumns,
    columns_of,
    duplicate_name,
    keep_samples,
    split_names,
)
from headrace.store.publish import check_free_space
from headrace.store.segment_writer import JOURNAL_BYTES, VOLUME_BYTES, PackedSamples, SegmentWriter
from headrace.store.sources.extents import (
    BATCH_BYTES,
    ScanReader,
    SourceBatch,
    plan_batches,
    read_ahead,
)
from headrace.store.sources.scan import Problem, Scan, Stream, StreamItem, no_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.store.manifest import Segment
    from headrace.store.publish import Partial
    from headrace.store.sources.scan import StreamItem
    from headrace.store.store import Store

    Progress = Callable[[int, int | None, int, int | None], None]

_DIRECTORY_BYTES_PER_SAMPLE = 40
"""For the free-space check: extents, labels and the name tree's offsets, generously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How to pack. The defaults suit nearly everyone.

    Attributes:
        volume_bytes: a new volume begins before one would grow beyond this.
        workers: threads that read the source.
        batch_bytes: bytes that one thread reads at once.
        journal_bytes: bytes between two records of the journal: what a crash can cost.
    """

    volume_bytes: int = VOLUME_BYTES
    workers: int = field(default_factory=lambda: min(8, 2 * (os.cpu_count() or 1)))
    batch_bytes: int = BATCH_BYTES
    journal_bytes: int = JOURNAL_BYTES

    def __post_init__(self) -> None:
        for name, low in (
            ("volume_bytes", 8192), ("workers", 1), ("batch_bytes", 1), ("journal_bytes", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}, expected an integer of {low} or more")


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What `pack`, `append` or `index` did.

    Attributes:
        path: the store.
        samples: samples written or indexed.
        bytes: their bytes.
        resumed_samples: how many of them an interrupted run had packed already.
        skipped: what was left out (only with `on_error="skip"`).
        seconds: how long it took.
    """

    path: str
    samples: int
    bytes: int
    resumed_samples: int
    skipped: list[Problem]
    seconds: float


@dataclass(slots=True, kw_only=True)
class PackingJob:
    """One segment being packed: what, into what, and how far it is."""

    source: Scan | Stream
    partial: Partial
    options: PackOptions
    number: int = 0
    on_error: str
    progress: Progress | None
    before: Path | None = None
    skipped: list[Problem] = field(default_factory=list)
    resumed: int = 0
    samples: int = 0
    bytes_done: int = 0

    def run(self) -> tuple[Segment, bytes]:
        """Packs what is not packed yet and finishes the segment."""
        if isinstance(self.source, Scan):
            self.skipped += self.source.skipped
        writer = self._open_writer()
        try:
            if isinstance(self.source, Scan):
                columns = self._pack_scan(self.source, writer)
            else:
                columns = self._pack_stream(self.source, writer)
            segment, page = writer.finish(columns, self.source.source)
            self.samples, self.bytes_done = segment.samples, writer.bytes_done
        except BaseException as e:
            self._keep_or_remove(writer, e)
            raise
        finally:
            writer.close()
        return segment, page

    def report(self, path: str, seconds: float) -> WriteReport:
        """What was done."""
        return WriteReport(path, self.samples, self.bytes_done, self.resumed, self.skipped, seconds)

    def _open_writer(self) -> SegmentWriter:
        def new_writer() -> SegmentWriter:
            return SegmentWriter(
                self.partial.store, self.number, self.partial.journal,
                volume_bytes=self.options.volume_bytes, journal_bytes=self.options.journal_bytes,
            )  # fmt: skip

        writer = new_writer()
        if not writer.resumable():
            # The disk lost what it had promised: start over rather than trust the rest.
            identity = self.partial.journal.identity
            assert identity is not None
            self.partial.begin(identity)
            writer = new_writer()
        self.resumed = writer.samples_done
        return writer

    def _keep_or_remove(self, writer: SegmentWriter, error: BaseException) -> None:
        """Keeps what a second try can use.

        After an error in the source only what is in the journal already: a short pack is cheaper to
        do again than to explain.
        """
        if not isinstance(error, SourceError):
            with contextlib.suppress(OSError):  # the error that brought us here says more
                writer.commit()
        if not writer.samples_durable:
            self.partial.remove()

    def _tell(self, writer: SegmentWriter, samples: int | None, size: int | None) -> None:
        if self.progress is not None:
            self.progress(writer.samples_done, samples, writer.bytes_done, size)

    # -- sources whose samples lie at known places ------------------------------------------------

    def _pack_scan(self, scan: Scan, writer: SegmentWriter) -> DirectoryColumns:
        total = int(scan.columns.length.sum())
        needed = total - writer.bytes_done + len(scan.columns.names)
        needed += scan.columns.extents * _DIRECTORY_BYTES_PER_SAMPLE
        check_free_space(self.partial.path, needed)
        reader = ScanReader(scan, on_error=self.on_error)
        plans = plan_batches(scan, writer.samples_done, self.options.batch_bytes)
        for batch in read_ahead(plans, reader.read, self.options.workers):
            if batch.plan.large:
                self._append_large(scan, reader, writer, batch)
            else:
                assert batch.data is not None
                samples = PackedSamples(batch.counts, batch.length, batch.crc)
                writer.append(samples, [batch.data])
            self.skipped += batch.problems
            reader.recycle(batch)
            self._tell(writer, scan.columns.samples, total)
        counts = writer.packed().counts
        columns = scan.columns if counts.all() else keep_samples(scan.columns, counts > 0)
        _require_samples(columns, scan)
        # A packed sample has no modification time: equal bytes make equal stores.
        return replace(columns, mtime=None)

    def _append_large(
        self, scan: Scan, reader: ScanReader, writer: SegmentWriter, batch: SourceBatch
    ) -> None:
        first = int(scan.columns.firsts[batch.plan.begin])
        extents = range(first, first + len(batch.length))
        try:
            writer.append_large(batch.counts, batch.length, (reader.pieces(e) for e in extents))
        except SourceError as e:
            if self.on_error != "skip":
                raise
            writer.skip(1)
            batch.problems.append(Problem(e.path or "", e.message, e.offset_bytes))

    # -- sources that are read front to back ------------------------------------------------------

    def _pack_stream(self, stream: Stream, writer: SegmentWriter) -> DirectoryColumns:
        metadata = StreamMetadata()
        done = writer.packed()
        extent = 0
        batch: list[StreamItem] = []
        batch_bytes = 0
        for i, item in enumerate(stream.items()):
            metadata.add(item)
            if i < len(done.counts):
                extent = _check_resumed(item, i, done, extent)
                continue
            batch.append(item)
            batch_bytes += sum(len(data) for _, data in item.parts)
            if batch_bytes >= self.options.batch_bytes or len(batch) >= 4096:
                self._append_items(batch, writer)
                batch, batch_bytes = [], 0
        if len(metadata.names) < len(done.counts):
            raise SourceChanged(
                f"The source gave {len(metadata.names):,} samples, an interrupted run had packed "
                f"{len(done.counts):,}.",
                next_step="Give the same samples again, or pass resume=False to start over.",
            )
        self._append_items(batch, writer)
        columns = metadata.columns()
        if stream.class_names is not None:
            columns.class_names = stream.class_names()
        _require_samples(columns, stream)
        return columns if self.before is None else fit_to_store(columns, self.before)

    def _append_items(self, items: list[StreamItem], writer: SegmentWriter) -> None:
        if not items:
            return
        pieces = [memoryview(data).cast("B") for item in items for _, data in item.parts]
        samples = PackedSamples(
            np.array([len(item.parts) for item in items], np.int64),
            np.array([len(p) for p in pieces], np.uint64),
            np.array([crc32c(p) for p in pieces], np.uint32),
        )
        joined = memoryview(b"".join(pieces))
        writer.append(samples, [joined])
        self._tell(writer, None, None)


def _require_samples(columns: DirectoryColumns, source: Scan | Stream) -> None:
    if not columns.samples:
        raise no_samples(str(source.source.get("path", "the source")))


def _check_resumed(item: StreamItem, i: int, done: PackedSamples, extent: int) -> int:
    """Checks that a stream gives sample `i` as it did before; returns the next extent."""
    end = extent + int(done.counts[i])
    given = [(len(data), crc32c(data)) for _, data in item.parts]
    packed = list(zip(done.length[extent:end].tolist(), done.crc[extent:end].tolist(), strict=True))
    if given != packed:
        raise SourceChanged(
            f"Sample {i} ({os.fsdecode(item.name)!r}) has (length, crc32c) {given}, an interrupted "
            f"run had packed {packed}.",
            index=i,
            name=os.fsdecode(item.name),
            next_step="Give the same samples again, or pass resume=False to start over.",
        )
    return end


_NAMES_AT_ONCE = 1 << 16


class StreamMetadata:
    """Collects names, labels, parts and columns of a stream's samples."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._seen: set[bytes] = set()
        self._labels: list[int] = []
        self._parts: list[bytes] = []
        self._counts: list[int] = []
        self._columns: dict[str, list[int | float]] = {}

    def add(self, item: StreamItem) -> None:
        """Takes note of the next sample."""
        if not self.names:
            self._columns = {name: [] for name in item.columns}
        if item.name in self._seen:
            raise duplicate_name(item.name, f" (the second is sample {len(self.names)})")
        self._seen.add(item.name)
        if item.columns.keys() != self._columns.keys():
            raise SourceError(
                f"Sample {len(self.names)} ({os.fsdecode(item.name)!r}) has the columns "
                f"{sorted(item.columns)}, the first one had {sorted(self._columns)}.",
                next_step="Give every sample the same columns.",
            )
        self.names.append(item.name)
        self._labels.append(item.label)
        self._counts.append(len(item.parts))
        self._parts += (name for name, _ in item.parts)
        for name, value in item.columns.items():
            self._columns[name].append(value)

    def columns(self) -> DirectoryColumns:
        """The directory's columns, extents still to be filled in."""
        empty = np.zeros(len(self._parts), np.uint64)
        return columns_of(
            self.names, empty, empty, empty,
            parts=self._parts,
            counts=np.array(self._counts, np.uint64),
            labels=np.array(self._labels, np.int64),
            columns={name: np.array(values) for name, values in self._columns.items()},
        )  # fmt: skip


def fit_to_store(columns: DirectoryColumns, place: Path) -> DirectoryColumns:
    """Makes a new segment agree with its store: new names, the same classes and columns.

    Raises:
        SourceError: a name is taken, or the columns differ.
    """
    from headrace.store.opening import open_store

    with open_store(place) as store:
        _check_new_names(columns, store)
        if store.columns.keys() != columns.columns.keys():
            raise SourceError(
                f"{place}: the new samples have the columns {sorted(columns.columns)}, the store "
                f"has {sorted(store.columns)}.",
                path=str(place),
                next_step="Append samples with the same columns.",
            )
        return _merge_classes(columns, store.classes)


def _check_new_names(columns: DirectoryColumns, store: Store) -> None:
    names = split_names(columns.names, columns.name_offsets)
    for start in range(0, len(names), _NAMES_AT_ONCE):
        indices = store.find_many(names[start : start + _NAMES_AT_ONCE])
        taken = np.flatnonzero(indices >= 0)
        if len(taken):
            name = os.fsdecode(names[start + int(taken[0])])
            raise SourceError(
                f"{store.path}: the name {name!r} is sample {int(indices[taken[0]])} of the store "
                "already, expected new names.",
                path=store.path,
                name=name,
                next_step="Append samples with new names, or pack a new store.",
            )


def _merge_classes(columns: DirectoryColumns, before: list[str] | None) -> DirectoryColumns:
    """Numbers the new segment's classes as the store does; new ones come after."""
    if before is None or columns.class_names is None or columns.labels is None:
        return columns
    known = [os.fsencode(c) for c in before]
    merged = known + [c for c in columns.class_names if c not in set(known)]
    number = {name: i for i, name in enumerate(merged)}
    table = np.array([number[c] for c in columns.class_names], np.int64)
    labels = np.where(columns.labels < 0, -1, table[columns.labels])
    return replace(columns, labels=labels, class_names=tuple(merged))
