"""Agent: looks at its node now and then, receives what processes report, and keeps the account of each job.

One thread: `Agent.run` waits for messages and for the time of the next look. It harms nobody: a sensor that
fails is left out, and a history that cannot be written waits. What it costs is measured at each look, and
looks come less often where they cost too much.

As a process it is `run`; one of each kind on a node and for a user (`headrace.runtime`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import Cause, cause_of
from headrace.base.job import clean, identity_of
from headrace.base.loop import Loop
from headrace.base.peers import user_name
from headrace.control.prometheus import JobLabels, serve_metrics
from headrace.machine.sensors import GPUs, all_sensors
from headrace.runtime import SITE_SOCKET, RuntimeFolder, agent_folder, end_signals
from headrace.telemetry.accounts import NODE, Accounts, Ledger, NodeShape, Now, Observation
from headrace.telemetry.history import default_history
from headrace.telemetry.messages import JobNotice, Listener, parse_message
from headrace.telemetry.metrics import figures_of
from headrace.telemetry.processes import Processes, job_groups
from headrace.telemetry.writing import AGE_S, BYTES_MAX, HistoryWriter, file_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.control.prometheus import Figures
    from headrace.machine.sensors import Sensor, SensorKey

_log = logging.getLogger("headrace.agent")


IDLE_S: Final = 30.0  # between looks while no job runs
LOOK_MOST_S: Final = 60.0  # between looks, however much one costs

CPU_SHARE: Final = 0.003
"""Of one core, for looking; with receiving, writing and serving it stays below 0.5 %."""


def next_interval(busy_s: float, jobs: int, look_cpu_s: float) -> float:
    """Seconds until the next look; `busy_s` are usual while jobs run."""
    wanted = busy_s if jobs else max(IDLE_S, busy_s)
    return min(max(LOOK_MOST_S, busy_s), max(wanted, look_cpu_s / CPU_SHARE))


WRITE_S: Final = 1.0  # however often it looks, it writes no more often
RECEIVE_S: Final = 0.25  # messages that come within this time are received together

URGENT_S: Final = 0.5
"""A process has sent its last report: its job, and this agent with it, may be gone within seconds."""

LATE_S: Final = 10.0
"""A notice is believed to have been sent so long before it was received, at most."""

NODE_ASKED_S: Final = 10.0  # the node daemon is asked no more often than this why jobs wait for it


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """What this node is called: as the scheduler says, else by its host name."""
    given = environment.get("HEADRACE_NODE") or environment.get("SLURMD_NODENAME")
    return clean(given or socket.gethostname().partition(".")[0]) or "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent looks at, and how it runs: the options of `headrace agent start`."""

    node: str = field(default_factory=node_name)  # what this node is called
    node_why: str = ""  # why that may not be what the scheduler calls it; ''
    shape: tuple[int, int, int] = (0, 0, 0)
    """The node's CPUs, bytes of memory and GPUs, as the scheduler counts; 0: as the machine does."""
    job: str = ""  # the one job to look at; '': all that can be seen
    interval_s: float = 5.0  # between looks while jobs run: Prometheus asks about as often
    root: Path = Path("/")  # where `proc` and `sys` are
    history: Path | None = None  # folder of history files; None: no history is kept
    age_s: float = AGE_S
    bytes_max: int = BYTES_MAX
    site: bool = False  # for all users: listens where everybody can
    metrics: str | None = None  # where Prometheus is served; None: nowhere


