"""Verifying: reads everything a store says it has, and names each thing that is not so.

Checks every block of the directories, size, header and tail of every volume, and every sample's
checksum. Goes on after a failure: the report lists all of them. What it reads it does not trust: a
damaged directory makes its samples unreadable, never wrong.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.progress import reporter
from headrace.errors import CorruptStore, HeadraceError, StoreError
from headrace.io.objects.location import is_url, join, local_path, shown
from headrace.store.format import DATA_OFFSET
from headrace.store.manifest import FILE_NAME, fingerprint_of
from headrace.store.opening import engine_for, manifest_at
from headrace.store.segment import open_segment, read_extent
from headrace.store.sources.extents import neighbours

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from headrace.base.progress import Progress
    from headrace.store.manifest import Manifest
    from headrace.store.opening import RemoteEngine
    from headrace.store.segment import OpenSegment
    from headrace.store.trust import Trust

    Extents = dict[str, NDArray[np.int64]]

_SAMPLES_AT_ONCE = 4096
_SPAN_BYTES = 8 << 20
_GAP_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class BadSample:
    """One sample (or one part of it) that does not give the bytes it should.

    Attributes:
        index: its index in the store.
        name: its name.
        part: number of the part within its segment.
        path: the file.
        offset_bytes: where in the file.
        length: how long it should be.
        kind: `checksum`, `short`, `missing`, `changed`, `system`, `directory` or, where pictures are decoded
            too, `picture`.
        found: what was read.
        expected: what the directory says.
    """

    index: int
    name: str
    part: int
    path: str
    offset_bytes: int
    length: int
    kind: str
    found: str
    expected: str

    def __str__(self) -> str:
        return (
            f"sample {self.index} ({self.name!r}): {self.path}, offset {self.offset_bytes:,}, "
            f"{self.length:,} bytes: {self.kind}: found {self.found}, expected {self.expected}"
        )


@dataclass(frozen=True, slots=True)
class VolumeProblem:
    """A volume that is not as the manifest says."""

    segment: int
    volume: int
    path: str
    message: str


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        path: the store.
        samples: samples in the store.
        checked_samples: samples whose bytes were read and compared with a checksum.
        checked_bytes: their bytes.
        unchecked_samples: samples that have no checksum, or whose directory is damaged.
        bad_samples: samples that are not as they should be.
        bad_blocks: (path, offset) of damaged blocks of the directories.
        volume_problems: volumes that are not as they should be.
        problems: what else is wrong (a missing directory, a wrong fingerprint).
        seconds: how long it took.
        unit: what its samples are called: `documents` where they are tokens.
    """

    path: str
    samples: int = 0
    checked_samples: int = 0
    checked_bytes: int = 0
    unchecked_samples: int = 0
    bad_samples: list[BadSample] = field(default_factory=list)
    bad_blocks: list[tuple[str, int]] = field(default_factory=list)
    volume_problems: list[VolumeProblem] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    unit: str = "samples"

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.bad_samples or self.bad_blocks or self.volume_problems or self.problems)


def verify(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Progress | bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trust: Trust = None,
) -> VerifyReport:
    """Checks a store, completely.

    Args:
        path: the store's folder or URL.
        workers: threads that read.
        progress: called with (samples done, samples, bytes done, None), or True, as for `pack`.
        storage_options: for URLs; see docs/howto/object-stores.md.
        trust: where the volumes of an index from elsewhere may lie; see docs/howto/trust.md.

    Raises:
        StoreNotFound: there is no store.
        StoreError: volumes lie outside its folder, and nobody on this machine has agreed to that.
        CorruptStore: `store.json` itself is damaged, so nothing else can be checked.
    """
    started, report_progress = time.monotonic(), reporter(progress, "verifying")
    where = local_path(path)
    engine: RemoteEngine | None = None
    if is_url(where) or storage_options is not None:
        engine = engine_for(where, storage_options)
    try:
        manifest, reader = manifest_at(where, engine, trust=trust)
        report = VerifyReport(shown(where), manifest.samples)
        if all(segment.source.get("tokens") for segment in manifest.segments):
            report.unit = "documents"
        segments = open_leniently(where, manifest, report, reader)
        threads = workers or min(8, 2 * (os.cpu_count() or 1))
        with ThreadPoolExecutor(threads, "headrace-verify") as pool:
            for number, segment in segments:
                _verify_volumes(number, segment, report)
                firsts = range(0, segment.directory.samples, _SAMPLES_AT_ONCE)
                for done in pool.map(partial(_check_range, segment), firsts):
                    report.checked_samples += done.checked_samples
                    report.checked_bytes += done.checked_bytes
                    report.unchecked_samples += done.unchecked_samples
                    report.bad_samples += done.bad_samples
                    if report_progress is not None:
                        seen = report.checked_samples + report.unchecked_samples
                        report_progress(seen, report.samples, report.checked_bytes, None)
        report.seconds = time.monotonic() - started
        return report
    finally:
        if engine is not None:
            engine.close()


