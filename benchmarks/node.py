"""The node daemon's benchmark: what it costs one client, what it gives many, what it reads.

    python -m benchmarks.node            # a minute or two
    python -m benchmarks.node --quick    # small and short: does it work?

Each client is a process. Loaders of the process plane and of the node plane run in turn, so that both
see the same machine; the ratio of medians counts. Every batch is checked by its stamps. Raw figures go
to benchmarks/results/node-DATE.json.
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
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import headrace as hr
from benchmarks import datasets, machine, processes, tables
from benchmarks.check import Checker, FlatBatch
from benchmarks.targets import Target
from headrace.node.daemon import ask_status, start, stop
from headrace.runtime import RuntimeFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = ROOT / "benchmarks/results"
PLANES = ("process", "node")
TIMEOUT_S = 600

WARM_EPOCHS = 2
"""The first brings samples into memory, the second maps it; both planes have as many."""


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    dir: Path
    scale: float
    rounds: int
    epochs: int
    clients: int


# -- a client: a process of its own ----------------------------------------------------------------


def client(given: dict[str, Any]) -> None:
    """Read epochs and print a line of JSON; the first ones warm up and are not counted."""
    data = datasets.data_set(given["data"], given["scale"])
    counted, seconds, cpu_s, batches = 0, 0.0, 0.0, 0
    daemon_s = 0.0
    with hr.open(given["store"]) as store:
        loader = hr.loader(
            store, given["batch"], seed=given["seed"], rank=0, world_size=1,
            plane=given["plane"], tune=False,
        )  # fmt: skip
        warm = given["warm_epochs"]
        for epoch in range(warm + given["epochs"]):
            if epoch == warm:
                _wait_for(given["begin"])
            checker = Checker(data.samples, every=8)
            began, cpu, daemons = time.perf_counter(), time.process_time(), _cpu_s(given["daemon"])
            for batch in loader:
                ends = batch.offsets + batch.lengths
                checker.add(FlatBatch(batch.data, batch.offsets, ends, batch.labels))
                batches += epoch >= warm
            if epoch >= warm:
                seconds += time.perf_counter() - began
                cpu_s += time.process_time() - cpu
                daemon_s += _cpu_s(given["daemon"]) - daemons
                counted += checker.delivered
            checker.finish(complete=True)
        found = {
            "samples_per_s": counted / seconds, "us_per_batch": 1e6 * seconds / batches,
            "cpu_s": cpu_s, "batches": batches, "daemon_cpu_s": daemon_s,
        }  # fmt: skip
        for stage in loader.stages:
            if stage.name == "node":
                found |= asdict(stage.report())
        loader.close()
    print(json.dumps(found), flush=True)


def _wait_for(path: str) -> None:
    """Clients that are compared begin together: when the file appears."""
    Path(f"{path}.{os.getpid()}").touch()
    while path and not Path(path).exists():
        time.sleep(0.002)


def run_clients(folder: RuntimeFolder, count: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Run clients at the same time."""
    here = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    begin = here / "begin"
    started = []
    for k in range(count):
        own = {**given, "begin": str(begin), "seed": given.get("seed", k)}
        environment = os.environ | {
            "HEADRACE_RUNTIME_DIR": str(folder.path), "HEADRACE_JOB": f"job-{k}",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.node", "--client", json.dumps(own)]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        )
    try:
        while len(list(here.glob("begin.*"))) < count:
            if any(process.poll() for process in started):
                raise RuntimeError("a client failed")
            time.sleep(0.01)
        begin.touch()
        outs = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        return [json.loads(out) for out in outs]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        shutil.rmtree(here)


# -- the data and the daemon -----------------------------------------------------------------------


def ensure_store(options: Options, name: datasets.Name) -> Path:
    """The data set, packed."""
    data = datasets.data_set(name, _scale(options, name))
    path = options.dir / f"{data.folder}-node.hr"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        hr.pack(
            (
                (datasets.file_name(i), datasets.payload(data, i), datasets.label(i))
                for i in range(data.samples)
            ),
            path,
        )
    return path


def _scale(options: Options, name: datasets.Name) -> float:
    return options.scale if name == "A" else options.scale / 4


def warm(store: Path) -> None:
    """Read the store into the page cache: what a process finds hot there, the daemon has in memory."""
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                while f.read(16 << 20):
                    pass


def forget(store: Path) -> None:
    """Drop the store's pages, and nobody else's."""
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def daemon(ram_bytes: int) -> Iterator[RuntimeFolder]:
    """A daemon of our own."""
    here = Path(tempfile.mkdtemp(prefix="hr-bench-"))
    folder = RuntimeFolder(here / "rt")
    start(folder, ["--ram", str(ram_bytes)])
    try:
        yield folder
    finally:
        stop(folder, force=True)
        shutil.rmtree(here)


# -- what is measured ------------------------------------------------------------------------------


def hot(options: Options, name: datasets.Name, clients: int, batch: int) -> dict[str, Any]:
    """Both planes in turn over data that is in memory."""
    store = ensure_store(options, name)
    found: dict[str, Any] = {plane: [] for plane in PLANES}
    with hr.open(store) as opened:
        ram = 2 * opened.nbytes + (64 << 20)
    given = {
        "data": name, "scale": _scale(options, name), "store": str(store), "batch": batch,
        "epochs": options.epochs, "warm_epochs": WARM_EPOCHS,
    }  # fmt: skip
    with daemon(ram) as folder:
        given["daemon"] = ask_status(folder)["pid"]
        for _ in range(options.rounds):
            for plane in PLANES:
                warm(store)
                runs = run_clients(folder, clients, {**given, "plane": plane})
                # The clients overlap: each sees what the daemon did for all while it ran.
                daemons = max(run["daemon_cpu_s"] for run in runs) if plane == "node" else 0.0
                cpu_s = sum(run["cpu_s"] for run in runs) + daemons
                batches = sum(run["batches"] for run in runs)
                total = sum(run["samples_per_s"] for run in runs)
                per_batch = statistics.median(run["us_per_batch"] for run in runs)
                figures = {
                    "samples_per_s": total, "us_per_batch": per_batch,
                    "cpu_us_per_batch": 1e6 * cpu_s / batches,
                }  # fmt: skip
                found[plane].append(figures)
                if plane == "node":
                    for figure in ("direct_batches", "gathered_batches"):
                        more = sum(run[figure] for run in runs)
                        found[figure] = found.get(figure, 0) + more
    for figure in ("samples_per_s", "us_per_batch", "cpu_us_per_batch"):
        median = {p: statistics.median(run[figure] for run in found[p]) for p in PLANES}
        found[figure] = median
    return found


def cold(options: Options, *, same_seed: bool) -> dict[str, Any]:
    """Two jobs at once over data that nobody holds: what is read from the source."""
    store = ensure_store(options, "A")
    forget(store)
    given = {
        "data": "A", "scale": options.scale, "store": str(store), "batch": 256, "epochs": 1, "warm_epochs": 0,
        "plane": "node",
    }  # fmt: skip
    if same_seed:
        given["seed"] = 1
    with hr.open(store) as opened:
        nbytes = opened.nbytes
    with daemon(2 * nbytes + (64 << 20)) as folder:
        given["daemon"] = ask_status(folder)["pid"]
        runs = run_clients(folder, 2, given)
        (data,) = ask_status(folder)["datasets"]
    return {
        "data_bytes": nbytes,
        "source_bytes": data["source_bytes"],
        "ratio": data["source_bytes"] / nbytes,
        "sample_ratio": data["source_samples_bytes"] / nbytes,
        "left_samples": data["left_samples"],
        "direct_batches": sum(run["direct_batches"] for run in runs),
        "samples_per_s": sum(run["samples_per_s"] for run in runs),
    }


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _judge(name: str, required: str, value: float, good: bool, note: str = "") -> Target:
    return Target(name, required, f"{value:.2f}", "met" if good else "NOT MET", note)


def measure(options: Options) -> tuple[list[list[str]], list[Target], dict[str, Any]]:
    """Everything: the table's rows, the targets, the raw figures."""
    rows = [
        [
            "hot",
            "process plane, samples/s",
            "node plane",
            "ratio",
            "CPU us per batch",
            "gathered",
            "direct",
        ]
    ]
    raw: dict[str, Any] = {}
    ratios = {}
    cases = {
        "1 client, 110 kB": ("A", 1, 256),
        f"{options.clients} clients, 110 kB": ("A", options.clients, 256),
        "1 client, 0.5-4 kB": ("B", 1, 256),
    }
    for label, (name, clients, batch) in cases.items():
        found = raw[label] = hot(options, name, clients, batch)  # type: ignore[arg-type]
        ours, theirs = found["samples_per_s"]["node"], found["samples_per_s"]["process"]
        ratios[label] = ours / theirs
        counts = [f"{found[figure]:,}" for figure in ("gathered_batches", "direct_batches")]
        cpu = found["cpu_us_per_batch"]
        both = f"{cpu['process']:,.0f} / {cpu['node']:,.0f}"
        rows.append(
            [label, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.2f}", both, *counts]
        )
    one, many, tiny = ratios
    per_batch = raw[tiny]["us_per_batch"]
    added = per_batch["node"] - per_batch["process"]
    targets = [
        _judge(f"hot, {one}", ">= 0.8 x", ratios[one], ratios[one] >= 0.8),
        _judge(f"hot, {many}", ">= 0.9 x", ratios[many], ratios[many] >= 0.9),
        _judge(
            "added per batch of 256 tiny samples", "<= 25 us", added, added <= 25,
            f"{per_batch['node']:.0f} against {per_batch['process']:.0f} us",
        ),
    ]  # fmt: skip
    for label, same in (("other seeds", False), ("in step", True)):
        found = raw[f"cold, {label}"] = cold(options, same_seed=same)
        note = f"{found['sample_ratio']:.3f} in samples; {found['direct_batches']} direct batches"
        targets.append(
            _judge(
                f"two jobs, cold, {label}: source bytes / data",
                "<= 1.05 x",
                found["ratio"],
                found["ratio"] <= 1.05,
                note,
            )
        )
    return rows, targets, raw


@processes.leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="small and short: does everything work?")
    add("--dir", type=Path, default=Path("build/bench"), help="work folder for data sets")
    add("--json", type=Path, help="where the raw figures go")
    add("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(json.loads(given.client))
        return 0
    options = Options(given.dir.resolve(), scale=0.2, rounds=3, epochs=4, clients=8)
    if given.quick:
        options = Options(given.dir.resolve(), scale=0.02, rounds=1, epochs=2, clients=4)
    load = os.getloadavg()[0]
    rows, targets, raw = measure(options)
    print(f"load before {load:.1f}\n\n{tables.grid(rows)}\n\n{tables.targets_table(targets)}")
    date = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")
    path = given.json or RESULTS / f"node-{date}.json"
    document = {
        "machine": machine.describe(Path.cwd()), "date": date, "quick": given.quick, **raw,
        "targets": [asdict(target) for target in targets],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(f"\nraw results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
