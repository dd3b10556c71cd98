"""Packing: copies a source's samples into volumes that headrace reads fast.

Threads read ahead in the source's order, one writer appends (`segment_writer`), a journal makes it
resumable (`journal`), and the finished folder appears at the target by one rename (`publish`). Until
then nothing stands there. `append` does the same for one more segment of an existing store.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import SourceChanged, SourceError, StoreError, VolumeError
from headrace.io.objects.location import is_url, local_path
from headrace.store.checksum import crc32c
from headrace.store.directory_writer import DirectoryColumns
from headrace.store.journal import PackedSamples
from headrace.store.manifest import Manifest, fingerprint_of, load_manifest
from headrace.store.names import duplicate_name, join_names, split_names
from headrace.store.opening import object_engine
from headrace.store.partial import Partial, open_partial, partial_path
from headrace.store.publish import (
    check_free_space,
    check_target,
    locked,
    sync_folder,
)
from headrace.store.segment_writer import JOURNAL_BYTES, VOLUME_BYTES, SegmentWriter
from headrace.store.sources.detect import open_source
from headrace.store.sources.extents import BATCH_BYTES, ScanReader, SourceBatch, plan_batches
from headrace.store.sources.scan import (
    Problem,
    Scan,
    Stream,
    StreamItem,
    no_samples,
    source_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.manifest import Segment
    from headrace.store.sources.scan import SourceOptions
    from headrace.store.store import Store

    Progress = Callable[[int, int | None, int, int | None], None]

_NAMES_AT_ONCE = 1 << 16

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


def pack(
    source: Any,
    target: str | os.PathLike[str],
    *,
    volume_bytes: int = VOLUME_BYTES,
    workers: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    on_error: str = "raise",
    extensions: tuple[str, ...] | None = None,
    prefix_names: bool = False,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    progress: Progress | None = None,
    options: PackOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> WriteReport:
    """Packs a source into a new store at `target`.

    Args:
        source: a folder, a tar, TFRecord, npy, npz, HDF5, Parquet, Arrow or ArrayRecord file, MDS
            shards, a `datasets.Dataset`, or an iterable of samples; several files of one kind as a
            list or a pattern.
        target: the store's folder, or the URL of one, which appears when all is done.
        volume_bytes: size of the store's files.
        workers: threads that read the source.
        overwrite: replace the store at `target`, atomically.
        resume: go on where an interrupted run stopped; else start over.
        on_error: `raise`, or `skip` samples that cannot be read and report them.
        extensions: folders: take only files that end so.
        prefix_names: several files: put the file's name before the samples' names.
        column: tables and arrays (HDF5, Parquet, Arrow, MDS): the column or data set whose values are the
            samples, or several, which become parts.
        label: the one that holds integer labels; `label`, `labels` or `y` is found by itself, an
            empty string means none.
        progress: called with (samples done, samples, bytes done, bytes); totals may be None.
        options: everything else.
        storage_options: for URLs; see docs/howto/object-stores.md.

    Raises:
        StoreExists: something stands at `target`.
        SourceError: the source cannot be packed as it is.
        SourceChanged: it changed meanwhile, or since the interrupted run.
        VolumeError: the disk is full or fails; what is packed is kept for the next run.
    """
    options = _options(options, volume_bytes, workers)
    chosen = source_options(
        extensions=extensions, prefix_names=prefix_names, on_error=on_error, workers=options.workers,
        column=column, label=label,
    )  # fmt: skip
    where = local_path(target)
    engine = object_engine(storage_options) if storage_options is not None else None
    if not is_url(where):
        return _pack(
            source, Path(where), chosen, options, engine, overwrite=overwrite, resume=resume,
            progress=progress,
        )  # fmt: skip
    from headrace.store.remote_publish import publish_remotely

    def build(folder: Path) -> WriteReport:
        return _pack(
            source, folder, chosen, options, engine, overwrite=False, resume=False,
            progress=progress,
        )  # fmt: skip

    return publish_remotely(build, where, storage_options, overwrite=overwrite)


def _pack(
    source: Any,
    place: Path,
    chosen: SourceOptions,
    options: PackOptions,
    engine: ObjectEngine | None,
    *,
    overwrite: bool,
    resume: bool,
    progress: Progress | None,
) -> WriteReport:
    started = time.monotonic()
    check_target(place, overwrite=overwrite)
    found = open_source(source, chosen, engine)
    on_error = chosen.on_error
    with open_partial(partial_path(place)) as partial:
        check_target(place, overwrite=overwrite)
        _begin(partial, found, options, 0, resume=resume)
        job = _Job(
            found=found, partial=partial, options=options, on_error=on_error, progress=progress
        )
        segment, page = job.run()
        with disk_errors(partial.path):
            Manifest(uuid.uuid4().hex, fingerprint_of([page]), (segment,)).save(partial.store)
            partial.publish(place, overwrite=overwrite)
        partial.remove()
    return job.report(str(place), time.monotonic() - started)


def append(
    source: Any,
    store: str | os.PathLike[str],
    *,
    volume_bytes: int = VOLUME_BYTES,
    workers: int | None = None,
    resume: bool = True,
    on_error: str = "raise",
    extensions: tuple[str, ...] | None = None,
    prefix_names: bool = False,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    progress: Progress | None = None,
    options: PackOptions | None = None,
) -> WriteReport:
    """Packs a source into a new segment of an existing store. Arguments as for `pack`.

    Open readers keep what they opened; those that open later see the new samples after the old.

    Raises:
        SourceError: a name is in the store already, or the source cannot be packed as it is.
        StoreError: another process is appending.
    """
    options = _options(options, volume_bytes, workers)
    started = time.monotonic()
    place = Path(os.path.abspath(os.fspath(store)))
    manifest = load_manifest(place)
    with ExitStack() as stack:
        stack.enter_context(locked(place, what="appending to"))
        manifest = load_manifest(place)
        chosen = source_options(
            extensions=extensions, prefix_names=prefix_names, on_error=on_error, workers=options.workers,
            column=column, label=label,
        )  # fmt: skip
        found = open_source(source, chosen)
        if isinstance(found, Scan):
            # Before a byte is copied; a stream's names are known at its end only.
            found.columns = fit_to_store(found.columns, place)
        partial = stack.enter_context(open_partial(place / "append.partial"))
        number = len(manifest.segments)
        _begin(partial, found, options, number, resume=resume)
        job = _Job(
            found=found, partial=partial, options=options, number=number, on_error=on_error,
            progress=progress, before=place,
        )  # fmt: skip
        segment, page = job.run()
        with disk_errors(place):
            _adopt(partial, place, manifest, segment, page)
        partial.remove()
    return job.report(str(place), time.monotonic() - started)


def _options(options: PackOptions | None, volume_bytes: int, workers: int | None) -> PackOptions:
    options = options or PackOptions(volume_bytes=volume_bytes)
    return options if workers is None else replace(options, workers=workers)


def _begin(
    partial: Partial, found: Scan | Stream, options: PackOptions, number: int, *, resume: bool
) -> None:
    identity = {
        "version": 1,
        "segment": number,
        "volume_bytes": options.volume_bytes,
        "source": found.source,
        "listing": found.listing_hash().hex() if isinstance(found, Scan) else "stream",
    }
    if resume:
        partial.resume(identity)
    else:
        partial.begin(identity)


def _adopt(
    partial: Partial, place: Path, manifest: Manifest, segment: Segment, page: bytes
) -> None:
    """Moves a finished segment into the store, then publishes it by the manifest."""
    for name in (segment.directory, *(v.path for v in segment.volumes)):
        (partial.store / name).replace(place / name)
    sync_folder(place)
    pages = [_header_page(place / s.directory) for s in manifest.segments]
    replace(
        manifest,
        fingerprint=fingerprint_of([*pages, page]),
        segments=(*manifest.segments, segment),
    ).save(place)


def _header_page(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(4096)


class disk_errors:  # noqa: N801 - used like a function
    """Turns the system's refusals while publishing into `VolumeError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError | VolumeError):
            raise VolumeError(
                f"{self._path}: publishing failed: {error.strerror}.",
                path=str(self._path),
                errno=error.errno,
                next_step="What is packed is kept: run the same command again to resume.",
            ) from error