def open_leniently(
    where: str, manifest: Manifest, report: VerifyReport, engine: RemoteEngine | None = None
) -> list[tuple[int, OpenSegment]]:
    """Opens the segments that can be opened; what cannot goes to the report."""
    segments = []
    base = 0
    for number, entry in enumerate(manifest.segments):
        try:
            segment = open_segment(where, entry, base, engine)
            blocks = segment.directory.verify()
        except StoreError as e:
            report.problems.append(str(e))
            report.unchecked_samples += entry.samples
        else:
            report.bad_blocks += [
                (shown(join(where, entry.directory)), int(offset)) for offset in blocks
            ]
            segments.append((number, segment))
        base += entry.samples
    if len(segments) == len(manifest.segments):
        fingerprint = fingerprint_of([s.directory.header() for _, s in segments])
        if fingerprint != manifest.fingerprint:
            report.problems.append(
                f"{shown(join(where, FILE_NAME))}: fingerprint is {fingerprint}, expected "
                f"{manifest.fingerprint}."
            )
    return segments


def _verify_volumes(number: int, segment: OpenSegment, report: VerifyReport) -> None:
    """Checks each volume, and that the padding of packed ones after the last sample is zero."""
    volumes = segment.volumes
    ends: list[int] | None = None
    with suppress(CorruptStore):  # the damaged directory is reported by itself
        ends = data_ends(segment)
    for volume, (entry, path) in enumerate(zip(volumes.entries, volumes.paths, strict=True)):
        if (e := volumes.problem(volume)) is not None:
            report.volume_problems.append(VolumeProblem(number, volume, path, e.message))
        if entry.kind != "packed" or ends is None:
            continue
        tail = memoryview(bytearray(min(1 << 16, max(0, (entry.bytes or 0) - ends[volume]))))
        with suppress(OSError, HeadraceError):  # reported with the volume
            volumes.read_into(volume, tail, ends[volume])
            if any(tail):
                at = ends[volume] + next(i for i, byte in enumerate(tail) if byte)
                text = f"{path}: a byte behind the last sample is not zero (offset {at:,})."
                report.volume_problems.append(VolumeProblem(number, volume, path, text))


def data_ends(segment: OpenSegment) -> list[int]:
    """For each volume, where its last extent ends."""
    ends = np.full(len(segment.volumes.entries), DATA_OFFSET, np.int64)
    for _, _, extents in segment.walk():
        inside = extents["volume"] < len(ends)
        np.maximum.at(
            ends, extents["volume"][inside], (extents["offset"] + extents["length"])[inside]
        )
    return [int(end) for end in ends]


