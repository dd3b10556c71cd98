"""Samples: some at random that stand for the data set, where shards have theirs, and how one core decodes them.

Listing a tar or a TFRecord takes as many reads as it has samples: its headers are followed as far as the time
allows, and then its samples are taken to go on as they began. Other formats say themselves where their samples
are. What says nothing, or is too large to be asked in the time, is looked at in blocks.

Images are decoded to RGB and scaled to 224 x 224, which is what most training on images does first;
random crops, flips and normalising come on top. JPEG, PNG and WebP are decoded by `headrace.Images`,
too. npy and npz are loaded by numpy. What nothing here can decode is delivered as bytes, and
`Decode.why` says so.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import math
import os
import random
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from headrace import _native
from headrace.base.text import printable
from headrace.errors import HeadraceError, SourceError
from headrace.insight.doctor.findings import DataSet, Decode, Huge
from headrace.plane.images import Images
from headrace.store.directory import split_names
from headrace.store.sources.contents import SHARD_KINDS, family_of, format_of, format_of_bytes
from headrace.store.sources.detect import LIBRARIES, open_source
from headrace.store.sources.scan import Scan, SourceOptions
from headrace.store.sources.shards import Window, is_compressed, read_head
from headrace.store.sources.tar import grouped, read_members
from headrace.store.sources.tfrecord import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

POOL_MAX: Final = 2000  # samples that stand for all


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample's bytes, or as many bytes as one would have, in a file."""

    path: str
    offset: int
    length: int


@dataclass(slots=True)
class SamplePool:
    """Samples at random."""

    pieces: list[Piece] = field(default_factory=list)
    whole_files: bool = False  # each is a file of its own, which is opened to be read
    unopened: list[str] = field(default_factory=list)
    """More files at random that nothing was asked about yet: opening them is news to the system."""
    store: Any = None
    """An open store whose samples lie in objects or another host's volumes; read by index."""
    true_samples: bool = True
    """Whether the pieces are samples, and can be decoded; else they are blocks."""

    @property
    def mean_bytes(self) -> float:
        """Of a piece."""
        return sum(p.length for p in self.pieces) / max(1, len(self.pieces))

    def close(self) -> None:
        """Close the store, if there is one."""
        if self.store is not None:
            self.store.close()


def quantiles(sizes: NDArray[np.int64]) -> dict[str, Any]:
    """How sizes are spread, under the names that `DataSet` has for it."""
    p10, p50, p90 = (float(x) for x in np.percentile(sizes, (10, 50, 90)))
    return {
        "size_p10": p10, "size_p50": p50, "size_p90": p90, "size_max": float(sizes.max()),
        "size_mean": float(sizes.mean()), "huge": huge_of(sizes),
    }  # fmt: skip


_FAR: Final = 16.0  # times as large as the middle one
_HEAVY: Final = 0.1  # of all bytes or pixels: less needs no word
_FEW: Final = 0.1  # of all samples: more are no exceptions


def huge_of(sizes: NDArray[np.int64]) -> Huge | None:
    """Those few that are far larger than the others, and weigh as much as many of these."""
    far = sizes[sizes > _FAR * np.median(sizes)] if len(sizes) else sizes
    share = float(far.sum()) / max(1.0, float(sizes.sum()))
    if share < _HEAVY or len(far) > _FEW * len(sizes):
        return None
    least, most = float(far.min()), float(far.max())
    return Huge(count=len(far), of=len(sizes), least=least, most=most, share=share)


# -- decoding ----------------------------------------------------------------------------------------

SIDE: Final = 224
_NATIVE: Final = frozenset({"jpeg", "png", "webp"})
_NATIVE_SHARE: Final = 0.25  # of the time to measure in
_HEADS_SHARE: Final = 0.25  # of it, at most, for looking how large images are
_PIXELS_MAX: Final = 100_000_000
_TEXTS_LOOKED_AT: Final = 8


