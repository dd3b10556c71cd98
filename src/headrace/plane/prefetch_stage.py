"""PrefetchStage: the native reader of a loader, seen as a stage.

The reader is made when it is first needed, and anew after `close` and in forked children; the
knobs that were turned last hold for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from headrace.io import simulation_of
from headrace.plane.stage import RemoteStats, StageStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.config import ReaderOptions

__all__ = ["PrefetchStage", "TurnableReader"]

_SAME_NAME = (
    "busy_s",
    "wait_input_s",
    "wait_output_s",
    "reads",
    "in_flight",
    "in_flight_s",
    "buffered_bytes",
    "ready_bytes",
    "bytes_by_tier",
)


class TurnableReader(Protocol):
    """What the stage needs of a `StoreReader`."""

    def stats(self) -> Mapping[str, Any]:
        """Statistics of this process's native reader; empty before it reads."""

    def remote(self) -> RemoteStats | None:
        """What the engine of remote volumes did in this process; None where there is none."""

    def turn(self, *, reads_in_flight: int | None = None, buffer_bytes: int | None = None) -> None:
        """Set its knobs."""


def _label(simulate: Any) -> str:
    """What figures of a simulated storage must be labelled with; '' for a real one."""
    if simulate is None:
        return ""
    label = getattr(getattr(simulate, "model", None), "label", None)  # of a SlowVolume
    return str(label) if label is not None else f"simulated {simulation_of(simulate).name}"


class PrefetchStage:
    """Reads batches ahead of their consumer.

    Args:
        reader: what does it.
        options: where the knobs stand at first.
    """

    name = "prefetch"

    def __init__(self, reader: TurnableReader, options: ReaderOptions) -> None:
        self._reader = reader
        self._simulation = _label(options.simulate)
        each = options.threads if options.engine == "threads" else options.queue_depth
        given = options.reads_in_flight or each * options.workers
        remote = reader.remote()
        if remote is not None and options.reads_in_flight is None:
            given = remote.reads_in_flight  # what waits inside of its engine is not in flight
        self._knobs = {"reads_in_flight": given, "buffer_bytes": options.budget_bytes}
        # What is shown is what holds: the reader starts the workers that so many reads take. Left to
        # their depths, two workers with small batches would have a handful of slow reads in flight.
        reader.turn(reads_in_flight=given)

    def stats(self) -> StageStats:
        """What the reader of this process did; zeros before it has begun."""
        found = self._reader.stats()
        remote = self._reader.remote()
        if not found:
            return StageStats(name=self.name, simulation=self._simulation, remote=remote)
        return StageStats(
            name=self.name,
            samples=found["delivered_samples"],
            bytes=found["delivered_bytes"],
            latency_us=tuple(found["latency_us"]),
            simulation=self._simulation,
            remote=remote,
            **{name: found[name] for name in _SAME_NAME},
        )

    def knobs(self) -> Mapping[str, int]:
        """Reads in flight and buffer bytes, as they were given or turned last."""
        return dict(self._knobs)

    def turn(self, knobs: Mapping[str, int]) -> None:
        """Set reads in flight, buffer bytes or both.

        Raises:
            ValueError: a value is not positive.
        """
        mine = {name: value for name, value in knobs.items() if name in self._knobs}
        for name, value in mine.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        self._knobs |= mine
        self._reader.turn(**mine)
