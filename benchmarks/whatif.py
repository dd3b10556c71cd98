"""What-if's benchmark: a job is recorded once, other machines are predicted, and then really run.

    python -m benchmarks.whatif            # about six minutes
    python -m benchmarks.whatif --quick    # few steps: does it work?

Recorded: torch's DataLoader on this machine's disk. Predicted and run: other storages (simulated, with real
waiting), batches, accelerators' speeds, workers and training processes; computing and most decoding are sleeps,
so that a shared machine can be judged by them; one case decodes on processors. Also the benchmark's own engine
over the recorded requests. Goal: step times within 10 percent, stalls within 10 points. Raw figures go to
benchmarks/results/whatif-DATE.json.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 - see above

from benchmarks import machine  # noqa: E402 - see above
from benchmarks.processes import leaving_nothing  # noqa: E402 - see above
from benchmarks.tables import grid  # noqa: E402 - see above

RESULTS = ROOT / "benchmarks/results"
PROGRAM = ROOT / "benchmarks/programs/steps_train.py"
HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]
FILES, MEDIAN_BYTES, SIGMA = 640, 90_000, 0.5
STEPS_LEFT_OUT = 4
"""Of each run: workers start, and the first batches were read ahead."""
GOAL_STEP, GOAL_POINTS = 0.10, 10.0


@dataclass(frozen=True)
class Case:
    """A change, as the program is told and as what-if is told."""

    name: str
    run: dict[str, Any] = field(default_factory=dict)
    ask: dict[str, Any] = field(default_factory=dict)
    base: str = "plain"


LATENCY = 8
"""Storages are so much slower than their presets, and steps as much longer: what a shared machine adds to
each sleep is small beside them."""

BASES = {
    "plain": {"workers": 2, "batch": 8, "step-ms-per-sample": 12},
    "decode": {"workers": 2, "batch": 8, "step-ms-per-sample": 12, "decode-ms": 15},
    "busy": {
        "workers": 2, "batch": 8, "step-ms-per-sample": 12, "decode-ms": 8, "decode": "busy",
    },
}  # fmt: skip

CASES = [
    Case("as recorded"),
    Case("nfs", {"storage": "nfs"}, {"storage": "nfs"}),
    Case("lustre", {"storage": "lustre"}, {"storage": "lustre"}),
    Case("s3, 8 workers", {"storage": "s3", "workers": 8, "slower": 1},
         {"storage": "s3", "workers": 8, "latency": 1}),
    Case("hdd", {"storage": "hdd", "slower": 1}, {"storage": "hdd", "latency": 1}),
    Case("lustre, batch 24", {"storage": "lustre", "batch": 24, "steps": 40},
         {"storage": "lustre", "batch": 24}),
    Case("nfs, accelerator 4x", {"storage": "nfs", "step-ms-per-sample": 3},
         {"storage": "nfs", "gpu-speed": "4x"}),
    Case("lustre, accelerator 0.5x", {"storage": "lustre", "step-ms-per-sample": 24},
         {"storage": "lustre", "gpu-speed": "0.5x"}),
    Case("lustre, 1 worker", {"storage": "lustre", "workers": 1}, {"storage": "lustre", "workers": 1}),
    Case("lustre, 4 workers, accelerator 3x",
         {"storage": "lustre", "workers": 4, "step-ms-per-sample": 4},
         {"storage": "lustre", "workers": 4, "gpu-speed": "3x"}),
    Case("lustre, no workers", {"storage": "lustre", "workers": 0}, {"storage": "lustre", "workers": 0}),
    Case("lustre, 3 nodes", {"storage": "lustre", "ranks": 3, "steps": 40},
         {"storage": "lustre", "nodes": 3}),
    Case("hdd, 2 processes on it", {"storage": "hdd", "ranks": 2, "steps": 30, "slower": 1},
         {"storage": "hdd", "nodes": 2, "shared": True, "latency": 1}),
    Case("decoding 15 ms, nfs", {"storage": "nfs"}, {"storage": "nfs"}, base="decode"),
    Case("decoding 15 ms, lustre, 4 workers", {"storage": "lustre", "workers": 4},
         {"storage": "lustre", "workers": 4, "processors": 16}, base="decode"),
    Case("decoding on processors, nfs", {"storage": "nfs"}, {"storage": "nfs"}, base="busy"),
]  # fmt: skip

ENGINE_CASES = [
    ("headrace, lustre, 2 reads", {"storage": "lustre", "reads": 2}),
    ("headrace, hdd, 2 reads", {"storage": "hdd", "reads": 2}),
    ("headrace, s3, 8 reads", {"storage": "s3", "reads": 8}),
]


def write_files(folder: Path, count: int) -> None:
    """A seeded data set."""
    folder.mkdir()
    random = np.random.default_rng(1)
    sizes = np.exp(random.normal(np.log(MEDIAN_BYTES), SIGMA, count)).astype(int)
    for i, size in enumerate(sizes.tolist()):
        (folder / f"{i:05d}.jpg").write_bytes(random.bytes(size))


def command(data: Path, options: dict[str, Any]) -> list[str]:
    words = [sys.executable, str(PROGRAM), str(data)]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return words


def call(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(words[:6])} ... failed:\n{done.stderr[-3000:]}")
    return done.stdout


def measured(document: list[dict[str, Any]], per_epoch: int) -> tuple[float, float]:
    """Step time and stall of all ranks, without the beginnings of epochs."""
    steps, waits = [], []
    for rank in document:
        for i, (step, wait) in enumerate(zip(rank["step_s"], rank["wait_s"], strict=True)):
            if i % per_epoch >= STEPS_LEFT_OUT:
                steps.append(step)
                waits.append(wait)
    return statistics.fmean(steps), sum(waits) / sum(steps)


def ask(job: Path, options: dict[str, Any]) -> dict[str, Any]:
    words = [*HEADRACE, "whatif", str(job), "--json"]
    options = dict(options)
    words += [f"--{name}" for name in ("shared", "no-decode") if options.pop(name, False)]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    document: dict[str, Any] = json.loads(call(words))
    return document


def row_of(
    name: str, predicted: dict[str, Any], step_s: float, stall: float, load: float
) -> dict[str, Any]:
    return {
        "case": name, "predicted_s": predicted["step_s"], "measured_s": step_s,
        "error": predicted["step_s"] / step_s - 1, "predicted_stall": predicted["stall"],
        "measured_stall": stall, "points": 100 * (predicted["stall"] - stall),
        "bound": predicted["bound"], "load": load,
    }  # fmt: skip


def run_case(case: Case, work: Path, steps: int) -> dict[str, Any]:
    options = {"steps": steps, "slower": LATENCY, **BASES[case.base], **case.run}
    options["steps"] = min(steps, options["steps"])
    load = os.getloadavg()[0]
    per_epoch = FILES // (options["batch"] * options.get("ranks", 1))
    step_s, stall = measured(json.loads(call(command(work / "data", options))), per_epoch)
    predicted = ask(work / f"{case.base}.yaml", {"latency": LATENCY, **case.ask})["predictions"][-1]
    return row_of(case.name, predicted, step_s, stall, load)


def run_engine(name: str, options: dict[str, Any], work: Path, steps: int) -> dict[str, Any]:
    """The benchmark's own engine over the recorded requests."""
    reads = options["reads"]
    load = os.getloadavg()[0]
    words = [
        *HEADRACE, "bench", "run", "--workload", str(work / "plain.yaml"), "--data-folder", str(work / "data"),
        "--simulate", options["storage"], "--json", f"++workload.reader.read_threads={reads}",
        "++workload.reader.preprocess_time=0", f"++workload.train.total_training_steps={min(steps, 40)}",
        "++workload.train.epochs=2", f"++hydra.run.dir={work}/results-{reads}-{options['storage']}",
    ]  # fmt: skip
    own = json.loads(call(words))["summary"]["headrace"]
    time = own["time"]
    count = 2 * min(steps, 40)
    predicted = ask(
        work / "plain.yaml",
        {"storage": options["storage"], "loader": "headrace", "reads-in-flight": reads, "workers": reads,
         "ahead": reads * -(-2 // reads), "no-decode": True},
    )["predictions"][-1]  # fmt: skip
    return row_of(name, predicted, time["total_s"] / count, time["wait_s"] / time["total_s"], load)


def record(base: str, work: Path, steps: int) -> dict[str, Any]:
    words = command(work / "data", {"steps": steps, **BASES[base]})
    report = work / f"{base}.json"
    call(
        [
            *HEADRACE,
            "record",
            "-o",
            str(work / f"{base}.yaml"),
            "--report",
            str(report),
            "--",
            *words,
        ]
    )
    document: dict[str, Any] = json.loads(report.read_text())
    return document


@leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path, help="where the data set is made")
    parser.add_argument("--case", action="append", help="only cases whose name has this in it")
    options = parser.parse_args()
    steps = 24 if options.quick else 80
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        work = Path(folder)
        write_files(work / "data", FILES)
        about = machine.describe(work)
        records = {base: record(base, work, steps) for base in BASES}
        for base, found in records.items():
            print(base, json.dumps(found["job"]), flush=True)
        rows = []
        for case in CASES:
            if not options.case or any(each in case.name for each in options.case):
                rows.append(run_case(case, work, steps))
                print(told(rows[-1]), flush=True)
        for name, engine in ENGINE_CASES:
            if not options.case or any(each in name for each in options.case):
                rows.append(run_engine(name, engine, work, steps))
                print(told(rows[-1]), flush=True)
    print(table(rows))
    both = [r for r in rows if abs(r["error"]) < GOAL_STEP and abs(r["points"]) < GOAL_POINTS]
    print(f"step within 10 % and stall within 10 points: {len(both)} of {len(rows)} cases")
    if not options.quick and not options.case:
        path = RESULTS / f"whatif-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
        document = {"machine": about, "steps": steps, "records": records, "rows": rows}
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {path.relative_to(ROOT)}")
    return 0


def told(row: dict[str, Any]) -> str:
    return (
        f"{row['case']}: {row['measured_s'] * 1e3:.1f} ms, predicted {row['predicted_s'] * 1e3:.1f} "
        f"({row['error']:+.1%}), stall {row['measured_stall']:.1%}, predicted {row['predicted_stall']:.1%}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "case",
        "step, ms",
        "predicted",
        "error",
        "stall",
        "predicted",
        "points",
        "bound by",
        "load",
    )
    body = [
        (
            r["case"], f"{r['measured_s'] * 1e3:.1f}", f"{r['predicted_s'] * 1e3:.1f}", f"{r['error']:+.1%}",
            f"{r['measured_stall']:.1%}", f"{r['predicted_stall']:.1%}", f"{r['points']:+.1f}", r["bound"],
            f"{r['load']:.1f}",
        )
        for r in rows
    ]  # fmt: skip
    return grid([head, *body])


if __name__ == "__main__":
    sys.exit(main())
