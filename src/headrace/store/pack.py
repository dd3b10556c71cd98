"""Packing: copies a source's samples into volumes that headrace reads fast.

One segment is packed (`packing`), a journal makes it resumable (`journal`), and the finished folder
appears at the target by one rename (`publish`); until then nothing stands there. `append` does the same
for one more segment of an existing store.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.files import read_file, sync_folder
from headrace.io.objects.location import is_url, local_path
from headrace.store.fitting import fit_to_store
from headrace.store.format import PAGE_BYTES
from headrace.store.manifest import Manifest, fingerprint_of, load_manifest
from headrace.store.opening import object_engine
from headrace.store.packing import PackingJob, PackOptions, WriteReport
from headrace.store.partial import Partial, open_partial, partial_path
from headrace.store.publish import check_target, disk_errors, locked, not_durable
from headrace.store.segment_writer import VOLUME_BYTES
from headrace.store.sources.detect import open_source
from headrace.store.sources.scan import Scan, Stream, source_options
from headrace.store.trust import record_trust

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.manifest import Segment
    from headrace.store.packing import Progress
    from headrace.store.sources.scan import SourceOptions


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
    with ExitStack() as stack:
        with disk_errors(place):
            partial = stack.enter_context(open_partial(partial_path(place), found.readers()))
            check_target(place, overwrite=overwrite)
            _begin(partial, found, options, 0, resume=resume)
        job = PackingJob(
            found=found, partial=partial, options=options, on_error=on_error, progress=progress
        )
        segment, page = job.run()
        with disk_errors(partial.path):
            manifest = Manifest(uuid.uuid4().hex, fingerprint_of([page]), (segment,))
            manifest.save(partial.store)
            partial.publish(place, overwrite=overwrite)
            record_trust(str(place), manifest)
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
    place = Path(os.path.realpath(os.fspath(store)))
    manifest = load_manifest(place)
    with ExitStack() as stack:
        with disk_errors(place):
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
        number = len(manifest.segments)
        with disk_errors(place):
            partial = stack.enter_context(open_partial(place / "append.partial", found.readers()))
            _begin(partial, found, options, number, resume=resume)
        job = PackingJob(
            found=found, partial=partial, options=options, number=number, on_error=on_error,
            progress=progress, before=place,
        )  # fmt: skip
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
    pages = [read_file(place / s.directory, PAGE_BYTES) for s in manifest.segments]
    whole = replace(
        manifest,
        fingerprint=fingerprint_of([*pages, page]),
        segments=(*manifest.segments, segment),
    )
    whole.save(place)
    record_trust(str(place), whole)
