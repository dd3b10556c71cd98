"""FileService: the daemon's service for unmodified programs.

A launcher asks for roots and gets a board and a ring, at once where the roots are known, later where they
must be scanned first: a program never waits for a scan. What was found and copied is kept for the next
run. All methods are for the daemon's loop; scans and boards are made in threads.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.io import simulation_of
from headrace.node.files.copies import DescriptorBudget
from headrace.node.files.disk_copies import DiskCopies, DiskFolder
from headrace.node.files.order import given_order, read_order_file
from headrace.node.files.root_files import RootFiles
from headrace.node.files.run import ProgramRun
from headrace.node.wire import FilesReady, ReplyStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from headrace.node.daemon import NodeOptions
    from headrace.node.files.tree import FileTree, TreeScan
    from headrace.node.session import Session
    from headrace.node.wire import Files

_log = logging.getLogger("headrace.node")

PATIENCE_S = 0.5
"""A scan that takes longer is said to be under way, and the program begins without it."""

ROOTS_MAX = 256
"""Roots that are kept; one more lets go of the one that was not used for the longest."""

ENDED_KEPT = 16  # runs that have ended and are still reported


@dataclass(slots=True, eq=False)
class _Served:
    session: Session
    request: Files
    job: str
    roots: list[RootFiles] = field(default_factory=list)
    spellings: list[tuple[bytes, bytes]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    run: ProgramRun | None = None
    ended: bool = False
    scans: list[TreeScan] = field(default_factory=list)


class FileService:
    """Serves unmodified programs; `sharers` are the roots that memory is shared out to by `share`."""

    def __init__(
        self,
        options: NodeOptions,
        call_soon: Callable[[Callable[[], None]], None],
        share: Callable[[], None],
    ) -> None:
        self._options = options
        self._call_soon = call_soon
        self._share = share
        self._descriptors_limit: int | None = None
        self._descriptors: DescriptorBudget | None = None
        self._folder: DiskFolder | None = None
        self._folder_error = ""
        self._roots: dict[tuple[bytes, str | None], RootFiles] = {}
        self.sharers = self._roots.values()
        self._served: dict[Session, _Served] = {}
        # Of a job on some roots: the files that the order numbers, and the order of the last run.
        self._orders: dict[
            tuple[str, tuple[bytes, ...]], tuple[tuple[FileTree, ...], NDArray[Any]]
        ] = {}
        self._ended: list[dict[str, Any]] = []
        self._closed = False

    # -- what sessions ask ------------------------------------------------------------------------

    def serve(self, session: Session, request: Files) -> None:
        """Serve a program; answers by `session.say`, now and later."""
        assert session.job is not None
        served = self._served[session] = _Served(session, request, session.job.name)
        try:
            self._open_roots(served)
        except ValueError as e:  # no such storage to simulate
            session.say(FilesReady(request.ticket, ReplyStatus.BAD_REQUEST, str(e)))
            return
        if not served.roots:
            text = "; ".join(served.notes) or "no root"
            session.say(FilesReady(request.ticket, ReplyStatus.NOT_FOUND, text))
            return
        self._share()
        threading.Thread(
            target=self._run, args=(served,), name="headrace-node-scan", daemon=True
        ).start()

    def end(self, session: Session) -> None:
        """A session's program has ended."""
        served = self._served.pop(session, None)
        if served is None:
            return
        served.ended = True
        for scan in served.scans:
            scan.stop()
        if (run := served.run) is not None:
            run.close()
            if (order := run.order_to_keep()) is not None:
                self._orders[self._key(served)] = run.trees, order
                while len(self._orders) > ROOTS_MAX:
                    self._orders.pop(next(iter(self._orders)))
            self._ended = [*self._ended, self._describe(served)][-ENDED_KEPT:]
        for root in served.roots:
            root.leave(served.job)
        self._share()

    def report(self, session: Session) -> dict[str, Any]:
        """The figures of a session's program."""
        served = self._served.get(session)
        return {} if served is None or served.run is None else self._describe(served)

    def describe(self) -> dict[str, Any]:
        """The state of all, for the daemon's report."""
        return {
            "roots": [root.describe() for root in self._roots.values()],
            "runs": [self._describe(one) for one in self._served.values() if one.run is not None],
            "ended": list(self._ended),
            "descriptors": self._descriptors.taken if self._descriptors else 0,
            "descriptors_max": self._descriptors.limit if self._descriptors else 0,
            "disk_error": self._folder_error,
        }

    def close(self) -> None:
        """End all."""
        self._closed = True
        for session in tuple(self._served):
            self.end(session)
        for root in self._roots.values():
            root.close()
        self._roots.clear()
        if self._folder is not None:
            self._folder.close()

    # -- roots ------------------------------------------------------------------------------------

    def _open_roots(self, served: _Served) -> None:
        request = served.request
        own = self._options.reader.simulate
        simulate = request.simulate or (own if isinstance(own, str) else None)
        model = simulation_of(simulate) if simulate else None
        resolved: dict[bytes, bytes] = {}
        for given in request.roots:
            path = os.path.realpath(given)
            if not os.path.isabs(given) or not os.path.exists(path):
                served.notes.append(f"{os.fsdecode(given)}: no such folder")
                continue
            resolved[os.path.normpath(given)] = path
        tops = {
            path
            for path in resolved.values()
            if not any(path.startswith(other.rstrip(b"/") + b"/") for other in resolved.values())
        }
        for path in sorted(tops):
            root = self._roots.get((path, simulate))
            if root is None:
                self._make_room()
                if self._descriptors is None:
                    self._descriptors = DescriptorBudget(self._descriptors_limit)
                root = RootFiles(
                    path, descriptors=self._descriptors, disk=self._disk(path, served),
                    model=model.model() if model is not None else None,
                )  # fmt: skip
                self._roots[path, simulate] = root
            root.enter(served.job)
            served.roots.append(root)
        served.spellings = sorted(
            {*resolved.items(), *((path, path) for path in resolved.values())}
        )

    def _disk(self, path: bytes, served: _Served) -> DiskCopies | None:
        tiers = self._options.tiers
        if tiers.cache_dir is None:
            return None
        try:
            if self._folder is None:
                self._folder = DiskFolder(os.fspath(tiers.cache_dir), tiers.cache_bytes)
            return DiskCopies(self._folder, path)
        except (OSError, HeadraceError) as e:
            self._folder_error = f"{tiers.cache_dir}: {e}"
            served.notes.append(f"no copies on disk: {self._folder_error}")
            _log.warning("no copies of files on disk: %s", self._folder_error)
            return None

    def _make_room(self) -> None:
        while len(self._roots) >= ROOTS_MAX:
            idle = [(root.used_s, key) for key, root in self._roots.items() if not root.users]
            if not idle:
                return
            self._roots.pop(min(idle)[1]).close()

    # -- scans and boards -------------------------------------------------------------------------

    def _run(self, served: _Served) -> None:
        """In a thread: look at all roots, and give the program a board if there is news.

        Where all roots are known, it gets a board of what they were at once. Boards of millions of files take
        their time, as scans do.
        """

        def wait() -> None:
            """The scan takes its time: the program begins without a board."""
            if served.run is None:
                served.session.say(FilesReady(served.request.ticket, ReplyStatus.OK, "scanning"))

        patience = threading.Timer(PATIENCE_S, lambda: self._call_soon(wait))
        patience.daemon = True
        patience.start()
        try:
            news = any(root.tree is None for root in served.roots)
            if not news:
                self._board(served, complete=False)
            for root in served.roots:
                scan = root.scan()
                served.scans.append(scan)
                if served.ended or self._closed:
                    return
                tree = scan.run()
                if served.ended or self._closed:  # it was stopped, and has not seen everything
                    return
                if root.tree is None or not root.tree.same_as(tree):
                    root.tree = tree
                    news = True
            patience.cancel()
            self._call_soon(self._share)
            if news:
                self._board(served, complete=True)
        except Exception as e:  # noqa: BLE001 - whatever it is, the program goes on without us
            _log.exception("no board can be made")
            failed = FilesReady(
                served.request.ticket, ReplyStatus.FAILED, f"{type(e).__name__}: {e}"
            )
            self._call_soon(lambda: served.session.say(failed))
        finally:
            patience.cancel()

    def _board(self, served: _Served, *, complete: bool) -> None:
        """In a thread: makes a run with its board."""
        run = ProgramRun(
            served.roots, served.spellings, job=served.job, immutable=served.request.immutable
        )
        epochs: Sequence[NDArray[Any]] = ()
        notes = list(served.notes)
        if served.request.order is not None:
            try:
                order = read_order_file(
                    served.request.order, served.spellings, run.find, len(run.paths)
                )
            except OSError as e:
                notes.append(f"the order cannot be read: {e}")
            else:
                epochs = order.epochs
                if order.unknown:
                    first = os.fsdecode(order.first_unknown)
                    notes.append(f"{order.unknown} lines of the order name no file: {first}")
        given = given_order(len(run.paths), epochs, served.request.seed)
        kept = self._orders.get(self._key(served))
        run.begin(given, kept[1] if kept is not None and kept[0] == run.trees else None)
        self._call_soon(lambda: self._begin(served, run, "; ".join(notes), complete=complete))

    def _begin(self, served: _Served, run: ProgramRun, note: str, *, complete: bool) -> None:
        """Give the program its board, in the place of the one before."""
        if served.ended or self._closed:
            run.close()
            return
        before, served.run = served.run, run
        ready = FilesReady(
            served.request.ticket, ReplyStatus.OK, note, len(run.paths), run.nbytes, complete,
            run.board.inode, run.board.fd, run.ring.inode, run.ring.fd,
        )  # fmt: skip
        served.session.say(ready, (run.board.fd, run.ring.fd), run)
        _log.info("serves %d files to process %d", len(run.paths), served.session.pid)
        if before is not None:
            run.figures.add(before.figures)
            before.close()

    def _key(self, served: _Served) -> tuple[str, tuple[bytes, ...]]:
        return served.job, tuple(root.path for root in served.roots)

    def _describe(self, served: _Served) -> dict[str, Any]:
        assert served.run is not None
        return {
            "session": served.session.number,
            "pid": served.session.pid,
            "notes": served.notes,
            **served.run.describe(),
            "of_roots": [root.describe() for root in served.roots],
        }
