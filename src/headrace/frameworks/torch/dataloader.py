"""DataLoader: torch's, by changing one import; and the door to the store's loader.

Over a torch data set it is `torch.utils.data.DataLoader`, by inheritance: the same arguments, batches,
order, random numbers, workers and errors. headrace reads the files of coming samples ahead, hands
batches over in shared memory that is recycled, and knows where the epoch stands. Over a headrace
store it is a `StoreLoader`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.utils import data as torch_data

from headrace.base.job import which_rank
from headrace.config import trace_folder
from headrace.control.knob_limits import memory_policy
from headrace.control.stalls.live import verdict_on
from headrace.control.stalls.verdict import verdict_line
from headrace.errors import RankError, StateMismatch
from headrace.frameworks.torch.dropin.iterators import InProcess, InWorkers
from headrace.frameworks.torch.dropin.pictures import NativePictures
from headrace.frameworks.torch.dropin.position import DataPosition, DataState, is_stateful
from headrace.frameworks.torch.dropin.progress import (
    Beginning,
    Epochs,
    Progress,
    Snapshot,
    Track,
    kept,
    kept_randomness,
    resumption_of,
)
from headrace.frameworks.torch.dropin.watching import FileReading, Watcher, nothing_to_read
from headrace.frameworks.torch.dropin.workers import WorkerContext
from headrace.plane.read_ahead import ReadAheadOptions, SharedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace.frameworks.torch.dropin.progress import Resumption
    from headrace.plane import LoaderStats


T_co = TypeVar("T_co", covariant=True)

ARENA_BYTES = 256 << 20
"""Memory for batches between workers and consumer unless told otherwise, over all workers. Only what
is in flight is ever touched; with two workers and torch's prefetch_factor it holds batches of 32 MB."""

_OF_STORES = {"seed", "trace", "cache_dir", "ram_bytes", "tail", "order", "threads", "on_error"}
_POSITIONS = {"batch_size": 1, "sampler": 3, "batch_sampler": 4}
"""Arguments that decide who loads a store, and where torch's signature has them."""

log = logging.getLogger("headrace.torch")


