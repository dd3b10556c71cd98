"""App: what may be asked of a controller, over HTTP. docs/control-api.md has it as a table.

Bodies are bounded, typed and must come within seconds; every refusal is JSON with a sentence. Only
here do the arbiter, the database and the clock meet.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.control.messages import API, BODY_BYTES_MAX, Register, Report, decode, encode
from headrace.control.policy import Policy, PolicyError, changes, policy_document
from headrace.control.policy.parse import parse_document, parse_policy, unknown_names
from headrace.control.service.arbiter import Arbiter
from headrace.control.service.auth import Caller, Peer, Refused, TokenFile, TokenThrottle, caller_of
from headrace.control.service.database import Database, Fenced
from headrace.control.service.http import read_body, refusal
from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_log = logging.getLogger("headrace.control")

ANSWER_S = 10.0
"""No request takes longer, whoever does not read its answer."""

SAVE_S = 1.0
"""How often running leases are written down."""


class ControlService:
    """The controller, without its sockets.

    Args:
        database: claimed.
        tokens: good over TCP; None: a certificate is.
        certificates: whether one must be shown over TCP.
        fenced: called when another controller rules.

    Attributes:
        arbiter: what it knows and decides.
        app: the ASGI application.
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
                Route("/v1/planes", self._guarded(self._register, "plane"), methods=["POST"]),
                Route(
                    "/v1/planes/{key}/report", self._guarded(self._report, "plane"),
                    methods=["POST"],
                ),
                Route("/v1/planes/{key}", self._guarded(self._leave, "plane"), methods=["DELETE"]),
                Route("/v1/policy", self._guarded(self._policy, "operator"), methods=["GET"]),
                Route("/v1/policy", self._guarded(self._apply, "operator"), methods=["PUT"]),
                Route("/v1/state", self._guarded(self._state, "operator"), methods=["GET"]),
            ]
        )  # fmt: skip

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
        arbiter = self.arbiter
        return JSONResponse(
            {"version": arbiter.policy_version, "policy": policy_document(arbiter.policy)}
        )

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
