"""The mixture benchmark: four data sets in proportions 4 : 3 : 2 : 1, beside one data set of the same samples.

    python -m benchmarks.mixtures                       # headrace alone
    python -m benchmarks.mixtures --with PYTHON         # and the libraries that PYTHON has

Engines take turns, round after round, each run in a fresh process over hot files that it wrote in its own
format; ratios are formed inside a round. A run delivers batches of 256 and touches each sample once (a byte of
it). The others: LitData's CombinedStreamingDataset, MosaicML's StreamingDataset of proportioned streams and
Grain's MapDataset.mix (over one mapped file a source), each without worker processes. Before the runs, ten
million draws of a mixture are counted against its proportions. Writes raw runs to benchmarks/results/.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import leaving_nothing

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = ROOT / "benchmarks/results"
BATCH = 256
PARTS = {"a": 4, "b": 3, "c": 2, "d": 1}
SIZES = {"1 KiB": (1 << 10, 400_000), "32 KiB": (32 << 10, 16_000)}
"""Bytes of a sample, and samples of a source."""

OTHERS = ("litdata", "streaming", "grain")
DRAWS = 10_000_000


def _rows(folder: Path, name: str, size: int, samples: int) -> np.ndarray[Any, Any]:
    """A source's samples, in a mapped file."""
    path = folder / f"{name}.bin"
    if not path.exists():
        seed = sum(map(ord, name))
        path.write_bytes(np.random.default_rng(seed).bytes(size * samples))
    return np.memmap(path, np.uint8, "r", shape=(samples, size))


def _headrace(folder: Path, size: int, samples: int, *, single: bool) -> Iterator[int]:
    import headrace as hr

    names = ["whole"] if single else list(PARTS)
    for name in names:
        if not (folder / f"{name}.hr").exists():
            every = list(PARTS) if single else [name]
            rows = [(n, _rows(folder, n, size, samples)) for n in every]
            hr.pack(
                ((f"{n}{i}", r[i].tobytes()) for n, r in rows for i in range(samples)),
                folder / f"{name}.hr",
            )
    yield 0
    if single:
        source: Any = hr.open(folder / "whole.hr")
    else:
        source = hr.mix(
            {n: (folder / f"{n}.hr", PARTS[n]) for n in PARTS}, seed=1, stop=4 * samples
        )
    for batch in hr.loader(source, BATCH, seed=1):
        yield len(batch)
        int(batch.data[batch.offsets].sum())


def _litdata(folder: Path, size: int, samples: int) -> Iterator[int]:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    for name in PARTS:
        target = folder / f"{name}.litdata"
        if not target.exists():
            rows = _rows(folder, name, size, samples)
            writer = BinaryWriter(str(target), chunk_bytes="64MB")
            for i in range(samples):
                writer.add_item(i, rows[i].tobytes())
            writer.done()
            writer.merge(1)
    yield 0
    sets = [StreamingDataset(str(folder / f"{n}.litdata"), shuffle=True, seed=1) for n in PARTS]
    weights = [part / sum(PARTS.values()) for part in PARTS.values()]
    mixed = CombinedStreamingDataset(sets, seed=1, weights=weights, iterate_over_all=False)
    for batch in StreamingDataLoader(mixed, batch_size=BATCH, num_workers=0, collate_fn=list):
        yield len(batch)
        sum(sample[0] for sample in batch)


def _streaming(folder: Path, size: int, samples: int) -> Iterator[int]:
    from streaming import MDSWriter, Stream, StreamingDataset

    for name in PARTS:
        if not (folder / f"{name}.mds").exists():
            rows = _rows(folder, name, size, samples)
            with MDSWriter(out=str(folder / f"{name}.mds"), columns={"x": "bytes"}) as writer:
                for i in range(samples):
                    writer.write({"x": rows[i].tobytes()})
    yield 0
    streams = [Stream(local=str(folder / f"{n}.mds"), proportion=p / 10) for n, p in PARTS.items()]
    mixed = StreamingDataset(
        streams=streams, batch_size=BATCH, shuffle=True, epoch_size=4 * samples
    )
    batch = []
    for sample in mixed:
        batch.append(sample["x"])
        if len(batch) == BATCH:
            yield BATCH
            sum(each[0] for each in batch)
            batch = []


def _grain(folder: Path, size: int, samples: int) -> Iterator[int]:
    import grain

    rows = [_rows(folder, name, size, samples) for name in PARTS]
    yield 0
    sets = [grain.MapDataset.source(each).shuffle(seed=1).repeat() for each in rows]
    mixed = grain.MapDataset.mix(sets, weights=[p / 10 for p in PARTS.values()])
    batches = mixed.map(np.asarray).to_iter_dataset().batch(BATCH)
    for step, batch in enumerate(batches):
        yield len(batch)
        int(batch[:, 0].sum())
        if (step + 1) * BATCH >= 4 * samples:
            return


