"""App: what browsers may ask, who may ask it, and the HTML around every page (docs/howto/web.md).

Looking takes a token, unless the pages are public; changing a policy always takes an operator's. Only
here do source, stores, policies and sessions meet.
"""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from headrace import __version__
from headrace.base.causes import Cause
from headrace.base.peers import Address
from headrace.control.client import Refusal as ControllerRefusal
from headrace.control.policy import PolicyError
from headrace.control.service.auth import Refused
from headrace.control.service.http import HttpListener, HttpServer, listen_tcp, read_body, refusal
from headrace.errors import HeadraceError, SampleNotFound
from headrace.pages.html import POLICY as REPORT_POLICY
from headrace.pages.html import STYLE, safe
from headrace.web.access import SESSION_S, Guard
from headrace.web.live import Full, Live, LiveClient
from headrace.web.source import TracedRuns
from headrace.web.views import plain, rows, sentence, whole_number

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from headrace.web.access import Sessions, WebOptions
    from headrace.web.source import ClusterSource, ControllerPolicies
    from headrace.web.stores import StoreBrowser

_T = TypeVar("_T")

BODY_BYTES_MAX: Final = 1 << 20
ANSWER_S: Final = 12.0
READS_MAX: Final = 4  # samples that are read at a time
IMAGE_POLICY: Final = "default-src 'none'; sandbox"

_STATUS: Final[dict[type[Exception], int]] = {
    SampleNotFound: 404, HeadraceError: 502, TimeoutError: 504, ClientDisconnect: 400, OSError: 502,
    ValueError: 400,
}  # fmt: skip
"""What goes wrong, as HTTP says it; the first that fits."""

HEADER: Final = "x-headrace"
"""Scripts of our pages send it: another site's cannot, unless we let them."""

# -- the HTML around every page, and the files that pages load ----------------------------------------

_FOLDER: Final = Path(__file__).parent / "static"

_TYPES: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class WebPage(NamedTuple):
    """A page: its file of HTML in `static` is what stands in the middle."""

    path: str
    title: str
    file: str
    script: str
    in_menu: bool = True


PAGES: Final = (
    WebPage("/", "Cluster", "cluster.html", "cluster.js"),
    WebPage("/starving", "Starving", "starving.html", "starving.js"),
    WebPage("/storage", "File systems", "storage.html", "storage.js"),
    WebPage("/policies", "Policies", "policies.html", "policies.js"),
    WebPage("/stores", "Stores", "stores.html", "stores.js"),
    WebPage("/runs", "Runs", "runs.html", "runs.js", in_menu=False),
    WebPage("/job", "Job", "job.html", "job.js", in_menu=False),
    WebPage("/signin", "Sign in", "signin.html", "", in_menu=False),
)


_CAUSES: Final = b"export const CAUSES = {}"

_COLOURS: Final = {
    Cause.START: "rest hatched",
    Cause.PREFETCH: "b6 hatched", Cause.POLICY: "rest hatched", Cause.WINDOW: "rest hatched",
    Cause.DIRECT: "b4 hatched", Cause.NODE: "rest hatched", Cause.METADATA: "b1",
    Cause.STORAGE: "b1 hatched", Cause.LATENCY: "b4", Cause.BANDWIDTH: "b6", Cause.NETWORK: "b5",
    Cause.PEER: "b5 hatched", Cause.MEMORY: "b0 hatched", Cause.DECODE: "b0", Cause.PYTHON: "b2",
    Cause.COLLATE: "b2 hatched", Cause.TRANSFER: "b3 hatched", Cause.SLOW_RANK: "b3", Cause.OTHER: "rest",
}  # fmt: skip
"""The classes of each cause's colour: more causes than colours that all eyes tell apart, some are hatched."""


def files() -> dict[str, tuple[bytes, str]]:
    """What pages load, by name: bytes and type."""
    by_name = {
        path.name: (path.read_bytes(), _TYPES[path.suffix])
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES
    }
    by_name["pages.css"] = STYLE.encode(), _TYPES[".css"]
    script, kind = by_name["core.js"]
    causes = json.dumps({each: [_COLOURS[each], each.phrase] for each in Cause}).encode()
    assert _CAUSES in script
    by_name["core.js"] = script.replace(_CAUSES, _CAUSES[:-2] + causes), kind
    return by_name


