"""DLIO_report.txt: what `dlio_postprocessor` makes of a run's folder, of DLIO's runs and of ours.

Throughput over the epochs, loading and processing times of each phase, and, where the run has an iostat.json,
what disks and processors did meanwhile: over all of it, and within each phase.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.text import aligned
from headrace.bench.results import load_run, number_of, rank_blocks
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.results import RankBlock, RunResult

_COLUMNS: Final = ("mean", "std", "min", "median", "p90", "p99", "max")
_SIDES: Final = "<" + ">" * len(_COLUMNS)
_OF_DISK: Final = {
    "rMB/s": "R Bandwidth (MB/s)", "wMB/s": "W Bandwidth (MB/s)", "r/s": "R IOPS", "w/s": "W IOPS",
    "r_await": "Avg R Time (ms)", "w_await": "Avg W Time (ms)", "aqu-sz": "Avg Queue Length",
}  # fmt: skip
_OF_CPU: Final = {
    "user": "User (%)", "system": "System (%)", "iowait": "IO Wait (%)", "steal": "Steal (%)",
    "idle": "Idle (%)",
}  # fmt: skip


def write_postprocessed(folder: str, name: str = "") -> Path:
    """Write DLIO_report.txt, or DLIO_{name}_report.txt, into a run's folder.

    Raises:
        BenchError: the folder has no run, or a file cannot be read.
    """
    run = load_run(folder)
    lines = _lines(run, rank_blocks(run), _iostat(Path(folder)), name)
    path = Path(folder) / (f"DLIO_{name}_report.txt" if name else "DLIO_report.txt")
    path.write_text("\n".join(lines) + "\n")
    return path


def _iostat(folder: Path) -> list[dict[str, Any]]:
    """The entries of iostat.json, each with its moment; none where there is no such file."""
    path = folder / "iostat.json"
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_bytes())["sysstat"]["hosts"][0]["statistics"]
        moments = [
            time.mktime(time.strptime(entry["timestamp"], "%m/%d/%y %H:%M:%S")) for entry in entries
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
        raise BenchError(f"{path} is no output of iostat: {e}.", path=str(path)) from e
    return [entry | {"at_s": at_s} for entry, at_s in zip(entries, moments, strict=True)]


def _statistics(values: Sequence[float]) -> tuple[str, ...]:
    if len(values) < 2:
        return ("n/a",) * len(_COLUMNS)
    array = np.asarray(values, np.float64)
    middle = [np.percentile(array, q) for q in (50, 90, 99)]
    figures = (array.mean(), array.std(ddof=1), array.min(), *middle, array.max())
    return tuple(f"{figure:.2f}" for figure in figures)


def _of_iostat(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Rows of a table: what disks and processors did in these entries."""
    groups = defaultdict[str, list[dict[str, Any]]](list)
    for entry in entries:
        for disk in entry.get("disk", ()):
            groups[f"Device: {disk.get('disk_device')}"].append(disk)
        groups["CPU"].append(entry.get("avg-cpu", {}))
    for title, rows in sorted(groups.items()):
        yield (title, *("",) * len(_COLUMNS))
        for key, what in (_OF_CPU if title == "CPU" else _OF_DISK).items():
            yield (f"  {what}:", *_statistics([number_of(row.get(key)) or 0.0 for row in rows]))


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield from (f"    {line}" for line in aligned([("", *_COLUMNS), *rows], _SIDES))


def _lines(
    run: RunResult, blocks: Sequence[RankBlock], iostat: Sequence[dict[str, Any]], name: str
) -> Iterator[str]:
    summary, ranks = run.summary, max(1, len({block.rank for block in blocks}))
    yield from ("DLIO Report", "", "n/a: too short for statistics", "", "Overall", "")
    yield f"    Run name: {name}"
    yield f"    Started: {summary.get('start')}"
    yield f"    Ended: {summary.get('end')}"
    yield f"    Num Ranks: {ranks}"
    rates = run.metric.get("train_throughput_samples_per_second")
    throughput = [number_of(rate) or 0.0 for rate in rates] if isinstance(rates, list) else []
    yield ""
    yield from _table([("Samples/s (over epochs):", *_statistics(throughput)), *_of_iostat(iostat)])
    yield from ("", "Detailed Report", "")
    phases = defaultdict[tuple[int, str], list["RankBlock"]](list)
    for block in blocks:
        phases[block.epoch, block.name].append(block)
    for (epoch, phase), parts in sorted(phases.items()):
        loading = sum(float(block.load_s.sum()) for block in parts) / ranks
        processing = sum(block.processed_s for block in parts) / ranks
        yield f"Epoch {epoch}, {phase}"
        yield f"    Avg loading time / rank (s): {loading:.2f}"
        yield f"    Avg processing time / rank (s): {processing:.2f}"
        starts = [block.start_s for block in parts if block.start_s is not None]
        ends = [block.end_s for block in parts if block.end_s is not None]
        if starts and ends and iostat:
            yield from _table(
                list(_of_iostat([e for e in iostat if min(starts) <= e["at_s"] < max(ends)]))
            )
        yield ""
