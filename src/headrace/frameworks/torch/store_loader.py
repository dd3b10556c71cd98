"""StoreLoader: headrace's order and exact resume, as a PyTorch user expects a loader to look.

How a batch is delivered is chosen once: whole, decoded in threads, or decoded in worker processes.
None of them changes which sample comes when, and all of them are counted here, when a batch is
delivered: that is why a run may be resumed with other threads, workers and world sizes.
"""

from __future__ import annotations

import difflib
import inspect
import os
import time
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import Sampler, SequentialSampler

from headrace import api
from headrace.config import ReaderOptions, TierOptions
from headrace.frameworks.torch.dataset import Dataset
from headrace.frameworks.torch.deliveries import (
    Collate,
    DeviceBatches,
    ThreadedDecoding,
    WholeBatches,
    WorkerDecoding,
)
from headrace.frameworks.torch.device import ToDevice, device_of
from headrace.frameworks.view import LoaderView
from headrace.order import Order
from headrace.order.shuffled import Sequential
from headrace.plane.images import Images
from headrace.plane.loader import PassIterator, made_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from numpy.typing import ArrayLike

    from headrace.api import OrderName
    from headrace.frameworks.torch.deliveries import Deliveries
    from headrace.order.slices import Slices
    from headrace.plane.batch import OnError
    from headrace.plane.loader import Pass
    from headrace.store import Store

BATCHES_AHEAD = 4
"""Decoded batches that are made or wait: enough to hide a slow one, few enough to stay small."""

BATCHES_AHEAD_PER_WORKER = 2
"""As torch has it."""

THREADS_MAX = 8
"""Threads unless told otherwise: past 8, Python's own share of the work is the limit."""


class _EpochSampler(Sampler[int]):
    """A store's order as trainers look at it: `loader.sampler.set_epoch`, which is all that Lightning calls.

    Lightning keeps no loader's state between epochs, and says instead which epoch begins. Loaders here count
    by themselves, so its word counts where it is ahead: one that was resumed, or used before, never goes back.
    """

    def __init__(self, loader: LoaderView) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        if epoch > self._loader.epoch:
            self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        loader, slices = self._loader, self._slices()
        for step in range(slices.steps()):
            yield from slices.indices(loader.order, loader.epoch, step).tolist()

    def __len__(self) -> int:
        slices = self._slices()
        spans = (slices.span(step) for step in range(slices.steps()))
        return sum(stop - start for start, stop in spans)

    def _slices(self) -> Slices:
        return self._loader._loader.share.decide()  # noqa: SLF001 - its own other half


class _StoredOrder(_EpochSampler, SequentialSampler):
    """What Lightning's `overfit_batches` looks for, which refuses a store that is shuffled."""


def sampler_of(loader: LoaderView) -> Sampler[int]:
    """This rank's indices in the epoch under way; `set_epoch` moves the loader forward, never back."""
    stored = isinstance(loader.order, Sequential) or not getattr(loader.order, "shuffle", True)
    return (_StoredOrder if stored else _EpochSampler)(loader)


