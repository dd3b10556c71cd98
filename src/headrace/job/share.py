"""Share: which samples a node stages, and how they lie in its volume, known before a byte is read.

Shares are contiguous ranges of the source's order, as equal in bytes as samples allow, so the global
order is the source's. A share is one packed segment of one volume, whose layout follows from sizes
alone (docs/format.md): samples back to back behind the header page. Its directory can therefore be
published at once; what it lacks is checksums, unless the source has them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.store.directory import DirectoryColumns, write_directory
from headrace.store.format import VolumeHeader, padded_size, volume_uuid
from headrace.store.manifest import Segment, VolumeEntry
from headrace.store.names import join_names
from headrace.store.segment_writer import Placer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.store import Store

__all__ = ["Share", "cut_shares", "plan_share", "sample_bytes", "write_share_directory"]

_AT_ONCE = 1 << 18
_ONE_VOLUME_BYTES = 1 << 46
"""A share is one volume: one namespace, one mark of what is written."""


@dataclass(slots=True)
class Share:
    """The samples `begin` to `end - 1` of a source, and their layout.

    Attributes:
        begin: the first sample.
        end: the one behind the last.
        columns: of the share's directory.
        volume_bytes: of its volume, a multiple of 4,096.
    """

    begin: int
    end: int
    columns: DirectoryColumns
    volume_bytes: int

    @property
    def samples(self) -> int:
        """How many."""
        return self.end - self.begin

    @property
    def data_bytes(self) -> int:
        """Of the samples themselves."""
        return int(self.columns.length.sum())


def cut_shares(store: Store, nodes: int) -> list[tuple[int, int]]:
    """The ranges [begin, end) of all nodes, balanced by bytes; the same everywhere.

    A node may get no samples where there are fewer samples than nodes.
    """
    sizes = sample_bytes(store)
    # A sample belongs to the node in whose part its middle lies: no share is off by more than half of
    # a sample. Empty samples count a little, or a million of them would be one node's.
    weight = sizes.astype(np.float64) + 1.0
    ends = np.cumsum(weight)
    node = np.minimum(((ends - weight / 2) / ends[-1] * nodes).astype(np.int64), nodes - 1)
    cuts = np.searchsorted(node, np.arange(nodes + 1))
    return list(pairwise(cuts.tolist()))


def sample_bytes(store: Store) -> NDArray[np.int64]:
    """(n,) int64: bytes of each sample, all parts together."""
    out = np.zeros(len(store), np.int64)
    for segment in store.segments:
        for start in range(0, segment.directory.samples, _AT_ONCE):
            stop = min(start + _AT_ONCE, segment.directory.samples)
            found = segment.directory.extents_of(np.arange(start, stop, dtype=np.int64))
            sums = np.bincount(found["sample"] - start, found["length"], stop - start)
            out[segment.base + start : segment.base + stop] = sums.astype(np.int64)
    return out


def plan_share(store: Store, begin: int, end: int) -> Share:
    """Lays out the samples `begin` to `end - 1` of an open source."""
    pieces = [_piece(store, s, begin, end) for s in store.segments]
    found = [p for p in pieces if p is not None]
    names, offsets = join_names([name for p in found for name in p["names"]])
    length = np.concatenate([p["length"] for p in found]).astype(np.uint64)
    counts = np.concatenate([p["counts"] for p in found])
    part = np.concatenate([p["part"] for p in found])
    checked = all(p["crc"] is not None for p in found)
    placer = Placer(_ONE_VOLUME_BYTES)
    place = placer.place(counts, length)
    firsts = np.zeros(end - begin + 1, np.uint64)
    np.cumsum(counts.astype(np.uint64), out=firsts[1:])
    part_names = tuple(os.fsencode(p) for p in store.parts)
    labels, classes = store.labels, store.classes
    columns = DirectoryColumns(
        names, offsets, place.volume, place.offset, length,
        crc=np.concatenate([p["crc"] for p in found]).astype(np.uint32) if checked else None,
        first_extent=firsts if int(firsts[-1]) != end - begin else None,
        part=part.astype(np.uint16) if len(part_names) > 1 else None,
        part_names=part_names,
        labels=None if labels is None else np.asarray(labels[begin:end]),
        class_names=None if classes is None else tuple(os.fsencode(c) for c in classes),
        columns={name: np.asarray(values[begin:end]) for name, values in store.columns.items()},
    )  # fmt: skip
    return Share(begin, end, columns, padded_size(placer.ends[-1]))


def _piece(store: Store, segment: Any, begin: int, end: int) -> dict[str, Any] | None:
    """What one segment of the source adds to a share."""
    first = max(begin - segment.base, 0)
    last = min(end - segment.base, segment.directory.samples)
    if first >= last:
        return None
    wanted = np.arange(first, last, dtype=np.int64)
    found = segment.directory.extents_of(wanted)
    numbers = [store.parts.index(os.fsdecode(p)) for p in segment.directory.part_names]
    return {
        "names": segment.directory.names(wanted),
        "length": found["length"],
        "counts": np.bincount(found["sample"] - first, minlength=last - first).astype(np.int64),
        "part": np.array(numbers, np.int64)[found["part"]],
        "crc": found["crc"] if segment.directory.has_crc else None,
    }


def write_share_directory(
    share: Share, fd: int, crc: NDArray[np.uint32] | None = None
) -> tuple[Segment, bytes]:
    """Writes a share's directory into an open empty file.

    Args:
        share: the layout.
        fd: the file.
        crc: (extents,) checksums, where the source has none.

    Returns:
        The manifest's entry, and the volume's header page.
    """
    columns = share.columns if crc is None else replace(share.columns, crc=crc)
    header = write_directory(columns, fd)
    uuid = volume_uuid(header.uuid, 0)
    entry = Segment(
        directory="segment-0000.hrd",
        directory_bytes=header.file_bytes,
        uuid=header.uuid.hex(),
        samples=header.samples,
        extents=header.extents,
        volumes=(
            VolumeEntry("packed", "segment-0000-0000.hrv", share.volume_bytes, uuid=uuid.hex()),
        ),
        source={"kind": "share", "begin": share.begin, "end": share.end},
    )
    return entry, VolumeHeader(uuid, header.uuid, 0).to_page()
