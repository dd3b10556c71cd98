"""Causes: what the consumer of a plane waited for between two looks at its stages. Pure.

Where no steps tell more, causes that say less are used: `storage`, whatever was slow about it, and `memory`.
What a loader cannot know, whoever collects it may: `node` is what the node daemon was waited for, and the
daemon knows why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.control.stalls.verdict import Verdict
    from headrace.plane.stage import StageStats

__all__ = ["divided", "split_wait", "tier_bytes"]

_SMALL: Final = 0.02
"""Causes of a smaller share are not told one by one."""

_SATURATED: Final = 0.85
"""Decoders that are busy for more than this share of their time are what is waited for."""


def split_wait(
    waited_s: float, before: Sequence[StageStats], now: Sequence[StageStats]
) -> dict[Cause, float]:
    """The seconds that were waited, by cause; they add up to `waited_s`."""
    if waited_s <= 0.0:
        return {}
    then = {stage.name: stage for stage in before}
    grown = {stage.name: (stage, then.get(stage.name)) for stage in now}
    if "node" in grown:
        asked_s = min(waited_s, _grown(*grown["node"], "wait_input_s"))
        rest_s = waited_s - asked_s
        return {cause: s for cause, s in ((Cause.NODE, asked_s), (Cause.DECODE, rest_s)) if s > 0.0}
    if "decode" in grown:
        busy_s, idle_s = (_grown(*grown["decode"], name) for name in ("busy_s", "wait_input_s"))
        if busy_s > _SATURATED * (busy_s + idle_s) > 0.0:
            return {Cause.DECODE: waited_s}
    held_s = 0.0
    if "throttle" in grown:
        held_s = min(waited_s, _grown(*grown["throttle"], "busy_s"))
    found = {Cause.POLICY: held_s} if held_s > 0.0 else {}
    if waited_s > held_s:
        found[_source(grown)] = waited_s - held_s
    return found


def divided(waited_s: float, verdict: Verdict) -> dict[Cause, float]:
    """The seconds that were waited, by the causes of a verdict on the same stretch; they add up.

    A verdict sees waits that have ended, and `waited_s` may have one that has not: shares count.
    """
    here = {
        cause: seconds
        for cause, seconds in verdict.causes.items()
        if cause is not Cause.SLOW_RANK and seconds >= _SMALL * verdict.stall_s
    }
    total = sum(here.values())
    if waited_s <= 0.0 or total <= 0.0:
        return {}
    return {cause: waited_s * seconds / total for cause, seconds in here.items()}


def tier_bytes(stages: Sequence[StageStats]) -> dict[str, int]:
    """Bytes so far, by where they came from."""
    found: dict[str, int] = {}
    for stage in stages:
        for tier, count in stage.bytes_by_tier.items():
            found[tier] = found.get(tier, 0) + count
    return found


def _source(grown: Mapping[str, tuple[StageStats, StageStats | None]]) -> Cause:
    """Where the bytes came from that were waited for."""
    pairs = list(grown.values())
    if any(_grown(now, then, "reads") > 0 for now, then in pairs):
        tiers = tier_bytes([now for now, _ in pairs])
        old = tier_bytes([then for _, then in pairs if then is not None])
        peer = tiers.get("peer", 0) - old.get("peer", 0)
        rest = sum(tiers.values()) - sum(old.values()) - tiers.get("ram", 0) + old.get("ram", 0)
        return Cause.PEER if peer > 0.5 * rest else Cause.STORAGE
    passed = any(_grown(now, then, "samples") > 0 for now, then in pairs)
    # Nothing has come yet: a first batch is under way.
    return Cause.MEMORY if passed else Cause.STORAGE


def _grown(now: StageStats, before: StageStats | None, name: str) -> float:
    """Of a counter that begins anew with a new chain of stages."""
    new: float = getattr(now, name)
    old: float = 0.0 if before is None else getattr(before, name)
    return new - old if new >= old else new
