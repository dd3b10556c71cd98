"""Doors: who may look, who may change something. Sessions stand for tokens in browsers.

Without a file of tokens a server has one token of its own, as long as it runs: whoever started it sees it,
and a link that signs in once. Whose token is gone from the file is signed out.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from headrace.control.service.auth import Throttle, Token, TokenFile, matching

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Doors", "Refusal"]

ROLES: Final = ("operator", "reader")
SESSION_S: Final = 8 * 3600.0
SESSIONS_MAX: Final = 1024


class Refusal(Exception):
    """Not so.

    Attributes:
        status: as in HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Session:
    token: bytes
    until_s: float


class Doors:
    """Lets in, or not.

    Args:
        path: the file of tokens; None: there is one token, `own`.
        clock: Unix seconds.

    Attributes:
        own: the token of this run, an operator's; None where there is a file.
        once: what signs its bearer in one time, as `own` does; '' when it was used, or there is a file.

    Raises:
        ControlError: others can read the file, or it has no good token.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._file = None if path is None else TokenFile(path, ROLES)
        self.own = None if self._file else Token("operator", secrets.token_urlsafe(24))
        self.once = "" if self._file else secrets.token_urlsafe(24)
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}
        self._throttle = Throttle(clock)

    def tokens(self) -> Sequence[Token]:
        """Those that are good now."""
        if self._file is not None:
            return self._file.tokens()
        return () if self.own is None else (self.own,)

    def by_header(self, authorization: str, peer: str) -> str:
        """The role of who shows this header.

        Raises:
            Refusal: the token is wrong or has expired.
        """
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Refusal(401, "the Authorization header is not understood, expected: Bearer TOKEN")
        return self._known(given.strip(), peer).role

    def sign_in(self, given: str, peer: str) -> tuple[str, float]:
        """A session for a token: its secret name, and for how many seconds.

        Raises:
            Refusal: the token is wrong or has expired.
        """
        return self._open_session(self._known(given.strip(), peer))

    def sign_in_once(self, given: str, peer: str) -> tuple[str, float]:
        """A session for who has the link; nobody else has one for it any more.

        Raises:
            Refusal: the link is wrong, or was used.
        """
        self._expect_patience(peer)
        if self.own is None or not self.once or not hmac.compare_digest(self.once, given):
            self._throttle.wrong(peer)
            raise Refusal(
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
        session = self._sessions.get(_key(name))
        if session is None or session.until_s <= self._clock():
            return None
        now = self._clock()
        for token in self.tokens():
            if token.key == session.token and (token.until_s is None or token.until_s > now):
                return token.role
        return None

    def sign_out(self, name: str) -> None:
        """End a session."""
        self._sessions.pop(_key(name), None)

    def is_secret(self, text: str) -> bool:
        """Whether a text is one of the tokens."""
        return matching(self.tokens(), text) is not None

    def _expect_patience(self, peer: str) -> None:
        if self._throttle.is_shut(peer):
            raise Refusal(429, "too many wrong tokens: wait a minute")

    def _known(self, given: str, peer: str) -> Token:
        self._expect_patience(peer)
        token = matching(self.tokens(), given)
        if token is None:
            self._throttle.wrong(peer)
            raise Refusal(401, "the token is wrong")
        if token.until_s is not None and token.until_s <= self._clock():
            raise Refusal(401, "the token has expired: ask for another")
        return token


def _key(name: str) -> bytes:
    return sha256(name.encode(errors="replace")).digest()
