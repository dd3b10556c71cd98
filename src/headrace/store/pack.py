"""Writing stores: `pack` copies a source's samples, `append` adds a segment, `index` records where they lie.

One segment is packed (`packing`), a journal makes it resumable (`segment_writer`), and the finished folder
appears at the target by one rename (`publish`); until then nothing stands there.

An index has the source's own files as volumes. With checksums (the default) each sample is read once, in
parallel, so that later reads are checked; TFRecord files carry them already. Without, the recorded sizes
and modification times are all that stands between a changed file and the training.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.files import read_file, sync_folder
from headrace.base.progress import reporter
from headrace.errors import SourceError
from headrace.io.objects.location import is_url, local_path
from headrace.order.order import SEED_MAX, checked
from headrace.store.directory import DirectoryColumns, select_samples, write_directory
from headrace.store.format import PAGE_BYTES
from headrace.store.manifest import (
    Manifest,
    Segment,
    fingerprint_of,
    load_manifest,
    segment_of_header,
)
from headrace.store.opening import object_engine
from headrace.store.packing import PackingJob, PackOptions, WriteReport, fit_to_store, kind_of
from headrace.store.publish import (
    Partial,
    check_target,
    disk_errors,
    locked,
    not_durable,
    open_partial,
    partial_path,
)
from headrace.store.rewriting import ImageRecipe
from headrace.store.segment_writer import VOLUME_BYTES, PackedSamples
from headrace.store.sources.detect import open_source
from headrace.store.sources.extents import (
    ScanReader,
    plan_batches,
    read_ahead,
)
from headrace.store.sources.scan import (
    Problem,
    Scan,
    because,
    count_unlabelled,
    no_samples,
    source_options,
)
from headrace.store.trust import record_trust

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.base.progress import Progress


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
    format: str | None = None,  # noqa: A002 - what users call it
    images: str | None = None,
    shuffle: int | None = None,
    progress: Progress | bool | None = None,
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
        label: the one that holds integer labels; `label`, `labels` or `y` is found by itself. An empty
            string leaves out the labels of any source.
        format: what a folder holds, where that is not plain: `files` (each is a sample), `image`, `audio`,
            `video`, or a kind of shards, such as `tar`.
        images: rewrite JPEGs, so that they are decoded with less work: `lossless` keeps every pixel;
            `decoded,short=256` stores pixels, at most 256 on the short side, which need no decoding;
            `short=512,quality=92` reduces those whose short side has more pixels, and is lossy. What
            cannot be rewritten is kept as it is; `WriteReport.images` counts both.
        shuffle: a seed, 0 to 2^64 - 1: samples are packed in a random order that it alone decides, so that
            neighbours have nothing to do with each other (a blocked order reads neighbours together). A
            source that is read front to back, or lies in an object store, is copied beside the target
            first, which takes its size on the disk once more until all is done. None: in the source's order.
        progress: called with (samples done, samples, bytes done, bytes); totals may be None. True: a line
            every few seconds on stderr.
        options: everything else.
        storage_options: for URLs; see docs/howto/object-stores.md.

    Raises:
        OrderError: `shuffle` is no seed.
        StoreExists: something stands at `target`.
        SourceError: the source cannot be packed as it is.
        SourceChanged: it changed meanwhile, or since the interrupted run.
        VolumeError: the disk is full or fails; what is packed is kept for the next run.
    """
    options = _options(options, volume_bytes, workers)
    recipe = None if images is None else ImageRecipe.parse(images)
    shuffle = None if shuffle is None else checked("shuffle", shuffle, 0, SEED_MAX)
    chosen = source_options(
        extensions=extensions, prefix_names=prefix_names, on_error=on_error, workers=options.workers,
        column=column, label=label, format=format,
    )  # fmt: skip
    engine = object_engine(storage_options) if storage_options is not None else None

    def build(place: Path, overwrite: bool) -> WriteReport:
        started = time.monotonic()
        check_target(place, overwrite=overwrite)
        listed = open_source(source, chosen, engine)
        with ExitStack() as stack:
            with disk_errors(place):
                partial = stack.enter_context(open_partial(partial_path(place), listed.readers()))
                check_target(place, overwrite=overwrite)
            job = PackingJob(
                source=listed, partial=partial, options=options, on_error=on_error,
                progress=reporter(progress, "packing", bytes_are="read"), recipe=recipe, shuffle=shuffle,
            )  # fmt: skip
            job.begin(resume=resume)
            segment, page = job.run()
            with disk_errors(partial.path):
                _publish(partial, place, segment, page, overwrite=overwrite)
            partial.remove()
        return job.report(str(place), time.monotonic() - started)

    return _publish_at(target, build, storage_options, overwrite=overwrite)


