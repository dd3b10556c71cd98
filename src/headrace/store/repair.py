"""Repairing: fetches damaged samples again from where they came from.

Only bytes that match the recorded checksum are taken; of pictures that were rewritten when they were
packed, they are rewritten once more. A damaged volume is written anew beside the old one and put in its
place by rename; nothing is patched in place, so a kill leaves the old or the new.
What cannot be fetched stays as it is, and is reported.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.checksum import crc32c
from headrace.base.files import NewFile, open_stream, read_file, remove_leftovers, write_all
from headrace.errors import CorruptStore, HeadraceError, SourceError, VolumeError
from headrace.store.directory import split_names
from headrace.store.format import DATA_OFFSET, PAGE_BYTES, VolumeHeader, parse_volume_header
from headrace.store.manifest import load_manifest
from headrace.store.publish import check_free_space, disk_errors, locked
from headrace.store.rewriting import ImageRecipe, recorded_images
from headrace.store.sources.detect import open_source
from headrace.store.sources.extents import LARGE_BYTES, ScanReader
from headrace.store.sources.scan import Scan, SourceOptions, Stream
from headrace.store.trust import check_trust
from headrace.store.verify import BadSample, VerifyReport, data_ends, open_leniently, verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.store.segment import OpenSegment
    from headrace.store.trust import Trust

_COPY_BYTES = 16 << 20


@dataclass(slots=True)
class RepairReport:
    """What was done.

    Attributes:
        path: the store.
        repaired: samples whose bytes were fetched again.
        unrepairable: the others, with the reason.
        rewritten: volumes that were written anew.
        before: what `verify` had found.
    """

    path: str
    before: VerifyReport
    repaired: list[BadSample] = field(default_factory=list)
    unrepairable: list[tuple[BadSample | None, str]] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is left to be mended."""
        return not self.unrepairable


def repair(
    path: str | os.PathLike[str], *, workers: int | None = None, trust: Trust = None
) -> RepairReport:
    """Verifies a store and mends what its sources still have.

    Args:
        path: the store's folder.
        workers: threads that read.
        trust: where volumes and sources may lie of a store that was made elsewhere; see
            docs/howto/trust.md.

    Raises:
        StoreNotFound: there is no store.
        CorruptStore: `store.json` is damaged.
        StoreError: another process is writing to the store, or it names sources that nobody on this
            machine has agreed to.
        VolumeError: the disk is full or fails.
    """
    where = os.path.realpath(os.fsdecode(path))
    # Says what is wrong where there is no store to lock.
    check_trust("sources", where, load_manifest(where), trust)
    with ExitStack() as stack:
        with disk_errors(Path(where), "Nothing was changed: check the folder, and repair again."):
            stack.enter_context(locked(Path(where), what="writing to"))
        before = verify(where, workers=workers, trust=trust)
        report = RepairReport(where, before)
        manifest = load_manifest(where)
        for problem in before.problems:
            report.unrepairable.append((None, problem))
        for block_path, offset in before.bad_blocks:
            reason = f"{block_path}: a block of the directory is damaged (offset {offset:,})."
            report.unrepairable.append((None, reason))
        for number, segment in open_leniently(where, manifest, VerifyReport(where)):
            _repair_segment(number, segment, report)
    return report


def _repair_segment(number: int, segment: OpenSegment, report: RepairReport) -> None:
    last = segment.base + segment.directory.samples
    mendable, wrong = [], set()
    for sample in report.before.bad_samples:
        if segment.base <= sample.index < last:
            if (reason := _obstacle(segment, sample.path)) is None:
                mendable.append(sample)
            else:
                report.unrepairable.append((sample, reason))
    for problem in report.before.volume_problems:
        if problem.segment == number:
            if _obstacle(segment, problem.path) is None:
                wrong.add(problem.path)
            else:
                report.unrepairable.append((None, problem.message))
    source = _Source(segment)
    for volume, path in enumerate(segment.volumes.paths):
        here = [b for b in mendable if b.path == path]
        fetched = source.check(here, report)
        # A volume that is only missing is not replaced by zeros, as long as nothing of it is left.
        if fetched or (path in wrong and not here):
            _rewrite(segment, volume, fetched, source)
            report.rewritten.append(path)
            report.repaired += fetched


def _obstacle(segment: OpenSegment, path: str) -> str | None:
    """Why the volume at `path` must not be replaced, or None."""
    if path not in segment.volumes.paths:
        return "the directory says that it lies in a volume that does not exist"
    entry = segment.volumes.entries[segment.volumes.paths.index(path)]
    if entry.kind != "packed":
        return "it lies in a foreign file, which headrace never writes: restore that file"
    try:
        header = parse_volume_header(read_file(path, PAGE_BYTES), path)
    except (OSError, CorruptStore):
        return None  # nothing there that could be another store's
    if header.uuid.hex() != entry.uuid:
        return "another store's volume stands in its place: move that file back where it belongs"
    return None


# -- the source ---------------------------------------------------------------------------------------


