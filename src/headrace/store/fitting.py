"""Fitting: a directory's columns, cut to the samples that are kept, and made to agree with a store."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory_writer import DirectoryColumns
from headrace.store.names import join_names, split_names

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.store.store import Store

__all__ = ["fit_to_store", "keep_samples"]

_NAMES_AT_ONCE = 1 << 16


def keep_samples(columns: DirectoryColumns, keep: Any) -> DirectoryColumns:
    """The columns of the samples where `keep` ((n,) bool) is true."""
    wanted = np.flatnonzero(keep)
    all_names = split_names(columns.names, columns.name_offsets)
    names, offsets = join_names([all_names[i] for i in wanted])
    firsts = columns.firsts.astype(np.int64)
    extents = np.repeat(keep, np.diff(firsts))
    new_firsts = np.zeros(len(wanted) + 1, np.uint64)
    np.cumsum(np.diff(firsts)[wanted].astype(np.uint64), out=new_firsts[1:])

    def of_extents(values: Any) -> Any:
        return None if values is None else values[extents]

    return DirectoryColumns(
        names, offsets, columns.volume[extents], columns.offset[extents], columns.length[extents],
        crc=of_extents(columns.crc),
        mtime=of_extents(columns.mtime),
        first_extent=None if columns.first_extent is None else new_firsts,
        part=of_extents(columns.part),
        part_names=columns.part_names,
        labels=None if columns.labels is None else columns.labels[wanted],
        class_names=columns.class_names,
        columns={k: v[wanted] for k, v in columns.columns.items()},
    )  # fmt: skip


def fit_to_store(columns: DirectoryColumns, place: Path) -> DirectoryColumns:
    """Makes a new segment agree with its store: new names, the same classes and columns.

    Raises:
        SourceError: a name is taken, or the columns differ.
    """
    from headrace.store.open_store import open_store

    with open_store(place) as store:
        _check_new_names(columns, store)
        if store.columns.keys() != columns.columns.keys():
            raise SourceError(
                f"{place}: the new samples have the columns {sorted(columns.columns)}, the store "
                f"has {sorted(store.columns)}.",
                path=str(place),
                next_step="Append samples with the same columns.",
            )
        return _merge_classes(columns, store.classes)


def _check_new_names(columns: DirectoryColumns, store: Store) -> None:
    names = split_names(columns.names, columns.name_offsets)
    for start in range(0, len(names), _NAMES_AT_ONCE):
        found = store.find_many(names[start : start + _NAMES_AT_ONCE])
        taken = np.flatnonzero(found >= 0)
        if len(taken):
            name = os.fsdecode(names[start + int(taken[0])])
            raise SourceError(
                f"{store.path}: the name {name!r} is sample {int(found[taken[0]])} of the store "
                "already, expected new names.",
                path=store.path,
                name=name,
                next_step="Append samples with new names, or pack a new store.",
            )


def _merge_classes(columns: DirectoryColumns, before: list[str] | None) -> DirectoryColumns:
    """Numbers the new segment's classes as the store does; new ones come after."""
    if before is None or columns.class_names is None or columns.labels is None:
        return columns
    known = [os.fsencode(c) for c in before]
    merged = known + [c for c in columns.class_names if c not in set(known)]
    number = {name: i for i, name in enumerate(merged)}
    table = np.array([number[c] for c in columns.class_names], np.int64)
    labels = np.where(columns.labels < 0, -1, table[columns.labels])
    return replace(columns, labels=labels, class_names=tuple(merged))
