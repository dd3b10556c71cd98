"""The targets of speed and memory, each judged from one benchmark's own runs.

Pure: results in, rows out. A target whose engine or limit did not run is `open`, never met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks import limits, loaders
from benchmarks.results import Key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.processes import Memory
    from benchmarks.results import Results

Verdict = Literal["met", "NOT MET", "open"]

MEMORY_MB_MAX = 150.0
FIRST_BATCH_MS_MAX = 50.0
CPU_S_PER_GB_MAX = 0.10
DIRECTORY_OPEN_MS_MAX = 20.0
FIND_NS_MAX = 500.0
BYTES_A_SAMPLE_MAX = 24.0
NAME_FRACTION_MAX = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the targets table."""

    name: str
    required: str
    measured: str
    verdict: Verdict
    note: str = ""


def at_least(name: str, results: Results, key: Key, against: Sequence[str], bound: float) -> Target:
    """`key` must be `bound` times the best engine of `against`, in the same cell."""
    required = f">= {bound:g} x"
    best = results.best(key.dataset, key.temperature, against)
    if best is None:
        return Target(name, required, "-", "open", f"none of {', '.join(against)} ran")
    ratio = results.ratio(key, best[0])
    if ratio is None:
        return Target(name, required, "-", "open", f"{key.engine} did not run")
    own = results.median(key, "samples_per_s")
    note = (
        f"{own:,.0f} against {best[1]:,.0f} samples/s of {best[0].engine}; "
        f"{ratio.low:.2f} to {ratio.high:.2f} over {ratio.rounds} rounds"
    )
    verdict: Verdict = "met" if ratio.median >= bound else "NOT MET"
    return Target(name, required, f"{ratio.median:.2f} x", verdict, note)


def _at_most(name: str, unit: str, value: float | None, bound: float, note: str = "") -> Target:
    required = f"<= {bound:g} {unit}".strip()
    if value is None:
        return Target(name, required, "-", "open", note or "not measured")
    verdict: Verdict = "met" if value <= bound else "NOT MET"
    return Target(name, required, f"{value:.3g} {unit}".strip(), verdict, note)


def _headrace(dataset: str, temperature: str) -> Key:
    return Key(dataset, temperature, "headrace")


def _uring(results: Results, dataset: str, mode: str) -> list[str]:
    """Every depth of one io_uring mode that was measured: the limit is the best of them."""
    wanted = f"{limits.PREFIX}{mode}:"
    measured = [name for name in results.engines(dataset, "cold") if name.startswith(wanted)]
    return measured or [wanted + "*"]


def _speed(results: Results) -> list[Target]:
    a_hot, a_cold = _headrace("A", "hot"), _headrace("A", "cold")
    b_hot, b_cold = _headrace("B", "hot"), _headrace("B", "cold")
    peers, prefix = loaders.PEERS, limits.PREFIX
    return [
        at_least("A hot / two-thread pread limit", results, a_hot, [f"{prefix}pread:2"], 0.9),
        at_least("A hot / best peer", results, a_hot, peers, 1.3),
        at_least("A hot / DataLoader, 2 workers", results, a_hot, ["torch2"], 10),
        at_least(
            "A cold / io_uring limit", results, a_cold, _uring(results, "A", limits.URING), 0.9
        ),
        at_least("A cold / best peer", results, a_cold, peers, 1.3),
        _at_most("A cold, CPU", "s/GB", results.median(a_cold, "cpu_s_per_gb"), CPU_S_PER_GB_MAX),
        at_least("B hot / one-thread C mmap limit", results, b_hot, [f"{prefix}mmap:1"], 1.5),
        at_least("B hot / best peer", results, b_hot, peers, 4),
        at_least(
            "B cold / 4 kB IOPS limit", results, b_cold, _uring(results, "B", limits.URING_4K), 0.9
        ),
        _blocked(results),
    ]


def _blocked(results: Results) -> Target:
    key = Key("B", "cold", "headrace-blocked")
    target = at_least("B cold, blocked / exact order", results, key, ["headrace"], 5)
    runs = results.cell(key)
    if not runs:
        return target
    facts = runs[-1].facts
    level = ", ".join(
        f"{name.replace('_', ' ')} {facts[name]:.3f}"
        for name in ("randomness_level", "entropy_share")
        if isinstance(facts.get(name), float)
    )
    return Target(
        target.name,
        target.required,
        target.measured,
        target.verdict,
        f"{target.note}; {level or 'no randomness level'}",
    )


def _own_cells(results: Results) -> list[Key]:
    return [
        Key(dataset, temperature, engine)
        for dataset in ("A", "B")
        for temperature in ("hot", "cold")
        for engine in ("headrace", "headrace-blocked")
        if results.cell(Key(dataset, temperature, engine))
    ]


def _named(worst: tuple[Key, float] | None) -> str:
    if worst is None:
        return ""
    return f"worst of all: {worst[0].engine}, {worst[0].dataset} {worst[0].temperature}"


def _memory_and_latency(results: Results, baseline: Memory) -> list[Target]:
    cells = _own_cells(results)
    private = results.worst(cells, "private_mb")
    mapped = results.worst(cells, "mapped_mb")
    first = results.worst([key for key in cells if key.engine == "headrace"], "first_batch_s")
    memory_note = _named(private)
    if mapped is not None:
        above = mapped[1] - baseline.mapped_mb
        memory_note += f"; mapped page cache, not counted: up to {above:.0f} MB above numpy"
    return [
        _at_most(
            "Memory above `import numpy`",
            "MB",
            private[1] - baseline.private_mb if private else None,
            MEMORY_MB_MAX,
            memory_note,
        ),
        _at_most(
            "First batch after open",
            "ms",
            first[1] * 1e3 if first else None,
            FIRST_BATCH_MS_MAX,
            _named(first),
        ),
    ]


def directory_targets(figures: Mapping[str, float] | None) -> list[Target]:
    """The targets of the sample directory, from what `benchmarks.directory` measured."""
    known = figures or {}
    note = f"{int(known['samples']):,} names" if "samples" in known else "not measured"
    rows = (
        ("Directory: open", "ms", "open_ms", DIRECTORY_OPEN_MS_MAX),
        ("Directory: find_many, a name", "ns", "find_ns", FIND_NS_MAX),
        ("Directory: a sample beside names", "bytes", "bytes_a_sample", BYTES_A_SAMPLE_MAX),
        ("Directory: names / raw names", "", "name_fraction", NAME_FRACTION_MAX),
    )
    return [_at_most(name, unit, known.get(key), bound, note) for name, unit, key, bound in rows]


def judge(
    results: Results, baseline: Memory, directory: Mapping[str, float] | None
) -> list[Target]:
    """Every target, in the order in which the project states them."""
    return [
        *_speed(results),
        *_memory_and_latency(results, baseline),
        *directory_targets(directory),
    ]
