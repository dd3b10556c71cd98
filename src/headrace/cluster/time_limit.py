"""Time limits: every form that Slurm takes, HAL's hours, and the few words that people write instead.

Slurm counts whole minutes and rounds up; so does this. No limit is `None`.
"""

from __future__ import annotations

import re
from typing import Final

from headrace.errors import ClusterRequestError

__all__ = ["FORMS", "read_minutes", "slurm_time", "time_text"]

FORMS: Final = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
    "days-hours:minutes:seconds, 90m, 36h, 2d12h or UNLIMITED"
)
"""What may be written, for help and errors."""

_MINUTES_MAX: Final = 1_000 * 366 * 24 * 60
"""A thousand years: beyond it a digit was typed twice. Slurm's own counter is of 32 bits."""

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_CLOCK = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_WORDS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?", re.ASCII)
_NO_LIMIT = frozenset({"unlimited", "infinite", "-1"})


def read_minutes(text: str, *, bare_hours: bool = False) -> int | None:
    """What a time limit says, in minutes; None: none.

    Zero comes back as zero: Slurm means no limit by it, HAL its default.

    Args:
        text: in one of `FORMS`.
        bare_hours: a number alone counts hours, as HAL's commands have it.

    Raises:
        ClusterRequestError: the text is no time.
    """
    written = text.strip().strip("\"'").strip().lower()
    if written in _NO_LIMIT:
        return None
    seconds = _seconds(written, bare_hours=bare_hours)
    if seconds is None:
        raise ClusterRequestError(f"{text!r} is no time limit.", next_step=f"Expected {FORMS}.")
    minutes = -(-seconds // 60)
    if minutes > _MINUTES_MAX:
        raise ClusterRequestError(
            f"the time limit {text!r} is longer than a thousand years.",
            next_step="Give a shorter one, or UNLIMITED.",
        )
    return minutes


def _seconds(written: str, *, bare_hours: bool) -> int | None:
    if len(written) > 40:  # whatever it is: int() takes a while over a million digits
        return None
    if match := _DAYS.fullmatch(written):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := _CLOCK.fullmatch(written):
        first, second, third = match.groups()
        days = 0
        if third is not None:
            hours, minutes, seconds = int(first), int(second), int(third)
        elif second is not None:
            hours, minutes, seconds = 0, int(first), int(second)
        elif bare_hours:
            hours, minutes, seconds = int(first), 0, 0
        else:
            hours, minutes, seconds = 0, int(first), 0
    elif written and (match := _WORDS.fullmatch(written)):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    else:
        return None
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def slurm_time(minutes: int | None) -> str:
    """As Slurm writes it: "04:00:00", "2-12:00:00", "UNLIMITED"."""
    if minutes is None:
        return "UNLIMITED"
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60:02d}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def time_text(minutes: int | None) -> str:
    """As people say it: "90 min", "4 h", "2 d 12 h", "no limit"."""
    if minutes is None:
        return "no limit"
    if minutes < 120 and minutes % 60:
        return f"{minutes} min"
    days, rest = divmod(minutes, 24 * 60)
    hours, left = divmod(rest, 60)
    if days and not left and days * 24 + hours <= 72:
        days, hours = 0, days * 24 + hours
    parts = [
        f"{days} d" if days else "",
        f"{hours} h" if hours else "",
        f"{left} min" if left else "",
    ]
    return " ".join(part for part in parts if part) or "0 min"
