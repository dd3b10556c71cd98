"""Source: who gives the pages what they show; a real cluster, or a recorded one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.telemetry.history import JobRecord
    from headrace.web.picture import Cluster

__all__ = ["Source"]


class Source(Protocol):
    """Looks at something. Called by one thread at a time; what it returns is not changed afterwards.

    Attributes:
        label: stands on every page: `recorded demo`; '' for what is real.
        period_s: between two looks.
    """

    label: str
    period_s: float

    def cluster(self) -> Cluster:
        """Nodes, GPUs and running jobs now.

        Raises:
            HeadraceError: nothing can be seen.
        """
        ...

    def records(self) -> Sequence[JobRecord]:
        """Jobs of the last day."""
        ...

    def storage(self) -> list[dict[str, Any]]:
        """File systems, what weighs on them over time and the jobs behind it; see `storage`."""
        ...

    def job(self, job_id: str) -> dict[str, Any] | None:
        """A job over time; None: nothing is known of it."""
        ...

    def close(self) -> None:
        """Let go."""
        ...
