"""The two iterators: torch's own, with what headrace adds.

`InProcess` fetches in the consumer's process; `InWorkers` in torch's workers. Both count what they
deliver (`Progress`), go on from a loaded state, and tell the read-ahead what comes. Which batch comes
when, and what is in it, is torch's doing alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from headrace.control.stalls.live import tell_epoch
from headrace.errors import StateMismatch
from headrace.frameworks.torch.dropin.position import (
    DataPosition,
    Drawn,
    batches_drawable,
    content_of,
    sampler_position,
)
from headrace.frameworks.torch.dropin.progress import Beginning, Progress, Track
from headrace.frameworks.torch.dropin.watching import Coming, Making
from headrace.plane.batch_trace import reading_of

if TYPE_CHECKING:
    from headrace.frameworks.torch.dropin.position import SamplerPosition
    from headrace.frameworks.torch.dropin.progress import Epochs, Resumption, WorkerMark
    from headrace.frameworks.torch.dropin.watching import Watcher
    from headrace.frameworks.torch.dropin.workers import WorkerContext
    from headrace.plane.batch_trace import BatchTrace


_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined] # noqa: SLF001

_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""glibc learns from blocks of up to 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX), its own head included."""


def keep_freed_memory() -> None:
    """Free a large block, untouched: from then on the heap keeps up to 64 MiB that are free.

    It is what any program comes to that ever frees a tensor of this size; nothing is set, and whoever
    set the C library's thresholds has them still. Costs microseconds.
    """
    np.empty(_BLOCK_BYTES, np.uint8)


SAMPLES_FORETOLD = 1024
"""Samples that each process knows of ahead: reads go on while batches wait for their turn, and are enough
for any storage, whatever the batch size."""

BATCHES_FORETOLD_MAX = 64
"""Batches drawn ahead at most."""

FORETOLD_TOGETHER = 8
"""Batches that one message foretells: a message costs 20 microseconds."""


