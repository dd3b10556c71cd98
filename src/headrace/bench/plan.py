"""Plan: which samples each accelerator reads in each step. A pure function of epoch, accelerator and step.

Shuffles are real: of all samples when samples are shuffled, of files when only files are. Without a
shuffle each accelerator reads a contiguous part, as DLIO does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from headrace.bench.replay import replay_of
from headrace.errors import WorkloadError
from headrace.order import Shuffled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.config import LoadedWorkload
    from headrace.bench.replay import RecordedOrder


Shuffle = Literal["samples", "files", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A split's epochs.

    Attributes:
        split: train or valid.
        batch: samples of a step of one accelerator.
        accelerators: of all processes.
        steps: of every accelerator in every epoch; what does not fill a step of all is left out.
        new_order: another order in every epoch.
        recorded: a recorded job's order, instead of a shuffle.
    """

    split: Literal["train", "valid"]
    files: int
    samples_per_file: int
    batch: int
    accelerators: int
    steps: int
    shuffle: Shuffle
    seed: int
    new_order: bool = True
    recorded: RecordedOrder | None = None

    @property
    def samples(self) -> int:
        """Samples of the split."""
        return self.files * self.samples_per_file

    def indices(self, epoch: int, accelerator: int, step: int) -> NDArray[np.int64]:
        """The samples of a step: int64, shape (batch,); sample i lies in file i // samples_per_file.

        Of a recorded job the last step of an epoch may have fewer.
        """
        if self.recorded is not None:
            start = (step * self.accelerators + accelerator) * self.batch
            return self.recorded.slice(epoch, start, start + self.batch)
        key = epoch if self.new_order else 0
        if self.shuffle == "none":
            start = (accelerator * self.steps + step) * self.batch
            return np.arange(start, start + self.batch, dtype=np.int64)
        start = (step * self.accelerators + accelerator) * self.batch
        stop = start + self.batch
        if self.shuffle == "samples":
            return Shuffled(self.samples, self.seed).indices(key, start, stop)
        positions = np.arange(start, stop, dtype=np.int64)
        first, last = start // self.samples_per_file, (stop - 1) // self.samples_per_file
        files = Shuffled(self.files, self.seed).indices(key, first, last + 1)
        file = files[positions // self.samples_per_file - first]
        samples: NDArray[np.int64] = (
            file * self.samples_per_file + positions % self.samples_per_file
        )
        return samples


def plan_of(
    loaded: LoadedWorkload, split: Literal["train", "valid"], accelerators: int, seed: int
) -> StepPlan:
    """The plan of a workload's training or evaluation.

    Raises:
        WorkloadError: the data set is too small for a single step, or for total_training_steps.
    """
    data, reader, train = loaded.workload.dataset, loaded.workload.reader, loaded.workload.train
    of_train = split == "train"
    if data.requests is not None:
        return _recorded_plan(loaded, split, accelerators)
    files = data.num_files(split)
    batch = reader.batch_size if of_train else reader.batch_size_eval
    samples = files * data.num_samples_per_file
    available = samples // (batch * accelerators)
    steps = available
    if of_train and train.total_training_steps > 0:
        steps = train.total_training_steps
    if not available or steps > available:
        key = "dataset.num_files_train" if of_train else "dataset.num_files_eval"
        needed = batch * accelerators * max(steps, 1)
        raise WorkloadError(
            f"{loaded.at(key)}: {files:,} files of {data.num_samples_per_file:,} samples are "
            f"{available:,} steps of {accelerators:,} accelerators x {batch:,} samples, expected "
            f"{max(steps, 1):,}.",
            next_step=f"It takes at least {-(-needed // data.num_samples_per_file):,} files, or "
            "fewer accelerators, a smaller batch or fewer total_training_steps.",
        )
    shuffle: Shuffle = "none"
    if reader.sample_shuffle != "off":
        shuffle = "samples"
    elif reader.file_shuffle != "off":
        shuffle = "files"
    return StepPlan(
        split=split, files=files, samples_per_file=data.num_samples_per_file, batch=batch,
        accelerators=accelerators, steps=steps, shuffle=shuffle, seed=seed,
        new_order=train.seed_change_epoch,
    )  # fmt: skip


def _recorded_plan(
    loaded: LoadedWorkload, split: Literal["train", "valid"], accelerators: int
) -> StepPlan:
    """The plan of a recorded job: its own order. One accelerator reads all of it, several what is whole."""
    data, reader, train = loaded.workload.dataset, loaded.workload.reader, loaded.workload.train
    assert data.requests is not None
    replay = replay_of(data.requests)
    files = len(replay.names(split))
    if files != data.num_files(split):
        key = "dataset.num_files_train" if split == "train" else "dataset.num_files_eval"
        raise WorkloadError(
            f"{loaded.at(key)} is {data.num_files(split):,}, but {data.requests} has {files:,}.",
            next_step="A recorded job has as many files as were recorded; to change that leave out "
            "the exact requests: ++workload.dataset.requests=null.",
        )
    order = replay.order(split)
    batch = reader.batch_size if split == "train" else reader.batch_size_eval
    each = batch * accelerators
    steps = -(-order.reads // each) if accelerators == 1 else order.reads // each
    if not steps:
        raise WorkloadError(
            f"{data.requests}: {order.reads:,} reads of an epoch are no step of {accelerators:,} "
            f"accelerators x {batch:,} samples.",
            next_step="Give fewer accelerators, or a smaller batch.",
        )
    if split == "train" and train.total_training_steps > 0:
        steps = min(steps, train.total_training_steps)
    return StepPlan(
        split=split, files=files, samples_per_file=data.num_samples_per_file, batch=batch,
        accelerators=accelerators, steps=steps, shuffle="none", seed=train.seed, recorded=order,
    )  # fmt: skip
