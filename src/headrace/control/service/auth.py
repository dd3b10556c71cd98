"""Auth: who asks. On a UNIX socket the kernel says it; over TCP, a token or a certificate does.

Two roles: an operator may do everything; a plane may register, report and leave. On the controller's
own socket (in a folder that nobody else can enter) its user and root are operators; on one that it
was told to listen on, other users are planes, and of their own jobs only.
"""

from __future__ import annotations

import hmac
import os
import pwd
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Caller", "Peer", "Token", "caller_of", "read_tokens", "user_name"]

Role = Literal["operator", "plane"]

TOKEN_CHARACTERS_MIN = 16
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection.

    Attributes:
        uid: on a UNIX socket; None: it came over TCP.
        certified: it showed a certificate that was verified.
    """

    uid: int | None = None
    certified: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """A secret and what it is good for."""

    role: Role
    secret: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: for the log.
        role: what it may do.
        user: whose planes it may register; None: anybody's.
    """

    name: str
    role: Role
    user: str | None = None


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file of tokens: one a line, `plane TOKEN` or `operator TOKEN`; alone it is an operator's.

    Raises:
        ControlError: others can read it, or it has no good token.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise ControlError(
                f"{path}: others can read the file of tokens (mode {path.stat().st_mode & 0o777:04o}).",
                path=str(path),
                next_step=f"chmod 600 {path}",
            )
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ControlError(f"{path}: the tokens cannot be read: {e}.", path=str(path)) from e
    tokens = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        role, secret = words if len(words) == 2 else ("operator", words[0])
        good = len(words) <= 2 and len(secret) >= TOKEN_CHARACTERS_MIN and _TOKEN.fullmatch(secret)
        if not good or role not in ("operator", "plane"):
            raise ControlError(
                f"{path}, line {number}: expected `plane TOKEN` or `operator TOKEN`, "
                f"the token of {TOKEN_CHARACTERS_MIN} characters or more.",
                path=str(path),
            )
        tokens.append(Token("plane" if role == "plane" else "operator", secret))
    if not tokens:
        raise ControlError(f"{path}: there is no token.", path=str(path))
    return tuple(tokens)


def caller_of(
    peer: Peer, authorization: str | None, tokens: Sequence[Token], *, certificates: bool
) -> Caller | None:
    """Say who asks; None: nobody who may.

    Args:
        peer: the other end.
        authorization: the header of this name.
        tokens: those that are good.
        certificates: whether one must be shown over TCP.
    """
    if peer.uid is not None:
        if peer.uid in (0, os.geteuid()):
            return Caller(f"user {peer.uid}", "operator")
        return Caller(f"user {peer.uid}", "plane", user_name(peer.uid))
    if certificates and not peer.certified:
        return None
    if not tokens:
        return Caller("certificate", "operator") if peer.certified else None
    scheme, _, given = (authorization or "").partition(" ")
    found: Role | None = None
    for token in tokens:  # all of them, so that the time says nothing
        same = hmac.compare_digest(token.secret.encode(), given.strip().encode(errors="replace"))
        if same and scheme.lower() == "bearer":
            found = token.role
    return None if found is None else Caller("token", found)


def user_name(uid: int) -> str:
    """The user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
