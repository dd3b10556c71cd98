"""Address: where the other nodes reach this one's target."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["own_address"]

_DISCARD = 9
_ANYWHERE = "192.0.2.1"
"""Reserved for documentation: nobody is there, but a route to it is one to the outside."""


def own_address(nodes: int, toward: str | None = None) -> str:
    """The address of this node that others can reach.

    Args:
        nodes: of the job; a job of one node stays on loopback.
        toward: another node's address, if one is known: the way there begins at ours.
    """
    if nodes == 1:
        return "127.0.0.1"
    if toward is not None and (found := _from(toward)):
        return found
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            host = str(address[0])
            if not host.startswith("127.") and host != "::1" and "%" not in host:
                return host
    return _from(_ANYWHERE) or "127.0.0.1"


def _from(toward: str) -> str | None:
    """The address that packets to `toward` carry. Nothing is sent."""
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect((toward, _DISCARD))
        return str(s.getsockname()[0])
    return None