def _publish(
    partial: Partial, place: Path, segment: Segment, page: bytes, *, overwrite: bool
) -> None:
    """Makes a store of one segment stand at its place."""
    manifest = Manifest(uuid.uuid4().hex, fingerprint_of([page]), (segment,))
    manifest.save(partial.store)
    partial.publish(place, overwrite=overwrite)
    record_trust(str(place), manifest)


def _publish_at(
    target: str | os.PathLike[str],
    build: Callable[[Path, bool], WriteReport],
    storage_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> WriteReport:
    """Builds a store where it shall stand, or in a staging folder and publishes it at a URL."""
    where = local_path(target)
    if not is_url(where):
        return build(Path(where), overwrite)
    from headrace.store.remote import publish_remotely

    try:
        return publish_remotely(
            lambda folder: build(folder, False), where, storage_options, overwrite=overwrite
        )
    except KeyboardInterrupt as e:
        e.__notes__ = [_NOTHING_KEPT]  # what was packed lay in a folder for the while
        raise


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
    format: str | None = None,  # noqa: A002 - what users call it
    images: str | None = None,
    shuffle: int | None = None,
    progress: Progress | bool | None = None,
    options: PackOptions | None = None,
) -> WriteReport:
    """Packs a source into a new segment of an existing store. Arguments as for `pack`.

    `shuffle` shuffles what is appended; samples that are in the store already stay where they are.

    Classes with names get the store's numbers, and new ones come after. Where the store's have names and the
    source's do not, or the other way round, nobody can say which class a number means: that is refused, but
    for an iterable whose labels are numbers of the store's classes.

    Open readers keep what they opened; those that open later see the new samples after the old.

    Raises:
        SourceError: a name is in the store already, labels are given in another way, or the source cannot
            be packed as it is.
        StoreError: another process is appending.
    """
    options = _options(options, volume_bytes, workers)
    recipe = None if images is None else ImageRecipe.parse(images)
    shuffle = None if shuffle is None else checked("shuffle", shuffle, 0, SEED_MAX)
    started = time.monotonic()
    place = Path(os.path.realpath(os.fspath(store)))
    manifest = load_manifest(place)
    with ExitStack() as stack:
        with disk_errors(place):
            stack.enter_context(locked(place, what="appending to"))
        manifest = load_manifest(place)
        chosen = source_options(
            extensions=extensions, prefix_names=prefix_names, on_error=on_error, workers=options.workers,
            column=column, label=label, format=format,
        )  # fmt: skip
        listed = open_source(source, chosen)
        if isinstance(listed, Scan):
            # Before a byte is copied; a stream's names are known at its end only.
            listed.columns = fit_to_store(listed.columns, listed.source, place)
        number = len(manifest.segments)
        with disk_errors(place):
            partial = stack.enter_context(open_partial(place / "append.partial", listed.readers()))
        job = PackingJob(
            source=listed, partial=partial, options=options, number=number, on_error=on_error,
            progress=reporter(progress, "appending", bytes_are="read"), before=place, recipe=recipe,
            shuffle=shuffle,
        )  # fmt: skip
        job.begin(resume=resume)
        segment, page = job.run()
        with disk_errors(place):
            try:
                _adopt(partial, place, manifest, segment, page)
            except OSError as e:
                if segment.uuid not in [s.uuid for s in load_manifest(place).segments]:
                    raise
                partial.remove()
                raise not_durable(place, e) from e
        partial.remove()
    return job.report(str(place), time.monotonic() - started)


def _options(options: PackOptions | None, volume_bytes: int, workers: int | None) -> PackOptions:
    options = options or PackOptions(volume_bytes=volume_bytes)
    return options if workers is None else replace(options, workers=workers)


def _adopt(
    partial: Partial, place: Path, manifest: Manifest, segment: Segment, page: bytes
) -> None:
    """Moves a finished segment into the store, then publishes it by the manifest."""
    for name in (segment.directory, *(v.path for v in segment.volumes)):
        (partial.store / name).replace(place / name)
    sync_folder(place)
    pages = [read_file(place / s.directory, PAGE_BYTES) for s in manifest.segments]
    whole = replace(
        manifest,
        fingerprint=fingerprint_of([*pages, page]),
        segments=(*manifest.segments, segment),
    )
    whole.save(place)
    record_trust(str(place), whole)


_AGAIN = "Nothing is left behind: run the same command again."
_NOTHING_KEPT = "nothing is kept; run the same command again"


