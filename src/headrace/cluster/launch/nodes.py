"""Nodes: the first node of a launch and all of them: how they are started, find each other, and talk.

Under Slurm one job step starts all nodes, beside whatever else runs in the job (`--overlap`); under Ray its
actors do. On Kubernetes the nodes are there, and ask the first one what to run (`ask_for_spec`). Elsewhere each
node is processes of this machine. Messages are JSON, one a line, over TCP: what is launched, what began, ended
or failed, and a sign of life every few seconds. The first message of whoever connects bears the launch's
secret; a line that is no message of ours, or too long, ends the connection.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
import zlib
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.base.peers import same_secret
from headrace.cluster.launch.plan import Launch, NodeFacts, node_command, srun_command
from headrace.cluster.launch.stop_page import RankNote
from headrace.errors import LaunchError
from headrace.machine.host import raise_descriptor_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


# -- a connection --------------------------------------------------------------------------------------

SPEC_VARIABLE = "HEADRACE_LAUNCH_SPEC"
_SPEC_BYTES_MAX = 64 << 20  # of a launch on a million nodes
MARK_VARIABLE = "HEADRACE_LAUNCH"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""By which a job is asked to end or to start again; those that a node gets it hands on to the first one."""

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
        token: the launch's secret, and the mark of all its processes.
        variables: of all processes of the launch.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    launch: Launch
    variables: dict[str, str]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names, in the order of their indices."""
        return self.launch.plan.nodes

    def encode(self) -> str:
        """For the environment, where a variable has 128 KiB: compressed, since it names each node."""
        return base64.b85encode(zlib.compress(msgspec.json.encode(self))).decode()

    @classmethod
    def parse(cls, text: str) -> NodeSpec:
        """What `encode` gave; LaunchError if it is something else."""
        try:
            data = zlib.decompressobj().decompress(base64.b85decode(text), _SPEC_BYTES_MAX)
            return msgspec.json.decode(data, type=cls)
        except (ValueError, zlib.error, msgspec.MsgspecError) as e:
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
        name = environment.get("SLURMD_NODENAME") or environment.get("HEADRACE_NODE_NAME")
        if name in self.nodes:
            return self.nodes.index(name)
        return int(environment.get("HEADRACE_NODE_RANK") or environment.get("SLURM_NODEID") or 0)


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
        """For `wait`."""
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
            except (ValueError, RecursionError):
                message = None
            if not (isinstance(message, dict) and isinstance(message.get("kind"), str)):
                self.gone = self.gone or "it sent what is no message"
                break
            messages.append(message)
        return messages

    @property
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
    until_s = time.monotonic() + spec.launch.options.connect_s
    while True:
        for address in spec.addresses:
            with contextlib.suppress(OSError):
                return NodeConnection(socket.create_connection((address, spec.port), timeout=5.0))
        if time.monotonic() > until_s:
            return None
        time.sleep(_RETRY_S)


JOIN_PORT = 29437
"""Of the first pod of a job on Kubernetes: where the others ask; HEADRACE_JOB_PORT names another."""


def join_port() -> int:
    """The port at which a job's pods ask for their parts of a launch."""
    return int(os.environ.get("HEADRACE_JOB_PORT") or JOIN_PORT)


def ask_for_spec(host: str, name: str, key: str) -> str | None:
    """What the node of this name is to be given in `SPEC_VARIABLE`; None while there is no launch for it."""
    try:
        connection = NodeConnection(socket.create_connection((host, join_port()), timeout=5.0))
    except OSError:
        return None
    connection.send("join", key=key, name=name)
    with contextlib.closing(connection):
        while not connection.gone and connection.silent_s < _STRANGER_S:
            wait([connection.fileno()], _RETRY_S)
            for message in connection.receive():
                if message["kind"] == "spec" and isinstance(message.get("spec"), str):
                    return str(message["spec"])
    return None


# -- all nodes, as the first one knows them ------------------------------------------------------------

