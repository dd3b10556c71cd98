"""Pace: how long until the next look, so that looking costs little and misses little. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace", "next_interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often to look.

    Raises:
        ValueError: the times are in no order, or the share is no share.
    """

    busy_s: float = 5.0
    """While jobs run: Prometheus asks about as often."""

    idle_s: float = 30.0
    """While none does."""

    most_s: float = 60.0
    """However much a look costs."""

    cpu_share: float = 0.003
    """Of one core, for looking; with receiving, writing and serving it stays below 0.5 %."""

    def __post_init__(self) -> None:
        if not 0.0 < self.busy_s <= self.idle_s <= self.most_s:
            raise ValueError(
                f"intervals are {self.busy_s:g}, {self.idle_s:g} and {self.most_s:g} s, "
                "expected more than 0, and each no shorter than the one before"
            )
        if not 0.0 < self.cpu_share <= 1.0:
            raise ValueError(f"cpu_share is {self.cpu_share:g}, expected more than 0, at most 1")


def next_interval(pace: Pace, jobs: int, look_cpu_s: float) -> float:
    """Seconds until the next look.

    Args:
        pace: how often.
        jobs: that run now.
        look_cpu_s: CPU seconds that a look costs lately.
    """
    wanted = pace.busy_s if jobs else pace.idle_s
    return min(pace.most_s, max(wanted, look_cpu_s / pace.cpu_share))
