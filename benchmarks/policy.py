"""The control plane's benchmark: caps, shares, hand-over, a dead controller; sharing against PSFA.

    python -m benchmarks.policy            # a minute
    python -m benchmarks.policy --quick    # the simulations alone

A node daemon over simulated slow storage, a controller and three loaders run as processes of their
own; the figure shows what each job got. Deciding for 1,000 planes and sharing against the published
baseline are simulations, labelled so. Raw figures go to benchmarks/results/policy-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import machine, processes
from benchmarks.policy_parts import judged, scene, simulated

RESULTS = ROOT / "benchmarks/results"


@processes.leaving_nothing()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the simulations alone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    results: dict[str, Any] = {
        "benchmark": "policy", "machine": machine.describe(Path(tempfile.gettempdir())),
        "simulated_decision": simulated.decision_time(), "simulated_sharing": simulated.compare(),
    }  # fmt: skip
    stem = given.out / f"policy-{dt.datetime.now(dt.UTC).date().isoformat()}"
    if not given.quick:
        seen = scene.play(scene.Plot())
        results["plot"] = asdict(seen.plot)
        results["events"] = seen.events
        results["scene"] = judged.judge(seen)
        given.out.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        for path in judged.draw(seen, stem):
            print(path)
    show(results)


def show(results: dict[str, Any]) -> None:
    """Print the figures."""
    decision = results["simulated_decision"]
    print(
        f"\nDeciding for {decision['planes']:,} planes, {decision['jobs']:,} jobs, "
        f"{decision['flows']:,} flows ({decision['label']}): median {decision['median_s'] * 1e3:.1f} ms "
        f"({decision['median_cpu_s'] * 1e3:.1f} ms of CPU), at most {decision['max_s'] * 1e3:.1f} ms"
    )
    print(f"\nShares of the usable capacity ({simulated.SIMULATED}):")
    print(f"{'workload':26}{'sharing':30}{'idle':>8}{'false':>8}{'below fair':>12}")
    for row in results["simulated_sharing"]:
        print(
            f"{row['workload']:26}{row['sharing']:30}{row['idle_share']:8.1%}"
            f"{row['false_allocation_share']:8.1%}{row['below_fair_share']:12.1%}"
        )
    for name, value in results.get("scene", {}).items():
        print(f"{name:28} {value if isinstance(value, (str, list)) else f'{value:.3f}'}")


if __name__ == "__main__":
    main()
