"""StreamMetadata: what a directory says of samples that come one after another."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import SourceError
from headrace.store.directory_writer import DirectoryColumns
from headrace.store.names import duplicate_name, join_names

if TYPE_CHECKING:
    from headrace.store.sources.scan import StreamItem

__all__ = ["StreamMetadata"]


class StreamMetadata:
    """Collects names, labels, parts and columns of a stream's samples."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._seen: set[bytes] = set()
        self._labels: list[int] = []
        self._parts: list[bytes] = []
        self._counts: list[int] = []
        self._columns: dict[str, list[int | float]] = {}

    def add(self, item: StreamItem) -> None:
        """Takes note of the next sample."""
        if not self.names:
            self._columns = {name: [] for name in item.columns}
        if item.name in self._seen:
            raise duplicate_name(item.name, f" (the second is sample {len(self.names)})")
        self._seen.add(item.name)
        if item.columns.keys() != self._columns.keys():
            raise SourceError(
                f"Sample {len(self.names)} ({os.fsdecode(item.name)!r}) has the columns "
                f"{sorted(item.columns)}, the first one had {sorted(self._columns)}.",
                next_step="Give every sample the same columns.",
            )
        self.names.append(item.name)
        self._labels.append(item.label)
        self._counts.append(len(item.parts))
        self._parts += (name for name, _ in item.parts)
        for name, value in item.columns.items():
            self._columns[name].append(value)

    def columns(self) -> DirectoryColumns:
        """The directory's columns, extents still to be filled in."""
        names, offsets = join_names(self.names)
        part_names = tuple(sorted(set(self._parts))) or (b"",)
        number = {name: i for i, name in enumerate(part_names)}
        firsts = np.zeros(len(self.names) + 1, np.uint64)
        np.cumsum(np.array(self._counts, np.uint64), out=firsts[1:])
        empty = np.zeros(len(self._parts), np.uint64)
        several = len(part_names) > 1
        return DirectoryColumns(
            names, offsets, empty, empty, empty,
            first_extent=firsts if int(firsts[-1]) != len(self.names) else None,
            part=np.array([number[p] for p in self._parts], np.uint16) if several else None,
            part_names=part_names,
            labels=np.array(self._labels, np.int64),
            columns={name: np.array(values) for name, values in self._columns.items()},
        )  # fmt: skip
