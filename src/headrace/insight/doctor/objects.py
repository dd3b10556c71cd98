"""Objects: plain ones below a URL, as files in a folder: listed for some time, and some of them drawn."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.errors import SourceError
from headrace.insight.doctor.findings import DataSet
from headrace.insight.doctor.formats import format_of
from headrace.insight.doctor.pieces import Piece, Pool, quantiles
from headrace.io.objects.location import has_magic, literal_folder, matches, shown
from headrace.store.directory import DirectoryColumns
from headrace.store.names import join_names
from headrace.store.opening import store_of_scan
from headrace.store.sources.scan import Scan, SourceVolume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace.io.objects.engine import ObjectEngine
    from headrace.io.objects.reading import RemoteObject

__all__ = ["survey_objects"]

_DRAWN: Final = 1000
_MAJORITY: Final = 0.5


def survey_objects(
    url: str,
    seconds: float,
    *,
    stop: Callable[[], bool],
    storage_options: Mapping[str, Any] | None,
) -> tuple[DataSet, Pool]:
    """List what lies below a URL, or fits a pattern, and draw some of it.

    Raises:
        SourceError: there is nothing, or it cannot be listed.
        VolumeError: the store refuses.
    """
    from headrace.io.objects.engine import ObjectEngine

    engine = ObjectEngine(storage_options)
    try:
        return _look(url, engine, time.monotonic() + seconds, stop)
    except BaseException:
        engine.close()
        raise


def _look(
    url: str, engine: ObjectEngine, until: float, stop: Callable[[], bool]
) -> tuple[DataSet, Pool]:
    dice = random.Random(6)  # noqa: S311 - a draw, no secret
    drawn: list[RemoteObject] = []
    count = nbytes = largest = 0
    complete = True
    formats: Counter[str] = Counter()
    for each in _listed(url, engine.client_options):
        count += 1
        nbytes += each.size
        largest = max(largest, each.size)
        formats[format_of(each.url)] += 1
        if len(drawn) < _DRAWN:
            drawn.append(each)
        elif (at := dice.randrange(count)) < _DRAWN:
            drawn[at] = each
        if time.monotonic() > until or stop():
            complete = False
            break
    full = [each for each in drawn if each.size]
    if not full:
        raise SourceError(
            f"{shown(url)}: there is no store and no object with anything in it.", path=shown(url),
            next_step="Check the URL, and the credentials: --storage-option, or the environment.",
        )  # fmt: skip
    name, most = formats.most_common(1)[0]
    sizes = np.array([each.size for each in drawn], np.int64)
    data = DataSet(
        path=shown(url), kind="object", format=name if most > _MAJORITY * count else "mixed",
        samples=count, exact=complete, at_least=not complete, files=count, nbytes=float(nbytes),
        **{**quantiles(sizes), "size_max": float(largest)},
    )  # fmt: skip
    engine.register(full)
    engine.looked_at.update(each.url for each in full)
    pieces = [Piece(each.url, 0, each.size) for each in full]
    return data, Pool(pieces=pieces, store=store_of_scan(url, _scan(url, full, engine)))


def _listed(url: str, options: Mapping[str, Any]) -> Iterator[RemoteObject]:
    from headrace.io.objects.listing import list_objects

    if not has_magic(url):
        yield from list_objects(url, options)
        return
    accept = matches(url)
    yield from (
        each for each in list_objects(literal_folder(url), options) if accept.match(each.url)
    )


def _scan(url: str, objects: list[RemoteObject], engine: ObjectEngine) -> Scan:
    """The objects as samples, each whole."""
    names, name_offsets = join_names([b"%06d" % i for i in range(len(objects))])
    columns = DirectoryColumns(
        names=names,
        name_offsets=name_offsets,
        volume=np.arange(len(objects), dtype=np.uint32),
        offset=np.zeros(len(objects), np.uint64),
        length=np.array([each.size for each in objects], np.uint64),
    )
    volumes = tuple(
        SourceVolume("object", each.url, each.size, each.modified_ns, each.etag) for each in objects
    )
    source = {"kind": "objects", "url": shown(os.fspath(url))}
    return Scan(columns, volumes, source, objects=engine)