ENGINES: dict[str, Callable[..., Iterator[int]]] = {
    "headrace, one store": lambda *given: _headrace(*given, single=True),
    "headrace": lambda *given: _headrace(*given, single=False),
    "litdata": _litdata,
    "streaming": _streaming,
    "grain": _grain,
}


def run(
    engine: str, folder: str, size: int, samples: int, seconds_max: float = 2.5
) -> dict[str, Any]:
    """An epoch from its second batch on, or what of it fits the time.

    The data are written before, and opening until the first batch is told apart.
    """
    delivered = ENGINES[engine](Path(folder), size, samples)
    next(delivered)
    opening = time.perf_counter()
    next(delivered)
    count, begin, cpu = 0, time.perf_counter(), time.process_time()
    for number in delivered:
        count += number
        if time.perf_counter() - begin > seconds_max:
            break
    seconds = time.perf_counter() - begin
    used = (time.process_time() - cpu) / count * 1e6
    return {
        "samples_per_s": count / seconds, "cpu_us_a_sample": used, "first_batch_s": begin - opening
    }  # fmt: skip


def ratios() -> dict[str, float]:
    """How far ten million draws of a mixture are from their proportions, and how long they took."""
    from headrace.order.mixed import pattern_of, whole_parts

    weights = [0.4142135623730951, 0.3, 0.2, 0.05, 0.03, 0.0057864376269049]
    begin = time.perf_counter()
    numbers = pattern_of(whole_parts(weights)).sources(0, DRAWS)
    seconds = time.perf_counter() - begin
    off = np.abs(np.bincount(numbers) / DRAWS - np.array(weights) / sum(weights)).max()
    worst = 0.0
    for source, weight in enumerate(weights):
        exact = np.arange(1, DRAWS + 1) * (weight / sum(weights))
        worst = max(worst, float(np.abs(np.cumsum(numbers == source) - exact).max()))
    return {
        "ratio_off": float(off),
        "prefix_samples_off": worst,
        "ns_a_draw": seconds / DRAWS * 1e9,
    }


@leaving_nothing()
def main() -> None:
    """Run all engines in turns, print medians and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--with", dest="python", help="an interpreter that has the other libraries")
    parser.add_argument("--one", nargs=4, metavar=("ENGINE", "FOLDER", "SIZE", "SAMPLES"))
    options = parser.parse_args()
    if options.one:
        engine, folder, size, samples = options.one
        print(json.dumps(run(engine, folder, int(size), int(samples))))
        return
    from benchmarks import machine

    drawn = ratios()
    print(", ".join(f"{name} {value:.3g}" for name, value in drawn.items()))
    runs: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for label, (size, samples) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            for number in range(
                -1, options.rounds
            ):  # the first writes the data, and warms the page cache
                for engine in ENGINES:
                    if (engine in OTHERS and not options.python) or engine in failed:
                        continue
                    python = options.python if engine in OTHERS else sys.executable
                    command = [
                        python,
                        str(ROOT / "benchmarks/mixtures.py"),
                        "--one",
                        engine,
                        folder,
                    ]
                    done = subprocess.run(
                        [*command, str(size), str(samples)], check=False, capture_output=True, text=True,
                        cwd=folder, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    )  # fmt: skip
                    if done.returncode:
                        failed[engine] = done.stderr[-500:]
                        print(f"{engine} cannot run: {done.stderr.splitlines()[-1:]}")
                    elif number >= 0:
                        figures = json.loads(done.stdout.splitlines()[-1])
                        runs.append({"size": label, "round": number, "engine": engine, **figures})
            table(label, runs)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"mixtures-{dt.datetime.now(dt.UTC):%Y-%m-%d}.json"
    facts = {"draws": drawn, "rounds": options.rounds, "cannot_run": sorted(failed), "parts": PARTS}
    document = {"machine": machine.describe(RESULTS), **facts, "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwrote {path}")


def table(label: str, runs: list[dict[str, Any]]) -> None:
    """Print the medians of a size, and how many times one store's figure each is."""
    here = [run for run in runs if run["size"] == label]
    one = {
        run["round"]: run["samples_per_s"] for run in here if run["engine"] == next(iter(ENGINES))
    }
    print(f"\n{label}")
    for engine in dict.fromkeys(run["engine"] for run in here):
        own = [run for run in here if run["engine"] == engine]
        rate = statistics.median(run["samples_per_s"] for run in own)
        ratio = statistics.median(run["samples_per_s"] / one[run["round"]] for run in own)
        cpu = statistics.median(run["cpu_us_a_sample"] for run in own)
        print(
            f"  {engine:<20} {rate:10,.0f} samples/s  {ratio:5.2f} x one store  {cpu:7.1f} CPU us a sample"
        )


if __name__ == "__main__":
    main()
