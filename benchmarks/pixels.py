"""The pixel benchmark: pictures decoded, cropped at random to 224, flipped, in batches of 64.

    python -m benchmarks.pixels            # two sizes of JPEG, PNG and clip art; median of 5
    python -m benchmarks.pixels --rounds 1 --pictures 200
    python -m benchmarks.pixels --page     # also the tables of README.md and docs/howto/images.md

Engines take turns in an order of each round's own, each run in a fresh process over files in the page cache
(but for the row that says cold); ratios are formed inside a round. Memory is the private one of a process
and its children together, without files that are mapped. The peers are in `pixel_peers`. The limits are
plain libjpeg-turbo in as many threads (`pixel_probe`): Huffman decoding alone, and a random region without
a resize. Pictures are made here: noise with the spectrum of
photographs. Writes raw runs to benchmarks/results/.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib
import json
import math
import multiprocessing
import os
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks import machine, pixel_peers
from benchmarks.pixel_peers import BATCH
from benchmarks.processes import MemorySampler, leaving_nothing
from benchmarks.tables import markdown, onto_page

RESULTS = ROOT / "benchmarks/results"
SETS = {
    "small JPEG": (500, 375, "JPEG", {"quality": 90}, 1.0),
    "large JPEG": (2000, 1500, "JPEG", {"quality": 88}, 0.3),
    "PNG": (500, 375, "PNG", {}, 1.0),
    "clip art PNG": (0, 0, "PNG", {}, 1.0),
}
"""Width, height, format, options and the share of `--pictures` that is made; without a size they are Debian's
openclipart-png, those of at most two million pixels, or left out where it is not installed."""

CLIP_ART = Path("/usr/share/openclipart/png")

OWN: dict[str, dict[str, Any]] = {
    "headrace": {},
    "headrace, cold": {},
    "headrace, 1 thread": {},
    "headrace, exact": {"exact": True},
    "headrace, float32": {"dtype": "float32"},
    "headrace, kept": {"keep": "decoded"},
    "headrace, node, 1 job": {"keep": "decoded", "jobs": 1},
    "headrace, node, 2 jobs": {"keep": "decoded", "jobs": 2},
    "headrace, lossless": {"packed": "lossless"},
    "headrace, decoded": {"packed": "decoded,short=256"},
}
"""What differs from the plain recipe. Of what is kept, the second epoch is measured; `packed` is how `pack`
rewrote the pictures (`images=`). `jobs` have the first epoch each, of the same pictures, which a node daemon
decodes once; all that they get counts."""

NODE_BYTES = 6 << 30


def _write(job: tuple[Path, int, int, int, str, dict[str, Any]]) -> None:
    from PIL import Image, ImageFilter

    path, seed, width, height, form, options = job
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    planes = []
    for _ in range(3):
        waves = rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)
        plane = np.fft.irfft2(waves / frequency**1.2, (height, width))
        planes.append(plane / plane.std())
    pixels = 128 + 36 * planes[0][..., None] + 18 * np.stack(planes, -1)
    if form == "JPEG":
        pixels += rng.normal(0, 3, pixels.shape)
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if form == "PNG":  # drawings are smooth, and have few colours
        picture = picture.filter(ImageFilter.GaussianBlur(6)).quantize(48).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, form, **options)


def make(folder: Path, name: str, pictures: int) -> list[Path]:
    """Write the pictures of one set; returns their paths."""
    width, height, form, options, share = SETS[name]
    count = max(BATCH, int(pictures * share))
    paths = [folder / f"{i % 10}" / f"{i:05d}.{form.lower()}" for i in range(count)]
    if not width:
        art = [p for p in sorted(CLIP_ART.rglob("*.png")) if not p.is_symlink() and _is_small(p)]
        for path, original in zip(paths, random.Random(1).sample(art, count), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(original.read_bytes())
        return paths
    with ProcessPoolExecutor() as pool:
        jobs = [(path, i, width, height, form, options) for i, path in enumerate(paths)]
        list(pool.map(_write, jobs, chunksize=8))
    return paths


def _is_small(path: Path) -> bool:
    with path.open("rb") as f:
        return math.prod(struct.unpack(">II", f.read(24)[16:])) <= 2_000_000


# -- one run, in a process of its own ---------------------------------------------------------------


def run(engine: str, folder: str, store: str, threads: int) -> dict[str, float]:
    """One epoch: pictures a second, CPU seconds for each thousand. What is installed is imported before."""
    paths = sorted(str(path) for path in Path(folder).glob("*/*"))
    if engine in pixel_peers.installed():
        epoch = pixel_peers.installed()[engine]
        importlib.import_module(pixel_peers.PEERS[engine][0])
        begin, cpu = time.perf_counter(), _cpu_seconds()
        count = sum(epoch(paths, threads))
    else:
        import headrace as hr

        recipe, threads = dict(OWN[engine]), 1 if engine.endswith("1 thread") else threads
        source = _packed(store, recipe.pop("packed", ""))
        (_evict if engine.endswith("cold") else _warm)(Path(source))
        make_loader, make_images = hr.loader, hr.Images  # which are imported as they are named
        begin, cpu = time.perf_counter(), _cpu_seconds()
        jobs = recipe.pop("jobs", 0)
        images = make_images(size=224, flip=True, **recipe)
        if jobs:
            return _of_jobs(source, images, jobs)
        loader = make_loader(source, BATCH, seed=7, decode=images, decode_threads=threads)
        if images.keep:
            for _ in loader:
                pass
            begin, cpu = time.perf_counter(), _cpu_seconds()
        count = sum(len(batch.pixels) for batch in loader)
        loader.close()
    seconds = time.perf_counter() - begin
    return {
        "pictures_per_s": count / seconds,
        "cpu_s_per_1000": 1000 * (_cpu_seconds() - cpu) / count,
    }


def _of_jobs(source: str, images: Any, jobs: int) -> dict[str, float]:
    """The first epoch of some jobs on one node, at the same time."""
    from benchmarks.node_cold import forked_daemon
    from headrace.node.daemon import ask_status

    cpu = _cpu_seconds()
    with forked_daemon(None, NODE_BYTES) as folder:
        os.environ["HEADRACE_RUNTIME_DIR"] = str(folder.path)
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            begin = time.perf_counter()
            counts = pool.starmap(_job, [(source, images, seed) for seed in range(jobs)])
            seconds = time.perf_counter() - begin
            pool.close()
            pool.join()
        (data,) = ask_status(folder)["datasets"]
        if data["decoded"]["pictures"] != counts[0]:
            raise RuntimeError(f"{data['decoded']} of {counts[0]} pictures")
    return {
        "pictures_per_s": sum(counts) / seconds,
        "cpu_s_per_1000": 1000 * (_cpu_seconds() - cpu) / sum(counts),
    }


def _job(source: str, images: Any, seed: int) -> int:
    import headrace as hr

    os.environ["HEADRACE_JOB"] = f"job {seed}"
    options = {"decode": images, "plane": "node"}
    with contextlib.closing(hr.loader(source, BATCH, seed=seed, **options)) as loader:
        count = sum(len(batch.pixels) for batch in loader)
        (node,) = (stage for stage in loader.stages if stage.name == "node")
        if node.report().direct_batches:
            raise RuntimeError(f"not all came from the daemon: {node.report()}")
    return count


def run_apart(engine: str, folder: Path, store: Path, threads: int) -> dict[str, float]:
    """The same in a process of its own, with the most private memory that its tree was seen to have."""
    command = [sys.executable, "-m", "benchmarks.pixels", "--threads", str(threads)]
    command += ["--one", engine, str(folder), str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        sampler = MemorySampler(process.pid)
        printed, _ = process.communicate()
        peak = sampler.stop()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {**json.loads(printed), "peak_mb": peak.private_mb}


def _packed(store: str, images: str) -> str:
    return f"{store}-{images.partition(',')[0]}" if images else store


def _warm(store: Path) -> None:
    """Brings a store's files into the page cache, which a cold run has emptied."""
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                while f.read(1 << 20):
                    pass