class _Draws:
    """What both iterators do: skip what a state says is done, draw ahead, see the end."""

    progress: Progress
    _sampler_iter: Any
    _IterableDataset_len_called: Any
    _num_yielded: int
    _skip: int
    _literal: deque[Any]
    _ahead: deque[Any]
    _drawable: int
    _samplers: SamplerPosition | None

    def _begin_draws(self, loader: Any, resumption: Resumption | None) -> None:
        keep_freed_memory()
        index_sampler = loader._index_sampler  # noqa: SLF001
        self._drawable = batches_drawable(index_sampler)
        self._samplers = None if self._drawable else sampler_position(index_sampler)
        self._ahead = deque()
        self._skip = 0
        self._literal = deque()
        self._literal_places: deque[tuple[int, int, int]] = deque()
        self._places: dict[int, tuple[int, int, int]] = {}  # of tasks that workers have
        under_way = resumption is not None and resumption.under_way
        if resumption is not None and under_way and resumption.progress.map_style:
            progress = resumption.progress
            self._skip = progress.delivered + len(progress.pending)
            self._literal = deque(progress.pending.values())
        if resumption is not None and resumption.sampler is not None:
            if self._samplers is None:
                raise StateMismatch(
                    "the state has one of a sampler; here the sampler is one of torch's own.",
                    next_step="Load the state into a loader with the sampler that it was saved with.",
                )
            self._samplers.load(resumption.sampler, under_way=under_way)
            self._skip = 0
        self._drawn_before = Drawn()
        if resumption is not None:
            self._drawn_before, resumption.progress.drawn = resumption.progress.drawn, Drawn()
        self._drawn_in_all = 0
        epochs: Epochs = loader._headrace  # noqa: SLF001
        self._epochs, self._stats = epochs, epochs.stats
        self._user_loader = weakref.ref(loader)
        self._steps_before = epochs.stats.steps.added
        self._epoch = epochs.epochs_begun - 1
        self._place = (0, 0, 0)  # of what is delivered
        # Of what was drawn last, if it counts already.
        self._drawn_place: tuple[int, int, int] | None = None
        self._last_trace: BatchTrace | None = None

    def _instead(self) -> dict[str, Any]:
        """What torch's iterator is to see in the place of the loader's."""
        return {} if self._samplers is None else {"_index_sampler": self._samplers.draws_from}

    def _skip_drawn(self) -> None:
        """Draw again, and drop, what was drawn before the state was taken.

        Raises:
            StateMismatch: it is something else.
        """
        again = Drawn()
        delivered = self._skip - len(self._literal)
        batch = -1
        for batch, index in enumerate(itertools.islice(self._sampler_iter, self._skip)):
            place = again.add(index)
            if batch >= delivered:
                self._literal_places.append(place)
        if batch + 1 < self._skip and self._drawn_before.samples < 0:
            self._drawn_before = Drawn(again.samples + self._skip - batch - 1)  # at least
        self._drawn_in_all += self._skip
        self._skip = 0
        self._drawn_before.check(again)
        self.progress.drawn = again

    def _draw(self) -> Any:
        """The next batch's indices, in their time."""
        if self._skip:
            self._skip_drawn()
        self._drawn_place = self._literal_places.popleft() if self._literal_places else None
        if self._literal:
            return self._literal.popleft()
        if self._ahead:
            return self._ahead.popleft()
        self._drawn_in_all += 1
        samplers = self._samplers
        if samplers is None:
            return next(self._sampler_iter)
        if samplers.exhausted:
            raise StopIteration
        index = next(self._sampler_iter)
        samplers.drawn()
        return index

    def _draw_ahead(self, batches: int) -> list[Any]:
        """Draw up to so many batches before their time; the list is empty where that would show."""
        drawn: list[Any] = []
        while len(drawn) < batches and self._drawn_in_all < self._drawable and not self._literal:
            self._drawn_in_all += 1
            try:
                drawn.append(next(self._sampler_iter))
            except StopIteration:
                self._drawable = 0
        self._ahead.extend(drawn)
        return drawn

    def _failed(self) -> None:
        """A batch ended in an error: end what was under way for it."""

    def __next__(self) -> Any:
        stats, epochs = self._stats, self._epochs
        starting_s, epochs.starting_s = epochs.starting_s, 0.0
        asked_s = stats.ask(starting_s)
        try:
            if _profiler_enabled() or self._IterableDataset_len_called is not None:
                data = super().__next__()  # type: ignore[misc]
            else:
                # As torch does it, without a record for a profiler that does not run.
                data = self._next_data()
                self._num_yielded += 1
        except StopIteration:
            self.progress.finished = True
            epochs.starting_s = time.perf_counter() - asked_s  # in which workers ended
            stats.rest()
            if (loader := self._user_loader()) is not None:
                tell_epoch(loader, self._steps_before)
            raise
        except BaseException:
            self._failed()
            raise
        got_s = time.perf_counter()
        position, samples, hashed = self._place
        place = (self._epoch, self.progress.delivered - 1, position, hashed)
        if starting_s and self._last_trace is not None:  # who makes it may come up after `iter()`
            begun_s = reading_of(self._last_trace.read)[1]
            self._last_trace.started_s = max(asked_s + starting_s, begun_s)
        stats.count(samples, 0, {}, got_s - asked_s)
        stats.steps.add(place, samples, (asked_s, got_s), self._last_trace)
        self._last_trace = None
        return data

    if TYPE_CHECKING:

        def _next_data(self) -> Any: ...


