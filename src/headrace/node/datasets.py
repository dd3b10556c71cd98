"""The data sets that the daemon has open, and how memory is shared out among them.

A data set is known by its fingerprint, the parts that are read and what is done to its pictures, and opened
once. It stays open when its last user goes: the next job finds its samples in memory.

Each data set that somebody uses gets the same memory (`share_out`), but never more than it needs, nor more
than its jobs may have; what one does not need goes to the others. Data sets that nobody uses keep what is
left, the one that was used last first: samples are kept rather than churned.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import HeadraceError, SourceChanged
from headrace.machine.host import available_memory
from headrace.node.served import ServedData, Want
from headrace.node.wire import ReplyStatus
from headrace.plane.tiers import MEMORY_RESERVE_BYTES
from headrace.store.opening import reopen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Executor

    from headrace.base.loop import Loop
    from headrace.node.daemon import NodeOptions
    from headrace.node.files.root_files import RootFiles
    from headrace.node.wire import Open, Pictures
    from headrace.plane.images import Images
    from headrace.store import Store


def share_out(
    total_bytes: int,
    job_bytes: int | None,
    wants: Sequence[Want],
    quotas_of_jobs: Mapping[str, int] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Return the quota of each data set, in bytes.

    Args:
        total_bytes: for all.
        job_bytes: for the data sets of one job together; a data set of several jobs counts for each
            of them by its share. None: no limit.
        wants: the data sets. The result does not depend on their order.
        quotas_of_jobs: what some jobs may have instead of `job_bytes`.
    """
    quotas = [0] * len(wants)
    active = [i for i, want in enumerate(wants) if want.jobs]
    caps = {i: wants[i].needed_bytes for i in active}
    if job_bytes is not None or quotas_of_jobs:
        shares = _job_shares(job_bytes, quotas_of_jobs, total_bytes, wants, active)
        caps = {i: min(caps[i], shares[i]) for i in active}
    left = total_bytes
    # The smallest first: what it leaves of its share is the others'.
    by_cap = sorted(active, key=lambda i: caps[i])
    for done, i in enumerate(by_cap):
        quotas[i] = min(caps[i], left // (len(by_cap) - done))
        left -= quotas[i]
    idle = [i for i, want in enumerate(wants) if not want.jobs]
    for i in sorted(idle, key=lambda i: (-wants[i].used_s, wants[i].held_bytes)):
        # Samples lie in large pieces: a part of what is held may be nothing.
        quotas[i] = min(wants[i].held_bytes, left)
        left -= quotas[i]
    return tuple(quotas)


def _job_shares(
    job_bytes: int | None,
    quotas_of_jobs: Mapping[str, int],
    total_bytes: int,
    wants: Sequence[Want],
    active: Sequence[int],
) -> dict[int, int]:
    """What each data set may take of its jobs' quotas: of each job the same for all its data sets."""
    used_by: dict[str, int] = {}
    for i in active:
        for job in wants[i].jobs:
            used_by[job] = used_by.get(job, 0) + 1
    others = total_bytes if job_bytes is None else job_bytes
    return {
        i: sum(quotas_of_jobs.get(job, others) // used_by[job] for job in wants[i].jobs)
        for i in active
    }


_log = logging.getLogger("headrace.node")

_Key = tuple[str, tuple[str, ...], "Pictures | None"]
"""What a data set is known by: its fingerprint, the parts that are read, what is done to its pictures."""


def _refusal(error: Exception, path: str | bytes) -> tuple[ReplyStatus, str]:
    """What a client is told of a data set that cannot be opened, where that is caught."""
    if isinstance(error, HeadraceError):
        changed = isinstance(error, SourceChanged)
        return (ReplyStatus.MISMATCH if changed else ReplyStatus.NOT_FOUND), str(error)
    _log.exception("%s cannot be opened", path)
    return ReplyStatus.NOT_FOUND, f"{type(error).__name__}: {error}"


DATASETS_MAX = 64
"""Data sets that are open at a time; one more closes the one that nobody uses for the longest."""


class OpenDatasets:
    """The daemon's data sets. All methods are for its loop alone.

    Attributes:
        sharers: files of programs, which get a part of the memory too.
    """

    def __init__(
        self,
        options: NodeOptions,
        working: Executor,
        keeping: Executor,
        loop: Loop,
    ) -> None:
        self._options = options
        self._working, self._keeping = working, keeping
        self._loop = loop
        self._data: dict[_Key, ServedData] = {}
        self.quotas_of_jobs: dict[str, int] = {}
        self._opening: dict[_Key, list[Any]] = {}
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._next = 1
        self.sharers: Collection[RootFiles] = ()

    def open(
        self, request: Open, answer: Callable[[ServedData | None, ReplyStatus, str], None]
    ) -> None:
        """Open a data set, or find it open; `answer` is called in the loop, soon."""
        key = request.fingerprint, tuple(request.parts), request.pictures
        if key in self._data:
            answer(self._data[key], ReplyStatus.OK, "")
        elif key in self._opening:
            self._opening[key].append(answer)
        else:
            self._opening[key] = [answer]
            thread = threading.Thread(
                target=self._open, args=(key, request), name="headrace-node-open", daemon=True
            )
            self._threads.add(thread)
            thread.start()

    def _open(self, key: _Key, request: Open) -> None:
        """Runs in a thread: a folder of a million files takes its time."""
        from headrace.store.sources.scan import SourceOptions

        store, kept, status, text = None, None, ReplyStatus.OK, ""
        direct, options = request.direct, None
        try:
            if request.pictures is not None:
                from headrace.plane.images import kept_images

                kept = kept_images(**msgspec.structs.asdict(request.pictures))
                kept.part_of(request.parts)
            if direct is not None:
                options = SourceOptions(**msgspec.structs.asdict(direct))
            path = os.fsdecode(request.path)
            store = reopen(path, request.segments, request.fingerprint, options)
            _ = store.nbytes  # looked at here rather than in the loop
            missing = [part for part in request.parts if part not in store.parts]
            if missing:
                status, text = ReplyStatus.MISMATCH, f"there is no part {missing[0]!r}"
        except Exception as e:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            status, text = _refusal(e, request.path)
        self._loop.call_soon(lambda: self._opened(key, store, kept, status, text))

    def _opened(
        self, key: _Key, store: Store | None, kept: Images | None, status: ReplyStatus, text: str
    ) -> None:
        data = None
        if store is not None and status is ReplyStatus.OK:
            try:
                self._make_room()
                data = ServedData(
                    self._next, store, key[1], kept, options=self._options.reader,
                    # Memory is shared out as soon as somebody uses it.
                    tiers=replace(self._options.tiers, ram_bytes=1),
                    gathering=self._working, keeping=self._keeping, loop=self._loop,
                )  # fmt: skip
            except Exception as e:  # noqa: BLE001 - as in `_open`
                status, text = _refusal(e, store.path)
            else:
                self._data[key] = data
                self._next += 1
                _log.info("serves %s (%d samples)", store.path, len(store))
        if data is None and store is not None:
            store.close()
        for answer in self._opening.pop(key):
            answer(data, status, text)
        self.share()

    def _make_room(self) -> None:
        while len(self._data) >= DATASETS_MAX:
            idle = [(d.used_s, key) for key, d in self._data.items() if not d.users]
            if not idle:
                return
            self._data.pop(min(idle)[1]).close()

    def share(self) -> None:
        """Share memory out anew: somebody came, went, or memory is short."""
        everything: list[ServedData | RootFiles] = [*self._data.values(), *self.sharers]
        wants = [data.want() for data in everything]
        held = sum(want.held_bytes for want in wants)
        total = self._options.ram_bytes
        short = MEMORY_RESERVE_BYTES // 2 - available_memory()
        if short > 0 and self._options.yielding:
            total = min(total, max(0, held - short))
        quotas = share_out(total, self._options.job_ram_bytes, wants, self.quotas_of_jobs)
        grants = 0  # memory that may be taken, and is not yet
        # Those that shrink go first: their memory is what the others get, once nobody has it mapped.
        order = sorted(range(len(wants)), key=lambda i: quotas[i] - wants[i].held_bytes)
        for i in order:
            sharer, quota = everything[i], quotas[i]
            held = sharer.held_bytes
            if quota > held:
                taken = sum(s.held_bytes + s.lingering_bytes for s in everything)
                more = min(quota - held, max(0, total - taken - grants))
                grants += more
                quota = held + more
            sharer.set_quota(quota)

    def changed(self) -> list[ServedData]:
        """Data sets whose memory came or went since the last call."""
        return [data for data in self._data.values() if data.slabs_changed()]

    def look(self, most_bytes: Callable[[Mapping[str, int]], int]) -> None:
        """Look after reads that nobody rings for (what is late, or held back), and how far clients ask ahead.

        `most_bytes`: what the windows of a data set's users hold.
        """
        for data in tuple(self._data.values()):
            data.look()
            data.tuning.look(most_bytes(data.users))

    @property
    def in_use(self) -> bool:
        """Whether anybody uses any of it."""
        return any(data.users for data in self._data.values()) or any(
            sharer.want().jobs for sharer in self.sharers
        )

    def reports(self) -> list[dict[str, Any]]:
        """The figures of each data set."""
        now = time.monotonic()
        return [
            {**data.report(), "idle_s": round(now - data.used_s, 3)} for data in self._data.values()
        ]

    def close(self) -> None:
        """Close all."""
        for data in self._data.values():
            data.close()
        self._data.clear()

    def join(self, seconds: float) -> bool:
        """Wait for threads to end, after `close`; whether they have."""
        deadline = time.monotonic() + seconds
        for thread in tuple(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in tuple(self._threads))
