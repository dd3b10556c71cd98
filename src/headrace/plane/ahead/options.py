"""How files are read ahead. Most users leave all of it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["AheadOptions"]

Cold = Literal["auto", "direct", "fill"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOptions:
    """Bounds and first settings of a ReadAhead; the knobs are turned later.

    Raises:
        ValueError: a value is out of bounds.
    """

    reads_in_flight: int = 16
    """Files in work at a time. 16 saturate an NVMe device at 110 kB."""

    buffer_bytes: int = 64 << 20
    """Memory for files that are being read, or were read and not opened yet."""

    cold: Cold = "auto"
    """How files that are not in the page cache are read: `direct` past it, with the least CPU, or
    `fill`, so that the next epoch finds them there. `auto` fills if the device is what the consumer
    waits for, and the dataset fits into half of the memory that is free."""

    plan_max: int = 1 << 20
    """Coming samples that are kept; what is announced beyond that is opened directly."""

    learn: bool = True
    """Watch which files samples open, where no attribute of the dataset says it."""

    knowledge_bytes: int = 256 << 20
    """Memory for what was learned."""

    doze: bool = True
    """Pause while all files come from the page cache anyway."""

    wait_s: float = 60.0
    """An open waits for a read that has begun, never longer than this; much less as a rule."""

    def __post_init__(self) -> None:
        bounds = {
            "reads_in_flight": (1, 1024),
            "buffer_bytes": (64 << 10, 1 << 48),
            "plan_max": (1, 1 << 32),
            "knowledge_bytes": (1 << 16, 1 << 48),
            "wait_s": (0.0, 1e9),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, expected {low} to {high}")
        if self.cold not in get_args(Cold):
            raise ValueError(f"cold is {self.cold!r}, expected one of {get_args(Cold)}")