class InProcess(_Draws, _SingleProcessDataLoaderIter):
    """Fetches in the consumer's process."""

    def __init__(
        self,
        loader: Any,
        beginning: Beginning,
        resumption: Resumption | None,
        watcher: Watcher | None,
    ) -> None:
        self._watcher = watcher
        self._begin_draws(loader, resumption)
        map_style = loader._dataset_kind == 0  # noqa: SLF001
        self.position = DataPosition(loader.dataset)
        super().__init__(_View(loader, **self._instead()))
        fetcher = self._dataset_fetcher
        self.position.attach(fetcher)
        if resumption is not None and resumption.under_way and resumption.data is not None:
            self.position.load_after(resumption.data)
        pictures = loader._headrace.pictures  # noqa: SLF001
        if pictures is not None:
            fetcher.dataset = pictures
        self._making = fetcher.collate_fn = Making(fetcher.collate_fn, watcher, pictures)
        self._profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.progress = Progress(beginning, map_style, [])
        if resumption is not None and resumption.under_way:
            self.progress = resumption.progress
            self.progress.tracks = []
            self._do_again(resumption)
        self.progress.samplers = self._samplers
        if watcher is not None:
            watcher.epoch()

    def _failed(self) -> None:
        # Whoever keeps the error keeps all that was under way with it.
        if self._watcher is not None:
            self._watcher.leave()

    def _do_again(self, resumption: Resumption) -> None:
        if self.progress.map_style:
            if self._skip:
                self._skip_drawn()
        elif resumption.data is None:
            again = Drawn()
            with contextlib.suppress(StopIteration):  # it has fewer samples now
                for _ in range(self.progress.delivered):
                    again.add(index := next(self._sampler_iter))
                    again.add_content(content_of(self._dataset_fetcher.fetch(index)))
            self._drawn_before.check(again)
            self.progress.drawn = again

    def _next_index(self) -> Any:
        self._has_index = False  # samplers, too, may raise
        index = self._index = self._draw()
        self._has_index = True
        self._making.begin()
        if self._watcher is None:
            return index
        self._watcher.arrived(index)
        if self._drawn_in_all < self._drawable and isinstance(index, list):
            self._foretell(len(index))
        return self._watcher.watched(index)

    def _foretell(self, batch_size: int) -> None:
        assert self._watcher is not None
        if not self._watcher.wants_more:
            return
        wanted = _batches_wanted(batch_size)
        if len(self._ahead) <= wanted // 2:
            self._watcher.foretold(self._draw_ahead(wanted - len(self._ahead)))

    def _next_data(self) -> Any:
        try:
            data = super()._next_data()
        except StopIteration:
            raise
        except Exception:
            if self._has_index:
                self._count()  # lost: torch goes on with the next one
            raise
        self._count()
        if not self.progress.map_style:
            self.progress.drawn.add_content(content_of(data))
        timing = self._making.timing()
        if timing is not None:
            self._last_trace = trace = timing.trace()
            trace.moved_s = timing.done_s if self._pin_memory else 0.0
        return data

    def _count(self) -> None:
        progress = self.progress
        progress.delivered += 1
        self._place = self._drawn_place or progress.drawn.add(self._index)
        if progress.pending and len(self._literal) < len(progress.pending):
            del progress.pending[min(progress.pending)]


