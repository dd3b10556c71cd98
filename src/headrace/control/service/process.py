"""The controller as a process: started in the foreground or the background, asked, ended.

What ends it: `stop`, SIGTERM, SIGINT, or another controller that took its database over. It
outlives its planes, and they outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.control.client import Client, Endpoint
from headrace.control.metrics import JobLabels, address_of, serve_metrics
from headrace.control.service.app import ControlService
from headrace.control.service.auth import TokenFile
from headrace.control.service.database import Database
from headrace.control.service.http import HttpListener, HttpServer, listen_tcp
from headrace.control.service.metrics import figures_of
from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.runtime import RuntimeFolder

_log = logging.getLogger("headrace.control")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """How a controller is reached, and where it keeps what it must not forget.

    Attributes:
        listen: beside its own socket: `unix:PATH`, `tcp:HOST:PORT`.
        token_file: tokens that are good over TCP.
        tls_cert, tls_key: its certificate.
        tls_ca: those who may connect show a certificate of this authority.
        metrics: where Prometheus may ask: `[HOST:]PORT`; None: nowhere.
        database: the SQLite file.

    Raises:
        ValueError: TCP without anything that says who asks, or half of what TLS takes.
    """

    database: Path
    listen: tuple[str, ...] = ()
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    metrics: str | None = None

    def __post_init__(self) -> None:
        if self.metrics is not None:
            address_of(self.metrics)
        for where in self.listen:
            kind, _, rest = where.partition(":")
            host, _, port = rest.rpartition(":")
            good = kind == "unix" and rest.startswith("/")
            if not good and not (kind == "tcp" and host and port.isdigit() and int(port) < 1 << 16):
                raise ValueError(f"listen is {where!r}, expected unix:/PATH or tcp:HOST:PORT")
            if kind == "tcp" and self.token_file is None and self.tls_ca is None:
                raise ValueError(
                    f"listen is {where!r}: over TCP anybody could ask; give --token-file, or "
                    "--tls-cert, --tls-key and --tls-ca for mutual TLS"
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key")


def default_database() -> Path:
    """Where the database is if nobody says: below the user's XDG state folder."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(state) / "headrace" / "control.db"


def run(folder: RuntimeFolder, options: ControlOptions) -> None:
    """Be the controller, until it is stopped.

    Raises:
        ControlError: another one rules, or something it needs cannot be used.
    """
    tokens = None
    if options.token_file is not None:
        tokens = TokenFile(options.token_file, ("operator", "plane"))
    claim = folder.claim()
    database = None
    try:
        options.database.parent.mkdir(parents=True, exist_ok=True)
        database = Database(options.database)
        with contextlib.ExitStack() as stack:
            listeners = [HttpListener(_listen_unix(folder.socket, 0o600))]
            tls = _tls(options)
            listeners += [stack.enter_context(_listen(where, tls)) for where in options.listen]
            _log.info(
                "process %d rules with epoch %d of %s", os.getpid(), database.epoch, database.path
            )
            asyncio.run(_serve(database, tokens, options, listeners))
        _log.info("ends")
    finally:
        if database is not None:
            database.close()
        claim.release()


async def _serve(
    database: Database,
    tokens: TokenFile | None,
    options: ControlOptions,
    listeners: Sequence[HttpListener],
) -> None:
    def end() -> None:
        server.should_exit = True

    controller = ControlService(
        database, tokens=tokens, certificates=options.tls_ca is not None, fenced=end
    )
    server = HttpServer(controller.app, listeners)
    loop = asyncio.get_running_loop()
    metrics = None
    if options.metrics is not None:
        labels = JobLabels()
        metrics = serve_metrics(
            options.metrics,
            loop.call_soon_threadsafe,
            controller.describe,
            lambda state: figures_of(state, labels),
        )
        controller.metrics = str(metrics.address)
        _log.info("serves metrics at http://%s/metrics", metrics.address)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    keeping = asyncio.create_task(controller.keep())
    try:
        await server.serve()
    finally:
        if metrics is not None:
            metrics.close()
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        with contextlib.suppress(ControlError):
            database.save_leases(controller.arbiter.outstanding(time.monotonic()))


@contextlib.contextmanager
def _listen(where: str, tls: ssl.SSLContext | None) -> Iterator[HttpListener]:
    kind, _, rest = where.partition(":")
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        host = host.strip("[]")
        sock = listen_tcp(host, int(port), where)
        if tls is None and host not in ("localhost", "127.0.0.1", "::1"):
            _log.warning("%s: tokens go over the network as they are; give --tls-cert", where)
        _log.info("listens on tcp:%s:%d", host, sock.getsockname()[1])
        yield HttpListener(sock, tls)
        return
    path = Path(rest)
    _remove_stale(path)
    sock = _listen_unix(path, 0o666)  # the kernel says who connects
    created = path.lstat()
    try:
        yield HttpListener(sock)
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(created, path.lstat()):
                path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a controller that was killed; nothing else."""
    try:
        if not path.is_socket():
            if path.exists():
                raise ControlError(f"{path}: cannot listen: it is no socket.", path=str(path))
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    except OSError as e:
        raise ControlError(f"{path}: cannot listen: {e}.", path=str(path)) from e
    raise ControlError(f"{path}: somebody listens there already.", path=str(path))


def _listen_unix(path: Path, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        old = os.umask(0o777 & ~mode)
        try:
            sock.bind(str(path))
        finally:
            os.umask(old)
        sock.listen(512)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise ControlError(f"{path}: cannot listen: {e}.", path=str(path)) from e
    return sock


def _tls(options: ControlOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
        if options.tls_ca is not None:
            context.load_verify_locations(options.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as e:
        raise ControlError(f"{options.tls_cert}: TLS cannot be set up: {e}.") from e
    return context


# -- from outside ------------------------------------------------------------------------------------


def ask_status(folder: RuntimeFolder) -> dict[str, Any]:
    """The controller's state.

    Raises:
        FileNotFoundError: none runs.
        ControlError: it does not answer.
    """
    folder.check()
    client = Client(Endpoint(url=f"unix:{folder.socket}"))
    try:
        state: dict[str, Any] = json.loads(client.ask("GET", "/v1/state"))
        return state
    finally:
        client.close()