class Agent:
    """Looks, receives, adds up, writes."""

    def __init__(
        self,
        options: AgentOptions,
        listener: Listener,
        writer: HistoryWriter | None = None,
        gpus: GPUs | None = None,
        *,
        ask_node: Callable[[], Mapping[str, Mapping[Cause, float]]] = dict,
        loop: Loop | None = None,
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
        self._nvml_gpus = 0
        self.ledger = Ledger()
        reports, last_seen = (
            (None, None) if writer is None else (writer.reports(), writer.last_seen())
        )
        self.accounts = Accounts(
            self.ledger, functools.cache(user_name), reports, last_seen, options.interval_s
        )
        self._labels = JobLabels()
        listener.state = self.state
        self._logged: set[str] = set()
        self._log_once("node's name", options.node_why)
        self.loop = loop or Loop()
        self._looked_s = self._written_s = time.monotonic()
        self._look_cpu_s = 0.0
        self.interval_s = options.interval_s
        self.looks = self.messages = self.refused = 0
        self.metrics = ""  # where Prometheus is served; ''

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Look and receive until the loop is stopped; then look once more, and write."""
        self.loop.register(self.listener.socket, self._arrived)
        self.look()
        while not self.loop.stopping:
            self.loop.wait(max(0.0, self._looked_s + self.interval_s - time.monotonic()))
            self.listener.receive()
            self._catch_up()
            if self.listener.waiting:
                # A job has begun while there was nothing to look at.
                soon = URGENT_S if self.listener.urgent else self._pause_s(1)
                self.interval_s = min(self.interval_s, soon)
            if time.monotonic() >= self._looked_s + self.interval_s:
                self.look()
        self.look()
        if self._options.job:
            self.accounts.end_all(Now(time.monotonic(), time.time()))
        self.write(now=True)

    def _arrived(self, _: int) -> None:
        """More may come at once: waking up costs more than receiving."""
        self.loop.unregister(self.listener.socket)
        if not self.loop.stopping:
            self.loop.wait(RECEIVE_S)
        self.loop.register(self.listener.socket, self._arrived)

    def close(self) -> None:
        """Let go of GPUs and descriptors. Listener and history are whose they are."""
        self._gpus.close()
        self.loop.close()

    # -- a look -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at everything once, and write if it is time."""
        began_cpu_s = time.thread_time()
        mono_s = time.monotonic()
        seconds, self._looked_s = mono_s - self._looked_s, mono_s
        now = Now(mono_s, time.time())
        self._receive_reports()
        grown = self._read_sensors(now)
        gpus = self._gpus.read()
        self._log_once("gpu", self._gpus.why)
        for gpu in gpus:
            for name in ("busy", "memory_bytes", "power_w"):
                if (value := getattr(gpu, name)) is not None:
                    self.ledger.gauges[f"gpu_{name}", str(gpu.index)] = value
        jobs = self._processes.look()
        if self._processes.elsewhere:
            names = ", ".join(self._processes.elsewhere)
            self._log_once("others' jobs", f"jobs of {names} are left out: this is {self.node}")
        # A GPU may fall off the bus; the node had it.
        self._nvml_gpus = max(self._nvml_gpus, len(gpus))
        memory_bytes = int(self.ledger.gauges.get(("memory_bytes", ""), 0.0))
        machine = (os.cpu_count() or 1, memory_bytes, self._nvml_gpus)
        shape = tuple(a or b for a, b in zip(self._options.shape, machine, strict=True))
        node = Observation(
            jobs, job_groups(self._options.root) if jobs else {}, gpus, self._processes.job_of,
            grown.get(("io_pressure_s", "some")), _busiest(grown), NodeShape(*shape),
        )  # fmt: skip
        self._explain_node(now)
        self.accounts.observe(node, seconds, now)
        if mono_s - self._written_s >= WRITE_S:
            self.write()
        self.looks += 1
        cost_s = time.thread_time() - began_cpu_s
        self._look_cpu_s += (cost_s - self._look_cpu_s) * (1.0 if self.looks <= 2 else 0.2)
        self.interval_s = self._pause_s(len(self.accounts.running))
        if self.accounts.expecting(mono_s):
            self.interval_s = min(self.interval_s, URGENT_S)

    @property
    def node(self) -> str:
        """What this node is called."""
        return self._options.node

    def _pause_s(self, jobs: int) -> float:
        return next_interval(self._options.interval_s, jobs, self._look_cpu_s)

    def write(self, *, now: bool = False) -> bool:
        """Write what waits into the history; whether nothing waits any more."""
        self._written_s = time.monotonic()
        if self._writer is None:
            self.ledger.take()
            return True
        return self._writer.write(self.ledger, now=now)

    def _catch_up(self) -> None:
        """Bring the history up to date for whoever asked for that; `run` waits `RECEIVE_S` before."""
        if not self.listener.asked_to_write:
            return
        if self.listener.waiting:
            self.look()
        self.write()
        self.listener.written()

    def _receive_reports(self) -> None:
        self.listener.receive()
        for datagram in self.listener.take():
            try:
                report = parse_message(datagram.message, datagram.pid, datagram.uid)
            except ValueError as e:
                self.refused += 1
                self._log_once("message", f"a message of process {datagram.pid} is none: {e}")
                continue
            identity = report.identity
            elsewhere = identity.node not in ("", self.node)
            if elsewhere or self._options.job not in ("", identity.job_id, identity.alias):
                continue
            self.messages += 1
            at = Now(datagram.mono_s, datagram.unix_s)
            if isinstance(report, JobNotice):
                # It was sent some time before it was received.
                late_s = min(LATE_S, max(0.0, at.unix_s - report.at_s))
                self.accounts.notice(report, Now(at.mono_s - late_s, at.unix_s - late_s))
            else:
                self.accounts.report(report, at)

    def _read_sensors(self, now: Now) -> dict[SensorKey, float]:
        """Read each sensor; what grew."""
        grown: dict[SensorKey, float] = {}
        self.ledger.gauges.clear()
        for sensor in self._sensors:
            try:
                reading = sensor.read()
            except Exception:  # noqa: BLE001 - one of them is nobody else's trouble
                _log.exception("%s: is left out from now on", sensor.name)
                self._sensors = [each for each in self._sensors if each is not sensor]
                continue
            self._log_once(sensor.name, sensor.why)
            grown |= reading.grown
            self.ledger.gauges |= reading.gauges
        for (name, label), amount in grown.items():
            self.ledger.add(NODE, name, amount, now.unix_s, label)
        return grown

    def _explain_node(self, now: Now) -> None:
        soon = now.mono_s - self._node_asked_s < NODE_ASKED_S and not self.loop.stopping
        if soon or not self.accounts.waiting_for_node():
            return
        self._node_asked_s = now.mono_s
        try:
            stalls = self._ask_node()
        except Exception as e:  # noqa: BLE001 - whatever ails the daemon, the agent goes on
            self._log_once("node", f"the node daemon does not say why jobs wait: {e}")
            stalls = {}
        before = self._node_stalls
        shares = {
            job: {c: max(0.0, s - before.get(job, {}).get(c, 0.0)) for c, s in causes.items()}
            for job, causes in stalls.items()
        }
        self._node_stalls = stalls or before
        self.accounts.explain_node(shares, now)

    def _log_once(self, name: str, why: str) -> None:
        """Log why something is not there: the first time only."""
        if why and name not in self._logged:
            self._logged.add(name)
            _log.info("%s: %s", name, why)

    # -- what it serves ---------------------------------------------------------------------------

    def figures(self) -> Figures:
        """For Prometheus. In the loop's thread."""
        state = {
            "jobs": len(self.accounts.running), "look_seconds": self._look_cpu_s,
            "interval_seconds": self.interval_s, "messages_total": self.messages,
            "refused_total": self.refused + self.accounts.refused,
            "waiting_entries": self.ledger.waiting,
        }  # fmt: skip
        facts, labels = self.accounts.facts(), self._labels
        return figures_of(self.ledger, facts, state, self.node, labels)

    def state(self) -> dict[str, Any]:
        """For whoever asks. In the loop's thread."""
        writer, accounts = self._writer, self.accounts
        return {
            "pid": os.getpid(), "node": self.node, "node_why": self._options.node_why, "job": self._options.job,
            "metrics": self.metrics, "history": str(writer.path) if writer is not None else "",
            "history_error": writer.why if writer is not None else "", "looks": self.looks,
            "interval_s": self.interval_s, "look_cpu_s": round(self._look_cpu_s, 6),
            "jobs": sorted(accounts.running)[:64], "running": len(accounts.running),
            "ended": len(accounts.facts()) - len(accounts.running),
            "messages": self.messages, "refused": self.refused + accounts.refused,
            "elsewhere": list(self._processes.elsewhere), "without": sorted(self._logged),
        }  # fmt: skip


def _busiest(grown: dict[SensorKey, float]) -> str:
    """The file system whose client waited longest, or, where none counts that, read most."""
    waits: dict[str, float] = {}
    reads: dict[str, float] = {}
    for (name, label), amount in grown.items():
        if name in ("fs_read_s", "fs_metadata_s"):
            waits[label] = waits.get(label, 0.0) + amount
        elif name == "fs_read_bytes":
            reads[label] = reads.get(label, 0.0) + amount
    for amounts in (waits, reads):
        most = max(amounts, key=lambda label: amounts[label], default="")
        if most and amounts[most] > 0.0:
            return most
    disk = sum(amount for (name, _), amount in grown.items() if name == "disk_read_bytes")
    return "local disk" if disk > 0.0 else ""


_SITE_FOLDER: Final = Path("/run/headrace-agent-root")


def own_options(environment: Mapping[str, str] = os.environ) -> AgentOptions:
    """The options of an agent that is given none: within a job it looks at that job."""
    identity = identity_of(environment)
    return AgentOptions(
        history=default_history(environment), job="" if identity is None else identity.job_id
    )


def folder_of(job: str = "", *, site: bool = False) -> RuntimeFolder:
    """The folder of an agent."""
    return RuntimeFolder(_SITE_FOLDER, "agent") if site else agent_folder(job)


def socket_of(folder: RuntimeFolder, *, site: bool = False) -> Path:
    """Where an agent listens."""
    return Path(SITE_SOCKET) if site else folder.socket


def run(folder: RuntimeFolder, options: AgentOptions) -> None:
    """Be the agent, until a signal ends it. Then all that was counted is in the history.

    Raises TelemetryError if another agent is there already, or keeps this history, and HeadraceError if
    metrics cannot be served.
    """
    loop = Loop()
    before = {number: signal.signal(number, lambda *_: loop.stop()) for number in end_signals()}
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(folder.claim().release)
            writer = None
            if options.history is not None:
                path = file_of(options.history, options.node, options.job)
                writer = HistoryWriter(
                    path, options.node, age_s=options.age_s, bytes_max=options.bytes_max
                )
                stack.callback(writer.close)
            sock = socket_of(folder, site=options.site)
            if options.site:
                sock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                sock.unlink(missing_ok=True)
            listener = Listener(sock, public=options.site)
            stack.callback(listener.close)
            agent = Agent(options, listener, writer, ask_node=_node_stalls, loop=loop)
            stack.callback(agent.close)
            if options.metrics is not None:
                server = serve_metrics(
                    options.metrics, loop.call_soon, agent.figures, lambda figures: figures
                )
                stack.callback(server.close)
                agent.metrics = str(server.address)
                _log.info("serves metrics at http://%s/metrics", server.address)
                if not server.address.loopback:
                    _log.warning("whoever reaches %s can read names of jobs, too", server.address)
            _log.info("process %d looks at %s", os.getpid(), options.node)
            agent.run()
            _log.info("ends")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _node_stalls() -> dict[str, dict[Cause, float]]:
    """What this user's node daemon knows of each job's waiting, in seconds by cause.

    Raises FileNotFoundError if none runs.
    """
    from headrace.node.daemon import ask_status
    from headrace.runtime import runtime_folder

    jobs = (job for job in ask_status(runtime_folder())["jobs"] if job["totals"] is not None)
    return {
        job["name"]: {cause_of(w, by_node=True): s for w, s in job["totals"]["stall_s"].items()}
        for job in jobs
    }