class StoreLoader(LoaderView):
    """Batches of a store in exact headrace order, for PyTorch; `DataLoader` over a store makes it.

    Each `for` goes through the rest of the current epoch, and epochs advance by themselves. Without
    `decode`, batches are `TensorBatch`: tensors over headrace's buffers, no copy. With `decode`,
    they are what `collate_fn` makes of a list of (decoded sample, label); by default a list of two
    tensors, samples and labels.

    Names, meanings and defaults are torch's, and headrace's own come behind them. What torch's name cannot
    mean over a store is accepted at its default, and refused with the reason otherwise.

    Args:
        dataset: an open store, the path of one (or of a folder, a tar, ...), a mixture, or a
            `headrace.torch.Dataset`, whose decode, parts, seed, on_error and options hold where
            none are given here.
        batch_size: samples per batch and rank.
        shuffle: True: an exact random permutation per epoch, the same in every run with one `seed`. False or
            None: the stored order, unless `order` is given.
        sampler: `DataLoader` over a store takes it, and goes torch's way then.
        batch_sampler: likewise.
        num_workers: processes that decode; with `Images`, native threads instead. 0: threads of this process
            do, which is faster if the decoder lets go of the GIL. Without `decode` there is nothing for
            workers to do.
        collate_fn: makes a batch of a list of (sample, label); default: torch's default_collate.
        pin_memory: deliver in page-locked memory.
        drop_last: leave out samples that do not fill the last step of all ranks: `tail="drop"`.
        timeout: seconds to wait for a worker's batch; 0: for ever.
        worker_init_fn: called with its number in each worker when it starts.
        multiprocessing_context: how workers are started: `fork`, `spawn` or `forkserver`.
        generator: a seed is drawn from it when the loader is made. For one rank only: others' generators may
            differ, so several ranks give `seed`.
        prefetch_factor: batches made ahead per worker; None: 2. Threads work ahead within `memory_bytes`.
        persistent_workers: keep the workers from epoch to epoch.
        pin_memory_device: "" only; torch has deprecated it.
        in_order: batches come in order always.
        order: `shuffled`, `sequential`, `blocked`, `balanced`, `weighted` or an `Order`, instead of
            `shuffle`; see `headrace.loader`.
        weights: with `order="weighted"`: one number a sample, in proportion to which samples are drawn.
        seed: another seed, another sequence of epochs and of random keys; 0 by default.
        decode: `decode(data)` or `decode(data, sample)`, see `headrace.torch.Sample`; or `headrace.Images`:
            native threads decode pictures, and batches are lists of pixels and labels.
        threads: threads that decode if there are no workers, up to 8 by default; 0 decodes in the
            consumer's thread. (The native `threads` engine has HEADRACE_THREADS.)
        rank: this process's place among `world_size`; see `headrace.loader`.
        world_size: processes that share the samples.
        tail: `exact`, `pad` or `drop`; see `headrace.loader`.
        parts: parts to read of samples that have several; all if empty.
        on_error: `raise`, or `skip` samples that cannot be read or decoded, and record them.
        follow: take up what is appended to the store, where an epoch begins; not with workers.
        prefetch_batches: batches decoded ahead, over all threads or workers.
        tune: let headrace turn the knobs; see `headrace.loader`.
        memory_bytes: what all buffers of this process may take; see `headrace.loader`.
        trace: folder that the run's steps are written to; see `headrace.loader`.
        device: with `Images`: where pixels and labels go, `cuda` or `cuda:1`. uint8 is sent from page-locked
            memory on a stream of its own, and normalised there. None or `cpu`: nowhere.
        options: fields of `headrace.config.ReaderOptions` except `threads`, and of `TierOptions`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        TypeError: an unknown argument; names the nearest.
        ValueError: an unknown order or part, a number that is out of bounds, arguments that contradict each
            other, or one that has no meaning over a store.
    """

    batch_sampler = None
    """Batches are cut here; Lightning looks for it."""

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        dataset: Dataset | Store | str | PathLike[str],
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: None = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        order: OrderName | Order | None = None,
        weights: ArrayLike | None = None,
        seed: int | None = None,
        decode: Callable[..., Any] | Images | None = None,
        threads: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["drop", "pad", "exact"] | None = None,
        parts: Sequence[str] = (),
        on_error: OnError | None = None,
        follow: bool = False,
        prefetch_batches: int | None = None,
        tune: bool = True,
        memory_bytes: int | None = None,
        trace: str | PathLike[str] | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> None:
        arguments = {**locals(), **options}
        del in_order  # False allows what never happens
        _check_known(options)
        for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
            if value is not None:
                raise ValueError(
                    f"{name} is given, and StoreLoader delivers in headrace's order: "
                    "headrace.torch.DataLoader takes it, over the same store"
                )
        if pin_memory_device:
            raise ValueError(
                f"pin_memory_device is {pin_memory_device!r}, expected '': memory is locked for all devices"
            )
        order, tail = _torch_words(shuffle, order, drop_last, tail, seed)
        self._generated = generator is not None
        images, function = (decode, None) if isinstance(decode, Images) else (None, decode)
        given = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        seed = _seed_of(seed, generator, order, given.store)
        for name in ("self", "options", "generator", "shuffle", "drop_last"):
            del arguments[name]
        self._arguments = arguments | {"order": order, "tail": tail, "seed": seed}
        self.dataset = given.replaced(function, parts, seed, on_error, options)
        if images is not None and self.dataset.decode is not None:
            raise ValueError("decode is Images, and the data set decodes by a function of its own")
        if follow and num_workers:
            raise ValueError(
                "follow is True and num_workers is given: workers have the store as it was; decode in threads"
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory = pin_memory
        self._is_whole = images is not None or (self.dataset.decode is None and collate_fn is None)
        workers = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
        }
        _check_workers(num_workers, workers, processes=not self._is_whole)
        if images is not None:
            threads, self.num_workers = threads or num_workers or None, 0
        to_device = None if device is None else _to_device(device, images, collate_fn)
        self._loader = api.loader(
            self.dataset.store,
            batch_size,
            order=order,
            weights=weights,
            seed=self.dataset.seed,
            rank=rank,
            world_size=world_size,
            tail=tail,
            parts=self.dataset.parts,
            on_error=self.dataset.on_error,
            follow=follow,
            decode=images if images is None or to_device is None else ToDevice.host_images(images),
            decode_threads=None if images is None else threads,
            trace=trace,
            # Where workers read, nothing that this process could turn reaches them.
            tune=tune and (self._is_whole or not self.num_workers),
            memory_bytes=memory_bytes,
            **self.dataset.given_options,
        )
        self._deliveries = self._choose_deliveries(threads, prefetch_batches, workers, to_device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made of, and where it stands: `mp.spawn` and Lightning's `ddp_spawn` send it.

        There the store is opened anew, and ranks are looked up again. A drawn seed is the same for all.
        """
        begun = self.epoch or self.position
        return made_again, (type(self), self._arguments, self.state_dict() if begun else None)

    @property
    def sampler(self) -> Sampler[int]:
        """This rank's indices in the epoch under way; `set_epoch` moves the loader forward, never back."""
        return sampler_of(self)

    @property
    def decode_threads(self) -> int:
        """Threads or worker processes that decode; 0 where the consumer does, or nobody."""
        if isinstance(self._deliveries, (ThreadedDecoding, WholeBatches, DeviceBatches)):
            return self._deliveries.threads
        return self.num_workers

    def _choose_deliveries(
        self,
        threads: int | None,
        prefetch_batches: int | None,
        workers: dict[str, Any],
        to_device: ToDevice | None,
    ) -> Deliveries:
        if to_device is not None:
            return DeviceBatches(self._loader, to_device)
        if self._is_whole:
            return WholeBatches(
                self._loader, pin_memory=self.pin_memory, collate_fn=self.collate_fn
            )
        collate = Collate(self.collate_fn, partial(self.dataset.__getitem__, 0))
        if self.num_workers:
            factor = workers["prefetch_factor"]
            if prefetch_batches is not None:
                if factor is not None:
                    raise ValueError(
                        f"prefetch_batches is {prefetch_batches} and prefetch_factor is {factor}: "
                        "give one of them"
                    )
                factor = -(-prefetch_batches // self.num_workers)
            workers["prefetch_factor"] = BATCHES_AHEAD_PER_WORKER if factor is None else factor
            return WorkerDecoding(
                self._loader,
                self.dataset,
                collate,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                **workers,
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
        self._loader.end_pass()
        self._deliveries.close()  # first: page-locked buffers are unlocked while they are mapped
        self._loader.close()

    def __iter__(self) -> Iterator[Any]:
        # With the first batch, as torch does: trainers call set_epoch after iter().
        return PassIterator(self._begin, partial(self._deliver, os.getpid()))

    def _begin(self) -> Pass:
        a_pass = self._loader.begin()
        if self._generated and a_pass.slices.world_size > 1:
            raise ValueError(
                f"the seed was drawn from generator, and this is {self._loader.ranks}: ranks whose generators "
                "differ would miss samples. Give all of them one seed instead"
            )
        return a_pass

    def _deliver(self, pid: int, a_pass: Pass) -> Iterator[Any]:
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


def _to_device(
    device: torch.device | str | int,
    images: Images | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> ToDevice | None:
    """What sends pixels to a device; None: they stay here.

    Raises:
        ValueError: there are no pixels to send, or it is no device for them.
        RuntimeError: there is no such GPU.
    """
    place = device_of(device)
    if place is None:
        return None
    if images is None or collate_fn is not None:
        raise ValueError(
            f"device is {device!r}, and "
            + ("decode is no headrace.Images" if images is None else "collate_fn")
            + " is given: whole batches of pixels are sent, so leave it out and use batch.to(device)"
        )
    if images.mask is not None or images.boxes is not None:
        raise ValueError(
            f"device is {device!r}, which takes pixels and labels: leave it out, and send masks and boxes with "
            "batch.to(device)"
        )
    return ToDevice(place, images)


def _seed_of(
    seed: int | None,
    generator: torch.Generator | None,
    order: OrderName | Order | None,
    store: Store,
) -> int | None:
    """The given seed, else the generator's, the order's or the mixture's, else None."""
    if generator is not None:
        if seed is not None:
            raise ValueError(f"seed is {seed} and generator is given: give one of them")
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    if seed is None and isinstance(order, Order):
        return order.seed
    if seed is None and store.mixture is not None:
        return store.mixture.seed
    return seed


def _torch_words(
    shuffle: bool | None,
    order: OrderName | Order | None,
    drop_last: bool,
    tail: Literal["drop", "pad", "exact"] | None,
    seed: int | None,
) -> tuple[OrderName | Order, Literal["drop", "pad", "exact"] | None]:
    """Order and tail, where torch's words for them are given; the stored order where nothing is.

    Raises:
        ValueError: two contradict each other; or there is a seed, and nobody says of what.
    """
    if shuffle is not None and order is not None:
        raise ValueError(f"shuffle is {shuffle} and order is {order!r}: give one of them")
    if seed is not None and shuffle is None and order is None:
        raise ValueError(
            f"seed is {seed}, and nothing says whether samples are shuffled: give shuffle=True, or "
            "shuffle=False for the stored order, which is torch's default"
        )
    if drop_last and tail not in {None, "drop"}:
        raise ValueError(f"drop_last is True and tail is {tail!r}: give one of them")
    if order is None:
        order = "shuffled" if shuffle else "sequential"
    return order, "drop" if drop_last else tail


_WITHOUT_PROCESSES = {
    "timeout": "no process is waited for; reads have deadline_s",
    "worker_init_fn": "no process is started in which it could be called",
    "multiprocessing_context": "no process is started",
}
"""What workers' options cannot mean where threads of this process do all the work."""


def _check_workers(num_workers: int, options: dict[str, Any], *, processes: bool) -> None:
    """Refuse what needs worker processes where there are none; torch ignores worker_init_fn there, too.

    Raises:
        ValueError: names the first of them.
    """
    if num_workers < 0:
        raise ValueError(f"num_workers is {num_workers}, expected at least 0")
    for name, value in options.items():
        if not value or (num_workers and processes):
            continue
        if num_workers == 0 and name != "worker_init_fn":
            raise ValueError(f"{name} is {value!r}, which needs worker processes: num_workers is 0")
        if num_workers and name in _WITHOUT_PROCESSES:
            raise ValueError(
                f"{name} is {value!r}, which has no meaning here: {_WITHOUT_PROCESSES[name]}"
            )


def check_sampled(options: Mapping[str, Any]) -> None:
    """Look at what `DataLoader` was given over a store beside torch's arguments, with a sampler.

    Raises:
        TypeError: nobody knows it; or the sampler does instead what it is for.
    """
    _check_known(options, ours=frozenset(("parts", "on_error")))


def _check_known(options: Mapping[str, Any], ours: frozenset[str] = frozenset()) -> None:
    reading = {field.name for kind in (ReaderOptions, TierOptions) for field in fields(kind)}
    known = set(inspect.signature(StoreLoader).parameters) - {"self", "options"}
    for name in options:
        if ours and name in known - ours:
            raise TypeError(
                f"{name} is given, and a sampler, batch_sampler or batch_size=None: samples come as torch "
                f"chooses them, so {name} has no meaning"
            )
        if name not in reading | ours:
            nearest = difflib.get_close_matches(name, known | reading, 1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {sorted(known)}"
            raise TypeError(f"a store's DataLoader has no argument {name!r}: {hint}")
