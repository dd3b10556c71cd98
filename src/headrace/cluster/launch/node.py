"""The launcher's process on a node: a guard, and below it the supervisor that does the work.

    srun (or the first node)
      guard          does nothing but wait
        supervisor   stage, node daemon, agent, ranks

Both adopt orphans, so each sees all that was started below it. If the supervisor is killed, the guard ends
what is left and removes the node's folder; if the guard is, the kernel tells the supervisor, which does. If
both are killed at once, the kernel kills the supervisor's children with it, and the next launch on the node
removes the files (`node_folder.sweep`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cluster.launch.node_folder import NodeFolder, sweep
from headrace.cluster.launch.processes import adopt_orphans, die_with_parent, end_descendants
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MARK_VARIABLE", "SPEC_VARIABLE", "NodeSpec", "main"]

SPEC_VARIABLE = "HEADRACE_LAUNCH_SPEC"
MARK_VARIABLE = "HEADRACE_LAUNCH"
_GRACE_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What the first node tells the others when it starts them.

    Attributes:
        addresses: of the first node, to be tried in turn.
        port: it listens on.
        token: the launch's secret, and the mark of all its processes.
        nodes: names, in the order of their indices.
        job: its id.
        ranks: of each node.
        gpus: of each node that the ranks get.
        local: the folder on the local disk; None: as the node says.
        connect_s: how long to try to reach the first node.
        silence_s: after which the other end is lost.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    nodes: tuple[str, ...]
    job: str
    ranks: int
    gpus: int
    local: str | None
    connect_s: float
    silence_s: float

    def to_json(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> NodeSpec:
        """What `to_json` gave.

        Raises:
            LaunchError: it is something else.
        """
        try:
            fields = json.loads(text)
            for name in ("addresses", "nodes"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as e:
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
        name = environment.get("SLURMD_NODENAME")
        if name in self.nodes:
            return self.nodes.index(name)
        return int(environment.get("HEADRACE_NODE_RANK") or environment.get("SLURM_NODEID") or 0)

    def local_folder(self, environment: Mapping[str, str]) -> Path:
        """The folder on this node's local disk."""
        given = self.local or environment.get("SLURM_TMPDIR") or environment.get("TMPDIR")
        return Path(given or "/tmp").absolute()  # noqa: S108 - a folder of ours is made in it


def main() -> int:
    """Be the launcher of this node; returns its exit status."""
    spec = NodeSpec.parse(os.environ.pop(SPEC_VARIABLE, ""))
    # Descendants inherit the mark; a copy in the command line's environment is all they need.
    os.environ[MARK_VARIABLE] = spec.token
    local = spec.local_folder(os.environ)
    # Whatever is sent to all of this node's processes is the supervisor's to answer.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    index = spec.index(os.environ)
    try:
        left = sweep(local)
        folder = NodeFolder(local, f"{spec.token[:12]}-{index}", spec.mark)
    except LaunchError as e:
        return _say_failure(spec, index, e)
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        os._exit(_supervise(spec, index, folder, left, guard))
    status = _wait(pid)
    ended, _ = end_descendants(_GRACE_S)
    folder.remove()
    if os.WIFSIGNALED(status):
        sys.stderr.write(
            f"headrace launch: node {spec.nodes[index]}: the supervisor was ended by signal "
            f"{os.WTERMSIG(status)}; {ended} processes of this launch were ended.\n"
        )
    return os.waitstatus_to_exitcode(status) & 0xFF


def _wait(pid: int) -> int:
    """The supervisor's status; orphans that come to us meanwhile are reaped."""
    while True:
        with contextlib.suppress(InterruptedError):
            found, status = os.waitpid(-1, 0)
            if found == pid:
                return status


def _supervise(
    spec: NodeSpec, index: int, folder: NodeFolder, left: Sequence[object], guard: int
) -> int:
    from headrace.cluster.launch.supervisor import GUARD_GONE, Supervisor

    code = 3
    try:
        adopt_orphans()
        signal.signal(GUARD_GONE, signal.SIG_IGN)
        supervisor = Supervisor(spec, index, folder, left)
        die_with_parent(GUARD_GONE)
        if os.getppid() != guard:
            supervisor.guard_gone = True
        code = supervisor.run()
    except BaseException as e:  # noqa: BLE001 - the guard cleans up; the log must say what it was
        import traceback

        traceback.print_exception(e)
        code = 4
    finally:
        end_descendants(_GRACE_S)
        folder.remove()
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _say_failure(spec: NodeSpec, index: int, error: LaunchError) -> int:
    """Tells the first node why this one cannot take part."""
    from headrace.cluster.launch.supervisor import connect

    line = connect(spec)
    if line is not None:
        line.send(
            "hello", token=spec.token, node=index, failure=error.message, next=error.next_step
        )
        until_s = time.monotonic() + 5.0
        while not line.gone and time.monotonic() < until_s:  # until it has been read
            line.take()
            time.sleep(_POLL_S)
        line.close()
    else:
        sys.stderr.write(f"headrace launch: node {spec.nodes[index]}: {error}\n")
    return 3


if __name__ == "__main__":
    sys.exit(main())
