"""Guard: what stands before every answer.

Which names this server goes by, what may not be in an address, who may send what changes something, and
what a browser may do with our pages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlsplit

from headrace.pages.html import safe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from headrace.web.tokens import Doors

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

__all__ = ["HEADERS", "LOOPBACK", "Guard"]

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

_SECRETS: Final = frozenset(
    {
        "token",
        "access_token",
        "auth",
        "authorization",
        "key",
        "api_key",
        "password",
        "secret",
        "session",
    }
)
QUERY_BYTES_MAX: Final = 4096
_CHANGES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application around another.

    Attributes:
        app: the other.
        doors: knows the tokens.
        hosts: the names that this server goes by, without ports; None: any.
    """

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    doors: Doors
    hosts: frozenset[str] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            raise AssertionError(scope["type"])  # uvicorn is told to serve nothing else

        async def covered(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = list(message["headers"]) + [
                    (name.encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.encode() not in given
                ]
            await send(message)

        refusal = self.refuses(scope)
        if refusal is None:
            await self.app(scope, receive, covered)
        else:
            await _answer(covered, scope, *refusal)

    def refuses(self, scope: Scope) -> tuple[int, str] | None:
        """A status and a sentence; None: it may come in."""
        headers = _headers(scope)
        host = headers.get("host", "")
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
            if name.lower() in _SECRETS or self.doors.is_secret(value):
                return 400, (
                    "a token does not belong into an address: logs and histories keep it. Send it in the "
                    "Authorization header, or sign in; and exchange this one, it is no secret any more"
                )
        return None


def _origin(method: str, headers: dict[str, str], host: str) -> tuple[int, str] | None:
    """Whether another site sends what changes something."""
    if method not in _CHANGES:
        return None
    site = headers.get("sec-fetch-site")
    if site not in (None, "same-origin"):
        return 403, f"it comes from another site (Sec-Fetch-Site: {site})"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, f"it comes from another site (Origin: {origin})"
    return None


def _headers(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        text = name.decode("latin-1").lower()
        # Two hosts are no host.
        found[text] = (
            f"{found[text]},{value.decode('latin-1')}" if text in found else value.decode("latin-1")
        )
    return found


def _name(host: str) -> str:
    """A host without its port."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() and port.isascii() else host.lower()


async def _answer(send: Send, scope: Scope, status: int, sentence: str) -> None:
    if scope["path"].startswith("/api/"):
        kind, body = "application/json", json.dumps({"error": {"message": sentence}}).encode()
    else:
        kind = "text/html; charset=utf-8"
        body = f"<!doctype html><html lang=en><title>Refused</title><p>{safe(sentence)}.".encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode()),
               (b"connection", b"close")]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
