"""Timelines: what a run records, step by step.

Times are seconds of one clock. A step waits for its batch (`load`), computes, and meets the others at the
barrier; what remains between two steps is the barrier and the harness itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Block", "Window"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One accelerator's steps of an epoch, or of the part of one between two checkpoints."""

    epoch: int
    """From 1, as DLIO counts."""
    accelerator: int
    kind: Literal["train", "eval"] = "train"
    number: int = 1
    """Of its epoch's, from 1: checkpoints part an epoch into blocks."""
    start_s: float
    end_s: float
    load_s: NDArray[np.float64]
    """(steps,) the wait for each batch."""
    compute_s: NDArray[np.float64]
    """(steps,) the time each step computed."""
    harness_s: NDArray[np.float64]
    """(steps,) from a step's end to the moment when the next batch was asked for, barrier left out."""
    late_s: NDArray[np.float64]
    """(steps,) how late the end of each step was noticed."""

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return len(self.compute_s)

    @property
    def duration_s(self) -> float:
        """From its begin to its end."""
        return self.end_s - self.start_s

    @property
    def process_s(self) -> NDArray[np.float64]:
        """(steps,) DLIO's `proc`: wait and compute."""
        return self.load_s + self.compute_s


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that count: without the first and the last few.

    Attributes:
        exclude_start: steps left out at the begin.
        exclude_end: steps left out at the end.
    """

    exclude_start: int = 1
    exclude_end: int = 0

    def bounds(self, steps: int) -> slice:
        """The steps that count, of `steps`."""
        return slice(self.exclude_start, max(self.exclude_start, steps - self.exclude_end))
