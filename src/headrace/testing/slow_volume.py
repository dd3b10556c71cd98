"""SlowVolume: one simulated storage that can be made slower or faster while it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.io.simulation import Simulation, simulation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace import _native


class SlowVolume:
    """A simulated storage in use. Give it to `simulate=` of a loader, or to `simulated_files`.

    Its queues and steps are shared with processes that are forked after it was made; it cannot be
    sent to a process in another way.

    Args:
        simulation: what it is like: a preset's name or a `Simulation`.
    """

    def __init__(self, simulation: str | Simulation) -> None:
        self.simulation = simulation_of(simulation)
        self.model: _native.SlowModel = self.simulation.model()

    @property
    def label(self) -> str:
        """What to call figures that were measured on it: `simulated NAME`."""
        return self.model.label

    def scale_latency(self, factor: float) -> None:
        """Multiply all latencies by `factor` from now on: 1 is as the simulation says.

        Raises:
            ValueError: the factor is not positive.
        """
        self.model.scale_latency(factor)

    def stats(self) -> Mapping[str, float]:
        """`requests`, `bytes`, `errors` and `delay_s` (their sum) so far, of all processes."""
        return self.model.stats()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a SlowVolume cannot be pickled: its queues are shared by fork only")
