"""A mount beside the folder that its store was packed from: what the way through the kernel costs.

    python -m benchmarks.mount            # some minutes, most of them to write the data
    python -m benchmarks.mount --quick    # small and short: does it work?

One client does the same on both in turn; the ratio of medians counts. "First" is a new mount whose store
is in the page cache (of the folder: files in the page cache), "again" the same once more, "cold" with the
disk's pages dropped. Every byte that is read is compared. Raw figures go to benchmarks/results/mount-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import headrace as hr
from benchmarks import machine, processes, tables
from benchmarks.node import forget, warm
from headrace.posix.mount import MountOptions, mount, unmount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = ROOT / "benchmarks/results"
LARGE = "large.bin"
SIZE = 100_000


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    dir: Path
    files: int
    large_bytes: int
    tiny: int
    rounds: int


def name_of(index: int) -> str:
    return f"class{index % 50:02d}/{index:06d}.bin"


def payload(index: int) -> bytes:
    return random.Random(index).randbytes(SIZE // 2 + index % SIZE)


def ensure_data(options: Options) -> tuple[Path, Path]:
    """The folder of files, and the store packed from it."""
    folder = options.dir / f"mount-{options.files}-{options.large_bytes >> 20}"
    store = folder.with_suffix(".hr")
    if not store.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for i in range(options.files):
            path = folder / name_of(i)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(payload(i))
        with (folder / LARGE).open("wb") as f:
            for _ in range(options.large_bytes >> 20):
                f.write(os.urandom(1 << 20))
        hr.pack(folder, store)
    return folder, store


def ensure_tiny(options: Options) -> Path:
    """A store of very many tiny samples in folders of a thousand."""
    store = options.dir / f"mount-tiny-{options.tiny}.hr"
    if not store.exists():
        hr.pack(
            lambda: ((f"{i // 1000:04d}/{i:08d}.bin", b"%08d" % i) for i in range(options.tiny)),
            store,
        )
    return store


@contextlib.contextmanager
def mounted(store: Path) -> Iterator[tuple[Path, float]]:
    """A new mount, and how long it took to come."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as base:
        folder = Path(base) / "view"
        folder.mkdir()
        began = time.perf_counter()
        mount(str(store), str(folder), MountOptions())
        took_s = time.perf_counter() - began
        try:
            yield folder, took_s
        finally:
            unmount(str(folder), lazy=True)


# -- what a client does: each gives operations, seconds and a checksum of what it saw --------------


def sequential(root: Path, _: Options) -> tuple[float, int]:
    """The large file, front to back; MB."""
    total, crc = 0, 0
    with (root / LARGE).open("rb", buffering=0) as f:
        while data := f.read(1 << 20):
            total += len(data)
            crc = zlib.crc32(data[:64], crc)
    return total / 1e6, crc


