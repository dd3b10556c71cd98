"""Governed: a daemon that keeps to what a controller says: its allowances, and the agent that asks.

Joins three that do not know one another: the loop, which must not wait; the agent's thread, which
may; and the allowances, which both may touch.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from headrace.control.agent import Agent
from headrace.control.messages import PlaneState
from headrace.node.allowances import Allowances

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.control.client import Endpoint
    from headrace.control.messages import Lease

__all__ = ["Governed"]

LOOK_S = 0.5
"""The agent waits so long for the loop's figures, then reports without."""

JOBS_MAX = 4096


class _Host(Protocol):
    """What is needed of the daemon."""

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run a function in the loop. Thread-safe."""

    def describe(self) -> dict[str, Any]:
        """The daemon's state."""

    def set_job_quotas(self, quotas: dict[str, int]) -> None:
        """Memory for the samples of some jobs."""


class Governed:
    """What makes a daemon keep to policies.

    Args:
        endpoint: the controller.
        host: the daemon.
    """

    def __init__(self, endpoint: Endpoint, host: _Host) -> None:
        self._host = host
        self.allowances = Allowances()
        self.agent = Agent(endpoint, self.allowances, self._state, self._leased)
        self.allowances.poke = self.agent.poke
        self.allowances.wake = lambda: host.call_soon(_nothing)
        self._caches: dict[str, int] = {}

    def start(self) -> None:
        """Begin to ask."""
        self.agent.start()

    def close(self) -> None:
        """Give the controller back what was leased, if it answers at once."""
        self.agent.close()

    def describe(self) -> dict[str, Any]:
        """How it fares, as plain values."""
        return {**self.agent.describe(), **self.allowances.describe()}

    # -- in the agent's thread --------------------------------------------------------------------

    def _state(self) -> PlaneState:
        looked = threading.Event()
        found: list[PlaneState] = []

        def look() -> None:
            found.append(_plane_state(self._host.describe()))
            looked.set()

        self._host.call_soon(look)
        looked.wait(LOOK_S)
        return found[0] if found else PlaneState()

    def _leased(self, lease: Lease) -> None:
        if lease.caches != self._caches:
            self._caches = lease.caches
            self._host.call_soon(lambda: self._host.set_job_quotas(dict(lease.caches)))


def _nothing() -> None:
    """Wakes the loop."""


def _plane_state(described: dict[str, Any]) -> PlaneState:
    datasets = described["datasets"]
    delivered = sum(data["delivered_bytes"] for data in datasets)
    ram = sum(data["ram_bytes"] for data in datasets)
    return PlaneState(
        held_bytes=described["held_bytes"],
        ram_bytes=described["ram_bytes"],
        delivered_bytes={"ram": ram, "source": max(0, delivered - ram)},
        stall_s=described["stall_s"],
        sessions={
            job["name"]: job["sessions"] for job in described["jobs"][:JOBS_MAX] if job["name"]
        },
    )