def index(
    source: Any,
    target: str | os.PathLike[str],
    *,
    checksum: bool = True,
    workers: int | None = None,
    overwrite: bool = False,
    on_error: str = "raise",
    extensions: tuple[str, ...] | None = None,
    prefix_names: bool = False,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    format: str | None = None,  # noqa: A002 - what users call it
    progress: Progress | bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> WriteReport:
    """Makes a store whose volumes are the source's own files.

    Args:
        source: a folder, an uncompressed tar, TFRecord, npy, npz, HDF5, Parquet or Arrow file, MDS
            shards, or a `datasets.Dataset`; several files of one kind as a list or a pattern. URLs of
            tar, TFRecord, MDS and Parquet objects too.
        target: the store's folder, or the URL of one.
        checksum: read every sample once to record its checksum.
        workers: threads that read.
        overwrite: replace the store at `target`, atomically.
        on_error: `raise`, or `skip` samples that cannot be read and report them.
        extensions: folders: take only files that end so.
        prefix_names: several files: put the file's name before the samples' names.
        column: tables and arrays (HDF5, Parquet, Arrow, MDS): the column or data set whose values are the
            samples, or several, which become parts.
        label: the one that holds integer labels; `label`, `labels` or `y` is found by itself. An empty
            string leaves out the labels of any source.
        format: what a folder holds, where that is not plain: `files` (each is a sample), `image`, `audio`,
            `video`, or a kind of shards, such as `tar`.
        progress: as for `pack`.
        storage_options: for URLs; see docs/howto/object-stores.md.

    Raises:
        StoreExists: something stands at `target`.
        SourceError: the source cannot be indexed as it is.
        SourceChanged: it changed meanwhile.
        VolumeError: an object cannot be read or written.
    """
    threads = workers or min(8, 2 * (os.cpu_count() or 1))
    options = source_options(
        extensions=extensions, prefix_names=prefix_names, on_error=on_error, workers=threads,
        column=column, label=label, format=format,
    )  # fmt: skip

    def build(place: Path, overwrite: bool) -> WriteReport:
        started = time.monotonic()
        check_target(place, overwrite=overwrite)
        engine = object_engine(storage_options) if storage_options is not None else None
        scan = open_source(source, options, engine)
        if not isinstance(scan, Scan):
            where = scan.source.get("paths") or [scan.source.get("path", "the iterable")]
            raise SourceError(
                f"{where[0]} can only be read front to back, so "
                f"its samples have no place that could be indexed{because(scan)}.",
                next_step="Pack it instead, or decompress it first.",
            )
        skipped = list(scan.skipped)
        with ExitStack() as stack:
            with disk_errors(place, _AGAIN):
                partial = stack.enter_context(open_partial(partial_path(place), scan.readers()))
            try:
                columns = scan.columns
                if checksum and columns.crc is None:
                    columns, problems = _add_checksums(
                        scan, threads, on_error, reporter(progress, "indexing")
                    )
                    skipped += problems
                if not columns.samples:
                    raise no_samples(str(place))
                unlabelled, notes = count_unlabelled(scan, columns)
                with disk_errors(place, _AGAIN):
                    partial.begin({"version": 1, "index": True})
                    header = write_directory(columns, partial.store / "segment-0000.hrd")
                    segment = segment_of_header(
                        "segment-0000.hrd", header, scan.volumes, scan.source
                    )
                    _publish(partial, place, segment, header.to_page(), overwrite=overwrite)
            except KeyboardInterrupt as e:
                e.add_note(_NOTHING_KEPT)
                raise
            finally:
                # Nothing of an index is worth keeping for a second try.
                partial.remove()
                if scan.objects is not None:
                    scan.objects.close()
        seconds = time.monotonic() - started
        size = int(columns.length.sum())
        return WriteReport(
            str(place), columns.samples, size, 0, skipped, seconds, [*scan.notes, *notes],
            kind_of(scan.source), unlabelled_samples=unlabelled,
        )  # fmt: skip

    return _publish_at(target, build, storage_options, overwrite=overwrite)


def _add_checksums(
    scan: Scan, workers: int, on_error: str, progress: Progress | None
) -> tuple[DirectoryColumns, list[Problem]]:
    """Reads every sample once."""
    reader = ScanReader(scan, on_error=on_error)
    pieces: list[PackedSamples] = []
    problems: list[Problem] = []
    total = int(scan.columns.length.sum())
    done = 0
    for batch in read_ahead(plan_batches(scan), reader.read_checksums, workers):
        pieces.append(PackedSamples(batch.counts, batch.length, batch.crc))
        problems += batch.problems
        done += batch.plan.size_bytes
        if progress is not None:
            progress(batch.plan.end, scan.columns.samples, done, total)
        reader.recycle(batch)
    packed = PackedSamples.join(pieces)
    columns = scan.columns
    if not packed.counts.all():
        columns = select_samples(columns, np.flatnonzero(packed.counts))
    columns.crc = packed.crc
    return columns, problems
