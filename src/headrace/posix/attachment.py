"""Attachment: keeps a page attached to a node daemon, while there is one.

A thread asks the daemon for the roots, names each board that it sends on the page, says on the page when
the daemon is gone, and looks for the next one. Where no daemon runs for this user, one is started for
the run alone: it ends with the launcher, however that ends.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.node.link import Link
    from headrace.node.wire import FilesReady
    from headrace.posix.page import Page
    from headrace.runtime import RuntimeFolder

__all__ = ["Attachment", "Wanted"]

_log = logging.getLogger("headrace.posix")

RETRY_S = 0.5
"""Between looks for a daemon: it costs a look at a socket."""

FOLLOW_S = 0.05
"""Between looks at what was opened, where the order is recorded: the ring holds more than a fast
program opens meanwhile."""

REPORT_S = 2.0
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of the daemon."""

    roots: Sequence[str]
    order: str | None = None
    seed: int | None = None
    immutable: bool = False
    simulate: str | None = None


class Attachment:
    """A page, and the daemon that fills it.

    Args:
        page: to be filled.
        wanted: what to ask for.
    """

    def __init__(self, page: Page, wanted: Wanted) -> None:
        self._page = page
        self._wanted = wanted
        self._over = threading.Event()
        self._attached = threading.Event()
        self._answered = threading.Event()
        self._private: _PrivateDaemon | None = None
        self._folder: RuntimeFolder | None = None
        self._report: dict[str, Any] = {}
        self.notes: list[str] = []
        self.attached = 0
        self._thread = threading.Thread(target=self._run, name="headrace-run", daemon=True)

    def start(self, wait_s: float) -> None:
        """Begin, and wait a little so that the program finds the board from its first open on.

        Args:
            wait_s: how long at most. The program does not need the board: it comes when it comes.
        """
        try:
            self._folder = self._find_daemon()
        except (ImportError, OSError, NodeError) as e:
            self._note(f"no node daemon: {e}")
            return
        self._thread.start()
        self._answered.wait(wait_s)

    def _find_daemon(self) -> RuntimeFolder:
        from headrace.node.link import LinkLost, connect
        from headrace.runtime import runtime_folder

        folder = runtime_folder()
        try:
            folder.check()
            connect(str(folder.socket)).close()
        except (FileNotFoundError, LinkLost):
            self._private = _PrivateDaemon()
            return self._private.folder
        return folder

    @property
    def private(self) -> bool:
        """Whether the daemon was started for this run."""
        return self._private is not None

    def end(self) -> dict[str, Any]:
        """Let go of the daemon and return its figures of the run; {} where it has none."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(END_S)
        if self._private is not None:
            self._private.end()
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
                self._ask_report(link)
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
        link.on_reply = lambda message: self._take(link, message)
        wanted = self._wanted
        link.send(
            Files(
                link.new_ticket(),
                [os.fsencode(root) for root in wanted.roots],
                None if wanted.order is None else os.fsencode(os.path.abspath(wanted.order)),
                wanted.seed,
                wanted.immutable,
                wanted.simulate,
            )
        )
        return link

    def _take(self, link: Link, message: Any) -> None:
        from headrace.node.wire import FilesReady, Report

        if isinstance(message, Report):
            self._report = json.loads(message.json)
        elif isinstance(message, FilesReady):
            self._take_ready(link, message)

    def _take_ready(self, link: Link, ready: FilesReady) -> None:
        if ready.message:
            self._note(ready.message)
        if ready.board_ino:
            board, ring = link.take_fds(2)
            self._page.publish(link.peer_pid, (board, ready.board_ino), (ring, ready.ring_ino))
            self.attached += 1
        if ready.board_ino or ready.status or ready.complete:
            self._answered.set()

    def _ask_report(self, link: Link) -> None:
        from headrace.node.wire import FilesAsked

        link.send(FilesAsked(link.new_ticket()))
        deadline = time.monotonic() + REPORT_S
        while not self._report and time.monotonic() < deadline:
            link.receive(0.1)

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
        if self._pid == 0:
            self._be(launcher)
        self._ended = False

    def _be(self, launcher: int) -> None:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            os.setsid()  # keys that are pressed are for the program
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(nothing, fd)
            if os.getppid() == launcher:
                from headrace.node.daemon import run
                from headrace.node.options import NodeOptions

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


_PR_SET_PDEATHSIG = 1
