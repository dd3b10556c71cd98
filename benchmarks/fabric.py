"""The fabric's benchmark: initiator and target beside what the network, NBD, HTTP and files do.

    python -m benchmarks.fabric            # five minutes; needs root for the namespaces
    python -m benchmarks.fabric --quick    # small and short: does it work?
    python -m benchmarks.fabric --only speed table

Both ends are processes of their own. What is compared runs in turn, in every round; ratios are formed
inside a round, and the median of the rounds counts. Raw figures go to
benchmarks/results/fabric-DATE.json.
"""

# ruff: noqa: E402 - run as a file, sys.path must be put right before our own modules are found

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a file, whose folder would hide HF's `datasets` behind ours
    sys.path.remove(str(ROOT / "benchmarks"))
    sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks import cache, datasets, forms, machine, processes, tables
from benchmarks.fabric_parts import job, nodes, rivals
from benchmarks.fabric_parts.ends import Case, Fabric, Seen
from benchmarks.fabric_parts.network import LOOPBACK, Network, veth
from benchmarks.targets import Target, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RESULTS = ROOT / "benchmarks/results"
PARTS = ("speed", "table", "nodes", "job")

LARGE, SMALL = 128 << 10, 4 << 10
LARGE_DEPTH, SMALL_DEPTH = 32, 64
QUEUES = 2
"""Connections in the comparison with iperf3: as many as the engine makes by itself."""

TABLE_SIZES = (512, 4 << 10, 16 << 10, 128 << 10, 1 << 20)
NODES = (1, 2, 4, 8)

