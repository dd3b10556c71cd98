"""Objects as a source: which URLs there are, and what each begins with.

Uncompressed tar, TFRecord, MDS and Parquet objects are listed where they lie. All heads are fetched
together, and they say size and version too, so a shard costs one request before its scan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.errors import SourceError
from headrace.io.objects.location import shown
from headrace.store.sources.object_name import ObjectName
from headrace.store.sources.scan import Scan

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.io.objects.engine import ObjectEngine
    from headrace.store.sources.scan import SourceOptions, Stream

HEAD_BYTES = 1024


def open_objects(
    urls: list[str],
    options: SourceOptions,
    objects: ObjectEngine | None,
    open_files: Callable[[list[str], SourceOptions], Scan | Stream],
) -> Scan:
    """Lists the objects that URLs and patterns stand for.

    Raises:
        SourceError: there are none, or they cannot be used where they lie.
        VolumeError: one cannot be read.
    """
    from headrace.io.objects.engine import ObjectEngine
    from headrace.io.objects.listing import expand

    engine = objects or ObjectEngine()
    names = [url for pattern in urls for url in expand(pattern, engine.client_options)]
    if not names:
        raise SourceError(
            f"{shown(urls[0])}: there is no such object.",
            path=shown(urls[0]),
            next_step="Check the URL and the pattern.",
        )
    found = open_files(_look_at(names, engine), options)
    if not isinstance(found, Scan):
        raise SourceError(
            f"{shown(names[0])} is compressed, or can only be read front to back.",
            path=shown(names[0]),
            next_step="Copy it to a disk and pack it there, or decompress it.",
        )
    found.objects = engine
    return found


def _look_at(urls: list[str], engine: ObjectEngine) -> list[Any]:
    from headrace.io.objects.failure import Failure
    from headrace.io.objects.reading import RemoteObject

    heads = [memoryview(bytearray(HEAD_BYTES)) for _ in urls]
    outcomes = engine.fetch_many(
        [(url, 0, head) for url, head in zip(urls, heads, strict=True)], exact=False
    )
    names = []
    for url, head, outcome in zip(urls, heads, outcomes, strict=True):
        if isinstance(outcome, Failure):
            raise outcome.to_error()
        found = RemoteObject(url, outcome.size, outcome.etag, outcome.modified_ns)
        names.append(ObjectName.of(found, engine, bytes(head[: outcome.count])))
    engine.register(name.found for name in names)
    engine.looked_at.update(urls)
    return names
