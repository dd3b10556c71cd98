"""How another process opens the same data: what it must be told, and doing it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from headrace.errors import SourceChanged
from headrace.io.objects.location import is_url
from headrace.store.directory_writer import write_all
from headrace.store.manifest import Manifest, Segment, fingerprint_of
from headrace.store.open_store import open_directly, open_folder
from headrace.store.segment import OpenSegment, directory_class, open_volumes
from headrace.store.store import Store
from headrace.store.trust import ANYWHERE

if TYPE_CHECKING:
    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.opening import RemoteEngine
    from headrace.store.sources.scan import SourceOptions

__all__ = ["Recipe", "recipe_of", "reopen", "reopen_memory", "reopen_pickled"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What opens a store again."""

    path: str
    """Absolute, or a URL."""
    segments: int
    """How many of its segments."""
    fingerprint: str
    """What must be found there."""
    direct: SourceOptions | None
    """How a source that is no store is listed; None: it is a store."""


def recipe_of(store: Store) -> Recipe | str:
    """What a process that shares nothing with this one needs to open the same data.

    Returns:
        The recipe, or why there is none.
    """
    direct = store._direct  # noqa: SLF001 - a store's other half
    if isinstance(direct, bytes):
        return "its directory lies in the memory of this process"
    if store.objects is not None and store.objects.storage_options:
        return "its storage_options are not passed on"
    path = store.path if is_url(store.path) else os.path.abspath(store.path)
    return Recipe(path, len(store.segments), store.fingerprint, direct)


def reopen(path: str, segments: int, fingerprint: str, direct: SourceOptions | None) -> Store:
    """Open a store by its recipe.

    Raises:
        SourceChanged: other data lies there.
        StoreNotFound, CorruptStore, SourceError, VolumeError: as for `open_store`.
    """
    return reopen_pickled(path, segments, fingerprint, False, direct, None)


def reopen_memory(
    path: str, entry: Segment, content: bytes, reference: bool, objects: RemoteEngine | None
) -> Store:
    """Opens a pickled store whose directory is in memory."""
    fd = os.memfd_create("headrace-directory", os.MFD_CLOEXEC)
    try:
        write_all(fd, content, 0)
        directory = directory_class(reference=reference).from_fd(fd, path)
    finally:
        os.close(fd)
    segment = OpenSegment(entry, 0, directory, open_volumes(path, entry, objects))
    segment.volumes.check_all()
    manifest = Manifest("0" * 32, fingerprint_of([directory.header()]), (entry,))
    return Store(path, manifest, [segment], reference=reference, direct=content, objects=objects)


def reopen_pickled(  # noqa: PLR0917 - pickle calls it
    path: str,
    segments: int,
    fingerprint: str,
    reference: bool,
    direct: SourceOptions | None,
    objects: RemoteEngine | None,
) -> Store:
    """Opens a pickled store again: the same samples, or an error."""
    if direct is not None:
        store = open_directly(
            path, direct, reference=reference, engine=cast("ObjectEngine | None", objects)
        )
    else:
        # Another process of this program has opened it, or was refused.
        store = open_folder(path, segments, reference=reference, engine=objects, trust=ANYWHERE)
    if store.fingerprint != fingerprint:
        raise SourceChanged(
            f"{path}: the fingerprint is {store.fingerprint}, expected {fingerprint}: the data "
            "changed after the store was opened.",
            path=path,
            next_step="Open it again in the main process.",
        )
    return store
