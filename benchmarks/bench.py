"""The benchmark's benchmark: headrace's harness and generators beside the real DLIO and fio.

    python -m benchmarks.bench            # a quarter of an hour
    python -m benchmarks.bench --quick    # small and short: does it work?
    python -m benchmarks.bench --only read harness truth generate

What is compared runs in turn, in every round, each run in a process of its own; ratios are formed inside a
round, and the median of the rounds counts. The real DLIO is installed into an environment of its own below
`--dir`; where that is impossible it is said, and left out. Raw figures go to
benchmarks/results/bench-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import cache, machine, tables
from benchmarks.bench_parts import ceiling, generation, own, peer
from benchmarks.bench_parts.truth import SETTINGS, TARGET_PERCENT
from benchmarks.processes import leaving_nothing
from benchmarks.targets import Target, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = ROOT / "benchmarks/results"
PARTS = ("read", "harness", "truth", "generate")

FORMATS = {"npz": 10.0, "jpeg": 5.0}
"""What is read, and how much faster than DLIO it must be."""
BATCH = 50
READ_THREADS = (0, 1, 2)
RECORD_LENGTH = {"npz": 100_000, "jpeg": 180_000}
"""DLIO's files of about 100 kB: its jpegs have so many pixels, not bytes."""

FIO, GENERATOR = 0.8, 5.0

Row = dict[str, Any]
Rounds = dict[str, list[Row]]
"""What each run of each round saw, by what ran."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    dir: Path
    rounds: int
    files: int
    epochs: int
    scale: float
    seconds: float
    """Of each run of the harness."""
    settings: int
    """Storages whose AU is worked out by hand."""
    parts: tuple[str, ...]


def note(text: str) -> None:
    """Progress, on the error output."""
    print(text, file=sys.stderr, flush=True)


# -- reading: samples per second without computing -------------------------------------------------


def ensure_files(options: Options, dlio: peer.Dlio | None, form: str) -> Path:
    """The files that are read: DLIO's own where it is there, else of the same size."""
    folder = options.dir / f"bench-{form}-{options.files}{'' if dlio else '-own'}"
    if (folder / "ready").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    if dlio is None:
        own.call("generate", folder, form, options.files, 100_000, 1)
    else:
        dlio.generate(folder, form, options.files, RECORD_LENGTH[form])
    (folder / "ready").touch()
    return folder


