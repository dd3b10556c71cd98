"""Reading on the event loop: depth, attempts, pauses, fresh credentials, hedges, checks.

`Reading` belongs to one event loop and all its methods but the constructor run there; `engine` owns
the thread and is what everybody else talks to.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.io.objects.faults import Backoff, Failure, Fault
from headrace.io.objects.http import Pool
from headrace.io.objects.location import root_of
from headrace.io.objects.transport import Roots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.io.objects.engine import Tally
    from headrace.io.objects.options import ReadPolicy
    from headrace.io.objects.transport import Found, Transport

_CONNECTIONS_LEAST = 2

_THREADS = 32
"""For transports that block; a plain HTTP read needs none."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object as it was listed or opened; what is None is not compared.

    Attributes:
        url: where it is.
        size: its bytes.
        etag: its version as the store names it.
        modified_ns: when it was written.
    """

    url: str
    size: int
    etag: str | None = None
    modified_ns: int | None = None


@dataclass(slots=True)
class Wanted:
    """One range to be read.

    Attributes:
        url: the object.
        offset: first byte.
        dest: where to; its length is the range's.
        done: called once, on the loop, with what was found or what went wrong.
        exact: fewer bytes are a fault; else they are the object's end.
    """

    url: str
    offset: int
    dest: memoryview
    done: Callable[[Found | Failure], None]
    exact: bool = True


class Reading:
    """All reads of one event loop.

    Args:
        policy: deadlines and the first depth.
        options: the client's part of `storage_options`.
        objects: what is known of objects, by URL; shared with the engine.
        tally: counters.
        loop: the event loop.
    """

    def __init__(
        self,
        policy: ReadPolicy,
        options: Mapping[str, Any],
        objects: Mapping[str, RemoteObject],
        tally: Tally,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.depth = policy.reads_in_flight
        self.in_flight = 0
        self._policy = policy
        self._objects = objects
        self._tally = tally
        self._threads = ThreadPoolExecutor(_THREADS, "headrace-objects")
        self._pool = Pool(policy.stall_s)
        self._roots = Roots(options, self._pool, self._threads)
        self._backoff = Backoff(policy.pause_first_s, policy.pause_most_s)
        self._waiting: deque[Wanted] = deque()
        self._tasks: set[asyncio.Task[Found | Failure]] = set()
        self._quiet_until: dict[str, float] = {}
        self._refreshing: dict[int, asyncio.Task[bool]] = {}
        self._refreshed_at: dict[int, float] = {}
        self._most = _connections_most()
        self._loop = loop
        self._luck = random.Random()  # noqa: S311 - jitter, no secret

    @property
    def waiting(self) -> int:
        """Reads that wait for their turn."""
        return len(self._waiting)

    def add(self, wanted: list[Wanted]) -> None:
        """Queues reads."""
        self._waiting.extend(wanted)
        self.pump()

    def pump(self) -> None:
        """Starts what the depth allows."""
        while self._waiting and self.in_flight < min(self.depth, self._most):
            self.in_flight += 1
            self._begin(self._waiting.popleft())

    def _begin(self, wanted: Wanted) -> None:
        started = self._loop.time()
        task = self._loop.create_task(self._read(wanted, started))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(wanted, started, ended))

    def _ended(self, wanted: Wanted, started: float, task: asyncio.Task[Found | Failure]) -> None:
        """Reports a read. Here and not in its task: one that is stopped may never have begun."""
        self._tasks.discard(task)
        self.in_flight -= 1
        elapsed_s = self._loop.time() - started
        if task.cancelled():
            outcome: Found | Failure = _failure(wanted, _CLOSED, 0, 0.0)
        elif (error := task.exception()) is not None:
            fault = Fault("final", f"{type(error).__name__}: {error}")
            outcome = _failure(wanted, fault, 1, elapsed_s)
        else:
            outcome = task.result()
        failed = isinstance(outcome, Failure)
        self._tally.read(elapsed_s, 0 if failed else len(wanted.dest), failed=failed)
        wanted.done(outcome)
        self.pump()

    async def close(self) -> None:
        """Ends everything; reads that are not done are failed."""
        left, self._waiting = list(self._waiting), deque()
        for wanted in left:
            wanted.done(_failure(wanted, _CLOSED, 0, 0.0))
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # their ends are told
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, wanted: Wanted, started: float) -> Found | Failure:
        """Attempts until one succeeds, none can, or the deadline comes."""
        loop, policy = self._loop, self._policy
        attempts = 0
        began = started
        refreshed = False
        before: Fault | None = None
        while True:
            attempts += 1
            try:
                async with asyncio.timeout_at(started + policy.deadline_s):
                    if self._quiet_until:
                        await self._keep_quiet(wanted.url)
                    began = loop.time()
                    reply = await self._attempt(wanted)
                self._check(wanted, reply)
            except TimeoutError:
                fault = out_of_time(policy.deadline_s, before)
                self._tally.fault(fault.reason)
                pause = None
            except Fault as met:
                before = fault = met
                self._tally.fault(fault.reason)
                pause = None
                if fault.again and attempts != policy.attempts_max:
                    pause = self._backoff.pause_s(
                        attempts, loop.time() - started, fault.budget_s(policy.deadline_s),
                        self._luck.random(), fault.retry_after_s,
                    )  # fmt: skip
                elif fault.kind == "expired" and not refreshed:
                    refreshed = True
                    pause = 0.0 if await self._refresh(wanted.url, began) else None
            else:
                return reply
            if pause is None:
                return _failure(wanted, fault, attempts, loop.time() - started)
            self._tally.add("retries")
            if fault.retry_after_s:
                self._ask_quiet(wanted.url, fault.retry_after_s)
            await asyncio.sleep(pause)

    async def _attempt(self, wanted: Wanted) -> Found:
        transport, key = await self._roots.transport(wanted.url)
        expected = self._objects.get(wanted.url)
        etag = None if expected is None else expected.etag
        hedge_s = self._policy.hedge_s
        if hedge_s is None:
            self._tally.add("requests")
            return await transport.read(key, wanted.offset, wanted.dest, etag)
        return await self._hedged(transport, key, wanted, etag, hedge_s)

    async def _hedged(
        self, transport: Transport, key: str, wanted: Wanted, etag: str | None, hedge_s: float
    ) -> Found:
        """Asks a second time when the first answer is slow; the first good answer counts."""
        self._tally.add("requests")
        first = asyncio.create_task(transport.read(key, wanted.offset, wanted.dest, etag))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=hedge_s)
            if first.done():
                return first.result()
            self._tally.add("requests")
            self._tally.add("hedges")
            # Its own memory: two answers must not be written into one place.
            spare = memoryview(bytearray(len(wanted.dest)))
            tasks.append(asyncio.create_task(transport.read(key, wanted.offset, spare, etag)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if all(task.exception() is not None for task in done):
                done, _ = await asyncio.wait(tasks)
            winner = next((t for t in tasks if t in done and t.exception() is None), first)
            reply = winner.result()
            if winner is not first:
                first.cancel()
                await asyncio.wait([first])  # nothing more is written to `dest`
                wanted.dest[: reply.count] = spare[: reply.count]
            return reply
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, wanted: Wanted, reply: Found) -> None:
        """The reply is of the object that was expected, and has all of the range."""
        expected = self._objects.get(wanted.url)
        if expected is not None:
            what, was, now = "size in bytes", expected.size, reply.size
            if was == now and None not in (expected.etag, reply.etag):
                what, was, now = "etag", expected.etag, reply.etag  # type: ignore[assignment]
            elif was == now and None not in (expected.modified_ns, reply.modified_ns):
                what = "modification time in ns"
                was, now = expected.modified_ns, reply.modified_ns  # type: ignore[assignment]
            if was != now:
                raise Fault("changed", f"changed: its {what} is {now}, expected {was}")
        if wanted.exact and reply.count != len(wanted.dest):
            raise Fault("changed", f"changed: it ends at {reply.size:,}")

    async def _refresh(self, url: str, began: float) -> bool:
        """Fetches credentials anew: once for all reads that met their end together.

        `began`: when the attempt did that was refused. Who was refused late may find them renewed.
        """
        transport, _ = await self._roots.transport(url)
        if self._refreshed_at.get(id(transport), 0.0) > began:
            return True
        running = self._refreshing.get(id(transport))
        if running is None:
            self._tally.add("refreshes")
            loop = asyncio.get_running_loop()

            async def refresh() -> bool:
                renewed = await loop.run_in_executor(self._threads, transport.refresh)
                if renewed:
                    self._refreshed_at[id(transport)] = loop.time()
                return renewed

            running = self._refreshing[id(transport)] = asyncio.create_task(refresh())
            running.add_done_callback(lambda _: self._refreshing.pop(id(transport), None))
        return await asyncio.shield(running)

    def _ask_quiet(self, url: str, seconds: float) -> None:
        """A Retry-After counts for all requests to the bucket."""
        root = root_of(url)
        until = asyncio.get_running_loop().time() + seconds
        self._quiet_until[root] = max(self._quiet_until.get(root, 0.0), until)

    async def _keep_quiet(self, url: str) -> None:
        quiet_s = self._quiet_until.get(root_of(url), 0.0) - asyncio.get_running_loop().time()
        if quiet_s > 0:
            await asyncio.sleep(quiet_s)


def _connections_most() -> int:
    """Half of the descriptors that are left: the rest is for the program."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 16
    return max(_CONNECTIONS_LEAST, (soft - sum(1 for _ in Path("/proc/self/fd").iterdir())) // 2)


def _failure(wanted: Wanted, fault: Fault, attempts: int, elapsed_s: float) -> Failure:
    return Failure(wanted.url, wanted.offset, len(wanted.dest), fault, attempts, elapsed_s)


def out_of_time(deadline_s: float, before: Fault | None) -> Fault:
    """The deadline came; what earlier attempts met says more about the server than that."""
    reason = f"no answer within {deadline_s:g} s"
    if before is not None:
        reason += f"; the attempt before met: {before.reason}"
    return Fault("transient", reason, status=None if before is None else before.status)


_CLOSED = Fault("final", "the engine was closed")
