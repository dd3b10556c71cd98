"""A store's manifest and segments, from a folder or from a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.io.objects.location import is_url
from headrace.store.manifest import load_manifest
from headrace.store.segment import open_segment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.manifest import Manifest, Segment
    from headrace.store.segment import OpenSegment


def engine_for(storage_options: Mapping[str, Any] | None) -> ObjectEngine:
    """A new engine. Imported here, so that local stores need no event loop."""
    from headrace.io.objects.engine import ObjectEngine

    return ObjectEngine(storage_options)


def manifest_at(
    where: str, engine: ObjectEngine | None, storage_options: Mapping[str, Any] | None = None
) -> tuple[Manifest, ObjectEngine | None]:
    """The manifest of the store at a folder or URL, and an engine if the store needs one.

    Raises:
        StoreNotFound: there is none.
        CorruptStore: it is damaged or contradicts itself.
        VolumeError: it cannot be read.
    """
    if is_url(where):
        from headrace.store.remote import fetch_manifest

        engine = engine or engine_for(storage_options)
        return fetch_manifest(where, engine), engine
    manifest = load_manifest(where)
    if engine is None and any(v.kind == "object" for s in manifest.segments for v in s.volumes):
        engine = engine_for(storage_options)
    return manifest, engine


def open_segment_at(
    where: str,
    entry: Segment,
    base: int,
    engine: ObjectEngine | None,
    *,
    reference: bool = False,
) -> OpenSegment:
    """Opens a segment of the store at a folder or URL; errors as for `open_segment`."""
    if is_url(where):
        from headrace.store.remote import open_remote_segment

        assert engine is not None
        return open_remote_segment(where, entry, base, engine, reference=reference)
    return open_segment(where, entry, base, reference=reference, engine=engine)
