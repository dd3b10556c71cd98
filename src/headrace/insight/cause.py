"""Cause: why a training step waited for data; defined where stages and agents can use it, too."""

from __future__ import annotations

from headrace.plane.cause import SENTENCES, Cause

__all__ = ["SENTENCES", "Cause"]
