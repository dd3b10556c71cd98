"""Networks between two ends on one machine: loopback, and veth pairs between network namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Network:
    """Where servers listen, and what a command line of each end begins with."""

    name: str
    address: str
    server: tuple[str, ...] = ()
    client: tuple[str, ...] = ()


LOOPBACK = Network("loopback", "127.0.0.1")


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


def _netns(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


@contextlib.contextmanager
def veth() -> Iterator[Network]:
    """Two namespaces, and a veth pair between them. Needs root."""
    tag = f"hrb{os.getpid() % 100_000}"
    with _namespaces([f"{tag}a", f"{tag}b"]) as (one, two):
        _ip("link", "add", "v0", "netns", one, "type", "veth", "peer", "name", "v0", "netns", two)
        for name, address in ((one, "10.77.0.1/24"), (two, "10.77.0.2/24")):
            _ip("-n", name, "addr", "add", address, "dev", "v0")
            _ip("-n", name, "link", "set", "v0", "up")
        yield Network("veth", "10.77.0.1", _netns(one), _netns(two))


@contextlib.contextmanager
def bridged(count: int) -> Iterator[list[Network]]:
    """A namespace for each of `count` nodes, all on one bridge in a namespace of its own."""
    tag = f"hrn{os.getpid() % 100_000}"
    names = [f"{tag}x{i}" for i in range(count)]
    with _namespaces([f"{tag}br", *names]) as (bridge, *nodes):
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        found = []
        for i, node in enumerate(nodes):
            port = f"p{i}"
            peer = ("peer", "name", port, "netns", bridge)
            _ip("link", "add", "v0", "netns", node, "type", "veth", *peer)
            _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
            _ip("-n", node, "addr", "add", f"10.78.0.{i + 1}/24", "dev", "v0")
            _ip("-n", node, "link", "set", "v0", "up")
            found.append(Network(f"node {i}", f"10.78.0.{i + 1}", _netns(node), _netns(node)))
        yield found


@contextlib.contextmanager
def _namespaces(names: list[str]) -> Iterator[list[str]]:
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)
