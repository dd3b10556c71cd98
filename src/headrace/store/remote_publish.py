"""Publishing a store to an object prefix: all of it, or nothing.

The store is built in a local staging folder, then uploaded: volumes and directories first, under names
that no other store has, the manifest last and by one request. Readers of a store that is replaced keep
what they opened until its objects are removed, after the new manifest stands. What an upload that
fails has written is removed again; a killed one leaves objects that no manifest names.
"""

from __future__ import annotations

import contextlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, StoreExists, StoreNotFound
from headrace.io.objects.engine import ObjectEngine
from headrace.io.objects.listing import remove, upload, write
from headrace.io.objects.location import join, shown
from headrace.store.manifest import FILE_NAME, Manifest, load_manifest
from headrace.store.opening import is_namespace
from headrace.store.remote import fetch_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.store.packing import WriteReport

_FILES_AT_ONCE = 2
"""Each file is uploaded in several parts at once already."""


def publish_remotely(
    build: Callable[[Path], WriteReport],
    url: str,
    storage_options: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> WriteReport:
    """Builds a store locally and publishes it at a URL.

    Args:
        build: makes the store at the folder that it is given.
        url: where the store shall stand.
        storage_options: see docs/howto/object-stores.md.
        overwrite: replace the store that stands there.

    Raises:
        StoreExists: a store stands there.
        VolumeError: the object store refuses.
    """
    if is_namespace(url):
        raise ValueError(
            f"{url}: namespaces are read-only; write the store to a folder, and export or image that"
        )
    engine = ObjectEngine(storage_options)
    try:
        old = _check_target(url, engine, overwrite=overwrite)
        with tempfile.TemporaryDirectory(prefix="headrace-", dir=engine.policy.staging) as staging:
            folder = Path(staging) / "store"
            report = build(folder)
            _publish(folder, url, engine.client_options, overwrite=overwrite)
        if old is not None:
            with contextlib.suppress(HeadraceError):  # they are in nobody's way
                remove([join(url, name) for name in _file_names(old)], engine.client_options)
    finally:
        engine.close()
    return replace(report, path=shown(url))


def _check_target(url: str, engine: ObjectEngine, *, overwrite: bool) -> Manifest | None:
    """The manifest of the store that will be replaced."""
    try:
        found = fetch_manifest(url, engine)
    except StoreNotFound:
        return None
    if not overwrite:
        raise StoreExists(
            f"{shown(url)} exists already.",
            path=shown(url),
            next_step="Choose another target, or pass overwrite=True to replace the store there.",
        )
    return found


def _publish(folder: Path, url: str, options: Mapping[str, Any], *, overwrite: bool) -> None:
    manifest = load_manifest(folder)
    named = _with_own_names(manifest)
    files = list(zip(_file_names(manifest), _file_names(named), strict=True))
    targets = [join(url, name) for _, name in files]
    try:
        with ThreadPoolExecutor(_FILES_AT_ONCE, "headrace-upload") as pool:
            jobs = [
                pool.submit(upload, folder / name, target, options)
                for (name, _), target in zip(files, targets, strict=True)
            ]
            try:
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        write(named.to_bytes(), join(url, FILE_NAME), options, create=not overwrite)
    except BaseException:
        with contextlib.suppress(HeadraceError):
            remove(targets, options)
        raise


def _with_own_names(manifest: Manifest) -> Manifest:
    """The same store with file names that no other store has: the old one's stay untouched."""
    mark = manifest.uuid[:12]

    def own(name: str) -> str:
        stem, dot, ending = name.rpartition(".")
        return f"{stem}-{mark}{dot}{ending}"

    segments = tuple(
        replace(
            segment,
            directory=own(segment.directory),
            volumes=tuple(
                replace(v, path=own(v.path)) if v.kind == "packed" else v for v in segment.volumes
            ),
        )
        for segment in manifest.segments
    )
    return replace(manifest, segments=segments)


def _file_names(manifest: Manifest) -> list[str]:
    names = [s.directory for s in manifest.segments]
    return names + [v.path for s in manifest.segments for v in s.volumes if v.kind == "packed"]
