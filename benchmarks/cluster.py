"""The cluster's benchmark: what submitting costs on top of sbatch, and how fast a large cluster is read.

    python -m benchmarks.cluster            # a minute
    python -m benchmarks.cluster --quick    # fewer rounds, nothing is written

Submitting: a real Slurm of four nodes on this machine (tests/cluster/slurm.py); sbatch alone and the executor
take turns. Reading: what the commands of 5,000 nodes with 50,000 jobs would print, made from a seed: a
simulation, labelled so. Raw figures go to benchmarks/results/cluster-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "tests"))

from benchmarks import machine, processes
from cluster.simulated import simulated_cluster
from cluster.slurm import Slurm, missing
from headrace.cluster.executor import Submission
from headrace.cluster.local.executor import LocalExecutor
from headrace.cluster.slurm.commands import Commands
from headrace.cluster.slurm.executor import SlurmExecutor
from headrace.cluster.slurm.scontrol import read_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = ROOT / "benchmarks/results"
SCRIPT = b"#!/bin/sh\ntrue\n"

# A whole process, as a command line is: imports, and one submission.
PROCESS = """
import sys
from headrace.cluster.executor import Submission
from headrace.cluster.slurm.executor import SlurmExecutor
print(SlurmExecutor().submit(Submission(sys.stdin.buffer.read(), ("--hold",))))
"""


@processes.leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rounds = 10 if given.quick else 50
    results: dict[str, Any] = {
        "benchmark": "cluster",
        "machine": machine.describe(Path(tempfile.gettempdir())),
        "load_before": os.getloadavg(),
        "submit": submitting(rounds) if not missing() else f"no {', '.join(missing())}",
        "local": local(max(5, rounds // 5)),
        "snapshot": reading(3 if given.quick else 7),
        "load_after": os.getloadavg(),
    }
    if not given.quick:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"cluster-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(path)
    for name in ("submit", "local", "snapshot"):
        print(f"\n{name}:")
        for key, value in results[name].items() if isinstance(results[name], dict) else ():
            print(f"  {key:28} {value if not isinstance(value, float) else f'{value:.4f}'}")


def submitting(rounds: int) -> dict[str, Any]:
    """Seconds of one submission: sbatch alone, the executor's call, and a process that makes it; in turns."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-slurm-") as folder,
        Slurm(Path(folder) / "s") as slurm,
    ):
        environment = slurm.environment
        executor = SlurmExecutor(Commands(environment=environment))
        home = str(slurm.folder)

        def sbatch() -> None:
            subprocess.run(
                ["sbatch", "--parsable", "--hold"], input=SCRIPT, check=True, env=environment, cwd=home,
                capture_output=True,
            )  # fmt: skip

        def call() -> None:
            executor.submit(Submission(SCRIPT, ("--hold",), directory=slurm.folder))

        def process() -> None:
            subprocess.run(
                [sys.executable, "-c", PROCESS], input=SCRIPT, check=True, env=environment, cwd=home,
                capture_output=True,
            )  # fmt: skip

        taken = in_turns({"sbatch": sbatch, "call": call, "process": process}, rounds)
        snapshot = in_turns(
            {"snapshot": lambda: read_snapshot(Commands(environment=environment))}, 5
        )
    medians = {f"{name}_median_s": statistics.median(times) for name, times in taken.items()}
    return {
        "rounds": rounds,
        **medians,
        "call_adds_ms": 1e3 * (medians["call_median_s"] - medians["sbatch_median_s"]),
        "process_adds_ms": 1e3 * (medians["process_median_s"] - medians["sbatch_median_s"]),
        "read_snapshot_median_s": statistics.median(snapshot["snapshot"]),
        "seconds": {**taken, **snapshot},
    }


def local(rounds: int) -> dict[str, Any]:
    """Seconds to submit a job to this machine, and until it is over."""
    submits, ends = [], []
    with tempfile.TemporaryDirectory(prefix="headrace-jobs-") as folder:
        executor = LocalExecutor(Path(folder) / "jobs")
        for _ in range(rounds):
            began = time.perf_counter()
            job = executor.submit(Submission(SCRIPT, directory=Path(folder)))
            submits.append(time.perf_counter() - began)
            executor.wait([job], 60)
            ends.append(time.perf_counter() - began)
        time.sleep(0.5)  # the last keeper goes
    return {
        "rounds": rounds, "submit_median_s": statistics.median(submits),
        "submit_to_end_median_s": statistics.median(ends), "seconds": {"submit": submits, "end": ends},
    }  # fmt: skip


def reading(rounds: int) -> dict[str, Any]:
    """Seconds to make a snapshot of what a large cluster's commands would print."""
    recording = simulated_cluster()
    walls, cpus = [], []
    for _ in range(rounds):
        began, cpu = time.perf_counter(), time.process_time()
        snapshot = recording.read()
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
        nodes, jobs = len(snapshot.nodes), len(snapshot.jobs)
        del snapshot
    return {
        "label": "simulation: text made from a seed, no Slurm of this size was asked",
        "nodes": nodes, "jobs": jobs, "megabytes": (len(recording.jobs) + len(recording.nodes)) / 1e6,
        "wall_min_s": min(walls), "wall_median_s": statistics.median(walls),
        "cpu_min_s": min(cpus), "cpu_median_s": statistics.median(cpus),
        "seconds": {"wall": walls, "cpu": cpus},
    }  # fmt: skip


def in_turns(what: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call; one round of all before the next, after one that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in what}
    for i in range(rounds + 1):
        for name, call in what.items():
            began = time.perf_counter()
            call()
            if i:
                taken[name].append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    main()
