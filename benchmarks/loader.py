"""The loader benchmark: headrace beside the limits of the machine and the loaders people pick.

    python -m benchmarks.loader            # everything; `make bench`
    python -m benchmarks.loader --quick    # a twentieth of the data, one round: does it work?

Engines take turns, round after round, each run in a fresh process; figures are medians, ratios
are formed inside a round. Cold runs drop the machine's page cache and need root. Ends with a
table of every target, met or not, and writes raw runs and a figure to benchmarks/results/.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import datasets, forms, limits, loaders, machine, tables
from benchmarks.processes import leaving_nothing
from benchmarks.results import Results
from benchmarks.run_one import Run, RunSpec, numpy_baseline, run
from benchmarks.targets import judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.cache import Temperature
    from benchmarks.datasets import DataSet
    from benchmarks.processes import Memory

RESULTS = ROOT / "benchmarks/results"
_TEMPERATURES: tuple[Temperature, ...] = ("hot", "cold")

_FILES_HOT_B = 150_000
"""Hot runs over B's million files stop here: warming all of them takes a minute a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the benchmark is run."""

    dir: Path
    """Work folder for the data sets: about 55 GB at scale 1."""

    scale: float
    """Fraction of each data set's samples."""

    repeats: int
    """Rounds; figures are medians over them."""

    seconds: float
    """Cap of one run; fast engines end their epoch earlier."""

    datasets: tuple[str, ...]
    temperatures: tuple[str, ...]
    engines: tuple[str, ...]
    directory_samples: int
    """Names in the directory benchmark; 0 leaves it out."""

    json: Path | None
    """Where the raw results go; None: benchmarks/results/loader-DATE.json."""


def engines_of(dataset: str, temperature: str, wanted: Sequence[str]) -> list[str]:
    """The engines of one cell, those that read the same form side by side.

    Hot runs then find most of their form warm already. Blocked order is for tiny samples.
    """
    probes = {"hot": limits.HOT, "cold": limits.COLD_A if dataset == "A" else limits.COLD_B}
    by_form = sorted(loaders.LOADERS, key=lambda name: list(forms.FORMS).index(loaders.FORMS[name]))
    both = [*probes[temperature], *by_form]
    if dataset == "A":
        both.remove("headrace-blocked")
    return [name for name in both if name in wanted or name.split(":")[0] in wanted]


def cap_samples(data: DataSet, engine: str, temperature: str) -> int:
    """How many samples a run may deliver: an epoch, or what it is worth to warm."""
    if data.name == "B" and temperature == "hot" and loaders.FORMS.get(engine) == "files":
        return min(data.samples, _FILES_HOT_B)
    return data.samples


def plan(options: Options) -> Iterator[RunSpec]:
    """Every run in order: data set, temperature, round, engine."""
    for name in options.datasets:
        data = datasets.data_set(name, options.scale)  # type: ignore[arg-type]
        for temperature in options.temperatures:
            engines = engines_of(name, temperature, options.engines)
            for seed in range(1, options.repeats + 1):
                for engine in engines:
                    yield RunSpec(
                        engine=engine,
                        data=data,
                        temperature=temperature,  # type: ignore[arg-type]
                        seed=seed,
                        cap_samples=cap_samples(data, engine, temperature),
                        cap_seconds=options.seconds,
                        root=options.dir,
                    )


def generate(specs: Sequence[RunSpec]) -> dict[tuple[str, str], str]:
    """Writes every form that the plan needs; returns what could not be written, and why.

    Each in a process of its own: peers leave threads and memory behind.
    """
    failed: dict[tuple[str, str], str] = {}
    for spec in {(spec.data.name, spec.form): spec for spec in specs}.values():
        if forms.is_complete(spec.root, spec.data, spec.form):
            continue
        full = datasets.data_set(spec.data.name).samples
        command = [sys.executable, "-m", "benchmarks.forms", "--dir", str(spec.root)]
        command += ["--dataset", spec.data.name, "--form", spec.form]
        command += ["--scale", repr(spec.data.samples / full)]
        if subprocess.run(command, check=False, cwd=ROOT).returncode:
            failed[spec.data.name, spec.form] = f"its form {spec.form} could not be written"
    return failed


def _line(number: int, total: int, result: Run, left_s: float) -> str:
    if result.usable:
        what = f"{result.samples_per_s:>11,.0f}/s  {result.cpu_s_per_gb:6.3f} CPU s/GB"
    else:
        what = f"WRONG: {result.wrong}" if result.wrong else f"failed: {result.error}"
    cell = f"{result.dataset} {result.temperature:<4} {result.engine:<24}"
    return f"[{number}/{total}, {left_s / 60:.0f} min left] {cell} {what}"


def run_all(specs: Sequence[RunSpec], failed: Mapping[tuple[str, str], str]) -> list[Run]:
    """Runs the plan; an engine that cannot import or has no data is asked once only."""
    runs: list[Run] = []
    given_up: dict[tuple[str, str], str] = {}
    started = time.monotonic()
    for number, spec in enumerate(specs, start=1):
        reason = failed.get((spec.data.name, spec.form))
        reason = reason or given_up.get((spec.engine, spec.data.name))
        if reason is not None:
            runs.append(Run(spec.engine, spec.data.name, spec.temperature, spec.seed, error=reason))
            continue
        result = run(spec)
        runs.append(result)
        if result.error is not None:
            given_up[spec.engine, spec.data.name] = result.error
        left_s = (time.monotonic() - started) / number * (len(specs) - number)
        forms.say(_line(number, len(specs), result, left_s))
    return runs


