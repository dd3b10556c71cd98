"""Checkpoints between epochs: written, synced, measured.

Files are named, sized and spread over ranks as DLIO's. Bytes are as incompressible as the data set's, from a
small pool: no copy of the model stands in memory. The disk is asked to keep them where the workload says
`fsync`: DLIO has the key, and does not.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.bench.content import BLOCK_BYTES, Content
from headrace.bench.model import ModelSpec, Parallelism, Transformer
from headrace.errors import WorkloadError
from headrace.store.output_file import write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.config.load import LoadedWorkload
    from headrace.bench.config.sections import Model
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
    checkpoint = loaded.workload.checkpoint
    found = []
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


def _model_spec(model: Model) -> ModelSpec:
    return ModelSpec(
        type=model.type, model_size_bytes=model.model_size_bytes,
        model_datatype=model.model_datatype, optimizer_datatype=model.optimizer_datatype,
        num_layers=model.num_layers, optimization_groups=model.optimization_groups,
        layer_parameters=model.layer_parameters,
        parallelism=Parallelism(
            tensor=model.parallelism_tensor, pipeline=model.parallelism_pipeline,
            data=model.parallelism_data, zero_stage=model.parallelism_zero_stage,
        ),
        transformer=Transformer(
            vocab_size=model.transformer_vocab_size, hidden_size=model.transformer_hidden_size,
            ffn_hidden_size=model.transformer_ffn_hidden_size,
            num_attention_heads=model.transformer_num_attention_heads,
            num_kv_heads=model.transformer_num_kv_heads,
        ),
    )  # fmt: skip


class Checkpointer:
    """Writes this rank's share of every checkpoint.

    Args:
        loaded: the workload.
        first: the first accelerator's number of this process.
        accelerators: of this process.
        world: accelerators of all processes.

    Raises:
        WorkloadError: the model cannot be spread over so many.
    """

    def __init__(self, loaded: LoadedWorkload, first: int, accelerators: int, world: int) -> None:
        self._options = loaded.workload.checkpoint
        spec = _model_spec(loaded.workload.model)
        self._files: list[tuple[str, int]] = []
        for rank in range(first, first + accelerators):
            try:
                share = spec.share(rank, world)
            except ValueError as e:
                raise WorkloadError(
                    f"{loaded.at('model.parallelism')}: {e}.",
                    next_step="Change the accelerators, or model.parallelism.",
                ) from e
            files = {**share.model, **share.optimizer}
            self._files += [(name, sum(sizes)) for name, sizes in files.items()]
        self._size = sum(size for _, size in self._files)
        self._first = first
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
            if self._files:
                check_free_space(folder, self._size)
            for number, (name, size) in enumerate(self._files):
                self._write(folder / name, self._first << 20 | number, size)
        except OSError as e:
            raise write_error(e, str(folder)) from e
        if self._options.rank_sync:
            group.barrier()
        return Saved(epoch, start_s, time.perf_counter() - begin, self._size)

    def _write(self, path: Path, number: int, size: int) -> None:
        with path.open("wb", buffering=0) as file:
            if self._options.randomize_tensor:
                for block in self._content.stream(number).blocks(size):
                    _write_all(file.fileno(), block)
            else:
                ones = np.ones(BLOCK_BYTES, np.uint8)
                for at in range(0, size, BLOCK_BYTES):
                    _write_all(file.fileno(), ones[: size - at])
            if self._options.fsync:
                os.fsync(file.fileno())


def _write_all(fd: int, block: NDArray[np.uint8]) -> None:
    view = block.data
    while view:
        view = view[os.write(fd, view) :]
