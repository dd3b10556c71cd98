"""Memory: what the tuner has learned about the present load. Immutable; handed on with the history."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.control.history import Knobs

__all__ = ["Memory", "Put", "Trial"]

BACKOFF_FIRST_S = 6.0
BACKOFF_LAST_S = 96.0
"""What gave nothing is tried again after 6 s, then after twice as long each time, up to a minute and a
half: storage and neighbours change, so it never stops for good."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that has not proved itself yet."""

    knob: str
    up: bool
    before: Knobs
    """The last setting that is known to serve."""
    read_rate: float
    """Reads per second before."""
    stall: float
    """Share of the consumer's time that it waited before."""
    pinned: bool = False
    """Whether the reads in flight were as many as allowed before: each of them counted."""
    corrections: int = 0
    """How often the change was taken back in part."""


@dataclass(frozen=True, slots=True)
class Put:
    """Something that was in vain, and until when it is put off."""

    value: int
    """The knob's value that did not help, or did not do."""
    until_s: float
    times: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that one call of `propose` leaves to the next."""

    regime_s: float = 0.0
    """When this regime began: the same storage and consumer, as far as one can tell."""
    evidence_s: float = 0.0
    """Intervals that began before this time were under other knobs or in transition."""
    trial: Trial | None = None
    best_read_rate: float = 0.0
    """Reads per second when the storage was the limit: what it can do."""
    lowered: int = 0
    """How often fewer reads got as much out of a storage that is the limit."""
    floors: Mapping[str, Put] = field(default_factory=dict)
    """By knob: the largest value that was too small."""
    ceilings: Mapping[str, Put] = field(default_factory=dict)
    """By knob: the value that it was no use to go beyond."""
    latency_s: float = 0.0
    """Mean latency in this regime, 0.0: not known yet; another one later means that it is over."""
    latency_reads: float = 1.0
    """Mean reads in flight when it was measured."""
    latency_knob: int = 0
    """How many were allowed then."""
    demand: float = 0.0
    """The consumer's demand likewise."""

    def floor(self, knob: str, now_s: float) -> int:
        """The value that this knob should stay above for now; 0: none."""
        put = self.floors.get(knob)
        return put.value if put and now_s < put.until_s else 0

    def capped(self, knob: str, now_s: float) -> bool:
        """Whether more of this knob is known to be in vain for now."""
        put = self.ceilings.get(knob)
        return bool(put and now_s < put.until_s)

    def with_floor(self, knob: str, value: int, now_s: float) -> Memory:
        """Knowing that `value` is too small."""
        value = max(value, self.floor(knob, now_s))
        return replace(self, floors=_put(self.floors, knob, value, now_s))

    def with_ceiling(self, knob: str, value: int, now_s: float) -> Memory:
        """Knowing that more than `value` gives nothing."""
        return replace(self, ceilings=_put(self.ceilings, knob, value, now_s))

    def new_regime(self, now_s: float, demand: float, ceilings: Mapping[str, Put]) -> Memory:
        """Knowing only where the evidence begins, and what is given: storage or consumer changed."""
        return Memory(regime_s=now_s, evidence_s=now_s, demand=demand, ceilings=ceilings)


def _put(puts: Mapping[str, Put], knob: str, value: int, now_s: float) -> dict[str, Put]:
    times = puts[knob].times if knob in puts else 0
    wait_s = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2.0**times)
    return {**puts, knob: Put(value, now_s + wait_s, times + 1)}
