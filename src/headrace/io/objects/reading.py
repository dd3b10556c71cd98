"""Reading on the event loop: depth, attempts, pauses, fresh credentials, hedges, checks.

`Reading` belongs to one event loop and all its methods but the constructor run there; `engine` owns
the thread and is what everybody else talks to.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.io.objects.connections import Pool
from headrace.io.objects.faults import Backoff, Failure, Fault
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

HEDGED_SHARE = 0.05
"""Of all requests, how many may be sent a second time."""

_WON_MIN = 0.08
"""Where the second answer comes first less often, what a request takes is not its own bad luck. One late
request in five may be in trouble, and worth all the others."""

_DELAY_MIN_S = 0.02
"""A second request costs more than it saves where answers come sooner."""

_HEDGES_AT_ONCE = 16.0
"""However many answers came before: a server that stops answering is not asked everything twice."""

_HEDGED_BYTES_MAX = 4 << 20
_KNOWN_MIN, _KNOWN_MAX = 64, 512
"""Requests of one size that are looked at."""

_LOOKS_EVERY = 16
"""Answers, after which the delay is worked out anew: it takes 50 us."""


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


class Hedging:
    """When a request is sent a second time: after longer than 19 of 20 of its size took.

    Of all requests at most `HEDGED_SHARE` are sent twice, and few at once; a tenth as many where the second
    answer seldom comes first: a server that is slow for everybody gets no more work.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_KNOWN_MAX)
        )
        self._delays_s: dict[int, float] = {}
        self._budget = 0.0
        self._answers = 0
        self._won = 0.2  # of those that were sent twice, lately

    def delay_s(self, nbytes: int) -> float | None:
        """After how long a request of so many bytes should be sent again; None: never."""
        small = nbytes <= _HEDGED_BYTES_MAX  # its second answer has memory of its own
        return self._delays_s.get(_class_of(nbytes)) if small else None

    def spend(self) -> bool:
        """Whether one may be sent again now; it is counted."""
        allowed = self._budget >= 1.0
        self._budget -= allowed
        return allowed

    def ended(self, *, won: bool) -> None:
        """One was sent twice; `won`: the second answer came first."""
        self._won += 0.05 * (won - self._won)

    def note(self, nbytes: int, seconds: float) -> None:
        """A request was answered, the first time or the second, so many seconds after it was sent first."""
        share = HEDGED_SHARE if self._won >= _WON_MIN else HEDGED_SHARE / 10
        self._budget = min(_HEDGES_AT_ONCE, self._budget + share)
        size = _class_of(nbytes)
        known = self._seconds[size]
        known.append(seconds)
        self._answers += 1
        if len(known) < _KNOWN_MIN or self._answers % _LOOKS_EVERY:
            return
        # Those sent twice took longer than the delay, whichever answer came: it does not fall by itself.
        self._delays_s[size] = max(_DELAY_MIN_S, sorted(known)[-1 - len(known) // 20])


def _class_of(nbytes: int) -> int:
    """Sizes of one class differ by less than four: what a request takes grows with its bytes."""
    return nbytes.bit_length() // 2


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
        self._hedging = Hedging()

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
            fault.__cause__ = error
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
        self._tally.add("requests")
        began, size, hedge_s = self._loop.time(), len(wanted.dest), self._policy.hedge_s
        after_s = self._hedging.delay_s(size) if hedge_s == "auto" else hedge_s
        if after_s is None:
            reply = await transport.read(key, wanted.offset, wanted.dest, etag)
        else:
            reply = await self._hedged(transport, key, wanted, etag, after_s)
        self._hedging.note(size, self._loop.time() - began)
        return reply

    async def _hedged(
        self, transport: Transport, key: str, wanted: Wanted, etag: str | None, after_s: float
    ) -> Found:
        """Asks a second time when the first answer is slow; the first good answer counts."""
        first = asyncio.create_task(transport.read(key, wanted.offset, wanted.dest, etag))
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=after_s)
            if first.done() or (self._policy.hedge_s == "auto" and not self._hedging.spend()):
                return await first
            self._tally.add("requests")
            self._tally.add("hedges")
            # Its own memory: two answers must not be written into one place.
            spare = memoryview(bytearray(len(wanted.dest)))
            tasks.append(asyncio.create_task(transport.read(key, wanted.offset, spare, etag)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if all(task.exception() is not None for task in done):
                done, _ = await asyncio.wait(tasks)
            winner = next((t for t in tasks if t in done and t.exception() is None), first)
            self._hedging.ended(won=winner is not first)
            reply = winner.result()
            if winner is not first:
                first.cancel()
                await asyncio.wait([first])  # nothing more is written to `dest`
                self._tally.add("hedges_won")
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
