"""Helpers: what runs on each node beside the ranks: staging, the node daemon, the telemetry agent."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, LaunchError
from headrace.telemetry import job_report
from headrace.telemetry.history import default_history

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.cluster.launch.nodes import Message, NodeState
    from headrace.cluster.launch.plan import LaunchOptions


_HEADRACE = (sys.executable, "-c", "from headrace.cli import main; main()")
_WITHOUT = {
    "stage": "its samples are read from a replica or from the source",
    "node": "loaders read directly",
    "agent": "its figures are missing in the report",
}


def helper_commands(
    options: LaunchOptions, meeting: Path, node: NodeState, nodes: int
) -> dict[str, list[str]]:
    """What a node starts before its ranks, by name; `meeting` is where its nodes meet to stage."""
    commands = {}
    if options.stage:
        sources = [s if "://" in s else str(Path(s).absolute()) for s in options.stage]
        commands["stage"] = [
            *_HEADRACE, "stage", *sources, "--quiet",
            "--meet", str(meeting), "--local", str(Path(node.hello["folder"], "local")),
            "--nodes", str(nodes), "--node-rank", str(node.index),
            "--replicas", str(min(options.replicas, nodes)), "--wait", f"{options.stage_s:g}",
        ]  # fmt: skip
    # The daemon's messages need a package of its own; loaders with plane="node" say so themselves.
    has_daemon = importlib.util.find_spec("msgspec") is not None
    if options.daemon and has_daemon and node.hello["socket_fits"]:
        commands["node"] = [*_HEADRACE, "node", "start", "--foreground"]
    if options.agent:
        commands["agent"] = [*_HEADRACE, "agent"]
    return commands


def helper_variables(node: NodeState) -> dict[str, str]:
    """By which the processes of a node find its helpers."""
    folder = Path(node.hello["folder"])
    return {
        "HEADRACE_RUNTIME_DIR": str(folder / "run"),
        "HEADRACE_JOB_LOCAL": str(folder / "local"),
        "HEADRACE_NODE": node.name,
    }


def helper_end(node: NodeState, message: Message, *, is_needed: bool) -> str:
    """What to say of a helper that has ended by itself, which none should."""
    name, code, log = message["name"], message["code"], message["log"].splitlines()
    why = [line.removeprefix("error: ") for line in log if line.startswith("error: ")][-1:]
    if is_needed:
        steps = [line[8:].strip() for line in log if line.startswith("  next: ")]
        raise LaunchError(
            f"node {node.name}: staging failed: {why[0] if why else f'it ended with status {code}'}",
            next_step=steps[-1] if steps else None,
        )
    text = f"node {node.name}: `headrace {name}` ended with status {code}"
    return f"{': '.join([text, *why])}; {_WITHOUT[name]}"


def report_text(job: str, environment: Mapping[str, str], since_s: float = 0.0) -> str:
    """What the agents have kept of a job since then, for people; "" where that is nothing.

    What was seen earlier is another job's of the same number.
    """
    try:
        return job_report(default_history(environment), job, since_s).text()
    except HeadraceError:  # a job of a second or two: nobody has looked yet
        return ""
