"""Agent: looks at its node now and then, hears what processes tell, and keeps the account of each job.

One thread: `run` waits for messages and for the time of the next look. It harms nobody: a sensor that fails
is left out, and a history that cannot be written waits. What it costs is measured at each look, and looks
come less often where they cost too much.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pwd
import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.machine.gpu import GPUs
from headrace.machine.sensors import all_sensors
from headrace.telemetry.accounts import Accounts, Now, Seen
from headrace.telemetry.groups import job_groups
from headrace.telemetry.ledger import NODE, Ledger
from headrace.telemetry.metrics import Told as Labelled
from headrace.telemetry.metrics import figures_of
from headrace.telemetry.pace import Pace, next_interval
from headrace.telemetry.processes import Processes
from headrace.telemetry.told import told_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.base.causes import Cause
    from headrace.control.metrics import Figures
    from headrace.machine.sensors import Sensor, SensorKey
    from headrace.telemetry.listening import Listener
    from headrace.telemetry.writing import HistoryWriter

__all__ = ["Agent", "AgentOptions"]

_log = logging.getLogger("headrace.agent")

WRITE_S: Final = 1.0
"""However often it looks, it writes no more often."""

HEAR_S: Final = 0.25

URGENT_S: Final = 0.5
"""A process has said its last word: its job, and this agent with it, may be gone within seconds."""

NODE_ASKED_S: Final = 10.0
"""The node daemon is asked no more often than this why jobs wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent looks at, and how often."""

    node: str
    """What this node is called."""

    job: str = ""
    """The one job to look at; '': all that it can see."""

    pace: Pace = field(default_factory=Pace)

    root: Path = Path("/")
    """Where `proc` and `sys` are."""


class Agent:
    """Looks, hears, adds up, writes.

    Args:
        options: see there.
        listener: hears processes; None: nobody tells.
        writer: keeps the history; None: there is none, only Prometheus.
        gpus: looks at GPUs.
        ask_node: gives the seconds that jobs waited for the node daemon so far, by job and cause.
    """

    def __init__(
        self,
        options: AgentOptions,
        listener: Listener | None = None,
        writer: HistoryWriter | None = None,
        gpus: GPUs | None = None,
        ask_node: Callable[[], Mapping[str, Mapping[Cause, float]]] = dict,
    ) -> None:
        self._options = options
        self.listener = listener
        self._writer = writer
        self._gpus = gpus if gpus is not None else GPUs()
        self._ask_node = ask_node
        self._node_stalls: Mapping[str, Mapping[Cause, float]] = {}
        self._node_asked_s = 0.0
        self._sensors: list[Sensor] = all_sensors(options.root)
        self._processes = Processes(options.root, options.job, options.node)
        self._users: dict[int, str] = {}
        self.ledger = Ledger()
        self.accounts = Accounts(
            self.ledger,
            self._user_of,
            writer.tellers() if writer is not None else None,
            writer.last_seen() if writer is not None else None,
            options.pace.busy_s,
        )
        self._labelled = Labelled()
        if listener is not None:
            listener.state = self.state
        self._said: set[str] = set()
        self._ending = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked: collections.deque[Callable[[], None]] = collections.deque()
        self._looked_s = time.monotonic()
        self._written_s = time.monotonic()
        self._look_cpu_s = 0.0
        self.interval_s = options.pace.busy_s
        self.looks = self.messages = self.refused = 0
        self.metrics = ""
        """Where Prometheus is served; ''."""

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Look and hear until `stop`; then look once more, and write."""
        poll, asked = select.poll(), select.poll()
        for each in (poll, asked):
            each.register(self._wake, select.POLLIN)
        if self.listener is not None:
            poll.register(self.listener.socket, select.POLLIN)
        self.look()
        while not self._ending:
            left_s = self._looked_s + self.interval_s - time.monotonic()
            if poll.poll(max(0.0, left_s) * 1e3):
                # More may come at once: waking up costs more than hearing.
                self._answer()
                if not self._ending:
                    asked.poll(HEAR_S * 1e3)
            self._receive()
            self._answer()
            self._catch_up()
            if self.listener is not None and self.listener.waiting:
                # A job has begun while there was nothing to look at.
                soon = URGENT_S if self.listener.urgent else self._pause_s(1)
                self.interval_s = min(self.interval_s, soon)
            if time.monotonic() >= self._looked_s + self.interval_s:
                self.look()
        self.look()
        self.write(now=True)

    def stop(self) -> None:
        """Let `run` end. From any thread, and from signal handlers."""
        self._ending = True
        os.eventfd_write(self._wake, 1)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run a function in the loop. From any thread."""
        self._asked.append(function)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Let go of GPUs and descriptors. Listener and history are whose they are."""
        self._gpus.close()
        os.close(self._wake)

    def _receive(self) -> None:
        if self.listener is not None:
            self.listener.receive()

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._asked:
            self._asked.popleft()()

    # -- a look -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at everything once, and write if it is time."""
        began_cpu_s = time.thread_time()
        mono_s = time.monotonic()
        seconds, self._looked_s = mono_s - self._looked_s, mono_s
        now = Now(mono_s, time.time())
        self._receive()
        self._hear()
        grown = self._sense(now)
        gpus = self._gpus.read()
        self._say_once("gpu", self._gpus.why)
        for gpu in gpus:
            for name, value in (
                ("gpu_busy", gpu.busy),
                ("gpu_memory_bytes", gpu.memory_bytes),
                ("gpu_power_w", gpu.power_w),
            ):
                if value is not None:
                    self.ledger.gauges[name, str(gpu.index)] = value
        jobs = self._processes.look()
        seen = Seen(
            jobs,
            job_groups(self._options.root) if jobs else {},
            gpus,
            self._processes.job_of,
            grown.get(("io_pressure_s", "some")),
            _busiest(grown),
        )
        self._explain_node(now)
        self.accounts.look(seen, seconds, now)
        if mono_s - self._written_s >= WRITE_S:
            self.write()
        self.looks += 1
        cost_s = time.thread_time() - began_cpu_s
        self._look_cpu_s += (cost_s - self._look_cpu_s) * (1.0 if self.looks <= 2 else 0.2)
        self.interval_s = self._pause_s(self.accounts.running)

    def _pause_s(self, jobs: int) -> float:
        return next_interval(self._options.pace, jobs, self._look_cpu_s)

    def write(self, *, now: bool = False) -> bool:
        """Write what waits into the history; whether nothing waits any more."""
        self._written_s = time.monotonic()
        if self._writer is None:
            self.ledger.take()
            return True
        return self._writer.write(self.ledger, now=now)

    def _catch_up(self) -> None:
        """Bring the history up to date for whoever asked for that; `run` waits `HEAR_S` before."""
        if self.listener is None or not self.listener.asked_to_write:
            return
        if self.listener.waiting:
            self.look()
        self.write()
        self.listener.written()

    def _hear(self) -> None:
        """Count what processes told."""
        for heard in self.listener.take() if self.listener is not None else ():
            try:
                told = told_of(heard.message, heard.pid, heard.uid)
            except ValueError as e:
                self.refused += 1
                self._say_once("message", f"a message of process {heard.pid} is none: {e}")
                continue
            identity = told.identity
            elsewhere = identity.node not in ("", self._options.node)
            if elsewhere or self._options.job not in ("", identity.job_id, identity.alias):
                continue
            self.messages += 1
            self.accounts.told(told, Now(heard.mono_s, heard.unix_s))

    def _sense(self, now: Now) -> dict[SensorKey, float]:
        """Ask each sensor; what grew."""
        found: dict[SensorKey, float] = {}
        self.ledger.gauges.clear()
        for sensor in self._sensors:
            try:
                reading = sensor.read()
            except Exception:  # noqa: BLE001 - one of them is nobody else's trouble
                _log.exception("%s: is left out from now on", sensor.name)
                self._sensors = [each for each in self._sensors if each is not sensor]
                continue
            self._say_once(sensor.name, sensor.why)
            found |= reading.grown
            self.ledger.gauges |= reading.gauges
        for (name, label), amount in found.items():
            self.ledger.add(NODE, name, amount, now.unix_s, label)
        return found

    def _explain_node(self, now: Now) -> None:
        """Ask the node daemon why jobs waited for it, if any did."""
        soon = now.mono_s - self._node_asked_s < NODE_ASKED_S and not self._ending
        if soon or not self.accounts.asking():
            return
        self._node_asked_s = now.mono_s
        try:
            stalls = self._ask_node()
        except Exception as e:  # noqa: BLE001 - whatever ails the daemon, the agent goes on
            self._say_once("node", f"the node daemon does not say why jobs wait: {e}")
            stalls = {}
        shares = {
            job: {
                cause: max(0.0, total - self._node_stalls.get(job, {}).get(cause, 0.0))
                for cause, total in causes.items()
            }
            for job, causes in stalls.items()
        }
        self._node_stalls = stalls or self._node_stalls
        self.accounts.explain_node(shares, now)

    def _user_of(self, uid: int) -> str:
        if uid not in self._users:
            try:
                self._users[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._users[uid] = str(uid)
        return self._users[uid]

    def _say_once(self, name: str, why: str) -> None:
        """Why something is not there: the first time only."""
        if why and name not in self._said:
            self._said.add(name)
            _log.info("%s: %s", name, why)

    # -- what it tells ----------------------------------------------------------------------------

    def figures(self) -> Figures:
        """For Prometheus. In the loop's thread."""
        state = {
            "jobs": float(self.accounts.running),
            "look_seconds": self._look_cpu_s,
            "interval_seconds": self.interval_s,
            "messages_total": float(self.messages),
            "refused_total": float(self.refused + self.accounts.refused),
            "waiting_entries": float(self.ledger.waiting),
        }
        return figures_of(
            self.ledger, self.accounts.facts(), state, self._options.node, self._labelled
        )

    def state(self) -> dict[str, Any]:
        """For whoever asks. In the loop's thread."""
        writer = self._writer
        return {
            "pid": os.getpid(),
            "node": self._options.node,
            "job": self._options.job,
            "metrics": self.metrics,
            "history": str(writer.path) if writer is not None else "",
            "history_error": writer.why if writer is not None else "",
            "looks": self.looks,
            "interval_s": self.interval_s,
            "look_cpu_s": round(self._look_cpu_s, 6),
            "jobs": sorted(
                job for job, facts in self.accounts.facts().items() if facts is not None
            )[:64],
            "running": self.accounts.running,
            "messages": self.messages,
            "refused": self.refused + self.accounts.refused,
            "without": sorted(self._said),
        }


def _busiest(grown: dict[SensorKey, float]) -> str:
    """The file system whose client waited longest, or, where none tells that, read most."""
    waits: dict[str, float] = {}
    reads: dict[str, float] = {}
    for (name, label), amount in grown.items():
        if name in ("fs_read_s", "fs_metadata_s"):
            waits[label] = waits.get(label, 0.0) + amount
        elif name == "fs_read_bytes":
            reads[label] = reads.get(label, 0.0) + amount
    for found in (waits, reads):
        most = max(found, key=lambda label: found[label], default="")
        if most and found[most] > 0.0:
            return most
    disk = sum(amount for (name, _), amount in grown.items() if name == "disk_read_bytes")
    return "local disk" if disk > 0.0 else ""