def _speeds(files: int, epochs_s: list[float]) -> list[float]:
    """Samples per second of each epoch but the first, which starts workers and imports."""
    steady = epochs_s[1:] or epochs_s
    return [files // BATCH * BATCH / seconds for seconds in steady]


def read_own(options: Options, folder: Path, form: str, threads: int) -> Row:
    """Ours: the median of the epochs, of which there are many, since they are short."""
    found = own.call("read", folder, form, options.files, BATCH, threads, 4 * options.epochs + 1)
    found["samples_per_s"] = statistics.median(_speeds(options.files, found["epochs_s"]))
    return found | {"read_threads": threads}


def read_dlio(
    options: Options, dlio: peer.Dlio, folder: Path, form: str, threads: int, *, fixed: bool
) -> Row:
    """DLIO's best epoch."""
    epochs_s = dlio.read(
        folder,
        form,
        options.files,
        batch=BATCH,
        threads=threads,
        epochs=options.epochs,
        fixed=fixed,
    )
    best = max(_speeds(options.files, epochs_s))
    return {"epochs_s": epochs_s, "samples_per_s": best, "read_threads": threads}


def reading(options: Options, dlio: peer.Dlio | None, form: str) -> dict[str, Any]:
    """Each with the read_threads that were best for it in the first round."""
    folder = ensure_files(options, dlio, form)
    paths = sorted((folder / "train").iterdir())
    runs: dict[str, Callable[[int], Row]] = {
        "headrace": lambda threads: read_own(options, folder, form, threads)
    }
    if dlio is not None:
        for name, fixed in (("DLIO", False), ("DLIO without its debug line", True)):
            runs[name] = lambda threads, fixed=fixed: read_dlio(
                options, dlio, folder, form, threads, fixed=fixed
            )
    rounds: Rounds = {}
    best: dict[str, int] = {}
    tried: Rounds = {}
    for number in range(options.rounds):
        for name, run in runs.items():
            note(f"read {form}, round {number + 1}: {name}")
            for threads in [best[name]] if name in best else READ_THREADS:
                cache.warm(paths)
                tried.setdefault(name, []).append(run(threads) | {"round": number})
            of_round = [row for row in tried[name] if row["round"] == number]
            fastest = max(of_round, key=lambda row: row["samples_per_s"])
            best[name] = fastest["read_threads"]
            rounds.setdefault(name, []).append(fastest)
    size = sum(path.stat().st_size for path in paths)
    return {
        "files": len(paths), "bytes": size, "resident": cache.resident_fraction(paths),
        "rounds": rounds, "tried": tried,
    }  # fmt: skip


# -- the harness: 64 accelerators over nothing -----------------------------------------------------


def harness(options: Options) -> Rounds:
    """AU and lateness without storage."""
    rounds: Rounds = {}
    for number in range(options.rounds):
        for workload in ceiling.WORKLOADS:
            note(f"harness, round {number + 1}: {workload}")
            found = own.call("null", workload, options.seconds)
            rounds.setdefault(workload, []).append(found | {"load": os.getloadavg()[0]})
    return rounds


# -- generation ------------------------------------------------------------------------------------


def generating(options: Options, dlio: peer.Dlio | None) -> dict[str, Rounds]:
    """Every case; by its name, then by who wrote."""
    have_fio = shutil.which("fio") is not None
    if not have_fio:
        note("fio is not installed (debian-packages.txt, [bench]): left out")
    found: dict[str, Rounds] = {}
    base = options.dir / f"bench-generate-{time.time_ns()}"
    try:
        for number in range(options.rounds):
            for index, case in enumerate(generation.cases(options.scale)):
                note(f"generate, round {number + 1}: {case.name}")
                folder = base / f"{number}-{index}"
                seen = generation.one_round(folder, case, dlio, have_fio=have_fio)
                for who, row in seen.items():
                    rate = row["bytes"] / row["seconds"] / 1e9
                    found.setdefault(case.name, {}).setdefault(who, []).append(
                        row | {"gb_per_s": rate}
                    )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return found


# -- what came of it -------------------------------------------------------------------------------


def ratios(rounds: Rounds, others: list[str], figure: str) -> list[float]:
    """Round by round: ours over the best of the others."""
    known = [rounds[other] for other in others if other in rounds]
    if not known:
        return []
    return [
        mine[figure] / max(other[at][figure] for other in known)
        for at, mine in enumerate(rounds["headrace"])
    ]


def at_least(name: str, found: list[float], bound: float) -> Target:
    """A target of ratios."""
    required = f">= {bound:g} x"
    if not found:
        return Target(name, required, "-", "open", "one of them did not run")
    middle = statistics.median(found)
    spread = f"{min(found):.2f} to {max(found):.2f} over {len(found)} rounds"
    verdict: Verdict = "met" if middle >= bound else "NOT MET"
    return Target(name, required, f"{middle:.2f} x", verdict, spread)


def judge_reading(form: str, rounds: Rounds) -> list[Target]:
    """The real DLIO counts; what it would do without one line is shown beside."""
    targets = [
        at_least(f"read {form}: samples/s over DLIO", ratios(rounds, ["DLIO"], "samples_per_s"),
                 FORMATS[form])
    ]  # fmt: skip
    without = ratios(rounds, ["DLIO without its debug line"], "samples_per_s")
    if without:
        middle = f"{statistics.median(without):.2f} x"
        name = f"read {form}: over DLIO without its debug line"
        targets.append(Target(name, "(no target)", middle, "open", "DLIO with a line left out"))
    return targets


def judge_harness(rounds: Rounds) -> list[Target]:
    """AU and deadlines of both workloads."""
    targets = []
    au_least, late_most = ceiling.AU_LEAST, ceiling.LATE_P99_MOST_S
    for workload, runs in rounds.items():
        au = statistics.median(run["au_percent"] for run in runs)
        late = statistics.median(run["late_p99_s"] for run in runs)
        who = f"{ceiling.ACCELERATORS} x {workload}, null store"
        low, worst = min(r["au_percent"] for r in runs), max(r["late_max_s"] for r in runs)
        targets += [
            Target(f"{who}: AU", f">= {au_least:g} %", f"{au:.2f} %",
                   "met" if au >= au_least else "NOT MET", f"least {low:.2f} %"),
            Target(f"{who}: deadline error p99", f"< {late_most * 1e3:g} ms", f"{late * 1e3:.2f} ms",
                   "met" if late < late_most else "NOT MET", f"worst {worst * 1e3:.2f} ms"),
        ]  # fmt: skip
    return targets


def judge_truth(rows: list[Row]) -> Target:
    """Every storage counts, in its own run."""
    off = [abs(row["off_percent"]) for row in rows]
    good = sum(each <= TARGET_PERCENT for each in off)
    required = f"within {TARGET_PERCENT:g} %"
    verdict: Verdict = "met" if good == len(rows) else "NOT MET"
    measured = f"{good} of {len(rows)}"
    return Target(
        "AU reported / by hand", required, measured, verdict, f"worst {max(off):.2f} % off"
    )


def judge_generation(found: dict[str, Rounds]) -> list[Target]:
    """Beside fio's better mode of each round; jpeg is judged beside DLIO alone."""
    targets = []
    for name, rounds in found.items():
        if not name.startswith("jpeg"):
            over = ratios(rounds, list(generation.FIO_MODES), "gb_per_s")
            targets.append(at_least(f"generate {name}: over fio", over, FIO))
        if name.startswith("jpeg") or "DLIO" in rounds:
            over = ratios(rounds, ["DLIO"], "gb_per_s")
            targets.append(at_least(f"generate {name}: over DLIO's", over, GENERATOR))
    return targets


def median(rows: list[Row] | None, figure: str) -> float | None:
    return statistics.median(row[figure] for row in rows) if rows else None


def show_reading(form: str, found: dict[str, Any]) -> None:
    rows = [(f"{form}, hot, {found['files']:,} files of {found['bytes'] / found['files']:,.0f} B",
             "samples/s", "read_threads")]  # fmt: skip
    for name, runs in found["rounds"].items():
        speed = median(runs, "samples_per_s") or 0.0
        rows.append((name, f"{speed:,.0f}", str(runs[-1]["read_threads"])))
    print(f"\n{tables.grid(rows)}")


def show_generation(found: dict[str, Rounds]) -> None:
    writers = ("headrace", *generation.FIO_MODES, "DLIO")
    rows: list[tuple[str, ...]] = [
        ("generate, GB/s until on the disk", *writers, "headrace CPU s/GB")
    ]
    for name, rounds in found.items():
        cells = [median(rounds.get(who), "gb_per_s") for who in writers]
        cost = statistics.median(r["cpu_s"] / r["bytes"] * 1e9 for r in rounds["headrace"])
        texts = ["-" if cell is None else f"{cell:.3f}" for cell in cells]
        rows.append((name, *texts, f"{cost:.2f}"))
    print(f"\n{tables.grid(rows)}")


def _dlio(options: Options, frameworks: Path) -> peer.Dlio | None:
    if not {"read", "generate"} & set(options.parts):
        return None
    try:
        return peer.ensure(options.dir / "dlio-venv", frameworks)
    except peer.PeerError as error:
        note(f"the real DLIO cannot be run, it is left out: {error}")
        return None


def _options() -> tuple[argparse.Namespace, Options]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="short runs: does it work?")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dir", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--frameworks", type=Path, default=ROOT / ".venv-frameworks",
                        help="the environment that has TensorFlow, which DLIO imports")  # fmt: skip
    given = parser.parse_args()
    quick = given.quick
    options = Options(
        given.dir.resolve(), given.rounds or (1 if quick else 3), 400 if quick else 4000,
        2, 0.1 if quick else 1.0, 3.0 if quick else 15.0, 4 if quick else len(SETTINGS), tuple(given.only),
    )  # fmt: skip
    return given, options


