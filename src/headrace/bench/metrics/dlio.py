"""DLIO's metrics: its two throughput formulas and its accelerator utilisation (AU).

Upstream counts `len(steps) - 2` steps whatever the window is, so that four steps of an epoch report a
third less than was done and one step reports less than nothing; MLCommons' fork counts the window. Both
are here, named, because both are compared with results that exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.metrics.timeline import Block, Window

__all__ = ["Formula", "PhaseFigures", "block_au", "block_throughput", "phase_figures"]

Formula = Literal["upstream", "mlcommons"]


def _counted_time_s(block: Block, window: Window) -> float:
    """The block's time without what the steps outside of the window took."""
    counted = window.bounds(block.steps)
    process = block.process_s
    outside = process[: counted.start].sum() + process[counted.stop :].sum()
    return float(block.duration_s - outside)


def block_au(block: Block, window: Window) -> float:
    """DLIO's AU of a block in percent: compute of the window by its time; 0 without steps."""
    compute = float(block.compute_s[window.bounds(block.steps)].sum())
    time = _counted_time_s(block, window)
    # A clock's last digits must not make more than all of it.
    return min(100.0, 100 * compute / time) if compute > 0 and time > 0 else 0.0


def block_throughput(block: Block, batch: int, window: Window, formula: Formula) -> float:
    """Samples per second of a block; of evaluation: all its steps by all its time, as DLIO does."""
    if block.kind == "eval":
        return block.steps / block.duration_s * batch if block.duration_s > 0 else 0.0
    time = _counted_time_s(block, window)
    if time <= 0:
        return 0.0
    counted = window.bounds(block.steps)
    steps = block.steps - 2 if formula == "upstream" else len(block.compute_s[counted])
    return steps / time * batch


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Training's or evaluation's figures, an entry an epoch; DLIO's statistics over them.

    Attributes:
        au_percent: the mean of all accelerators.
        throughput: samples/s, the sum of all accelerators.
    """

    au_percent: tuple[float, ...]
    throughput: tuple[float, ...]

    @property
    def au_mean_percent(self) -> float:
        """Mean over epochs."""
        return float(np.mean(self.au_percent)) if self.au_percent else 0.0

    @property
    def au_stdev_percent(self) -> float:
        """Population standard deviation over epochs."""
        return float(np.std(self.au_percent)) if self.au_percent else 0.0

    @property
    def throughput_mean(self) -> float:
        """Mean over epochs."""
        return float(np.mean(self.throughput)) if self.throughput else 0.0

    @property
    def throughput_stdev(self) -> float:
        """Population standard deviation over epochs."""
        return float(np.std(self.throughput)) if self.throughput else 0.0

    def mb_per_s(self, sample_bytes: float) -> tuple[float, float]:
        """DLIO's "MB": mean and deviation of throughput times nominal size, in MiB/s."""
        scale = sample_bytes / 2**20
        return self.throughput_mean * scale, self.throughput_stdev * scale


def phase_figures(
    blocks: Sequence[Block], batch: int, window: Window, formula: Formula
) -> PhaseFigures:
    """Figures of blocks of one kind, of any number of accelerators and epochs.

    An accelerator's epoch is the mean of its blocks, weighted by their steps. A block that has no step in the
    window, as a last step after a checkpoint, says nothing and does not count; DLIO counts it as an AU of 0.
    """
    au: dict[int, list[float]] = {}
    throughput: dict[int, list[float]] = {}
    of_rank: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        of_rank.setdefault((block.epoch, block.accelerator), []).append(block)
    for (epoch, _), parts in sorted(of_rank.items()):
        weights = [
            part.steps if len(part.compute_s[window.bounds(part.steps)]) else 0 for part in parts
        ]
        if sum(weights) == 0:
            weights = [1] * len(parts)
        aus = [block_au(part, window) for part in parts]
        rates = [block_throughput(part, batch, window, formula) for part in parts]
        au.setdefault(epoch, []).append(float(np.average(aus, weights=weights)))
        throughput.setdefault(epoch, []).append(float(np.average(rates, weights=weights)))
    return PhaseFigures(
        tuple(float(np.mean(au[epoch])) for epoch in sorted(au)),
        tuple(float(np.sum(throughput[epoch])) for epoch in sorted(throughput)),
    )
