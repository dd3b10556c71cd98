"""Where agents of a node listen: one folder for each user's, one for the site's, one for each job's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.runtime.folder import RuntimeFolder, runtime_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SITE_SOCKET", "agent_folder", "agent_sockets", "checked"]

SITE_SOCKET: Final = "/run/headrace-agent/socket"
"""Of an agent that root runs for all users."""


def agent_folder(job: str = "", environment: Mapping[str, str] | None = None) -> RuntimeFolder:
    """The folder of this user's agent: that of the node daemon with `-agent` at its end.

    Args:
        job: an agent of one job has a folder of its own.
        environment: defaults to `os.environ`.
    """
    node = runtime_folder(environment).path
    of_job = "".join(c if c.isalnum() else "_" for c in job)[:64]
    name = f"{node.name}-agent-{of_job}" if of_job else f"{node.name}-agent"
    return RuntimeFolder(node.with_name(name), "agent", "telemetry agent")


def agent_sockets(job: str, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Where agents that want to hear of a job may listen."""
    given = (os.environ if environment is None else environment).get("HEADRACE_AGENT_SOCKET")
    if given:
        return (given,)
    folders = agent_folder("", environment), agent_folder(job, environment)
    return (*(str(folder.socket) for folder in folders), SITE_SOCKET)


def checked(path: str) -> bool:
    """Whether what listens at `path` is ours or root's: nobody else is told how a job fares."""
    try:
        found = Path(path).parent.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        return False
    return not found.st_mode & 0o022
