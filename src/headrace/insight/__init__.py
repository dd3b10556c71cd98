"""What is seen of a node and its jobs, for people: dashboards, reports, and the live view of `headrace top`.

Nothing here draws on a terminal: that is the command line's part.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["alerts", "dashboard"]


def dashboard() -> str:
    """The Grafana dashboard as JSON; Grafana asks for the Prometheus to use when it is imported.

    It is `grafana.json` beside this file, as Grafana exports it. A test runs each of its queries against a
    Prometheus that scrapes a daemon at work.
    """
    return Path(__file__).with_name("grafana.json").read_text(encoding="utf-8")


def alerts() -> str:
    """Rules for Prometheus, as YAML: starving jobs, idle GPUs, dead agents, file systems near their limits."""
    return Path(__file__).with_name("alerts.yaml").read_text(encoding="utf-8")
