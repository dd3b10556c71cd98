"""Options: how the pages are served, and from what."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.web.guard import LOOPBACK

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DEFAULT_LISTEN", "WebOptions"]

DEFAULT_LISTEN = "127.0.0.1:8470"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """How the pages are served.

    Attributes:
        listen: HOST:PORT; port 0 is any that is free.
        token_file: who may sign in; see `tokens`.
        public: whoever can connect may look without a token: every user of this machine. Never beyond it.
        names: that this server goes by, beside those of the machine itself: behind a proxy.
        stores: paths of stores that may be looked into.
        runs: folders of traced runs, or folders of such.

    Raises:
        ValueError: the address is none, or others could look without a token.
    """

    listen: str = DEFAULT_LISTEN
    token_file: Path | None = None
    public: bool = False
    names: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"--listen is {self.listen!r}, expected HOST:PORT, as 127.0.0.1:8470")
        if not self.is_loopback and (self.public or self.token_file is None):
            why = "--public: everybody" if self.public else "others"
            raise ValueError(
                f"--listen {self.listen}: {why} could look; give --token-file, so that people can sign in"
            )
        for name in self.names:
            if not name or any(c in name for c in "/:@ \t") or not name.isprintable():
                raise ValueError(f"--name is {name!r}, expected the name of a host, without a port")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        host = self.address[0]
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def needs_token(self) -> bool:
        """Whether looking takes a token."""
        return not self.public

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that requests may call this server by; None: any."""
        named = frozenset(name.lower() for name in self.names)
        if self.is_loopback:
            return LOOPBACK | {self.address[0]} | named
        return named or None
