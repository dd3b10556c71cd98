"""The agent as a process: started, found, asked and ended; one of each kind on a node and for a user."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.causes import Cause, cause_of
from headrace.base.job import clean, identity_of
from headrace.errors import NodeError, TelemetryError
from headrace.latch import Latch
from headrace.runtime import SITE_SOCKET, RuntimeFolder, agent_folder, launch, wait_for_end
from headrace.telemetry.agent import Agent, AgentOptions
from headrace.telemetry.listening import Listener, ask_state
from headrace.telemetry.pace import Pace
from headrace.telemetry.place import default_history
from headrace.telemetry.writing import AGE_S, BYTES_MAX, HistoryWriter, file_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.control.metrics import MetricsServer

__all__ = [
    "RunOptions",
    "folder_of",
    "node_name",
    "own_options",
    "run",
    "socket_of",
    "start",
    "stop",
]

_log = logging.getLogger("headrace.agent")

STOP_S: Final = 10.0

_SITE_FOLDER: Final = Path("/run/headrace-agent-root")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `headrace agent start` is told."""

    history: Path | None = None
    """Folder of history files; None: no history is kept."""
    job: str = ""
    """The one job to look at; '': all that can be seen."""
    site: bool = False
    """For all users: listens where everybody can."""
    metrics: str | None = None
    """Where Prometheus is served; None: nowhere."""
    pace: Pace = field(default_factory=Pace)
    age_s: float = AGE_S
    bytes_max: int = BYTES_MAX


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """What this node is called: as the scheduler says, else by its host name."""
    environment = os.environ if environment is None else environment
    given = environment.get("HEADRACE_NODE") or environment.get("SLURMD_NODENAME")
    return clean(given or socket.gethostname().partition(".")[0]) or "node"


def own_options(environment: Mapping[str, str] | None = None) -> RunOptions:
    """What an agent does that is told nothing: within a job it looks at that job."""
    environment = os.environ if environment is None else environment
    identity = identity_of(environment)
    return RunOptions(
        history=default_history(environment), job="" if identity is None else identity.job_id
    )


def folder_of(job: str = "", *, site: bool = False) -> RuntimeFolder:
    """Where an agent rules."""
    return RuntimeFolder(_SITE_FOLDER, "agent", "telemetry agent") if site else agent_folder(job)


def run(folder: RuntimeFolder, options: RunOptions) -> None:
    """Be the agent, until a signal ends it. Then all that was counted is in the history.

    Raises:
        TelemetryError: another agent is there already, or keeps this history.
        HeadraceError: metrics cannot be served.
    """
    ends = Latch()
    agents: list[Agent] = []

    def end(*_: object) -> None:
        ends.set()
        for agent in agents:
            agent.stop()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with _claimed(folder), contextlib.ExitStack() as stack:
            agent = _made(folder, options, stack)
            agents.append(agent)
            metrics = _serve_metrics(agent, options.metrics)
            if metrics is not None:
                stack.callback(metrics.close)
            _log.info("process %d looks at %s", os.getpid(), node_name())
            if ends.is_set():
                agent.stop()
            agent.run()
            _log.info("ends")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _claimed(folder: RuntimeFolder) -> Any:
    try:
        claim = folder.claim()
    except NodeError as e:
        raise TelemetryError(e.message, path=e.path, next_step=e.next_step) from e
    try:
        yield
    finally:
        claim.release()


def _made(folder: RuntimeFolder, options: RunOptions, stack: contextlib.ExitStack) -> Agent:
    node = node_name()
    writer = None
    if options.history is not None:
        path = file_of(options.history, node, options.job)
        writer = HistoryWriter(path, node, age_s=options.age_s, bytes_max=options.bytes_max)
        stack.callback(writer.close)
    sock = folder.socket
    if options.site:
        sock = Path(SITE_SOCKET)
        sock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        sock.unlink(missing_ok=True)
    listener = Listener(sock, public=options.site)
    stack.callback(listener.close)
    agent = Agent(
        AgentOptions(node=node, job=options.job, pace=options.pace),
        listener, writer, ask_node=_node_stalls,
    )  # fmt: skip
    stack.callback(agent.close)
    return agent


def _node_stalls() -> dict[str, dict[Cause, float]]:
    """What this user's node daemon knows of each job's waiting, in seconds by cause.

    Raises:
        FileNotFoundError: none runs.
    """
    from headrace.node.daemon import ask_status
    from headrace.runtime import runtime_folder

    state = ask_status(runtime_folder())
    return {
        job["name"]: {
            cause_of(word, by_node=True): s for word, s in job["totals"]["stall_s"].items()
        }
        for job in state["jobs"]
        if job["totals"] is not None
    }


def _serve_metrics(agent: Agent, address: str | None) -> MetricsServer | None:
    if address is None:
        return None
    from headrace.control.metrics import MetricsServer, address_of, asked, renderer

    render = renderer(lambda: asked(agent.call_soon, agent.figures))
    served = MetricsServer(
        address_of(address), render, lambda: asked(agent.call_soon, lambda: True)
    )
    agent.metrics = str(served.address)
    _log.info("serves metrics at http://%s/metrics", served.address)
    if not served.address.loopback:
        _log.warning("whoever reaches %s can read them: names of jobs too", served.address)
    return served


def start(folder: RuntimeFolder, arguments: Sequence[str], *, site: bool = False) -> dict[str, Any]:
    """Start an agent in the background, and return its state when it looks.

    Raises:
        TelemetryError: one runs already, or it did not come up; the message has the end of its log.
    """
    sock = socket_of(folder, site=site)
    with contextlib.suppress(FileNotFoundError, TimeoutError):
        running = ask_state(sock)["pid"]
        raise TelemetryError(
            f"{folder.path}: a telemetry agent runs already, process {running}.",
            path=str(folder.path),
            next_step="Use it, or stop it first: headrace agent stop.",
        )

    def state() -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError, TimeoutError):
            return ask_state(sock)
        return None

    return launch(folder, arguments, state, TelemetryError)


def socket_of(folder: RuntimeFolder, *, site: bool = False) -> Path:
    """Where an agent listens."""
    return Path(SITE_SOCKET) if site else folder.socket


def stop(folder: RuntimeFolder, *, site: bool = False) -> int:
    """End an agent; returns its process id when it is gone, and the history whole.

    Raises:
        FileNotFoundError: none runs.
        TelemetryError: it does not end in time.
    """
    holder = folder.holder()
    if holder is None:
        raise FileNotFoundError(f"{socket_of(folder, site=site)}: no agent runs")
    pid, pidfd = holder
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not wait_for_end(pidfd, STOP_S):
            raise TelemetryError(
                f"{folder.path}: the agent, process {pid}, does not end within {STOP_S:g} s.",
                path=str(folder.path),
                next_step=f"Kill it (kill -9 {pid}): what it wrote stays whole.",
            )
    finally:
        os.close(pidfd)
    return pid
