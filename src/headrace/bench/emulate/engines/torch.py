"""PyTorch's DataLoader as the engine: worker processes, prefetch factor and pinning as DLIO has them.

The data set decodes each sample as a training script does, and hands on a tensor of the size that the
workload asks for, made before, as DLIO does: what is measured is reading and decoding, not resizing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.emulate.engines.base import Delivered, Engine
from headrace.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.bench.emulate.engines.base import EngineContext

__all__ = ["TorchEngine"]


class TorchEngine(Engine):
    """A DataLoader for each accelerator and epoch.

    Raises:
        BenchError: torch is not installed.
    """

    name = "torch"
    ahead = False

    def __init__(self, context: EngineContext) -> None:
        try:
            import torch.utils.data
        except ModuleNotFoundError as e:
            raise BenchError(
                "the engine torch needs PyTorch, which is not installed.",
                next_step="pip install 'headrace[torch]'",
            ) from e
        self._torch: Any = torch
        self._context = context

    def open(self, split: str, epoch: int, accelerator: int) -> _LoaderSource:
        """Start the workers."""
        data = torch_utils_data(self._torch)
        reader, plan = self._context.workload.reader, self._context.plans[split]
        workers = reader.read_threads
        options: dict[str, Any] = {}
        if workers:
            factor = -(-reader.prefetch_size // workers) if reader.prefetch_size > 0 else 2
            options = {
                "prefetch_factor": factor, "timeout": self._context.deadline_s,
                "multiprocessing_context": reader.multiprocessing_context,
            }  # fmt: skip
        loader = data.DataLoader(
            Samples(self._context, split),
            batch_sampler=Batches(self._context, split, epoch, accelerator),
            num_workers=workers,
            pin_memory=reader.pin_memory and self._torch.cuda.is_available(),
            **options,
        )
        return _LoaderSource(iter(loader), plan.batch)


def torch_utils_data(torch: Any) -> Any:
    """The module, which importing torch loads."""
    return torch.utils.data


class Samples:
    """A map-style data set over the workload's files; goes to workers by fork or by pickling."""

    def __init__(self, context: EngineContext, split: str) -> None:
        self._data = context.workload.dataset
        self._plan = context.plans[split]
        self._files = context.files[split]
        self._preprocess = context.workload.reader.preprocess_time
        self._random: np.random.Generator | None = None
        reader = context.workload.reader
        shape = reader.transformed_record_dims or self._data.resized_shape
        self._tensor = np.zeros(shape, reader.transformed_record_element_type)

    def __len__(self) -> int:
        return self._plan.samples

    def __getitem__(self, index: int) -> Any:
        from headrace.bench.formats import format_of

        file, sample = divmod(index, self._plan.samples_per_file)
        path = self._files[file]
        reader = format_of(self._data).open_reader(path, self._data)
        try:
            reader.sample(sample)
        finally:
            reader.close()
        self._sleep()
        return self._tensor

    def _sleep(self) -> None:
        if self._preprocess.mean_s:
            import time

            if self._random is None:
                self._random = np.random.default_rng()
            time.sleep(float(self._preprocess.draw(self._random, 1)[0]))


class Batches:
    """A batch sampler over the accelerator's plan."""

    def __init__(self, context: EngineContext, split: str, epoch: int, accelerator: int) -> None:
        self._plan = context.plans[split]
        self._epoch = epoch
        self._accelerator = accelerator

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._plan.steps):
            yield self._plan.indices(self._epoch, self._accelerator, step).tolist()


class _LoaderSource:
    def __init__(self, batches: Any, batch: int) -> None:
        self._batches = batches
        self._delivered = Delivered(batch, 0)

    def next(self) -> Delivered:
        try:
            next(self._batches)
        except StopIteration:
            raise BenchError("the DataLoader ended before the epoch did.") from None
        except (OSError, RuntimeError, ValueError) as e:
            raise BenchError(f"the DataLoader failed: {e}") from e
        return self._delivered

    def close(self) -> None:
        self._batches = None