def measure_directory(options: Options) -> dict[str, float] | None:
    """The directory benchmark in a process of its own; None where it cannot run."""
    if not options.directory_samples:
        return None
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "benchmarks.directory", "--dir", str(options.dir)]
        command += ["--samples", str(options.directory_samples), "--json", out.name]
        # Its own table is left out: the same rows stand in ours.
        done = subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            return None
        figures: dict[str, float] = json.loads(Path(out.name).read_text())
    return figures


_FULL = {"scale": 1.0, "repeats": 5, "seconds": 2.0, "directory_samples": 10_000_000}
_QUICK = {"scale": 0.05, "repeats": 1, "seconds": 1.0, "directory_samples": 1_000_000}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line as `Options`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ("limit", *loaders.LOADERS)
    add = parser.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="work folder, about 55 GB")
    add("--scale", type=float, help="fraction of the samples (1; quick 0.05)")
    add("--repeats", type=int, help="rounds (5; quick 1)")
    add("--seconds", type=float, help="cap of one run (2; quick 1)")
    add("--engines", nargs="+", default=known, help=f"of {', '.join(known)}, or limit:MODE:N")
    add("--datasets", nargs="+", choices=datasets.NAMES, default=datasets.NAMES)
    add("--only", choices=_TEMPERATURES, help="hot or cold runs only")
    add("--directory-samples", type=int, help="names (10 million; quick 1 million); 0: leave out")
    add("--quick", action="store_true", help="small and short: does everything work?")
    add("--json", type=Path, help="where the raw results go")
    parser.set_defaults(**_FULL)
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**_QUICK)  # what is given on the command line still wins
    given = parser.parse_args(arguments)
    unknown = {name.split(":")[0] for name in given.engines} - set(known)
    if unknown:
        parser.error(f"unknown engine {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return Options(
        dir=given.dir.resolve(),
        scale=given.scale,
        repeats=given.repeats,
        seconds=given.seconds,
        datasets=tuple(given.datasets),
        temperatures=(given.only,) if given.only else _TEMPERATURES,
        engines=tuple(given.engines),
        directory_samples=given.directory_samples,
        json=given.json,
    )


def report(
    options: Options, results: Results, baseline: Memory, outcome: Mapping[str, object]
) -> None:
    """Prints the tables of one benchmark."""
    for dataset in options.datasets:
        data = datasets.data_set(dataset, options.scale)  # type: ignore[arg-type]
        print(
            f"\n{dataset}: {data.samples:,} samples, {data.total_bytes / 1e9:.2f} GB, "
            f"batch {data.batch_size}, medians of {options.repeats}"
        )
        print(tables.loader_table(results, dataset))
    print(
        f"\n`import numpy` alone: {baseline.private_mb:.0f} MB private, "
        f"{baseline.mapped_mb:.0f} MB mapped. LitData's shuffle is not a true global one."
    )
    for line in tables.failures(results):
        print(line)
    print(f"\nTargets\n{tables.targets_table(outcome['targets'])}")  # type: ignore[arg-type]


def save(
    options: Options, results: Results, baseline: Memory, outcome: Mapping[str, object]
) -> Path:
    """Writes raw runs and their circumstances as JSON, and the figure beside it."""
    path = options.json or RESULTS / f"loader-{outcome['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        # The folder's own name is enough: where it lies on somebody's machine is nobody's business.
        "options": asdict(options) | {"dir": Path(options.dir).name},
        "numpy_baseline": asdict(baseline),
        **outcome,
        "targets": [asdict(target) for target in outcome["targets"]],  # type: ignore[attr-defined]
        "runs": [asdict(one) for one in results.runs],
    }
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    try:
        from benchmarks.figure import draw

        draw(results, list(options.datasets), path.with_suffix(""))
    except ImportError as error:
        forms.say(f"no figure: {error} (pip install matplotlib)")
    return path


@leaving_nothing()
def main() -> int:
    options = parse()
    specs = list(plan(options))
    if "cold" in options.temperatures and os.geteuid() != 0:
        forms.say("Cold runs drop the page cache, which needs root: run as root, or --only hot.")
        return 2
    if any(spec.engine.startswith(limits.PREFIX) for spec in specs):
        limits.ensure_probe(ROOT)
    circumstances = machine.describe(Path.cwd())
    failed = generate(specs)
    baseline = numpy_baseline()
    started = time.monotonic()
    results = Results(run_all(specs, failed))
    directory = measure_directory(options)
    outcome = {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        "machine": circumstances,
        "seconds": round(time.monotonic() - started, 1),
        "directory": directory,
        "targets": judge(results, baseline, directory),
    }
    report(options, results, baseline, outcome)
    forms.say(f"\nraw results: {save(options, results, baseline, outcome)}")
    return 1 if any(one.wrong for one in results.runs) else 0


if __name__ == "__main__":
    sys.exit(main())
