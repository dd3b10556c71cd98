"""Which paths of this process lie on a simulated storage, for those who read files in native code.

Set by `headrace.testing.simulated_files`, whose own layers over `open` such readers pass by. The latest
counts, as long as it is there; forked children inherit it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import _native

__all__ = ["SimulatedPaths", "simulate_paths", "simulated_paths", "stop_simulating"]


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedPaths:
    """Folders, and what they are like."""

    model: _native.SlowModel
    """The storage."""

    roots: tuple[str, ...]
    """Resolved paths of folders or files that are on it."""


_simulated: tuple[SimulatedPaths, ...] = ()


def simulated_paths() -> SimulatedPaths | None:
    """Return what is simulated now; None: all is as fast as it is."""
    return _simulated[-1] if _simulated else None


def simulate_paths(paths: SimulatedPaths) -> None:
    """Simulate from now on."""
    global _simulated  # noqa: PLW0603 - a process has one
    _simulated = (*_simulated, paths)


def stop_simulating(paths: SimulatedPaths) -> None:
    """Simulate these no more, whatever else has come since."""
    global _simulated  # noqa: PLW0603 - a process has one
    _simulated = tuple(others for others in _simulated if others is not paths)
