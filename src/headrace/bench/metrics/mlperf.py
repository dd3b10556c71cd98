"""AU as MLPerf Storage's rules define it, which is not what DLIO computes.

The rules count the compute time that the workload asks for, DLIO the time that it measured asleep; the rules
divide by the running time, of which they leave out the first step's wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.metrics.timeline import Block

__all__ = ["mlperf_au"]


def mlperf_au(blocks: Sequence[Block], step_s: float) -> float:
    """AU in percent of training's blocks.

    Args:
        blocks: training's, of all accelerators. Running time is the sum of all epochs, each from its first
            accelerator's begin to its last one's end, without the longest first wait of the run.
        step_s: the compute time of a step that the workload asks for, its mean.

    Returns:
        0 without steps.
    """
    train = [block for block in blocks if block.kind == "train" and block.steps]
    if not train:
        return 0.0
    accelerators = len({block.accelerator for block in train})
    compute_s = sum(block.steps for block in train) / accelerators * step_s
    epochs = sorted({block.epoch for block in train})
    running_s = 0.0
    for epoch in epochs:
        of_epoch = [block for block in train if block.epoch == epoch]
        running_s += max(b.end_s for b in of_epoch) - min(b.start_s for b in of_epoch)
    begin = min(block.start_s for block in train if block.epoch == epochs[0])
    first = [float(b.load_s[0]) for b in train if b.epoch == epochs[0] and b.start_s == begin]
    running_s -= max(first)
    return 100 * compute_s / running_s if running_s > 0 else 0.0
