"""Runs of checkpoints alone, as the llama workloads: so many are written, then so many read back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.bench.emulate.cache import evict, residency_of
from headrace.bench.emulate.checkpoint import Checkpointer, Restored, Saved
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.bench.config.load import LoadedWorkload
    from headrace.bench.emulate.group import Group

__all__ = ["CheckpointsRecorded", "run_checkpoints"]

_EPOCH: Final = 1
_RESIDENCY_FILES: Final = 500
_COLD_SHARE_MOST: Final = 0.02


@dataclass(slots=True)
class CheckpointsRecorded:
    """What this process wrote and read.

    Attributes:
        residency_before_reads: the share of the checkpoints' bytes in this host's page cache before the
            first was read; None when nobody can tell, or none was read.
    """

    saved: list[Saved] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    residency_before_reads: float | None = None


def run_checkpoints(
    loaded: LoadedWorkload,
    accelerators: int,
    group: Group,
    *,
    cold: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointsRecorded:
    """Write `num_checkpoints_write` and read `num_checkpoints_read`, each after `time_between_checkpoints`.

    Args:
        loaded: the workload.
        accelerators: of each process.
        group: all processes.
        cold: put the checkpoints out of the page cache before they are read, and see that it is so.
        progress: called with (done, of how many).

    Raises:
        WorkloadError: the model cannot be spread over so many.
        VolumeError: the disk is full, or the system refuses.
        CheckpointError: one cannot be read back.
        BenchError: a rank is gone, or the page cache keeps what was written.
    """
    options = loaded.workload.checkpoint
    writes, reads = max(0, options.num_checkpoints_write), max(0, options.num_checkpoints_read)
    # DLIO takes the absolute value, so that its default of -1 sleeps a second; here it is none.
    between_s = max(0.0, options.time_between_checkpoints)
    recorded = CheckpointsRecorded()
    checkpointer = Checkpointer(loaded, group, accelerators)

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, writes + reads)

    try:
        for number in range(1, writes + 1):
            time.sleep(between_s)
            checkpointer.save(_EPOCH, number, number)
            tell(number)
        checkpointer.settle()
        recorded.saved = checkpointer.saved
        group.barrier(24 * 3600.0)
        if reads:
            readers = checkpointer.shifted()
            recorded.residency_before_reads = _residency(checkpointer, cold=cold)
            for number in range(1, reads + 1):
                time.sleep(between_s)
                recorded.restored.append(checkpointer.load(_EPOCH, number, number, readers))
                tell(writes + number)
    finally:
        checkpointer.close()
    return recorded


def _residency(checkpointer: Checkpointer, *, cold: bool) -> float | None:
    paths = checkpointer.paths()
    if cold:
        evict(paths)
    share = residency_of(paths, _RESIDENCY_FILES).share
    if cold and (share is None or share > _COLD_SHARE_MOST):
        told = "nobody can tell" if share is None else f"{share:.1%} is still there"
        raise BenchError(
            f"the checkpoints cannot be put out of the page cache: {told}.",
            next_step="On tmpfs it is impossible. Run without --cold.",
        )
    return share
