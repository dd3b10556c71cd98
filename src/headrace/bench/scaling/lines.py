"""Lines: what a training script prints at the end of each epoch, one JSON object a line.

    {"epoch": 0, "samples": 2987, "seconds": 2.3, "accuracy": 0.76, "waited_s": 0.06, ...}

`epoch`, `samples`, `seconds` and `accuracy` are needed; any other program that prints them can be measured
too. Everything else in the log is left alone: launchers and libraries write there as they like.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["EpochLine", "read_epochs"]

_LINE_BYTES_MAX = 64 << 10
"""Longer lines are not ours."""


@dataclass(frozen=True, slots=True)
class EpochLine:
    """One epoch, of all ranks together.

    Attributes:
        epoch: its number.
        samples: that were trained on.
        seconds: from its first request for a batch to the end of its last step.
        accuracy: the share of held-out samples that are right, 0 to 1.
        waited_s: of the seconds, those in which a rank waited for data; the mean of all ranks.
        saved_s: of the seconds, those in which training stood still for a checkpoint.
        evaluated_s: seconds after the last step, for the accuracy.
        reads: of samples, by all ranks; None if the script does not say.
        bytes: that they read; None likewise.
    """

    epoch: int
    samples: int
    seconds: float
    accuracy: float
    waited_s: float = 0.0
    saved_s: float = 0.0
    evaluated_s: float = 0.0
    reads: int | None = None
    bytes: int | None = None


_NEEDED = ("epoch", "samples", "seconds", "accuracy")
_COUNTS = ("epoch", "samples", "reads", "bytes")


def read_epochs(log: str) -> tuple[EpochLine, ...]:
    """The epochs that a log tells of, in order; one that was told twice, as it was told last.

    A launcher's prefix before the object ("0: {...}", "[rank0]: {...}") is allowed.
    """
    found: dict[int, EpochLine] = {}
    for line in log.splitlines():
        begin = line.find("{")
        if begin < 0 or len(line) > _LINE_BYTES_MAX or '"epoch"' not in line:
            continue
        try:
            told = json.loads(line[begin:])
        except ValueError:
            continue
        epoch = _epoch_of(told)
        if epoch is not None:
            found[epoch.epoch] = epoch
    return tuple(found[number] for number in sorted(found))


def _epoch_of(told: Any) -> EpochLine | None:
    if not isinstance(told, dict) or any(told.get(name) is None for name in _NEEDED):
        return None
    values = {f.name: told[f.name] for f in fields(EpochLine) if told.get(f.name) is not None}
    if not all(_is_number(value) for value in values.values()):
        return None
    for name in _COUNTS:
        if name in values:
            values[name] = int(values[name])
    epoch = EpochLine(**values)
    usable = epoch.seconds > 0 and epoch.samples > 0 and epoch.epoch >= 0
    return epoch if usable else None


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0
