"""Evidence: what is known about a stretch of a run beside its steps. Plain values.

A live loader, a trace and an agent can all fill it in; what nobody measured stays at its default, and makes
a verdict less sure rather than wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

Source = Literal["local", "network", "peer"]
"""Where the bytes lie: on a file system of this node, in an object store, on other nodes."""

_SOURCES: Final = ("local", "network", "peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a stretch of time. All counts are of that stretch alone."""

    source: Source = "local"
    file_system: str = ""
    """That the data lie on, in words; ''."""
    reads_allowed: int = 0
    """Reads in flight that the loader may have; 0: not known."""
    reads_possible: int = 0
    """That it could be given; 0: not known."""
    reads_set: bool = False
    """Somebody set the number on purpose: nobody turns it."""
    buffer_bytes: int = 0
    """Bytes of batches that may be read or wait; 0: not known."""
    idle_latency_s: float = 0.0
    """Of a read that meets an idle storage, where it was measured at another time; 0.0: it was not."""
    peak_bytes_per_s: float = 0.0
    """The most that this storage was ever seen to deliver; 0.0: not known."""
    more_reads_in_vain: bool = False
    """The tuner tried more reads in flight, and got no more out of it."""
    limit_bytes_per_s: float = 0.0
    """A limit on this loader's rate; 0.0: none."""
    interpreter_looks: int = 0
    """How often somebody looked whether the interpreter's lock was to be had."""
    interpreter_contended: int = 0
    """How often it was not."""
    decode_threads: int = 0
    """Threads or processes that decode; 0: not known."""
    cpus: int = 0
    """That this process may use; 0: not known."""
    cpu_share: float = math.nan
    """Of them, in use."""
    io_pressure: float = math.nan
    """Share of time in which some task waited for I/O (PSI)."""
    remote_retries: int = 0
    """Requests to remote volumes that were repeated."""
    remote_requests: int = 0
    simulation: str = ""
    """`simulated lustre` where the storage is not real."""

    def sane(self) -> Evidence:
        """The same without what no honest counter says: it counts as not known."""
        bad: dict[str, object] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool | str):
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                bad[each.name] = each.default  # NaN, where that is what is not known
        if self.interpreter_contended > self.interpreter_looks:
            bad["interpreter_contended"] = 0  # they are of different stretches
        if self.source not in _SOURCES:
            bad["source"] = "local"
        return replace(self, **bad) if bad else self  # type: ignore[arg-type]

    @property
    def contended(self) -> float:
        """Share of the looks at which another held the interpreter's lock."""
        looks = self.interpreter_looks
        return min(1.0, self.interpreter_contended / looks) if looks > 0 else 0.0
