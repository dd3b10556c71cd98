"""Verdicts on injected bottlenecks: is the cause that was injected the one that is found?

    python -m benchmarks.verdict                 # some ten minutes
    python -m benchmarks.verdict --quick         # each kind once
    python -m benchmarks.verdict --only throttle

Prints the confusion matrix over kinds, strengths and seeds, and how far the shares of mixtures are from
what each of their parts cost. Raw figures go to benchmarks/results/verdict-DATE.json. Storage delays are
simulated and labelled so; the rest are this machine's own mechanisms (NVMe/TCP and HTTP over loopback,
processors, the interpreter's lock, budgets and limits).
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import headrace as hr
from benchmarks import machine, processes
from benchmarks.verdict_parts.injections import KINDS, Place, make_place
from benchmarks.verdict_parts.mixtures import MIXTURES, run_mixture
from benchmarks.verdict_parts.ranks import slow_rank
from headrace.base.causes import Cause

RESULTS = ROOT / "benchmarks/results"

STRENGTHS = (0.7, 1.0, 2.0)
STEPS = 24
STEP_S = 0.002
SLOW_RANK = "a slow rank"
GOAL_MAIN, GOAL_POINTS = 0.95, 10.0


@processes.leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each kind once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], help="of these names")
    parser.add_argument("--explain", action="store_true", help="print each verdict")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-verdict-") as folder:
        place = make_place(Path(folder))
        about = machine.describe(Path(folder))
        strengths = (1.0,) if given.quick else STRENGTHS
        seeds = 1 if given.quick else given.seeds
        runs = [
            one_run(name, place, strength, seed, explain=given.explain)
            for name in (*KINDS, SLOW_RANK)
            if not given.only or name in given.only
            for strength in strengths
            for seed in range(seeds)
        ]
        mixtures = [
            mixture(mixed, place, seed, explain=given.explain)
            for mixed in MIXTURES
            if not given.only or "mixtures" in given.only
            for seed in range(seeds)
        ]
    results = {
        "benchmark": "verdict", "machine": about, "load_after": os.getloadavg()[0], "runs": runs,
        "mixtures": mixtures,
    }  # fmt: skip
    show(runs, mixtures)
    if not given.only:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"verdict-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(path)


def one_run(
    name: str, place: Place, strength: float, seed: int, *, explain: bool = False
) -> dict[str, Any]:
    """Inject, deliver some batches, and ask why it took so long."""
    if name == SLOW_RANK:
        expected, found = Cause.SLOW_RANK, slow_rank(place, strength, seed, STEPS, STEP_S)
    else:
        inject, expected = KINDS[name]
        with inject(place, strength, seed) as loader:
            consume(loader, STEPS)
            found = hr.explain(loader)
            if hasattr(loader, "close"):
                loader.close()
    if explain:
        print(f"--- {name}, strength {strength:g}, seed {seed}\n{found}", flush=True)
    return {
        "kind": name, "strength": strength, "seed": seed, "expected": expected.value,
        "found": found.main.value if found.main else None, "load": os.getloadavg()[0],
        **found.as_dict(),
    }  # fmt: skip


def consume(loader: Any, steps: int) -> None:
    """Train: a short step for each batch."""
    iterator = iter(loader)
    for _ in range(steps):
        if next(iterator, None) is None:
            break
        time.sleep(STEP_S)
    if hasattr(iterator, "close"):
        iterator.close()


def mixture(mixed: Any, place: Place, seed: int, *, explain: bool = False) -> dict[str, Any]:
    """Two bottlenecks one after the other."""
    truth, found = run_mixture(mixed, place, seed, 80, hr.explain)
    if explain:
        print(f"--- {mixed.name}, seed {seed}: {truth}\n{found}", flush=True)
    total = sum(truth.values())
    errors = {
        cause: 100.0 * abs(found.share(Cause(cause)) - seconds / total)
        for cause, seconds in truth.items()
    }
    return {
        "mixture": mixed.name, "seed": seed, "truth_s": truth, "errors_points": errors,
        "load": os.getloadavg()[0], **found.as_dict(),
    }  # fmt: skip


def show(runs: list[dict[str, Any]], mixtures: list[dict[str, Any]]) -> None:
    """Print the matrix, and how far mixtures are off."""
    if runs:
        matrix = Counter((run["expected"], run["found"]) for run in runs)
        causes = [c.value for c in Cause if any(c.value in pair for pair in matrix)]
        print("\ninjected \\ found " + "".join(f"{cause:>11}" for cause in causes))
        for wanted in causes:
            row = "".join(f"{matrix[wanted, found] or '':>11}" for found in causes)
            if any(matrix[wanted, found] for found in causes):
                print(f"{wanted:<17}{row}")
        wrong = [run for run in runs if run["expected"] != run["found"]]
        for run in wrong:
            print(
                f"wrong: {run['kind']}, strength {run['strength']}, seed {run['seed']}: {run['causes']}"
            )
        right = 1.0 - len(wrong) / len(runs)
        print(f"\nright main causes: {right:.1%} of {len(runs)} runs (goal {GOAL_MAIN:.0%})")
    if mixtures:
        worst = [max(each["errors_points"].values()) for each in mixtures]
        for each, error in zip(mixtures, worst, strict=True):
            if error > GOAL_POINTS:
                print(
                    f"off by {error:.1f} points: {each['mixture']}: {each['truth_s']} {each['causes']}"
                )
        worst.sort()
        within = sum(error <= GOAL_POINTS for error in worst) / len(worst)
        print(
            f"mixtures: {within:.1%} of {len(worst)} within {GOAL_POINTS:g} points; median error "
            f"{worst[len(worst) // 2]:.1f} points, largest {worst[-1]:.1f}"
        )


if __name__ == "__main__":
    main()
