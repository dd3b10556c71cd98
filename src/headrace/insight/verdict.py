"""Verdict: why training waited; defined where loaders and agents can use it, too."""

from __future__ import annotations

from headrace.control.stalls import Verdict, verdict_line, verdict_of

__all__ = ["Verdict", "verdict_line", "verdict_of"]
