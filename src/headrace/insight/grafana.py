"""The Grafana dashboard: who starves, where bytes came from, what the daemons hold.

The dashboard is `grafana.json` beside this file, as Grafana exports and imports it. A test runs each of
its queries against a Prometheus that scrapes a daemon at work.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["dashboard"]


def dashboard() -> str:
    """The dashboard as JSON; Grafana asks for the Prometheus to use when it is imported."""
    return Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