@leaving_nothing()
def main() -> None:
    """Measures, prints, writes."""
    given, options = _options()
    options.dir.mkdir(parents=True, exist_ok=True)
    dlio = _dlio(options, given.frameworks.resolve())
    results: dict[str, Any] = {
        "benchmark": "bench", "machine": machine.describe(options.dir), "rounds": options.rounds,
        "dlio": peer.DLIO if dlio else None, "options": {"files": options.files, "batch": BATCH},
    }  # fmt: skip
    targets: list[Target] = []
    if "read" in options.parts:
        results["read"] = {}
        for form in FORMATS:
            found = results["read"][form] = reading(options, dlio, form)
            show_reading(form, found)
            targets += judge_reading(form, found["rounds"])
    if "harness" in options.parts:
        results["harness"] = harness(options)
        targets += judge_harness(results["harness"])
    if "truth" in options.parts:
        note("truth: AU by hand")
        results["truth"] = own.call("truth", options.settings)
        targets.append(judge_truth(results["truth"]))
    if "generate" in options.parts:
        results["generate"] = generating(options, dlio)
        show_generation(results["generate"])
        targets += judge_generation(results["generate"])
    results["targets"] = [asdict(target) for target in targets]
    results["load_after"] = os.getloadavg()[0]
    head = ("target", "required", "measured", "", "")
    lines = [(t.name, t.required, t.measured, t.verdict, t.note) for t in targets]
    print(f"\n{tables.grid([head, *lines])}")
    print(f"load before {results['machine']['load_before']:.1f}, after {results['load_after']:.1f}")
    if not given.quick:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"bench-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
