"""Shards: files that hold many samples (tar, TFRecord, Parquet, ...), and where some of these lie.

Listing a tar or a TFRecord takes as many reads as it has samples: its headers are followed as far as the time
allows, and then its samples are taken to go on as they began. Other formats say themselves where their samples
are. What says nothing, or is too large to be asked in the time, is looked at in blocks.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.base.text import printable
from headrace.errors import HeadraceError, SourceError
from headrace.insight.doctor.findings import DataSet
from headrace.insight.doctor.samples import POOL_MAX, Piece, SamplePool, quantiles
from headrace.store.directory import split_names
from headrace.store.sources.contents import SHARD_KINDS, format_of
from headrace.store.sources.detect import is_compressed, open_source
from headrace.store.sources.scan import Scan, SourceOptions
from headrace.store.sources.shards import Window, read_head
from headrace.store.sources.tar import grouped, read_members
from headrace.store.sources.tfrecord import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_BLOCK: Final = 512


@dataclass(slots=True)
class Hops:
    """Samples of one shard.

    Attributes:
        places: (offset, bytes) of the parts that are samples' main ones.
        seen_bytes: how far it went.
        suffix: of a tar's members, `.jpg`.
    """

    places: list[tuple[int, int]] = field(default_factory=list)
    seen_bytes: int = 0
    complete: bool = False
    suffix: str = ""


def hop(path: str, kind: str, until: float) -> Hops:
    """Follow a TFRecord file or an uncompressed tar until a moment of the monotonic clock.

    Raises:
        SourceError: it is none, or damaged.
    """
    hops = Hops()
    with Window(path) as window:
        for offset, length, end, suffix in _HOPPERS[kind](window):
            if time.monotonic() >= until:
                return hops
            hops.places.append((offset, length))
            hops.seen_bytes, hops.suffix = end, hops.suffix or suffix
    hops.complete = True
    return hops


def _of_tfrecord(window: Window) -> Iterator[tuple[int, int, int, str]]:
    for offset, length, _ in read_records(window):
        yield offset, length, offset + length + 4, ""


def _of_tar(window: Window) -> Iterator[tuple[int, int, int, str]]:
    """WebDataset's keys as samples: the largest part is the image, the others are labels."""
    members = ((m.name, m.offset, m) for m in read_members(window, []))
    for _, parts in grouped(window.path, members):
        part, main = max(parts, key=lambda each: each[1].size)
        end = max(m.offset + -(-m.size // _BLOCK) * _BLOCK for _, m in parts)
        yield main.offset, main.size, end, f".{os.fsdecode(part)}".lower() if part else ""


_HOPPERS: Final = {"tar": _of_tar, "tfrecord": _of_tfrecord}

_BLOCK_BYTES: Final = 128 << 10
_FILES_MAX: Final = 64
_FIRST: Final = 64
_INDEXED_BYTES_MAX: Final = 1 << 30
"""Of files whose own index says where samples lie; larger ones are looked at as blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """What is to be looked at.

    Attributes:
        names: some of them, or all.
        exact: whether `names` are all.
        notes: what was seen on the way.
    """

    path: str
    kind: str
    names: list[str]
    sizes: NDArray[np.int64]
    files: int
    exact: bool
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> float:
        """Of all files."""
        return float(self.sizes.mean()) * self.files


class _Sampled(NamedTuple):
    """Samples that were seen: how many, in how many bytes of files, and whether these are all."""

    pieces: list[Piece]
    samples: int
    seen_bytes: int
    complete: bool
    inner: str = ""
    """The samples' own format, or empty."""


def survey_shards(
    given: Shards, seconds: float, stop: Callable[[], bool]
) -> tuple[DataSet, SamplePool]:
    """Find samples in files of one kind, within so many seconds.

    Raises:
        SourceError: nothing can be read, or the first file is damaged.
    """
    if not given.names or not given.sizes.sum():
        raise SourceError(
            f"{printable(given.path)}: nothing can be read here: its files are empty or unreadable.",
            path=given.path, next_step="Check their permissions, and that they were copied.",
        )  # fmt: skip
    if given.kind in _HOPPERS and not is_compressed(read_head(given.names[0], 8)):
        sampled = _hopped(given, seconds, stop)
        why, rows = "", None
    else:
        sampled, why, rows = _indexed(given)
    kind = "shards" if given.kind in SHARD_KINDS else "file"
    if sampled is None:
        pieces = _blocks(given)
        lengths = np.array([p.length for p in pieces], np.int64)
        blocks = max(1, round(given.nbytes / float(lengths.mean())))
        data = DataSet(
            path=given.path, kind=kind, format=given.kind, in_place=False, files=given.files,
            samples=blocks if rows is None else rows, exact=rows is not None and given.exact,
            nbytes=given.nbytes, **quantiles(lengths),
            notes=tuple(note for note in (*given.notes, why) if note),
        )  # fmt: skip
        return data, SamplePool(pieces=pieces, true_samples=False)
    exact = sampled.complete and given.exact
    estimated = sampled.samples / max(1, sampled.seen_bytes) * given.nbytes
    data = DataSet(
        path=given.path, kind=kind, files=given.files, nbytes=given.nbytes,
        format=f"{sampled.inner} in {given.kind}" if sampled.inner else given.kind,
        samples=sampled.samples if exact else round(estimated), exact=exact,
        **quantiles(np.array([p.length for p in sampled.pieces], np.int64)), notes=given.notes,
    )  # fmt: skip
    pieces = list(sampled.pieces)
    random.Random(1).shuffle(pieces)  # noqa: S311 - a draw, no secret
    return data, SamplePool(pieces=pieces[:POOL_MAX])


def _hopped(given: Shards, seconds: float, stop: Callable[[], bool]) -> _Sampled | None:
    """Some shards at random, each for a while; what was seen of a shard stands for all of it."""
    count = len(given.names)
    order = random.Random(2).sample(range(count), min(count, _FILES_MAX))  # noqa: S311
    until = time.monotonic() + seconds
    pieces: list[Piece] = []
    samples = seen_bytes = 0
    complete, inner = len(order) == count, ""
    for number, at in enumerate(order):
        left = until - time.monotonic()
        if (pieces and left <= 0) or stop():
            complete = False
            break
        share = max(0.02, left / (len(order) - number))
        size = int(given.sizes[at])
        try:
            hops = hop(given.names[at], given.kind, time.monotonic() + share)
        except (SourceError, OSError):
            if not pieces:
                raise
            complete = False
            continue
        complete &= hops.complete
        samples += len(hops.places)
        seen_bytes += size if hops.complete else hops.seen_bytes
        inner = inner or (format_of("x" + hops.suffix) if hops.suffix else "")
        pieces += _spread(given.names[at], size, hops)
    return _Sampled(pieces, samples, seen_bytes, complete, inner) if pieces else None


def _spread(path: str, size: int, hops: Hops) -> list[Piece]:
    """A shard's samples; if its end was not seen, their sizes at random places of it."""
    full = [(offset, length) for offset, length in hops.places if length > 0][:POOL_MAX]
    starts = np.random.default_rng(len(path)).integers(0, max(1, size), len(full)).tolist()
    # The first ones as they are, so that there is something to decode.
    as_seen = len(full) if hops.complete else _FIRST
    return [
        Piece(path, offset if i < as_seen else max(0, min(start, size - length)), length)
        for i, ((offset, length), start) in enumerate(zip(full, starts, strict=True))
    ]


def _indexed(given: Shards) -> tuple[_Sampled | None, str, int | None]:
    """Files that say themselves where their samples lie; else why not, and their rows if they say that."""
    before = np.cumsum(given.sizes) <= _INDEXED_BYTES_MAX
    names = given.names[: min(int(before.sum()), _FILES_MAX)]
    if not names:
        return (
            None,
            f"its {given.kind} files are too large to be listed here: looked at in blocks",
            None,
        )
    try:
        scan = open_source(names, SourceOptions())
    except (HeadraceError, ImportError, OSError, ValueError) as e:
        message = (e.message if isinstance(e, HeadraceError) else str(e)) or type(e).__name__
        reason = printable(message.splitlines()[0][:120])
        return None, f"its samples cannot be listed ({reason}): looked at in blocks", None
    if not isinstance(scan, Scan):
        rows = None if scan.count is None else round(scan.count * given.files / len(names))
        return None, "it can only be read front to back: looked at in blocks", rows
    columns = scan.columns
    drawn = np.random.default_rng(3).permutation(columns.extents)[:POOL_MAX]
    places = [c[drawn].tolist() for c in (columns.volume, columns.offset, columns.length)]
    paths = [volume.path for volume in scan.volumes]
    if scan.volumes[0].kind == "tree":  # a list of files: each is its own
        listed = split_names(columns.names, columns.name_offsets)
        paths = [os.path.join(paths[0], os.fsdecode(name)) for name in listed]
        places[0] = drawn.tolist()
    pieces = [Piece(paths[v], at, n) for v, at, n in zip(*places, strict=True) if n]
    if not pieces:
        return None, "its samples are empty: looked at in blocks", None
    seen = int(given.sizes[: len(names)].sum())
    return _Sampled(pieces, columns.samples, seen, len(names) == len(given.names)), "", None


def _blocks(given: Shards) -> list[Piece]:
    dice = np.random.default_rng(4)
    pieces = []
    for at in dice.choice(len(given.names), POOL_MAX, p=given.sizes / given.sizes.sum()).tolist():
        size = int(given.sizes[at])
        length = min(_BLOCK_BYTES, size)
        start = int(dice.integers(0, size - length + 1)) // 4096 * 4096
        pieces.append(Piece(given.names[at], start, length))
    return pieces