def document(page: WebPage, *, label: str, who: str, problem: str = "", runs: bool = False) -> str:
    """A page."""
    shown = [each for each in PAGES if each.in_menu or (runs and each.path == "/runs")]
    menu = "".join(
        f'<li><a href="{each.path}"{" aria-current=page" if each is page else ""}>{each.title}</a></li>'
        for each in shown
    )
    if who:
        door = (
            f'<form method="post" action="/signout"><span>{safe(who)}</span> '
            '<button class="quiet">Sign out</button></form>'
        )
    else:
        door = '<a href="/signin">Sign in</a>'
    banner = (
        f'<p class="banner"><strong>{safe(label)}</strong> The cluster, its users and its jobs '
        "are made up by a seeded model.</p>"
        if label
        else ""
    )
    scripts = page.script and f'<script type="module" src="/static/{page.script}"></script>'
    alert = f'<p class="problem" role="alert">{safe(problem)}</p>' if problem else ""
    body = (_FOLDER / page.file).read_text(encoding="utf-8").replace("<!--said-->", alert)
    return Template((_FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        title=page.title, path=page.path, who=safe(who), menu=menu, door=door, banner=banner,
        scripts=scripts, body=body, version=safe(__version__),
    )  # fmt: skip


# -- the pages' application ----------------------------------------------------------------------------

_SIGN_IN: Final = next(page for page in PAGES if page.path == "/signin")
_MISSING: Final = WebPage("", "Not found", "missing.html", "", in_menu=False)


class Web:
    """The pages, without their sockets.

    Attributes:
        app: the ASGI application.
        live: looks, and tells browsers.
        port: in the cookie's name, so that two servers on one machine do not share it.
    """

    def __init__(
        self,
        source: ClusterSource,
        sessions: Sessions,
        options: WebOptions,
        *,
        stores: StoreBrowser,
        policies: ControllerPolicies | None = None,
        runs: TracedRuns | None = None,
        live: Live | None = None,
    ) -> None:
        self.live = live or Live(source)
        self._source = source
        self._access = sessions
        self._options = options
        self._browser = stores
        self._policies = policies
        self._runs = runs or TracedRuns(())
        self._reads = asyncio.Semaphore(READS_MAX)
        self._files = {
            name: (data, kind, f'"{sha256(data).hexdigest()[:20]}"')
            for name, (data, kind) in files().items()
        }
        self.port = options.address.port
        pages = [Route(page.path, self._page(page)) for page in PAGES if page.path != "/signin"]
        self.app = Guard(
            Starlette(
                routes=[
                    *pages,
                    Route("/signin", self._sign_in, methods=["GET", "POST"]),
                    Route("/signout", self._guarded(self._sign_out, open_to_all=True), methods=["POST"]),
                    Route("/static/{name}", self._static),
                    Route("/favicon.ico", self._static),
                    Route("/api/live", self._guarded(self._live)),
                    Route("/api/starving", self._guarded(self._starving)),
                    Route("/api/storage", self._guarded(self._storage)),
                    Route("/api/job", self._guarded(self._job)),
                    Route("/api/runs", self._guarded(self._traced)),
                    Route("/run", self._guarded(self._run)),
                    Route("/api/policy", self._guarded(self._policy)),
                    Route("/api/policy/check", self._guarded(self._put), methods=["POST"]),
                    Route("/api/policy/apply", self._guarded(self._put, "operator"), methods=["POST"]),
                    Route("/api/stores", self._guarded(self._stores)),
                    Route("/api/stores/{number:int}/samples", self._guarded(self._samples)),
                    Route("/api/stores/{number:int}/sample", self._guarded(self._sample)),
                    Route("/api/stores/{number:int}/image", self._guarded(self._image)),
                ],
                exception_handlers={404: self._missing},
            ),
            sessions,
            options.hosts,
        )  # fmt: skip

    # -- pages ------------------------------------------------------------------------------------

    def _page(self, page: WebPage) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                who = self._who(request)
            except Refused as e:
                return self._html(_SIGN_IN, "", e.status, str(e))
            if not who and self._options.needs_token:
                return RedirectResponse("/signin", 303)
            if page.path == "/job" and not request.query_params.get("id"):
                return RedirectResponse("/runs", 303)
            return self._html(page, who)

        return answer

    async def _missing(self, request: Request, _: Exception) -> Response:
        """Lead to the page whose address has slashes too many, or to those that there are."""
        path = "/" + "/".join(filter(None, request.scope["path"].split("/")))
        if path in {page.path for page in PAGES} - {request.scope["path"]}:
            return RedirectResponse(f"{path}?{request.url.query}".rstrip("?"), 308)
        if path.startswith("/api/"):
            return refusal(404, "there is no such address")
        return self._html(_MISSING, self._session(request) or "", 404)

    def _html(self, page: WebPage, who: str, status: int = 200, problem: str = "") -> Response:
        runs = bool(self._options.runs)
        text = document(page, label=self._source.label, who=who, problem=problem, runs=runs)
        return HTMLResponse(text, status)

    async def _sign_in(self, request: Request) -> Response:
        peer = _peer(request)
        once = request.query_params.get("once")
        if request.method != "POST" and not once:
            return self._html(_SIGN_IN, self._session(request) or "")
        kind = request.headers.get("content-type", "").split(";")[0]
        if not once and kind != "application/x-www-form-urlencoded":
            return self._html(_SIGN_IN, "", 415, "a form is expected")
        try:
            if once:
                name, seconds = self._access.sign_in_once(once, peer)
            else:
                body = (await read_body(request, 4096)).decode("utf-8", "replace")
                given = parse_qs(body, max_num_fields=8).get("token", [""])[0]
                name, seconds = self._access.sign_in(given, peer)
        except Refused as e:
            return self._html(_SIGN_IN, "", e.status, str(e))
        except (ValueError, TimeoutError, ClientDisconnect) as e:
            return self._html(_SIGN_IN, "", 400, f"the form cannot be read: {plain(e)}")
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._cookie, name, max_age=int(min(seconds, SESSION_S)), path="/", httponly=True,
            samesite="strict", secure=request.headers.get("origin", "").startswith("https:"),
        )  # fmt: skip
        return answer

    async def _sign_out(self, request: Request) -> Response:
        self._access.sign_out(request.cookies.get(self._cookie, ""))
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(self._cookie, path="/", httponly=True, samesite="strict")
        return answer

    async def _static(self, request: Request) -> Response:
        file = self._files.get(request.path_params.get("name", "icon.svg"))
        if file is None:
            return refusal(404, "there is no such file")
        data, kind, tag = file
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    # -- what is looked at --------------------------------------------------------------------------

    async def _live(self, request: Request) -> Response:
        connection = getattr(request.state, "connection", None)
        client = LiveClient(
            grid=request.query_params.get("grid") == "1",
            hang_up=connection.hang_up if connection is not None else lambda: None,
            may=lambda: self._may_look(request),
        )
        try:
            self.live.join(client)
        except Full:
            return refusal(
                503, "as many browsers watch as may; try again soon", {"retry-after": "10"}
            )
        if connection is not None:
            connection.hold()
        return StreamingResponse(
            self.live.stream(client), media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )  # fmt: skip

    async def _starving(self, request: Request) -> Response:
        starving, records = await self.live.ask(self._source.starving)
        return JSONResponse(await asyncio.to_thread(rows, starving, records, request.query_params))

    async def _storage(self, _: Request) -> Response:
        return JSONResponse({"file_systems": await self.live.ask(self._source.storage)})

    async def _job(self, request: Request) -> Response:
        job_id = request.query_params.get("id", "")
        page = await self.live.ask(lambda: self._source.job(job_id))
        if page is None:
            return refusal(404, f"nothing is known of job {plain(job_id)!r}")
        return JSONResponse(page)

    async def _run(self, request: Request) -> Response:
        name = request.query_params.get("id", "")
        page = await asyncio.to_thread(self._runs.page, name)
        if page is None:
            problem = f"there is no run {plain(name)!r}"
            return self._html(_MISSING, self._session(request) or "", 404, problem)
        return HTMLResponse(page, headers={"content-security-policy": REPORT_POLICY})

    async def _traced(self, _: Request) -> Response:
        runs = (await asyncio.to_thread(self._runs.by_id)).items()
        return JSONResponse({"runs": [{"id": name, "path": plain(path)} for name, path in runs]})

    # -- policies -----------------------------------------------------------------------------------

    async def _policy(self, _: Request) -> Response:
        policies = self._policies
        if policies is None:
            return JSONResponse({"where": "", "version": None, "text": ""})
        current = await asyncio.to_thread(policies.current)
        return JSONResponse({"where": plain(policies.where), **current})

    async def _put(self, request: Request) -> Response:
        policies = self._policies
        if policies is None:
            return refusal(404, "there is no controller: start headrace web with --controller")
        if request.headers.get(HEADER) is None and not request.headers.get("authorization"):
            return refusal(
                403, "the header X-Headrace is missing: it tells our pages from other sites'"
            )
        body = await read_body(request, BODY_BYTES_MAX)
        dry_run = request.url.path.endswith("/check")
        try:
            text = json.loads(body)["text"]
        except (ValueError, RecursionError, LookupError, TypeError) as e:
            raise Refused(400, 'the body is wrong, expected JSON: {"text": POLICY}') from e
        if not isinstance(text, str):
            raise Refused(400, "the body is wrong: text is no string")
        try:
            outcome = await asyncio.to_thread(policies.put, text, dry_run=dry_run)
        except PolicyError as e:
            return refusal(422, "the policy is wrong", problems=[sentence(p) for p in e.problems])
        except ControllerRefusal as e:
            status = e.status if e.status in (400, 413, 422) else 502
            return refusal(status, sentence(e), problems=[sentence(p) for p in e.problems])
        return JSONResponse(outcome)

    # -- stores ---------------------------------------------------------------------------------------

    async def _stores(self, _: Request) -> Response:
        return JSONResponse({"stores": await asyncio.to_thread(self._browser.listed)})

    async def _samples(self, request: Request) -> Response:
        asked = request.query_params
        samples = await self._read(
            self._browser.find, request, prefix=asked.get("prefix", ""),
            index=_index(request) if asked.get("index") else None, after=asked.get("after", ""),
        )  # fmt: skip
        return JSONResponse(samples)

    async def _sample(self, request: Request) -> Response:
        sample = await self._read(self._browser.sample, request, index=_index(request))
        return JSONResponse(sample)

    async def _image(self, request: Request) -> Response:
        index, part = _index(request), request.query_params.get("part")
        data, kind = await self._read(self._browser.image, request, index=index, part=part)
        headers = {"content-security-policy": IMAGE_POLICY, "content-disposition": "inline"}
        return Response(data, media_type=kind, headers=headers)

    async def _read(self, read: Callable[..., _T], request: Request, **given: Any) -> _T:
        """What a store holds, read off the loop, some at a time."""
        async with self._reads:
            return await asyncio.to_thread(read, request.path_params["number"], **given)

    # -- how --------------------------------------------------------------------------------------------

    @property
    def _cookie(self) -> str:
        return f"headrace_{self.port}"

    def _session(self, request: Request) -> str | None:
        return self._access.by_session(request.cookies.get(self._cookie, ""))

    def _who(self, request: Request) -> str:
        """The role of who asks, '' for anybody; raises Refused if a token is shown that is not good."""
        given = request.headers.get("authorization")
        if given is not None:
            return self._access.by_header(given, _peer(request))
        return self._session(request) or ""

    def _may_look(self, request: Request) -> bool:
        try:
            return bool(self._who(request)) or not self._options.needs_token
        except Refused:
            return False

    def _guarded(
        self,
        handle: Callable[[Request], Awaitable[Response]],
        role: str = "",
        *,
        open_to_all: bool = False,
    ) -> Callable[[Request], Awaitable[Response]]:
        """Let only those in who may, and answer whatever goes wrong."""

        async def answer(request: Request) -> Response:
            try:
                who = self._who(request)
                if role and who != role:
                    return refusal(403 if who else 401, f"this takes an {role}'s token: sign in")
                if not who and self._options.needs_token and not open_to_all:
                    return refusal(
                        401, "a token is needed: Authorization: Bearer TOKEN, or sign in"
                    )
                async with asyncio.timeout(ANSWER_S):
                    return await handle(request)
            except Refused as e:
                return refusal(e.status, str(e))
            except tuple(_STATUS) as e:
                status = next(status for kind, status in _STATUS.items() if isinstance(e, kind))
                return refusal(status, sentence(e) or "it took too long")

        return answer


