"""Network: bytes received and sent by each interface, from /proc/net/dev.

Interfaces of containers and bridges are left out: their bytes pass a real one too, or no wire at all.
RDMA passes none of these; its ports count in words of 4 bytes, below /sys/class/infiniband.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.job import clean
from headrace.machine.counters import Growth
from headrace.machine.sensors import Key, Reading, lines_of, number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Network"]

INTERFACES_MAX = 64

_VIRTUAL = ("lo", "veth", "docker", "br-", "virbr", "cni", "flannel", "cali", "tap", "tun")


class Network:
    """Bytes of each interface and port."""

    name = "network"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/net/dev"
        self._ports = root / "sys/class/infiniband"
        self._growth = Growth()
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        found: dict[Key, float] = {}
        for line in lines_of(self._path)[2:]:
            name, colon, rest = line.rpartition(":")
            words = rest.split()
            if not colon or len(words) < 16 or len(found) >= 2 * INTERFACES_MAX:
                continue
            interface = clean(name.strip())
            received, sent = number(words[0]), number(words[8])
            if interface.startswith(_VIRTUAL) or received is None or sent is None:
                continue
            found["network_received_bytes", interface] = received
            found["network_sent_bytes", interface] = sent
        found |= self._rdma()
        self.why = "" if found else f"{self._path} names no interface with a wire"
        return Reading(self._growth.since(found))

    def _rdma(self) -> dict[Key, float]:
        found: dict[Key, float] = {}
        for folder in sorted(self._ports.glob("*/ports/*/counters"))[:INTERFACES_MAX]:
            port = clean(f"{folder.parts[-4]}/{folder.parts[-2]}")
            for file, name in (("port_rcv_data", "received"), ("port_xmit_data", "sent")):
                words = number(next(iter(lines_of(folder / file)), ""))
                if words is not None:
                    found[f"network_{name}_bytes", port] = 4 * words
        return found
