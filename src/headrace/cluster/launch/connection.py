"""Connection: messages between the first node of a launch and the others, and how a node finds the first one.

Messages are JSON, one a line, over TCP: what is launched, what began, ended or failed, and a sign of life every
few seconds. The first message of whoever connects bears the launch's secret; a line that is no message of ours,
or too long, ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping


SPEC_VARIABLE = "HEADRACE_LAUNCH_SPEC"
MARK_VARIABLE = "HEADRACE_LAUNCH"
Message = dict[str, Any]
_BYTES_MAX = 4 << 20
_PIECE_BYTES = 1 << 16
_SEND_S = 5.0
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What the first node tells the others when it starts them, in `SPEC_VARIABLE`.

    Attributes:
        addresses: of the first node, to be tried in turn.
        port: it listens on.
        token: the launch's secret, and the mark of all its processes.
        nodes: names, in the order of their indices.
        job: its id.
        ranks: of each node.
        gpus: of each node that the ranks get.
        local: the folder on the local disk; None: as the node says.
        connect_s: how long to try to reach the first node.
        silence_s: after which the other end is lost.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    nodes: tuple[str, ...]
    job: str
    ranks: int
    gpus: int
    local: str | None
    connect_s: float
    silence_s: float

    def to_json(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> NodeSpec:
        """What `to_json` gave.

        Raises:
            LaunchError: it is something else.
        """
        try:
            fields = json.loads(text)
            for name in ("addresses", "nodes"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as e:
            raise LaunchError(
                f"{SPEC_VARIABLE} cannot be understood: {e}.",
                next_step="`headrace launch` sets it; do not start this program yourself.",
            ) from e

    @property
    def mark(self) -> str:
        """As every process of the launch has it in its environment."""
        return f"{MARK_VARIABLE}={self.token}"

    def index(self, environment: Mapping[str, str]) -> int:
        """Which node this is."""
        name = environment.get("SLURMD_NODENAME")
        if name in self.nodes:
            return self.nodes.index(name)
        return int(environment.get("HEADRACE_NODE_RANK") or environment.get("SLURM_NODEID") or 0)

    def local_folder(self, environment: Mapping[str, str]) -> Path:
        """The folder on this node's local disk."""
        given = self.local or environment.get("SLURM_TMPDIR") or environment.get("TMPDIR")
        return Path(given or "/tmp").absolute()  # noqa: S108 - a folder of ours is made in it


class NodeConnection:
    """One end of a connection. Never waits for the other end, but to send.

    Attributes:
        gone: why there is no other end any more; "" while there is.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connected
        self._rest = b""
        self._received_s = time.monotonic()
        self.gone = ""

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """Of this end: by it the other one can reach this node."""
        return str(self._socket.getsockname()[0])

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message, if there is somebody to read it."""
        if self.gone:
            return
        try:
            self._socket.settimeout(_SEND_S)
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as e:
            self.gone = e.strerror or str(e) or "it does not read"

    def receive(self) -> list[Message]:
        """The messages that have come; none is waited for."""
        while not self.gone:
            try:
                self._socket.settimeout(0)
                piece = self._socket.recv(_PIECE_BYTES)
            except BlockingIOError:
                break
            except OSError as e:
                self.gone = e.strerror or str(e)
                break
            if not piece:
                self.gone = "the connection ended"
                break
            self._received_s = time.monotonic()
            self._rest += piece
            if len(self._rest) > _BYTES_MAX:
                self.gone = f"it sent a line of more than {_BYTES_MAX} bytes"
        *lines, self._rest = self._rest.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not (isinstance(message, dict) and isinstance(message.get("kind"), str)):
                self.gone = self.gone or "it sent what is no message"
                break
            messages.append(message)
        return messages

    def silent_s(self) -> float:
        """How long nothing has come."""
        return time.monotonic() - self._received_s

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()
        self.gone = self.gone or "closed"


def connect(spec: NodeSpec) -> NodeConnection | None:
    """A connection to the first node; None if it cannot be reached in time."""
    until_s = time.monotonic() + spec.connect_s
    while True:
        for address in spec.addresses:
            with contextlib.suppress(OSError):
                return NodeConnection(socket.create_connection((address, spec.port), timeout=5.0))
        if time.monotonic() > until_s:
            return None
        time.sleep(_RETRY_S)
