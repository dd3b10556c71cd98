"""The launcher's process on a node: a guard, and below it the supervisor that does the work.

    srun (or the first node)
      guard          does nothing but wait
        supervisor   stage, node daemon, agent, ranks

Both adopt orphans, so each sees all that was started below it. If the supervisor is killed, the guard ends
what is left and removes the node's folder; if the guard is, the kernel tells the supervisor, which does. If
both are killed at once, the kernel kills the supervisor's children with it, and the next launch on the node
removes the files (`folders.sweep`).

The supervisor is one thread and one loop: messages of the first node, ends of children, signals. It decides
nothing but this: without the first node, or without its guard, it ends all that it started.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import headrace
from headrace.base.peers import interfaces
from headrace.cluster.launch.folders import GpuClaim, NodeFolder, local_folder, sweep
from headrace.cluster.launch.nodes import (
    BEAT_S,
    MARK_VARIABLE,
    SIGNALS,
    SPEC_VARIABLE,
    NodeSpec,
    connect,
)
from headrace.cluster.launch.place import GPU_VARIABLES, visible_gpus
from headrace.cluster.launch.plan import NodeFacts, commands_for, helper_commands
from headrace.cluster.launch.stop_page import PAGE_VARIABLE, SETTLE_S, StopPage
from headrace.cluster.manifest import hardware
from headrace.cluster.processes import (
    adopt_orphans,
    catches,
    descendants,
    die_with_parent,
    end_descendants,
    reap,
    send,
)
from headrace.errors import LaunchError
from headrace.machine.host import start_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.cluster.launch.nodes import Message, NodeConnection


# -- the network ---------------------------------------------------------------------------------------

_TRIES = 200
_LOW, _HIGH = 12000, 32000
"""Below the range from which the kernel takes ports for outgoing connections (32768 on): a port that is
free now cannot be taken by one of these before a rank listens on it."""


def free_ports(count: int) -> list[int]:
    """Ports of this node on which nobody listens, chosen at random so that launches do not meet."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(_TRIES * count):
            port = random.randrange(_LOW, _HIGH)  # noqa: S311 - no secret
            taken = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"no {count} free ports between {_LOW} and {_HIGH}")


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address; None: none has."""
    known = (name for name, own in interfaces().items() if own == address)
    return next(known, "lo" if address.startswith("127.") else None)


# -- the supervisor ------------------------------------------------------------------------------------

GUARD_GONE = signal.SIGUSR2
_TICK_S = 0.05
_HELPERS_S = 5.0
_ALONE_S = 1.0
_LOG_BYTES = 2000


class Supervisor:
    """Runs the node of this index."""

    def __init__(self, spec: NodeSpec, index: int, folder: NodeFolder) -> None:
        self.guard_gone = False
        self._spec, self._index, self._folder = spec, index, folder
        self._name = spec.nodes[index]
        self._signals: list[int] = []
        self._connection: NodeConnection
        self._page = StopPage(spec.launch.plan.ranks_per_node)
        self._gpus: dict[str, str] = {}
        self._helpers: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._one_each = False
        self._news = [(0, 0)] * spec.launch.plan.ranks_per_node
        self._beat_s = 0.0
        self._held_s = float("inf")
        self._over = False
        self._tidied = (0, 0)
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.signal(GUARD_GONE, lambda *_: setattr(self, "guard_gone", True))

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the first node says that it is over, or is lost; the exit status."""
        spec = self._spec
        with contextlib.ExitStack() as parts:
            parts.enter_context(contextlib.closing(self._page))
            # Before the first node, which waits for no stranger's words, is connected to.
            prepared = self._prepare(parts)
            if (connection := connect(spec)) is None:
                sys.stderr.write(
                    f"headrace launch: node {self._name}: the first node does not answer at "
                    f"{' or '.join(spec.addresses)}, port {spec.port}.\n"
                )
                return 3
            self._connection = parts.enter_context(contextlib.closing(connection))
            connection.send(
                "hello", token=spec.token, node=self._index, address=connection.own_address,
                interface=interface_of(connection.own_address), version=headrace.__version__,
                clock_s=time.time(), **prepared,
            )  # fmt: skip
            while not self._over:
                wait([connection.fileno()], _TICK_S)
                for message in connection.receive():
                    self._do(message)
                self._look_after_children()
                while self._signals:
                    connection.send("signal", number=self._signals.pop(0))
                self._beat()
                if time.monotonic() >= self._held_s:
                    self._held_s = float("inf")
                    connection.send("held", furthest=self._page.furthest())
                if not self._over and (why := self._alone()):
                    connection.send("lost", why=why)
                    self._end_ranks(_ALONE_S)
                    self._end()
                    if not self.guard_gone:
                        sys.stderr.write(f"headrace launch: node {self._name}: {why}.\n")
                    return 3
        return 0

    def _alone(self) -> str:
        """Why this node is on its own; "" while it is not."""
        if self.guard_gone:
            return "the guard was killed"
        if self._connection.gone:
            return f"the first node is lost: {self._connection.gone}"
        silence_s = self._spec.launch.options.silence_s
        if self._connection.silent_s > silence_s:
            return f"the first node has said nothing for {silence_s:g} s"
        return ""

    def _prepare(self, parts: contextlib.ExitStack) -> dict[str, Any]:
        """What this node has for the launch, or why it cannot take part: fields of its first message."""
        spec, plan = self._spec, self._spec.launch.plan
        variable, there = visible_gpus(os.environ) or (GPU_VARIABLES[0], ())
        there = there or tuple(map(str, range(plan.gpus_per_node)))
        try:
            left = sweep(local_folder(spec.launch.options.local, os.environ))
            self._folder.make()
            owner = f"{spec.variables['HEADRACE_JOB_ID']}-{self._name}"
            claim = GpuClaim(self._folder.path.parent, owner, plan.gpus_per_node, there)
            parts.enter_context(contextlib.closing(claim))
            ports = free_ports(plan.ranks_per_node + 1)
        except (LaunchError, OSError) as e:
            return {"failure": getattr(e, "message", str(e)), "next": getattr(e, "next_step", None)}
        if claim.gpus:
            self._gpus = {variable: ",".join(claim.gpus)}
        return {"ports": ports, "left": left, "hardware": hardware()}

    def _beat(self) -> None:
        if time.monotonic() - self._beat_s > BEAT_S:
            self._beat_s = time.monotonic()
            news = [(note.resumed, note.leaving) for note in self._page.notes()]
            if news != self._news:
                self._news = news
                self._say_ranks()
            self._connection.send("beat")

    # -- what the first node says -----------------------------------------------------------------

    def _do(self, message: Message) -> None:
        match message["kind"]:
            case "helpers":
                self._start_helpers()
            case "ranks":
                facts = [NodeFacts(*each) for each in message["facts"]]
                self._start_ranks(facts, message["settings"])
            case "hold":
                self._page.hold()
                self._held_s = time.monotonic() + SETTLE_S
            case "stop_at":
                self._page.stop_at(message["check"])
            case "forward":
                # To processes that have said what they do with it; others would die of it.
                for pid, began in descendants(except_for=self._helpers).items():
                    if catches(pid, message["number"]):
                        send(pid, began, message["number"])
            case "end_ranks":
                self._end_ranks(message["grace_s"])
            case "end":
                self._end(stage_knows=message["stage_knows"])

    def _variables(self) -> dict[str, str]:
        """Of all processes of this node: by which they find each other."""
        own = {"HEADRACE_RUNTIME_DIR": str(self._folder.path / "run"), "HEADRACE_NODE": self._name}
        return self._spec.variables | own

    def _start_helpers(self) -> None:
        folder, meeting = self._folder, self._spec.variables.get("HEADRACE_JOB_FOLDER", "")
        commands = helper_commands(
            self._spec.launch, self._index, meeting, folder.path, socket_fits=folder.socket_fits
        )
        for name, command in commands.items():
            with folder.log(name).open("ab") as log:
                self._helpers[_start(command, self._variables(), log.fileno())] = name

    def _start_ranks(self, facts: Sequence[NodeFacts], settings: dict[str, str]) -> None:
        everywhere = self._spec.variables | settings
        mine = commands_for(self._spec.launch, self._index, facts, everywhere)
        common = everywhere | self._variables() | self._gpus
        common["HEADRACE_JOB_LOCAL"] = str(self._folder.path / "local")
        # mpirun starts ranks on other nodes, whose pages they could not open.
        if self._spec.launch.options.framework != "mpi" or len(facts) == 1:
            common[PAGE_VARIABLE] = self._page.address
        ranks = zip(mine.commands, mine.environments, strict=True)
        self._one_each = all("LOCAL_RANK" in own for own in mine.environments)
        for number, (command, own) in enumerate(ranks):
            try:
                self._ranks[_start(command, {**common, **own})] = number
            except OSError as e:
                self._connection.send("failure", what=f"{command[0]}: {e.strerror}", code=127)
        self._say_ranks()

    # -- children ---------------------------------------------------------------------------------

    def _look_after_children(self) -> None:
        for pid, status in reap().items():
            code = os.waitstatus_to_exitcode(status)
            if pid in self._helpers:
                name = self._helpers.pop(pid)
                self._connection.send("helper_ended", name=name, code=code, log=self._log_of(name))
            elif pid in self._ranks:
                number = self._ranks.pop(pid)
                self._ended[number] = code
                if self._one_each:  # else they are torchrun's or mpirun's
                    self._page.slots[number].end(code)
                self._say_ranks()

    def _say_ranks(self, *, quiet: bool = False) -> None:
        """How the ranks are; `quiet`: they were ended, and nothing of them is left."""
        codes = {str(number): code for number, code in self._ended.items()}
        self._connection.send(
            "ranks", running=len(self._ranks), codes=codes, notes=self._page.notes(), quiet=quiet
        )

    def _log_of(self, name: str) -> str:
        with contextlib.suppress(OSError), self._folder.log(name).open("rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - _LOG_BYTES))
            return f.read().decode(errors="replace")
        return ""

    def _end_ranks(self, grace_s: float) -> None:
        """Ends them first: what they read from is still there."""
        self._tidied = end_descendants(grace_s, self._helpers, lambda _: self._beat())
        self._ranks.clear()
        self._say_ranks(quiet=True)

    def _end(self, *, stage_knows: bool = False) -> None:
        """Ends the helpers, and says what had to be ended, and what could not be."""
        for pid, name in self._helpers.items():
            # Staging that was told of the job's end parts from the other nodes in good order.
            told = stage_knows and name == "stage"
            if not told and (began := start_time(pid)) is not None:
                send(pid, began, signal.SIGINT)
        _, stuck = end_descendants(_HELPERS_S, each=lambda _: self._beat())
        self._folder.remove()
        self._connection.send("gone", ended=self._tidied[0], stuck=self._tidied[1] + stuck)
        self._over = True


def _start(command: Sequence[str], environment: Mapping[str, str], log: int | None = None) -> int:
    """Start a process of the launch; helpers, which have a log, do not end by a scheduler's SIGTERM to all."""

    def before() -> None:
        die_with_parent(signal.SIGKILL)
        # Slurm's --signal goes to every process of a step: who does not know it must not die of it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, GUARD_GONE):
            signal.signal(number, signal.SIG_DFL)
        if log is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    # This process has one thread: nothing can hold a lock that the child needs.
    child = subprocess.Popen(  # noqa: S603
        list(command), env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        stdout=log, stderr=log, start_new_session=True, preexec_fn=before,  # noqa: PLW1509
    )  # fmt: skip
    child.returncode = 0  # we reap by ourselves, all children at once
    return child.pid


# -- the guard -----------------------------------------------------------------------------------------

_GRACE_S = 2.0


def main() -> int:
    """Be the launcher of this node; returns its exit status."""
    spec = NodeSpec.parse(os.environ.pop(SPEC_VARIABLE, ""))
    # Descendants inherit the mark; a copy in the command line's environment is all they need.
    os.environ[MARK_VARIABLE] = spec.token
    # Whatever is sent to all of this node's processes is the supervisor's to answer.
    for number in (*SIGNALS, GUARD_GONE):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    index = spec.index(os.environ)
    local = local_folder(spec.launch.options.local, os.environ)
    folder = NodeFolder(local, f"{spec.token[:12]}-{index}", spec.mark)
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(_supervise(spec, index, folder, guard))
    ended = status = 0
    while ended != pid:  # orphans that come to us meanwhile are reaped
        with contextlib.suppress(InterruptedError):
            ended, status = os.waitpid(-1, 0)
    ended, _ = end_descendants(_GRACE_S)
    folder.remove()
    if os.WIFSIGNALED(status):
        sys.stderr.write(
            f"headrace launch: node {spec.nodes[index]}: the supervisor was ended by signal "
            f"{os.WTERMSIG(status)}; {ended} processes of this launch were ended.\n"
        )
    return os.waitstatus_to_exitcode(status) & 0xFF


def _supervise(spec: NodeSpec, index: int, folder: NodeFolder, guard: int) -> int:
    code = 3
    try:
        adopt_orphans()
        signal.signal(GUARD_GONE, signal.SIG_IGN)
        supervisor = Supervisor(spec, index, folder)
        die_with_parent(GUARD_GONE)
        if os.getppid() != guard:
            supervisor.guard_gone = True
        code = supervisor.run()
    except BaseException as e:  # noqa: BLE001 - the guard cleans up; the log must say what it was
        traceback.print_exception(e)
        code = 4
    finally:
        end_descendants(_GRACE_S)
        folder.remove()
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
