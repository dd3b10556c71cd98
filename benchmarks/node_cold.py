"""The node daemon beside a process of its own on cold data: real disk, NFS, Lustre and S3, 1, 2 and 8 clients.

    python -m benchmarks.node_cold                       # about ten minutes
    python -m benchmarks.node_cold --storages s3 --clients 1 --rounds 1
    python -m benchmarks.node_cold --steps               # latency x 10, and back

The clients are the ranks of one job, so that both planes read each sample once. All are tuned. Every client,
and the daemon, is forked from here: a simulated storage's queues are shared by fork, so that eight processes
wait for one server, as they would. Rounds of both planes alternate, and the median of the rounds' ratios
counts. Every batch is checked.

`--steps`: consumers that take a part of what the storage gives read it over and over, nothing is kept, and the
storage's latency is multiplied by ten for a while: how long consumers wait, and how many reads are in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace as hr
from benchmarks import datasets, processes, tables
from benchmarks.check import Checker, FlatBatch
from benchmarks.node import PLANES, ensure_store, forget, warm
from benchmarks.node import Options as StoreOptions
from headrace.config import ReaderOptions
from headrace.node.daemon import NodeOptions, ask_status, run
from headrace.node.link import LinkLost
from headrace.runtime import RuntimeFolder
from headrace.testing import SlowVolume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

STORAGES = ("disk", "disk, nothing kept", "nfs", "lustre", "s3")
"""A process of its own keeps nothing of a disk's; the daemon does, unless it is told not to."""
BATCH = 32
SCALE = 0.2
SLOWER = 10.0
"""Factor of the latency while it is slow."""
RECOVERED = 0.95
"""Share of the rate that consumers ask for from which on they are served again."""
BIN_S = 0.25

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Client:
    """What a client does.

    Attributes:
        plane: who reads for it.
        rank: of `ranks`.
        seconds: reads epoch after epoch for so long; 0: one epoch.
        work_s: time that the consumer takes for a batch.
        keeps: whether samples may be kept in memory.
    """

    store: Path
    plane: str
    rank: int
    ranks: int
    batch: int = BATCH
    seconds: float = 0.0
    work_s: float = 0.0
    keeps: bool = True


def _client(client: Client, volume: SlowVolume | None, ready: Connection) -> None:
    """A process: says that it is ready, begins when it is told to, and sends what it saw."""
    data = datasets.data_set("A", SCALE)
    options: dict[str, Any] = {"plane": client.plane}
    if client.plane == "process":
        options |= {"simulate": volume, "ram_bytes": None if client.keeps else 0}
    loader = hr.loader(
        client.store,
        client.batch,
        seed=1,
        rank=client.rank,
        world_size=client.ranks,
        tail="exact",
        **options,
    )
    checker = Checker(data.samples, every=8)
    arrivals, samples = [], 0
    ready.send("ready")
    began = ready.recv()
    due = time.monotonic()
    while True:
        for batch in loader:
            arrivals.append(time.monotonic() - began)
            samples += len(batch)
            checker.add(
                FlatBatch(batch.data, batch.offsets, batch.offsets + batch.lengths, batch.labels)
            )
            if client.work_s:
                due = max(due, time.monotonic() - client.work_s) + client.work_s
                time.sleep(max(0.0, due - time.monotonic()))
            if client.seconds and arrivals[-1] > client.seconds:
                break
        if arrivals[-1] >= client.seconds:
            break
        checker = Checker(data.samples, every=8)
    stages = loader.stats.stages
    report: dict[str, Any] = {"seconds": arrivals[-1], "samples": samples, "arrivals": arrivals}
    report["in_flight_s"] = stages["prefetch"].in_flight_s
    if client.plane == "node":
        node = next(stage for stage in loader.stages if stage.name == "node").report()
        report["direct"] = node.direct_batches
    ready.send(report)
    loader.close()


