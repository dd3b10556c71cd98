"""AU with 1, 2, 4 and 8 MPI ranks beside as many accelerators of one process, and what a stopped rank costs.

    python -m benchmarks.au_ranks            # three rounds, about nine minutes
    python -m benchmarks.au_ranks --quick    # one round of 1 and 2 ranks: does it work?
    python -m benchmarks.au_ranks --page     # also the table of docs/howto/benchmark.md

CosmoFlow's batches and step time of an H100 (3.5 ms), 256 steps an epoch for each accelerator, from the page
cache and on simulated storage. Ranks and the one process take turns, so that a busy machine is busy for both.
MPI is Open MPI's `mpirun`, and any other that `--mpirun` names. Goal: within 2 points of AU. At last one of two
ranks is stopped for some seconds (SIGSTOP): harness must have them, and waiting for data none. Raw figures:
benchmarks/results/au_ranks-DATE.json.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402 - see above
from benchmarks.processes import leaving_nothing  # noqa: E402 - see above
from benchmarks.tables import grid, markdown, onto_page  # noqa: E402 - see above

RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/howto/benchmark.md"
BENCH = [sys.executable, "-c", "from headrace.cli import main; main()", "bench"]
STEPS, SAMPLE_BYTES = 256, 65_536
GOAL_POINTS = 2.0
STOPPED_S = 4.0
STORAGES = {"page cache": "", "simulated Lustre": "lustre"}
EPOCHS = {"page cache": 2, "simulated Lustre": 12}
"""An epoch takes a second: with delays drawn at random its AU differs by five points from the next one's."""

Row = dict[str, Any]


def workload(
    data: Path, accelerators: int, *, epochs: int, step_s: float | None = None
) -> list[str]:
    """The words of a run with as many steps whatever the accelerators."""
    keys = {
        "dataset.num_files_train": STEPS * accelerators, "dataset.record_length_bytes": SAMPLE_BYTES,
        "dataset.record_length_bytes_stdev": 0, "dataset.data_folder": data, "train.epochs": epochs,
        **({} if step_s is None else {"train.computation_time": step_s}),
    }  # fmt: skip
    return [
        "workload=cosmoflow_h100",
        *(f"++workload.{key}={value}" for key, value in keys.items()),
    ]


def call(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(words[:14])} ... failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def by_mpi(mpirun: str, ranks: int) -> list[str]:
    """An `mpirun` that binds nothing and runs more ranks than there are processors."""
    about = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout
    open_mpi = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in about else []
    if open_mpi and os.geteuid() == 0:
        open_mpi.append("--allow-run-as-root")
    return [mpirun, *open_mpi, "-n", str(ranks)]


def figures(out: Path) -> Row:
    """What a run's summary says of AU, and where the time went."""
    summary = json.loads((out / "summary.json").read_text())
    own, time_of = summary["headrace"], summary["headrace"]["time"]
    shares = {
        name: 100 * time_of[f"{name}_s"] / time_of["total_s"]
        for name in ("compute", "wait", "barrier", "harness")
    }
    late = {name: own["late_s"][name] * 1e3 for name in ("p50", "p99")}
    return {
        "au": summary["metric"]["train_au_percentage"], "shares": shares, "late_ms": late,
        "bound": own["bound"], "total_s": time_of["total_s"], "longest_wait_s": own["wait_s"]["max"],
    }  # fmt: skip


