"""Unmodified programs: what `headrace run` is worth to scripts that know nothing of headrace.

    python -m benchmarks.unmodified            # some minutes, as root: it empties the page cache
    python -m benchmarks.unmodified --quick    # small and short: does it work?
    python -m benchmarks.unmodified --only loop,opens      # some of loop, shuffled, opens

Baseline and headrace run the same script (`benchmarks/programs`) in turn, the ratio of medians counts, and
both must have read the same bytes. `lustre` is simulated: the shim makes opens and reads of originals
slow in both. Training programs, with PRISMA beside them: `benchmarks/paper.py`. Raw figures go to
benchmarks/results/unmodified-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import datasets, forms, machine, processes, tables
from benchmarks.targets import Target
from headrace.node.daemon import start, stop
from headrace.runtime import RuntimeFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RESULTS = ROOT / "benchmarks/results"
PROGRAMS = ROOT / "benchmarks/programs"
PARTS = ("loop", "shuffled", "opens")
HEADRACE = str(Path(sys.executable).parent / "headrace")
DROP = Path("/proc/sys/vm/drop_caches")
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    dir: Path
    scale: float
    rounds: int
    python: str


@dataclass(slots=True)
class Found:
    """What was measured."""

    rows: list[list[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


# -- running ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def daemon(*options: str) -> Iterator[dict[str, str]]:
    """A daemon of our own, started with these options; the environment in which it is found."""
    here = Path(tempfile.mkdtemp(prefix="hr-bench-"))
    folder = RuntimeFolder(here / "rt")
    try:
        start(folder, options)
        yield os.environ | {"HEADRACE_RUNTIME_DIR": str(folder.path), "HEADRACE_JOB": "bench"}
    finally:
        with contextlib.suppress(FileNotFoundError):  # it did not start
            stop(folder, force=True)
        shutil.rmtree(here)


def plain(program: Sequence[str], root: Path, simulate: str | None) -> dict[str, Any]:
    """The script alone; on simulated storage, where only that is simulated."""
    if simulate is None:
        return _run(program, dict(os.environ))
    words = ["--root", str(root), "--simulate", simulate, "--simulate-only", "--quiet", "--"]
    return _run([HEADRACE, "run", *words, *program], dict(os.environ))


def served(
    program: Sequence[str],
    root: Path,
    simulate: str | None,
    environment: dict[str, str],
    order: Path | None = None,
) -> dict[str, Any]:
    """The script under `headrace run`."""
    words = ["--root", str(root)]
    if simulate is not None:
        words += ["--simulate", simulate]
    if order is not None:
        words += ["--order", str(order)]
    command = [HEADRACE, "run", *words, "--", *program]
    return _run(command, environment)


def _run(command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    found["said"] = ended.stderr[-1000:]
    return found


def make_cold(files: Path) -> None:
    """Put the files out of the page cache: by the kernel's switch, or one by one."""
    os.sync()
    try:
        DROP.write_text("3")
    except OSError:
        for path in files.rglob("*"):
            if path.is_file():
                with path.open("rb") as f:
                    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def same(*runs: dict[str, Any]) -> None:
    """Both must have read the same."""
    read = {(run["bytes"], run["crc"]) for run in runs}
    if len(read) != 1:
        raise RuntimeError(f"not the same bytes were read: {read}")


def listed(path: Path, names: Sequence[str]) -> Path:
    """A file with a line for each name."""
    path.write_text("\n".join(names))
    return path


# -- the loop --------------------------------------------------------------------------------------


def loop(options: Options, found: Found) -> None:
    """A plain open and read loop: cold and on simulated storage, order given and learned."""
    for storage in ("cold", "lustre"):
        simulate = None if storage == "cold" else storage
        # 4 ms a file: a part of the files is enough.
        files, names = _files(options, options.scale if simulate is None else options.scale / 8)
        order = listed(options.dir / f"order-{storage}", names)
        program = [options.python, str(PROGRAMS / "loop.py"), str(order), "1"]
        runs: dict[str, list[float]] = {"baseline": [], "given": [], "learned": []}
        for _ in range(options.rounds):
            make_cold(files)
            base = plain(program, files, simulate)
            runs["baseline"] += base["seconds"]
            with daemon() as environment:
                make_cold(files)
                given = served(program, files, simulate, environment, order)
                runs["given"] += given["seconds"]
            with daemon() as environment:
                first = served(program, files, None if simulate is None else simulate, environment)
                make_cold(files)
                learned = served(program, files, simulate, environment)
                runs["learned"] += learned["seconds"]
            same(base, given, first, learned)
        bound = 2.0 if simulate is None else 5.0
        _judge_loop(found, storage, runs, len(names), bound)


def _judge_loop(
    found: Found, storage: str, runs: dict[str, list[float]], files: int, bound: float
) -> None:
    found.raw[f"loop {storage}"] = {"files": files, "seconds": runs}
    median = {name: statistics.median(seconds) for name, seconds in runs.items()}
    label = storage if storage == "cold" else f"simulated {storage}"
    for name in ("given", "learned"):
        ratio = median["baseline"] / median[name]
        us = [1e6 * median[one] / files for one in ("baseline", name)]
        found.rows.append(
            [f"loop, {label}, order {name}", f"{us[0]:,.0f}", f"{us[1]:,.0f}", f"{ratio:.2f}"]
        )
        found.targets.append(
            Target(
                f"loop, {label}, order {name}", f">= {bound:g} x", f"{ratio:.2f} x",
                "met" if ratio >= bound else "NOT MET", f"{us[1]:,.0f} against {us[0]:,.0f} us a file",
            )
        )  # fmt: skip


