"""A store's manifest and segments, from a folder or from a URL: of objects, or of an NVMe/TCP namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from headrace.io.objects.location import is_url, scheme_of
from headrace.store.manifest import load_manifest
from headrace.store.segment import open_segment
from headrace.store.trust import check_volumes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.manifest import Manifest, Segment
    from headrace.store.namespace_engine import NamespaceEngine
    from headrace.store.remote_volumes import RemoteVolumes
    from headrace.store.segment import OpenSegment
    from headrace.store.trust import Trust

    RemoteEngine: TypeAlias = ObjectEngine | NamespaceEngine
    """What reads volumes that are no files."""

_NAMESPACE = "nvme+tcp"


def is_namespace(where: str) -> bool:
    """Whether `where` names an NVMe/TCP namespace."""
    return is_url(where) and scheme_of(where) == _NAMESPACE


def engine_for(where: str, storage_options: Mapping[str, Any] | None) -> RemoteEngine:
    """A new engine for `where`. Imported here, so that local stores need neither sockets nor event loop."""
    if is_namespace(where):
        from headrace.store.namespace_engine import NamespaceEngine

        return NamespaceEngine(storage_options)
    return object_engine(storage_options)


def object_engine(storage_options: Mapping[str, Any] | None) -> ObjectEngine:
    """A new engine for objects."""
    from headrace.io.objects.engine import ObjectEngine

    return ObjectEngine(storage_options)


def manifest_at(
    where: str,
    engine: RemoteEngine | None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Trust = None,
) -> tuple[Manifest, RemoteEngine | None]:
    """The manifest of the store at a folder or URL, and an engine if the store needs one.

    Args:
        where: the folder or URL.
        engine: one that exists already.
        storage_options: for a new one.
        trust: places outside the store's folder that its volumes may lie in; see `trust`.

    Raises:
        StoreNotFound: there is none.
        CorruptStore: it is damaged or contradicts itself.
        StoreError: volumes lie outside the store's folder, and nobody has agreed to that.
        VolumeError: it cannot be read.
    """
    if is_url(where):
        from headrace.store.remote import fetch_manifest

        engine = engine or engine_for(where, storage_options)
        manifest = fetch_manifest(where, engine)
        check_volumes(where, manifest, trust)
        return manifest, engine
    manifest = load_manifest(where)
    check_volumes(where, manifest, trust)
    if engine is None and any(v.kind == "object" for s in manifest.segments for v in s.volumes):
        engine = object_engine(storage_options)
    return manifest, engine


def open_segment_at(
    where: str,
    entry: Segment,
    base: int,
    engine: RemoteEngine | None,
    *,
    reference: bool = False,
) -> OpenSegment:
    """Opens a segment of the store at a folder or URL; errors as for `open_segment`."""
    if not is_url(where):
        return open_segment(where, entry, base, reference=reference, engine=engine)
    from headrace.store.remote import open_remote_segment

    assert engine is not None
    volumes = _remote_volumes(where, entry, engine)
    directory = engine.place(where, entry.directory)
    return open_remote_segment(directory, entry, base, engine, volumes, reference=reference)


def _remote_volumes(where: str, entry: Segment, engine: RemoteEngine) -> RemoteVolumes:
    if is_namespace(where):
        from headrace.store.fabric_volumes import FabricVolumes

        return FabricVolumes(where, entry, cast("NamespaceEngine", engine))
    from headrace.store.remote_volumes import RemoteVolumes

    return RemoteVolumes(where, entry, engine, remote=True)
