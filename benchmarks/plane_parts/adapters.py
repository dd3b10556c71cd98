"""The TensorFlow and the Grain adapter beside tf.data, TFRecord and Grain + ArrayRecord.

    python -m benchmarks.plane_parts.adapters --dir build/bench --rounds 3

Data set A in the form that each engine reads, hot and cold. Engines take turns, round after round,
each in a fresh process of `.venv-frameworks`, and every delivered sample is checked by its stamps;
ratios are formed inside a round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import datasets, forms, loaders
from benchmarks.plane_parts import Section
from benchmarks.results import Key, Results
from benchmarks.run_one import RunSpec
from benchmarks.run_one import run as run_engine
from benchmarks.tables import grid
from benchmarks.targets import Target, at_least

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cache import Temperature
    from benchmarks.datasets import DataSet

TEMPERATURES: tuple[Temperature, ...] = ("hot", "cold")
BOUND = 2.0

TENSORFLOW = (
    "tf-files",
    "headrace-tf-files",
    "tf-records",
    "headrace-tf",
    "headrace-tf-strings",
)
GRAIN = ("grain0", "grain2", "headrace-grain", "headrace-jax")

JUDGED = (
    ("TensorFlow, over the same files", "headrace-tf-files", ("tf-files",)),
    ("TensorFlow, packed, against files", "headrace-tf", ("tf-files",)),
    ("TensorFlow, packed, against TFRecord", "headrace-tf", ("tf-records",)),
    ("TensorFlow, packed, as strings, against TFRecord", "headrace-tf-strings", ("tf-records",)),
    ("Grain, against Grain + ArrayRecord", "headrace-grain", ("grain0", "grain2")),
    ("JAX arrays, against Grain + ArrayRecord", "headrace-jax", ("grain0", "grain2")),
)
"""Name of the target, engine, and the engines it is compared with (the fastest of them)."""


def ensure_forms(root: Path, data: DataSet, engines: Sequence[str]) -> None:
    """Writes what the engines read; records need their frameworks' writers."""
    for form in dict.fromkeys(loaders.FORMS[engine] for engine in engines):
        if form not in ("tfrecord", "arrayrecord"):
            forms.ensure(root, data, form)
        elif not forms.is_complete(root, data, form):
            python = loaders.interpreter("tf-files")
            scale = data.samples / datasets.data_set(data.name).samples
            options = {"dir": root, "dataset": data.name, "form": form, "scale": scale}
            given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            subprocess.run([python, "-m", "benchmarks.forms", *given], check=True)


def measure(
    root: Path, data: DataSet, engines: Sequence[str], *, rounds: int, seconds: float
) -> Results:
    """Runs every engine hot and cold, round after round."""
    runs = []
    for seed in range(1, rounds + 1):
        for temperature in TEMPERATURES:
            for engine in engines:
                spec = RunSpec(engine, data, temperature, seed, data.samples, seconds, root)
                done = run_engine(spec)
                runs.append(done)
                figure = f"{done.samples_per_s:,.0f} samples/s, {done.cpu_s_per_gb:.2f} CPU s/GB"
                forms.say(f"{engine} {temperature} {seed}: {done.error or done.wrong or figure}")
    return Results(runs)


def rows_of(results: Results, data: DataSet, engines: Sequence[str]) -> list[tuple[str, ...]]:
    """The table: a heading, then one row for each engine."""
    rows = [("engine", "samples/s hot", "cold", "CPU s/GB hot", "cold", "MB")]
    for engine in engines:
        keys = [Key(data.name, temperature, engine) for temperature in TEMPERATURES]
        cells = [_cell(results.median(key, "samples_per_s"), ",.0f") for key in keys]
        cells += [_cell(results.median(key, "cpu_s_per_gb"), ".2f") for key in keys]
        peak = results.worst(keys, "private_mb")
        rows.append((engine, *cells, _cell(peak[1] if peak else None, ".0f")))
    return rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def judge(results: Results, data: DataSet) -> list[Target]:
    """Every target, hot and cold."""
    return [
        at_least(
            f"{name}, {temperature}", results, Key(data.name, temperature, engine), against, BOUND
        )
        for name, engine, against in JUDGED
        for temperature in TEMPERATURES
    ]


def run(options: Any) -> Section:
    """Measures. `options` has `dir` and may have scale, rounds, seconds and engines."""
    data = datasets.data_set("A", getattr(options, "scale", 1.0))
    engines = getattr(options, "engines", None) or (*TENSORFLOW, *GRAIN)
    root = Path(options.dir).resolve()
    ensure_forms(root, data, engines)
    rounds, seconds = getattr(options, "rounds", 3), getattr(options, "seconds", 5.0)
    results = measure(root, data, engines, rounds=rounds, seconds=seconds)
    rows, targets = rows_of(results, data, engines), judge(results, data)
    return Section("Adapters: TensorFlow and Grain", rows, targets)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="cap of a run")
    parser.add_argument("--engines", nargs="*", choices=loaders.ADAPTERS)
    section = run(parser.parse_args())
    print(grid(section.rows))
    print()
    heading = ("target", "required", "measured", "verdict", "")
    lines = [(t.name, t.required, t.measured, t.verdict, t.note) for t in section.targets]
    print(grid([heading, *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
