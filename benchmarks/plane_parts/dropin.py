"""Drop-in: `headrace.torch.DataLoader` beside torch's own, the same data set class and arguments.

Each run is a process of its own that imports, empties the page cache (cold) or reads the files once
(hot), and delivers. The two loaders take turns; ratios are formed inside a round, their median is
judged. Cases that read no files (tiny, iterable, tensors) show what is gained or lost elsewhere.

Under simulation both pay the same latencies: torch in the data set's `open` and `read`, headrace in its
reads ahead. Files are prepared outside it. CPU is of all processes, their start included.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import datasets, forms
from benchmarks.loaders.openread import sample_paths
from benchmarks.loaders.torch_files import FileDataset, keep_bytes
from benchmarks.plane_parts import Section
from benchmarks.targets import Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from benchmarks.plane_parts import Options

NEVER_SLOWER = 0.98
LIMIT_SAMPLES = 20_000

HEADER = ("case", "torch", "headrace", "ratio", "rounds", "torch CPU s/GB", "ours", "bound")

Measured = dict[str, float]
"""`samples_s`, and `cpu_s_gb` where files were read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    what: str
    """files, tiny, tensors or iterable."""

    workers: int
    bound: float
    cold: bool = False
    simulate: str | None = None


CASES = (
    Case("A cold, 2 workers", "files", 2, 2.0, cold=True),
    Case("A, simulated lustre, 2 workers", "files", 2, 5.0, simulate="lustre"),
    Case("A hot, 2 workers", "files", 2, NEVER_SLOWER),
    Case("A cold, 0 workers", "files", 0, NEVER_SLOWER, cold=True),
    Case("A hot, 0 workers", "files", 0, NEVER_SLOWER),
    *(
        Case(f"{what}, {workers} workers", what, workers, NEVER_SLOWER)
        for what in ("tiny", "tensors", "iterable")
        for workers in (0, 2)
    ),
)


def run(options: Options) -> Section:
    """Measure below `options.dir`."""
    data = datasets.data_set("A", options.scale)
    files = forms.ensure(options.dir, data, "files")
    rows: list[tuple[str, ...]] = [HEADER]
    targets = []
    for case in CASES:
        rounds = range(options.rounds)
        pairs = [_pair(case, data, files, seed, options.seconds) for seed in rounds]
        done = [(theirs, ours) for theirs, ours in pairs if theirs and ours]
        if not done:
            rows.append((case.name, *"-" * 6, f">= {case.bound:g}"))
            targets.append(Target(case.name, f">= {case.bound:g} x", "-", "open", "did not run"))
            continue
        row, target = _judged(case, done)
        rows.append(row)
        targets.append(target)
    return Section("Drop-in for PyTorch's DataLoader", rows, targets)


def _judged(case: Case, pairs: list[tuple[Measured, Measured]]) -> tuple[tuple[str, ...], Target]:
    """One line of the table, and the verdict."""
    ratios = sorted(ours["samples_s"] / theirs["samples_s"] for theirs, ours in pairs)
    ratio = statistics.median(ratios)
    theirs, ours = (
        {name: statistics.median(one[name] for one in column) for name in column[0]}
        for column in zip(*pairs, strict=True)
    )
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    cpu = [f"{one['cpu_s_gb']:.2f}" if "cpu_s_gb" in one else "-" for one in (theirs, ours)]
    rates = [f"{one['samples_s']:,.0f}" for one in (theirs, ours)]
    row = (case.name, *rates, f"{ratio:.2f}", spread, *cpu, f">= {case.bound:g}")
    verdict: Any = "met" if ratio >= case.bound else "NOT MET"
    note = f"{rates[1]} against {rates[0]} samples/s; {spread}"
    return row, Target(case.name, f">= {case.bound:g} x", f"{ratio:.2f} x", verdict, note)


def _pair(
    case: Case, data: datasets.DataSet, files: Path, seed: int, seconds: float
) -> tuple[Measured | None, Measured | None]:
    """What torch's loader and ours did; they take turns in going first."""
    measured: dict[str, Measured | None] = {}
    for which in ("torch", "headrace") if seed % 2 else ("headrace", "torch"):
        given = {
            **dataclasses.asdict(case), "which": which, "seed": seed, "files": str(files),
            "samples": data.samples, "seconds": seconds,
        }  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.plane_parts.dropin", json.dumps(given)],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        if ended.returncode:
            print(ended.stderr[-2000:], file=sys.stderr)
        measured[which] = json.loads(ended.stdout) if ended.returncode == 0 else None
    return measured["torch"], measured["headrace"]


class Tiny:
    """Numbers from 0: all that is measured is the way."""

    def __len__(self) -> int:
        return 400_000

    def __getitem__(self, index: int) -> int:
        return index


def _loader(given: dict[str, Any]) -> Any:
    import torch
    from torch.utils import data as torch_data

    import headrace.torch

    class Stream(torch_data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(400_000))

    loader = {"torch": torch_data.DataLoader, "headrace": headrace.torch.DataLoader}[given["which"]]
    workers = {"num_workers": given["workers"]}
    if given["what"] == "tiny":
        return loader(Tiny(), 64, shuffle=True, **workers)
    if given["what"] == "iterable":
        return loader(Stream(), 64, **workers)
    if given["what"] == "tensors":
        tensors = torch.arange(3_200_000.0).reshape(400_000, 8), torch.arange(400_000)
        return loader(torch_data.TensorDataset(*tensors), 64, shuffle=True, **workers)
    data = dataclasses.replace(datasets.data_set("A"), samples=given["samples"])
    dataset = FileDataset(sample_paths(data, Path(given["files"])))
    # What a data set that knows its files calls them; the class itself is as in `loader.py`.
    dataset.files = dataset._paths  # type: ignore[attr-defined] # noqa: SLF001
    order = datasets.epoch_order(data, given["seed"]).tolist()[:LIMIT_SAMPLES]
    _prepare(dataset, order, cold=given["cold"])
    return loader(dataset, 256, sampler=order, collate_fn=keep_bytes, **workers)


def _prepare(dataset: FileDataset, order: list[int], *, cold: bool) -> None:
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return
    for index in order:
        dataset[index]


def _measure(loader: Any, what: str, limit_s: float) -> Measured:
    """Deliver for a while."""
    samples = nbytes = 0
    cpu_s, begun = _cpu_s(), time.perf_counter()
    iterator = iter(loader)
    for batch in iterator:
        samples += len(batch[0]) if what == "tensors" else len(batch)
        if what == "files":
            nbytes += sum(map(len, batch))
        if time.perf_counter() - begun > limit_s:
            break
    seconds = time.perf_counter() - begun
    del iterator, batch  # workers end, and are counted
    measured = {"samples_s": samples / seconds}
    if nbytes:
        measured["cpu_s_gb"] = (_cpu_s() - cpu_s) / (nbytes / 1e9)
    return measured


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def main() -> None:
    """Measure one loader in one case, in this process."""
    given = json.loads(sys.argv[1])
    loader = _loader(given)
    simulated: AbstractContextManager[Any] = nullcontext()
    if given["simulate"]:
        from headrace.testing import simulated_files

        simulated = simulated_files(given["simulate"], given["files"])
    with simulated:
        print(json.dumps(_measure(loader, given["what"], given["seconds"])))


if __name__ == "__main__":
    main()