def _evict(store: Path) -> None:
    """Drops a store's files from the page cache."""
    os.sync()
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_EVERYBODY = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in _EVERYBODY]
    return sum(each.ru_utime + each.ru_stime for each in used)


def probe_program(folder: Path) -> Path:
    """Build the limit's program; plain libjpeg, so that any compiler does."""
    program = folder / "pixel_probe"
    command = ["g++", "-O3", "-std=c++20", str(ROOT / "benchmarks/pixel_probe.cc")]
    subprocess.run([*command, "-o", str(program), "-ljpeg", "-lpthread"], check=True)
    return program


def limits(program: Path, paths: list[Path], threads: int) -> dict[str, dict[str, float]]:
    """The limits of a set of JPEGs."""
    results = {}
    for mode in ("entropy", "region"):
        command = [str(program), mode, str(threads), "3", *(str(path) for path in paths)]
        rate, cpu = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.split()
        results[f"limit: {mode}"] = {"pictures_per_s": float(rate), "cpu_s_per_1000": float(cpu)}
    return results


@leaving_nothing()
def main() -> None:
    """Make pictures, run all engines in turns, print medians and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--page", action="store_true", help="write the tables onto the pages")
    parser.add_argument("--raw", type=Path, help="with --page: measured runs, in place of new ones")
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "FOLDER", "STORE"))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(*options.one, options.threads)))
        return
    if options.raw:
        write_pages(options.raw, json.loads(options.raw.read_text()))
        return
    import headrace as hr

    for peer in pixel_peers.missing():
        print(f"{peer} is not installed: left out (benchmarks/requirements-pixels.txt)")
    engines = [*pixel_peers.installed(), *OWN]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        program = probe_program(work)
        for name in options.sets:
            if not SETS[name][0] and not CLIP_ART.exists():
                print(f"\n{name}: openclipart-png is not installed, left out")
                continue
            folder, store = work / name, work / f"{name}.hr"
            paths = make(folder, name, options.pictures)
            for images in {recipe.get("packed", "") for recipe in OWN.values()}:
                hr.pack(folder, _packed(str(store), images), images=images or None)
            mean = statistics.mean(path.stat().st_size for path in paths)
            print(
                f"\n{name}: {len(paths):,} pictures of {mean / 1000:.0f} kB, {options.threads} threads"
            )
            for number in range(options.rounds):
                figures = limits(program, paths, options.threads) if "JPEG" in name else {}
                # What ran before an engine tells on it: in each round another.
                for engine in random.Random(number).sample(engines, len(engines)):
                    figures[engine] = run_apart(engine, folder, store, options.threads)
                runs += [
                    {"set": name, "round": number, "engine": e, **f} for e, f in figures.items()
                ]
            table(name, runs)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"pixels-{dt.datetime.now(dt.UTC):%Y-%m-%d}.json"
    said = {name: value for name, value in vars(options).items() if name not in ("page", "raw")}
    document = {"machine": machine.describe(RESULTS), "options": said, "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwrote {path}")
    if options.page:
        write_pages(path, document)


def table(name: str, runs: list[dict[str, Any]]) -> None:
    """Print medians of a set, and how many times torch's figure each is."""
    here = [run for run in runs if run["set"] == name]
    torch = {
        run["round"]: run["pictures_per_s"] for run in here if run["engine"] == "torch + Pillow"
    }
    for engine in (engine for engine in ROWS if any(run["engine"] == engine for run in here)):
        own = [run for run in here if run["engine"] == engine]
        rate = statistics.median(run["pictures_per_s"] for run in own)
        ratio = statistics.median(run["pictures_per_s"] / torch[run["round"]] for run in own)
        cpu = statistics.median(run["cpu_s_per_1000"] for run in own)
        memory = statistics.median(run.get("peak_mb", 0) for run in own)
        figures = f"{rate:8.0f} pictures/s  {ratio:5.2f} x torch  {cpu:6.2f} CPU s/1,000"
        print(f"  {engine:<20} {figures}  {memory:6.0f} MB")