def _peer(request: Request) -> str:
    peer = getattr(request.state, "peer", None)
    return peer.name if peer is not None else ""


def _index(request: Request) -> int:
    return whole_number(request.query_params.get("index", ""), "index")


# -- the process ---------------------------------------------------------------------------------------

CONNECTIONS_MAX: Final = 1024


def serve(
    source: ClusterSource,
    sessions: Sessions,
    options: WebOptions,
    *,
    stores: StoreBrowser,
    policies: ControllerPolicies | None = None,
    runs: TracedRuns | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal ends it; raises ControlError if it cannot listen there."""
    next_step = "Name another port: --listen 127.0.0.1:0 takes any that is free."
    sock = listen_tcp(options.address, options.listen, next_step)
    web = Web(source, sessions, options, stores=stores, policies=policies, runs=runs)
    try:
        asyncio.run(_serve(web, sock, ready))
    finally:
        sock.close()
        stores.close()
        if policies is not None:
            policies.close()


async def _serve(web: Web, sock: socket.socket, ready: Callable[[str], None]) -> None:
    web.port = sock.getsockname()[1]
    server = HttpServer(web.app, [HttpListener(sock)], CONNECTIONS_MAX)
    ready(f"http://{Address(sock.getsockname()[0], web.port)}/")
    await server.serve_beside(web.live.run(), web.live.close)
