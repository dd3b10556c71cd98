"""What all measuring costs: throughput with it on and off, in short stretches of one running loader.

    python -m benchmarks.overhead                # some minutes
    python -m benchmarks.overhead --pairs 5

On: steps and their waits, the look at the interpreter's lock, what agents are told, and once a stretch a
verdict on all remembered steps. Off: none of these; the native reader's stamps, some tens of nanoseconds a
read, are not taken out. Data come from the page cache and nobody computes: a real step hides most of this.
Stretches of a second follow each other within one loader, in pairs of one with and one without, the first
one alternating: what else the machine does, and where memory happens to lie, is the same for both. The
figure is the median of the pairs' ratios, with the interval that holds the true median in 95 of 100 such
runs (order statistics, no distribution assumed). Raw figures go to benchmarks/results/overhead-DATE.json.
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
from benchmarks import machine, processes
from headrace.control import controller
from headrace.plane import batch_trace, interpreter
from headrace.torch import StoreLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

RESULTS = ROOT / "benchmarks/results"
GOAL = 0.01
WARM_S = 5.0


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
    return StoreLoader(store, batch, shuffle=True, seed=1, decode=len, threads=2, collate_fn=len)


CASES = (
    Case("images of 110 kB", 40_000, 110_000, 256, plain),
    Case("images of 110 kB, torch, decoded in threads", 40_000, 110_000, 256, decoded),
    Case("tiny samples of 2 kB", 1_500_000, 2_250, 1024, plain, 0.75),
)


@processes.leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each stretch")
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
    """Go through stretches in turns; the share of throughput that measuring costs."""
    loader = case.make(store, case.batch)
    batches = endless(loader)
    stretch(
        loader, batches, WARM_S, measured=True
    )  # memory is touched, files are cached, knobs turned
    found = []
    for at in range(pairs):
        order = (True, False) if at % 2 else (False, True)
        found.append({on: stretch(loader, batches, seconds, measured=on) for on in order})
    batches.close()
    loader.close()
    costs = sorted(1.0 - rates[True] / rates[False] for rates in found)
    cost, (low, high) = statistics.median(costs), interval(costs)
    verdict = "within" if high < GOAL else "MISSES" if low >= GOAL else "not told from"
    print(
        f"{case.name}: measuring costs {cost:+.2%} of throughput ({low:+.2%} to {high:+.2%}, 95 %) over "
        f"{pairs} pairs at {statistics.median(r[False] for r in found):,.0f} samples/s: {verdict} the goal "
        f"of {GOAL:.0%}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return {
        "cost": cost, "interval": [low, high], "quartiles": statistics.quantiles(costs, n=4),
        "pairs": [[r[True], r[False]] for r in found],
    }  # fmt: skip


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Two of the ordered values, between which the median of their distribution lies in 95 % of all cases."""
    count = len(ordered)
    low = max(0, int(count / 2 - 1.96 * count**0.5 / 2))
    return ordered[low], ordered[count - 1 - low]


def endless(loader: Any) -> Generator[Any, None, None]:
    """One epoch after the other."""
    while True:
        yield from loader


def stretch(loader: Any, batches: Iterator[Any], seconds: float, *, measured: bool) -> float:
    """Samples per second for a while; measured, with a verdict at its end."""
    with measuring(on=measured):
        before, began = loader.stats.samples, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(batches)
        if measured:
            hr.explain(loader)
        return float((loader.stats.samples - before) / (time.perf_counter() - began))


@contextmanager
def measuring(*, on: bool) -> Iterator[None]:
    """Take all measuring out for a while."""
    if on:
        yield
        return
    add = batch_trace.StepLog.add
    publisher = controller._controller._publisher  # noqa: SLF001 - there is no switch, on purpose
    batch_trace.StepLog.add = lambda *_: None  # type: ignore[method-assign]
    controller._controller._publisher = None  # noqa: SLF001
    interpreter._watch.delivered_s = 0.0  # noqa: SLF001 - its thread ends, until a step comes again
    try:
        yield
    finally:
        batch_trace.StepLog.add = add  # type: ignore[method-assign]
        controller._controller._publisher = publisher  # noqa: SLF001


if __name__ == "__main__":
    main()