@contextlib.contextmanager
def forked_daemon(volume: SlowVolume | None, ram_bytes: int) -> Iterator[RuntimeFolder]:
    """A daemon, forked from here, that reads from the simulated storage."""
    here = Path(tempfile.mkdtemp(prefix="hr-bench-"))
    folder = RuntimeFolder(here / "rt")
    options = NodeOptions(ram_bytes=ram_bytes, reader=ReaderOptions(simulate=volume))
    process = _fork.Process(target=run, args=(folder, options))
    process.start()
    try:
        while True:
            with contextlib.suppress(FileNotFoundError, LinkLost):
                ask_status(folder)
                break
            time.sleep(0.02)
        yield folder
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join()
        shutil.rmtree(here)


def _run(
    clients: Sequence[Client],
    volume: SlowVolume | None,
    meanwhile: Callable[[float], None] | None = None,
) -> list[dict[str, Any]]:
    """Run clients at the same time; `meanwhile` is called with the moment at which they begin."""
    pipes = [_fork.Pipe() for _ in clients]
    processes = [
        _fork.Process(target=_client, args=(client, volume, pipe[1]))
        for client, pipe in zip(clients, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        for mine, _ in pipes:
            mine.recv()
        began = time.monotonic()
        for mine, _ in pipes:
            mine.send(began)
        if meanwhile is not None:
            meanwhile(began)
        return [mine.recv() for mine, _ in pipes]
    finally:
        for process in processes:
            if process.is_alive() and process.exitcode is None:
                process.join(5.0)
                process.kill()
            process.join()


@contextlib.contextmanager
def _plane(plane: str, volume: SlowVolume | None, ram_bytes: int) -> Iterator[RuntimeFolder | None]:
    """Who reads: a daemon, for the node plane."""
    if plane == "process":
        yield None
        return
    with forked_daemon(volume, ram_bytes) as folder:
        os.environ["HEADRACE_RUNTIME_DIR"] = str(folder.path)
        yield folder


def _cold(store: Path, storage: str, ranks: int, plane: str) -> dict[str, float]:
    """One epoch of data that nobody holds."""
    volume = None if storage.startswith("disk") else SlowVolume(storage)
    warm(store) if volume else forget(store)
    with hr.open(store) as opened:
        ram = 0 if storage.endswith("nothing kept") else 2 * opened.nbytes + (64 << 20)
    with _plane(plane, volume, ram) as folder:
        reports = _run([Client(store, plane, rank, ranks) for rank in range(ranks)], volume)
        seconds = max(report["seconds"] for report in reports)
        in_flight_s = sum(report["in_flight_s"] for report in reports)
        allowed = math.nan
        if folder is not None:
            (data,) = ask_status(folder)["datasets"]
            in_flight_s, allowed = data["reads"]["seconds"], data["reads"]["in_flight_max"]
    return {
        "samples_per_s": sum(report["samples"] for report in reports) / seconds,
        "first_s": max(report["arrivals"][0] for report in reports),
        "in_flight": in_flight_s / seconds,
        "allowed": allowed,
        "direct": sum(report.get("direct", 0) for report in reports),
    }


def cold_rows(
    store: Path, storages: Sequence[str], clients: Sequence[int], rounds: int
) -> tuple[list[list[str]], dict[str, Any]]:
    """The table, and the raw figures."""
    rows = [
        [
            "cold",
            "clients",
            "process plane, samples/s",
            "node plane",
            "ratio",
            "reads in flight",
            "allowed",
        ]
    ]
    raw: dict[str, Any] = {}
    for storage in storages:
        for ranks in clients:
            runs: dict[str, list[dict[str, float]]] = {plane: [] for plane in PLANES}
            for at in range(rounds):
                for plane in PLANES if at % 2 == 0 else reversed(PLANES):
                    runs[plane].append(_cold(store, storage, ranks, plane))
            rate, held = (
                {p: statistics.median(r[figure] for r in runs[p]) for p in PLANES}
                for figure in ("samples_per_s", "in_flight")
            )
            pairs = zip(*(runs[plane] for plane in PLANES), strict=True)
            ratio = statistics.median(b["samples_per_s"] / a["samples_per_s"] for a, b in pairs)
            raw[f"{storage}, {ranks}"] = {"ratio": ratio, **runs}
            label = storage if storage.startswith("disk") else f"simulated {storage}"
            rows.append([
                label, str(ranks), f"{rate['process']:,.0f}", f"{rate['node']:,.0f}", f"{ratio:.2f}",
                f"{held['process']:.0f} / {held['node']:.0f}", f"{runs['node'][-1]['allowed']:.0f}",
            ])  # fmt: skip
            print(" | ".join(rows[-1]), flush=True)
    return rows, raw


def steps(
    store: Path, storage: str, ranks: int, plane: str, rate: float, phase_s: float
) -> dict[str, Any]:
    """Consumers that take `rate` samples/s in all; the latency x 10 in the second of three phases."""
    volume = SlowVolume(storage)
    warm(store)
    work_s = BATCH * ranks / rate
    clients = [
        Client(store, plane, rank, ranks, seconds=3 * phase_s, work_s=work_s, keeps=False)
        for rank in range(ranks)
    ]
    seen: list[tuple[float, int]] = []

    def meanwhile(began: float) -> None:
        turns = [(phase_s, SLOWER), (2 * phase_s, 1.0)]
        while (now := time.monotonic() - began) < 3 * phase_s:
            if turns and now >= turns[0][0]:
                volume.scale_latency(turns.pop(0)[1])
            if folder is not None:
                reads = [data["reads"] for data in ask_status(folder)["datasets"]]
                seen.extend((now, each["in_flight_max"]) for each in reads)
            time.sleep(0.1)

    with _plane(plane, volume, 0) as folder:
        reports = _run(clients, volume, meanwhile)
    arrivals = sorted(t for report in reports for t in report["arrivals"])
    bins = [0] * math.ceil(3 * phase_s / BIN_S)
    for t in arrivals:
        bins[min(len(bins) - 1, int(t / BIN_S))] += BATCH
    rates = [count / BIN_S for count in bins]
    return {
        "rate": rate,
        "rates": rates,
        "recovered_s": [_recovered(rates, rate, at, at + phase_s) for at in (phase_s, 2 * phase_s)],
        "allowed": [_last_before(seen, at * phase_s) for at in (1, 2, 3)],
        "direct": sum(report.get("direct", 0) for report in reports),
    }


def _last_before(seen: Sequence[tuple[float, int]], moment: float) -> int:
    return next((allowed for t, allowed in reversed(seen) if t < moment), 0)


def _recovered(rates: Sequence[float], wanted: float, begin_s: float, end_s: float) -> float:
    """Seconds after `begin_s` from which a second's rate is what was asked for; `inf`: not before `end_s`."""
    each = round(1.0 / BIN_S)
    for at in range(round(begin_s / BIN_S), round(end_s / BIN_S) - each + 1):
        if statistics.mean(rates[at : at + each]) >= RECOVERED * wanted:
            return at * BIN_S - begin_s
    return math.inf


@processes.leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.node_cold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, default=Path("build/bench"), help="work folder for data sets")
    add("--storages", nargs="+", choices=STORAGES, default=STORAGES)
    add("--clients", nargs="+", type=int, default=(1, 2, 8))
    add("--rounds", type=int, default=3)
    add("--steps", action="store_true", help="latency x 10, and back")
    add("--planes", nargs="+", choices=PLANES, default=PLANES, help="for --steps")
    add("--rate", type=float, default=1500.0, help="samples/s that consumers take in all (--steps)")
    add("--phase", type=float, default=12.0, help="seconds of each phase (--steps)")
    add("--json", type=Path, help="where the raw figures go")
    given = parser.parse_args()
    store = ensure_store(StoreOptions(given.dir.resolve(), SCALE, 1, 1, 1), "A")
    load = os.getloadavg()[0]
    raw: dict[str, Any] = {"load": load}
    if given.steps:
        for storage in given.storages:
            for ranks in given.clients:
                for plane in given.planes:
                    found = steps(store, storage, ranks, plane, given.rate, given.phase)
                    raw[f"steps, {storage}, {ranks}, {plane}"] = found
                    shown = {k: v for k, v in found.items() if k != "rates"}
                    print(f"{storage}, {ranks} clients, {plane}: {shown}", flush=True)
    else:
        rows, cold = cold_rows(store, given.storages, given.clients, given.rounds)
        raw |= cold
        print(f"\nload before {load:.1f}\n\n{tables.grid(rows)}")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(raw, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