class _Source:
    """Where a segment's samples came from, opened again when first needed."""

    def __init__(self, segment: OpenSegment) -> None:
        self._segment = segment
        self._source: Scan | Stream | None = None
        self._samples: dict[bytes, int] | None = None
        self._images = recorded_images(segment.entry.source)

    def check(self, bad: list[BadSample], report: RepairReport) -> list[BadSample]:
        """Those of `bad` that the source still holds byte for byte; the others are reported."""
        reasons = dict.fromkeys(bad, "its source does not hold it any more")
        good = set()
        try:
            for sample, pieces in self.read(bad) if bad else ():
                try:
                    length = value = 0
                    for piece in pieces:
                        length, value = length + len(piece), crc32c(piece, value)
                except HeadraceError as e:
                    reasons[sample] = f"its source cannot be read: {e.message}"
                    continue
                if (length, value) == (sample.length, self._crc(sample)):
                    good.add(sample)
                else:
                    reasons[sample] = "its source holds other bytes under this name now"
        except HeadraceError as e:
            reasons |= dict.fromkeys(bad, f"its source cannot be read: {e.message}")
        report.unrepairable += [(b, reasons[b]) for b in bad if b not in good]
        return [b for b in bad if b in good]

    def read(self, bad: list[BadSample]) -> Iterator[tuple[BadSample, Iterable[memoryview]]]:
        """The bytes that the source has for `bad` now, piece by piece."""
        if self._source is None:
            self._source = _open_again(self._segment.entry.source)
        wanted: dict[bytes, list[BadSample]] = {}
        for sample in bad:
            wanted.setdefault(os.fsencode(sample.name), []).append(sample)
        if isinstance(self._source, Stream):
            pairs = self._read_stream(self._source, wanted)
        else:
            pairs = self._read_scan(self._source, wanted)
        for sample, pieces in pairs:
            yield sample, pieces if self._images is None else self._as_packed(sample, pieces)

    def _as_packed(self, sample: BadSample, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The bytes after packing had its way with a JPEG."""
        if sample.length > 3 * LARGE_BYTES:  # rewriting at most doubles what is held in memory
            yield from pieces
            return
        data = b"".join(pieces)
        if (len(data), crc32c(data)) != (sample.length, self._crc(sample)):
            assert self._images is not None
            try:
                data = ImageRecipe.parse(self._images.recipe).rewrite_one(data)
            except ValueError as e:
                raise SourceError(str(e)) from e
        yield memoryview(data)

    def _read_stream(
        self, stream: Stream, wanted: dict[bytes, list[BadSample]]
    ) -> Iterator[tuple[BadSample, Iterable[memoryview]]]:
        for item in stream.items():
            parts = dict(item.parts)
            for sample in wanted.get(item.name, ()):
                data = parts.get(self._part(sample))
                if data is not None:
                    yield sample, (memoryview(data),)

    def _read_scan(
        self, scan: Scan, wanted: dict[bytes, list[BadSample]]
    ) -> Iterator[tuple[BadSample, Iterable[memoryview]]]:
        columns, reader = scan.columns, ScanReader(scan)
        if self._samples is None:
            names = split_names(columns.names, columns.name_offsets)
            self._samples = {name: i for i, name in enumerate(names)}
        for name in wanted.keys() & self._samples.keys():
            i = self._samples[name]
            for extent in range(int(columns.firsts[i]), int(columns.firsts[i + 1])):
                number = 0 if columns.part is None else int(columns.part[extent])
                for sample in wanted[name]:
                    if columns.part_names[number] == self._part(sample):
                        yield sample, reader.pieces(extent)

    def _part(self, sample: BadSample) -> bytes:
        return self._segment.directory.part_names[sample.part]

    def _crc(self, sample: BadSample) -> int | None:
        extents = self._segment.extents(sample.index)
        return next(e.crc for e in extents if e.part == sample.part)


def _open_again(source: dict[str, Any]) -> Scan | Stream:
    where = source.get("paths") or source.get("path")
    if not where:
        kind = source.get("kind", "unknown")
        raise SourceError(f"the samples came from a source of the kind {kind!r}, which is gone")
    extensions = source.get("extensions")
    options = SourceOptions(
        extensions=tuple(extensions) if extensions else None,
        prefix_names=bool(source.get("prefix_names")),
        on_error="skip",
        column=tuple(source["column"]) if source.get("column") else None,
        label=source.get("label"),
        format=source.get("format"),
    )
    return open_source(where, options)


# -- writing ----------------------------------------------------------------------------------------


def _rewrite(segment: OpenSegment, volume: int, samples: list[BadSample], source: _Source) -> None:
    """Writes a volume anew: its header, what it held, the samples found, zeros at the end."""
    path = Path(segment.volumes.paths[volume])
    entry = segment.volumes.entries[volume]
    size = entry.bytes or 0
    check_free_space(path.parent, size)
    end = data_ends(segment)[volume]
    try:
        remove_leftovers(path.parent)
        with NewFile(path) as new:
            fd = new.fd
            _copy(path, fd, end)
            for sample, pieces in source.read(samples):
                at = sample.offset_bytes
                for piece in pieces:
                    write_all(fd, piece, at)
                    at += len(piece)
            os.ftruncate(fd, size)
            uuid, segment_uuid = bytes.fromhex(entry.uuid or ""), bytes.fromhex(segment.entry.uuid)
            write_all(fd, VolumeHeader(uuid, segment_uuid, volume).to_page(), 0)
            new.publish()
    except HeadraceError:
        raise
    except OSError as e:
        raise VolumeError(
            f"{path}: writing it anew failed: {e.strerror}.",
            path=str(path),
            errno=e.errno,
            next_step="The old volume is untouched: free some space and repair again.",
        ) from e


def _copy(path: Path, fd: int, end: int) -> None:
    """Copies the sample bytes of a volume, as far as they can be read."""
    try:
        source = open_stream(path)
    except FileNotFoundError:
        return  # of any other error it is not known that its good samples are lost
    with source:
        at = DATA_OFFSET
        while at < end:
            try:
                data = os.pread(source.fileno(), min(_COPY_BYTES, end - at), at)
            except OSError:
                # A bad sector: step over it; what it held was reported as damaged.
                at += 4096
                continue
            if not data:
                return
            write_all(fd, data, at)
            at += len(data)
