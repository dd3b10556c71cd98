"""Access: who may look, who may change something, and what stands before every answer.

Sessions stand for tokens in browsers. Without a file of tokens a server has one token of its own, as long as
it runs: whoever started it sees it, and a link that signs in once. Whose token is gone from the file is
signed out.

The guard knows which names this server goes by, what may not be in an address, who may send what changes
something, and what a browser may do with our pages.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse

from headrace.base.peers import Address, address_of, same_secret
from headrace.control.service.auth import Refused, Token, TokenFile, TokenThrottle, matching
from headrace.control.service.http import refusal
from headrace.pages.html import safe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names that only this machine goes by."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""What a page of ours may load: our own files, and nothing else; no script stands in a page."""

HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: a browser would send our own forms with `Origin: null`.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), interest-cohort=()",
    "cache-control": "no-store",
}
"""Of every answer that does not say otherwise."""

_SECRETS: Final = frozenset([
    "token", "access_token", "auth", "authorization", "key", "api_key", "password", "secret", "session",
])  # fmt: skip
"""Names of what does not belong into an address."""
QUERY_BYTES_MAX: Final = 4096
_CHANGES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application around another."""

    app: ASGIApp  # the other
    sessions: Sessions  # knows the tokens
    hosts: frozenset[str] | None  # the names that this server goes by, without ports; None: any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            raise AssertionError(scope["type"])  # uvicorn is told to serve nothing else

        async def covered(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = list(message["headers"]) + [
                    (name.encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.encode() not in present
                ]
            await send(message)

        reason = self.refuses(scope)
        if reason is None:
            await self.app(scope, receive, covered)
        else:
            status, sentence = reason
            close = {"connection": "close"}
            page = f"<!doctype html><html lang=en><title>Refused</title><p>{safe(sentence)}."
            api = scope["path"].startswith("/api/")
            answer = refusal(status, sentence, close) if api else HTMLResponse(page, status, close)
            await answer(scope, receive, covered)

    def refuses(self, scope: Scope) -> tuple[int, str] | None:
        """A status and a sentence; None: it may come in."""
        headers = Headers(scope=scope)
        host = _whole(headers, "host") or ""
        if self.hosts is not None and _name(host) not in self.hosts:
            # A name of somebody else's that leads here: DNS rebinding.
            known = ", ".join(sorted(self.hosts))
            return 421, f"this server does not go by the name {host!r}, expected one of {known}"
        return self._query(scope) or _origin(scope["method"], headers, host)

    def _query(self, scope: Scope) -> tuple[int, str] | None:
        raw = scope.get("query_string", b"")
        if len(raw) > QUERY_BYTES_MAX:
            return 414, f"the address has more than {QUERY_BYTES_MAX} bytes"
        try:
            pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, max_num_fields=64)
        except ValueError:
            return 400, "the address's query cannot be read"
        for name, value in pairs:
            if name.lower() in _SECRETS or self.sessions.is_secret(value):
                return 400, (
                    "a token does not belong into an address: logs and histories keep it. Send it in the "
                    "Authorization header, or sign in; and exchange this one, it is no secret any more"
                )
        return None


def _origin(method: str, headers: Headers, host: str) -> tuple[int, str] | None:
    """Whether another site sends what changes something."""
    if method not in _CHANGES:
        return None
    site = _whole(headers, "sec-fetch-site")
    if site not in (None, "same-origin"):
        return 403, f"it comes from another site (Sec-Fetch-Site: {site})"
    origin = _whole(headers, "origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, f"it comes from another site (Origin: {origin})"
    return None


def _whole(headers: Headers, name: str) -> str | None:
    """A header; where it comes twice, as no good one looks: two hosts are no host."""
    values = headers.getlist(name)
    return ",".join(values) if values else None


def _name(host: str) -> str:
    """A host without its port."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() and port.isascii() else host.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """How the pages are served.

    Raises ValueError if the address is none, or others could look without a token.
    """

    listen: str = "127.0.0.1:8470"  # HOST:PORT; port 0 is any that is free.
    token_file: Path | None = None  # who may sign in; see `tokens`
    public: bool = False
    """Whoever can connect may look without a token: every user of this machine. Never beyond it."""
    names: tuple[str, ...] = ()
    """That this server goes by, beside those of the machine itself: behind a proxy."""
    stores: tuple[str, ...] = ()  # paths of stores that may be looked into
    runs: tuple[str, ...] = ()  # folders of traced runs, or folders of such

    def __post_init__(self) -> None:
        if not self.address.loopback and (self.public or self.token_file is None):
            why = "--public: everybody" if self.public else "others"
            raise ValueError(
                f"--listen {self.listen}: {why} could look; give --token-file, so that people can sign in"
            )
        for name in self.names:
            if not name or any(c in name for c in "/:@ \t") or not name.isprintable():
                raise ValueError(f"--name is {name!r}, expected the name of a host, without a port")

    @property
    def address(self) -> Address:
        """Host and port."""
        return address_of(self.listen, host="", what="--listen")

    @property
    def needs_token(self) -> bool:
        """Whether looking takes a token."""
        return not self.public

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that requests may call this server by; None: any."""
        named = frozenset(name.lower() for name in self.names)
        if self.address.loopback:
            return LOOPBACK | {self.address.host} | named
        return named or None


