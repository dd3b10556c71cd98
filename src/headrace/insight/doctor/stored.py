"""Stored: samples at random of a store that headrace opens: packed, indexed, or at a URL."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.errors import SourceError
from headrace.insight.doctor.findings import DataSet
from headrace.insight.doctor.formats import format_of
from headrace.insight.doctor.pieces import Piece, Pool, quantiles
from headrace.io.objects.location import is_url, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.store import Store
    from headrace.store.segment import OpenSegment

__all__ = ["survey_store"]

_DRAWN: Final = 2000
_NAMES: Final = 16


def survey_store(where: str, storage_options: Mapping[str, Any] | None) -> tuple[DataSet, Pool]:
    """Open a store and draw some of its samples.

    Returns:
        The pool holds the store where its samples are no files; else it is closed again.

    Raises:
        StoreNotFound: there is none.
        CorruptStore: it is damaged.
        SourceError: it has no samples.
        VolumeError: it cannot be read.
    """
    from headrace import api

    store = api.open(where, storage_options=storage_options)
    try:
        data, pool = _look(store)
    except BaseException:
        store.close()
        raise
    if pool.store is None:
        store.close()
    return data, pool


def _look(store: Store) -> tuple[DataSet, Pool]:
    count = len(store)
    if not count:
        raise SourceError(
            f"{shown(store.path)}: no samples.", path=store.path, next_step="Append some."
        )
    drawn = np.unique(np.random.default_rng(5).integers(0, count, _DRAWN))
    pieces: list[Piece] = []
    sizes: list[int] = []
    for segment in store.segments:
        local = drawn[(drawn >= segment.base) & (drawn < segment.base + segment.directory.samples)]
        if len(local):
            _draw(segment, local - segment.base, pieces, sizes)
    lengths = np.array(sizes, np.int64)
    entries = [volume for segment in store.segments for volume in segment.entry.volumes]
    remote = is_url(store.path) or any(v.kind not in ("packed", "file", "tree") for v in entries)
    first = store.segments[0].directory
    names = first.names(np.arange(min(first.samples, _NAMES), dtype=np.int64))
    formats = {format_of(os.fsdecode(name)) for name in names}
    data = DataSet(
        path=shown(store.path), kind="object" if remote else "store",
        format=formats.pop() if len(formats) == 1 else "mixed", samples=count, exact=True,
        files=len(entries), nbytes=float(lengths.mean()) * count, **quantiles(lengths),
        classes=len(store.classes or ()),
    )  # fmt: skip
    random.Random(1).shuffle(pieces)  # noqa: S311 - a draw, no secret
    whole = all(v.kind == "tree" for v in entries)
    return data, Pool(pieces=pieces, whole_files=whole, store=store if remote else None)


def _draw(
    segment: OpenSegment, local: NDArray[np.int64], pieces: list[Piece], sizes: list[int]
) -> None:
    found = segment.directory.extents_of(local)
    names = dict(zip(local.tolist(), segment.directory.names(local), strict=True))
    totals: dict[int, int] = {}
    columns = (found[key].tolist() for key in ("sample", "volume", "offset", "length"))
    for sample, volume, offset, length in zip(*columns, strict=True):
        totals[sample] = totals.get(sample, 0) + length
        path = segment.volumes.paths[volume]
        if segment.entry.volumes[volume].kind == "tree":
            path = os.path.join(path, os.fsdecode(names[sample]))
        if length:
            pieces.append(Piece(path, offset, length))
    sizes += totals.values()
