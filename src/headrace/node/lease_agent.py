"""Lease agent: a plane's side of the controller: registers, reports, and hands leases to whoever keeps to them.

One thread that does nothing else, so that a controller that is slow, gone or hostile costs the data
nothing. A lease of an older controller is void; one of another database counts only when no
lease runs. If the controller is gone it is asked again, less and less often, for ever.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.base.peers import user_name
from headrace.control.client import Client, Refusal
from headrace.control.messages import (
    API,
    FLOWS_MAX,
    Flow,
    Lease,
    PlaneState,
    Register,
    Report,
    decode,
    encode,
)
from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.control.client import Endpoint
    from headrace.node.limits import RateLimits

_log = logging.getLogger("headrace.control")

RETRY_S = 0.25
RETRY_MAX_S = 2.0
REFUSED_S = 5.0
HASTE_S = 0.05
"""However much there is to tell, reports are so far apart."""
END_S = 1.0


class LeaseAgent:
    """Speaks for one plane, from `start` to `close`.

    Args:
        endpoint: the controller.
        limits: keeps to its leases.
        state: figures for those who watch; called in the agent's thread.
        leased: called with each lease that counts, in the agent's thread.
        clock: a monotonic one, the same as that of `limits`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: RateLimits,
        state: Callable[[], PlaneState] = PlaneState,
        leased: Callable[[Lease], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._state = state
        self._leased = leased
        self._clock = clock
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