def _files(options: Options, scale: float) -> tuple[Path, list[str]]:
    """Data set A as files, and their paths in a random order."""
    data = datasets.data_set("A", scale)
    files = forms.ensure(options.dir, data, "files")
    names = [str(files / datasets.file_name(i)) for i in datasets.epoch_order(data, 1).tolist()]
    return files, names


# -- a new order each epoch ------------------------------------------------------------------------

PICTURES = 900
EPOCHS = 3


def shuffled(options: Options, found: Found) -> None:
    """Pictures in an order that nobody tells, on a simulated storage and in the page cache."""
    folder = _pictures(options.dir / "pictures")
    program = [options.python, str(PROGRAMS / "shuffled.py"), str(folder), str(EPOCHS)]
    for storage in ("lustre", None):
        runs: dict[str, list[dict[str, Any]]] = {"alone": [], "served": []}
        for at in range(options.rounds):
            for name in sorted(runs, reverse=at % 2 > 0):
                if name == "alone":
                    runs[name].append(plain(program, folder, storage))
                    continue
                with daemon() as environment:
                    runs[name].append(served(program, folder, storage, environment))
            same(*(each[-1] for each in runs.values()))
        label = f"simulated {storage}" if storage else "page cache"
        found.raw[f"shuffled {label}"] = runs
        _judge_shuffled(found, label, runs, far=storage is not None)


def _judge_shuffled(
    found: Found, label: str, runs: dict[str, list[dict[str, Any]]], *, far: bool
) -> None:
    parts = {
        "first epoch": (lambda run: run["seconds"][0], 0.98),
        "first epoch, second half": (lambda run: run["half"], 2.0 if far else 0.98),
        "later epochs": (lambda run: min(run["seconds"][1:]), 10.0 if far else 0.98),
    }
    for name, (figure, bound) in parts.items():
        alone, with_us = (
            statistics.median(map(figure, runs[each])) for each in ("alone", "served")
        )
        what = f"shuffled, {label}, {name}"
        found.rows.append([what, f"{alone:.3f} s", f"{with_us:.3f} s", f"{alone / with_us:.2f}"])
        met = "met" if alone / with_us >= bound else "NOT MET"
        found.targets.append(Target(what, f">= {bound:g} x", f"{alone / with_us:.2f} x", met))


def _pictures(folder: Path) -> Path:
    """Small photographs: what is decoded takes less time than an open on a slow storage."""
    if not folder.exists():
        import numpy as np
        from PIL import Image

        making = folder.with_suffix(".part")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        rng = np.random.default_rng(1)
        for k in range(PICTURES):
            coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
            coarse.resize((96, 96), Image.Resampling.BICUBIC).save(
                making / f"{k:04d}.jpg", quality=90
            )
        making.rename(folder)
    return folder


# -- opens -----------------------------------------------------------------------------------------


def opens(options: Options, found: Found) -> None:
    """What is added to an open of a file that is in memory anyway."""
    files, names = _files(options, 0.02)
    order = listed(options.dir / "order-opens", names)
    program = [options.python, str(PROGRAMS / "opens.py"), str(order), "20"]
    costs: dict[str, list[float]] = {"baseline": [], "headrace": [], "copies": []}
    for _ in range(max(3, options.rounds)):
        costs["baseline"].append(plain(program, files, None)["us_per_open"])
        with daemon() as environment:
            costs["headrace"].append(served(program, files, None, environment)["us_per_open"])
        with daemon() as environment:
            wait = [*program, "2"]  # until all are copied
            costs["copies"].append(served(wait, files, "nfs", environment)["us_per_open"])
    best = {name: min(values) for name, values in costs.items()}
    found.raw["opens"] = costs
    for name in ("headrace", "copies"):
        added = best[name] - best["baseline"]
        what = "open of a hot file" if name == "headrace" else "open of a copy in memory"
        found.rows.append(
            [what, f"{best['baseline']:.2f}", f"{best[name]:.2f}", f"+{added:.2f} us"]
        )
        if name == "copies":  # in the place of a round trip to the metadata server
            continue
        found.targets.append(
            Target(
                f"added to an {what}", "<= 3 us", f"{added:.2f} us",
                "met" if added <= 3 else "NOT MET",
            )
        )  # fmt: skip


@processes.leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unmodified",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small and short: does everything work?")
    add("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    add("--dir", type=Path, default=Path("build/bench"), help="work folder for data sets")
    add("--json", type=Path, help="where the raw figures go")
    given = parser.parse_args()
    directory = given.dir.resolve()
    options = Options(directory, 0.2, 3, sys.executable)
    if given.quick:
        options = Options(directory, 0.02, 1, sys.executable)
    parts = given.only.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"--only {unknown.pop()}, expected some of {', '.join(PARTS)}")
    load = os.getloadavg()[0]
    found = Found([["what", "baseline", "headrace", "ratio"]])
    for part in parts:
        {"loop": loop, "shuffled": shuffled, "opens": opens}[part](options, found)
    print(
        f"load before {load:.1f}\n\n{tables.grid(found.rows)}\n\n{tables.targets_table(found.targets)}"
    )
    date = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")
    path = given.json or RESULTS / f"unmodified-{date}.json"
    document = {
        "machine": machine.describe(Path.cwd()), "date": date, "quick": given.quick, **found.raw,
        "rows": found.rows, "targets": [asdict(target) for target in found.targets],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(f"\nraw results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
