"""Nodes: the first node's view of all of them: who has come, what each said last, who is lost."""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.closing import Closing
from headrace.cluster.launch.line import Line
from headrace.cluster.launch.page import RankNote
from headrace.cluster.launch.ranks import NodeFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.cluster.launch.line import Message

__all__ = ["NodeState", "Nodes"]

_BEAT_S = 2.0
_STRANGERS_MAX = 64
_STRANGER_S = 10.0


@dataclass(slots=True)
class NodeState:
    """One node.

    Attributes:
        name: of the node.
        index: of it.
        line: to it; None until it has come.
        hello: its first message.
        heard_clock_s: our clock when it came.
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
    line: Line | None = None
    hello: Message = field(default_factory=dict)
    heard_clock_s: float = 0.0
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
        return self.line is not None and not self.lost and self.gone is None


class Nodes(Closing):
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
        self._strangers: list[tuple[Line, float]] = []
        self._beat_s = 0.0

    def send(self, kind: str, **fields: Any) -> None:
        """To all that can be spoken to."""
        for node in self.all:
            if node.there and node.line is not None:
                node.line.send(kind, **fields)

    def take(self, wait_s: float) -> Iterator[tuple[NodeState, Message]]:
        """Waits a little, and yields what has come."""
        lines = [n.line for n in self.all if n.there and n.line is not None]
        ears: list[socket.socket | Line] = [self._listener, *lines]
        ears += [line for line, _ in self._strangers]
        select.select(ears, [], [], wait_s)
        self._accept()
        yield from self._introductions()
        for node in self.all:
            if node.line is None or node.lost or node.gone is not None:
                continue
            for message in node.line.take():
                self._note(node, message)
                yield node, message
            if node.gone is None and not node.lost:
                if node.line.gone:
                    node.lost = node.line.gone
                elif node.line.silent_s() > self._silence_s:
                    node.lost = f"it has said nothing for {self._silence_s:g} s"
        if time.monotonic() - self._beat_s > _BEAT_S:
            self._beat_s = time.monotonic()
            self.send("beat")

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while len(self._strangers) < _STRANGERS_MAX + len(self.all):
                connection, _ = self._listener.accept()
                self._strangers.append((Line(connection), time.monotonic()))

    def _introductions(self) -> Iterator[tuple[NodeState, Message]]:
        left = []
        for line, since_s in self._strangers:
            messages = line.take()
            if messages:
                node = self._known(messages[0])
                if node is None:
                    line.close()
                    continue
                node.line, node.hello, node.heard_clock_s = line, messages[0], time.time()
                for message in messages:
                    self._note(node, message)
                    yield node, message
            elif line.gone or time.monotonic() - since_s > _STRANGER_S:
                line.close()
            else:
                left.append((line, since_s))
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
        return node if node.line is None else None

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
        for line in [*(n.line for n in self.all if n.line), *(s for s, _ in self._strangers)]:
            line.close()
