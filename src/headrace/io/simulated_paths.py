"""Which paths of this process lie on a simulated storage, for those who read files in native code.

Set by `headrace.testing.simulated_files`, whose own replacements of `open` such readers pass by. One at
a time, inherited by forked children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace import _native

__all__ = ["SimulatedPaths", "simulate_paths", "simulated_paths"]


@dataclass(frozen=True, slots=True)
class SimulatedPaths:
    """Folders, and what they are like."""

    model: _native.SlowModel
    """The storage."""

    roots: tuple[str, ...]
    """Resolved paths of folders or files that are on it."""

    open: Callable[..., Any]
    """What stands in the place of `open` meanwhile, and takes its time."""


_paths: SimulatedPaths | None = None


def simulated_paths() -> SimulatedPaths | None:
    """Return what is simulated now; None: all is as fast as it is."""
    return _paths


def simulate_paths(paths: SimulatedPaths | None) -> SimulatedPaths | None:
    """Simulate from now on; return what was simulated before, to be put back."""
    global _paths
    before, _paths = _paths, paths
    return before
