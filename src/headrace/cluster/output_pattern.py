"""Output pattern: the file name that `--output` stands for: "logs/%x-%A_%4a.out"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["fill_pattern", "pattern_facts"]

_PLACE = re.compile(r"%(\d*)([%AaJjNnstux])")
_WIDTH_MAX = 10


def pattern_facts(
    job_id: str,
    name: str,
    user: str,
    *,
    array_id: str | None = None,
    task: int | None = None,
    node: str = "",
) -> dict[str, str]:
    """What the letters stand for, in a batch script: step, task and node are the first."""
    facts = {
        "A": array_id or job_id,
        "j": job_id,
        "J": job_id,
        "N": node,
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": user,
        "x": name,
        "%": "%",
    }
    if task is not None:
        facts["a"] = str(task)
    return facts


def fill_pattern(pattern: str, facts: Mapping[str, str]) -> str:
    """Fill in; a letter with no fact stays, numbers are padded to a width, a backslash turns all of it off."""
    if "\\" in pattern:
        return pattern.replace("\\", "")

    def fill(place: re.Match[str]) -> str:
        width, letter = place.groups()
        if letter not in facts:
            return place[0]
        found = facts[letter]
        return found.zfill(min(int(width), _WIDTH_MAX)) if width and found.isdigit() else found

    return _PLACE.sub(fill, pattern)
