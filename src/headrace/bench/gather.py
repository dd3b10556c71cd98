"""Gather: what all ranks recorded of a run, in rank 0, as the figures that its summary is made of."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.results.hosts import host_document
from headrace.bench.results.summary import Figures, block_document, block_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.bench.emulate.checkpoint import Restored
    from headrace.bench.emulate.group import Group
    from headrace.bench.emulate.run import Recorded
    from headrace.bench.metrics.dlio import Formula

__all__ = ["gather_figures"]

_WAITS_MAX: Final = 200_000
"""Waits of a rank that are sent to rank 0 for percentiles, at most, evenly taken."""

_DEADLINE_S: Final = 300.0


def gather_figures(
    group: Group,
    recorded: Recorded,
    *,
    accelerators: int,
    formula: Formula,
    started: float,
    ceiling: Recorded | None,
    restored: Sequence[Restored],
    writer: str | None,
    where: dict[str, Any],
    notes: Sequence[str],
) -> Figures | None:
    """All ranks call it; only rank 0 gets something.

    Args:
        group: all ranks.
        recorded: this rank's part.
        accelerators: of each rank.
        formula: of throughput.
        started: seconds since 1970.
        ceiling: the same steps on a null store, if they were run.
        restored: checkpoints that this rank read back.
        writer: of checkpoints, if there are any.
        where: provenance.
        notes: for people.

    Raises:
        BenchError: a rank is gone.
    """
    waits = [float(wait) for part in recorded.batch_waits_s for wait in part]
    every = group.gather({
        "blocks": [block_document(block) for block in recorded.blocks],
        "ceiling": [block_document(block) for block in ceiling.blocks] if ceiling else [],
        "host": host_document(),
        "numbers": [recorded.nbytes, recorded.device_bytes, recorded.cpu_s],
        "phases": recorded.phases_s,
        "saved": [asdict(saved) for saved in recorded.checkpoints],
        "restored": [asdict(each) for each in restored],
        "waits": waits[:: len(waits) // _WAITS_MAX + 1],
    }, _DEADLINE_S)  # fmt: skip
    if not every:
        return None
    hosts = {part["host"]["hostname"]: part["host"] for part in every}
    numbers = [sum(part["numbers"][i] for part in every) for i in range(3)]
    return Figures(
        engine=recorded.engine,
        formula=formula,
        start_s=started,
        end_s=time.time(),
        accelerators=accelerators * group.place.world_size,
        blocks=[block_of(b) for part in every for b in part["blocks"]],
        ceiling=[block_of(b) for part in every for b in part["ceiling"]],
        hosts=list(hosts.values()),
        nbytes=int(numbers[0]),
        device_bytes=int(numbers[1]),
        cpu_s=numbers[2],
        batch_waits_s=[wait for part in every for wait in part["waits"]],
        # Ranks meet at every block: the one that took longest is the one the others waited for.
        phases_s=max((part["phases"] for part in every), key=lambda phases: sum(phases.values())),
        checkpoints=_slowest([part["saved"] for part in every]),
        restores=_slowest([part["restored"] for part in every]),
        blocking_s=[
            max(saved["blocking_s"] for saved in of_all)
            for of_all in zip(*(part["saved"] for part in every), strict=True)
        ],
        checkpoint_writer=writer,
        provenance=where,
        notes=notes,
    )


def _slowest(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[float, int]]:
    """Of each checkpoint: the slowest rank's time, and all ranks' bytes."""
    return [
        (max(one["duration_s"] for one in of_all), sum(one["nbytes"] for one in of_all))
        for of_all in zip(*ranks, strict=True)
    ]
