"""Tokens: who may look, who may change something. Sessions stand for tokens in browsers.

A file of tokens has one a line: `operator TOKEN`, `reader TOKEN`, or a token alone, which is an
operator's; `until 2026-12-31` behind it ends it. The file is read again when it changes: whose token is
gone is signed out.
"""

from __future__ import annotations

import datetime as dt
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal

from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["Doors", "Refusal", "Token", "read_tokens"]

Role = Literal["operator", "reader"]

TOKEN_CHARACTERS_MIN: Final = 16
SESSION_S: Final = 8 * 3600.0
SESSIONS_MAX: Final = 1024
WRONG_MAX: Final = 20
"""Wrong tokens in a minute, of all together; then nobody is let in for a while."""

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_LINE: Final = "expected `operator TOKEN` or `reader TOKEN`, perhaps with `until 2026-12-31` behind"


@dataclass(frozen=True, slots=True)
class Token:
    """A secret, what it is good for, and until when (Unix seconds; None: for good)."""

    role: Role
    secret: str
    until_s: float | None = None

    @property
    def key(self) -> bytes:
        """Stands for it where the secret need not be."""
        return sha256(self.secret.encode()).digest()


class Refusal(Exception):
    """Not so.

    Attributes:
        status: as in HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file of tokens.

    Raises:
        ControlError: others can read it, or it has no good token.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ControlError(
                f"{path}: others can read the file of tokens (mode {mode:04o}).",
                path=str(path), next_step=f"chmod 600 {path}",
            )  # fmt: skip
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ControlError(f"{path}: the tokens cannot be read: {e}.", path=str(path)) from e
    tokens = [
        _token(line.split(), f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not tokens:
        raise ControlError(
            f"{path}: there is no token.", path=str(path), next_step=_LINE.capitalize()
        )
    return tuple(tokens)


def _token(words: list[str], where: str) -> Token:
    until_s = None
    try:
        if len(words) > 2 and words[-2] == "until":
            at = dt.datetime.fromisoformat(words[-1])
            until_s = at.replace(tzinfo=at.tzinfo or dt.UTC).timestamp()
            words = words[:-2]
    except ValueError as e:
        raise ControlError(f"{where}: {words[-1]!r} is no date, as 2026-12-31.") from e
    role, secret = words if len(words) == 2 else ("operator", words[0])
    if len(words) > 2 or role not in ("operator", "reader"):
        raise ControlError(f"{where}: {_LINE}.")
    if len(secret) < TOKEN_CHARACTERS_MIN or not _TOKEN.fullmatch(secret):
        raise ControlError(
            f"{where}: the token has {len(secret)} characters, expected {TOKEN_CHARACTERS_MIN} or more, "
            "without spaces.",
            next_step="Make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    return Token("reader" if role == "reader" else "operator", secret, until_s)


@dataclass(slots=True)
class _Session:
    token: bytes
    until_s: float


class Doors:
    """Lets in, or not.

    Args:
        path: the file of tokens; None: there is none, and nobody can be more than anybody.
        clock: Unix seconds.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._stamp: tuple[int, int] | None = None
        self._tokens: tuple[Token, ...] = ()
        self._sessions: dict[bytes, _Session] = {}
        self._wrong: list[float] = []
        if path is not None:
            self._read(path)

    @property
    def has_tokens(self) -> bool:
        """Whether somebody can sign in."""
        return self._path is not None

    def tokens(self) -> Sequence[Token]:
        """Those that are good by the file as it is now; none if it cannot be read any more."""
        if self._path is not None:
            try:
                self._read(self._path)
            except ControlError:
                self._tokens, self._stamp = (), None
        return self._tokens

    def _read(self, path: Path) -> None:
        try:
            found = path.stat()
        except OSError as e:
            raise ControlError(f"{path}: the tokens cannot be read: {e}.", path=str(path)) from e
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            self._tokens = read_tokens(path)
            self._stamp = stamp

    def by_header(self, authorization: str) -> Role:
        """The role of who shows this header.

        Raises:
            Refusal: the token is wrong or has expired.
        """
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Refusal(401, "the Authorization header is not understood, expected: Bearer TOKEN")
        return self._known(given.strip()).role

    def sign_in(self, given: str) -> tuple[str, float]:
        """A session for a token: its secret name, and for how many seconds.

        Raises:
            Refusal: the token is wrong or has expired.
        """
        token = self._known(given.strip())
        now = self._clock()
        until_s = min(now + SESSION_S, token.until_s or now + SESSION_S)
        self._sessions = {k: s for k, s in self._sessions.items() if s.until_s > now}
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[min(self._sessions, key=lambda k: self._sessions[k].until_s)]
        name = secrets.token_urlsafe(32)
        self._sessions[_key(name)] = _Session(token.key, until_s)
        return name, until_s - now

    def by_session(self, name: str) -> Role | None:
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
        found = False
        for token in self._tokens:
            found |= hmac.compare_digest(token.secret.encode(), text.encode(errors="replace"))
        return found

    def _known(self, given: str) -> Token:
        now = self._clock()
        self._wrong = [at for at in self._wrong if now - at < 60.0]
        if len(self._wrong) >= WRONG_MAX:
            raise Refusal(429, "too many wrong tokens: wait a minute")
        tokens = self.tokens()
        if not tokens:
            raise Refusal(401, "nobody can sign in here: start headrace web with --token-file")
        found: Token | None = None
        for token in tokens:  # all of them, so that the time says nothing
            if hmac.compare_digest(token.secret.encode(), given.encode(errors="replace")):
                found = token
        if found is None:
            self._wrong.append(now)
            raise Refusal(401, "the token is wrong")
        if found.until_s is not None and found.until_s <= now:
            raise Refusal(401, "the token has expired: ask for another")
        return found


def _key(name: str) -> bytes:
    return sha256(name.encode(errors="replace")).digest()
