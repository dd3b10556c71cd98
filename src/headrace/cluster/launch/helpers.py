"""Helpers: what runs on each node beside the ranks: staging, the node daemon, the telemetry agent."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, JobError, LaunchError
from headrace.job.meeting import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.cluster.launch.connection import Message
    from headrace.cluster.launch.nodes import LaunchNodes, NodeState
    from headrace.cluster.launch.plan import LaunchOptions
    from headrace.cluster.launch.report import LaunchReport

    Remark = Callable[[str], object]


# -- the agent's report --------------------------------------------------------------------------------


def has_agent() -> bool:
    """Whether this installation has the telemetry agent."""
    try:
        return find_spec("headrace.telemetry.report") is not None
    except ModuleNotFoundError:
        return False


def report_text(job: str, environment: Mapping[str, str], since_s: float = 0.0) -> str:
    """What the agents have kept of a job, for people; "" where that is nothing.

    Args:
        job: as the processes of the job were told (HEADRACE_JOB_ID).
        environment: says where the history is.
        since_s: Unix seconds; what was seen earlier is another job's of the same number.
    """
    if not has_agent():
        return ""
    history = import_module("headrace.telemetry.history").default_history(environment)
    try:
        return str(import_module("headrace.telemetry").job_report(history, job, since_s).text())
    except HeadraceError:  # a job of a second or two: nobody has looked yet
        return ""


# -- helpers -------------------------------------------------------------------------------------------

_HEADRACE = (sys.executable, "-c", "from headrace.cli import main; main()")


class Helpers:
    """Starts them, and judges their ends.

    Args:
        options: of the launch.
        meeting: the folder in which the nodes meet to stage.
        nodes: all of them.
    """

    def __init__(self, options: LaunchOptions, meeting: Path, nodes: LaunchNodes) -> None:
        self._options = options
        self._meeting = Meeting(meeting)
        self._nodes = nodes

    def start(self, common: Mapping[str, str]) -> None:
        """On all nodes."""
        for node in self._nodes.all:
            folder = Path(node.hello["folder"])
            environment = {**common, "HEADRACE_RUNTIME_DIR": str(folder / "run")}
            environment["HEADRACE_NODE"] = node.name
            for name, command in self._commands(node, folder).items():
                assert node.connection is not None
                node.connection.send("helper", name=name, command=command, environment=environment)

    def _commands(self, node: NodeState, folder: Path) -> dict[str, list[str]]:
        commands = {}
        if self._options.stage:
            commands["stage"] = [
                *_HEADRACE, "stage", *map(_absolute, self._options.stage), "--quiet",
                "--meet", str(self._meeting.folder), "--local", str(folder / "local"),
                "--nodes", str(len(self._nodes.all)), "--node-rank", str(node.index),
                "--replicas", str(min(self._options.replicas, len(self._nodes.all))),
                "--wait", f"{self._options.stage_s:g}",
            ]  # fmt: skip
        # The daemon's messages need a package of its own; loaders with plane="node" say so themselves.
        has_daemon = importlib.util.find_spec("msgspec") is not None
        if self._options.daemon and has_daemon and node.hello["socket_fits"]:
            commands["node"] = [*_HEADRACE, "node", "start", "--foreground"]
        if self._options.agent and has_agent():
            commands["agent"] = [*_HEADRACE, "agent"]
        return commands

    def variables(self, node: NodeState) -> dict[str, str]:
        """By which the ranks of a node find its helpers."""
        folder = Path(node.hello["folder"])
        return {
            "HEADRACE_RUNTIME_DIR": str(folder / "run"),
            "HEADRACE_JOB_LOCAL": str(folder / "local"),
            "HEADRACE_NODE": node.name,
        }

    @property
    def ready(self) -> bool:
        """Whether ranks can open what is staged."""
        if not self._options.stage:
            return True
        try:
            return self._meeting.job() is not None
        except JobError:
            return False

    def ended(self, node: NodeState, message: Message, remark: Remark, *, begun: bool) -> None:
        """One has ended by itself, which none should.

        Args:
            node: where.
            message: of the node.
            remark: told, where the ranks can go on without it.
            begun: whether ranks run already.

        Raises:
            LaunchError: the ranks cannot begin without it.
        """
        name, why = message["name"], _why(message["log"])
        if name == "stage" and not begun and not self.ready:
            raise LaunchError(
                f"node {node.name}: staging failed: {why or 'it ended with status ' + str(message['code'])}",
                next_step=_next_step(message["log"]),
            )
        goes_on = {
            "stage": "its samples are read from a replica or from the source",
            "node": "loaders read directly",
            "agent": "its figures are missing in the report",
        }[name]
        remark(
            f"node {node.name}: `headrace {name}` ended with status {message['code']}"
            f"{': ' + why if why else ''}; {goes_on}"
        )

    def count(self, report: LaunchReport) -> None:
        """What was staged, while the nodes still say it."""
        if not self._options.stage:
            return
        for document in self._meeting.nodes().values():
            report.staged_samples += document.ready
            report.staged_bytes += document.written
            report.source_bytes += document.source_bytes

    def end(self) -> None:
        """Tells staging that the job is over, so that its nodes part in good order."""
        head = self._meeting.head() if self._options.stage else None
        if head is not None:
            self._meeting.end(str(head["session"]))


def _absolute(source: str) -> str:
    return source if "://" in source else str(Path(source).absolute())


def _why(log: str) -> str:
    """The error that a command of ours printed last."""
    lines = [line for line in log.splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ") if lines else ""


def _next_step(log: str) -> str | None:
    lines = [line.strip() for line in log.splitlines() if line.startswith("  next: ")]
    return lines[-1].removeprefix("next: ") if lines else None
