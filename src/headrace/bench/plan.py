"""Plan: which samples each accelerator reads in each step. A pure function of epoch, accelerator and step.

Shuffles are real: of all samples when samples are shuffled, of files when only files are. Without a
shuffle each accelerator reads a contiguous part, as DLIO does.

With `dataset.requests` files, sizes and order are those of a recorded job: the files have the recorded names
and sizes, whatever their format; generated ones hold noise, and the recorded folder itself is as good. Each
epoch asks for the recorded samples in the recorded order; where a run is longer than the record, it begins
again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from zlib import crc32

import numpy as np

from headrace.errors import RecordError, WorkloadError
from headrace.order import Shuffled
from headrace.recorded import SPLITS, read_recorded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.bench.config import LoadedWorkload
    from headrace.recorded import Recorded


@dataclass(frozen=True, slots=True)
class RecordedOrder:
    """The order of a split's samples.

    Attributes:
        places: int64 (reads,): samples, counted over the files in name order and their offsets.
        starts: int64 (epochs + 1,): where each epoch begins.
    """

    places: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def reads(self) -> int:
        """Of an epoch: the first one's."""
        return int(self.starts[1]) if len(self.starts) > 1 else 0

    def slice(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Reads `start` to `stop` of an epoch, from 1; the last step of an epoch may be shorter."""
        at = (epoch - 1) % (len(self.starts) - 1)
        whole = self.places[self.starts[at] : self.starts[at + 1]]
        stop = min(stop, self.reads)
        # An epoch that is shorter than the first begins again: all have as many steps.
        reads: NDArray[np.int64] = whole[np.arange(start, stop) % max(1, len(whole))]
        return reads


class Replay:
    """A record as a benchmark's data set."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self._files = {split: recorded.files_of(split) for split in SPLITS}
        self._of_name = {name: i for i, name in enumerate(recorded.names)}

    def names(self, split: str) -> list[str]:
        """A split's files, in the order in which they are counted."""
        return [self.recorded.names[i] for i in self._files[split].tolist()]

    def name(self, split: str, index: int) -> str:
        """One of them."""
        return self.recorded.names[int(self._files[split][index])]

    def folders(self, split: str) -> list[str]:
        """Where they lie, relative to the data folder."""
        return sorted({os.path.dirname(name) for name in self.names(split)})

    def file_bytes(self) -> NDArray[np.int64]:
        """Sizes of all files, training's first: int64 (files,)."""
        order = np.concatenate([self._files[split] for split in SPLITS])
        sizes: NDArray[np.int64] = self.recorded.file_bytes[order]
        return sizes

    def has(self, name: str) -> bool:
        """Whether a file is of the record."""
        return name in self._of_name

    def extents(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and lengths of a file's samples, in the order of offsets."""
        recorded = self.recorded
        rows = np.flatnonzero(recorded.sample_file == self._of_name[name])
        rows = rows[np.argsort(recorded.sample_offset[rows], kind="stable")]
        return recorded.sample_offset[rows], recorded.sample_bytes[rows]

    def order(self, split: str) -> RecordedOrder:
        """What each epoch reads."""
        recorded = self.recorded
        rank = np.full(len(recorded.names), -1, np.int64)
        rank[self._files[split]] = np.arange(len(self._files[split]))
        file = rank[recorded.sample_file]
        by_place = np.lexsort((recorded.sample_offset, file))
        by_place = by_place[file[by_place] >= 0]
        place = np.full(len(recorded.sample_file), -1, np.int64)
        place[by_place] = np.arange(len(by_place))
        if split == "train":
            return RecordedOrder(place[recorded.order], recorded.epoch_starts)
        return RecordedOrder(place[recorded.valid_order], recorded.valid_starts)


@lru_cache(maxsize=4)
def _read(path: str, changed_ns: int) -> Replay:  # noqa: ARG001 - another file is read again
    return Replay(read_recorded(Path(path)))


def replay_of(requests: str) -> Replay:
    """The record of a workload. Raises WorkloadError if the file is not there, or damaged."""
    try:
        changed_ns = os.stat(requests).st_mtime_ns if os.path.exists(requests) else 0
        return _read(requests, changed_ns)
    except RecordError as e:
        raise WorkloadError(
            f"dataset.requests: {e.message}", path=requests, next_step=e.next_step
        ) from e


def fingerprint(requests: str) -> str:
    """What a manifest keeps of a record: another record's files are others."""
    recorded = replay_of(requests).recorded
    names = "\n".join(recorded.names).encode("utf-8", "surrogateescape")
    sum_of = crc32(recorded.file_bytes.tobytes(), crc32(names))
    return f"{len(recorded.names)} files, {int(recorded.file_bytes.sum())} bytes, {sum_of:08x}"


Shuffle = Literal["samples", "files", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A split's epochs: each accelerator takes `steps` steps of `batch` samples in every one of them.

    What does not fill a step of all accelerators is left out. A recorded job's order is instead of a shuffle.
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

    Of a recorded job one accelerator reads all of its order, several what is whole.

    Raises:
        WorkloadError: the data set is too small for a single step, or for total_training_steps.
    """
    data, reader, train = loaded.workload.dataset, loaded.workload.reader, loaded.workload.train
    of_train = split == "train"
    key = "dataset.num_files_train" if of_train else "dataset.num_files_eval"
    files, batch = data.num_files(split), reader.batch_size if of_train else reader.batch_size_eval
    asked = train.total_training_steps if of_train and train.total_training_steps > 0 else None
    each, order = batch * accelerators, None
    if data.requests is not None:
        replay = replay_of(data.requests)
        recorded = len(replay.names(split))
        if recorded != files:
            raise WorkloadError(
                f"{loaded.at(key)} is {files:,}, but {data.requests} has {recorded:,}.",
                next_step="A recorded job has as many files as were recorded; to change that leave out "
                "the exact requests: ++workload.dataset.requests=null.",
            )
        order = replay.order(split)
        steps = -(-order.reads // each) if accelerators == 1 else order.reads // each
        if not steps:
            raise WorkloadError(
                f"{data.requests}: {order.reads:,} reads of an epoch are no step of {accelerators:,} "
                f"accelerators x {batch:,} samples.",
                next_step="Give fewer accelerators, or a smaller batch.",
            )
        steps, seed = min(steps, asked or steps), train.seed
    else:
        available = files * data.num_samples_per_file // each
        steps = asked or available
        if not available or steps > available:
            needed = each * max(steps, 1)
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
        new_order=train.seed_change_epoch, recorded=order,
    )  # fmt: skip
