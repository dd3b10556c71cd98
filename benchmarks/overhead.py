"""What all measuring costs: throughput with it on and off, in interleaved pairs.

    python -m benchmarks.overhead                # some minutes
    python -m benchmarks.overhead --pairs 5

On: steps and their waits, the look at the interpreter's lock, what agents are told, about once a second a
verdict on the last epoch. An epoch takes 0.3 to 0.7 s here, and costs some 3 ms besides its steps. Off: none of
these; the native reader's stamps, some tens of nanoseconds a read, are not taken out. Data come from the page
cache and nobody computes: a real step hides most of this. Each pair runs both ways in turns, the first one
alternating; the figure is the median of the pairs' ratios, with the middle half of them. Raw figures go to
benchmarks/results/overhead-DATE.json.
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
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import headrace as hr
from benchmarks import machine
from headrace.control import controller
from headrace.plane import step
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = ROOT / "benchmarks/results"
GOAL = 0.01


@dataclass(frozen=True)
class Case:
    """A data set of random bytes, and what reads it.

    Attributes:
        spread: samples have from `1 - spread` to `1 + spread` times `size` bytes.
    """

    name: str
    samples: int
    size: int
    batch: int
    make: Callable[[Path, int], Any]
    spread: float = 0.4

    def pack(self, folder: Path) -> Path:
        """Write it, as a store."""
        rng = np.random.default_rng(3)
        sizes = (self.size * rng.uniform(1 - self.spread, 1 + self.spread, self.samples)).astype(
            int
        )
        block = rng.bytes(2 * self.size)
        samples = ((f"{at:07d}", block[:length], 0) for at, length in enumerate(sizes))
        hr.pack(samples, folder)
        return folder


def plain(store: Path, batch: int) -> Any:
    """Whole batches, nothing done to them."""
    return hr.loader(store, batch, seed=1)


def decoded(store: Path, batch: int) -> Any:
    """Each sample through a decode function, in threads of torch's loader."""
    return StoreLoader(store, batch, seed=1, decode=len, threads=2, collate_fn=len)


CASES = (
    Case("images of 110 kB", 40_000, 110_000, 256, plain),
    Case("images of 110 kB, torch, decoded in threads", 40_000, 110_000, 256, decoded),
    Case("tiny samples of 2 kB", 1_500_000, 2_250, 1024, plain, 0.75),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each run takes at least")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "overhead", "cases": {}}
    with tempfile.TemporaryDirectory(prefix="headrace-overhead-") as folder:
        results["machine"] = machine.describe(Path(folder))
        for at, case in enumerate(CASES):
            store = case.pack(Path(folder) / f"{at}.hr")
            results["cases"][case.name] = compare(case, store, given.pairs, given.seconds)
            shutil.rmtree(store)
    results["load_after"] = os.getloadavg()[0]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"overhead-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(path)


def compare(case: Case, store: Path, pairs: int, seconds: float) -> dict[str, Any]:
    """Run both ways in turns; the share of throughput that measuring costs."""
    run(case, store, seconds, measured=True)  # memory is touched, files are cached
    found = []
    for at in range(pairs):
        order = (True, False) if at % 2 else (False, True)
        rates = {measured: run(case, store, seconds, measured=measured) for measured in order}
        found.append(rates)
    costs = sorted(1.0 - rates[True] / rates[False] for rates in found)
    quarters = statistics.quantiles(costs, n=4) if len(costs) > 1 else [costs[0]] * 3
    cost = statistics.median(costs)
    verdict = "within" if cost < GOAL else "MISSES"
    print(
        f"{case.name}: measuring costs {cost:+.2%} of throughput (middle half {quarters[0]:+.2%} to "
        f"{quarters[2]:+.2%}) over {pairs} pairs at {statistics.median(r[False] for r in found):,.0f} "
        f"samples/s: {verdict} the goal of {GOAL:.0%}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return {"cost": cost, "quartiles": quarters, "pairs": [[r[True], r[False]] for r in found]}


def run(case: Case, store: Path, seconds: float, *, measured: bool) -> float:
    """Samples per second over some epochs, the verdict on the last one included."""
    with measuring(on=measured):
        loader = case.make(store, case.batch)
        for _ in loader:  # threads start
            pass
        before, began = loader.stats.samples, time.perf_counter()
        epoch = 0
        while time.perf_counter() - began < seconds:
            for _ in loader:
                pass
            epoch += 1
        if measured:
            hr.explain(loader, epoch=epoch)
        rate = (loader.stats.samples - before) / (time.perf_counter() - began)
        loader.close()
    return float(rate)


@contextmanager
def measuring(*, on: bool) -> Iterator[None]:
    """Take all measuring out for a while."""
    if on:
        yield
        return
    came = step.StepLog.came
    publisher = controller._controller._publisher  # noqa: SLF001 - there is no switch, on purpose
    step.StepLog.came = lambda *_: None  # type: ignore[method-assign]
    controller._controller._publisher = None  # noqa: SLF001
    try:
        yield
    finally:
        step.StepLog.came = came  # type: ignore[method-assign]
        controller._controller._publisher = publisher  # noqa: SLF001


if __name__ == "__main__":
    main()