BEAT_S = 2.0
_STRANGERS_MAX = 64
_STRANGER_S = 10.0


@dataclass(slots=True)
class NodeState:
    """One node.

    Attributes:
        connection: to it; None until it has come.
        hello: its first message.
        skew_s: how far its clock is ahead of ours.
        lost: why it is; "" while it is not.
        running: commands of ranks that run; None before they were started.
        codes: exit statuses by command, negative where a signal ended it.
        notes: of its ranks.
        held: the furthest check of its ranks, once asked to hold.
        quiet: whether it has ended its ranks when it was told to.
        gone: its last message, when it has ended everything.
    """

    name: str
    index: int
    connection: NodeConnection | None = None
    hello: Message = field(default_factory=dict)
    skew_s: float = 0.0
    lost: str = ""
    running: int | None = None
    codes: dict[str, int] = field(default_factory=dict)
    notes: list[RankNote] = field(default_factory=list)
    held: int | None = None
    quiet: bool = False
    gone: Message | None = None

    @property
    def facts(self) -> NodeFacts:
        """For the ranks' commands."""
        return NodeFacts(self.hello["address"], tuple(self.hello["ports"]))

    @property
    def there(self) -> bool:
        """Whether it can be spoken to."""
        return self.connection is not None and not self.lost and self.gone is None

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message, if it can be spoken to."""
        if self.there and self.connection is not None:
            self.connection.send(kind, **fields)

    @property
    def silent_s(self) -> float:
        """How long nothing has come of it."""
        return 0.0 if self.connection is None else self.connection.silent_s


class LaunchNodes:
    """All nodes of a launch, and the socket that they connect to."""

    def __init__(
        self, names: tuple[str, ...], host: str, token: str, silence_s: float, key: str = ""
    ) -> None:
        """`key`: of a job whose nodes ask for the launch by themselves; they get `invitation`."""
        self.invitation = ""
        self._key = key
        self.all = [NodeState(name, index) for index, name in enumerate(names)]
        self._token = token
        if len(names) + _STRANGERS_MAX > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            raise_descriptor_limit()
        self._silence_s = silence_s
        address = (host, join_port() if key else 0)
        try:
            self._listener = socket.create_server(address, backlog=len(names) + 16)
        except OSError as e:
            raise LaunchError(
                f"Port {address[1]} cannot be listened to: {e.strerror}.",
                next_step="One `headrace launch` at a time runs in a job on Kubernetes.",
            ) from e
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: list[tuple[NodeConnection, float]] = []
        self._beat_s = 0.0

    def send(self, kind: str, **fields: Any) -> None:
        """To all that can be spoken to."""
        for node in self.all:
            node.send(kind, **fields)

    def receive(self, wait_s: float) -> Iterator[tuple[NodeState, Message]]:
        """Waits a little, and yields what has come."""
        lines = [n.connection for n in self.all if n.there and n.connection is not None]
        lines += [stranger for stranger, _ in self._strangers]
        wait([self._listener.fileno(), *(line.fileno() for line in lines)], wait_s)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while len(self._strangers) < _STRANGERS_MAX + len(self.all):
                connected, _ = self._listener.accept()
                self._strangers.append((NodeConnection(connected), time.monotonic()))
        yield from self._introductions()
        for node in self.all:
            if node.connection is None or node.lost or node.gone is not None:
                continue
            for message in node.connection.receive():
                self._note(node, message)
                yield node, message
            if node.gone is None and not node.lost:
                if node.connection.gone:
                    node.lost = node.connection.gone
                elif node.silent_s > self._silence_s:
                    node.lost = f"it has said nothing for {self._silence_s:g} s"
        if time.monotonic() - self._beat_s > BEAT_S:
            self._beat_s = time.monotonic()
            self.send("beat")

    def _introductions(self) -> Iterator[tuple[NodeState, Message]]:
        left = []
        for stranger, since_s in self._strangers:
            messages = stranger.receive()
            if messages and messages[0]["kind"] == "join":
                self._invite(stranger, messages[0])
            elif messages:
                node = self._known(messages[0])
                if node is None:
                    stranger.close()
                    continue
                node.connection, node.hello = stranger, messages[0]
                node.skew_s = messages[0]["clock_s"] - time.time()
                for message in messages:
                    self._note(node, message)
                    yield node, message
            elif stranger.gone or time.monotonic() - since_s > _STRANGER_S:
                stranger.close()
            else:
                left.append((stranger, since_s))
        self._strangers = left

    def _invite(self, stranger: NodeConnection, message: Message) -> None:
        """Answers a node that asks for its part, if it knows the job's secret and has not come before."""
        key, name = str(message.get("key", "")), message.get("name")
        is_ours = self._key and same_secret(key, self._key)
        if is_ours and any(n.name == name and n.connection is None for n in self.all):
            stranger.send("spec", spec=self.invitation)
        stranger.close()

    def _known(self, hello: Message) -> NodeState | None:
        """The node that a first message is of, if it knows the secret and has not come before."""
        token, index = str(hello.get("token", "")), hello.get("node")
        if hello["kind"] != "hello" or not same_secret(token, self._token):
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.all):
            return None
        return self.all[index] if self.all[index].connection is None else None

    def _note(self, node: NodeState, message: Message) -> None:
        match message["kind"]:
            case "ranks":
                node.running, node.codes = message["running"], message["codes"]
                node.notes = [RankNote(*note) for note in message["notes"]]
                node.quiet = message["quiet"]
            case "lost":
                node.lost = message["why"]
            case "held":
                node.held = message["furthest"]
            case "gone":
                node.gone = message

    def close(self) -> None:
        """Hangs up, and listens no longer."""
        self._listener.close()
        for connection in [*(n.connection for n in self.all), *(s for s, _ in self._strangers)]:
            if connection is not None:
                connection.close()


