"""Prints what the benchmark found, as plain text that survives a log file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchmarks.results import Key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.results import Results
    from benchmarks.targets import Target

_HEADER = (
    "engine",
    "samples/s hot",
    "cold",
    "CPU s/GB hot / cold",
    "private MB",
    "mapped MB",
    "open + first batch, ms, hot / cold",
)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table for a page, the head first: left-aligned first column, right-aligned others."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


def onto_page(page: Path, name: str, text: str) -> None:
    """Put text between a page's `<!-- name -->` and `<!-- end -->`, in place of what stands there."""
    block = f"<!-- {name} -->\n{text}\n<!-- end -->"
    old = rf"<!-- {re.escape(name)} -->.*?<!-- end -->"
    page.write_text(re.sub(old, lambda _: block, page.read_text(), flags=re.DOTALL))


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned first column, right-aligned others."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pair(hot: float | None, cold: float | None, form: str) -> str:
    return f"{_number(hot, form)} / {_number(cold, form)}"


def _row(results: Results, dataset: str, engine: str) -> tuple[str, ...]:
    hot, cold = Key(dataset, "hot", engine), Key(dataset, "cold", engine)

    def peak(attribute: str) -> str:
        found = results.worst((hot, cold), attribute)
        return _number(found[1] if found else None, ".0f")

    def first_ms(key: Key) -> float | None:
        opened, first = results.median(key, "open_s"), results.median(key, "first_batch_s")
        return None if opened is None or first is None else 1e3 * (opened + first)

    return (
        engine,
        _number(results.median(hot, "samples_per_s"), ",.0f"),
        _number(results.median(cold, "samples_per_s"), ",.0f"),
        _pair(results.median(hot, "cpu_s_per_gb"), results.median(cold, "cpu_s_per_gb"), ".2f"),
        peak("private_mb"),
        peak("mapped_mb"),
        _pair(first_ms(hot), first_ms(cold), ".0f"),
    )


def loader_table(results: Results, dataset: str) -> str:
    """One data set: engines down, figures across, medians over the rounds."""
    engines = dict.fromkeys(results.engines(dataset, "hot") + results.engines(dataset, "cold"))
    rows = [_row(results, dataset, engine) for engine in engines]
    return grid([_HEADER, *rows]) if rows else "nothing ran"


def failures(results: Results) -> list[str]:
    """One line for each different reason why engines failed or delivered wrong samples."""
    cells: dict[str, dict[str, None]] = {}
    for run in results.runs:
        reason = f"WRONG: {run.wrong}" if run.wrong is not None else run.error
        if reason is not None:
            cells.setdefault(reason, {})[f"{run.engine} {run.dataset} {run.temperature}"] = None
    return [f"{reason}\n    ({', '.join(where)})" for reason, where in cells.items()]


def targets_table(targets: Sequence[Target]) -> str:
    """Every target with its measured value."""
    header = ("target", "required", "measured", "verdict")
    rows = [(row.name, row.required, row.measured, row.verdict) for row in targets]
    notes = [f"  {row.name}: {row.note}" for row in targets if row.note]
    return "\n".join([grid([header, *rows]), "", *notes])
