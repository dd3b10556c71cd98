"""Drop-in: `headrace.torch.DataLoader` beside torch's own, the same data set class and arguments.

Each run is a process of its own that imports, empties the page cache (cold) or reads the files once
(hot), and delivers. The two loaders take turns; ratios are formed inside a round, their median is
judged. Cases that read no files (tiny, iterable, tensors) show what is gained or lost elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import datasets
from benchmarks.loaders.openread import sample_paths
from benchmarks.loaders.torch_files import FileDataset, keep_bytes
from benchmarks.plane_parts import Section
from benchmarks.targets import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 5
SECONDS = 6.0
"""A run ends after this long, or with its epoch."""

NEVER_SLOWER = 0.98
LIMIT_SAMPLES = 20_000


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


def run(options: Any) -> Section:
    """Measure below `options.dir`."""
    data = datasets.data_set("A", getattr(options, "scale", 1.0))
    files = options.dir / data.folder / "files"
    rows: list[tuple[str, ...]] = [("case", "torch", "headrace", "ratio", "rounds", "bound")]
    targets = []
    for case in CASES:
        pairs = [_pair(case, data, files, seed) for seed in range(ROUNDS)]
        ratios = sorted(ours / theirs for theirs, ours in pairs if theirs and ours)
        if not ratios:
            rows.append((case.name, "-", "-", "-", "-", f">= {case.bound:g}"))
            targets.append(Target(case.name, f">= {case.bound:g} x", "-", "open", "did not run"))
            continue
        ratio = statistics.median(ratios)
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append(
            (case.name, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ratio:.2f}", spread, f"{case.bound:g}")
        )
        verdict: Any = "met" if ratio >= case.bound else "NOT MET"
        note = f"{ours:,.0f} against {theirs:,.0f} samples/s; {spread}"
        targets.append(Target(case.name, f">= {case.bound:g} x", f"{ratio:.2f} x", verdict, note))
    return Section("Drop-in for PyTorch's DataLoader", rows, targets)


def _pair(case: Case, data: datasets.DataSet, files: Path, seed: int) -> tuple[float, float]:
    """Samples a second of torch's loader and of ours; they take turns in going first."""
    measured = {}
    for which in ("torch", "headrace") if seed % 2 else ("headrace", "torch"):
        given = {
            **dataclasses.asdict(case), "which": which, "seed": seed, "files": str(files),
            "samples": data.samples,
        }  # fmt: skip
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.plane_parts.dropin", json.dumps(given)],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        if ended.returncode:
            print(ended.stderr[-2000:], file=sys.stderr)
        measured[which] = float(ended.stdout) if ended.returncode == 0 else 0.0
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


def _measure(given: dict[str, Any]) -> float:
    loader = _loader(given)
    samples, begun = 0, time.perf_counter()
    for batch in loader:
        samples += len(batch[0]) if given["what"] == "tensors" else len(batch)
        if time.perf_counter() - begun > SECONDS:
            break
    return samples / (time.perf_counter() - begun)


def main() -> None:
    """Measure one loader in one case, in this process."""
    given = json.loads(sys.argv[1])
    if given["simulate"]:
        from headrace.testing import simulated_files

        with simulated_files(given["simulate"], given["files"]):
            print(_measure(given))
    else:
        print(_measure(given))


if __name__ == "__main__":
    main()