IPERF, IPERF_DIGESTS = 0.8, 0.6
NBD_SPEED, NBD_CPU = 1.5, 0.7
SOURCE_BYTES, EPOCH_TWO, STALL_S = 1.02, 0.9, 3.0


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured."""

    dir: Path
    rounds: int
    seconds: float
    file_bytes: int
    parts: tuple[str, ...]
    scale: float
    """Of data set A, for the job."""


Rounds = dict[str, list[dict[str, Any]]]
"""What each run of each round saw, by what ran."""


def ensure_file(path: Path, size: int) -> Path:
    """Random bytes, written once."""
    if not path.exists() or path.stat().st_size != size:
        path.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(size)
        with path.open("wb") as f:
            for _ in range(size >> 24):
                f.write(random.bytes(1 << 24))
    return path


def forget(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _row(seen: Seen) -> dict[str, Any]:
    return asdict(seen) | {
        "gb_per_s": seen.gb_per_s, "reads_per_s": seen.reads_per_s, "cpu_s_per_gb": seen.cpu_s_per_gb,
    }  # fmt: skip


# -- speed: beside iperf3, NBD and HTTP ------------------------------------------------------------


def speed(options: Options, network: Network, file: Path) -> Rounds:
    """Every rival and every case of ours, in turn."""
    rounds: Rounds = {}

    def add(name: str, seen: Seen) -> None:
        rounds.setdefault(name, []).append(_row(seen))

    have_nbd = not rivals.missing("nbdkit") and rivals.build_nbd_probe()
    have_nginx = not rivals.missing("nginx")
    have_iperf = not rivals.missing("iperf3")
    with Fabric(network, [file]) as fabric:
        for seed in range(options.rounds):
            cache.warm([file])
            for queues in (1, QUEUES):
                if have_iperf:
                    rate = rivals.iperf3(network, queues, options.seconds)
                    rounds.setdefault(f"iperf3 x{queues}", []).append({"gb_per_s": rate / 1e9})
                for digests in (False, True):
                    seen = fabric.run(
                        Case(
                            fabric.urls, LARGE, LARGE_DEPTH, queues, digests, options.seconds, seed
                        )
                    )
                    add(f"headrace 128 kB x{queues}{' digests' if digests else ''}", seen)
            for digests in (False, True):
                seen = fabric.run(
                    Case(fabric.urls, SMALL, SMALL_DEPTH, 1, digests, options.seconds, seed)
                )
                add(f"headrace 4 kB{' digests' if digests else ''}", seen)
            if have_nbd:
                for threads in (0, 1):
                    seen = rivals.nbd(network, file, SMALL, SMALL_DEPTH, options.seconds, threads)
                    add(f"nbd 4 kB {'1 thread' if threads else '16 threads'}", seen)
                add(
                    "nbd 128 kB",
                    rivals.nbd(network, file, LARGE, LARGE_DEPTH, options.seconds, 0),
                )
            if have_nginx:
                for block, depth in ((SMALL, SMALL_DEPTH), (LARGE, LARGE_DEPTH)):
                    folder = options.dir / "nginx"
                    seen = rivals.fsspec_http(network, file, block, depth, options.seconds, folder)
                    add(f"fsspec {block >> 10} kB", seen)
    return rounds


# -- DLFS's table ----------------------------------------------------------------------------------


def table(options: Options, file: Path) -> Rounds:
    """By sample size, hot and cold, beside a thread that reads a file of ext4."""
    rounds: Rounds = {}
    have_fio = not rivals.missing("fio")
    seconds = options.seconds / 2
    with Fabric(LOOPBACK, [file]) as fabric:
        for seed in range(options.rounds):
            for size in TABLE_SIZES:
                for cold in (False, True):
                    state = "cold" if cold else "hot"

                    def prepare(cold: bool = cold) -> None:
                        forget(file) if cold else cache.warm([file])

                    prepare()
                    depth = LARGE_DEPTH if size >= LARGE else SMALL_DEPTH
                    case = Case(fabric.urls, size, depth, QUEUES, True, seconds, seed)
                    rounds.setdefault(f"fabric {size} {state}", []).append(_row(fabric.run(case)))
                    if have_fio:
                        prepare()
                        seen = rivals.fio_file(file, size, seconds, cold=cold)
                        rounds.setdefault(f"file {size} {state}", []).append(_row(seen))
    return rounds


def node_sums(options: Options, file: Path) -> Rounds:
    """1 to 8 simulated nodes."""
    rounds: Rounds = {}
    for _ in range(options.rounds):
        for count in NODES:
            cache.warm([file])
            seen = nodes.aggregate([file], count, LARGE, options.seconds)
            rounds.setdefault(f"{count} nodes", []).append(asdict(seen))
    return rounds


# -- a job of four nodes ---------------------------------------------------------------------------


def four_nodes(options: Options) -> tuple[dict[str, Any], list[Target]]:
    """One read of the source, epoch two, and the loss of a node."""
    data = datasets.data_set("A", options.scale)
    source, store = (forms.ensure(options.dir, data, form) for form in ("files", "headrace"))
    staged, loss = job.staged(options.dir, source, store, data), job.loss(options.dir, source, data)
    ratio = staged["source_bytes"] / staged["data_bytes"]
    # The first epoch opens connections and touches memory, of both.
    two = statistics.median(staged["all_gb_per_s"][1:])
    single = statistics.median(staged["single_gb_per_s"][1:])
    once = staged["complete"] and loss["delivered"] == loss["distinct"] == loss["samples"]
    whole = f"{loss['distinct']:,} of {loss['samples']:,} samples"
    return {"staged": staged, "loss": loss}, [
        at_most("job: source bytes over the data set", [ratio], SOURCE_BYTES),
        at_least("job: epoch two of 4 nodes over one node's limit", [two / single], EPOCH_TWO),
        Target("job: each sample exactly once, with a loss", "all", whole, "met" if once else "NOT MET"),
        Target(
            "job: stall when 1 of 4 nodes dies", f"< {STALL_S:g} s", f"{loss['longest_stall_s']:.2f} s",
            "met" if loss["longest_stall_s"] < STALL_S and loss["killed_in_mid_epoch"] else "NOT MET",
        ),
    ]  # fmt: skip


# -- what came of it -------------------------------------------------------------------------------


def median(rounds: Rounds, name: str, figure: str) -> float | None:
    runs = rounds.get(name)
    return statistics.median(run[figure] for run in runs) if runs else None


def ratios(
    rounds: Rounds, own: str, others: list[str], figure: str, best: Any = max
) -> list[float]:
    """Round by round: ours over the best of the others."""
    known = [rounds[other] for other in others if other in rounds]
    if own not in rounds or not known:
        return []
    return [
        mine[figure] / best(other[at][figure] for other in known)
        for at, mine in enumerate(rounds[own])
    ]


def _judge(
    name: str, found: list[float], bound: float, holds: Callable[[float, float], bool], sign: str
) -> Target:
    required = f"{sign} {bound:g} x"
    if not found:
        return Target(name, required, "-", "open", "one of them did not run")
    middle = statistics.median(found)
    note = f"{min(found):.2f} to {max(found):.2f} over {len(found)} rounds"
    verdict: Verdict = "met" if holds(middle, bound) else "NOT MET"
    return Target(name, required, f"{middle:.2f} x", verdict, note)


def at_least(name: str, found: list[float], bound: float) -> Target:
    return _judge(name, found, bound, lambda a, b: a >= b, ">=")


def at_most(name: str, found: list[float], bound: float) -> Target:
    return _judge(name, found, bound, lambda a, b: a <= b, "<=")


def judge(name: str, rounds: Rounds) -> list[Target]:
    """The issue's targets over one network."""
    iperf, nbd = [f"iperf3 x{QUEUES}"], ["nbd 4 kB 16 threads", "nbd 4 kB 1 thread"]
    large, small = f"headrace 128 kB x{QUEUES}", "headrace 4 kB"
    plain = ratios(rounds, large, iperf, "gb_per_s")
    digests = ratios(rounds, f"{large} digests", iperf, "gb_per_s")
    tiny = ratios(rounds, small, nbd, "reads_per_s")
    cost = ratios(rounds, small, nbd, "cpu_s_per_gb", min)
    return [
        at_least(f"{name}: 128 kB over iperf3, {QUEUES} connections", plain, IPERF),
        at_least(f"{name}: the same with digests", digests, IPERF_DIGESTS),
        at_least(f"{name}: 4 kB over libnbd + nbdkit", tiny, NBD_SPEED),
        at_most(f"{name}: its CPU s/GB, both ends", cost, NBD_CPU),
    ]