@dataclass(slots=True, kw_only=True)
class _Job:
    """One segment being packed: what, into what, and how far it is."""

    found: Scan | Stream
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
        if isinstance(self.found, Scan):
            self.skipped += self.found.skipped
        writer = self._open_writer()
        try:
            if isinstance(self.found, Scan):
                columns = self._pack_scan(self.found, writer)
            else:
                columns = self._pack_stream(self.found, writer)
            segment, page = writer.finish(columns, self.found.source)
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
        writer = self._new_writer()
        if not writer.resumable():
            # The disk lost what it had promised: start over rather than trust the rest.
            identity = self.partial.journal.identity
            assert identity is not None
            self.partial.begin(identity)
            writer = self._new_writer()
        self.resumed = writer.samples_done
        return writer

    def _new_writer(self) -> SegmentWriter:
        return SegmentWriter(
            self.partial.store, self.number, self.partial.journal,
            volume_bytes=self.options.volume_bytes, journal_bytes=self.options.journal_bytes,
        )  # fmt: skip

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
        for batch in self._read_ahead(scan, reader, writer.samples_done):
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

    def _read_ahead(self, scan: Scan, reader: ScanReader, begin: int) -> Iterator[SourceBatch]:
        plans = plan_batches(scan, begin, self.options.batch_bytes)
        ahead: deque[Future[SourceBatch]] = deque()
        with ThreadPoolExecutor(self.options.workers, "headrace-pack") as pool:
            try:
                for plan in plans:
                    ahead.append(pool.submit(reader.read, plan))
                    if len(ahead) > self.options.workers:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

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
        metadata = _StreamMetadata()
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
    found = [(len(data), crc32c(data)) for _, data in item.parts]
    packed = list(zip(done.length[extent:end].tolist(), done.crc[extent:end].tolist(), strict=True))
    if found != packed:
        raise SourceChanged(
            f"Sample {i} ({os.fsdecode(item.name)!r}) has (length, crc32c) {found}, an interrupted "
            f"run had packed {packed}.",
            index=i,
            name=os.fsdecode(item.name),
            next_step="Give the same samples again, or pass resume=False to start over.",
        )
    return end


