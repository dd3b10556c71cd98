"""DLFS: `hr.loader` over a local store and over the fabric, beside ext4, by size of sample.

    python -m benchmarks.paper_parts.dlfs read JSON     # a reader's process

The fabric is user-space NVMe/TCP over loopback: initiator and target share the cores. ext4 is fio, which
reads blocks of one open file with pread and does nothing with them: kinder than a file for each sample.
`shuffled` reads sample by sample (DLFS's sample-level batching), `blocked` whole blocks (chunk-level).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace as hr
from benchmarks import processes
from benchmarks.fabric_parts import rivals
from benchmarks.paper_parts import ROOT, Options, forget

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = (512, 4 << 10, 16 << 10, 128 << 10, 1 << 20)
ORDERS = ("shuffled", "blocked")
THREADS = 16
BATCHES_MIN = 16
CORES = (2, 1)
"""Cores that initiator, target and fio share."""


def ensure_store(folder: Path, size: int, nbytes: int) -> Path:
    """Random samples of one size; each begins with its index."""
    count = min(400_000, nbytes // size)
    path = folder / f"dlfs-{size}-{count}.hr"
    if not path.exists():
        noise = np.random.default_rng(size).bytes(size + (1 << 20))
        samples = (
            (f"{i:08d}", i.to_bytes(8, "little") + noise[i % (1 << 20) :][: size - 8], 0)
            for i in range(count)
        )
        hr.pack(samples, path)
    return path


def files_of(store: Path) -> list[Path]:
    """The files that hold the samples, the largest first."""
    files = [p for p in store.rglob("*") if p.is_file()] if store.is_dir() else [store]
    return sorted(files, key=lambda p: -p.stat().st_size)


@contextlib.contextmanager
def pinned(cores: int) -> Iterator[None]:
    """This process, and what it starts, on so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:cores]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def exported(store: Path) -> Iterator[tuple[str, int]]:
    """A target's process: its URL and its id."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.fabric_parts.job",
        "serve",
        "127.0.0.1",
        str(store),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.stdin.close()
            server.wait(30)


def read(spec: dict[str, Any]) -> dict[str, Any]:
    """Epochs for some seconds and batches, or one where more would find the page cache full."""
    with hr.open(spec["where"]) as store:
        loader = hr.loader(
            store, spec["batch"], order=spec["order"], seed=spec["seed"], rank=0, world_size=1
        )
        samples, batches, cpu_s, began = 0, 0, time.process_time(), time.perf_counter()
        first_s = 0.0
        while True:
            for batch in loader:
                first_s = first_s or time.perf_counter() - began
                starts = np.asarray(batch.offsets)
                stamp = np.asarray(batch.data)[starts[0] : starts[0] + 8].tobytes()
                if int.from_bytes(stamp, "little") != batch.indices[0]:
                    raise RuntimeError(f"sample {batch.indices[0]} begins as {stamp.hex()}")
                samples, batches = samples + len(batch), batches + 1
                seconds = time.perf_counter() - began
                if over := seconds > spec["seconds"] and batches >= BATCHES_MIN:
                    break
            if spec["cold"] or over:
                break
        loader.close()
        return {
            "samples": samples, "seconds": seconds, "first_batch_s": first_s,
            "cpu_s": time.process_time() - cpu_s,
        }  # fmt: skip


def one(store: Path, where: str, server: int | None, size: int, **spec: Any) -> dict[str, Any]:
    """A reader's run, with the CPU time of both ends."""
    prepare(store, cold=spec["cold"])
    before = processes.cpu_seconds_of(server) if server else 0.0
    spec |= {"where": where, "batch": int(np.clip((8 << 20) // size, 16, 1024))}
    command = [sys.executable, "-m", "benchmarks.paper_parts.dlfs", "read", json.dumps(spec)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    if ended.returncode:
        raise RuntimeError(f"{where}, samples of {size}: {ended.stderr[-2000:]}")
    seen: dict[str, Any] = json.loads(ended.stdout)
    seen["cpu_s"] += processes.cpu_seconds_of(server) - before if server else 0.0
    return seen


def prepare(store: Path, *, cold: bool) -> None:
    """The page cache without the store, or with all of it."""
    if cold:
        forget(files_of(store))
        return
    for path in files_of(store):
        with path.open("rb", buffering=0) as f:
            while f.read(1 << 24):
                pass


def run(options: Options) -> dict[str, Any]:
    """The table, the directory's look-ups, and what is known of a kernel's initiator here."""
    nbytes = (4 if options.tiny else 256 if options.quick else 1024) << 20
    seconds = 0.2 if options.tiny else 0.7 if options.quick else 2.0
    if rivals.missing("fio"):
        raise RuntimeError("fio is not installed: tools/debian-packages bench")
    rows: list[dict[str, Any]] = []
    for seed in range(1 if options.quick else 2):
        for size in SIZES[:2] if options.tiny else SIZES:
            store = ensure_store(options.dir, size, nbytes)
            for cores in CORES:
                few = cores == 1 or options.tiny
                with pinned(cores), exported(store) as (url, server):
                    for cold in (False,) if few else (False, True):
                        about = {"size": size, "cores": cores, "cold": cold, "seed": seed}

                        def add(
                            who: str, seen: dict[str, Any], about: dict[str, Any] = about
                        ) -> None:
                            rows.append({**about, "who": who, **seen})

                        for order in ORDERS:
                            what = {"order": order, "seconds": seconds, "cold": cold, "seed": seed}
                            add(f"local, {order}", one(store, str(store), None, size, **what))
                            add(f"fabric, {order}", one(store, url, server, size, **what))
                        for threads in (1, THREADS):
                            prepare(store, cold=cold)
                            whole_s = max(1, round(seconds))  # fio knows whole seconds only
                            fio = rivals.fio_file(
                                files_of(store)[0], size, whole_s, cold=cold, threads=threads
                            )
                            who = f"ext4, {threads} thread{'s'[: threads - 1]}"
                            seen = {"samples": fio.reads, "seconds": fio.seconds}
                            add(who, seen | {"cpu_s": fio.client_cpu_s})
                print(f"  samples of {size}, {cores} core{'s'[: cores - 1]}: done", flush=True)
    return {"rows": rows, "kernel_initiator": kernel_initiator(), "directory": directory(options)}


def kernel_initiator() -> dict[str, str]:
    """Why Linux's own NVMe/TCP initiator is measured here, or not."""
    asked = "zcat /proc/config.gz | grep -w CONFIG_NVME_TCP"
    config = subprocess.run(asked, shell=True, capture_output=True, text=True, check=False)
    with contextlib.suppress(FileNotFoundError):
        tried = subprocess.run(
            ["modprobe", "--dry-run", "nvme-tcp"], capture_output=True, text=True, check=False
        )
        return {
            "config": config.stdout.strip(),
            "modprobe": tried.stderr.strip() or "it would be loaded",
        }
    return {"config": config.stdout.strip(), "modprobe": "modprobe is not installed"}


def directory(options: Options) -> list[dict[str, float]]:
    """Look-ups by name in directories of several sizes; `benchmarks.directory` measures them."""
    seen = []
    for samples in (1000,) if options.tiny else (10_000, 1_000_000):
        path = options.dir / "directory.json"
        command = [sys.executable, "-m", "benchmarks.directory", "--dir", str(options.dir),
                   "--samples", str(samples), "--lookups", "100000", "--json", str(path)]  # fmt: skip
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=300)
        seen.append(json.loads(path.read_text()))
    return seen


if __name__ == "__main__":
    print(json.dumps(read(json.loads(sys.argv[2]))))
