"""What a store holds, in numbers: for `headrace info` and for reports.

Reads the directory once, in slices; no sample is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.io.objects.location import shown
from headrace.order import Sequential
from headrace.store.residency import resident_bytes
from headrace.store.rewriting import RewrittenImages, recorded_images

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from headrace.store.segment import OpenSegment
    from headrace.store.store import Store

_SLICE = 1 << 17
_POWERS = 64
_BATCH = 256
_TREE_FILES_ASKED = 500  # files of a folder whose residency stands for the rest


@dataclass(frozen=True, slots=True)
class SizeBin:
    """Samples of at least `low_bytes` and less than `high_bytes`."""

    low_bytes: int
    high_bytes: int
    samples: int


@dataclass(frozen=True, slots=True)
class ClassCount:
    """How many samples a label has. Label -1: none."""

    label: int
    name: str | None
    samples: int


@dataclass(frozen=True, slots=True)
class VolumeSummary:
    """A volume: its kind, place and size, and how much of it the page cache holds."""

    kind: str
    path: str
    bytes: int | None
    resident_bytes: int | None
    """For a `tree` estimated from some of its files; None where the system does not say."""


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """A segment: how many samples, where from, on which volumes, and which images were rewritten for it."""

    directory: str
    directory_bytes: int
    samples: int
    extents: int
    checksums: bool
    source: dict[str, object]
    volumes: tuple[VolumeSummary, ...]
    images: RewrittenImages | None = None


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens there are, of which type, and of how large a vocabulary; None where nobody says."""

    tokens: int
    dtype: str
    vocabulary: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What `summarise` found."""

    path: str
    fingerprint: str
    samples: int
    bytes: int
    size_min: int
    size_mean: float
    size_max: int
    sizes: tuple[SizeBin, ...]
    parts: tuple[str, ...]
    columns: dict[str, str]
    classes: tuple[ClassCount, ...]
    label_mix: float | None
    """Of the stored order, in batches of 256: 0 where neighbours' labels have nothing to do with each other, 1
    where each window is of one class. None without labels."""

    checksums: bool
    segments: tuple[SegmentSummary, ...]
    tokens: TokenCount | None = None

    @property
    def resident_share(self) -> float | None:
        """The share of the volumes' bytes that the page cache holds; None where unknown."""
        volumes = [v for s in self.segments for v in s.volumes]
        known = [v for v in volumes if v.bytes and v.resident_bytes is not None]
        total = sum(v.bytes or 0 for v in known)
        return sum(v.resident_bytes or 0 for v in known) / total if total else None


def summarise(store: Store) -> Summary:
    """Counts, sizes, classes, volumes and residency of an open store."""
    powers = np.zeros(_POWERS, np.int64)
    segment_bytes = dict.fromkeys((s.base for s in store.segments), 0)
    smallest, largest = 1 << 62, 0
    for start, sizes in sample_sizes(store):
        segment_bytes[store.segment_of(start).base] += int(sizes.sum())
        smallest, largest = min(smallest, int(sizes.min())), max(largest, int(sizes.max()))
        # frexp gives the power of two exactly where log2 would round: 2^k - 1 belongs below 2^k.
        powers += np.bincount(np.frexp(sizes.astype(np.float64))[1], minlength=_POWERS)
    total, used = sum(segment_bytes.values()), np.flatnonzero(powers).tolist()
    return Summary(
        path=shown(store.path),
        fingerprint=store.fingerprint,
        samples=len(store),
        bytes=total,
        size_min=smallest if used else 0,
        size_mean=total / max(1, len(store)),
        size_max=largest,
        # Powers of two, from the smallest sample to the largest; empty samples stand alone.
        sizes=tuple(
            SizeBin(0 if p == 0 else 1 << (p - 1), 1 << p, int(powers[p]))
            for p in (range(used[0], used[-1] + 1) if used else ())
        ),
        parts=tuple(p for p in store.parts if p),
        columns={name: str(values.dtype) for name, values in store.columns.items()},
        classes=_classes(store),
        label_mix=_label_mix(store),
        checksums=all(s.directory.has_crc for s in store.segments),
        segments=tuple(_segment(s, segment_bytes[s.base], store) for s in store.segments),
        tokens=token_count(store, total),
    )


def token_count(store: Store, nbytes: int) -> TokenCount | None:
    """Where all segments say that they hold tokens of one type, and nothing else."""
    stated = [segment.entry.source.get("tokens") for segment in store.segments]
    kinds = {
        (each.get("dtype"), each.get("vocabulary")) for each in stated if isinstance(each, dict)
    }
    if len(kinds) != 1 or not all(stated) or any(store.parts):
        return None
    ((dtype, vocabulary),) = kinds
    return TokenCount(nbytes // np.dtype(dtype).itemsize, dtype, vocabulary) if dtype else None


def sample_sizes(
    store: Store, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Sizes in bytes, all parts together, of samples `begin` to `end - 1`.

    Yields the index of the first sample of a slice, and the sizes of its samples.
    """
    end = len(store) if end is None else end
    for segment in store.segments:
        low = max(begin, segment.base)
        high = min(end, segment.base + segment.directory.samples)
        for first, last, extents in segment.walk(low - segment.base, high - segment.base, _SLICE):
            # A sample need not have an extent, and may have several.
            sizes = np.bincount(extents["sample"] - first, extents["length"], last - first)
            yield segment.base + first, sizes.astype(np.int64)


def _classes(store: Store) -> tuple[ClassCount, ...]:
    labels = store.labels
    if labels is None:
        return ()
    names = store.classes or []
    values, counts = np.unique(labels, return_counts=True)
    counted = dict(zip(values.tolist(), counts.tolist(), strict=True))
    # Classes without samples are worth seeing too.
    for label in range(len(names)):
        counted.setdefault(label, 0)
    return tuple(
        ClassCount(label, names[label] if 0 <= label < len(names) else None, count)
        for label, count in sorted(counted.items())
    )


def _label_mix(store: Store) -> float | None:
    labels = store.labels
    if labels is None or not len(store):
        return None
    return Sequential(len(store)).label_mix(labels, min(_BATCH, len(store))).distance


def _segment(segment: OpenSegment, size: int, store: Store) -> SegmentSummary:
    volumes = []
    for entry, path in zip(segment.entry.volumes, segment.volumes.paths, strict=True):
        tree = entry.kind == "tree"
        resident = _tree_residency(segment, store, path, size) if tree else resident_bytes(path)
        volumes.append(VolumeSummary(entry.kind, path, size if tree else entry.bytes, resident))
    return SegmentSummary(
        segment.entry.directory,
        segment.entry.directory_bytes,
        segment.directory.samples,
        segment.directory.extents,
        segment.directory.has_crc,
        dict(segment.entry.source),
        tuple(volumes),
        recorded_images(segment.entry.source),
    )


def _tree_residency(segment: OpenSegment, store: Store, path: str, size: int) -> int | None:
    count = segment.directory.samples
    asked = np.unique(np.linspace(0, count - 1, min(count, _TREE_FILES_ASKED)).astype(np.int64))
    resident = total = 0
    for name in store.names.many(asked + segment.base):
        file = os.path.join(path, name)
        in_cache = resident_bytes(file)
        if in_cache is None:
            return None
        resident += in_cache
        total += os.stat(file).st_size
    return size * resident // total if total else 0
