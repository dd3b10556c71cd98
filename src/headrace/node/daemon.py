"""The daemon as a process: started in the foreground or the background, asked for its state, ended.

What ends it: `stop`, SIGTERM, SIGINT. A second one does not start where one rules. One that does not
answer is killed only on request, and only the process that the kernel names as the listener's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import signal
from typing import TYPE_CHECKING, Any

from headrace.errors import NodeError
from headrace.latch import Latch
from headrace.node.link import Link, LinkLost
from headrace.node.server import Server
from headrace.node.wire import Report, StatusAsked, StopAsked
from headrace.runtime import launch, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.control.metrics import MetricsServer
    from headrace.node.options import NodeOptions
    from headrace.runtime import RuntimeFolder

__all__ = ["ask_status", "run", "start", "stop"]

_log = logging.getLogger("headrace.node")

STOP_S = 10.0


def run(folder: RuntimeFolder, options: NodeOptions) -> None:
    """Be the daemon, until it is stopped.

    Raises:
        HeadraceError: metrics cannot be served.
        NodeError: another one rules, or the folder is not safe.
    """
    server: Server | None = None
    ends = Latch()

    def end(*_: object) -> None:
        ends.set()
        if server is not None:
            server.stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    metrics = None
    _allow_files()
    try:
        claim = folder.claim()
        try:
            server = Server(claim, options)
            metrics = _serve_metrics(server, options.metrics)
            if claim.stale_socket:
                _log.info("took over from a daemon that was killed")
            _log.info(
                "process %d serves %s with %d MiB",
                os.getpid(),
                folder.path,
                options.ram_bytes >> 20,
            )
            if not ends.is_set():
                server.run()
            _log.info("ends")
        finally:
            for number in before:  # another signal must not cut the cleaning up short
                signal.signal(number, signal.SIG_IGN)
            if metrics is not None:
                metrics.close()
            ended = server.close() if server is not None else True
            claim.release()
            if not ended:
                # A thread that comes back from native code while the interpreter ends would abort it.
                _log.warning("ends although a read has not returned")
                logging.shutdown()
                os._exit(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_files() -> None:
    """Samples in shared memory take a descriptor for each slab: all that we may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve_metrics(server: Server, address: str | None) -> MetricsServer | None:
    if address is None:
        return None
    from headrace.node.metrics import serve_metrics

    metrics = serve_metrics(server, address)
    server.metrics = str(metrics.address)
    _log.info("serves metrics at http://%s/metrics", metrics.address)
    if not metrics.address.loopback:
        _log.warning("whoever reaches %s can read them: names of jobs too", metrics.address)
    return metrics


def start(folder: RuntimeFolder, arguments: Sequence[str]) -> dict[str, Any]:
    """Start a daemon in the background, and return its state when it serves.

    Args:
        folder: where.
        arguments: options of `headrace node start` for it.

    Raises:
        NodeError: one runs already, or it did not come up; the message has the end of its log.
    """
    running = _pid_of(folder)
    if running is not None:
        raise NodeError(
            f"{folder.path}: a node daemon runs already, process {running}.",
            path=str(folder.path),
            next_step="Use it, or stop it first: headrace node stop.",
        )

    def state() -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError, LinkLost):
            return ask_status(folder)
        return None

    return launch(folder, arguments, state, NodeError, {"HEADRACE_RUNTIME_DIR": str(folder.path)})


def ask_status(folder: RuntimeFolder) -> dict[str, Any]:
    """The daemon's state.

    Raises:
        FileNotFoundError: no daemon runs.
        LinkLost: it does not answer.
        NodeError: the folder is not safe, or the daemon is of another version.
    """
    link = Link(folder, "status")
    try:
        link.send(StatusAsked(link.new_ticket()))
        report: Report = link.wait(Report, STOP_S)
    finally:
        link.close()
    state: dict[str, Any] = json.loads(report.json)
    return state


def stop(folder: RuntimeFolder, *, force: bool = False) -> int:
    """End the daemon; returns its process id when it is gone.

    Args:
        folder: where it is.
        force: kill it if it does not end by itself.

    Raises:
        FileNotFoundError: no daemon runs.
        NodeError: it does not end in time.
    """
    pid, pidfd = _open_pid(folder)
    try:
        try:
            link = Link(folder, "stop")
            try:
                link.send(StopAsked(link.new_ticket()))
                link.wait(Report, STOP_S)
            finally:
                link.close()
        except LinkLost as e:
            if not force:
                raise _silent(folder, pid, str(e)) from e
        if wait_for_end(pidfd, STOP_S if not force else 1.0):
            return pid
        if not force:
            raise _silent(folder, pid, f"it did not end within {STOP_S:g} s")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_for_end(pidfd, STOP_S)
    finally:
        os.close(pidfd)
    with contextlib.suppress(NodeError):  # somebody has started another one already
        folder.claim().release()
    return pid


def _silent(folder: RuntimeFolder, pid: int, why: str) -> NodeError:
    return NodeError(
        f"{folder.path}: the node daemon, process {pid}, does not end: {why}.",
        path=str(folder.path),
        next_step="Kill it: headrace node stop --force.",
    )


def _pid_of(folder: RuntimeFolder) -> int | None:
    try:
        pid, pidfd = _open_pid(folder)
    except FileNotFoundError:
        return None
    os.close(pidfd)
    return pid


def _open_pid(folder: RuntimeFolder) -> tuple[int, int]:
    """The process that listens, as the kernel says, and a descriptor of it."""
    from headrace.node.line import peer_of
    from headrace.node.link import connect

    folder.check()
    try:
        sock = connect(str(folder.socket))
    except LinkLost as e:  # it is stuck, and so many wait that the kernel takes no more
        holder = folder.holder()
        if holder is None:
            raise FileNotFoundError(errno.ENOENT, "nobody listens", str(folder.socket)) from e
        return holder
    try:
        pid, _ = peer_of(sock)
        return pid, os.pidfd_open(pid)
    except ProcessLookupError as e:
        raise FileNotFoundError(e.errno, "nobody listens", str(folder.socket)) from e
    finally:
        sock.close()
