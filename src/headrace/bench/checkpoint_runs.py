"""Checkpoints of a run: between epochs, in the middle of them, or alone; written, synced, read back, measured.

Files are named, sized and spread over ranks as DLIO's. A process writes the shares of all of its
accelerators, side by side. Runs of checkpoints alone, as the llama workloads, write so many, then read so
many back.
"""

from __future__ import annotations

import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.bench.checkpoints import ModelSpec, writer_of
from headrace.bench.staging import make_cold, residency_of
from headrace.errors import BenchError, WorkloadError
from headrace.store.output_file import write_error
from headrace.store.publish import check_free_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.bench.checkpoints import CheckpointWriter, WriterName
    from headrace.bench.config import LoadedWorkload
    from headrace.bench.ranks import RankGroup


_SIDE_BY_SIDE: Final = 16
"""Accelerators of a process that write at the same time."""

_DEADLINE_S: Final = 24 * 3600.0
"""For the slowest rank's checkpoint."""


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """A checkpoint that was written or read back by this process.

    Attributes:
        number: of its epoch, from 1.
        start_s: seconds since 1970.
        duration_s: until its bytes were where the writer promises them, or in memory.
        blocking_s: that training stood still for writing it.
    """

    epoch: int
    number: int
    start_s: float
    duration_s: float
    nbytes: int
    blocking_s: float = 0.0


def writer_name(loaded: LoadedWorkload) -> WriterName:
    """The writer that a workload asks for: `checkpoint.writer`, or what DLIO's `checkpoint.fsync` means."""
    options = loaded.workload.checkpoint
    if options.writer is not None:
        return options.writer  # type: ignore[return-value]  # the key's converter checked it
    return "fsync" if options.fsync else "plain"


def checkpoint_problems(loaded: LoadedWorkload, world: int) -> list[tuple[str, str]]:
    """What is wrong with a workload's checkpoints on so many accelerators: (key, why)."""
    checkpoint, model = loaded.workload.checkpoint, loaded.workload.model
    alone = not loaded.workload.workflow.train
    problems = []
    if alone and checkpoint.num_checkpoints_write <= 0 and checkpoint.num_checkpoints_read <= 0:
        problems.append((
            "checkpoint.num_checkpoints_write",
            "and num_checkpoints_read are not above 0, so there is nothing to run",
        ))  # fmt: skip
    if not alone:
        problems += [
            (f"checkpoint.{name}", "is for runs of checkpoints alone (workflow.train=False)")
            for name in ("num_checkpoints_write", "num_checkpoints_read")
            if getattr(checkpoint, name) > 0
        ]
    output = loaded.workload.output
    left_out = output.metric_exclude_start_steps + output.metric_exclude_end_steps
    if not alone and 0 <= checkpoint.steps_between_checkpoints <= left_out:
        # DLIO measures the steps between two checkpoints by themselves, and leaves out some of them.
        why = f"is {checkpoint.steps_between_checkpoints}, expected at least {left_out + 1}, or -1"
        problems.append(("checkpoint.steps_between_checkpoints", why))
    if checkpoint.fsync and checkpoint.writer == "plain":
        problems.append(("checkpoint.fsync", "is true, and checkpoint.writer=plain does not sync"))
    if checkpoint.local_folder is not None and checkpoint.writer != "headrace":
        problems.append(("checkpoint.local_folder", "is for checkpoint.writer=headrace alone"))
    whole = model.parallelism_tensor * model.parallelism_pipeline * model.parallelism_data
    if checkpoint.mode == "subset" and model.parallelism_data < 0:
        problems.append(
            ("checkpoint.mode", "is subset: it needs model.parallelism.data, of the whole")
        )
    elif checkpoint.mode == "default" and model.parallelism_data > 0 and world < whole:
        why = (
            f"makes tensor x pipeline x data = {whole} accelerators, there are {world}; with "
            "checkpoint.mode=subset they write their part"
        )
        problems.append(("model.parallelism.data", why))
    return problems


