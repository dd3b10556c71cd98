"""Pack as you go: what writing a cache costs epoch one, and what epoch two gains.

Every figure is a ratio of two epochs that ran one after the other, cold, over the same samples in the
same order; the median of the rounds is judged. Sources: a folder of files on the local disk (the
hardest case: the cache is written to the disk that is being read), the same folder limited to a slow
source's rate, and simulated storage where this build has it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import time
from typing import TYPE_CHECKING, Any

import headrace as hr
from benchmarks import datasets
from benchmarks.plane_parts import Section
from benchmarks.targets import Target
from headrace.config import ReaderOptions
from headrace.plane.disk_cache import CacheDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCALE = 0.16
"""Of data set A: 0.9 GB in 8,000 files."""

ROUNDS = 3
BOUND = 0.9
SLOW = {"bytes_per_s": 200e6}
FILLING_EPOCHS_MAX = 5


def run(options: Any) -> Section:
    """Measure below `options.dir`."""
    work = options.dir / "packing"
    files, packed = _prepare(work)
    rows = [
        ("source", "epoch one", "with cache", "ratio", "cached", "epoch two", "packed", "ratio")
    ]
    targets: list[Target] = []
    for name, given in _sources().items():
        one, two, row = _measure(name, given, files, packed, work / "cache")
        rows.append(row)
        targets += [
            _target(f"{name}: epoch one with cache_dir", one),
            _target(f"{name}: epoch two against a packed store, cold", two),
        ]
    return Section("Pack as you go", rows, targets)


def _sources() -> dict[str, Mapping[str, Any]]:
    sources: dict[str, Mapping[str, Any]] = {
        "folder of files": {},
        "folder limited to 200 MB/s": SLOW,
    }
    if any(field.name == "simulate" for field in dataclasses.fields(ReaderOptions)):
        sources |= {f"simulated {name}": {"simulate": name} for name in ("lustre", "nfs")}
    return sources


def _prepare(work: Path) -> tuple[Path, Path]:
    """The folder of files and the packed store, made once."""
    files, packed = work / "files", work / "packed.hr"
    done = work / "files.done"
    if not done.exists():
        data = datasets.data_set("A", SCALE)
        for index in range(data.samples):
            path = files / datasets.file_name(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(datasets.payload(data, index))
        os.sync()
        done.touch()
    if not packed.exists():
        hr.pack(files, packed)
    return files, packed


def _measure(
    name: str, given: Mapping[str, Any], files: Path, packed: Path, cache: Path
) -> tuple[list[float], list[float], tuple[str, ...]]:
    plain, teed, second, best, cached = [], [], [], [], []
    for _ in range(ROUNDS):
        shutil.rmtree(cache, ignore_errors=True)
        plain.append(_epoch(files, files, **given)[0])
        rate, share = _epoch(files, files, cache_dir=cache, **given)
        teed.append(rate)
        cached.append(share)
        # A source faster than the writer is cached over several epochs, a slow one at once.
        for _ in range(FILLING_EPOCHS_MAX):
            if share >= 1.0:
                break
            share = _epoch(files, files, cache_dir=cache, **{**given, **SLOW})[1]
        second.append(_epoch(files, cache, cache_dir=cache, **given)[0])
        best.append(_epoch(packed, packed)[0])
    shutil.rmtree(cache, ignore_errors=True)
    one = [a / b for a, b in zip(teed, plain, strict=True)]
    two = [a / b for a, b in zip(second, best, strict=True)]
    middle = statistics.median
    row = (
        name, _rate(middle(plain)), _rate(middle(teed)), f"{middle(one):.2f}",
        f"{100 * middle(cached):.0f} %", _rate(middle(second)), _rate(middle(best)),
        f"{middle(two):.2f}",
    )  # fmt: skip
    return one, two, row


def _epoch(source: Path, cold: Path, **options: Any) -> tuple[float, float]:
    """Read one epoch; returns bytes/s, and the share of the samples that is cached then."""
    _evict(cold)
    with hr.open(source) as store:
        loader = hr.loader(store, 256, seed=1, **options)
        started = time.perf_counter()
        for _ in loader:
            pass
        rate = loader.stats.bytes / (time.perf_counter() - started)
        loader.close()
    caches = CacheDirectory(options["cache_dir"]).caches() if "cache_dir" in options else []
    return rate, sum(info.samples / info.of_samples for info in caches)


def _evict(folder: Path) -> None:
    """Drop a folder's files from the page cache; needs no rights."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            if path.suffix in (".hrv", ".hrd"):
                os.fdatasync(fd)  # the foreign files were synced when they were made
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"


def _target(name: str, ratios: list[float]) -> Target:
    median = statistics.median(ratios)
    note = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds"
    verdict = "met" if median >= BOUND else "NOT MET"
    return Target(name, f">= {BOUND:g} x", f"{median:.2f} x", verdict, note)
