"""Shards: files that hold many samples (tar, TFRecord, Parquet, ...), and where some of these lie.

Listing a tar or a TFRecord takes as many reads as it has samples: its headers are followed as far as the time
allows, and then its samples are taken to go on as they began. Other formats say themselves where their samples
are. What says nothing, or is too large to be asked in the time, is looked at in blocks.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.base.text import printable
from headrace.errors import HeadraceError, SourceError
from headrace.insight.doctor.findings import DataSet
from headrace.insight.doctor.samples import POOL_MAX, Piece, SamplePool, format_of, quantiles
from headrace.store.sources.tfrecord import looks_like_tfrecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_FRAME_BYTES: Final = 12
_FOOTER_BYTES: Final = 4
_RECORD_BYTES_MAX: Final = 1 << 40
_BLOCK: Final = 512


class _Sample(NamedTuple):
    """A sample in a shard: where its main part lies, where all of it ends, and a tar member's `.jpg`."""

    offset: int
    length: int
    end: int
    suffix: str = ""


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
        OSError: it cannot be read.
    """
    hops = Hops()
    for sample in _HOPPERS[kind](path):
        if time.monotonic() >= until:
            return hops
        hops.places.append((sample.offset, sample.length))
        hops.seen_bytes = sample.end
        hops.suffix = hops.suffix or sample.suffix
    hops.complete = True
    return hops


def _of_tfrecord(path: str) -> Iterator[_Sample]:
    at = 0
    with open(path, "rb", buffering=_BLOCK) as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            header = file.read(_FRAME_BYTES)
            wrong = "" if looks_like_tfrecord(header) else f"no record begins at offset {at:,}"
            length = struct.unpack_from("<Q", header)[0] if not wrong else 0
            if length > min(size, _RECORD_BYTES_MAX):
                wrong = f"the record at offset {at:,} leaves the file"
            if wrong:
                raise SourceError(
                    f"{path}: {wrong}.", path=path, offset_bytes=at, next_step="Check the file."
                )
            begin = at + _FRAME_BYTES
            at = begin + length + _FOOTER_BYTES
            yield _Sample(begin, length, at)
            file.seek(at)


def _of_tar(path: str) -> Iterator[_Sample]:
    """WebDataset's keys as samples: the largest part is the image, the others are labels."""
    import tarfile

    def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # millions must not fill the memory
            if member.isreg() and not os.path.basename(member.name).startswith("."):
                yield member

    def key(member: tarfile.TarInfo) -> tuple[str, str]:
        folder, name = os.path.split(member.name)
        return folder, name.partition(".")[0]

    try:
        with (
            open(path, "rb", buffering=_BLOCK) as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            for _, group in itertools.groupby(members(tar), key):
                parts = list(group)
                main, last = max(parts, key=lambda part: part.size), parts[-1]
                end = last.offset_data + -(-last.size // _BLOCK) * _BLOCK
                _, dot, ending = os.path.basename(main.name).partition(".")
                yield _Sample(main.offset_data, main.size, end, (dot + ending).lower())
    except tarfile.TarError as e:
        raise SourceError(
            f"{path}: no tar can be read here: {e}.", path=path, next_step="Check the file."
        ) from e


_HOPPERS: Final = {"tar": _of_tar, "tfrecord": _of_tfrecord}


# -- shards ------------------------------------------------------------------------------------------

SHARD_KINDS: Final = frozenset(
    {"tar", "tfrecord", "parquet", "arrow", "mds", "array_record", "hdf5"}
)
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
    why = ""
    if given.kind in _HOPPERS and not _compressed(given.names[0]):
        sampled = _hopped(given, seconds, stop)
    else:
        sampled, why = _indexed(given)
    if sampled is None:
        return _blocks(given, why)
    exact = sampled.complete and given.exact
    lengths = np.array([p.length for p in sampled.pieces], np.int64)
    estimated = sampled.samples / max(1, sampled.seen_bytes) * given.nbytes
    data = DataSet(
        path=given.path, kind="shards" if given.kind in SHARD_KINDS else "file",
        format=f"{sampled.inner} in {given.kind}" if sampled.inner else given.kind,
        samples=sampled.samples if exact else round(estimated), exact=exact, files=given.files,
        nbytes=given.nbytes, **quantiles(lengths), notes=given.notes,
    )  # fmt: skip
    pieces = list(sampled.pieces)
    random.Random(1).shuffle(pieces)  # noqa: S311 - a draw, no secret
    return data, SamplePool(pieces=pieces[:POOL_MAX])


def _compressed(path: str) -> bool:
    from headrace.store.sources.detect import is_compressed

    with open(path, "rb") as file:
        return is_compressed(file.read(8))


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
    if hops.complete:
        return [Piece(path, offset, length) for offset, length in full]
    starts = np.random.default_rng(len(path)).integers(0, max(1, size), len(full))
    # The first ones as they are, so that there is something to decode.
    return [
        Piece(path, offset if i < _FIRST else max(0, min(int(start), size - length)), length)
        for i, ((offset, length), start) in enumerate(zip(full, starts, strict=True))
    ]


def _indexed(given: Shards) -> tuple[_Sampled | None, str]:
    """Files that say themselves where their samples lie; else why not."""
    from headrace.store.sources.detect import open_source
    from headrace.store.sources.scan import Scan, SourceOptions

    names: list[str] = []
    seen = 0
    for name, size in zip(given.names, given.sizes.tolist(), strict=True):
        if seen + size > _INDEXED_BYTES_MAX or len(names) >= _FILES_MAX:
            break
        names.append(name)
        seen += size
    if not names:
        return None, f"its {given.kind} files are too large to be listed here: looked at in blocks"
    try:
        scan = open_source(names, SourceOptions())
    except (HeadraceError, ImportError, OSError, ValueError) as e:
        return None, f"its samples cannot be listed ({_first_line(e)}): looked at in blocks"
    if not isinstance(scan, Scan):
        return None, "it can only be read front to back: looked at in blocks"
    columns = scan.columns
    drawn = np.random.default_rng(3).permutation(columns.extents)[:POOL_MAX].tolist()
    places = [
        (int(columns.volume[i]), int(columns.offset[i]), int(columns.length[i])) for i in drawn
    ]
    pieces = [Piece(scan.volumes[v].path, offset, n) for v, offset, n in places if n > 0]
    if not pieces:
        return None, "its samples are empty: looked at in blocks"
    return _Sampled(pieces, columns.samples, seen, len(names) == len(given.names)), ""


def _first_line(error: Exception) -> str:
    message = error.message if isinstance(error, HeadraceError) else str(error)
    return printable(message.splitlines()[0][:120]) if message else type(error).__name__


def _blocks(given: Shards, why: str) -> tuple[DataSet, SamplePool]:
    dice = np.random.default_rng(4)
    chosen = dice.choice(len(given.names), POOL_MAX, p=given.sizes / given.sizes.sum())
    pieces = []
    for at in chosen.tolist():
        size = int(given.sizes[at])
        length = min(_BLOCK_BYTES, size)
        start = int(dice.integers(0, size - length + 1)) // 4096 * 4096
        pieces.append(Piece(given.names[at], start, length))
    lengths = np.array([p.length for p in pieces], np.int64)
    data = DataSet(
        path=given.path, kind="shards" if given.kind in SHARD_KINDS else "file", format=given.kind,
        samples=max(1, round(given.nbytes / float(lengths.mean()))), exact=False, files=given.files,
        nbytes=given.nbytes, **quantiles(lengths), in_place=False,
        notes=tuple(note for note in (*given.notes, why) if note),
    )  # fmt: skip
    return data, SamplePool(pieces=pieces, true_samples=False)