# -- how they are started ------------------------------------------------------------------------------


def start_nodes(spec: NodeSpec) -> list[subprocess.Popen[bytes]]:
    """Starts all nodes' launchers, or what starts them."""
    place = spec.launch.place
    environment, count = {**os.environ, SPEC_VARIABLE: spec.encode()}, str(len(spec.nodes))
    # On Kubernetes the others ask by themselves. A node's name is for readers of `ps`.
    here = spec.nodes[:1] if place.scheduler == "kubernetes" else spec.nodes
    starts = [
        ([*node_command(), name], {"HEADRACE_NODE_RANK": str(index), "HEADRACE_NODES": count})
        for index, name in enumerate(here)
    ]
    if place.scheduler == "slurm":
        if shutil.which("srun") is None:
            raise LaunchError(
                "srun is not found, although SLURM_JOB_ID says that this is a Slurm job.",
                next_step="Load Slurm's module in the script, or add its programs to PATH.",
            )
        # srun reads these as options of its own; what we say must hold.
        for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
                     "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND",
                     "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
                     "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_EXACT"):  # fmt: skip
            environment.pop(name, None)
        if count != environment.get("SLURM_JOB_NUM_NODES"):
            environment.pop("SLURM_GPUS", None)  # of all nodes: a part of them has not so many
        # In the step SLURM_JOB_NAME is the step's own name; agents are to hear the job's.
        environment["HEADRACE_JOB_NAME"] = place.name
        starts = [(srun_command(place, spec.nodes), {})]
    elif place.scheduler == "ray":
        from headrace.cluster.ray.job import step_command  # which stands on this module

        starts = [(step_command(), {})]
    # In sessions of their own: Ctrl-C is for us, we tell the nodes what it means.
    return [
        subprocess.Popen(  # noqa: S603
            command, env=environment | own, stdin=subprocess.DEVNULL, start_new_session=True
        )
        for command, own in starts
    ]  # fmt: skip