def measured(
    work: Path, launch: str, accelerators: int, storage: str, *, epochs: int, number: int
) -> Row:
    """One run of a round; `launch`: the program that starts ranks, or `process`."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    words = [
        *workload(work / f"data-{accelerators}", accelerators, epochs=epochs),
        f"++hydra.run.dir={out}",
    ]
    run = [*BENCH, "run", *words]
    if STORAGES[storage]:  # other delays in each round, and other than those of its ranks
        run += ["--simulate", f"{STORAGES[storage]}@{1000 * number}"]
    load = os.getloadavg()[0]
    if launch == "process":
        call([*run, "-n", str(accelerators)])
    else:
        call([*by_mpi(launch, accelerators), *run])
    row = {"storage": storage, "launch": launch, "accelerators": accelerators, "load": load}
    return row | figures(out)


def _descendants(pid: int) -> list[int]:
    pids: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pids += [int(child), *_descendants(int(child))]
    return pids


def stopped(work: Path, mpirun: str) -> Row:
    """One of two ranks stands still in the middle of its training."""
    out = work / "stopped"
    words = [*workload(work / "data-2", 2, epochs=1, step_s=0.05), f"++hydra.run.dir={out}"]
    launch = [*by_mpi(mpirun, 2), *BENCH, "run", *words]
    with subprocess.Popen(launch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        time.sleep(6)  # of 13 s of training and two that it takes to begin
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _descendants(run.pid)}
        ranks = [pid for pid, command in commands.items() if b"++hydra.run.dir" in command]
        victim = max(pid for pid in ranks if b"mpirun" not in commands[pid].split(b"\0")[0])
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(victim, signal.SIGCONT)
        if run.wait(timeout=120):
            sys.exit(f"the run whose rank was stopped ended with {run.returncode}")
    return {"stopped_s": STOPPED_S} | figures(out)


def cells(rows: list[Row], launches: list[str]) -> list[tuple[str, ...]]:
    """A line for each storage and number; AU is the median of all epochs of all rounds."""
    names = ["one process", *(Path(launch).name for launch in launches[1:])]
    head = ("storage", "accelerators", *names, "farthest apart", "late p50, p99 (ms)")
    body = []
    for storage in STORAGES:
        for n in sorted({row["accelerators"] for row in rows}):
            of = [row for row in rows if row["storage"] == storage and row["accelerators"] == n]
            mine = {launch: [r for r in of if r["launch"] == launch] for launch in launches}
            if not all(mine.values()):
                continue
            medians = [au_of(some) for some in mine.values()]
            late = [statistics.median(r["late_ms"][p] for r in of) for p in ("p50", "p99")]
            body.append((
                storage, str(n), *(f"{au:.2f} %" for au in medians),
                f"{max(medians) - min(medians):.2f}", ", ".join(f"{ms:.2f}" for ms in late),
            ))  # fmt: skip
    return [head, *body]


def au_of(rows: list[Row]) -> float:
    return float(statistics.median(au for row in rows for au in row["au"]))


def about_stopped(row: Row) -> str:
    shares = row["shares"]
    return (
        f"One of two ranks stopped for {row['stopped_s']:.0f} of {row['total_s'] / 2:.1f} s: harness "
        f"{shares['harness']:.1f} %, waiting for data {shares['wait']:.1f} %, longest wait "
        f"{row['longest_wait_s'] * 1e3:.1f} ms; bound by {row['bound']}."
    )


def write_page(table: list[tuple[str, ...]], rows: list[Row], stop: Row) -> None:
    loads, day = [row["load"] for row in rows], dt.datetime.now(dt.UTC).date().isoformat()
    rounds = len({row["round"] for row in rows})
    load = f"load average {min(loads):.1f} to {max(loads):.1f} when each began"
    of = f"Medians over the epochs of {rounds} rounds on {os.cpu_count()} processors, {day}"
    about = f"{of}; {load}. {about_stopped(stop)}"
    onto_page(PAGE, "ranks", f"{markdown(table)}\n\n{about}")


@leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--mpirun", nargs="+", default=["mpirun"], help="one, or several to compare"
    )
    options = parser.parse_args()
    rounds, ranks = (1, [1, 2]) if options.quick else (options.rounds, options.ranks)
    launches = ["process", *options.mpirun]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="au-ranks-", dir="/var/tmp") as name:
        work = Path(name)
        about = machine.describe(work)
        for n in sorted({*ranks, 2}):
            words = workload(work / f"data-{n}", n, epochs=1)
            call([*BENCH, "generate", *words, f"++hydra.run.dir={work}/generated"])
        for number in range(rounds):
            for storage in STORAGES:
                for n in ranks:
                    for launch in launches:
                        epochs = 1 if options.quick else EPOCHS[storage]
                        row = measured(work, launch, n, storage, epochs=epochs, number=number)
                        rows.append(row | {"round": number})
            print(f"round {number + 1} of {rounds}: load {os.getloadavg()[0]:.1f}", flush=True)
        stop = stopped(work, options.mpirun[0])
    table = cells(rows, launches)
    print(grid(table))
    print(about_stopped(stop))
    if not options.quick:
        day = dt.datetime.now(dt.UTC).date().isoformat()
        path = RESULTS / f"au_ranks-{day}.json"
        document = {
            "date": day,
            "machine": about,
            "goal_points": GOAL_POINTS,
            "runs": [row | {"launch": Path(row["launch"]).name} for row in rows],
            "stopped": stop,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {path.relative_to(ROOT)}")
    if options.page:
        write_page(table, rows, stop)
    apart = max(float(row[-2]) for row in table[1:])
    fair = stop["shares"]["harness"] > 10 * stop["shares"]["wait"]
    return 0 if apart <= GOAL_POINTS and fair else 1


if __name__ == "__main__":
    sys.exit(main())
