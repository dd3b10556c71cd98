"""Similarity's benchmark: five small trainings are recorded and emulated, and the two recordings compared.

    python -m benchmarks.similarity            # about ten minutes
    python -m benchmarks.similarity --quick    # one round of one epoch: does it work?
    python -m benchmarks.similarity --page     # also the table and the pictures of docs/howto/emulate.md

Jobs are those of `programs/small_trainings.py`. Each round records a job, its emulation (`bench run
--workload`), the emulation with times drawn from their distributions instead of the recorded ones, and the job
once more: no emulation can be expected to be more like a job than the job is like itself. All are recorded by
`headrace record`, on the same files, which are put out of the page cache before each. Goal: 0.9. Figures are
medians over rounds; raw ones go to benchmarks/results/similarity-DATE.json. A busy machine changes the job
between two runs: its load is noted.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402 - see above

from benchmarks import machine  # noqa: E402 - see above
from benchmarks.processes import leaving_nothing  # noqa: E402 - see above
from benchmarks.tables import grid, markdown, onto_page  # noqa: E402 - see above

RESULTS = ROOT / "benchmarks/results"
PROGRAM = ROOT / "benchmarks/programs/small_trainings.py"
PAGE = ROOT / "docs/howto/emulate.md"
HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]
KINDS = {
    "images": "JPEG in folders, 2 workers", "volumes": "npz, 2 workers",
    "table": "Parquet, no workers", "text": "JSONL by offsets, 2 workers",
    "audio": "WAV, 2 workers",
}  # fmt: skip
FIGURES = ("volume", "sizes", "rates", "concurrency", "steps")
GOAL = 0.9


def call(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(words[:12])} ... failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def evict(folder: Path) -> None:
    """Out of the page cache; what is not written yet is written first."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def record(data: Path, output: Path, command: list[str]) -> None:
    evict(data)
    root = ["--root", str(data)]
    call([*HEADRACE, "record", "-q", "--overwrite", *root, "-o", str(output), "--", *command])


def slightly_other(job: Path) -> list[str]:
    """The workload's distributions, by a thousandth longer: then they are drawn from, not replayed."""
    document = yaml.safe_load(job.read_text())
    words = []
    for section, key in (("train", "computation_time"), ("reader", "preprocess_time")):
        times = document.get(section, {}).get(key)
        if isinstance(times, dict):
            name = "scale" if "scale" in times else "mean"
            longer = {**times, name: times[name] * 1.001}
            inside = ",".join(f"{part}:{value}" for part, value in longer.items())
            words.append(f"++workload.{section}.{key}={{{inside}}}")
    return words


def compare(job: Path, other: Path, svg: Path | None = None) -> dict[str, Any]:
    words = [*HEADRACE, "bench", "compare", str(job), str(other), "--json"]
    document: dict[str, Any] = json.loads(call(words + (["--svg", str(svg)] if svg else [])))
    return document


def one_round(kind: str, folder: Path, epochs: int, svg: Path) -> dict[str, Any]:
    data, job = folder / "data", folder / f"{kind}.yaml"
    train = [sys.executable, str(PROGRAM), "train", kind, str(data), "--epochs", str(epochs)]
    bench = [*HEADRACE, "bench", "run", "--workload", str(job), "--data-folder", str(data)]
    results = f"++hydra.run.dir={folder}/results"
    load = os.getloadavg()[0]
    record(data, job, train)
    row: dict[str, Any] = {"kind": kind, "load": load}
    for name, command in (
        ("emulation", [*bench, results]),
        ("drawn", [*bench, results, *slightly_other(job)]),
        ("again", train),
    ):
        other = folder / f"{name}.yaml"
        record(data, other, command)
        row[name] = compare(job, other, svg if name == "emulation" else None)
    return row


def median(rows: list[dict[str, Any]], name: str, figure: str | None = None) -> float:
    values = [r[name]["figures"][figure] if figure else r[name]["similarity"] for r in rows]
    return float(statistics.median(values))


def cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each job."""
    head = ("job", *FIGURES, "all", "drawn", "job again", "waiting: job, emulation")
    body = []
    for kind, what in KINDS.items():
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            waits = [
                statistics.median(r["emulation"][side]["wait_share"] for r in mine)
                for side in ("job", "emulation")
            ]
            body.append((
                f"{kind} ({what})", *(f"{median(mine, 'emulation', f):.3f}" for f in FIGURES),
                *(f"{median(mine, name):.3f}" for name in ("emulation", "drawn", "again")),
                ", ".join(f"{wait:.1%}" for wait in waits),
            ))  # fmt: skip
    return [head, *body]


def write_results(rows: list[dict[str, Any]], about: dict[str, object]) -> None:
    day = dt.datetime.now(dt.UTC).date().isoformat()
    document = {"date": day, "machine": about, "goal": GOAL, "rounds": rows}
    path = RESULTS / f"similarity-{day}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}", flush=True)


def write_page(rows: list[dict[str, Any]], work: Path) -> None:
    """The table, and the picture of each job's round in the middle."""
    for kind in KINDS:
        values = [row["emulation"]["similarity"] for row in rows if row["kind"] == kind]
        if values:
            middle = values.index(statistics.median_low(values))
            svg = (work / kind / f"{middle}.svg").read_bytes()
            (ROOT / f"docs/images/similarity-{kind}.svg").write_bytes(svg)
    loads, day = [row["load"] for row in rows], dt.datetime.now(dt.UTC).date().isoformat()
    rounds = -(-len(rows) // len({row["kind"] for row in rows}))
    of = "One round" if rounds == 1 else f"Medians of {rounds} rounds"
    load = (
        f"load average {min(loads):.1f} to {max(loads):.1f} when each began, mostly of other work"
    )
    about = f"{of} on {os.cpu_count()} processors, {day}; {load}."
    onto_page(PAGE, "similarity", f"{markdown(cells(rows))}\n\n{about}")


@leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    rounds, epochs = (1, 1) if options.quick else (options.rounds, 3)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="similarity-", dir="/var/tmp") as work:
        about = machine.describe(Path(work))
        for kind in options.kinds:
            folder = Path(work, kind)
            folder.mkdir()
            call([sys.executable, str(PROGRAM), "write", kind, str(folder / "data")])
        for number in range(rounds):
            for kind in options.kinds:
                rows.append(
                    one_round(kind, Path(work, kind), epochs, Path(work, kind, f"{number}.svg"))
                )
                figures = {
                    name: round(rows[-1][name]["similarity"], 3)
                    for name in ("emulation", "drawn", "again")
                }
                print(f"{kind}: {figures}, load {rows[-1]['load']:.1f}", flush=True)
            if not options.quick:  # so far: the next round may be cut off
                write_results(rows, about)
            if options.page:
                write_page(rows, Path(work))
    print(grid(cells(rows)))
    least = min(
        median([r for r in rows if r["kind"] == kind], "emulation") for kind in options.kinds
    )
    return 0 if least >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
