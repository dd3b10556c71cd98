"""Characterise: all measurements of a mount, one after the other, as one document."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.emulate.cache import evict, residency_of
from headrace.bench.results.hosts import provenance
from headrace.bench.storage.advice import Cell, advice_of
from headrace.bench.storage.batches import Blocks, file_rate, latencies_s
from headrace.bench.storage.metadata import metadata_per_s, sync_s
from headrace.bench.storage.scratch import scratch
from headrace.bench.storage.sequential import (
    can_read_direct,
    read_bytes_per_s,
    write_bytes_per_s,
)
from headrace.store.output_file import OutputFile, WriteBuffer, write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StorageOptions", "characterise"]

_STREAMS: Final = (1, 4)
_BLOCK_BYTES: Final = (4 << 10, 64 << 10, 1 << 20)
_DEPTHS: Final = (1, 4, 16, 64)
_BATCH: Final = 64
_SAMPLE_BYTES: Final = 100 << 10
_SAMPLE_DEPTH: Final = 16
_LATENCIES_MOST: Final = 20_000
_SYNCS_MOST: Final = 50
_CACHED_MOST: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How much is written and read.

    Attributes:
        size_bytes: of the large file; as much again is written in several streams.
        seconds: of each measurement of reading, at most about.
        files: small ones that are made, looked at, and removed.

    Raises:
        ValueError: a value is out of bounds.
    """

    size_bytes: int = 256 << 20
    seconds: float = 0.3
    files: int = 500

    def __post_init__(self) -> None:
        if self.size_bytes < 8 << 20:
            raise ValueError(f"size_bytes is {self.size_bytes:,}, expected at least 8 MiB")
        if not 0.001 <= self.seconds <= 3600:
            raise ValueError(f"seconds is {self.seconds}, expected 0.001 to 3600")
        if not 1 <= self.files <= 1_000_000:
            raise ValueError(f"files is {self.files}, expected 1 to 1,000,000")


def characterise(
    path: str,
    options: StorageOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure a mount. Nothing is left on it.

    Args:
        path: a folder of the mount.
        options: how much.
        progress: called with what is measured next.

    Returns:
        A document for JSON: rates in bytes or operations per second, times in seconds.

    Raises:
        BenchError: the folder cannot be written to.
        VolumeError: there is too little space, or the system refuses.
    """
    options = options or StorageOptions()
    begin = time.perf_counter()
    with scratch(path) as folder:
        small_bytes = options.files * _SAMPLE_BYTES
        check_free_space(Path(folder), 2 * options.size_bytes + small_bytes)
        try:
            document = _Measuring(folder, options, progress or _silent).document()
        except OSError as e:
            raise write_error(e, e.filename or folder) from e
    return {
        "path": os.path.abspath(path),
        **document,
        "seconds": time.perf_counter() - begin,
        "provenance": provenance(path, ["headrace", "bench", "storage", path]),
    }


def _silent(_: str) -> None:
    pass


class _Measuring:
    def __init__(self, folder: str, options: StorageOptions, tell: Callable[[str], None]) -> None:
        self._folder, self._options, self._tell = folder, options, tell
        self._large = os.path.join(folder, "large")
        self._notes: list[str] = []

    def document(self) -> dict[str, Any]:
        write = self._write()
        self._direct = can_read_direct(self._large)
        evict([self._large])
        self._look_at_cache()
        read = {}
        for streams in _STREAMS:
            self._tell(f"sequential reads, {streams} at a time")
            read[str(streams)] = self._read(streams)
        cells, engine = self._cells()
        batches = self._batches()
        self._tell("latency")
        latency = latencies_s(
            self._large, direct=self._direct, seconds=2 * self._options.seconds,
            most=_LATENCIES_MOST,
        )  # fmt: skip
        self._tell("metadata")
        empty = os.path.join(self._folder, "metadata")
        os.mkdir(empty)
        advice = advice_of(
            cells, sample_bytes=_SAMPLE_BYTES, packed_per_s=batches["packed"]["per_s"],
            files_per_s=batches["files"]["per_s"],
        )  # fmt: skip
        return {
            "direct": self._direct,
            "engine": engine,
            "sequential": {"write_bytes_per_s": write, "read_bytes_per_s": read},
            "random": [asdict(c) | {"per_s": c.bytes_per_s / c.block_bytes} for c in cells],
            "batches": batches,
            "latency_s": latency,
            "metadata_per_s": metadata_per_s(empty, self._options.files),
            "sync_s": sync_s(self._folder, _SYNCS_MOST, 2 * self._options.seconds),
            "advice": [asdict(each) for each in advice],
            "notes": self._notes,
        }

    def _write(self) -> dict[str, float]:
        rates = {}
        for streams in _STREAMS:
            self._tell(f"sequential writes, {streams} at a time")
            paths = [f"{self._large}{n}" for n in range(streams)] if streams > 1 else [self._large]
            rates[str(streams)] = write_bytes_per_s(paths, self._options.size_bytes // streams)
            if streams > 1:
                for path in paths:
                    os.unlink(path)
        return rates

    def _read(self, streams: int) -> float:
        return read_bytes_per_s(
            self._large, streams=streams, direct=self._direct, seconds=self._options.seconds
        )

    def _look_at_cache(self) -> None:
        """Say where reads are not the storage's."""
        share = residency_of([self._large]).share
        if share is not None and share > _CACHED_MOST:
            self._notes.append(
                f"{share:.0%} of the large file stay in memory: reads are not those of a device"
            )
        elif not self._direct:
            self._notes.append(
                "this file system has no reads past the page cache: what is read twice is quicker"
            )

    def _cells(self) -> tuple[list[Cell], str]:
        cells, engine = [], ""
        for block_bytes in _BLOCK_BYTES:
            blocks = Blocks(self._large, block_bytes, direct=self._direct)
            try:
                for depth in _DEPTHS:
                    self._tell(f"random reads of {block_bytes >> 10} KiB, {depth} in flight")
                    rate = blocks.rate(depth, _BATCH, self._options.seconds)
                    cells.append(Cell(block_bytes, depth, rate.bytes_per_s))
                engine = blocks.engine
            finally:
                blocks.close()
        return cells, engine

    def _batches(self) -> dict[str, Any]:
        """The same small samples, from a packed file and from a file each."""
        self._tell("batches of small samples")
        blocks = Blocks(self._large, _SAMPLE_BYTES, direct=self._direct, seed=1)
        try:
            packed = blocks.rate(_SAMPLE_DEPTH, _BATCH, self._options.seconds)
        finally:
            blocks.close()
        folder = os.path.join(self._folder, "samples")
        os.mkdir(folder)
        buffer, data = WriteBuffer(), os.urandom(_SAMPLE_BYTES)
        paths = [os.path.join(folder, f"{n:06d}") for n in range(self._options.files)]
        for path in paths:
            with OutputFile(path, buffer) as out:
                out.write(data)
        evict(paths)
        files = file_rate(paths, _SAMPLE_DEPTH, _BATCH)
        return {
            "sample_bytes": _SAMPLE_BYTES, "batch": _BATCH, "reads_in_flight": _SAMPLE_DEPTH,
            "packed": asdict(packed), "files": asdict(files),
        }  # fmt: skip