def _is_text(data: bytes) -> bool:
    """Whether a sample begins as UTF-8 that somebody wrote: no zeros, no half characters but at its cut."""
    try:
        head = codecs.getincrementaldecoder("utf-8")().decode(data[:256])
    except UnicodeDecodeError:
        return False
    return bool(head) and "\0" not in head


def measure_decoding(
    named: Sequence[tuple[str, bytes]], seconds: float, stop: Callable[[], bool] = lambda: False,
    *, mean_bytes: float = 0.0,
) -> Decode | None:  # fmt: skip
    """Decode samples, each with its name, round and round, for so long; None without samples.

    Where images have more bytes on average than these have, `mean_bytes`, they take so many times as long.
    Processor time of this thread is taken: other processes that want the core do not count.
    """
    if not named:
        return None
    formats = [format_of_bytes(data[:16]) for _, data in named]
    name = Counter(formats).most_common(1)[0][0]
    samples = [each for each, its in zip(named, formats, strict=True) if its == name]
    is_image = family_of(name) == "image"
    if not is_image and name not in ("npy", "npz"):
        why = "the samples are no images, npy or npz: decoding is not looked at"
        if all(_is_text(data) for _, data in samples[:_TEXTS_LOOKED_AT]):
            name, why = (
                "text",
                "the samples are texts, which training takes as tokens: headrace tokenize",
            )
        out_bytes = sum(len(data) for _, data in samples) / len(samples)
        return Decode(format=name, decoder="", out_bytes=out_bytes, why=why)
    decode = _scaled if is_image else _load_numpy
    huge, weight, mean_pixels = None, 1.0, 0.0
    if is_image:
        samples, huge, weight, mean_pixels = _ordinary(samples, _HEADS_SHARE * seconds, mean_bytes)
    apart_s = _NATIVE_SHARE * seconds if name in _NATIVE else 0.0
    odd = [
        each for each, its in zip(named, formats, strict=True) if family_of(its) != family_of(name)
    ]
    failed = {which: f"begins as no {name} does" for which, _ in odd}
    cpu_s, out_bytes, good, seen = 0.0, 0.0, 0, 0
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a data set's oddities are counted, not printed
        for which, data in itertools.cycle(samples):
            began_s = time.thread_time()
            seen += 1
            try:
                out_bytes += decode(data)
            except Exception as e:  # noqa: BLE001 - decoders raise what they like
                failed.setdefault(which, f"{type(e).__name__}: {e}")
            else:
                good += 1
                cpu_s += time.thread_time() - began_s
            if time.monotonic() > begun_s + seconds - apart_s or stop():
                break
        native_s, tried, refused = None, 0, list[str]()
        if apart_s and good:
            native_s, tried, refused = _measure_native(samples, decode, apart_s, stop, failed)
    got = (time.thread_time() - begun_cpu_s) / max(1e-9, time.monotonic() - begun_s)
    decoder = f"Pillow {version_of('pillow')}".strip() if is_image else "numpy"
    return Decode(
        format=name, decoder=decoder, samples=min(len(samples), max(seen, tried)) + len(odd),
        failed=len(failed), first_failed=next((": ".join(each) for each in failed.items()), ""),
        got=min(1.0, got), sample_s=weight * cpu_s / max(1, good), huge=huge,
        native_s=weight * native_s if native_s and len(refused) < tried else None, native_samples=tried,
        refused=len(refused), first_refused=refused[0] if refused else "",
        side=SIDE if is_image else 0,
        out_bytes=3.0 * SIDE * SIDE if is_image and not good else out_bytes / max(1, good),
        pixels=mean_pixels,
    )  # fmt: skip