ROWS = {
    "limit: entropy": "limit: libjpeg-turbo, entropy decoding alone",
    "limit: region": "limit: libjpeg-turbo, the region, no resize",
    "headrace": "**headrace**",
    "headrace, cold": "headrace, cold",
    "headrace, 1 thread": "headrace, one thread",
    "headrace, exact": "headrace, `exact=True`",
    "headrace, float32": "headrace, float32 normalised",
    "headrace, kept": "headrace, kept decoded, second epoch",
    "headrace, node, 1 job": "headrace, kept decoded on the node: one job, first epoch",
    "headrace, node, 2 jobs": "the same, two jobs at a time, together",
    "headrace, lossless": "headrace, packed `lossless`",
    "headrace, decoded": "headrace, packed `decoded,short=256`",
    "OpenCV, threads": "OpenCV in threads (not antialiased)",
    "DALI, antialias": "DALI on the processor",
    "torch + Pillow": "PyTorch DataLoader with Pillow, 2 workers",
    "SPDL": "SPDL",
    "tf.data, antialias": "tf.data, antialiased",
}
FEW = (
    "limit: region", "headrace", "headrace, kept", "OpenCV, threads", "DALI, antialias",
    "torch + Pillow", "SPDL", "tf.data, antialias",
)  # fmt: skip
"""The rows of the README."""


def write_pages(raw: Path, document: dict[str, Any]) -> None:
    """Put the medians of all sets onto the README and the pictures' page."""
    runs = document["runs"]
    sets = [name for name in SETS if any(run["set"] == name for run in runs)]
    head = ["decoded, cropped at random, resized"]
    head += [title for name in sets for title in (f"{name}/s", "CPU s")]

    def row(engine: str) -> list[str]:
        cells = [ROWS[engine]]
        for name in sets:
            own = [run for run in runs if (run["set"], run["engine"]) == (name, engine)]
            if not own or ("JPEG" not in name and engine == "headrace, lossless"):
                cells += ["", ""]
                continue
            bold = "**" if engine == "headrace" else ""
            rate = statistics.median(run["pictures_per_s"] for run in own)
            cpu = statistics.median(run["cpu_s_per_1000"] for run in own)
            cells += [f"{bold}{rate:,.0f}{bold}", f"{bold}{cpu:.2f}{bold}"]
        return cells

    def rows(engines: Iterable[str]) -> str:
        return markdown([head, *map(row, engines)])

    when = dt.date.fromisoformat(raw.stem.removeprefix("pixels-"))
    rounds, cores = document["options"]["rounds"], document["machine"]["cores"]
    of = f"Medians of {rounds} rounds on {cores} cores, in the page cache, {when:%B %Y}."
    onto_page(ROOT / "README.md", "pixels", f"{rows(FEW)}\n\n{of}")
    link = f"([raw runs](../../{raw.resolve().relative_to(ROOT)}))"
    onto_page(ROOT / "docs/howto/images.md", "pixels", f"{rows(ROWS)}\n\n{of[:-1]} {link}.")


if __name__ == "__main__":
    main()
