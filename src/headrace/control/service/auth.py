"""Auth: who asks. On a UNIX socket the kernel says it; over TCP, a token or a certificate does.

The controller knows two roles: an operator may do everything; a plane may register, report and leave. On
its own socket (in a folder that nobody else can enter) its user and root are operators; on one that it
was told to listen on, other users are planes, and of their own jobs only. The pages (`headrace web`) have
operators and readers.

A file of tokens has one a line: a role and the token, or a token alone, which is an operator's; `until
2026-12-31` behind it ends it. The file is read again when it changes, and good only while nobody else
can read it.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from headrace.base.peers import same_secret, user_name
from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TOKEN_CHARACTERS_MIN: Final = 16
TOKENS_BYTES_MAX: Final = 1 << 20
WRONG_MAX: Final = 20  # wrong tokens of one peer in `WRONG_S`; then it has to wait
WRONG_S: Final = 60.0
PEERS_MAX: Final = 4096

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


class Refused(Exception):
    """A request cannot be done, or not by whoever asks."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection."""

    uid: int | None = None  # on a UNIX socket; None: it came over TCP
    certified: bool = False  # it showed a certificate that was verified
    name: str = ""  # what its wrong tokens are counted under (`headrace.base.peers`)


@dataclass(frozen=True, slots=True)
class Token:
    """A secret, the role that it is good for, and until when (Unix seconds; None: for good)."""

    role: str
    secret: str
    until_s: float | None = None

    @property
    def key(self) -> bytes:
        """Stands for the token where the secret need not be."""
        return sha256(self.secret.encode()).digest()


class TokenFile:
    """The tokens of a file, as it is now; a token alone is of the first of `roles`.

    Raises ControlError if others can read the file, or it has no good token.
    """

    def __init__(self, path: Path, roles: Sequence[str]) -> None:
        self._path = path
        self._roles = tuple(roles)
        self._stamp: tuple[int, ...] | None = None
        self._tokens: tuple[Token, ...] = ()
        self._look()

    def tokens(self) -> tuple[Token, ...]:
        """Those that are good by the file as it is now; none if it cannot be used any more."""
        try:
            self._look()
        except ControlError:
            self._tokens, self._stamp = (), None
        return self._tokens

    def _look(self) -> None:
        try:
            status = self._path.stat()
            # The change of a mode or an owner shows in ctime alone.
            stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            if stamp == self._stamp:
                return
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                text = file.read(TOKENS_BYTES_MAX).decode()
        except (OSError, UnicodeDecodeError) as e:
            message = f"{self._path}: the tokens cannot be read: {e}."
            raise ControlError(message, path=str(self._path)) from e
        mode = status.st_mode & 0o777
        if mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise ControlError(
                f"{self._path}: others can read the file of tokens (user {status.st_uid}, mode {mode:04o}).",
                path=str(self._path), next_step=f"chmod 600 {self._path}",
            )  # fmt: skip
        tokens = [
            self._token(line.split(), f"{self._path}, line {number}")
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not tokens:
            message = f"{self._path}: there is no token."
            raise ControlError(message, path=str(self._path), next_step=self._expected())
        self._tokens, self._stamp = tuple(tokens), stamp

    def _expected(self) -> str:
        lines = " or ".join(f"`{role} TOKEN`" for role in self._roles)
        return f"Expected {lines}, perhaps with `until 2026-12-31` behind"

    def _token(self, words: list[str], where: str) -> Token:
        until_s = None
        try:
            if len(words) > 2 and words[-2] == "until":
                at = dt.datetime.fromisoformat(words[-1])
                until_s = at.replace(tzinfo=at.tzinfo or dt.UTC).timestamp()
                words = words[:-2]
        except ValueError as e:
            raise ControlError(f"{where}: {words[-1]!r} is no date, as 2026-12-31.") from e
        role, secret = words if len(words) == 2 else (self._roles[0], words[0])
        if len(words) > 2 or role not in self._roles:
            raise ControlError(f"{where}: {self._expected()}.")
        if len(secret) < TOKEN_CHARACTERS_MIN or not _TOKEN.fullmatch(secret):
            raise ControlError(
                f"{where}: the token has {len(secret)} characters, expected {TOKEN_CHARACTERS_MIN} or more, "
                "without spaces.",
                next_step="Make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
            )
        return Token(role, secret, until_s)


def matching(tokens: Sequence[Token], secret: str) -> Token | None:
    """The token whose secret this is; its time says nothing about it, and neither does the search's."""
    match: Token | None = None
    for token in tokens:
        if same_secret(secret, token.secret):
            match = token
    return match


class TokenThrottle:
    """Wrong tokens by peer: who guesses has to wait, and nobody else does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()

    def is_shut(self, peer: str) -> bool:
        """Whether a peer has to wait."""
        return len(self._recent(peer)) >= WRONG_MAX

    def wrong(self, peer: str) -> None:
        """Counts a wrong token."""
        self._wrong[peer] = [*self._recent(peer), self._clock()][-WRONG_MAX:]
        self._wrong.move_to_end(peer)
        if len(self._wrong) > PEERS_MAX:
            self._wrong.popitem(last=False)

    def _recent(self, peer: str) -> list[float]:
        now = self._clock()
        return [at for at in self._wrong.get(peer, ()) if now - at < WRONG_S]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str  # for the log
    role: str  # what it may do
    user: str | None = None  # whose planes it may register; None: anybody's


def caller_of(
    peer: Peer, authorization: str | None, tokens: Sequence[Token] | None, *, certificates: bool
) -> Caller | None:
    """Say who asks; None: nobody who may.

    `tokens` are those that are good (None: a certificate alone is), `authorization` is the header of this
    name; with `certificates` one must be shown over TCP.
    """
    if peer.uid is not None:
        if peer.uid in (0, os.geteuid()):
            return Caller(f"user {peer.uid}", "operator")
        return Caller(f"user {peer.uid}", "plane", user_name(peer.uid))
    if certificates and not peer.certified:
        return None
    if tokens is None:
        return Caller("certificate", "operator") if peer.certified else None
    scheme, _, secret = (authorization or "").partition(" ")
    token = matching(tokens, secret.strip())
    if token is None or scheme.lower() != "bearer":
        return None
    expired = token.until_s is not None and token.until_s <= time.time()
    return None if expired else Caller("token", token.role)
