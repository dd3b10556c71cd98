"""Workers: decodes in processes, through torch's own DataLoader.

For decoders that hold the GIL. Torch starts, feeds, watches and ends the processes, moves tensors
through shared memory and pins them; headrace says which samples a batch has (`_Requests`) and each
worker reads them with its own native reader (`_Answers`). A request carries its epoch, so that
workers can live on from epoch to epoch and still derive the right random keys.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import data as torch_data

from headrace.errors import HeadraceError
from headrace.frameworks.torch.delivery import Collate, Delivery

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from headrace.frameworks.torch.dataset import Dataset
    from headrace.frameworks.torch.decode import Decoded
    from headrace.order import Order
    from headrace.plane import Loader
    from headrace.plane.batch import Skipped
    from headrace.plane.cursor import Pass

__all__ = ["WorkerDecoding", "WorkerOptions"]

# Torch loaders inherited over a fork. Their workers are the parent's: they are not ended here.
_inherited: list[Any] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What torch's DataLoader is told of its workers, in its own words."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    persistent_workers: bool
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None

    def __post_init__(self) -> None:
        for name, low in (("num_workers", 1), ("prefetch_factor", 1), ("timeout", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {low}")


class _Request(NamedTuple):
    epoch: int
    indices: NDArray[np.int64]


class _Answer(NamedTuple):
    """What a worker sends: a delivery, or the error that came instead."""

    delivery: Delivery | None
    skipped: list[Skipped]
    error: HeadraceError | None = None


@dataclass
class _Requests(torch_data.Sampler[Any]):
    """The batch sampler: the indices of each span of the pass under way."""

    order: Order
    this: Pass | None = field(default=None)

    def __iter__(self) -> Iterator[_Request]:
        assert self.this is not None, "a pass is begun before torch asks for indices"
        epoch = self.this.epoch
        for span in self.this.spans():
            yield _Request(epoch, self.order.wrapped(epoch, *span))


class _Answers(torch_data.Dataset[Any]):
    """The data set that lives in each worker: answers one request with one finished batch."""

    def __init__(self, dataset: Dataset, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitems__(self, request: Any) -> _Answer:
        already = len(self._dataset.skipped)
        try:
            fetched = self._dataset.fetch(request.indices, request.epoch)
            way = fetched.way
            way.serial = True  # this process does one batch after the other
            way.decoding_s, cpu_s = time.perf_counter(), time.thread_time()
            samples: list[Decoded] = self._dataset.decoded(fetched)
        except HeadraceError as e:
            # Torch would rebuild the error from its text and lose its fields.
            return _Answer(None, [], e)
        way.decoded_s, way.cpu_s = time.perf_counter(), time.thread_time() - cpu_s
        way.work_s = way.decoded_s - way.decoding_s
        value = self._collate(samples, len(fetched.asked))
        delivery = Delivery.of(fetched, value, len(samples))
        way.collated_s = time.perf_counter()
        return _Answer(delivery, self._dataset.skipped[already:])


def _as_it_is(answer: Any) -> Any:
    return answer


class WorkerDecoding:
    """Decodes in worker processes.

    Args:
        loader: gives the order.
        dataset: what each worker reads and decodes with.
        collate: puts samples together, in the worker.
        options: what torch is told.
    """

    def __init__(
        self,
        loader: Loader,
        dataset: Dataset,
        collate: Collate,
        options: WorkerOptions,
    ) -> None:
        self._loader = loader
        self._answers = _Answers(dataset, collate)
        self._options = options
        self._requests = _Requests(loader.order)
        self._torch: torch_data.DataLoader[Any] | None = None
        self._pid = -1

    def deliveries(self, this: Pass) -> Generator[Delivery, None, None]:
        """Yield the batch of each span of the pass, in order.

        Raises:
            RuntimeError: a worker died; torch says how.
        """
        self._requests.this = this
        iterator = iter(self._torch_loader())
        try:
            for answer in iterator:
                self._loader.skipped.extend(answer.skipped)
                delivery, error = answer.delivery, answer.error
                if error is not None:
                    del answer
                    try:
                        raise error
                    finally:
                        del error  # its traceback holds this frame, and with it the workers
                assert delivery is not None
                yield delivery
        except (ConnectionError, EOFError) as e:
            self.close()
            raise RuntimeError(
                "a DataLoader worker died while it sent a batch; the kernel's log may say why "
                "(out of memory?), and num_workers=0 decodes in this process",
            ) from e
        except Exception:
            self.close()  # workers that failed are not asked again
            raise

    def close(self) -> None:
        """End the workers."""
        loader, self._torch = self._torch, None
        # An error that somebody keeps holds the iterator. Collected as garbage later, its queues would
        # go first: then torch waits five seconds for each worker, and kills it.
        if loader is not None and self._pid == os.getpid():
            workers = loader._iterator  # noqa: SLF001 - there is no public way
            if workers is not None:
                workers._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001

    def _torch_loader(self) -> torch_data.DataLoader[Any]:
        if self._torch is not None and self._pid != os.getpid():
            _inherited.append(self._torch)
            self._torch = None
        if self._torch is None:
            options = self._options
            self._torch = torch_data.DataLoader(
                self._answers,
                batch_sampler=self._requests,
                collate_fn=_as_it_is,
                num_workers=options.num_workers,
                prefetch_factor=options.prefetch_factor,
                pin_memory=options.pin_memory,
                persistent_workers=options.persistent_workers,
                timeout=options.timeout,
                multiprocessing_context=options.multiprocessing_context,
                worker_init_fn=options.worker_init_fn,
                # Its own, so that the user's random numbers do not depend on us.
                generator=torch.Generator().manual_seed(self._loader.order.seed),
            )
            self._pid = os.getpid()
        return self._torch