def show_speed(name: str, rounds: Rounds) -> None:
    """A table of medians."""
    rows = [(f"over {name}", "GB/s", "reads/s", "CPU s/GB")]
    for run in rounds:
        cells = [median(rounds, run, f) if f in rounds[run][0] else None
                 for f in ("gb_per_s", "reads_per_s", "cpu_s_per_gb")]  # fmt: skip
        forms = (".2f", ",.0f", ".2f")
        texts = ["-" if c is None else format(c, f) for c, f in zip(cells, forms, strict=True)]
        rows.append((run, texts[0], texts[1], texts[2]))
    print(f"\n{tables.grid(rows)}")


def show_table(rounds: Rounds) -> None:
    """DLFS's table."""
    rows = [("sample bytes", "fabric hot, MB/s", "file hot", "fabric cold", "file cold",
             "CPU s/GB: fabric hot", "file hot", "fabric cold", "file cold")]  # fmt: skip
    for size in TABLE_SIZES:
        names = [f"{who} {size} {state}" for state in ("hot", "cold") for who in ("fabric", "file")]
        speeds = [median(rounds, name, "gb_per_s") for name in names]
        costs = [median(rounds, name, "cpu_s_per_gb") for name in names]
        rows.append((
            f"{size:,}", *("-" if v is None else f"{v * 1e3:,.0f}" for v in speeds),
            *("-" if v is None else f"{v:.2f}" for v in costs),
        ))  # fmt: skip
    print(f"\n{tables.grid(rows)}")
    print("fabric: loopback, digests on, depth 64 (32 from 128 kB); file: ext4, fio, one thread")


def show_nodes(rounds: Rounds) -> None:
    """The sums of nodes."""
    rows = [(nodes.LABEL, "GB/s of all", "reads/s", "CPU s/GB")]
    for name in rounds:
        figures = ("gb_per_s", "reads_per_s", "cpu_s_per_gb")
        values = [median(rounds, name, figure) or 0.0 for figure in figures]
        rows.append((name, f"{values[0]:.2f}", f"{values[1]:,.0f}", f"{values[2]:.2f}"))
    print(f"\n{tables.grid(rows)}")


@contextlib.contextmanager
def _networks() -> Iterator[list[Network]]:
    if os.geteuid() != 0:
        print("not root: no network namespaces, loopback alone", file=sys.stderr)
        yield [LOOPBACK]
        return
    with veth() as pair:
        yield [LOOPBACK, pair]


@processes.leaving_nothing()
def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short runs: does it work?")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dir", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--scale", type=float, default=0.2, help="of data set A, for the job")
    given = parser.parse_args()
    options = Options(
        given.dir, given.rounds or (1 if given.quick else 3), 0.3 if given.quick else 1.0,
        (128 if given.quick else 1024) << 20, tuple(given.only), 0.02 if given.quick else given.scale,
    )  # fmt: skip
    file = ensure_file(options.dir / f"fabric-{options.file_bytes >> 20}", options.file_bytes)
    results: dict[str, Any] = {
        "benchmark": "fabric", "machine": machine.describe(options.dir), "rounds": options.rounds,
        "seconds": options.seconds,
    }  # fmt: skip
    targets: list[Target] = []
    if "speed" in options.parts:
        with _networks() as networks:
            for network in networks:
                rounds = results[network.name] = speed(options, network, file)
                show_speed(network.name, rounds)
                targets += judge(network.name, rounds)
    if "table" in options.parts:
        results["table"] = table(options, file)
        show_table(results["table"])
    if "nodes" in options.parts and os.geteuid() == 0:
        results["nodes"] = {"label": nodes.LABEL, "rounds": node_sums(options, file)}
        show_nodes(results["nodes"]["rounds"])
    if "job" in options.parts and os.geteuid() == 0:
        results["job"], found = four_nodes(options)
        targets += found
    results["targets"] = [asdict(target) for target in targets]
    results["load_after"] = os.getloadavg()[0]
    head = ("target", "required", "measured", "", "")
    lines = [(t.name, t.required, t.measured, t.verdict, t.note) for t in targets]
    print(f"\n{tables.grid([head, *lines])}" if lines else "")
    if not given.quick:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"fabric-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
