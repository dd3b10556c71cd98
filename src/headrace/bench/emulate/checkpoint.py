"""Checkpoints of models that are one opaque blob, between epochs: written, synced, measured.

Files are named as DLIO names them. Bytes are as incompressible as the data set's, from a small pool: no copy
of the model stands in memory. The disk is asked to keep them where the workload says `fsync`: DLIO has the key
and does not.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.content import BLOCK_BYTES, Content
from headrace.store.output_file import write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.config.load import LoadedWorkload
    from headrace.bench.emulate.ranks import Group

__all__ = ["Checkpointer", "Saved", "checkpoint_problems"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written by this rank.

    Attributes:
        start_s: seconds since 1970.
        duration_s: until its bytes were written, and on the disk with `fsync`.
    """

    epoch: int
    start_s: float
    duration_s: float
    nbytes: int


def checkpoint_problems(loaded: LoadedWorkload) -> list[tuple[str, str]]:
    """What of a workload's checkpoints is not done: (key, why)."""
    model, checkpoint = loaded.workload.model, loaded.workload.checkpoint
    found = []
    if model.type == "transformer" or model.layer_parameters or model.optimization_groups:
        found.append(("model.type", "checkpoints of models in layers and shards are not written"))
    if checkpoint.steps_between_checkpoints >= 0:
        found.append((
            "checkpoint.steps_between_checkpoints",
            "checkpoints are written between epochs only",
        ))  # fmt: skip
    found += [
        (f"checkpoint.{name}", "runs of checkpoints alone are not done")
        for name in ("num_checkpoints_write", "num_checkpoints_read")
        if getattr(checkpoint, name) > 0
    ]
    if checkpoint.recovery_rank_shift:
        found.append(("checkpoint.recovery_rank_shift", "checkpoints are not read back"))
    return found


class Checkpointer:
    """Writes this rank's share of every checkpoint.

    Args:
        loaded: the workload.
        first: the first accelerator's number of this process.
        accelerators: of this process.
    """

    def __init__(self, loaded: LoadedWorkload, first: int, accelerators: int) -> None:
        self._options = loaded.workload.checkpoint
        self._size = loaded.workload.model.model_size_bytes
        every = self._options.type == "all_ranks"
        self._ranks = [r for r in range(first, first + accelerators) if every or r == 0]
        self._content = Content(loaded.workload.train.seed)

    def due(self, epoch: int) -> bool:
        """Whether a checkpoint follows an epoch, counted from 1."""
        since = epoch - self._options.checkpoint_after_epoch
        return since >= 0 and since % self._options.epochs_between_checkpoints == 0

    def save(self, epoch: int, step: int, group: Group) -> Saved:
        """Write a checkpoint; all ranks call it.

        Raises:
            VolumeError: the disk is full, or the system refuses.
        """
        folder = Path(self._options.checkpoint_folder) / f"global_epoch{epoch}_step{step}"
        group.barrier()
        start_s, begin = time.time(), time.perf_counter()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._ranks:
                check_free_space(folder, self._size * len(self._ranks))
            for rank in self._ranks:
                self._write(folder / f"model_states-{rank}.pt", rank)
        except OSError as e:
            raise write_error(e, str(folder)) from e
        if self._options.rank_sync:
            group.barrier()
        return Saved(
            epoch, start_s, time.perf_counter() - begin, self._size * len(self._ranks)
        )  # fmt: skip

    def _write(self, path: Path, rank: int) -> None:
        with path.open("wb", buffering=0) as file:
            if self._options.randomize_tensor:
                for block in self._content.stream(rank).blocks(self._size):
                    _write_all(file.fileno(), block)
            else:
                ones = np.ones(BLOCK_BYTES, np.uint8)
                for at in range(0, self._size, BLOCK_BYTES):
                    _write_all(file.fileno(), ones[: self._size - at])
            if self._options.fsync:
                os.fsync(file.fileno())


def _write_all(fd: int, block: NDArray[np.uint8]) -> None:
    view = block.data
    while view:
        view = view[os.write(fd, view) :]
