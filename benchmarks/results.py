"""Runs of several rounds, condensed: medians, and ratios taken round by round.

A disk whose speed moves by a third over minutes makes the ratio of two medians a matter of luck.
Engines of one round ran side by side, so ratios are formed inside a round and then the median
of the rounds is taken.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.run_one import Run


@dataclass(frozen=True, slots=True)
class Key:
    """One cell of the table."""

    dataset: str
    temperature: str
    engine: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over several rounds."""

    median: float
    low: float
    high: float
    rounds: int


class Results:
    """All runs of a benchmark, by cell and round. Failed and wrong runs count nowhere."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = list(runs)
        self._cells: dict[Key, dict[int, Run]] = {}
        for run in self.runs:
            if run.usable:
                self._cells.setdefault(key_of(run), {})[run.seed] = run

    def engines(self, dataset: str, temperature: str) -> list[str]:
        """The engines with at least one usable run, in the order in which they first ran."""
        return [
            key.engine
            for key in self._cells
            if (key.dataset, key.temperature) == (dataset, temperature)
        ]

    def cell(self, key: Key) -> list[Run]:
        """The usable runs of one cell."""
        return list(self._cells.get(key, {}).values())

    def median(self, key: Key, attribute: str) -> float | None:
        """The median of one figure over the rounds."""
        values = [getattr(run, attribute) for run in self.cell(key)]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def worst(self, keys: Iterable[Key], attribute: str) -> tuple[Key, float] | None:
        """The cell with the largest median of one figure."""
        found = [(key, self.median(key, attribute)) for key in keys]
        known = [(key, value) for key, value in found if value is not None]
        return max(known, key=lambda pair: pair[1]) if known else None

    def best(
        self, dataset: str, temperature: str, engines: Sequence[str]
    ) -> tuple[Key, float] | None:
        """The fastest of `engines` by its median."""
        keys = [Key(dataset, temperature, engine) for engine in engines]
        return self.worst(keys, "samples_per_s")

    def ratio(self, key: Key, other: Key) -> Ratio | None:
        """Samples/s of `key` over samples/s of `other`, paired by round."""
        own, others = self._cells.get(key, {}), self._cells.get(other, {})
        ratios = [
            own[seed].samples_per_s / others[seed].samples_per_s for seed in own if seed in others
        ]
        if not ratios:
            return None
        return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def key_of(run: Run) -> Key:
    """The cell that `run` belongs to."""
    return Key(run.dataset, run.temperature, run.engine)
