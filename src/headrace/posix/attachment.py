"""Attachment: keeps a run's page attached to a node daemon, while there is one.

The page says to the programs of one run where board and ring are. There is always a board: without a daemon
it is an empty one, on which nothing is placed, but opens below the roots are counted all the same, and cost
what a simulated storage says.

A thread asks the daemon for the roots, names each board that it sends on the page, says on the page when
the daemon is gone, and looks for the next one. Where no daemon runs for this user, one is started for
the run alone: it ends with the launcher, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import _native
from headrace.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.io import Simulation
    from headrace.node.link import Link
    from headrace.posix.launch import ProgramOptions
    from headrace.runtime import RuntimeFolder

RUN_VARIABLE = "HEADRACE_RUN"  # where programs look for the page
_QUANTILES = 1024


def spellings(roots: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """How programs may write each root, and what it is without links."""
    by_spelling: dict[bytes, bytes] = {}
    for root in roots:
        real = os.path.realpath(root)
        for spelled in (real, os.path.normpath(os.path.abspath(root))):
            by_spelling.setdefault(os.fsencode(spelled), os.fsencode(real))
    return list(by_spelling.items())


class Page:
    """The page of one run, and the boards and rings that it has named.

    Roots are absolute paths; `simulation` is what opens of originals cost.
    """

    def __init__(self, roots: Sequence[str], simulation: Simulation | None = None) -> None:
        self._lock = threading.RLock()
        slow = (
            None
            if simulation is None
            else _native.SlowMemory(
                open_ns=_quantiles(simulation.open_s, simulation.open_p99_s),
                read_ns=_quantiles(simulation.latency_s, simulation.latency_p99_s),
                servers=simulation.parallelism,
                link_bytes_per_s=int(simulation.bandwidth_bytes_per_s),
                stream_bytes_per_s=int(simulation.stream_bytes_per_s),
                seed=simulation.seed,
            )
        )
        self._native = _native.RunPage(slow)
        nothing = np.zeros((0, 4), np.int64), np.zeros((0, 9), np.int64)
        self._empty = _native.FileBoard([], *nothing, roots=spellings(roots))
        self._own_ring = _native.OpenRing(1 << 10)
        self._board_fd = -1
        self._rings: list[int] = []
        self._follower: _native.OpenFollower | None = None
        self._order: list[bytes] | None = None
        self._name_empty()

    @property
    def address(self) -> str:
        """The value of HEADRACE_RUN."""
        return f"/proc/{os.getpid()}/fd/{self._native.fd}:{self._native.inode}"

    def record(self) -> None:
        """Keep the order of opens from now on: see `order`."""
        with self._lock:
            self._order = []

    def publish(self, process: int, board: tuple[int, int], ring: tuple[int, int]) -> None:
        """Name another board and ring: descriptors, which become the page's, and inodes.

        `process` is whose descriptors the copies are.
        """
        with self._lock:
            self.follow()
            before, self._board_fd = self._board_fd, board[0]
            self._rings.append(ring[0])
            self._native.publish(process, *board, *ring)
            if self._order is not None:
                self._follower = _native.OpenFollower(board[0], ring[0])
            if before >= 0:
                os.close(before)

    def clear(self) -> None:
        """There is no daemon: originals are opened."""
        with self._lock:
            if self._board_fd < 0:  # already: of the boards before, programs keep a few
                return
            self.follow()
            self._follower = None
            self._name_empty()
            os.close(self._board_fd)
            self._board_fd = -1

    def _name_empty(self) -> None:
        ring = self._own_ring
        self._native.publish(os.getpid(), self._empty.fd, self._empty.inode, ring.fd, ring.inode)

    def counts(self) -> Mapping[str, int]:
        """What programs opened, by kind; bytes are those of whole files."""
        with self._lock:
            total = Counter(self._own_ring.counts)
            for ring in self._rings:
                total.update(_native.open_counts(ring))
            return dict(total)

    def opened(self, boards: int) -> int:
        """How often files of the last so many boards were opened."""
        with self._lock:
            last = [_native.open_counts(ring) for ring in self._rings[len(self._rings) - boards :]]
        return sum(counts["copy"] + counts["original"] for counts in last)

    def follow(self) -> None:
        """Take opens into the recorded order; to be called often enough."""
        with self._lock:
            if self._order is not None and self._follower is not None:
                self._order.extend(self._follower.take())

    @property
    def order(self) -> list[bytes]:
        """Paths in the order in which they were opened, since `record`."""
        self.follow()
        return self._order or []

    def close(self) -> None:
        """Let go of the rings and the board."""
        with self._lock:
            for fd in (*self._rings, self._board_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._rings.clear()
            self._board_fd = -1


def _quantiles(median_s: float, p99_s: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A lognormal latency as a table, so that the shim needs no mathematics: nanoseconds."""
    from statistics import NormalDist

    normal = NormalDist()
    sigma = np.log(p99_s / median_s) / normal.inv_cdf(0.99) if p99_s > median_s > 0 else 0.0
    z = np.array([normal.inv_cdf((k + 0.5) / _QUANTILES) for k in range(_QUANTILES)])
    return np.asarray(median_s * np.exp(sigma * z) * 1e9, np.int64)


