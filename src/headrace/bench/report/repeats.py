"""Repeats: runs of the same, in the folders of one folder; and what tells two runs apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.report.result import RunResult, load_run, number_of
from headrace.bench.results.files import repeat_folder
from headrace.errors import BenchError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["differences", "load_runs"]

_IGNORED: Final = ("output.", "checkpoint.checkpoint_folder", "workflow.generate_data")
"""Keys of workloads that say nothing about what was measured."""

_REPEATS_MOST: Final = 10_000
"""A summary that claims more is not believed."""


def load_runs(folder: str | os.PathLike[str]) -> list[RunResult]:
    """The run in a folder, or its repeats; if results are in folders below, all of these: repeats of one run.

    Raises:
        BenchError: there is none, one cannot be read, or they are not the same.
    """
    path = Path(folder)
    if (path / "summary.json").exists():
        whole = load_run(path)
        return _repeats_of(whole, path) or [whole]
    found = sorted(each.parent for each in path.glob("*/summary.json"))
    if not found:
        raise BenchError(
            f"{path} has no summary.json, and neither have the folders in it: no run ended there.",
            path=str(path),
            next_step="Give the folder of a run: what ++hydra.run.dir named.",
        )
    runs = [load_run(each) for each in found]
    first = _task(runs[0])
    for run in runs[1:]:
        other = _task(run)
        for key in sorted(first.keys() | other.keys()):
            if first.get(key) != other.get(key):
                raise BenchError(
                    f"the runs in {path} are not repeats: {key} is {first.get(key)} in "
                    f"{runs[0].folder}, {other.get(key)} in {run.folder}.",
                    path=str(path),
                    next_step="Give the folder of one run.",
                )
    return runs


def _repeats_of(whole: RunResult, path: Path) -> list[RunResult]:
    """The repeats that a run has kept, in their order; none of one that was run once.

    An earlier run may have left more of them in the folder: the summary knows how many are its own.
    """
    count = int(number_of(whole.own.get("repeats")) or 1)
    folders = [repeat_folder(path, number) for number in range(1, min(count, _REPEATS_MOST) + 1)]
    if count < 2 or not all((folder / "summary.json").exists() for folder in folders):
        return []
    return [replace(load_run(folder), workload=whole.workload) for folder in folders]


def differences(a: RunResult, b: RunResult) -> Iterator[tuple[str, str, str]]:
    """(what, in a, in b) of how two runs were made."""
    sides = _circumstances(a), _circumstances(b)
    for key in sorted(sides[0].keys() | sides[1].keys()):
        left, right = (side.get(key, "-") for side in sides)
        if left != right:
            yield key, left, right


def _circumstances(run: RunResult) -> dict[str, str]:
    """What was run, where and with what."""
    found: dict[str, Any] = dict(_task(run))
    found |= {key: run.own.get(key) for key in ("throughput_formula", "data_loader")}
    for key in ("headrace", "kernel", "python", "barrier", "simulated"):
        found[key] = run.provenance.get(key)
    mount = run.provenance.get("mount")
    found |= _flat(mount, "mount.") if isinstance(mount, dict) else {}
    residency = run.own.get("residency_before")
    found["cold"] = residency.get("cold") if isinstance(residency, dict) else None
    found["processor"] = run.summary.get("host_processor_name")
    return {key: str(value) for key, value in found.items() if value is not None}


def _task(run: RunResult) -> dict[str, str]:
    """What was run: repeats have the same."""
    flat = {
        "num_accelerators": run.summary.get("num_accelerators"),
        "engine": run.own.get("engine"),
    }
    flat |= {k: v for k, v in _flat(run.workload, "").items() if not k.startswith(_IGNORED)}
    return {key: str(value) for key, value in flat.items() if value is not None}


def _flat(document: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
