"""Place: where histories lie that nobody names. Apart from the agent: who only asks shall not load it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["default_history", "history_place"]


def default_history(environment: Mapping[str, str] | None = None) -> Path:
    """Where an agent keeps it: HEADRACE_HISTORY, else `headrace/history` in the user's state folder."""
    environment = os.environ if environment is None else environment
    given = environment.get("HEADRACE_HISTORY", "")
    if given and "://" not in given:
        return Path(given)
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(state) / "headrace/history"


def history_place(environment: Mapping[str, str] | None = None) -> str:
    """Where a history is read from that nobody names: HEADRACE_HISTORY, which may be a URL, or the user's."""
    environment = os.environ if environment is None else environment
    return environment.get("HEADRACE_HISTORY") or str(default_history(environment))
