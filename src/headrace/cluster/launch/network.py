"""Network: addresses, interfaces and free ports of this node."""

from __future__ import annotations

import contextlib
import fcntl
import random
import socket
import struct

__all__ = ["free_ports", "interface_of"]

_SIOCGIFADDR = 0x8915
_TRIES = 200
_LOW, _HIGH = 12000, 32000
"""Below the range from which the kernel takes ports for outgoing connections (32768 on): a port that is
free now cannot be taken by one of these before a rank listens on it."""


def free_ports(count: int) -> list[int]:
    """Ports of this node on which nobody listens, chosen at random so that launches do not meet.

    Raises:
        OSError: none is free.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(_TRIES * count):
            port = random.randrange(_LOW, _HIGH)  # noqa: S311 - no secret
            taken = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports between {_LOW} and {_HIGH}")


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address; None: none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else None
