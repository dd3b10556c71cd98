"""Look-ups of names through the C API, one by one, beside std::map and std::unordered_map.

    python -m benchmarks.find                      # 10,000 to a million ImageNet-like names

Stores are packed by the product with samples of a byte each, `find_probe` (CMake option HEADRACE_BENCH)
looks every name up in random order, all three containers in turn in each round. Writes
`results/find-DATE.json`; ratios are medians of the rounds' own.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import headrace
from benchmarks import directory, forms, machine
from benchmarks.processes import leaving_nothing

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/probe"


def build_probe() -> Path:
    """Builds `find_probe` and what it links, as the product is built."""
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-DHEADRACE_PYTHON=OFF", "-DHEADRACE_BENCH=ON"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(
        ["cmake", "--build", BUILD, "--target", "find_probe", "-j2"],
        check=True,
        capture_output=True,
    )
    return BUILD / "find_probe"


def measure(probe: Path, samples: int, rounds: int, folder: Path) -> dict[str, object]:
    """Packs a store of so many names, looks all of them up, and condenses the rounds."""
    names = [name for _, group in directory.members(samples) for name in group]
    (folder / "names").write_text("\n".join(names) + "\n")
    forms.say(f"packing {len(names):,} samples")
    store = folder / f"{samples}.hr"
    headrace.pack(((name, b"x") for name in names), store)
    command = [probe, store, folder / "names", str(rounds)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, object] = json.loads(ended.stdout)
    taken = json.loads(ended.stdout)["rounds"]
    for other in ("map", "hash"):
        figures[f"hr_find / {other}"] = statistics.median(r["hr_find"] / r[other] for r in taken)
    for name in ("hr_find", "map", "hash"):
        figures[f"{name}, ns"] = statistics.median(r[name] for r in taken)
    return figures


@leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.find", description=__doc__)
    parser.add_argument("--dir", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    folder = options.dir / "find"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        described = machine.describe(folder)
        probe = build_probe()
        sizes = [measure(probe, samples, options.rounds, folder) for samples in options.samples]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    path = options.json or ROOT / f"benchmarks/results/find-{today}.json"
    path.write_text(
        json.dumps({"machine": described, "date": today, "sizes": sizes}, indent=1) + "\n"
    )
    for figures in sizes:
        print(json.dumps({name: value for name, value in figures.items() if name != "rounds"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
