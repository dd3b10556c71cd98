"""Watching: finds calls that take longer than they may, and times how clients find a new daemon."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

from headrace.node.link import ALIVE_S
from headrace.node.reads import FIRST_S
from soak.page import CALLS

if TYPE_CHECKING:
    from soak.actors import Actor

CALL_S = FIRST_S + 2 * ALIVE_S + 1.0
"""The longest that a public call may take: a daemon that is there is given 5 s to open the data set, one
that falls silent 2 s, and 2 s to take what is sent."""

SERVED_S = 2.0
"""A daemon is mostly left alone for so long, so that clients have found it."""

_EVERY_S = 0.05


class Watch:
    """Looks at all clients' pages in a thread.

    Args:
        clients: whose pages.
        call_s: the longest call.

    Attributes:
        hangs: what took too long.
    """

    def __init__(self, clients: list[Actor], call_s: float = CALL_S) -> None:
        self.call_s = call_s
        self.hangs: list[str] = []
        self.recoveries_s: list[float] = []
        self._clients = clients
        self._reported: dict[str, int] = {}
        self._stopped: dict[str, float] = {}
        self._lock = threading.Lock()
        self._back_s: float | None = None
        self._waiting: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)
        self._thread.start()

    def stopped(self, client: Actor) -> None:
        """From now on it cannot run."""
        with self._lock:
            self._stopped[client.name] = time.monotonic()

    def going_on(self, client: Actor) -> None:
        """It is about to run again."""
        with self._lock:
            began = self._stopped.pop(client.name, None)
            if began is not None and client.page is not None:
                client.page.stopped_ns += int((time.monotonic() - began) * 1e9)

    def daemon_starts(self, daemon: Actor) -> None:
        """Time how long it takes, from when it serves, until clients read over it."""
        threading.Thread(target=self._until_it_serves, args=(daemon,), daemon=True).start()

    def _until_it_serves(self, daemon: Actor) -> None:
        process = daemon.process
        while daemon.process is process and daemon.alive and not self._ended.is_set():
            if daemon.ready():
                self._daemon_is_back()
                return
            time.sleep(0.02)

    def _daemon_is_back(self) -> None:
        with self._lock:
            self._back_s = time.monotonic()
            self._waiting = {
                c.name: c.page.node_batches
                for c in self._clients
                if c.page is not None
                and c.role not in ("torch", "launcher")
                and not c.page.attached
                and c.alive
            }

    def served_long(self) -> bool:
        """Whether the daemon that there is has served for a while."""
        with self._lock:
            return self._back_s is not None and time.monotonic() - self._back_s > SERVED_S

    def daemon_goes(self) -> None:
        """Nobody can find it any more."""
        with self._lock:
            self._waiting.clear()
            self._back_s = None

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            now_ns = time.monotonic_ns()
            with self._lock:
                for client in self._clients:
                    self._look(client, now_ns)

    def _look(self, client: Actor, now_ns: int) -> None:
        page = client.page
        if page is None or client.process is None:
            return
        before = self._waiting.get(client.name)
        if before is not None and page.node_batches > before:
            del self._waiting[client.name]
            assert self._back_s is not None  # else nobody waits
            self.recoveries_s.append(now_ns / 1e9 - self._back_s)
        began = page.call_began_ns
        if not began or client.name in self._stopped or self._reported.get(client.name) == began:
            return
        took_s = (now_ns - began - (page.stopped_ns - page.call_stopped_ns)) / 1e9
        if took_s > self.call_s:
            self._reported[client.name] = began
            call = CALLS[page.call]
            client.process.send_signal(signal.SIGUSR1)  # its threads' stacks go to its log
            time.sleep(0.2)
            self.hangs.append(f"{client.name}: {call} for {took_s:.1f} s: {client.tail()}")
