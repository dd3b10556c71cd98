"""Nodes: the first node's view of all of them: who has come, what each said last, who is lost.

Under Slurm one job step starts all of them, beside whatever else runs in the job (`--overlap`). Elsewhere each
node is processes of this machine.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.cluster.launch.connection import SPEC_VARIABLE, NodeConnection
from headrace.cluster.launch.ranks import NodeFacts, node_command, srun_command
from headrace.cluster.launch.stop_page import RankNote
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.cluster.launch.connection import Message, NodeSpec
    from headrace.cluster.launch.plan import JobPlace


_BEAT_S = 2.0
_STRANGERS_MAX = 64
_STRANGER_S = 10.0


@dataclass(slots=True)
class NodeState:
    """One node.

    Attributes:
        name: of the node.
        index: of it.
        connection: to it; None until it has come.
        hello: its first message.
        met_clock_s: our clock when it came.
        lost: why it is; "" while it is not.
        running: commands of ranks that run; None before they were started.
        codes: exit statuses by command, negative where a signal ended it.
        notes: of its ranks.
        held: the furthest check of its ranks, once asked to hold.
        quiet: whether it has ended its ranks when it was told to.
        gone: its last message, when it has ended everything.
        hardware: what it says it has.
    """

    name: str
    index: int
    connection: NodeConnection | None = None
    hello: Message = field(default_factory=dict)
    met_clock_s: float = 0.0
    lost: str = ""
    running: int | None = None
    codes: dict[str, int] = field(default_factory=dict)
    notes: list[RankNote] = field(default_factory=list)
    held: int | None = None
    quiet: bool = False
    gone: Message | None = None
    hardware: dict[str, Any] | None = None

    @property
    def facts(self) -> NodeFacts:
        """For the ranks' commands."""
        return NodeFacts(self.name, self.hello["address"], tuple(self.hello["ports"]))

    @property
    def there(self) -> bool:
        """Whether it can be spoken to."""
        return self.connection is not None and not self.lost and self.gone is None


class LaunchNodes:
    """All nodes of a launch, and the socket that they connect to.

    Args:
        names: in the order of their indices.
        host: to listen on; "" for all addresses.
        token: whoever connects must know.
        silence_s: after which a node is lost.

    Attributes:
        port: that was taken.
    """

    def __init__(self, names: tuple[str, ...], host: str, token: str, silence_s: float) -> None:
        self.all = [NodeState(name, index) for index, name in enumerate(names)]
        self._token = token
        self._silence_s = silence_s
        self._listener = socket.create_server((host, 0), backlog=len(names) + 16)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: list[tuple[NodeConnection, float]] = []
        self._beat_s = 0.0

    def send(self, kind: str, **fields: Any) -> None:
        """To all that can be spoken to."""
        for node in self.all:
            if node.there and node.connection is not None:
                node.connection.send(kind, **fields)

    def receive(self, wait_s: float) -> Iterator[tuple[NodeState, Message]]:
        """Waits a little, and yields what has come."""
        lines = [n.connection for n in self.all if n.there and n.connection is not None]
        sockets: list[socket.socket | NodeConnection] = [self._listener, *lines]
        sockets += [stranger for stranger, _ in self._strangers]
        select.select(sockets, [], [], wait_s)
        self._accept()
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
                elif node.connection.silent_s() > self._silence_s:
                    node.lost = f"it has said nothing for {self._silence_s:g} s"
        if time.monotonic() - self._beat_s > _BEAT_S:
            self._beat_s = time.monotonic()
            self.send("beat")

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while len(self._strangers) < _STRANGERS_MAX + len(self.all):
                connected, _ = self._listener.accept()
                self._strangers.append((NodeConnection(connected), time.monotonic()))

    def _introductions(self) -> Iterator[tuple[NodeState, Message]]:
        left = []
        for stranger, since_s in self._strangers:
            messages = stranger.receive()
            if messages:
                node = self._known(messages[0])
                if node is None:
                    stranger.close()
                    continue
                node.connection, node.hello, node.met_clock_s = stranger, messages[0], time.time()
                for message in messages:
                    self._note(node, message)
                    yield node, message
            elif stranger.gone or time.monotonic() - since_s > _STRANGER_S:
                stranger.close()
            else:
                left.append((stranger, since_s))
        self._strangers = left

    def _known(self, hello: Message) -> NodeState | None:
        """The node that a first message is of, if it knows the secret and has not come before."""
        if hello["kind"] != "hello" or not hmac.compare_digest(
            str(hello.get("token", "")), self._token
        ):
            return None
        index = hello.get("node")
        if not isinstance(index, int) or not 0 <= index < len(self.all):
            return None
        node = self.all[index]
        return node if node.connection is None else None

    def _note(self, node: NodeState, message: Message) -> None:
        kind = message["kind"]
        if kind == "rank_ends" and not node.quiet:
            node.running, node.codes = message["running"], message["codes"]
        elif kind == "ranks_over":
            node.running = 0
            node.quiet = True
        elif kind == "lost":
            node.lost = message["why"]
        elif kind == "held":
            node.held = message["furthest"]
        elif kind == "facts":
            node.hardware = message["hardware"]
        elif kind == "gone":
            node.gone = message
        if notes := message.get("notes"):
            node.notes = [RankNote(n[0], bool(n[1]), *n[2:]) for n in notes]

    def close(self) -> None:
        """Hangs up, and listens no longer."""
        self._listener.close()
        for each in [
            *(n.connection for n in self.all if n.connection),
            *(s for s, _ in self._strangers),
        ]:
            each.close()


# -- how they are started ------------------------------------------------------------------------------

_TERMINATE_S = 5.0


class NodeStarts:
    """Starts all nodes' launchers.

    Args:
        place: of the job.
        spec: for all of them.

    Raises:
        LaunchError: srun is missing.
    """

    def __init__(self, place: JobPlace, spec: NodeSpec) -> None:
        environment = {**os.environ, SPEC_VARIABLE: spec.to_json()}
        self._processes: list[subprocess.Popen[bytes]] = []
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
            if str(len(spec.nodes)) != environment.get("SLURM_JOB_NUM_NODES"):
                environment.pop("SLURM_GPUS", None)  # of all nodes: a part of them has not so many
            # In the step SLURM_JOB_NAME is the step's own name; agents are to hear the job's.
            environment["HEADRACE_JOB_NAME"] = place.name
            self._start(srun_command(place, spec.nodes), environment)
            return
        for index in range(len(spec.nodes)):
            own = {"HEADRACE_NODE_RANK": str(index), "HEADRACE_NODES": str(len(spec.nodes))}
            self._start(node_command(), environment | own)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        # In a session of its own: Ctrl-C is for us, we tell the nodes what it means.
        self._processes.append(
            subprocess.Popen(  # noqa: S603
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        )  # fmt: skip

    def ended(self) -> list[int]:
        """The exit statuses of those that have ended."""
        return [code for p in self._processes if (code := p.poll()) is not None]

    @property
    def all_ended(self) -> bool:
        """Whether none runs any more."""
        return len(self.ended()) == len(self._processes)

    def close(self, seconds: float = 10.0) -> None:
        """Waits for their ends; whoever does not end is ended, and with it what it started."""
        until_s = time.monotonic() + seconds
        for number in ("", "terminate", "kill"):
            for process in self._processes:
                if number and process.poll() is None:
                    getattr(process, number)()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until_s - time.monotonic()))
            if self.all_ended:
                return
            until_s = time.monotonic() + _TERMINATE_S
