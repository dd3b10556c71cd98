"""Rate limits: what the jobs of this node may take from each file system, who waits for that, and who says so.

The daemon's loop asks before it begins a batch (`RateLimits`). What memory and local disk have is free, and
so is what somebody reads already; the rest is paid for from the job's limit on the data's file system. A
client whose job has used its limit up waits here, in turn with the job's other clients, while other jobs go on.

Limits come as leases (`apply`) and end by the monotonic clock: an agent that hangs, a controller that
is gone, or a wall clock that jumps changes nothing about that. The loop, which must not wait, and the agent's
thread, which may, meet here.

That thread (`LeaseAgent`) registers at the controller, reports, and hands leases over, and does nothing else:
a controller that is slow, gone or hostile costs the data nothing. A lease of an older controller is void; one
of another database counts only when no lease runs. If the controller is gone it is asked again, less and less
often, for ever.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base.peers import user_name
from headrace.control.client import Client, Refusal
from headrace.control.messages import (
    API,
    FLOWS_MAX,
    Flow,
    Grant,
    Lease,
    PlaneState,
    Register,
    Report,
    decode,
    encode,
)
from headrace.errors import ControlError
from headrace.plane.rate_limit import LIMITED, Cost, Limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from headrace.control.client import Endpoint
    from headrace.node.served import ServedData
    from headrace.node.session import Session


OTHER = "other"  # the file system of paths that belong to no other
IDLE_TAKES_MAX = 240  # a flow that did nothing for so many reports is forgotten
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
            grants = [Grant(*key, flow.limit.rates) for key, flow in self._flows.items()]
            return grants[:FLOWS_MAX]

    def apply(self, lease: Lease, asked_at: float) -> None:
        """Keep to a lease; its time begins when the controller was asked for it, on this side's clock."""
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


_log = logging.getLogger("headrace.control")

RETRY_S = 0.25
RETRY_MAX_S = 2.0
REFUSED_S = 5.0
HASTE_S = 0.05  # however much there is to tell, reports are so far apart
END_S = 1.0


class LeaseAgent:
    """Speaks for one plane, from `start` to `close`."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: RateLimits,
        state: Callable[[], PlaneState] = PlaneState,
        leased: Callable[[Lease], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint  # the controller
        self._limits = limits  # keeps to its leases
        self._state = state  # figures for those who watch; called in the agent's thread
        self._leased = leased  # called with each lease that counts, in the agent's thread
        self._clock = clock  # a monotonic one, the same as that of `limits`
        self._client = Client(endpoint)
        self._instance = secrets.token_hex(16)
        self._plane = ""
        self._sequence = 0
        self._reign, self._epoch = "", 0
        self._reported_at = clock()
        self._unreported: list[Flow] = []
        self._poked = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None
        self.reports = self.failures = self.void = 0
        self.why = "not asked yet"

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="headrace-agent", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Report soon. From any thread."""
        self._poked.set()

    def close(self) -> None:
        """End, and tell the controller so if it answers at once."""
        self._ending = True
        self._poked.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def describe(self) -> dict[str, Any]:
        """How it fares, as plain values."""
        return {
            "url": self._endpoint.url, "registered": bool(self._plane), "epoch": self._epoch,
            "reports": self.reports, "failures": self.failures, "void_leases": self.void,
            "why": self.why,
        }  # fmt: skip

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = RETRY_S
        while not self._ending:
            try:
                wait_s = self.turn()
                pause_s = RETRY_S
                self.why = ""
            except Refusal as e:
                wait_s = self._refused(e)
            except (ControlError, FileNotFoundError, ValueError) as e:
                self._failed(str(e))
                # Somebody waits with a lease that runs out: ask in time.
                wait_s, pause_s = pause_s, min(RETRY_MAX_S, 2 * pause_s)
            self._rest(wait_s)
        self._leave()

    def _rest(self, wait_s: float) -> None:
        poked = self._poked.wait(wait_s)
        if poked and not self._ending:
            self._poked.clear()
            time.sleep(min(HASTE_S, wait_s))

    def turn(self) -> float:
        """Register or report, once; returns when to do so again, in seconds.

        Raises:
            Refusal: the controller refuses.
            ControlError: it does not answer.
            FileNotFoundError: nobody listens.
            ValueError: the answer is none.
        """
        asked_at = self._clock()
        if not self._plane:
            body = encode(
                Register(
                    API, socket.gethostname()[:256] or "?", user_name(os.geteuid()), os.getpid(),
                    self._instance, self._limits.holdings(),
                )
            )  # fmt: skip
            answer = self._client.ask("POST", "/v1/planes", body)
            self._sequence = 0
        else:
            self._sequence += 1
            seconds = asked_at - self._reported_at
            # What a lost report said is said again.
            self._unreported = _added(self._unreported, self._limits.usage())
            report = Report(self._sequence, seconds, self._unreported, self._state())
            answer = self._client.ask("POST", f"/v1/planes/{self._plane}/report", encode(report))
            self._unreported = []
        self._reported_at = asked_at
        self.reports += 1
        return self._take(decode(Lease, answer), asked_at)

    def _take(self, lease: Lease, asked_at: float) -> float:
        """Keep to a lease, if it counts."""
        older = lease.reign == self._reign and lease.epoch < self._epoch
        foreign = self._reign not in ("", lease.reign) and self._limits.left_s > 0
        if older or foreign or lease.sequence != self._sequence:
            self.void += 1
            self._plane = ""
            kind = "an older controller" if older else "another controller"
            raise ControlError(
                f"{self._endpoint.url}: {kind} answers, with epoch {lease.epoch} of {lease.reign}; "
                f"epoch {self._epoch} of {self._reign} was kept to."
            )
        first = not self._plane
        self._plane, self._reign, self._epoch = lease.plane, lease.reign, lease.epoch
        self._client.deadline_s = min(5.0, max(0.5, lease.lease_s / 3))
        self._limits.apply(lease, asked_at)
        self._leased(lease)
        if first:
            _log.info("registered at %s, epoch %d", self._endpoint.url, lease.epoch)
            return 0.0
        return max(HASTE_S, lease.report_s)

    def _refused(self, refusal: Refusal) -> float:
        known = bool(self._plane)
        self._plane = ""
        if refusal.status in (404, 409) and known:
            return 0.0  # it was restarted: register again
        self._failed(str(refusal))
        return REFUSED_S if refusal.status in (401, 403) else RETRY_MAX_S

    def _failed(self, why: str) -> None:
        self.failures += 1
        if why != self.why:
            _log.warning("no lease: %s", why)
        self.why = why

    def _leave(self) -> None:
        try:
            if self._plane:
                self._client.deadline_s = END_S / 2
                self._client.ask("DELETE", f"/v1/planes/{self._plane}")
        except (ControlError, FileNotFoundError):
            pass
        finally:
            self._client.close()


def _added(before: list[Flow], now: list[Flow]) -> list[Flow]:
    """Two reports as one."""
    if not before:
        return now
    flows = {(flow.job, flow.file_system): flow for flow in now}
    for flow in before:
        key = flow.job, flow.file_system
        new = flows.get(key)
        if new is None:
            nothing = (0.0, 0.0, 0.0)
            flows[key] = Flow(*key, flow.used, nothing, flow.held_s)
        else:
            (a, b, c), (x, y, z) = flow.used, new.used
            (d, e, f), (u, v, w) = flow.held_s, new.held_s
            flows[key] = Flow(*key, (a + x, b + y, c + z), new.waiting, (d + u, e + v, f + w))
    return list(flows.values())[:FLOWS_MAX]
