"""Packing: one segment made of a source's samples.

Threads read ahead in the source's order, and rewrite pictures where that is asked for (`rewriting`); one writer
appends (`segment_writer`). What an interrupted run has packed is not packed again.

A shuffled pack reads its source at random: sample p of the segment is the source's sample P(p), by the keyed
permutation P of the seed. What can only be read front to back, or costs a request for each sample, is copied to
a spool in the partial folder first and shuffled from there: two passes, in the memory of a few batches, and in
twice the bytes on the disk until the segment is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.text import counted
from headrace.errors import SourceChanged, SourceError
from headrace.order.hash import Purpose, derive_key, keyed
from headrace.store.directory import (
    DirectoryColumns,
    columns_of,
    duplicate_name,
    select_samples,
    split_names,
)
from headrace.store.publish import SPOOL, check_free_space, disk_errors, open_partial
from headrace.store.rewriting import BrokenPictures, ImageRecipe, RewrittenImages, recorded_images
from headrace.store.segment_writer import JOURNAL_BYTES, VOLUME_BYTES, PackedSamples, SegmentWriter
from headrace.store.sources.extents import BATCH_BYTES, ScanReader, plan_batches, read_ahead
from headrace.store.sources.scan import (
    EXACT,
    Problem,
    Scan,
    Stream,
    StreamItem,
    count_unlabelled,
    inexact,
    joined_numbers,
    no_samples,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace.base.progress import Progress
    from headrace.store.manifest import Segment
    from headrace.store.publish import Partial
    from headrace.store.sources.extents import ReadPlan, SourceBatch
    from headrace.store.store import Store

_DIRECTORY_BYTES_PER_SAMPLE = 40
"""For the free-space check: extents, labels and the name tree's offsets, generously."""