def _measure_native(
    samples: Sequence[tuple[str, bytes]], decode: Callable[[bytes], int], seconds: float,
    stop: Callable[[], bool], failed: dict[str, str],
) -> tuple[float | None, int, list[str]]:  # fmt: skip
    """Decode natively, and leave to Pillow what is refused, as the stage does: with nothing else in between.

    Gives the processor time of a picture, how many were tried, and why each was refused that Pillow decodes.
    What neither decodes is `failed`.
    """
    recipe, refused, tried = Images(size=SIDE).recipe(), list[str](), 0
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    for i, (which, data) in enumerate(itertools.cycle(samples)):
        try:
            _native.decode_picture(recipe, data, 0, 0, i)  # a crop of its own each time
            tried += 1
        except ValueError as e:
            try:
                decode(data)
            except Exception as other:  # noqa: BLE001 - likewise
                failed.setdefault(which, f"{type(other).__name__}: {other}")
            else:
                refused.append(str(e))
                tried += 1
        if time.monotonic() > begun_s + seconds or stop():
            break
    return (time.thread_time() - begun_cpu_s) / tried if tried else None, tried, refused


def _ordinary(
    samples: Sequence[tuple[str, bytes]], seconds: float, mean_bytes: float
) -> tuple[list[tuple[str, bytes]], Huge | None, float, float]:
    """Look at images' heads, as far as the time goes.

    Gives those to try, the huge ones that are not, how many times as large the average is with these, and its
    pixels.
    """
    from PIL import Image

    until, heads = time.monotonic() + seconds, list[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, data in samples:
            heads.append(0)
            with contextlib.suppress(Exception):  # decoding it says what is wrong
                heads[-1] = math.prod(Image.open(io.BytesIO(data)).size)
            if time.monotonic() > until:
                break
    pixels = np.array(heads, np.int64)
    known = pixels[pixels > 0]
    huge = huge_of(known)
    tried = pixels < (math.inf if huge is None else huge.least)
    if huge is None:  # they may lie where none was read
        weight = max(1.0, mean_bytes / (sum(len(data) for _, data in samples) / len(samples)))
    else:
        weight = float(pixels.mean() / pixels[tried].mean())
    ordinary = [each for each, good in zip(samples, tried.tolist(), strict=False) if good]
    return ordinary, huge, weight, float(known.sum()) / max(1, len(known))


def _scaled(data: bytes) -> int:
    """Decode an image to RGB, and scale it; return the result's bytes."""
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    if image.width * image.height > _PIXELS_MAX:
        size = f"{image.width:,} x {image.height:,} pixels"
        raise ValueError(
            f"{size}, too large to be tried: a loader takes seconds for it, which are in no figure here"
        )
    small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small).nbytes


def _load_numpy(data: bytes) -> int:
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded.nbytes
    with loaded:
        return sum(loaded[key].nbytes for key in loaded.files)


def version_of(package: str) -> str:
    """Of what is installed; nothing is imported; '' where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_BLOCK: Final = 512


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
class ShardFiles:
    """What is to be looked at."""

    path: str
    kind: str
    names: list[str]  # some of them, or all
    sizes: NDArray[np.int64]
    files: int
    files_estimated: bool = False
    exact: bool  # whether `names` are all
    notes: tuple[str, ...] = ()  # what was seen on the way

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
    inner: str = ""  # the samples' own format, or empty


def survey_shards(
    given: ShardFiles, seconds: float, stop: Callable[[], bool]
) -> tuple[DataSet, SamplePool]:
    """Find samples in files of one kind, within so many seconds.

    Raises SourceError if nothing can be read, or the first file is damaged.
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
            files_estimated=given.files_estimated, blocks=rows is None,
            samples=rows.rows if rows else blocks, exact=rows is not None and rows.exact,
            nbytes=given.nbytes, **quantiles(lengths),
            notes=tuple(note for note in (*given.notes, why) if note),
        )  # fmt: skip
        return data, SamplePool(pieces=pieces, true_samples=False)
    exact = sampled.complete and given.exact
    estimated = sampled.samples / max(1, sampled.seen_bytes) * given.nbytes
    data = DataSet(
        path=given.path, kind=kind, files=given.files, files_estimated=given.files_estimated,
        nbytes=given.nbytes, format=f"{sampled.inner} in {given.kind}" if sampled.inner else given.kind,
        samples=sampled.samples if exact else round(estimated), exact=exact,
        **quantiles(np.array([p.length for p in sampled.pieces], np.int64)), notes=given.notes,
    )  # fmt: skip
    pieces = list(sampled.pieces)
    random.Random(1).shuffle(pieces)  # noqa: S311 - a draw, no secret
    return data, SamplePool(pieces=pieces[:POOL_MAX])


