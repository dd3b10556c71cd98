"""App: what may be asked of a controller, over HTTP, and its metrics. docs/control-api.md has it as a table.

Bodies are bounded, typed and must come within seconds; every refusal is JSON with a sentence. Only
here do the arbiter, the database and the clock meet.

As a process it is `run`; what ends it: SIGTERM, SIGINT, or another controller that took its database over.
It outlives its planes, and they outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import logging
import os
import socket
import ssl
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.base.peers import address_of, listen_unix
from headrace.control.client import Client, Endpoint
from headrace.control.messages import API, BODY_BYTES_MAX, Register, Report, decode, encode
from headrace.control.policy import (
    Policy,
    PolicyError,
    changes,
    parse_document,
    parse_policy,
    policy_document,
    unknown_names,
)
from headrace.control.prometheus import Figures, JobLabels, Kind, Metric, serve_metrics
from headrace.control.service.arbiter import Arbiter
from headrace.control.service.auth import Caller, Peer, Refused, TokenFile, TokenThrottle, caller_of
from headrace.control.service.database import Database, Fenced
from headrace.control.service.http import HttpListener, HttpServer, listen_tcp, read_body, refusal
from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from headrace.runtime import RuntimeFolder


_log = logging.getLogger("headrace.control")

ANSWER_S = 10.0  # no request takes longer, whoever does not read its answer
SAVE_S = 1.0  # how often running leases are written down


class ControlService:
    """The controller, without its sockets.

    Over TCP `tokens` are good (None: a certificate alone is); with `certificates` one must be shown. `fenced`
    is called when another controller rules.
    """

    def __init__(
        self,
        database: Database,
        *,
        tokens: TokenFile | None = None,
        certificates: bool = False,
        fenced: Callable[[], None] = lambda: None,
    ) -> None:
        now = time.monotonic()
        version, document = database.policy()
        policy = parse_document(document) if version else Policy()
        self.arbiter = Arbiter(policy, database.reign, database.epoch, now)
        self.arbiter.set_policy(policy, version)
        self.arbiter.adopt(database.leases(), now)
        self.degraded = ""
        self.metrics = ""  # where Prometheus may ask
        self._database = database
        self._tokens = tokens
        self._throttle = TokenThrottle()
        self._checking = asyncio.Lock()
        self._certificates = certificates
        self._fenced = fenced
        self._began_s = now
        self.app = Starlette(
            routes=[
                Route(path, self._guarded(handle, role), methods=[method])
                for method, path, handle, role in (
                    ("POST", "/v1/planes", self._register, "plane"),
                    ("POST", "/v1/planes/{key}/report", self._report, "plane"),
                    ("DELETE", "/v1/planes/{key}", self._leave, "plane"),
                    ("GET", "/v1/policy", self._policy, "operator"),
                    ("PUT", "/v1/policy", self._apply, "operator"),
                    ("GET", "/v1/state", self._state, "operator"),
                )
            ]
        )

    async def keep(self) -> None:
        """Write down what runs, and see that nobody else rules, for ever."""
        while True:
            await asyncio.sleep(SAVE_S)
            now = time.monotonic()
            self.arbiter.decide(now)
            try:
                self._database.save_leases(self.arbiter.outstanding(now))
                self.degraded = ""
            except Fenced as e:
                _log.error("%s", e)
                self._fenced()
                return
            except ControlError as e:
                if not self.degraded:
                    _log.warning("it rules on, but cannot write: %s", e)
                self.degraded = str(e)

    # -- what may be asked ------------------------------------------------------------------------

    async def _register(self, request: Request, caller: Caller) -> Response:
        message = decode(Register, await read_body(request, BODY_BYTES_MAX))
        if message.api != API:
            raise Refused(400, f"api is {message.api}, expected {API}: use the same version")
        if caller.user is not None and message.user != caller.user:
            raise Refused(403, f"user is {message.user!r}, but this is user {caller.user!r}")
        lease = self.arbiter.register(message, time.monotonic())
        _log.info("plane of user %s on %s, process %d", message.user, message.name, message.pid)
        return Response(encode(lease), media_type="application/json")

    async def _report(self, request: Request, _: Caller) -> Response:
        message = decode(Report, await read_body(request, BODY_BYTES_MAX))
        lease = self.arbiter.report(request.path_params["key"], message, time.monotonic())
        return Response(encode(lease), media_type="application/json")

    async def _leave(self, request: Request, _: Caller) -> Response:
        self.arbiter.leave(request.path_params["key"])
        return JSONResponse({})

    async def _policy(self, _: Request, __: Caller) -> Response:
        policy = policy_document(self.arbiter.policy)
        return JSONResponse({"version": self.arbiter.policy_version, "policy": policy})

    async def _apply(self, request: Request, caller: Caller) -> Response:
        text = (await read_body(request, BODY_BYTES_MAX)).decode()
        # Off the loop, and one at a time: a large document takes its time, and planes report meanwhile.
        async with self._checking:
            policy = await asyncio.to_thread(parse_policy, text)
        differences = changes(self.arbiter.policy, policy)
        dry_run = request.query_params.get("dry_run", "") in ("1", "true")
        unknown = unknown_names(policy, self.arbiter.users(), self.arbiter.jobs())
        if differences and not dry_run:
            at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            version = self._database.save_policy(policy_document(policy), caller.name, at)
            self.arbiter.set_policy(policy, version)
            _log.info("policy %d, by %s: %d changes", version, caller.name, len(differences))
        return JSONResponse(
            {
                "version": self.arbiter.policy_version,
                "applied": bool(differences) and not dry_run,
                "changes": [asdict(change) for change in differences],
                "unknown": unknown,
            }
        )

    async def _state(self, _: Request, __: Caller) -> Response:
        return JSONResponse(self.describe())

    def describe(self) -> dict[str, Any]:
        """Everything that is known now, as plain values."""
        now = time.monotonic()
        self.arbiter.expire(now)
        return {
            "pid": os.getpid(),
            "uptime_s": now - self._began_s,
            "database": str(self._database.path),
            "degraded": self.degraded,
            "metrics": self.metrics,
            **self.arbiter.describe(now),
        }

    # -- how ---------------------------------------------------------------------------------------

    def _guarded(
        self, handle: Callable[[Request, Caller], Awaitable[Response]], role: str
    ) -> Callable[[Request], Awaitable[Response]]:
        """Let only those in who may, and answer whatever goes wrong."""

        async def answer(request: Request) -> Response:  # noqa: PLR0911 - one for each error
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await handle(request, self._caller(request, role))
            except PolicyError as e:
                return refusal(422, str(e), problems=e.problems)
            except Refused as e:
                return refusal(e.status, str(e))
            except ValueError as e:
                self.arbiter.refused += 1
                return refusal(400, f"the body is wrong: {e}")
            except Fenced as e:
                self._fenced()
                return refusal(503, str(e))
            except ControlError as e:
                return refusal(507, str(e))
            except TimeoutError:
                return refusal(408, "it took too long")
            except ClientDisconnect:
                return refusal(400, "the client hung up")

        return answer

    def _caller(self, request: Request, role: str) -> Caller:
        peer = getattr(request.state, "peer", None) or Peer()
        if self._throttle.is_shut(peer.name):
            raise Refused(429, "too many wrong tokens: wait a minute")
        given = request.headers.get("authorization")
        tokens = None if self._tokens is None else self._tokens.tokens()
        caller = caller_of(peer, given, tokens, certificates=self._certificates)
        if caller is None:
            self.arbiter.refused += 1
            if given is not None:
                self._throttle.wrong(peer.name)
            raise Refused(401, "a good token is needed: Authorization: Bearer TOKEN")
        if role == "operator" and caller.role != "operator":
            self.arbiter.refused += 1
            raise Refused(403, f"{caller.name} may report as a plane, but not do this")
        return caller


# -- the process ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """How a controller is reached, and where it keeps what it must not forget.

    Raises ValueError if nothing would say who asks over TCP, or half of what TLS takes is missing.
    """

    database: Path  # the SQLite file
    listen: tuple[str, ...] = ()  # beside its own socket: `unix:PATH`, `tcp:HOST:PORT`
    token_file: Path | None = None  # tokens that are good over TCP
    tls_cert: Path | None = None  # its certificate, and the key
    tls_key: Path | None = None
    tls_ca: Path | None = None  # those who may connect show a certificate of this authority
    metrics: str | None = None  # where Prometheus may ask: `[HOST:]PORT`; None: nowhere

    def __post_init__(self) -> None:
        if self.metrics is not None:
            address_of(self.metrics)
        for where in self.listen:
            kind, _, rest = where.partition(":")
            if kind == "tcp":
                address_of(rest, host="", what="listen of tcp")
            elif kind != "unix" or not rest.startswith("/"):
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


def run(folder: RuntimeFolder, options: ControlOptions) -> None:
    """Be the controller, until it is stopped.

    Raises ControlError if another one rules, or something it needs cannot be used.
    """
    tokens = None
    if options.token_file is not None:
        tokens = TokenFile(options.token_file, ("operator", "plane"))
    with contextlib.ExitStack() as stack:
        stack.callback(folder.claim().release)
        options.database.parent.mkdir(parents=True, exist_ok=True)
        database = Database(options.database)
        stack.callback(database.close)
        listeners = [HttpListener(_listen_unix(folder.socket, 0o600))]
        tls = _tls(options)
        listeners += [stack.enter_context(_listen(where, tls)) for where in options.listen]
        _log.info(
            "process %d rules with epoch %d of %s", os.getpid(), database.epoch, database.path
        )
        asyncio.run(_serve(database, tokens, options, listeners))
        _log.info("ends")


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
    metrics = None
    if options.metrics is not None:
        labels = JobLabels()
        metrics = serve_metrics(
            options.metrics,
            asyncio.get_running_loop().call_soon_threadsafe,
            controller.describe,
            lambda state: figures_of(state, labels),
        )
        controller.metrics = str(metrics.address)
        _log.info("serves metrics at http://%s/metrics", metrics.address)
    try:
        await server.serve_beside(controller.keep())
    finally:
        if metrics is not None:
            metrics.close()
        with contextlib.suppress(ControlError):
            database.save_leases(controller.arbiter.outstanding(time.monotonic()))


@contextlib.contextmanager
def _listen(where: str, tls: ssl.SSLContext | None) -> Iterator[HttpListener]:
    kind, _, rest = where.partition(":")
    if kind == "tcp":
        address = address_of(rest, host="")
        sock = listen_tcp(address, where)
        if tls is None and not address.loopback:
            _log.warning("%s: tokens go over the network as they are; give --tls-cert", where)
        _log.info("listens on tcp:%s:%d", address.host, sock.getsockname()[1])
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
    try:
        return listen_unix(path, 512, mode)
    except OSError as e:
        raise ControlError(f"{path}: cannot listen: {e}.", path=str(path)) from e


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


def ask_status(folder: RuntimeFolder) -> dict[str, Any]:
    """The controller's state.

    Raises FileNotFoundError if none runs, and ControlError if it does not answer.
    """
    folder.check()
    with contextlib.closing(Client(Endpoint(url=f"unix:{folder.socket}"))) as client:
        state: dict[str, Any] = json.loads(client.ask("GET", "/v1/state"))
        return state


_FLOW: Final = ("job_name", "file_system")
_SYSTEM: Final = ("file_system",)
_UNITS: Final = {
    "bytes_per_s": "bytes_per_second",
    "reads_per_s": "reads_per_second",
    "metadata_per_s": "metadata_operations_per_second",
}


def _rates(prefix: str, labels: tuple[str, ...], meanings: Mapping[str, str]) -> tuple[Metric, ...]:
    return tuple(
        Metric(f"{prefix}_{what}_{unit}", "gauge", labels, text)
        for what, text in meanings.items()
        for unit in _UNITS.values()
    )


# Metric, kind, what `ControlService.describe` calls it ('' where it is computed), what it is.
_PLAIN: Final[tuple[tuple[str, Kind, str, str], ...]] = (
    ("epoch", "gauge", "epoch", "Grows with each controller that rules."),
    ("policy_version", "gauge", "policy_version", "Version of the policy in force."),
    ("degraded", "gauge", "", "1: it rules, but cannot write its database."),
    ("planes", "gauge", "", "Planes that have a lease."),
    ("silent_planes", "gauge", "", "Of these, planes that do not report."),
    ("lease_seconds", "gauge", "lease_s", "How long a lease runs."),
    ("report_interval_seconds", "gauge", "report_s", "How often planes report."),
    ("reports_total", "counter", "reports", "Reports that were answered."),
    ("refused_total", "counter", "refused", "Requests that were refused."),
    ("expired_total", "counter", "expired", "Planes whose lease ran out."),
    ("decide_seconds", "histogram", "", "How long each decision took."),
    ("held_bytes", "gauge", "", "Memory of samples, of all planes."),
    ("clients", "gauge", "", "Clients of all planes."),
)

SILENT_REPORTS: Final = 3.0  # a plane that has missed so many reports is silent

TABLE: Final = (
    Metric("headrace_build_info", "gauge", ("version",), "Always 1; says which headrace this is."),
    *(Metric(f"headrace_control_{name}", kind, (), text) for name, kind, _, text in _PLAIN),
    *_rates("headrace_control_job", _FLOW, {
        "used": "What planes reported of the job on the file system.",
        "granted": "What they may use; nothing where there is no limit.",
    }),
    *_rates("headrace_control_file_system", _SYSTEM, {
        "used": "What planes reported of the file system.",
        "granted": "What they may use of it, all together; without a limit, what they use.",
        "capacity": "What the policy says it can do; nothing where it says nothing.",
    }),
)  # fmt: skip
"""All that the controller tells; docs/howto/metrics.md lists it too."""


def figures_of(state: Mapping[str, Any], known: JobLabels | None = None) -> Figures:
    """The figures of a controller, out of what `ControlService.describe` says."""
    known = known or JobLabels()
    figures = Figures(TABLE)
    figures.add("headrace_build_info", 1, version=__version__)
    for name, _, key, _ in _PLAIN:
        if key:
            figures.add(f"headrace_control_{name}", state[key])
    planes = state["planes"]
    figures.add("headrace_control_degraded", bool(state["degraded"]))
    figures.add("headrace_control_planes", len(planes))
    silent = [p for p in planes if p["silent_s"] > SILENT_REPORTS * state["report_s"]]
    figures.add("headrace_control_silent_planes", len(silent))
    figures.add("headrace_control_held_bytes", sum(p["held_bytes"] for p in planes))
    clients = sum(sum(p["sessions"].values()) for p in planes)
    figures.add("headrace_control_clients", clients)
    decided = state["decide_us"], state["decide_s_sum"]
    figures.add_latencies("headrace_control_decide_seconds", *decided)
    flows = [flow for plane in planes for flow in plane["flows"]]
    known.jobs.update(flow["job"] for flow in flows)
    known.systems.update(system["name"] for system in state["file_systems"])
    for flow in flows:
        system = known.systems.of(flow["file_system"])
        _add_rates(figures, "job", flow, job_name=known.jobs.of(flow["job"]), file_system=system)
    for each in state["file_systems"]:
        _add_rates(figures, "file_system", each, file_system=known.systems.of(each["name"]))
    return figures


def _add_rates(figures: Figures, of: str, rates: Mapping[str, Any], **labels: str) -> None:
    for what in ("used", "granted", "capacity"):
        for resource, value in rates.get(what, {}).items():
            if value is not None:
                figures.add(f"headrace_control_{of}_{what}_{_UNITS[resource]}", value, **labels)