class RunCheckpointer:
    """Writes and reads the shares of this process's accelerators.

    Raises:
        WorkloadError: the model cannot be spread over so many.
    """

    def __init__(self, loaded: LoadedWorkload, group: RankGroup, accelerators: int) -> None:
        self._loaded, self._group = loaded, group
        self._options = loaded.workload.checkpoint
        self._count, self._world = accelerators, accelerators * group.place.world_size
        self._first = accelerators * group.place.rank
        try:
            self._spec = ModelSpec(loaded.workload.model)
            self._spec.data_parallelism(self._world)
        except ValueError as e:
            raise WorkloadError(
                f"{loaded.at('model.parallelism')}: {e}.",
                next_step="Change the accelerators, or model.parallelism.",
            ) from e
        self._run = group.broadcast(secrets.token_hex(8) if group.place.is_first else None)
        self._writers = [self._writer(self._first + n) for n in range(accelerators)]
        self._size = sum(
            self._spec.share(self._first + n, self._world).nbytes for n in range(accelerators)
        )
        self._pool = ThreadPoolExecutor(min(accelerators, _SIDE_BY_SIDE), "accelerator-checkpoint")
        self._running: tuple[int, int, float] | None = None
        self.saved: list[CheckpointTimes] = []

    def _writer(self, number: int) -> CheckpointWriter:
        return writer_of(
            writer_name(self._loaded), self._options.checkpoint_folder,
            self._spec.share(number, self._world), rank=number, world_size=self._world,
            local=self._options.local_folder, seed=self._loaded.workload.train.seed,
            random=self._options.randomize_tensor, run=self._run,
        )  # fmt: skip

    @property
    def steps_between(self) -> int | None:
        """Steps between checkpoints in the middle of epochs; None: they follow epochs."""
        steps = self._options.steps_between_checkpoints
        return steps if steps > 0 else None

    def due(self, epoch: int) -> bool:
        """Whether a checkpoint follows an epoch, counted from 1."""
        since = epoch - self._options.checkpoint_after_epoch
        every = self._options.epochs_between_checkpoints
        return self.steps_between is None and since >= 0 and since % every == 0

    def save(self, epoch: int, step: int, number: int = 1) -> None:
        """Write a checkpoint; all ranks call it. Returns when training may go on.

        Raises:
            VolumeError: the disk is full, or the system refuses.
            CheckpointError: the writer headrace has one of this step already.
        """
        self.settle()
        if self._size:
            place = Path(self._options.checkpoint_folder)
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise write_error(e, str(place)) from e
            check_free_space(place, self._size)
        self._group.barrier(_DEADLINE_S)
        self._running = (epoch, number, time.time())
        list(self._pool.map(lambda writer: writer.save(epoch, step), self._writers))
        if writer_name(self._loaded) != "headrace":
            self.settle()

    def settle(self) -> None:
        """Wait until the last checkpoint is complete, and note what it took; errors as for `save`."""
        if self._running is None:
            return
        (epoch, number, start_s), self._running = self._running, None
        times = [writer.wait() for writer in self._writers]
        total_s = max(each.total_s for each in times)
        blocking_s = max(each.blocking_s for each in times)
        if writer_name(self._loaded) != "headrace":
            total_s = blocking_s = time.time() - start_s
        if self._options.rank_sync:
            begin = time.monotonic()
            self._group.barrier(_DEADLINE_S)
            total_s += time.monotonic() - begin
        nbytes = sum(each.nbytes for each in times)
        self.saved.append(CheckpointTimes(epoch, number, start_s, total_s, nbytes, blocking_s))

    def shifted(self) -> list[CheckpointWriter]:
        """What reads: of the accelerators of the next host with `recovery_rank_shift`, else our own.

        What a host wrote lies in its page cache; after the shift each reads what another host wrote.
        """
        if not self._options.recovery_rank_shift:
            return self._writers
        host = _host()
        hosts = self._group.broadcast(self._group.gather(host))
        here = hosts.count(host) * self._count
        return [self._writer((self._first + n + here) % self._world) for n in range(self._count)]

    def load(
        self, epoch: int, step: int, number: int, readers: list[CheckpointWriter]
    ) -> CheckpointTimes:
        """Read a checkpoint back; all ranks call it.

        Raises:
            CheckpointNotFound: there is none of this step.
            CorruptCheckpoint: it has not the bytes that it should have.
        """
        self._group.barrier(_DEADLINE_S)
        start_s, begin = time.time(), time.monotonic()
        nbytes = sum(self._pool.map(lambda reader: reader.load(epoch, step), readers))
        if self._options.rank_sync:
            self._group.barrier(_DEADLINE_S)
        return CheckpointTimes(epoch, number, start_s, time.monotonic() - begin, nbytes)

    def close(self) -> None:
        """Wait for what is still written, and give back memory."""
        try:
            for writer in self._writers:
                writer.close()
        finally:
            self._pool.shutdown()


def _host() -> str:
    return os.uname().nodename


def require_checkpoints(loaded: LoadedWorkload) -> None:
    """Refuse to read what was not written and will not be.

    Raises:
        BenchError: a checkpoint is missing; names its folder.
    """
    options = loaded.workload.checkpoint
    if writer_name(loaded) == "headrace":
        return  # says so itself
    for step in range(max(0, options.num_checkpoints_write) + 1, options.num_checkpoints_read + 1):
        place = Path(options.checkpoint_folder) / f"global_epoch1_step{step}"
        if not place.is_dir():
            raise BenchError(
                f"{place}: there is no such checkpoint, and {loaded.at('checkpoint.num_checkpoints_read')} "
                f"is {options.num_checkpoints_read}.",
                path=str(place),
                next_step="Write as many as are read, or correct checkpoint.checkpoint_folder.",
            )


_EPOCH: Final = 1
_RESIDENCY_FILES: Final = 500


def run_checkpoints(
    loaded: LoadedWorkload,
    accelerators: int,
    group: RankGroup,
    *,
    cold: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[CheckpointTimes], list[CheckpointTimes], float | None]:
    """Write `num_checkpoints_write` and read `num_checkpoints_read`, each after `time_between_checkpoints`.

    Returns:
        What this process wrote and read, and the share of the checkpoints' bytes in this host's page cache
        before the first was read; None when nobody can tell, or none was read.

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
    restored: list[CheckpointTimes] = []
    residency = None
    checkpointer = RunCheckpointer(loaded, group, accelerators)

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, writes + reads)

    try:
        for number in range(1, writes + 1):
            time.sleep(between_s)
            checkpointer.save(_EPOCH, number, number)
            tell(number)
        checkpointer.settle()
        group.barrier(24 * 3600.0)
        if reads:
            readers = checkpointer.shifted()
            paths = [
                os.path.join(place, name)
                for place, _, names in os.walk(options.checkpoint_folder)
                for name in names
            ]
            if cold:
                make_cold(
                    paths,
                    _RESIDENCY_FILES,
                    "the checkpoints",
                    "On tmpfs it is impossible. Run without --cold.",
                )
            residency = residency_of(paths, _RESIDENCY_FILES).share
            for number in range(1, reads + 1):
                time.sleep(between_s)
                restored.append(checkpointer.load(_EPOCH, number, number, readers))
                tell(writes + number)
    finally:
        checkpointer.close()
    return checkpointer.saved, restored, residency