def _hopped(given: ShardFiles, seconds: float, stop: Callable[[], bool]) -> _Sampled | None:
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
        share_until = time.monotonic() + max(0.02, left / (len(order) - number))
        path, size, places = given.names[at], int(given.sizes[at]), list[tuple[int, int]]()
        reached, whole = 0, True
        try:
            with Window(path) as window:
                for offset, length, end, suffix in _HOPPERS[given.kind](window):
                    if time.monotonic() >= share_until:
                        whole = False
                        break
                    places.append((offset, length))
                    reached, inner = end, inner or (format_of("x" + suffix) if suffix else "")
        except (SourceError, OSError):
            if not pieces:
                raise
            complete = False
            continue
        complete &= whole
        samples += len(places)
        seen_bytes += size if whole else reached
        pieces += _spread(path, size, places, whole=whole)
    return _Sampled(pieces, samples, seen_bytes, complete, inner) if pieces else None


def _spread(path: str, size: int, places: list[tuple[int, int]], *, whole: bool) -> list[Piece]:
    """A shard's samples by (offset, bytes); if its end was not seen, their sizes at random places of it."""
    full = [(offset, length) for offset, length in places if length > 0][:POOL_MAX]
    starts = np.random.default_rng(len(path)).integers(0, max(1, size), len(full)).tolist()
    # The first ones as they are, so that there is something to decode.
    as_seen = len(full) if whole else _FIRST
    return [
        Piece(path, offset if i < as_seen else max(0, min(start, size - length)), length)
        for i, ((offset, length), start) in enumerate(zip(full, starts, strict=True))
    ]


class _Rows(NamedTuple):
    """Rows of files that say how many they have, and whether all files were asked."""

    rows: int
    exact: bool


def _indexed(given: ShardFiles) -> tuple[_Sampled | None, str, _Rows | None]:
    """Files that say themselves where their samples lie; else why not, and their rows if they say that."""
    before = np.cumsum(given.sizes) <= _INDEXED_BYTES_MAX
    whole = given.kind in LIBRARIES
    names = given.names if whole else given.names[: min(int(before.sum()), _FILES_MAX)]
    if not names:
        why = f"its {given.kind} files are too large to be listed here: looked at in blocks"
        return None, why, None
    try:
        scan = open_source(given.path if whole else names, SourceOptions())
    except (HeadraceError, ImportError, OSError, ValueError) as e:
        message = (e.message if isinstance(e, HeadraceError) else str(e)) or type(e).__name__
        reason = printable(message.splitlines()[0][:120])
        return None, f"its samples cannot be listed ({reason}): looked at in blocks", None
    if not isinstance(scan, Scan):
        rows = None if scan.count is None else _Rows(scan.count, exact=True)
        if rows is not None and not whole and not (given.exact and len(names) == len(given.names)):
            seen = int(given.sizes[: len(names)].sum())
            rows = _Rows(round(rows.rows * given.nbytes / max(1, seen)), exact=False)
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


def _blocks(given: ShardFiles) -> list[Piece]:
    dice = np.random.default_rng(4)
    pieces = []
    for at in dice.choice(len(given.names), POOL_MAX, p=given.sizes / given.sizes.sum()).tolist():
        size = int(given.sizes[at])
        length = min(_BLOCK_BYTES, size)
        start = int(dice.integers(0, size - length + 1)) // 4096 * 4096
        pieces.append(Piece(given.names[at], start, length))
    return pieces
