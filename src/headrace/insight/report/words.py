"""Words: phases of a wait, tiers and causes as people call them, and their colours; shares and durations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.causes import Cause
from headrace.plane.batch_trace import PHASES
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "PHASE_WORDS",
    "TIER_COLOURS",
    "TIER_WORDS",
    "cause_colours",
    "cause_word",
]

PHASE_WORDS: Final = {
    "hold": "held back",
    "open": "opening files",
    "read": "reading",
    "queue": "waiting for a decoder",
    "decode": "decoding",
    "collate": "collating",
    "transfer": "copying to the device",
    "hand": "handing over",
}

TIER_WORDS: Final = {
    "ram": "memory",
    "page_cache": "page cache",
    "disk": "local disk",
    "peer": "other nodes",
    "source": "the data's own storage",
}

TIER_COLOURS: Final = {"ram": "c5", "page_cache": "c3", "disk": "c1", "peer": "c6", "source": "c2"}

_CAUSE_COLOURS: Final = ("c1", "c2", "c3", "c5", "c6", "c7", "c8")


def cause_word(cause: Cause) -> str:
    """`slow rank`."""
    return cause.value.replace("_", " ")


def cause_colours(causes: Iterable[Cause]) -> dict[Cause, str]:
    """The class of each cause's colour on one page.

    There are more causes than colours that all eyes tell apart: the largest have one each, in their order;
    the rest, and what nothing explains, are grey.

    Args:
        causes: the largest first.
    """
    known = [cause for cause in causes if cause is not Cause.OTHER]
    found = dict.fromkeys(Cause, "c4")
    found.update(zip(known, _CAUSE_COLOURS, strict=False))
    return found


assert set(PHASE_WORDS) == set(PHASES)
assert set(TIER_WORDS) == set(TIER_COLOURS) == set(TIERS)
