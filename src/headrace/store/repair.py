"""Repairing: fetches damaged samples again from where they came from.

Only bytes that match the recorded checksum are taken. A damaged volume is written anew beside the old
one and put in its place by rename; nothing is patched in place, so a kill leaves the old or the new.
What cannot be fetched stays as it is, and is reported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptStore, HeadraceError, VolumeError
from headrace.store.directory_writer import write_all
from headrace.store.format import PAGE_BYTES
from headrace.store.manifest import load_manifest
from headrace.store.native import crc32c
from headrace.store.publish import check_free_space, locked, sync_folder
from headrace.store.sources.detect import open_source
from headrace.store.sources.extents import ScanReader
from headrace.store.sources.scan import Scan, SourceOptions, Stream
from headrace.store.verify import BadSample, VerifyReport, data_ends, open_leniently, verify
from headrace.store.volume_format import DATA_OFFSET, VolumeHeader, parse_volume_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.store.segment import OpenSegment

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


def repair(path: str | os.PathLike[str], *, workers: int | None = None) -> RepairReport:
    """Verifies a store and mends what its sources still have.

    Args:
        path: the store's folder.
        workers: threads that read.

    Raises:
        StoreNotFound: there is no store.
        CorruptStore: `store.json` is damaged.
        StoreError: another process is writing to the store.
        VolumeError: the disk is full or fails.
    """
    where = os.path.abspath(os.fsdecode(path))
    load_manifest(where)  # says what is wrong where there is no store to lock
    with locked(Path(where), what="writing to"):
        before = verify(where, workers=workers)
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
    bad = [b for b in report.before.bad_samples if segment.base <= b.index < last]
    problems = [p for p in report.before.volume_problems if p.segment == number]
    fetched: dict[tuple[int, int], bytes] = {}
    mendable = []
    for sample in bad:
        reason = _obstacle(segment, sample.path)
        if reason is None:
            mendable.append(sample)
        else:
            report.unrepairable.append((sample, reason))
    for problem in problems:
        if _obstacle(segment, problem.path) is not None:
            report.unrepairable.append((None, problem.message))
    problems = [p for p in problems if _obstacle(segment, p.path) is None]
    if mendable:
        fetched = _fetch(segment, mendable, report)
    for volume, path in enumerate(segment.volumes.paths):
        here = [b for b in mendable if b.path == path]
        data = {
            b.offset_bytes: fetched[b.index, b.part] for b in here if (b.index, b.part) in fetched
        }
        wrong = any(p.volume == volume for p in problems)
        # A volume that is only missing is not replaced by zeros, as long as nothing of it is left.
        if data or (wrong and not here):
            _rewrite(segment, volume, data)
            report.rewritten.append(path)
    report.repaired += [b for b in mendable if (b.index, b.part) in fetched]


def _obstacle(segment: OpenSegment, path: str) -> str | None:
    """Why the volume at `path` must not be replaced, or None."""
    if path not in segment.volumes.paths:
        return "the directory says that it lies in a volume that does not exist"
    entry = segment.volumes.entries[segment.volumes.paths.index(path)]
    if entry.kind != "packed":
        return "it lies in a foreign file, which headrace never writes: restore that file"
    try:
        with open(path, "rb") as f:
            header = parse_volume_header(f.read(PAGE_BYTES), path)
    except (OSError, CorruptStore):
        return None  # nothing there that could be another store's
    if header.uuid.hex() != entry.uuid:
        return "another store's volume stands in its place: move that file back where it belongs"
    return None


# -- fetching ---------------------------------------------------------------------------------------


def _fetch(
    segment: OpenSegment, bad: list[BadSample], report: RepairReport
) -> dict[tuple[int, int], bytes]:
    """The bytes of bad samples by (index, part), where the source still has exactly them."""
    try:
        found = _open_again(segment.entry.source)
    except HeadraceError as e:
        report.unrepairable += [(b, f"its source cannot be read: {e.message}") for b in bad]
        return {}
    wanted: dict[bytes, list[BadSample]] = {}
    for sample in bad:
        wanted.setdefault(os.fsencode(sample.name), []).append(sample)
    fetched: dict[tuple[int, int], bytes] = {}
    reasons = dict.fromkeys(wanted, "its source does not hold it any more")
    for name, parts in _read_again(found, set(wanted), reasons):
        for sample in wanted[name]:
            part = segment.directory.part_names[sample.part]
            data = parts.get(part)
            if data is not None and _matches(segment, sample, data):
                fetched[sample.index, sample.part] = data
            else:
                reasons[name] = "its source holds other bytes under this name now"
    for sample in bad:
        if (sample.index, sample.part) not in fetched:
            report.unrepairable.append((sample, reasons[os.fsencode(sample.name)]))
    return fetched


def _open_again(source: dict[str, Any]) -> Scan | Stream:
    options = SourceOptions(
        extensions=tuple(source["extensions"]) if source.get("extensions") else None,
        prefix_names=bool(source.get("prefix_names")),
        on_error="skip",
    )
    where = source.get("paths") or source.get("path")
    if not where:
        kind = source.get("kind", "unknown")
        raise VolumeError(f"the samples came from a source of the kind {kind!r}, which is gone")
    return open_source(where, options)


def _read_again(
    found: Scan | Stream, wanted: set[bytes], reasons: dict[bytes, str]
) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    """The wanted samples of a source, each as {part: bytes}."""
    if isinstance(found, Stream):
        for item in found.items():
            if item.name in wanted:
                yield item.name, {part: bytes(data) for part, data in item.parts}
        return
    reader = ScanReader(found)
    columns = found.columns
    for sample in range(columns.samples):
        name = columns.name(sample)
        if name not in wanted:
            continue
        try:
            extents = reader.read_sample(sample)
        except HeadraceError as e:
            reasons[name] = f"its source cannot be read: {e.message}"
            continue
        first = int(columns.firsts[sample])
        numbers = [0] * len(extents) if columns.part is None else (
            columns.part[first : first + len(extents)].tolist()
        )  # fmt: skip
        yield name, {columns.part_names[p]: d for p, (d, _) in zip(numbers, extents, strict=True)}


def _matches(segment: OpenSegment, sample: BadSample, data: bytes) -> bool:
    extents = segment.extents(sample.index)
    extent = next(e for e in extents if e.part == sample.part)
    return len(data) == extent.length and crc32c(data) == extent.crc


# -- writing ----------------------------------------------------------------------------------------


def _rewrite(segment: OpenSegment, volume: int, fetched: dict[int, bytes]) -> None:
    """Writes a volume anew: its header, what it held, the fetched samples, zeros at the end."""
    path = Path(segment.volumes.paths[volume])
    entry = segment.volumes.entries[volume]
    size = entry.bytes or 0
    check_free_space(path.parent, size)
    temporary = path.with_name(path.name + ".new")
    end = data_ends(segment)[volume]
    try:
        with temporary.open("wb") as f:
            fd = f.fileno()
            _copy(path, fd, end)
            for offset, data in fetched.items():
                write_all(fd, data, offset)
            os.ftruncate(fd, size)
            uuid, segment_uuid = bytes.fromhex(entry.uuid or ""), bytes.fromhex(segment.entry.uuid)
            write_all(fd, VolumeHeader(uuid, segment_uuid, volume).to_page(), 0)
            os.fsync(fd)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise VolumeError(
            f"{temporary}: writing failed: {e.strerror}.",
            path=str(temporary),
            errno=e.errno,
            next_step="The old volume is untouched: free some space and repair again.",
        ) from e


def _copy(path: Path, fd: int, end: int) -> None:
    """Copies the sample bytes of a volume, as far as they can be read."""
    try:
        source = path.open("rb")
    except OSError:
        return
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