ROLES: Final = ("operator", "reader")
SESSION_S: Final = 8 * 3600.0
SESSIONS_MAX: Final = 1024


class _Session(NamedTuple):
    token: bytes
    until_s: float


class Sessions:
    """Lets in, or not.

    Args:
        path: the file of tokens; None: there is one token, `own`.
        clock: Unix seconds.

    Attributes:
        own: the token of this run, an operator's; None where there is a file.
        once: what signs its bearer in one time, as `own` does; '' when it was used, or there is a file.

    Raises ControlError if others can read the file, or it has no good token.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._file = None if path is None else TokenFile(path, ROLES)
        self.own = None if self._file else Token("operator", secrets.token_urlsafe(24))
        self.once = "" if self._file else secrets.token_urlsafe(24)
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}
        self._throttle = TokenThrottle(clock)

    def tokens(self) -> Sequence[Token]:
        """Those that are good now."""
        if self._file is not None:
            return self._file.tokens()
        return () if self.own is None else (self.own,)

    def by_header(self, authorization: str, peer: str) -> str:
        """The role of who shows this header; raises Refused if the token is wrong or has expired."""
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Refused(401, "the Authorization header is not understood, expected: Bearer TOKEN")
        return self._known(secret.strip(), peer).role

    def sign_in(self, secret: str, peer: str) -> tuple[str, float]:
        """A session for a token: its secret name, and for how many seconds.

        Raises Refused if the token is wrong or has expired.
        """
        return self._open_session(self._known(secret.strip(), peer))

    def sign_in_once(self, secret: str, peer: str) -> tuple[str, float]:
        """A session for who has the link; nobody else has one for it any more.

        Raises Refused if the link is wrong, or was used.
        """
        self._expect_patience(peer)
        if self.own is None or not self.once or not same_secret(secret, self.once):
            self._throttle.wrong(peer)
            raise Refused(
                401, "this link was used already, or is not of this run: sign in with the token"
            )
        self.once = ""
        return self._open_session(self.own)

    def _open_session(self, token: Token) -> tuple[str, float]:
        now = self._clock()
        until_s = min(now + SESSION_S, token.until_s or now + SESSION_S)
        self._sessions = {k: s for k, s in self._sessions.items() if s.until_s > now}
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[min(self._sessions, key=lambda k: self._sessions[k].until_s)]
        name = secrets.token_urlsafe(32)
        self._sessions[_key(name)] = _Session(token.key, until_s)
        return name, until_s - now

    def by_session(self, name: str) -> str | None:
        """The role of a session; None: it is over, or never was."""
        session, now = self._sessions.get(_key(name)), self._clock()
        if session is None or session.until_s <= now:
            return None
        good = (t for t in self.tokens() if t.until_s is None or t.until_s > now)
        return next((token.role for token in good if token.key == session.token), None)

    def sign_out(self, name: str) -> None:
        """End a session."""
        self._sessions.pop(_key(name), None)

    def is_secret(self, text: str) -> bool:
        """Whether a text is one of the tokens."""
        return matching(self.tokens(), text) is not None

    def _expect_patience(self, peer: str) -> None:
        if self._throttle.is_shut(peer):
            raise Refused(429, "too many wrong tokens: wait a minute")

    def _known(self, secret: str, peer: str) -> Token:
        self._expect_patience(peer)
        token = matching(self.tokens(), secret)
        if token is None:
            self._throttle.wrong(peer)
            raise Refused(401, "the token is wrong")
        if token.until_s is not None and token.until_s <= self._clock():
            raise Refused(401, "the token has expired: ask for another")
        return token


def _key(name: str) -> bytes:
    return sha256(name.encode(errors="replace")).digest()
