"""The directory benchmark: millions of ImageNet-like names in one sample directory.

    python -m benchmarks.directory                          # 10 million
    python -m benchmarks.directory --samples 100_000_000    # written and opened once

Names look like `n01440764/n01440764_10026.JPEG`: 1,000 classes, numbers with gaps, in numeric
order, which is not their sorted order, so that the columns between the two orders are paid for.
The directory is written by the product's own writer in a process of its own, then opened cold and
warm, and asked for a million random names at once. Sizes come from the file's section table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import cache, forms, tables, targets
from benchmarks.processes import leaving_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

CLASSES = 1000
OPENS = 20
LOOKUPS = 5

_SEED = 20261121
_SECTIONS_AT = struct.Struct("<I")  # how many sections, at offset 40 of the header
_SECTION = struct.Struct("<IIQQQQ24s")
_NAME_KINDS = (8, 9)  # name block offsets, name blocks: docs/format.md
_MEAN_SAMPLE_BYTES = 110_000


@dataclass(frozen=True, slots=True)
class Names:
    """All names back to back, and where each begins and the last ends."""

    blob: NDArray[np.uint8]
    offsets: NDArray[np.uint64]
    labels: NDArray[np.int64]


def class_names() -> list[str]:
    """WordNet-like identifiers, ascending."""
    rng = np.random.default_rng(_SEED)
    numbers = np.sort(rng.choice(14_000_000, CLASSES, replace=False)) + 1_000_000
    return [f"n{number:08d}" for number in numbers.tolist()]


def names_of_class(name: str, label: int, samples: int) -> list[str]:
    """The members of one class: numbers ascend with gaps, as ImageNet's do."""
    rng = np.random.default_rng([_SEED, label])
    numbers = np.cumsum(rng.integers(1, 4, size=samples)).tolist()
    return [f"{name}/{name}_{number}.JPEG" for number in numbers]


def members(samples: int) -> Iterator[tuple[int, list[str]]]:
    """Every class's label and names; classes are as equal as `samples` allows."""
    for label, name in enumerate(class_names()):
        count = samples // CLASSES + (label < samples % CLASSES)
        if count:
            yield label, names_of_class(name, label, count)


def all_names(samples: int) -> Names:
    """Every name, in index order."""
    blobs, lengths, labels = [], [], []
    for label, names in members(samples):
        blobs.append(np.frombuffer("".join(names).encode(), np.uint8))
        lengths.append(np.fromiter(map(len, names), np.uint64, len(names)))
        labels.append(np.full(len(names), label, np.int64))
    offsets = np.zeros(samples + 1, np.uint64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return Names(np.concatenate(blobs), offsets, np.concatenate(labels))


def random_names(samples: int, wanted: int) -> tuple[list[str], NDArray[np.int64]]:
    """`wanted` names in random order, and the index of each."""
    rng = np.random.default_rng(_SEED)
    names: list[str] = []
    indices: list[int] = []
    first = 0
    for _, group in members(samples):
        share = min(len(group), -(-wanted // min(CLASSES, samples)))
        picked = rng.choice(len(group), share, replace=False).tolist()
        names.extend(group[at] for at in picked)
        indices.extend(first + at for at in picked)
        first += len(group)
    order = rng.permutation(len(names))[:wanted].tolist()
    return [names[at] for at in order], np.array([indices[at] for at in order])


# ---- writing ----


def write(path: Path, samples: int) -> None:
    """Writes a directory of `samples` names, with extents, checksums and labels."""
    from headrace.store.directory import DirectoryColumns, write_directory

    names = all_names(samples)
    rng = np.random.default_rng(_SEED)
    lengths = rng.integers(4_000, 2 * _MEAN_SAMPLE_BYTES, size=samples, dtype=np.uint64)
    columns = DirectoryColumns(
        names=names.blob,
        name_offsets=names.offsets,
        volume=np.zeros(samples, np.uint8),
        offset=np.cumsum(lengths) - lengths + 4096,
        length=lengths,
        crc=rng.integers(0, 1 << 32, size=samples, dtype=np.uint32),
        labels=names.labels,
        class_names=tuple(name.encode() for name in class_names()),
    )
    write_directory(columns, path)


def _write_in_a_process(path: Path, samples: int) -> dict[str, float]:
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.directory", "--write", str(path)]
    subprocess.run([*command, "--samples", str(samples)], check=True)
    peak_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"write_s": time.monotonic() - started, "write_peak_mb": peak_kb * 1024 / 1e6}


# ---- measuring ----


def name_bytes(path: Path) -> int:
    """What the name tree takes in the file, all levels."""
    with path.open("rb") as file:
        header = file.read(4096)
    (count,) = _SECTIONS_AT.unpack_from(header, 40)
    sections = itertools.islice(_SECTION.iter_unpack(header[128 : 128 + 64 * count]), count)
    return sum(size for kind, _, _, size, *_ in sections if kind in _NAME_KINDS)


def _open_ms(path: Path) -> tuple[object, float]:
    from headrace._native import Directory

    started = time.perf_counter()
    directory = Directory.open(os.fsencode(path))
    return directory, 1e3 * (time.perf_counter() - started)


def measure_open(path: Path) -> dict[str, float]:
    """Opening cold (where the page cache may be dropped) and warm; the target takes the worse."""
    figures = {}
    try:
        cache.drop()
    except cache.CannotDropCachesError as error:
        forms.say(str(error))
    else:
        figures["open_cold_ms"] = _open_ms(path)[1]
    figures["open_warm_ms"] = statistics.median(_open_ms(path)[1] for _ in range(OPENS))
    figures["open_ms"] = max(figures.values())
    return figures


def measure_find(path: Path, samples: int, wanted: int) -> dict[str, float]:
    """Bulk look-ups of random names, checked; the first touches and checks the pages."""
    directory, _ = _open_ms(path)
    names, expected = random_names(samples, wanted)
    nanoseconds = []
    for _ in range(LOOKUPS + 1):
        started = time.perf_counter()
        found = directory.find_many(names)  # type: ignore[attr-defined]
        nanoseconds.append(1e9 * (time.perf_counter() - started) / len(names))
        if not np.array_equal(found, expected):
            raise AssertionError("find_many found other samples than those that were written")
    first, *warm = nanoseconds
    return {"find_first_ns": first, "find_ns": statistics.median(warm)}


def measure(path: Path, samples: int, lookups: int) -> dict[str, float]:
    """Every figure of one directory."""
    forms.say(f"directory: writing {samples:,} names")
    figures: dict[str, float] = {"samples": samples, **_write_in_a_process(path, samples)}
    raw = sum(len(name) for _, names in members(samples) for name in names)
    file_bytes, in_names = path.stat().st_size, name_bytes(path)
    figures |= {
        "file_mb": file_bytes / 1e6,
        "bytes_a_sample": (file_bytes - in_names) / samples,
        "name_fraction": in_names / raw,
        **measure_open(path),
        **measure_find(path, samples, min(lookups, samples)),
    }
    return figures


@leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.directory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="work folder")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--lookups", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)  # the writer's own process
    options = parser.parse_args()
    if options.write:
        write(options.write, options.samples)
        return 0
    options.dir.mkdir(parents=True, exist_ok=True)
    path = options.dir / f"directory-{options.samples}.hrd"
    try:
        figures = measure(path, options.samples, options.lookups)
    except (ImportError, subprocess.CalledProcessError) as error:
        forms.say(f"directory: not measured: {error}")
        return 1
    finally:
        path.unlink(missing_ok=True)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    print(tables.targets_table(targets.directory_targets(figures)))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
