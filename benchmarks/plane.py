"""The data-plane benchmark: what stages, tuner, caches and adapters are worth.

    python -m benchmarks.plane                      # everything
    python -m benchmarks.plane --only convergence   # one part, or several
    python -m benchmarks.plane --quick              # small and short: does it work?

Each part (`benchmarks/plane_parts`) prints its table; a table of all targets, met or not, follows. Raw
figures go to benchmarks/results/plane-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

from benchmarks import machine, tables
from benchmarks.plane_parts import Options, Section
from benchmarks.processes import leaving_nothing

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = ROOT / "benchmarks/results"

PARTS = ("convergence", "dropin", "packing", "adapters")
"""In the order in which they run; one that is missing or has no `run` is left out and said so."""


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, list[str], Path | None]:
    """The command line: options, the parts to run, and where the raw figures go."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="the parts to run")
    add("--quick", action="store_true", help="small and short: does everything work?")
    add("--dir", type=Path, default=Path("build/bench"), help="work folder for data sets")
    add("--jobs", type=int, default=2, help="measurements at a time, where they mostly sleep (2)")
    add("--json", type=Path, help="where the raw figures go")
    given = parser.parse_args(arguments)
    options = Options(dir=given.dir.resolve(), quick=given.quick, jobs=given.jobs)
    return options, list(given.only), given.json


def run_part(name: str, options: Options) -> Section | str:
    """Run one part; the reason when it cannot."""
    try:
        part = import_module(f"benchmarks.plane_parts.{name}")
    except ImportError as error:
        return f"{name}: {error}"
    if not hasattr(part, "run"):
        return f"{name}: has no run()"
    section: Section = part.run(options)
    return section


@leaving_nothing()
def main() -> int:
    options, names, path = parse()
    document: dict[str, object] = {"machine": machine.describe(Path.cwd()), "quick": options.quick}
    targets = []
    for name in names:
        started = time.monotonic()
        section = run_part(name, options)
        if isinstance(section, str):
            print(f"\nleft out: {section}")
            continue
        seconds = time.monotonic() - started
        print(f"\n{section.title} ({seconds:.0f} s)\n{tables.grid(section.rows)}")
        for note in section.notes:
            print(note)
        targets += section.targets
        document[name] = {
            "seconds": round(seconds, 1),
            "raw": section.raw if section.raw is not None else section.rows,
            "targets": [asdict(target) for target in section.targets],
        }
    print(f"\nTargets\n{tables.targets_table(targets)}" if targets else "\nno targets")
    date = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")
    path = path or RESULTS / f"plane-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document | {"date": date}, indent=1, default=str) + "\n")
    print(f"\nraw results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
