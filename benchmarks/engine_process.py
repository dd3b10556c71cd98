"""The process that an engine under test lives in; started by `run_one`, never by hand.

It imports, says `ready`, waits for `go` while its parent empties or fills the page cache, opens,
delivers one epoch or as much of it as the caps allow, says `measured`, waits while its parent
takes the last memory sample, makes up its accounts and reports.

Messages are JSON lines on a pipe of their own: libraries print what they like on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import datasets, loaders
from benchmarks.check import Checker, WrongDeliveryError
from benchmarks.processes import cpu_seconds_so_far, machine_cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.datasets import DataSet
    from benchmarks.loaders import Loader


@dataclass(frozen=True, slots=True)
class Caps:
    """A run ends with the epoch, or at the first batch that reaches one of these."""

    samples: int
    seconds: float
    check_every: int = 1
    """Which samples of a batch are looked at: see `Checker`."""


@dataclass(slots=True)
class Delivered:
    """What one engine delivered, and what it took."""

    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    open_s: float = 0.0
    first_batch_s: float = 0.0
    cpu_s: float = 0.0
    machine_cpu_s: float = 0.0
    complete: bool = False
    wrong: str | None = None
    facts: dict[str, object] = field(default_factory=dict)


def deliver(
    loader: Loader,
    data: DataSet,
    path: Path,
    seed: int,
    caps: Caps,
    measured: Callable[[], None] = lambda: None,
) -> Delivered:
    """Opens the data set, takes batches until the epoch or a cap ends, and checks every sample.

    `measured` is called before the accounts are made up, which takes memory of its own.
    """
    result = Delivered()
    started = time.perf_counter()
    loader.open(data, path)
    result.open_s = time.perf_counter() - started
    checker = Checker(data.samples, caps.check_every)
    try:
        _timed(loader, seed, caps, checker, result)
        measured()
        checker.finish(complete=result.complete)
    except WrongDeliveryError as error:
        result.wrong = str(error)
    result.samples = checker.delivered
    result.bytes = checker.bytes
    result.facts = loader.facts()
    return result


def _timed(loader: Loader, seed: int, caps: Caps, checker: Checker, result: Delivered) -> None:
    cpu, machine = cpu_seconds_so_far(), machine_cpu_seconds()
    started = time.perf_counter()
    batches = iter(loader.batches(seed))
    for batch in batches:
        if not checker.delivered:
            result.first_batch_s = time.perf_counter() - started
        checker.add(batch)
        result.seconds = time.perf_counter() - started
        if checker.delivered >= caps.samples or result.seconds >= caps.seconds:
            break
    else:
        result.complete = True
    # Workers still live here: their CPU time counts.
    result.cpu_s = cpu_seconds_so_far() - cpu
    result.machine_cpu_s = machine_cpu_seconds() - machine


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("engine", "dataset", "path"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("samples", "batch", "seed", "cap-samples", "check-every", "orders", "reports"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--cap-seconds", type=float, required=True)
    options = parser.parse_args()
    data = datasets.DataSet(options.dataset, options.samples, options.batch)
    loader = loaders.create(options.engine)
    loader.load()
    with os.fdopen(options.orders) as orders, os.fdopen(options.reports, "w") as reports:
        print(json.dumps({"event": "ready"}), file=reports, flush=True)
        if orders.readline() != "go\n":
            return 1
        caps = Caps(options.cap_samples, options.cap_seconds, options.check_every)

        def measured() -> None:
            print(json.dumps({"event": "measured"}), file=reports, flush=True)
            orders.readline()

        result = deliver(loader, data, Path(options.path), options.seed, caps, measured)
        print(json.dumps({"event": "done", **asdict(result)}), file=reports, flush=True)
        loader.close()
    return 0


if __name__ == "__main__":
    # os._exit: a peer's helper threads must not hang the benchmark on interpreter shutdown.
    status = main()
    os._exit(status)