class DataLoader(torch_data.DataLoader[T_co]):
    """`torch.utils.data.DataLoader` with headrace's data plane, or a store's loader.

    Over a torch data set, map-style or iterable, it takes torch's arguments (see there) and delivers
    the same batches in the same order. Where nothing can be sped up it does what torch does, and says
    so once to the logger `headrace.torch`; `explain()` says it at any time.

    Over a headrace `Store`, the path of one (or of a folder, a tar, ...) or a `headrace.torch.Dataset`,
    `DataLoader(...)` returns a `StoreLoader`: it is called with all arguments, and its class is what you get.
    It takes torch's arguments with torch's meanings and defaults, and headrace's own (see there). A `sampler`,
    a `batch_sampler` or `batch_size=None` go torch's way over a store as well: samplers, workers, random
    numbers and state are torch's then, and batches are what `StoreLoader` makes of them. Subclasses of this
    class never turn into something else; they refuse stores and paths.

    Args:
        snapshot_every_n_steps: with workers, and a data set that has a state of its own: batches after
            which workers are asked for it, as in torchdata. What lies between is done again, unseen,
            when a state is loaded. 0 or None: never within an epoch.
        memory_bytes: memory for batches that workers hand over and for files that were read ahead,
            half for each, over all workers. None: `HEADRACE_MEMORY_BYTES`, else 256 MiB for the former
            and the read-ahead's own default for the latter. What does not fit travels torch's way.
        decode: `native`: pictures of torchvision's ImageFolder are decoded, cropped, resized, flipped and
            normalised by native code, by the data set's own transforms and torch's own random numbers;
            `explain()` says which transforms that are. None: as the data set does it.
        newer: arguments that a newer torch has.

    Attributes:
        stats: what was delivered so far, and what was waited for.
        epochs_begun: by this object.
        pictures: how native code decodes; None: it does not.

    Raises:
        ValueError, TypeError: as torch raises them.
        ValueError: snapshot_every_n_steps is negative; or `decode` is `native` and the data set is none
            whose decoding is known.
    """

    stats: LoaderStats = kept()
    epochs_begun: int = kept()
    pictures: NativePictures | None = kept()
    decode: Literal["native"] | None = kept()
    _headrace: Epochs

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a `StoreLoader` where a store is to be loaded, else a new loader of this class."""
        dataset = args[0] if args else kwargs.get("dataset")
        is_store = _is_store(dataset)
        if is_store and cls is not DataLoader:
            raise TypeError(
                f"{cls.__name__} is given a {type(dataset).__name__}, expected a torch data set: "
                "derive from headrace.torch.StoreLoader to load stores",
            )
        ours = cls is DataLoader and _is_a(dataset, "headrace.frameworks.torch.dataset", "Dataset")
        if not is_store and not ours:
            of_stores = _OF_STORES & kwargs.keys()
            if of_stores and cls is DataLoader:
                raise TypeError(
                    f"{', '.join(sorted(of_stores))}: of stores alone, and this is a {type(dataset).__name__}. "
                    "Over a data set of torch's a seed is generator=torch.Generator().manual_seed(7), a trace "
                    "is HEADRACE_TRACE=DIR, and a cache needs a store: headrace pack, and give its path"
                )
            return super().__new__(cls)
        if kwargs.get("decode") == "native":
            raise ValueError(
                "decode is \"native\", which is for torchvision's data sets of pictures: give a store's loader "
                "decode=headrace.Images(...)"
            )
        given = {
            name: args[at]
            if len(args) > at
            else kwargs.get(name, 1 if name == "batch_size" else None)
            for name, at in _POSITIONS.items()
        }
        if (
            given["batch_size"] is None
            or given["sampler"] is not None
            or given["batch_sampler"] is not None
        ):
            return super().__new__(cls)
        from headrace.frameworks.torch.store_loader import StoreLoader

        return StoreLoader(*args, **kwargs)

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        dataset: torch_data.Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: torch_data.Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: torch_data.Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        memory_bytes: int | None = None,
        decode: Literal["native"] | None = None,
        **newer: Any,
    ) -> None:
        if _is_store(dataset):
            from headrace.frameworks.torch.dataset import SampledDataset, whole
            from headrace.frameworks.torch.store_loader import check_sampled

            check_sampled(newer)
            sampled: Any = SampledDataset  # it takes more than torch's signature says
            dataset = sampled(dataset, decode, collates=collate_fn is not None, **newer)
            collate_fn, decode, newer = collate_fn or whole, None, {}
        if _TORCH_HAS_IN_ORDER:
            newer["in_order"] = in_order
        elif not in_order:
            raise ValueError("in_order is False, which this version of torch does not know")
        if snapshot_every_n_steps is not None and snapshot_every_n_steps < 0:
            raise ValueError(
                f"snapshot_every_n_steps is {snapshot_every_n_steps}, expected 0 or more"
            )
        if decode not in {None, "native"}:
            given = repr(decode) if isinstance(decode, str) else f"of type {type(decode).__name__}"
            raise ValueError(
                f"decode is {given}, expected 'native' or nothing over a torch data set: "
                "headrace.Images is for stores (headrace.pack the pictures, and give the store)"
            )
        policy = memory_policy(memory_bytes)
        # By name: Lightning makes the loader again from what it saw here, with a sampler of its own.
        super().__init__(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **newer,
        )
        self.memory_bytes = memory_bytes
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._headrace = Epochs(
            decode,
            None if decode is None else NativePictures(dataset),
            arena_bytes=policy[0] // 2 if policy else ARENA_BYTES,
            ahead_bytes=policy[0] // 2 if policy else None,
        )
        if (folder := trace_folder()) is not None:
            from headrace.trace import follow

            follow(folder, self._about(), self, begun=_own_rank)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which begin anew: workers, readers and their memory are this one's."""
        return vars(self) | {"_headrace": self._headrace.anew()}

    def _about(self) -> dict[str, Any]:
        """What a trace says of this loader; its order is torch's."""
        samples = 0
        with contextlib.suppress(
            TypeError, NotImplementedError
        ):  # iterable data sets may have no length
            samples = len(self.dataset)  # type: ignore[arg-type]
        kind, root = type(self.dataset), getattr(self.dataset, "root", "")
        named = os.fspath(root) if isinstance(root, (str, os.PathLike)) else ""
        source = (
            named if isinstance(named, str) and named else f"{kind.__module__}.{kind.__qualname__}"
        )
        return {
            "source": source[:4096], "framework": "torch DataLoader", "samples": samples,
            "batch_size": self.batch_size or 0,
        }  # fmt: skip

    # -- iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        if self._is_pipe:
            return super().__iter__()
        resumption, self._headrace.resumption = self._headrace.resumption, None
        self._headrace.loaded = resumption
        if resumption is None:
            if self._headrace.placed is not None:
                self._headrace.placed.begin_anew()
            self._headrace.placed = None
            return self._begin_epoch()
        compared = resumption.compared  # also where another rank's state is: that one compares
        resumption.begin_as(**_own_rank(), in_order=getattr(self, "in_order", True))
        self._iterator = None  # workers of before know nothing of the state
        self._headrace.starting = resumption
        try:
            if resumption.data is not None:  # before random numbers are restored: it may draw some
                self._headrace.placed = position = DataPosition(self.dataset)
                position.load_before(resumption.data, under_way=resumption.under_way)
            if self.num_workers == 0:
                return self._begin_in_process(resumption, compared=compared)
            # Within an epoch this process has drawn the epoch's numbers before the state was taken.
            with kept_randomness() if resumption.under_way else contextlib.nullcontext():
                resumption.progress.beginning.restore(self, everything=True, compared=compared)
                return self._begin_epoch()
        finally:
            self._headrace.starting = None

    def _begin_in_process(self, resumption: Resumption, *, compared: bool) -> Any:
        """Begin where the data set draws from this process's generators: they go on, too."""
        beginning, everything = resumption.progress.beginning, resumption.under_way
        beginning.restore(self, everything=everything, compared=compared)
        iterator = self._begin_epoch() if resumption.under_way else None
        if resumption.in_process is not None:
            resumption.in_process.restore()
        return self._begin_epoch() if iterator is None else iterator

    def _begin_epoch(self) -> Any:
        begun_s = time.perf_counter()
        self._headrace.begin_epoch()
        iterator: Any = self._iterator
        if self.num_workers and self.persistent_workers and iterator is not None:
            iterator._reset(self)  # noqa: SLF001 - a subclass may have put an iterator around ours
        else:
            iterator = self._get_iterator()
            if self.num_workers and self.persistent_workers:
                self._iterator = iterator
        self._headrace.starting_s += time.perf_counter() - begun_s
        return iterator

    def _get_iterator(self) -> Any:
        if self._is_pipe:
            return super()._get_iterator()
        beginning = Beginning.take(self)
        if self._headrace.starting is not None and self._headrace.starting.under_way:
            beginning = self._headrace.starting.progress.beginning
        reading = self._get_reading()
        if self._headrace.pictures is not None and self._headrace.epochs_begun == 1:
            off = isinstance(self._headrace.pictures.plan, str)
            log.log(
                logging.WARNING if off else logging.INFO,
                self._headrace.pictures.explain(self.num_workers),
            )
        iterator: InProcess | InWorkers
        if self.num_workers == 0:
            if reading is not None and self._headrace.watcher is None:
                self._headrace.watcher = Watcher(self.dataset, reading)
            iterator = InProcess(self, beginning, self._headrace.starting, self._headrace.watcher)
            self._headrace.position = iterator.position
        else:
            self.check_worker_number_rationality()
            steps = self.snapshot_every_n_steps or 0
            self._headrace.context = WorkerContext(
                self.multiprocessing_context,
                self._headrace.arena_bytes // self.num_workers,
                reading,
                every=max(1, steps // self.num_workers) if steps else 0,
                announced=self.worker_init_fn is not None or is_stateful(self.dataset),
                pictures=self._headrace.pictures,
            )
            iterator = InWorkers(self, beginning, self._headrace.starting, self._headrace.context)
        self._headrace.progress = iterator.progress
        return iterator

    @property
    def _is_pipe(self) -> bool:
        """Data pipes are an older way of torch's, with seeds of their own: left alone."""
        pipes = (torch_data.IterDataPipe, torch_data.MapDataPipe)
        return isinstance(self.dataset, pipes)

    def _get_reading(self) -> FileReading | None:
        reason = nothing_to_read(self.dataset, map_style=self._map_style)
        if reason is not None:
            if not self._headrace.explained:
                self._headrace.explained = True
                log.info(
                    "%s: nothing is read ahead, because %s", type(self.dataset).__name__, reason
                )
            return None
        if self._headrace.reading is None:
            shares = max(1, self.num_workers)
            options = (
                ReadAheadOptions()
                if self._headrace.ahead_bytes is None
                else ReadAheadOptions(
                    buffer_bytes=max(64 << 10, self._headrace.ahead_bytes // shares)
                )
            )
            learned = None
            if self.num_workers:
                with contextlib.suppress(OSError):  # no descriptor left: each worker learns alone
                    learned = SharedLog()
            self._headrace.reading = FileReading(options, learned)
        return self._headrace.reading

    @property
    def _map_style(self) -> bool:
        return self._dataset_kind == 0

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, counted in batches that were delivered.

        Plain values (numbers, text, lists, dicts), 10 to 50 kB: the states of the random number
        generators are most of it. May be called at any time, also before the first batch. What is
        exact is said in the how-to page "Train with PyTorch".
        """
        self._headrace.stats.steps.settle()
        progress = self._headrace.progress
        if self._headrace.resumption is not None:
            return copy.deepcopy(dict(self._headrace.resumption.state))
        if self._headrace.loaded is not None and progress is not None and not progress.finished:
            # A data set that did not go on yet may not know where it was put.
            if progress.delivered == self._headrace.loaded.progress.loaded:
                return copy.deepcopy(dict(self._headrace.loaded.state))
            self._headrace.loaded = None
        if progress is None or progress.finished:
            return self._saved(progress, under_way=False)
        return self._saved(progress, under_way=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where a state was saved, with the next `for`.

        Args:
            state_dict: what `state_dict()` returned, here or in another process. An empty one is
                none: the next epoch begins as if nothing had been loaded.

        Raises:
            StateMismatch: the state is damaged, or belongs to another kind of data set or, for an
                iterable one and for one that has a state of its own, to another number of workers.
        """
        if not state_dict:
            self._headrace.resumption = self._headrace.progress = self._iterator = None
            return
        resumption = resumption_of(state_dict)
        saved = resumption.progress
        if saved.map_style != self._map_style:
            kinds = {True: "map-style", False: "iterable"}
            raise StateMismatch(
                f"the state is of {kinds[saved.map_style]} data, "
                f"the loader's is {kinds[self._map_style]}.",
                next_step="Load the state into the loader of the data set that it was saved from.",
            )
        alone = resumption.has_data or (not saved.map_style and resumption.under_way)
        if alone and len(saved.tracks) != self.num_workers:
            raise StateMismatch(
                f"the state was saved with num_workers={len(saved.tracks)}, here it is "
                f"{self.num_workers}; "
                + (
                    "each worker's data set has a state of its own."
                    if resumption.has_data
                    else "an iterable data set divides itself among its workers."
                ),
                next_step="Go on with the same num_workers, or begin the epoch anew.",
            )
        if not resumption.under_way:
            resumption.progress.beginning.restore(self, everything=False)
        self._headrace.resumption = resumption
        self._headrace.progress = None
        self._headrace.stats.steps.resumed = True

    def _saved(self, progress: Progress | None, *, under_way: bool) -> dict[str, Any]:
        if progress is None:
            tracks = [Track() for _ in range(self.num_workers)]
            progress = Progress(Beginning.take(self), self._map_style, tracks)
        elif not under_way:
            kept, seed = [], None
            if self.persistent_workers:
                seed = progress.base_seed
                kept = [one.between_epochs(map_style=self._map_style) for one in progress.tracks]
            samplers = progress.samplers
            progress = Progress(Beginning.take(self), self._map_style, kept, seed)
            progress.samplers = samplers
        state = progress.plain(under_way=under_way) | _own_rank()
        if self.num_workers == 0:
            state["in_process"] = Snapshot.take().plain()
        if self.num_workers == 0 or not under_way:
            state |= (self._data_state() or DataState()).plain()
        return state

    def _data_state(self) -> DataState | None:
        """Where this process's data set stands, which workers begin from, too."""
        if self._headrace.position is not None:
            return self._headrace.position.take()
        try:
            return DataPosition(self.dataset).take()
        except Exception as e:  # noqa: BLE001 - the user's state_dict(), which may need an iterator
            log.debug("%s has no state yet: %r", type(self.dataset).__name__, e)
            return None

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Asked by Accelerate's `prepare`, just before it builds another loader of this one's parts."""
        keep_through_accelerate()
        return False

    # -- how it looks ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        kind = type(self.dataset).__qualname__
        return f"{type(self).__name__}({kind}, batch {self.batch_size}, {self.num_workers} workers)"

    def _repr_html_(self) -> str:
        """A card for notebooks. The data set is not asked: its `len` may take long."""
        from headrace.pages.html import card
        from headrace.plane.loader import delivered_rows, waited_share

        rows: list[tuple[str, object]] = [
            ("batch", self.batch_size),
            ("workers", self.num_workers),
            ("epochs begun", self._headrace.epochs_begun),
            *delivered_rows(self._headrace.stats),
        ]
        title = f"{type(self).__name__}: {type(self.dataset).__qualname__}"
        return card(title, rows, waited=waited_share(self._headrace.stats))

    # -- what it does ------------------------------------------------------------------------------

    def explain(self) -> str:
        """Say in a few lines what is sped up and how, what is not and why, and what was waited for."""
        own = self._headrace
        lines = [] if own.pictures is None else [own.pictures.explain(self.num_workers)]
        reason = nothing_to_read(self.dataset, map_style=self._map_style)
        if reason is not None:
            lines.append(f"reading ahead: off, because {reason}")
        elif own.watcher is not None:
            lines.append(f"reading ahead: {own.watcher.explain()}")
        elif own.context is not None:
            notes = own.context.results.notes
            for note in dict.fromkeys(notes[worker] for worker in sorted(notes)):
                who = [str(worker) for worker in sorted(notes) if notes[worker] == note]
                lines.append(f"reading ahead: worker {', '.join(who)}: {note}")
        if own.context is not None:
            lines.append(f"batches: {own.context.explain()}")
        if own.stats.batches:
            verdict = verdict_on(self)
            lines.append(f"waiting: {verdict_line(verdict)}")
            if verdict.action:
                lines.append(f"do: {verdict.action}")
        return "\n".join(lines) or "nothing was loaded yet"


def _own_rank() -> dict[str, int]:
    """For traces and states. The sampler shares the samples out, so a rank that is not known does no harm."""
    with contextlib.suppress(RankError):
        place = which_rank()
        return {"rank": place.rank, "world_size": place.world_size}
    return {"rank": 0, "world_size": 1}


_TORCH_HAS_IN_ORDER = "in_order" in inspect.signature(torch_data.DataLoader.__init__).parameters


def _is_store(dataset: Any) -> bool:
    return isinstance(dataset, (str, os.PathLike)) or _is_a(
        dataset, "headrace.store.store", "Store"
    )


def _is_a(thing: Any, module: str, name: str) -> bool:
    """Whether it is an instance of a class, which is not imported for that."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(thing, getattr(loaded, name))


def adopt(loader: Any) -> Any:
    """Return a loader like this one that loads through headrace.

    Args:
        loader: a `torch.utils.data.DataLoader`, which is left as it is; or what Accelerate's `prepare`
            or `skip_first_batches` returned, whose inner loader is replaced.

    Returns:
        A headrace `DataLoader` of the same parts; or the object that was given, if Accelerate made it.

    Raises:
        TypeError: it is no loader of torch's.
    """
    return _adopt(loader, {})


def _adopt(loader: Any, options: dict[str, Any]) -> Any:
    if isinstance(vars(loader).get("base_dataloader"), torch_data.DataLoader):
        loader.base_dataloader = _adopt(loader.base_dataloader, options)
        loader.dl_state_dict = loader.base_dataloader.state_dict()
        return loader
    if not isinstance(loader, torch_data.DataLoader):
        raise TypeError(f"loader is a {type(loader).__name__}, expected a torch DataLoader")
    if isinstance(loader, DataLoader):
        return loader
    return DataLoader(**_arguments(loader), **options)


def keep_through_accelerate() -> None:
    """Let Accelerate's `prepare` return headrace's loaders where it was given one.

    It builds a loader of torch's own class from the parts of the one it is given, and would drop ours,
    with its state, without a word. Loaders of other classes are left to it.
    """
    theirs: Any = sys.modules.get("accelerate.accelerator")
    prepare = getattr(theirs, "prepare_data_loader", None)
    if prepare is None:
        log.warning(
            "Accelerate builds a loader of torch's own class from this one, without its state_dict(): "
            "call headrace.torch.adopt(...) on what prepare returns"
        )
        return
    if getattr(prepare, "_keeps_headrace", False):
        return

    @functools.wraps(prepare)
    def kept(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(dataloader, *args, **kwargs)
        if not isinstance(dataloader, DataLoader):
            return prepared
        return _adopt(prepared, {"decode": dataloader._headrace.decode})  # noqa: SLF001

    kept._keeps_headrace = True  # type: ignore[attr-defined] # noqa: SLF001
    theirs.prepare_data_loader = kept


def _arguments(loader: torch_data.DataLoader[Any]) -> dict[str, Any]:
    """The arguments that a loader was made with, from its attributes."""
    names = inspect.signature(torch_data.DataLoader.__init__).parameters
    arguments = {name: getattr(loader, name) for name in names if name not in {"self", "shuffle"}}
    if isinstance(loader.dataset, torch_data.IterableDataset):
        arguments |= {"sampler": None, "batch_sampler": None}
    elif loader.batch_sampler is not None:
        arguments |= {"batch_size": 1, "sampler": None, "drop_last": False}
    if loader.num_workers == 0:
        arguments["prefetch_factor"] = None
    if hasattr(loader, "snapshot_every_n_steps"):  # torchdata's
        arguments["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
    return arguments
