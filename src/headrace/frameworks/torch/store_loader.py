"""StoreLoader: headrace's order and exact resume, as a PyTorch user expects a loader to look.

How a batch is delivered is chosen once: whole, decoded in threads, or decoded in worker processes.
None of them changes which sample comes when, and all of them are counted here, when a batch is
delivered: that is why a run may be resumed with other threads, workers and world sizes.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from headrace import api
from headrace.frameworks.torch.dataset import Dataset
from headrace.frameworks.torch.deliveries import (
    Collate,
    ThreadedDecoding,
    WholeBatches,
    WorkerDecoding,
)
from headrace.frameworks.view import LoaderView
from headrace.order import Order
from headrace.plane.images import Images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from headrace.api import OrderName
    from headrace.frameworks.torch.deliveries import Deliveries
    from headrace.plane.batch import OnError
    from headrace.plane.loader import Pass
    from headrace.store import Store

BATCHES_AHEAD = 4
"""Decoded batches that are made or wait: enough to hide a slow one, few enough to stay small."""

BATCHES_AHEAD_PER_WORKER = 2
"""As torch has it."""

THREADS_MAX = 8
"""Threads unless told otherwise: past 8, Python's own share of the work is the limit."""


class StoreLoader(LoaderView):
    """Batches of a store in exact headrace order, for PyTorch.

    Each `for` goes through the rest of the current epoch, and epochs advance by themselves. Without
    `decode`, batches are `TensorBatch`: tensors over headrace's buffers, no copy. With `decode`,
    they are what `collate_fn` makes of a list of (decoded sample, label); by default a list of two
    tensors, samples and labels.

    Args:
        dataset: an open store, the path of one (or of a folder, a tar, ...), or a
            `headrace.torch.Dataset`, whose decode, parts, seed, on_error and options hold where
            none are given here.
        batch_size: samples per batch and rank.
        order: `shuffled`, `sequential`, `blocked`, `balanced` or an `Order`; see `headrace.loader`.
        seed: another seed, another sequence of epochs and of random keys; 0 by default.
        shuffle: True: `shuffled`; False: `sequential`; torch's word for `order`.
        decode: `decode(data)` or `decode(data, sample)`, see `headrace.torch.Sample`; or `headrace.Images`:
            native threads decode pictures, and batches are lists of pixels and labels.
        num_workers: processes that decode; with `Images`, native threads instead. 0: threads of this process
            do, which is faster if the decoder lets go of the GIL. Without `decode` there is nothing for
            workers to do.
        threads: threads that decode if there are no workers, up to 8 by default; 0 decodes in the
            consumer's thread. (The native `threads` engine has HEADRACE_THREADS.)
        collate_fn: makes a batch of a list of (sample, label); default: torch's default_collate.
        rank: this process's place among `world_size`; see `headrace.loader`.
        world_size: processes that share the samples.
        tail: `exact`, `pad` or `drop`; see `headrace.loader`.
        parts: parts to read of samples that have several; all if empty.
        on_error: `raise`, or `skip` samples that cannot be read or decoded, and record them.
        pin_memory: deliver in page-locked memory. None: where CUDA is.
        prefetch_batches: batches decoded ahead, over all threads or workers.
        multiprocessing_context: how workers are started: `fork`, `spawn` or `forkserver`.
        persistent_workers: keep the workers from epoch to epoch.
        timeout: seconds to wait for a worker's batch; 0: for ever.
        worker_init_fn: called with its number in each worker when it starts.
        tune: let headrace turn the knobs; see `headrace.loader`.
        memory_bytes: what all buffers of this process may take; see `headrace.loader`.
        trace: folder that the run's steps are written to; see `headrace.loader`.
        options: fields of `headrace.config.ReaderOptions` except `threads`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        ValueError: an unknown order, part or option, or a number that is out of bounds.
    """

    def __init__(
        self,
        dataset: Dataset | Store | str | PathLike[str],
        batch_size: int = 1,
        *,
        order: OrderName | Order | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        decode: Callable[..., Any] | Images | None = None,
        num_workers: int = 0,
        threads: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["drop", "pad", "exact"] | None = None,
        parts: Sequence[str] = (),
        on_error: OnError | None = None,
        pin_memory: bool | None = None,
        prefetch_batches: int | None = None,
        multiprocessing_context: Any = None,
        persistent_workers: bool = True,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        tune: bool = True,
        memory_bytes: int | None = None,
        trace: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if shuffle is not None:
            if order is not None:
                raise ValueError(f"shuffle is {shuffle} and order is {order!r}: give one of them")
            order = "shuffled" if shuffle else "sequential"
        images, function = (decode, None) if isinstance(decode, Images) else (None, decode)
        if images is not None:
            if collate_fn is not None:
                raise ValueError("decode is Images, which makes whole batches: collate_fn is given")
            threads, num_workers = threads or num_workers or None, 0
        given = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        if seed is None and isinstance(order, Order):
            seed = order.seed
        self.dataset = given.replaced(function, parts, seed, on_error, options)
        if images is not None and self.dataset.decode is not None:
            raise ValueError("decode is Images, and the data set decodes by a function of its own")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._loader = api.loader(
            self.dataset.store,
            batch_size,
            order="shuffled" if order is None else order,
            seed=self.dataset.seed,
            rank=rank,
            world_size=world_size,
            tail=tail,
            parts=self.dataset.parts,
            on_error=self.dataset.on_error,
            decode=images,
            decode_threads=None if images is None else threads,
            trace=trace,
            # Where workers read, nothing that this process could turn reaches them.
            tune=tune and (self._is_whole or not num_workers),
            memory_bytes=memory_bytes,
            **self.dataset.given_options,
        )
        self._deliveries = self._choose_deliveries(
            threads,
            prefetch_batches,
            multiprocessing_context=multiprocessing_context,
            persistent_workers=persistent_workers,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
        )

    @property
    def decode_threads(self) -> int:
        """Threads or worker processes that decode; 0 where the consumer does, or nobody."""
        if isinstance(self._deliveries, (ThreadedDecoding, WholeBatches)):
            return self._deliveries.threads
        return self.num_workers

    @property
    def _is_whole(self) -> bool:
        """Whether batches are delivered as they were read."""
        return self.dataset.decode is None and self.collate_fn is None

    def _choose_deliveries(
        self, threads: int | None, prefetch_batches: int | None, **worker_options: Any
    ) -> Deliveries:
        if self.num_workers < 0:
            raise ValueError(f"num_workers is {self.num_workers}, expected at least 0")
        if self._is_whole:
            return WholeBatches(self._loader, pin_memory=self.pin_memory)
        collate = Collate(self.collate_fn, partial(self.dataset.__getitem__, 0))
        if self.num_workers:
            default = BATCHES_AHEAD_PER_WORKER * self.num_workers
            ahead = default if prefetch_batches is None else prefetch_batches
            return WorkerDecoding(
                self._loader,
                self.dataset,
                collate,
                num_workers=self.num_workers,
                prefetch_factor=-(-ahead // self.num_workers),
                pin_memory=self.pin_memory,
                **worker_options,
            )
        if threads is None:
            threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        return ThreadedDecoding(
            self._loader,
            self.dataset.decoder,
            collate,
            threads=threads,
            batches_ahead=BATCHES_AHEAD if prefetch_batches is None else prefetch_batches,
            pin_memory=self.pin_memory,
        )

    def close(self) -> None:
        """End workers and reading ahead. Batches stay valid; the loader can be used again."""
        self._loader.close()
        self._deliveries.close()

    def __iter__(self) -> Iterator[Any]:
        return self._deliver(self._loader.begin(), os.getpid())

    def _deliver(self, a_pass: Pass, pid: int) -> Iterator[Any]:
        deliveries = self._deliveries.deliveries(a_pass)
        try:
            for step in range(a_pass.steps):
                a_pass.check()
                if os.getpid() != pid:
                    raise RuntimeError("this iterator belongs to the process that made it")
                asked_at = time.perf_counter()
                delivery = next(deliveries)
                self.stats.deliver(a_pass, step, delivery, (asked_at, time.perf_counter()))
                yield delivery.value
            self.stats.ask()  # what came after the last batch was work, too
        finally:
            if os.getpid() == pid:
                self.stats.rest()
                deliveries.close()
        a_pass.finish()