def _check_range(segment: OpenSegment, first: int) -> VerifyReport:
    """Checks the samples of a segment from `first` on, as many as are checked at once."""
    last = min(first + _SAMPLES_AT_ONCE, segment.directory.samples)
    report = VerifyReport(segment.entry.directory)
    try:
        extents = segment.directory.extents_of(np.arange(first, last, dtype=np.int64))
    except CorruptStore:
        report.unchecked_samples = last - first  # its blocks are reported by themselves
        return report
    entries = segment.volumes.entries
    for k in np.flatnonzero(extents["volume"] >= len(entries)).tolist():
        actual, expected = f"volume {extents['volume'][k]}", f"below {len(entries)}"
        report.bad_samples.append(
            _bad(segment, extents, k, "directory", found=actual, expected=expected)
        )
    if all(entry.kind == "tree" for entry in entries):
        report.bad_samples += _check_tree_files(segment, first, last)
    else:
        report.bad_samples += _check_spans(segment, extents)
    if segment.directory.has_crc:
        report.checked_samples, report.checked_bytes = last - first, int(extents["length"].sum())
    else:
        report.unchecked_samples = last - first
    return report


def _check_tree_files(segment: OpenSegment, first: int, last: int) -> list[BadSample]:
    kinds = {"CorruptSample": "checksum", "SourceChanged": "changed"}
    bad = []
    for sample in range(first, last):
        for extent in segment.extents(segment.base + sample):
            try:
                read_extent(segment, extent)
            except HeadraceError as e:
                bad.append(
                    BadSample(
                        extent.index, os.fsdecode(extent.name), extent.part, e.path or "",
                        extent.offset, extent.length, kinds.get(type(e).__name__, "system"), e.message,
                        "the bytes that were indexed",
                    )
                )  # fmt: skip
    return bad


def _check_spans(segment: OpenSegment, extents: Extents) -> list[BadSample]:
    """Reads neighbouring extents of file volumes together and compares each with its checksum."""
    which = np.flatnonzero(extents["volume"] < len(segment.volumes.entries))
    places = (extents[key][which] for key in ("volume", "offset", "length"))
    bad = []
    for run, begin, end in neighbours(*places, gap_bytes=_GAP_BYTES, span_bytes=_SPAN_BYTES):
        volume = int(extents["volume"][which[run[0]]])
        whole = end - begin <= _SPAN_BYTES  # else one extent, which is read in pieces
        span, problem = _read(segment, volume, begin, end - begin if whole else 0)
        for k in which[run].tolist():
            offset, length = int(extents["offset"][k]), int(extents["length"][k])
            piece = span[offset - begin : offset - begin + length]
            have, crc = len(piece), crc32c(piece)
            while not whole and have < length:
                size = min(_SPAN_BYTES, length - have)
                piece, problem = _read(segment, volume, offset + have, size)
                if not piece:
                    break
                have, crc = have + len(piece), crc32c(piece, crc)
            if have < length:
                actual, expected, kind = f"{have} bytes", f"{length} bytes", problem or "short"
                bad.append(_bad(segment, extents, k, kind, found=actual, expected=expected))
            elif segment.directory.has_crc and crc != int(extents["crc"][k]):
                expected = f"{int(extents['crc'][k]):08x}"
                actual = f"{crc:08x}"
                bad.append(_bad(segment, extents, k, "checksum", found=actual, expected=expected))
    return sorted(bad, key=lambda b: (b.index, b.part))


def _read(segment: OpenSegment, volume: int, offset: int, size: int) -> tuple[memoryview, str]:
    """What can be read of a range, and why nothing can."""
    buffer = memoryview(bytearray(size))
    try:
        return buffer[: segment.volumes.read_unchecked(volume, buffer, offset)], ""
    except HeadraceError:
        return buffer[:0], "missing"
    except OSError:
        return buffer[:0], "system"


def _bad(
    segment: OpenSegment, extents: Extents, k: int, kind: str, *, found: str, expected: str
) -> BadSample:
    sample, part, volume, offset, length = (
        int(extents[key][k]) for key in ("sample", "part", "volume", "offset", "length")
    )
    paths = segment.volumes.paths
    try:
        name = os.fsdecode(segment.directory.name(sample))
    except CorruptStore:
        name = "(its name is in a damaged block)"
    return BadSample(
        segment.base + sample, name, part,
        paths[volume] if volume < len(paths) else segment.entry.directory,
        offset, length, kind, found, expected,
    )  # fmt: skip