class _View:
    """The loader, as torch's iterator is to see it."""

    def __init__(self, loader: Any, **instead: Any) -> None:
        self._loader = loader
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class InWorkers(_Draws, _MultiProcessingDataLoaderIter):
    """Fetches in worker processes."""

    _shutdown = True  # until torch has begun: nothing is there to be shut down
    _context: WorkerContext

    def __init__(
        self,
        loader: Any,
        beginning: Beginning,
        resumption: Resumption | None,
        context: WorkerContext,
    ) -> None:
        self._context = context
        self._map_style = loader._dataset_kind == 0  # noqa: SLF001
        self._seed_given: int | None = None
        self._begin_draws(loader, resumption)
        tracks = [Track() for _ in range(loader.num_workers)]
        self.progress = Progress(beginning, self._map_style, tracks)
        self._last_received = 0
        self._batch_length = 1
        self._ends: dict[int, WorkerMark | None] = {}  # what workers' ends said, until they count
        if resumption is not None:
            self._go_on(loader, resumption, context)
        self.progress.samplers = self._samplers
        instead = {"multiprocessing_context": context, **self._instead()}
        if self._seed_given is not None and not self.progress.fresh_workers:
            # The workers' seed was drawn in an earlier epoch: none is drawn from the user's now.
            instead["generator"] = torch.Generator()
        try:
            super().__init__(_View(loader, **instead))
        except Exception:
            self._shutdown_workers()
            raise
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        context.started()
        self.progress.base_seed = self._base_seed

    def _go_on(self, loader: Any, resumption: Resumption, context: WorkerContext) -> None:
        saved = resumption.progress
        same_workers = len(saved.tracks) == loader.num_workers
        if same_workers and (resumption.under_way or loader.persistent_workers):
            self._seed_given = saved.base_seed
            context.beginnings = [track.beginning() for track in saved.tracks]
        if resumption.under_way:
            tracks = saved.tracks if same_workers else self.progress.tracks
            self.progress = saved
            self.progress.tracks = tracks
            self.progress.pending = {}
            if not same_workers:
                self.progress.turn = 0
        elif same_workers and loader.persistent_workers:
            self.progress.tracks = saved.tracks
            self.progress.fresh_workers = saved.base_seed is None

    # -- what torch sets, and what it finds there ------------------------------------------------

    @property
    def _base_seed(self) -> int:
        return self._drawn_seed if self._seed_given is None else self._seed_given

    @_base_seed.setter
    def _base_seed(self, seed: int) -> None:
        self._drawn_seed = seed

    @property
    def _worker_queue_idx_cycle(self) -> Any:
        return self._cycle

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, cycle: Any) -> None:
        self._first_turn = self.progress.turn
        for _ in range(self._first_turn):
            next(cycle)
        self._cycle = cycle

    # -- an epoch ----------------------------------------------------------------------------------

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._begin_epoch(loader)
        elif self._context.announced:
            self._await_workers()
        super()._reset(loader, first_iter)
        if not first_iter:
            for worker, mark in self._context.results.resumed():
                self.progress.tracks[worker].begin(mark)

    def _begin_epoch(self, loader: Any) -> None:
        """Begin the next epoch with the workers that are there."""
        before, beginning = self.progress, Beginning.take(loader)
        self.progress = loader._headrace.progress = Progress(  # noqa: SLF001 - its own other half
            beginning, self._map_style, before.tracks, before.base_seed, fresh_workers=False
        )
        for track in before.tracks:
            track.begin(None)
        self._ends.clear()
        self._begin_draws(loader, None)
        self.progress.samplers = self._samplers
        if self._samplers is not None:
            self._index_sampler = self._samplers.draws_from

    def _await_workers(self) -> None:
        """Wait until all workers have begun: what is wrong with that is raised here."""
        self._workers_status = [True] * self._num_workers  # torch looks there for workers that died
        for _ in range(self._num_workers):
            _, failure = super()._get_data()  # type: ignore[no-untyped-call]
            if isinstance(failure, ExceptionWrapper):
                failure.reraise()  # type: ignore[no-untyped-call]
        if self._context.beginnings is None:
            for worker, mark in self._context.results.begun:
                self.progress.tracks[worker].data = mark.data

    def _next_index(self) -> Any:
        index = self._draw()
        self._batch_length = len(index) if isinstance(index, list) else 1
        self.progress.pending[self._send_idx] = index
        if self._map_style:  # others are asked past their end
            self._places[self._send_idx] = self._drawn_place or self.progress.drawn.add(index)
        return index

    def _try_put_index(self) -> None:
        super()._try_put_index()
        if self._drawable:
            self._foretell()

    def _foretell(self) -> None:
        """Tell workers whose read-ahead wants it which batches they will get."""
        if not self._in_order or self._literal or not self._context.results.wants_more:
            return
        known = len(self._ahead)
        wanted = _batches_wanted(self._batch_length)
        wanted = (wanted - self._prefetch_factor) * self._num_workers
        if wanted < 1 or known > wanted - FORETOLD_TOGETHER * self._num_workers:
            return
        coming: dict[int, list[Any]] = {}
        first = self._send_idx + self._first_turn + known
        for i, batch in enumerate(self._draw_ahead(wanted - known)):
            coming.setdefault((first + i) % self._num_workers, []).append(batch)
        for worker, batches in coming.items():
            self._index_queues[worker].put(Coming(batches))

    def _get_data(self) -> Any:
        idx, data = received = super()._get_data()  # type: ignore[no-untyped-call]
        self._last_received = idx
        if isinstance(data, torch_worker._IterableDatasetStopIteration):  # noqa: SLF001
            self._ends[data.worker_id] = self._context.results.mark_of(idx)
            self._count_end(data.worker_id)
        return received

    def _count_end(self, worker: int) -> None:
        """A worker's end counts when its last batch was delivered: one may wait for another worker's turn."""
        waiting = (info[0] == worker for info in self._task_info.values() if len(info) > 1)
        if worker in self._ends and not any(waiting):
            self.progress.tracks[worker].end(self._ends.pop(worker))

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        idx = self._rcvd_idx - 1 if self._in_order else self._last_received
        place = self._places.pop(idx, None)
        self._place = place or self.progress.drawn.add(self.progress.pending.get(idx))
        self._last_trace = self._context.results.trace_of(idx)
        batch = not self._map_style and not isinstance(data, ExceptionWrapper)
        content = content_of(data) if batch else 0
        self.progress.deliver(idx, worker_idx, self._context.results.mark_of(idx), content)
        if self._ends:
            self._count_end(worker_idx)
        return super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]

    def _shutdown_workers(self) -> None:
        super()._shutdown_workers()
        if hasattr(self, "_context"):
            self._context.retire()


def _batches_wanted(batch_size: int) -> int:
    return min(BATCHES_FORETOLD_MAX, math.ceil(SAMPLES_FORETOLD / max(1, batch_size)))
