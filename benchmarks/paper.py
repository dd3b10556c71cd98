"""The papers' claims, measured: PRISMA, DLFS, DLIO, HAL. `make paper`, `make paper QUICK=1`.

    python -m benchmarks.paper                 # an hour at most on two quiet cores
    python -m benchmarks.paper --quick         # ten minutes
    python -m benchmarks.paper --only dlfs     # some parts; the others' results are kept
    python -m benchmarks.paper --page          # page and pictures anew, from the newest results

A part that is done is kept in build/bench/paper-*, so that a run that was ended goes on with the next part;
once all are there, results go to benchmarks/results/paper-DATE.json, the page to docs/papers.md, its pictures
to docs/images, and the next run begins anew. A part that fails is said at the end, and the others still run.
However it ends, SIGTERM included, it leaves no process.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine, processes
from benchmarks.paper_parts import ROOT, Options, cases, dlfs, page, prisma

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "dlio": cases.dlio,
    "hal": cases.hal,
    "dlfs": dlfs.run,
    "prisma-torch": lambda options: prisma.run(options, "torch"),
    "prisma-tensorflow": lambda options: prisma.run(options, "tensorflow"),
}


def measure(options: Options, names: list[str], state: Path) -> list[str]:
    """Run the parts that `state` does not have yet; returns those that failed."""
    state.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        if (state / f"{name}.json").exists():
            print(f"{name}: measured already", flush=True)
            continue
        print(f"{name}: begins", flush=True)
        began, load = time.monotonic(), os.getloadavg()[0]
        try:
            results = PARTS[name](options)
        except Exception:  # noqa: BLE001 - the other parts are still worth having
            traceback.print_exc()
            failed.append(name)
            continue
        seconds = round(time.monotonic() - began, 1)
        about = {"seconds": seconds, "load_before": load, "load_after": os.getloadavg()[0]}
        partial = state / f"{name}.partial"
        partial.write_text(json.dumps(about | results))
        partial.rename(state / f"{name}.json")
        print(f"{name}: done in {seconds:.0f} s", flush=True)
    return failed


def publish(options: Options, state: Path, results: Path) -> Path:
    """Join the parts into one document, written to a file of today's."""
    date = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d")
    document = {
        "machine": machine.describe(options.dir), "date": date, "quick": options.quick, "cited": page.cited(),
        "parts": {name: json.loads((state / f"{name}.json").read_text()) for name in PARTS},
    }  # fmt: skip
    path = results / f"paper-{date}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    shutil.rmtree(state)
    return path


@processes.leaving_nothing()
def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="ten minutes")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)  # does it work? For tests
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts")
    add("--dir", type=Path, default=ROOT / "build/bench", help="work folder")
    add("--page", action="store_true", help="only write the page anew")
    given = parser.parse_args()
    if not given.page:
        options = Options(given.dir.resolve(), given.quick or given.tiny, given.tiny)
        options.dir.mkdir(parents=True, exist_ok=True)
        state = (
            options.dir / f"paper-{'tiny' if given.tiny else 'quick' if given.quick else 'full'}"
        )
        if failed := measure(options, given.only, state):
            print(f"failed: {', '.join(failed)}; the next run goes on with them", file=sys.stderr)
            return 1
        missing = [name for name in PARTS if not (state / f"{name}.json").exists()]
        if missing or given.tiny:
            print(f"still to be measured: {', '.join(missing) or 'nothing'}")
            return 0
        print(f"results: {publish(options, state, page.RESULTS)}")
    for path, text in page.files(page.newest("paper")).items():
        (ROOT / path).write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