_log = logging.getLogger("headrace.posix")

RETRY_S = 0.5  # between looks for a daemon: it costs a look at a socket
FOLLOW_S = 0.05
"""Between looks at what was opened, where the order is recorded: the ring holds more than a fast
program opens meanwhile."""

REPORT_S = 5.0
CAUGHT_UP_S = 1.0
"""How long the daemon's figures are asked for again, until all opens that programs counted are in them."""

END_S = 10.0

_PR_SET_PDEATHSIG = 1


class Attachment:
    """A page, and the daemon that fills it: `options` say what to ask it for."""

    def __init__(self, page: Page, options: ProgramOptions) -> None:
        self._page = page
        self._options = options
        self._over = threading.Event()
        self._answered = threading.Event()
        self._private: _PrivateDaemon | None = None
        self._folder: RuntimeFolder | None = None
        self._report: dict[str, Any] = {}
        self._boards = 0  # that the daemon of now has given
        self._scanning = False  # there will be a board, when the roots have been looked at
        self.private = False  # whether the daemon was started for this run
        self.notes: list[str] = []
        self._thread = threading.Thread(target=self._run, name="headrace-run", daemon=True)

    def start(self) -> None:
        """Begin, and wait a little so that the program finds the board from its first open on.

        It does not need the board: it comes when it comes.
        """
        from headrace.node.link import LinkLost, connect
        from headrace.runtime import runtime_folder

        try:
            self._folder = runtime_folder()
            try:
                self._folder.check()
                connect(str(self._folder.socket)).close()
            except (FileNotFoundError, LinkLost):
                self._private = _PrivateDaemon()
                self._folder, self.private = self._private.folder, True
        except (ImportError, OSError, NodeError) as e:
            self._note(f"no node daemon: {e}")
            return
        self._thread.start()
        self._answered.wait(self._options.wait_s)

    def end(self) -> dict[str, Any]:
        """Let go of the daemon and return its figures of the run; {} where it has none."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(END_S)
        if self._private is not None:
            self._private.end()
        if self._scanning:
            self._note("it ended before all files below the roots had been found")
        return self._report

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        from headrace.node.link import LinkLost

        while not self._over.is_set():
            link = None
            try:
                link = self._connect()
                while not self._over.is_set():
                    link.receive(FOLLOW_S)
                    self._page.follow()
                self._ask_for_report(link)
            except (OSError, LinkLost) as e:
                if not isinstance(e, FileNotFoundError):
                    self._note(f"the node daemon was lost: {e}")
            except NodeError as e:
                self._note(e.message)
                self._over.wait(END_S)
            except Exception as e:  # noqa: BLE001 - the program must not notice
                _log.exception("the page is given up")
                self._note(f"headrace failed: {type(e).__name__}: {e}")
                break
            finally:
                if link is not None:
                    link.close()
                self._page.clear()
                self._answered.set()
            self._over.wait(RETRY_S)

    def _ask_for_report(self, link: Link) -> None:
        """Ask for the figures of the run. The daemon counts an open a moment after the program has made it."""
        from headrace.node.wire import FilesAsked

        asked_s = time.monotonic()
        while True:
            before = self._report
            link.send(FilesAsked(link.new_ticket()))
            while self._report is before:
                late = time.monotonic() > asked_s + REPORT_S
                link.receive(0.1)
                if late and self._report is before:
                    return
            counted = sum(self._report.get("opens", {}).values())
            counted += self._report.get("reports_lost", 0)
            late = time.monotonic() > asked_s + CAUGHT_UP_S
            if late or counted >= self._page.opened(self._boards):
                return
            time.sleep(0.01)

    def _connect(self) -> Link:
        from headrace.base.job import job_name
        from headrace.node.link import Link
        from headrace.node.wire import Files

        folder = self._folder
        assert folder is not None
        deadline = time.monotonic() + END_S
        while True:
            try:
                link = Link(folder, job_name())
                break
            except FileNotFoundError:
                # A private one comes up; another may be started again by its owner.
                starting = self._private is not None and self._private.starting
                if not starting or self._over.is_set() or time.monotonic() > deadline:
                    raise
                self._over.wait(0.02)
        self._boards = 0
        link.on_reply = lambda message: self._take(link, message)
        options = self._options
        link.send(
            Files(
                link.new_ticket(),
                [os.fsencode(root) for root in options.roots],
                None if options.order is None else os.fsencode(os.path.abspath(options.order)),
                options.seed,
                options.immutable,
                options.simulate,
            )
        )
        return link

    def _take(self, link: Link, message: Any) -> None:
        from headrace.node.wire import DaemonReport, FilesReady

        if isinstance(message, DaemonReport):
            self._report = json.loads(message.json)
        if not isinstance(message, FilesReady):
            return
        self._scanning = not (message.board_ino or message.status)
        if message.message and not self._scanning:
            self._note(message.message)
        if message.board_ino:
            self._boards += 1
            board, ring = link.take_fds(2)
            self._page.publish(link.peer_pid, (board, message.board_ino), (ring, message.ring_ino))
        if message.board_ino or message.status or message.complete:
            self._answered.set()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _PrivateDaemon:
    """A daemon of one run: a fork of the launcher, so that it need not start Python anew.

    It ends with the launcher, however that ends; its folder goes with it.
    """

    def __init__(self) -> None:
        from headrace.runtime import RuntimeFolder

        self._path = tempfile.mkdtemp(prefix="headrace-run-")
        self.folder = RuntimeFolder(Path(self._path))
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        self._ended = False
        if self._pid == 0:
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                os.setsid()  # keys that are pressed are for the program
                nothing = os.open(os.devnull, os.O_RDWR)
                for fd in range(3):
                    os.dup2(nothing, fd)
                if os.getppid() == launcher:
                    from headrace.node.daemon import NodeOptions, run

                    run(self.folder, NodeOptions())
            finally:
                os._exit(0)

    @property
    def starting(self) -> bool:
        """Whether it lives."""
        if not self._ended:
            self._ended = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return not self._ended

    def end(self) -> None:
        """End it; nothing is left."""
        deadline = time.monotonic() + END_S
        number = signal.SIGTERM
        while self.starting:
            os.kill(self._pid, number)
            time.sleep(0.01)
            if time.monotonic() > deadline:
                number = signal.SIGKILL
        shutil.rmtree(self._path, ignore_errors=True)
