"""Rate limits: what the jobs of this node may take from each file system, and who waits for that.

The daemon's loop asks before it begins a batch. What memory and local disk have is free, and so is
what somebody reads already; the rest is paid for from the job's limit on the data's file system.
A client whose job has used its limit up waits here, in turn with the job's other clients, while
other jobs go on.

Limits come as leases (`apply`) and end by the monotonic clock: an agent that hangs, a controller that
is gone, or a wall clock that jumps changes nothing about that. The loop, which must not wait, and the agent's
thread, which may, meet here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from headrace.control.messages import Flow, Grant
from headrace.plane.rate_limit import LIMITED, Cost, Limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.control.messages import Lease
    from headrace.node.served import ServedData
    from headrace.node.session import Session

OTHER = "other"
"""The file system of paths that belong to no other."""

FLOWS_MAX = 4096
IDLE_TAKES_MAX = 240
"""A flow that did nothing for so many reports is forgotten."""

FIRST_RATE = 1.0
"""What a flow has that the controller has not heard of, while a lease runs: its first batch passes, the
rest waits for the answer."""

FIRST_S = 1.0
"""It waits no longer: a controller that is gone must not stop a job that begins while a lease runs."""

FREE = Cost()


@dataclass(frozen=True, slots=True)
class Charge:
    """What was paid for a batch."""

    limit: Limit
    cost: Cost

    def settle(self, bytes_read: int) -> None:
        """Pay back what did not have to be read: the system had it in its page cache."""
        if self.cost is FREE:
            return
        back = min(0.0, bytes_read - self.cost.bytes)
        reads = -self.cost.reads if bytes_read == 0 else 0.0
        if back or reads:
            self.limit.spend(Cost(back, reads))


class _Flow:
    """One job on one file system."""

    def __init__(self, now: float) -> None:
        self.limit = Limit(now)
        self.waiting: deque[Session] = deque()
        self.costs: dict[Session, Cost] = {}
        self.idle = 0


class RateLimits:
    """The limits of all jobs of this node.

    `poke` is called when there is something that the controller should hear at once, `wake` when somebody who
    waits may go.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        poke: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self.poke = poke
        self.wake = wake
        self._lock = threading.RLock()
        self._flows: dict[tuple[str, str], _Flow] = {}
        self._held: dict[Session, _Flow] = {}
        self._new: dict[_Flow, float] = {}  # until when it waits to be known
        self._places: list[tuple[str, str]] = []
        self._known: dict[str, str] = {}
        self._leased = False
        self._until_s = 0.0
        self._default: tuple[float | None, ...] = (None,) * len(LIMITED)
        self.leases = self.lapses = 0

    # -- for the loop -----------------------------------------------------------------------------

    def limit(self, job: str, path: str) -> Limit:
        """The limit of a job where this path lies; for whatever is no batch, such as an open."""
        with self._lock:
            self._lapse(self._clock())
            return self._flow(job, path).limit

    def admit(
        self, session: Session, job: str, data: ServedData, indices: NDArray[Any]
    ) -> Charge | None:
        """Pay for a batch; None: the session waits now, and is pumped when it may go."""
        now = self._clock()
        with self._lock:
            self._lapse(now)
            if session in self._held:
                return None
            flow = self._flow(job, data.source_path)
            cost = data.cost_of(indices)
            if not cost.bytes and not cost.reads:
                return Charge(flow.limit, FREE)
            if flow.limit.limited and (flow.waiting or flow.limit.wait_s(cost, now) > 0):
                if flow.idle:  # others have its share by now
                    flow.idle = 0
                    self.poke()
                self._held[session] = flow
                flow.waiting.append(session)
                flow.costs[session] = cost
                flow.limit.hold(session, cost, now)
                return None
            flow.limit.spend(cost)
            return Charge(flow.limit, cost)

    def holds(self, session: Session) -> bool:
        """Whether it waits here."""
        return session in self._held

    def forget(self, session: Session) -> None:
        """It is gone."""
        with self._lock:
            flow = self._held.pop(session, None)
            if flow is not None:
                flow.waiting.remove(session)
                del flow.costs[session]
                flow.limit.let_go(session, self._clock())

    def wait_s(self) -> float | None:
        """Seconds until somebody who waits may go; None: nobody waits."""
        if not self._held:
            return None
        now = self._clock()
        with self._lock:
            self._lapse(now)
            waits = [
                flow.limit.wait_s(flow.costs[flow.waiting[0]], now)
                for flow in self._flows.values()
                if flow.waiting
            ]
            ends = [self._until_s, *self._new.values()] if self._leased else []
            waits += [max(0.0, end - now) for end in ends]
            return min(waits, default=None)

    def let_go(self) -> None:
        """Pump those whose turn it is."""
        if not self._held:
            return
        with self._lock:
            self._lapse(self._clock())
            for flow in [flow for flow in self._flows.values() if flow.waiting]:
                self._let_go(flow)

    def _let_go(self, flow: _Flow) -> None:
        for _ in range(len(flow.waiting)):
            if not flow.waiting:
                return
            now, session = self._clock(), flow.waiting[0]
            if flow.limit.wait_s(flow.costs[session], now) > 0:
                return
            behind = list(flow.waiting)[1:]
            self.forget(session)
            # Those behind do not count as before it while it has its turn.
            flow.waiting.clear()
            session.pump()
            again = list(flow.waiting)
            flow.waiting.clear()
            flow.waiting.extend([*behind, *again])

    # -- for the agent ----------------------------------------------------------------------------

    def usage(self) -> list[Flow]:
        """What each flow did since this was last asked; those that did nothing are left out."""
        now, flows = self._clock(), []
        with self._lock:
            self._lapse(now)
            for (job, system), flow in tuple(self._flows.items()):
                usage = flow.limit.take_usage(now)
                if usage.idle:
                    flow.idle += 1
                    if flow.idle > IDLE_TAKES_MAX and not flow.waiting:
                        del self._flows[job, system]
                    continue
                flow.idle = 0
                flows.append(Flow(job, system, usage.used, usage.waiting, usage.held_s))
        return flows[:FLOWS_MAX]

    def holdings(self) -> list[Grant]:
        """The limits that hold by a lease that still runs."""
        now = self._clock()
        with self._lock:
            self._lapse(now)
            if not self._leased:
                return []
            return [
                Grant(
                    job,
                    system,
                    cast("tuple[float | None, float | None, float | None]", flow.limit.rates),
                )
                for (job, system), flow in self._flows.items()
            ][:FLOWS_MAX]

    def apply(self, lease: Lease, asked_at: float) -> None:
        """Keep to a lease.

        Args:
            lease: what the controller says.
            asked_at: when it was asked, on this side's clock: the lease's time begins there.
        """
        now = self._clock()
        with self._lock:
            places = sorted(
                ((path, place.name) for place in lease.file_systems for path in place.paths),
                key=lambda place: (-len(place[0]), place),
            )
            if places != self._places:
                self._places = places
                self._known.clear()
            self._leased, self._until_s = True, asked_at + lease.lease_s
            self._default = lease.when_expired or (None,) * len(LIMITED)
            self.leases += 1
            for grant in lease.grants:
                flow = self._flows.get((grant.job, grant.file_system))
                if flow is not None:
                    flow.limit.set_rates(grant.rates, now)
                    self._new.pop(flow, None)
            self._lapse(now)
        if self._held:
            self.wake()

    @property
    def left_s(self) -> float:
        """How long the lease runs still; 0: none runs."""
        return max(0.0, self._until_s - self._clock()) if self._leased else 0.0

    def _lapse(self, now: float) -> None:
        """Fall to the declared default when the lease has ended."""
        if self._leased and now >= self._until_s:
            self._leased = False
            self.lapses += 1
            self._new.clear()
            for flow in self._flows.values():
                flow.limit.set_rates(self._default, now)
        for flow in [flow for flow, until_s in self._new.items() if now >= until_s]:
            del self._new[flow]
            flow.limit.set_rates(self._default, now)

    # -- flows ------------------------------------------------------------------------------------

    def _flow(self, job: str, path: str) -> _Flow:
        system = self._known.get(path)
        if system is None:
            real = os.path.realpath(path) if path.startswith("/") else path
            places = (n for p, n in self._places if f"{real}/".startswith(p.rstrip("/") + "/"))
            system = self._known[path] = next(places, OTHER)
        flow = self._flows.get((job, system))
        if flow is None:
            now = self._clock()
            flow = self._flows[job, system] = _Flow(now)
            if self._leased:
                flow.limit.set_rates((FIRST_RATE,) * len(LIMITED), now)
                self._new[flow] = now + FIRST_S
            elif self.lapses:
                flow.limit.set_rates(self._default, now)
            self.poke()
        return flow

    # -- for those who watch ----------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What holds now, as plain values."""
        with self._lock:
            return {
                "lease_left_s": self.left_s,
                "leases": self.leases,
                "lapses": self.lapses,
                "waiting": len(self._held),
                "flows": [
                    {
                        "job": job, "file_system": system,
                        "limits": dict(zip(LIMITED, flow.limit.rates, strict=True)),
                        "used": dict(zip(LIMITED, flow.limit.total, strict=True)),
                        "held_s": flow.limit.held_s,
                    }
                    for (job, system), flow in self._flows.items()
                ],
            }  # fmt: skip
