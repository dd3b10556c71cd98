"""Attaching: finds the daemon and opens the data set there, in a thread that costs batches nothing.

Without a daemon it looks again, less and less often; when one is found and has the data, the link waits
to be taken. A daemon that will never do (another version, another user, other data) is asked once a
minute: somebody may start another one.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING

from headrace.errors import NodeError
from headrace.node.link import Link, LinkLost
from headrace.node.wire import Direct, Hurry, Open, Opened, Status
from headrace.store.opening import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.runtime import RuntimeFolder
    from headrace.store import Store
    from headrace.store.opening import StoreAddress

_log = logging.getLogger("headrace")

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
HOPELESS_S = 60.0
OPEN_S = 600.0
"""Listing a folder of millions of files takes minutes."""


class Attaching:
    """Attaches a data set to the daemon whenever it is not, until closed; `why` says why it is not now."""

    def __init__(
        self, store: Store, part_names: Sequence[str], folder: RuntimeFolder, job: str
    ) -> None:
        self.attachments = 0
        self.why = ""
        self.folder = folder
        self.job = job
        self._part_names = list(part_names)
        address = address_of(store)
        self._address: StoreAddress | None = None if isinstance(address, str) else address
        self._ready: Link | None = None
        self._lock = threading.Lock()
        self._tried = threading.Event()  # something is known: attached, or not for now
        self.ended = threading.Event()
        self._thread: threading.Thread | None = None
        if isinstance(address, str):
            self.why = address
            self._tried.set()
            _log.warning("the node daemon cannot serve %s: %s.", store.path, address)
        else:
            self.again()

    def take(self, wait_s: float = 0.0) -> Link | None:
        """A link on which the data set is open, once; waits so long for a daemon that is being asked."""
        if wait_s:
            self._tried.wait(wait_s)
        if self._ready is None:
            return None
        with self._lock:
            ready, self._ready = self._ready, None
        return ready

    def again(self) -> None:
        """Begin to look for a daemon."""
        with self._lock:
            if self.ended.is_set() or self._address is None:
                return
            if self._thread is not None and self._thread.is_alive():
                return
            self._tried.clear()
            self._thread = threading.Thread(
                target=_attach, args=(weakref.ref(self),), name="headrace-attach", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self.ended.set()
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()

    def __del__(self) -> None:
        self.ended.set()

    # -- in the thread ----------------------------------------------------------------------------

    def attempt(self) -> float | None:
        """Try once; returns the seconds until the next attempt, 0.0 for the usual; None: it is done."""
        assert self._address is not None
        link, why, pause_s = None, "", 0.0
        try:
            link = Link(self.folder, self.job)
            opened = self._open(link, self._address)
            if opened.status is not Status.OK:
                why, pause_s = opened.message, HOPELESS_S
        except FileNotFoundError:
            why = "no node daemon runs"
        except (LinkLost, OSError) as e:
            why = str(e)
        except NodeError as e:
            why, pause_s = e.message, HOPELESS_S
        if why or link is None:
            if link is not None:
                link.close(why)
            if pause_s and why != self.why:
                _log.warning("the node daemon does not serve this loader: %s", why)
            self.why = why
            self._tried.set()
            return pause_s
        with self._lock:
            if not self.ended.is_set():
                link.dataset = opened.dataset
                self._ready = link
                self.attachments += 1
        if self.ended.is_set():
            link.close()
        self.why = ""
        self._tried.set()
        return None

    def _open(self, link: Link, address: StoreAddress) -> Opened:
        source, ticket = address.direct, link.new_ticket()
        direct = None
        if source is not None:
            direct = Direct(
                None if source.extensions is None else list(source.extensions),
                source.prefix_names,
                None if source.column is None else list(source.column),
                source.label,
            )
        link.send(
            Open(
                ticket, os.fsencode(address.path), address.segments, address.fingerprint,
                self._part_names, direct,
            )
        )  # fmt: skip
        opened: Opened = link.wait(Opened, OPEN_S, ping=Hurry(ticket))
        return opened


def _attach(ref: weakref.ref[Attaching]) -> None:
    """Look for a daemon until there is one. Keeps nothing alive while it waits."""
    pause_s = RETRY_FIRST_S
    while True:
        attaching = ref()
        if attaching is None or attaching.ended.is_set():
            return
        ended = attaching.ended
        wanted_s = attaching.attempt()
        del attaching
        if wanted_s is None or ended.wait(wanted_s or pause_s):
            return
        pause_s = min(RETRY_MAX_S, 2 * pause_s)
