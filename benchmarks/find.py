"""Look-ups of names one by one, from C and from Python, beside maps, LMDB and SQLite.

    python -m benchmarks.find                      # 10,000 to a million ImageNet-like names

Stores are packed by the product with samples of a byte each. `find_probe` (CMake option HEADRACE_BENCH) looks
every name up in random order through the C API, with one thread, two and four, beside `std::map` and
`std::unordered_map`; `Store.find` stands beside a `dict`, LMDB and SQLite. All take turns in each round. Writes
`results/find-DATE.json` and its picture; ratios are medians of the rounds' own.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

import headrace
from benchmarks import directory, forms, machine
from benchmarks.paper_parts.page import bars
from benchmarks.processes import leaving_nothing
from headrace.pages import charts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/probe"
FIGURE = ROOT / "docs/images/find.svg"
COMPARED = {
    "from C": ("hr_find", "hr_find, 2 threads", "hr_find, 4 threads", "map", "hash"),
    "from Python": ("Store.find", "dict", "LMDB", "SQLite"),
}
ASKED_FROM_PYTHON = 100_000  # names at most, in each round


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
    command = [str(probe), str(store), str(folder / "names"), str(rounds)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(ended.stdout)
    taken = figures["rounds"]
    in_python = from_python(store, names, rounds)
    figures["rounds"] = taken = [c | py for c, py in zip(taken, in_python, strict=True)]
    for ours, *others in COMPARED.values():
        for other in others:
            figures[f"{ours} / {other}"] = statistics.median(r[ours] / r[other] for r in taken)
    for name in (name for names in COMPARED.values() for name in names):
        figures[f"{name}, ns"] = statistics.median(r[name] for r in taken)
    return figures


def from_python(path: Path, names: list[str], rounds: int) -> Iterator[dict[str, float]]:
    """Nanoseconds a look-up of `Store.find`, a dict, LMDB and SQLite, in each round."""
    chosen = random.Random(7).sample(names, min(len(names), ASKED_FROM_PYTHON))
    store = headrace.open(path)
    indices = dict(zip(names, store.find_many(names).tolist(), strict=True))
    kept = lmdb.open(f"{path}.lmdb", map_size=1 << 30, sync=False)
    with kept.begin(write=True) as writing:
        for name in sorted(names):
            writing.put(name.encode(), indices[name].to_bytes(8, "little"))
    rows = sqlite3.connect(f"{path}.sqlite")
    rows.execute("CREATE TABLE names (name TEXT PRIMARY KEY, at INTEGER) WITHOUT ROWID")
    rows.executemany("INSERT INTO names VALUES (?, ?)", sorted(indices.items()))
    rows.commit()
    ask = "SELECT at FROM names WHERE name = ?"
    with kept.begin() as reading:
        ways: dict[str, Callable[[str], Any]] = {
            "Store.find": store.find,
            "dict": indices.__getitem__,
            "LMDB": lambda name: int.from_bytes(reading.get(name.encode()) or b"", "little"),
            "SQLite": lambda name: rows.execute(ask, (name,)).fetchone()[0],
        }
        for way in ways.values():
            assert [way(name) for name in chosen] == [indices[name] for name in chosen]
        for _ in range(rounds):
            yield {name: _time_ns(way, chosen) for name, way in ways.items()}
    kept.close()
    rows.close()


def _time_ns(find: Callable[[str], Any], names: list[str]) -> float:
    begun_s = time.thread_time()
    for name in names:
        find(name)
    return (time.thread_time() - begun_s) / len(names) * 1e9


def picture(sizes: Sequence[dict[str, Any]]) -> str:
    """Bars of each number of names, from C beside from Python."""
    panels = []
    for figures in sizes:
        for where, names in COMPARED.items():
            parts = [
                charts.Part(name, ns := figures[f"{name}, ns"], f"{ns:,.0f} ns",
                            "c1" if name.startswith(("hr_find", "Store")) else "c4")
                for name in names
            ]  # fmt: skip
            title = f"{figures['names']:,} names, {where}"
            panels.append(bars(title, parts))
    return charts.image("Nanoseconds a look-up of one name", panels, [])


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
    FIGURE.write_text(picture(sizes) + "\n")
    for figures in sizes:
        print(json.dumps({name: value for name, value in figures.items() if name != "rounds"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