def random_4k(root: Path, options: Options) -> tuple[float, int]:
    """4 kB at random places of the large file."""
    noise, crc = random.Random(3), 0
    fd = os.open(root / LARGE, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for _ in range(2000):
        at = noise.randrange(options.large_bytes >> 12) << 12
        crc = zlib.crc32(os.pread(fd, 4096, at), crc)
    os.close(fd)
    return 2000, crc


def files(root: Path, options: Options) -> tuple[float, int]:
    """Open, read and close whole files in random order."""
    order, crc = list(range(options.files)), 0
    random.Random(4).shuffle(order)
    for index in order:
        fd = os.open(root / name_of(index), os.O_RDONLY)
        crc = zlib.crc32(os.read(fd, 1 << 20)[:64], crc)
        os.close(fd)
    return len(order), crc


def stats(root: Path, options: Options) -> tuple[float, int]:
    """Stat in random order."""
    order = list(range(options.files))
    random.Random(5).shuffle(order)
    return len(order), sum(os.stat(root / name_of(i)).st_size for i in order)


def listing(root: Path, _: Options) -> tuple[float, int]:
    """All names of all folders."""
    found = sum(len(names) for _, _, names in os.walk(root))
    return found, found


WORKS = {
    "sequential, MB/s": sequential,
    "random 4 kB, /s": random_4k,
    "files of 100 kB, /s": files,
    "stat, /s": stats,
    "names listed, /s": listing,
}


def rate(work: Callable[[Path, Options], tuple[float, int]], root: Path, options: Options) -> Any:
    began = time.perf_counter()
    count, seen = work(root, options)
    return count / (time.perf_counter() - began), seen


def one(options: Options, what: str, folder: Path, store: Path) -> dict[str, Any]:
    """A work on both, in turn."""
    work = WORKS[what]
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        seen = set()
        for state in ("cold", "first"):
            for side, source in (("folder", folder), ("mount", store)):
                if side == "folder":
                    context: Any = contextlib.nullcontext((folder, 0.0))
                else:
                    context = mounted(store)
                with context as (root, _):
                    (forget if state == "cold" else warm)(source)
                    value, what_it_saw = rate(work, root, options)
                    found.setdefault(f"{side}, {state}", []).append(value)
                    seen.add(what_it_saw)
                    if state == "first":
                        value, what_it_saw = rate(work, root, options)
                        found.setdefault(f"{side}, again", []).append(value)
                        seen.add(what_it_saw)
        if len(seen) != 1:
            raise RuntimeError(f"{what}: the mount shows other bytes than the folder")
    return {key: statistics.median(values) for key, values in found.items()}


def million(options: Options) -> dict[str, float]:
    """Very many tiny samples: how long until something is seen."""
    store = ensure_tiny(options)
    warm(store)
    noise = random.Random(6)
    with mounted(store) as (root, took_s):
        found = {"mount, s": took_s}
        for state in ("first", "again"):
            began = time.perf_counter()
            count = len(os.listdir(root / "0007"))
            found[f"ls of {count}, {state}, ms"] = 1e3 * (time.perf_counter() - began)
        order = [noise.randrange(options.tiny) for _ in range(5000)]
        for state in ("first", "again"):
            began = time.perf_counter()
            for i in order:
                os.stat(root / f"{i // 1000:04d}/{i:08d}.bin")
            found[f"random stat, {state}, us"] = 1e6 * (time.perf_counter() - began) / len(order)
        began = time.perf_counter()
        out = subprocess.run(["find", str(root), "-type", "f"], capture_output=True, check=True)
        found["find all, s"] = time.perf_counter() - began
        if out.stdout.count(b"\n") != options.tiny:
            raise RuntimeError("find did not see every sample")
    return found


@processes.leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mount",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small and short: does everything work?")
    add("--dir", type=Path, default=Path("build/bench"), help="work folder for data sets")
    add("--json", type=Path, help="where the raw figures go")
    given = parser.parse_args()
    options = Options(given.dir.resolve(), 5000, 512 << 20, 1_000_000, 3)
    if given.quick:
        options = Options(given.dir.resolve(), 500, 16 << 20, 20_000, 1)
    described = machine.describe(options.dir.parent)
    folder, store = ensure_data(options)
    columns = [f"{side}, {state}" for state in ("cold", "first", "again")
               for side in ("folder", "mount")]  # fmt: skip
    rows, raw = [["", *columns]], {}
    for what in WORKS:
        found = raw[what] = one(options, what, folder, store)
        rows.append([what, *(f"{found[c]:,.0f}" for c in columns)])
    many = million(options)
    print(f"load before {described['load_before']:.1f}\n\n{tables.grid(rows)}\n")
    for key, value in many.items():
        print(f"{options.tiny:,} samples: {key}: {value:,.2f}")
    date = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")
    path = given.json or RESULTS / f"mount-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": described, "date": date, "quick": given.quick, **raw, "million": many}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(f"\nraw results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