class _StreamMetadata:
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
        names, offsets = join_names(self.names)
        part_names = tuple(sorted(set(self._parts))) or (b"",)
        number = {name: i for i, name in enumerate(part_names)}
        firsts = np.zeros(len(self.names) + 1, np.uint64)
        np.cumsum(np.array(self._counts, np.uint64), out=firsts[1:])
        empty = np.zeros(len(self._parts), np.uint64)
        several = len(part_names) > 1
        return DirectoryColumns(
            names, offsets, empty, empty, empty,
            first_extent=firsts if int(firsts[-1]) != len(self.names) else None,
            part=np.array([number[p] for p in self._parts], np.uint16) if several else None,
            part_names=part_names,
            labels=np.array(self._labels, np.int64),
            columns={name: np.array(values) for name, values in self._columns.items()},
        )  # fmt: skip


def keep_samples(columns: DirectoryColumns, keep: Any) -> DirectoryColumns:
    """The columns of the samples where `keep` ((n,) bool) is true."""
    wanted = np.flatnonzero(keep)
    all_names = split_names(columns.names, columns.name_offsets)
    names, offsets = join_names([all_names[i] for i in wanted])
    firsts = columns.firsts.astype(np.int64)
    extents = np.repeat(keep, np.diff(firsts))
    new_firsts = np.zeros(len(wanted) + 1, np.uint64)
    np.cumsum(np.diff(firsts)[wanted].astype(np.uint64), out=new_firsts[1:])

    def of_extents(values: Any) -> Any:
        return None if values is None else values[extents]

    return DirectoryColumns(
        names, offsets, columns.volume[extents], columns.offset[extents], columns.length[extents],
        crc=of_extents(columns.crc),
        mtime=of_extents(columns.mtime),
        first_extent=None if columns.first_extent is None else new_firsts,
        part=of_extents(columns.part),
        part_names=columns.part_names,
        labels=None if columns.labels is None else columns.labels[wanted],
        class_names=columns.class_names,
        columns={k: v[wanted] for k, v in columns.columns.items()},
    )  # fmt: skip


def fit_to_store(columns: DirectoryColumns, place: Path) -> DirectoryColumns:
    """Makes a new segment agree with its store: new names, the same classes and columns.

    Raises:
        SourceError: a name is taken, or the columns differ.
    """
    from headrace.store.store import open_store

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
        found = store.find_many(names[start : start + _NAMES_AT_ONCE])
        taken = np.flatnonzero(found >= 0)
        if len(taken):
            name = os.fsdecode(names[start + int(taken[0])])
            raise SourceError(
                f"{store.path}: the name {name!r} is sample {int(found[taken[0]])} of the store "
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
