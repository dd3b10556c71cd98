"""`from_hf`: a store over a `datasets.Dataset`, without a copy where its data are mapped files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c
from headrace.errors import SourceError
from headrace.store.directory_writer import DirectoryColumns, write_all
from headrace.store.names import join_names
from headrace.store.open_store import store_of_scan
from headrace.store.sources.huggingface import is_dataset, open_dataset
from headrace.store.sources.scan import Scan, SourceVolume, Stream, no_samples, source_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.store.store import Store


def from_hf(
    dataset: Any,
    *,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    on_error: str = "raise",
) -> Store:
    """A store over a `datasets.Dataset`: sample i is the encoded value of row i.

    The data set's own order counts: after `select`, `shuffle` or `sort` the store has the rows that the
    data set shows. Mapped Arrow files are read where they lie; rows in memory are copied once, into
    anonymous memory. Decoding, transforms and formats of the data set play no part.

    Args:
        dataset: a `datasets.Dataset` (one split).
        column: the column of the samples' bytes, or several, which become parts. By default the only
            column of images, sounds or bytes.
        label: the column of integer labels; `label`, `labels` or `y` is found by itself, an empty
            string means none. A `ClassLabel` names the classes.
        on_error: `raise`, or `skip` rows that are null.

    Raises:
        SourceError: no column fits, a row is null, or it is no such data set.
        SourceChanged: a file behind it was replaced.
    """
    if not is_dataset(dataset):
        splits = list(dataset) if isinstance(dataset, dict) else []
        raise SourceError(
            f"The source is a {type(dataset).__name__}, expected a datasets.Dataset.",
            next_step=f"Choose one of its splits: {splits}." if splits else "Load one split of it.",
        )
    options = source_options(on_error=on_error, column=column, label=label)
    found = open_dataset(dataset, options)
    where = f"datasets.Dataset {getattr(dataset, '_fingerprint', '')}".rstrip()
    if isinstance(found, Scan):
        store = store_of_scan(where, found)
        for segment in store.segments:
            segment.volumes.check_all()
        return store
    memory = MemoryVolume()
    store = store_of_scan(where, _copy(found, memory))
    store.keep(memory)
    return store


class MemoryVolume:
    """A file in anonymous memory that other processes of this user can open while it lives."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("headrace-volume", os.MFD_CLOEXEC)
        self._owner = os.getpid()
        self.path = f"/proc/{self._owner}/fd/{self._fd}"
        self.size = 0

    def append(self, data: bytes | memoryview) -> int:
        """Adds bytes; returns where they begin."""
        at, self.size = self.size, self.size + len(data)
        write_all(self._fd, data, at)
        return at

    def volume(self) -> SourceVolume:
        """What it is to a store."""
        return SourceVolume("file", self.path, self.size, os.fstat(self._fd).st_mtime_ns)

    def __del__(self) -> None:
        os.close(self._fd)


def _copy(stream: Stream, memory: MemoryVolume) -> Scan:
    names, labels, offset, length, crc, parts = [], [], [], [], [], []
    for item in stream.items():
        names.append(item.name)
        labels.append(item.label)
        for part, data in item.parts:
            view = memoryview(data).cast("B")
            offset.append(memory.append(view))
            length.append(len(view))
            crc.append(crc32c(view))
            parts.append(part)
    if not names:
        raise no_samples("the data set")
    blob, name_offsets = join_names(names)
    part_names = tuple(sorted(set(parts)))
    n, k = len(names), len(part_names)
    columns = DirectoryColumns(
        blob, name_offsets,
        np.zeros(n * k, np.uint8), np.array(offset, np.uint64), np.array(length, np.uint64),
        crc=np.array(crc, np.uint32),
        first_extent=np.arange(0, n * k + 1, k, dtype=np.uint64) if k > 1 else None,
        part=np.tile(np.arange(k, dtype=np.uint32), n) if k > 1 else None,
        part_names=part_names,
        labels=np.array(labels, np.int64) if max(labels) >= 0 else None,
        class_names=None if stream.class_names is None else stream.class_names(),
    )  # fmt: skip
    return Scan(columns, (memory.volume(),), stream.source)