_SAMPLES_AT_ONCE = 4096
_NAMES_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How to pack. The defaults suit nearly everyone.

    Attributes:
        volume_bytes: a new volume begins before one would grow beyond this.
        workers: threads that read the source.
        batch_bytes: bytes that one thread reads at once.
        journal_bytes: bytes between two records of the journal: what a crash can cost, or what was packed in
            five seconds, if that is less.
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
        notes: what was left out because it is no sample.
        kind: what the source was taken for: `files`, `3 tar files`, `zarr`, ...
        images: what became of JPEGs; None unless they were to be rewritten.
        unlabelled_samples: how many samples have no label.
    """

    path: str
    samples: int
    bytes: int
    resumed_samples: int
    skipped: list[Problem]
    seconds: float
    notes: list[str] = field(default_factory=list)
    kind: str = ""
    images: RewrittenImages | None = None
    unlabelled_samples: int = 0


def kind_of(source: Mapping[str, Any]) -> str:
    """What a source was taken for, as a message shows it."""
    kind, paths = str(source.get("kind", "")), source.get("paths")
    if kind == "folder":
        return "files"
    return f"{len(paths):,} {kind} file{'s' * (len(paths) > 1)}" if paths else kind


@dataclass(slots=True, kw_only=True)
class PackingJob:
    """One segment being packed: what, into what, and how far it is."""

    source: Scan | Stream
    partial: Partial
    options: PackOptions
    number: int = 0
    on_error: str
    progress: Progress | None
    before: Path | None = None  # the store that the segment is appended to
    recipe: ImageRecipe | None = None  # how JPEGs are rewritten; None: they are not
    shuffle: int | None = None
    """The seed of the order in which samples are packed; None: in the source's."""
    images: RewrittenImages | None = None  # what became of them
    skipped: list[Problem] = field(default_factory=list)
    resumed: int = 0
    samples: int = 0
    bytes_done: int = 0
    bytes_read: int = 0  # of a stream's samples; where JPEGs are rewritten fewer are written
    unlabelled: int = 0  # how many samples have no label
    notes: list[str] = field(default_factory=list)  # what the report says beside the source's notes
    broken: BrokenPictures = field(default_factory=BrokenPictures)
    """Pictures that are seen to be empty or cut off."""

    def begin(self, *, resume: bool) -> None:
        """Goes on with what an interrupted run has packed in the same way, or starts over.

        Raises SourceChanged if it packed other data or in another way, and SourceError if the source cannot
        be read.
        """
        before = self.partial.interrupted(self.number) if resume else None
        if before is not None:
            self._check_seed(before)
        if self.shuffle is not None:
            self._shuffle_source(self.shuffle, resume=resume)
        source = self.source
        identity = {
            "version": 1,
            "segment": self.number,
            "volume_bytes": self.options.volume_bytes,
            "source": source.source,
            "images": None if self.recipe is None else str(self.recipe),
            "listing": source.listing_hash().hex() if isinstance(source, Scan) else "stream",
        }
        with disk_errors(self.partial.path):
            (self.partial.resume if resume else self.partial.begin)(identity)

    def run(self) -> tuple[Segment, bytes]:
        """Packs what is not packed yet and finishes the segment."""
        if isinstance(self.source, Scan):
            count_unlabelled(self.source, self.source.columns)  # refused before a byte is copied
        with self._packed() as (writer, columns):
            self.unlabelled, self.notes = count_unlabelled(self.source, columns)
            of = self.source.columns if isinstance(self.source, Scan) else columns
            self.notes += self.broken.notes(of.name)
            source = self.source.source
            if self.images is not None:
                source = source | {"images": self.images.to_json()}
            segment, page = writer.finish(columns, source)
            self.samples, self.bytes_done = segment.samples, writer.bytes_done
        return segment, page

    @contextlib.contextmanager
    def _packed(self) -> Iterator[tuple[SegmentWriter, DirectoryColumns]]:
        """The writer of all samples, and their columns; what is packed is kept if the block fails."""
        writer = self._new_writer()
        if not writer.resumable():
            # The disk lost what it had promised: start over rather than trust the rest.
            assert self.partial.journal.identity is not None
            self.partial.begin(self.partial.journal.identity)
            writer = self._new_writer()
        self.resumed = writer.samples_done
        if self.recipe is not None:
            self.images = recorded_images(writer.note) or RewrittenImages(str(self.recipe))
        try:
            if isinstance(self.source, Scan):
                columns = self._pack_scan(self.source, writer)
            else:
                columns = self._pack_stream(self.source, writer)
            yield writer, self._fitted(columns)
        except BaseException as e:
            # After an error in the source only what is in the journal already is kept for a second try: a
            # short pack is cheaper to do again than to explain.
            if not isinstance(e, SourceError):
                with contextlib.suppress(OSError):  # the error that brought us here says more
                    writer.commit()
            if not writer.samples_durable and not (self.partial.path / SPOOL).exists():
                self.partial.remove()
            if isinstance(e, KeyboardInterrupt):
                what = "document" if self.source.source.get("kind") == "tokenized" else "sample"
                kept = f"{counted(writer.samples_durable, what)} packed and kept"
                e.add_note(f"{kept}; the same command goes on from there")
            raise
        finally:
            writer.close()

    def _check_seed(self, before: Mapping[str, Any]) -> None:
        """Refuses another order than the interrupted run's, before the source is read."""
        stated = before.get("source")
        shuffle = stated.get("shuffle") if isinstance(stated, dict) else None
        was = shuffle.get("seed") if isinstance(shuffle, dict) else None
        if was == self.shuffle:
            return
        given = [
            "in the source's order" if seed is None else f"shuffled by seed {seed}"
            for seed in (was, self.shuffle)
        ]
        how = "no seed" if was is None else f"seed {was}"
        raise SourceChanged(
            f"{self.partial.path}: an interrupted run packed {given[0]} here, expected the same, "
            f"not {given[1]}.",
            path=str(self.partial.path),
            next_step=f"Give {how} again to go on, or start over: --restart (in Python resume=False).",
        )

    def _shuffle_source(self, seed: int, *, resume: bool) -> None:
        """Makes the source one whose samples come in random order."""
        source = self.source
        if isinstance(source, Stream) or source.objects is not None:
            source = self._spooled(resume=resume)
            self.on_error = "raise"  # what could not be read was left out of the spool
        columns, n = source.columns, source.columns.samples
        if n:  # an empty one is refused in the end, however it is packed
            order = keyed(n, derive_key(seed, Purpose.PACKED)).range(0, n)
            columns = select_samples(columns, order)
        stated = source.source | {"shuffle": {"seed": seed}}
        self.source = replace(source, columns=columns, source=stated)

    def _spooled(self, *, resume: bool) -> Scan:
        """The source's samples in its own order, as a copy that can be read at random."""
        progress = self.progress
        path = self.partial.path / SPOOL
        try:
            with contextlib.ExitStack() as stack:
                with disk_errors(self.partial.path):
                    partial = stack.enter_context(open_partial(path, self.source.readers()))
                job = PackingJob(
                    source=self.source, partial=partial, options=self.options, number=self.number,
                    on_error=self.on_error, before=self.before,
                    # Half of the work, whose end is not known.
                    progress=progress and (lambda n, _, size, __: progress(n, None, size, None)),
                )  # fmt: skip
                job.begin(resume=resume)
                with job._packed() as (writer, columns):
                    volumes = writer.finish_spool(columns)
        except BaseException:
            if not path.exists():  # nothing that a second try could use
                self.partial.remove()
            raise
        notes, source = list(self.source.notes), dict(self.source.source)
        return Scan(columns, volumes, source, job.skipped, notes)

    def report(self, path: str, seconds: float) -> WriteReport:
        """What was done."""
        return WriteReport(
            path, self.samples, self.bytes_done, self.resumed, self.skipped, seconds,
            [*self.source.notes, *self.notes], kind_of(self.source.source), self.images, self.unlabelled,
        )  # fmt: skip

    def _fitted(self, columns: DirectoryColumns) -> DirectoryColumns:
        if not columns.samples:
            raise no_samples(str(self.source.source.get("path", "the source")))
        if self.before is not None and isinstance(self.source, Stream):
            return fit_to_store(columns, self.source.source, self.before)
        return columns

    def _new_writer(self) -> SegmentWriter:
        return SegmentWriter(
            self.partial.store, self.number, self.partial.journal,
            volume_bytes=self.options.volume_bytes, journal_bytes=self.options.journal_bytes,
        )  # fmt: skip

    def _append(
        self, writer: SegmentWriter, samples: PackedSamples, data: memoryview,
        images: RewrittenImages | None = None,
    ) -> None:  # fmt: skip
        note = None
        if self.images is not None and images is not None:
            self.images.add(images)
            note = {"images": self.images.to_json()}
        self.broken.look(writer.samples_done, samples.counts, samples.length, data)
        writer.append(samples, data, note)

    def _pack_scan(self, scan: Scan, writer: SegmentWriter) -> DirectoryColumns:
        """Samples that lie at known places."""
        self.skipped += scan.skipped
        columns, total = scan.columns, int(scan.columns.length.sum())
        # Bytes of the source: what is packed may be fewer, or more.
        done = int(columns.length[: int(columns.firsts[writer.samples_done])].sum())
        needed = total - done + len(columns.names)
        needed += columns.extents * _DIRECTORY_BYTES_PER_SAMPLE
        check_free_space(self.partial.path, needed)
        reader = ScanReader(scan, on_error=self.on_error)
        plans = plan_batches(scan, writer.samples_done, self.options.batch_bytes)

        def read(plan: ReadPlan) -> tuple[SourceBatch, RewrittenImages | None]:
            batch, images = reader.read(plan), None
            # What is too large for memory is too large for a picture.
            if self.recipe is not None and batch.data is not None:
                batch.data, batch.length, batch.crc, images = self.recipe.rewrite(
                    batch.data, batch.length, batch.crc
                )
            return batch, images

        for batch, images in read_ahead(plans, read, self.options.workers):
            if batch.data is not None:
                samples = PackedSamples(batch.counts, batch.length, batch.crc)
                self._append(writer, samples, batch.data, images)
            else:
                first = int(columns.firsts[batch.plan.begin])
                pieces = (reader.pieces(first + k) for k in range(len(batch.length)))
                try:
                    writer.append_large(batch.counts, batch.length, pieces)
                except SourceError as e:
                    if self.on_error != "skip":
                        raise
                    writer.append(PackedSamples.of([0], [], []), memoryview(b""))
                    batch.problems.append(Problem.of(e))
            self.skipped += batch.problems
            reader.recycle(batch)
            done += batch.plan.size_bytes
            if self.progress is not None:
                self.progress(writer.samples_done, columns.samples, done, total)
        counts = writer.packed().counts
        kept = columns if counts.all() else select_samples(columns, np.flatnonzero(counts))
        # A packed sample has no modification time: equal bytes make equal stores.
        return replace(kept, mtime=None)

    def _pack_stream(self, stream: Stream, writer: SegmentWriter) -> DirectoryColumns:
        """Samples that are read front to back."""
        metadata = StreamMetadata()
        done = writer.packed()
        resumed = len(done.counts)
        size = 0
        batch: list[StreamItem] = []
        first, items = 0, None
        if stream.resumed is not None and resumed:
            names, items = stream.resumed(resumed)
            for name in names:
                metadata.add(StreamItem(name, ((b"", b""),)))
            first = len(names)
        with ThreadPoolExecutor(self.options.workers, "headrace-rewrite") as pool:
            for i, item in enumerate(items or stream.items(), first + 1):
                metadata.add(item)
                batch.append(item)
                nbytes = sum(len(data) for _, data in item.parts)
                size, self.bytes_read = size + nbytes, self.bytes_read + nbytes
                full = size >= self.options.batch_bytes or len(batch) >= _SAMPLES_AT_ONCE
                if full or i == resumed or (i > resumed and writer.late()):
                    self._take(batch, i - len(batch), done, writer, pool)
                    batch, size = [], 0
            if batch:
                first = len(metadata.names) - len(batch)
                self._take(batch, first, done, writer, pool)
        if len(metadata.names) < resumed:
            raise SourceChanged(
                f"The source gave {len(metadata.names):,} samples, an interrupted run had packed "
                f"{resumed:,}.", next_step=_AGAIN,
            )  # fmt: skip
        self.skipped += stream.skipped
        columns = metadata.columns()
        if stream.class_names is not None:
            columns.class_names = stream.class_names()
        return columns

    def _take(
        self, items: list[StreamItem], first: int, done: PackedSamples, writer: SegmentWriter,
        pool: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        """Packs consecutive items from number `first` on, or checks them where they are packed already."""
        # Rewriting takes long enough to be shared out.
        each = len(items) if self.recipe is None else -(-len(items) // self.options.workers)
        shares = [items[begin : begin + each] for begin in range(0, len(items), each)]
        prepared = (
            map(self._prepared, shares) if len(shares) == 1 else pool.map(self._prepared, shares)
        )
        for share, (samples, data, images) in zip(shares, prepared, strict=True):
            if first < len(done.counts):
                _check_resumed(share, first, samples, done)
                first += len(share)
            else:
                self._append(writer, samples, data, images)
        if self.progress is not None and first >= len(done.counts):
            self.progress(writer.samples_done, None, self.bytes_read, None)

    def _prepared(
        self, items: list[StreamItem]
    ) -> tuple[PackedSamples, memoryview, RewrittenImages | None]:
        """A stream's items as they are packed."""
        pieces = [memoryview(data).cast("B") for item in items for _, data in item.parts]
        counts, length = [len(item.parts) for item in items], [len(p) for p in pieces]
        samples = PackedSamples.of(counts, length, [crc32c(p) for p in pieces])
        data, images = memoryview(b"".join(pieces)), None
        if self.recipe is not None:
            data, *columns, images = self.recipe.rewrite(data, samples.length, samples.crc)
            samples = PackedSamples.of(counts, *columns)
        return samples, data, images


_AGAIN = "Give the same samples again, or pass resume=False to start over."


def _check_resumed(
    items: list[StreamItem], first: int, given: PackedSamples, done: PackedSamples
) -> None:
    """Checks that a stream gives samples as it did before."""
    at, extent = 0, int(done.counts[:first].sum())
    for i, item in enumerate(items, first):
        end, stop = extent + int(done.counts[i]), at + len(item.parts)
        now = list(zip(given.length[at:stop].tolist(), given.crc[at:stop].tolist(), strict=True))
        packed = list(
            zip(done.length[extent:end].tolist(), done.crc[extent:end].tolist(), strict=True)
        )
        if now != packed:
            name = os.fsdecode(item.name)
            raise SourceChanged(
                f"Sample {i} ({name!r}) has (length, crc32c) {now}, an interrupted run had packed {packed}.",
                index=i, name=name, next_step=_AGAIN,
            )  # fmt: skip
        extent, at = end, stop


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
            columns={name: _column(name, values) for name, values in self._columns.items()},
        )  # fmt: skip


def _column(name: str, values: list[int | float]) -> NDArray[Any]:
    column = np.array(values)
    if column.dtype.kind == "f":
        beyond = [value for value in values if isinstance(value, int) and abs(value) >= EXACT]
        if beyond:
            raise inexact(name, "the samples", f"{beyond[0]} is one")
    return column


def fit_to_store(
    columns: DirectoryColumns, source: Mapping[str, Any], place: Path
) -> DirectoryColumns:
    """Makes a new segment agree with its store at `place`: new names, the same classes and columns.

    Raises SourceError if a name is taken, the columns differ, or labels would mean other classes.
    """
    from headrace.store.opening import open_store

    names = split_names(columns.names, columns.name_offsets)
    with open_store(place) as store:
        for start in range(0, len(names), _NAMES_AT_ONCE):
            indices = store.find_many(names[start : start + _NAMES_AT_ONCE])
            for at in np.flatnonzero(indices >= 0)[:1].tolist():
                name = os.fsdecode(names[start + at])
                raise SourceError(
                    f"{store.path}: the name {name!r} is sample {int(indices[at])} of the store already, "
                    "expected new names.",
                    path=store.path, name=name,
                    next_step="Append samples with new names, or pack a new store.",
                )  # fmt: skip
        if store.columns.keys() != columns.columns.keys():
            raise SourceError(
                f"{place}: the new samples have the columns {sorted(columns.columns)}, the store "
                f"has {sorted(store.columns)}.",
                path=str(place),
                next_step="Append samples with the same columns.",
            )
        for name, column in columns.columns.items():
            joined_numbers((store.columns[name], column), name, str(place))
        return _merge_classes(columns, source, store)


def _merge_classes(
    columns: DirectoryColumns, source: Mapping[str, Any], store: Store
) -> DirectoryColumns:
    """Numbers the new segment's classes as the store does; new ones come after."""
    if columns.labels is None or int(columns.labels.max(initial=-1)) < 0:
        return replace(columns, class_names=None)  # which would name the store's labels
    before, names = store.classes or [], columns.class_names or ()
    highest = int(columns.labels.max())
    if names and not before:
        highest = -1 if store.labels is None else int(store.labels.max(initial=-1))
        if highest < 0:
            return columns
        what = (
            f"classes with names ({_shown(map(os.fsdecode, names))}), the store's are numbers without "
            f"names (up to {highest}), expected numbers"
        )
    elif names:
        merged = list(dict.fromkeys([*map(os.fsencode, before), *names]))
        number = {name: i for i, name in enumerate(merged)}
        table = np.array([number[c] for c in names], np.int64)
        labels = np.where(columns.labels < 0, -1, table[columns.labels])
        return replace(columns, labels=labels, class_names=tuple(merged))
    elif not before or (source.get("kind") == "iterable" and highest < len(before)):
        return columns  # a program's numbers are those of the store's classes
    elif source.get("kind") == "iterable":
        what = (
            f"numbers up to {highest}, the store has {counted(len(before), 'class', 'classes')} "
            f"({_shown(before)}), expected 0 to {len(before) - 1}"
        )
    else:
        what = (
            f"numbers without names (up to {highest}), the store's are classes with names "
            f"({_shown(before)}), expected names"
        )
    raise SourceError(
        f"{store.path}: the labels of the new samples are {what}.",
        path=store.path,
        next_step="Give labels as the store has them, or append without: --label '' (in Python label='').",
    )


def _shown(classes: Iterable[str]) -> str:
    first, *others = itertools.islice(classes, 4)
    return ", ".join(map(repr, [first, *others[:2]])) + ", ..." * (len(others) > 2)
