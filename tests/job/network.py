"""Nodes of a network on one machine: a network namespace each, joined by a bridge in one more.

The namespaces have no names: each lives as long as a process of ours in it, so nothing is left behind,
whatever becomes of the test. Where the system lets us make none (neither as root nor in a user namespace),
the nodes are loopback addresses, and `reason` says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

_SLEEP = ("sleep", "3600")
_NODES_MAX = 4


class Network:
    """`nodes` nodes; each has an address and runs commands."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.reason = ""
        self._holders: list[subprocess.Popen[bytes]] = []
        self._user: list[str] = []
        try:
            self._build()
        except (OSError, subprocess.SubprocessError) as e:
            complaint = getattr(e, "stderr", None)
            self.reason = (
                complaint.decode() if isinstance(complaint, bytes) else str(e)
            ).strip() or repr(e)
            self._end()

    def address(self, node: int) -> str:
        return f"127.0.0.{node + 2}" if self.reason else f"10.99.0.{node + 1}"

    def command(self, node: int) -> list[str]:
        """What stands before a command that node `node` runs."""
        return [] if self.reason else self._within(self._holders[node + 1])

    def close(self) -> None:
        self._end()

    def _build(self) -> None:
        for tool in ("unshare", "nsenter", "ip"):
            if shutil.which(tool) is None:
                raise OSError(f"there is no {tool}")
        if os.geteuid() != 0:
            self._user = ["-U", "--preserve-credentials"]
        hub = self._hold(["unshare", "-rn" if self._user else "-n"], "net")
        inside = self._within(hub)
        self._run(inside, "ip link add bridge0 type bridge")
        self._run(inside, "ip link set bridge0 up")
        enter_user = ["nsenter", "-t", str(hub.pid), *self._user] if self._user else []
        for node in range(self.nodes):
            holder = self._hold([*enter_user, "unshare", "-n"], "net")
            here = self._within(holder)
            self._run(inside, f"ip link add v{node} type veth peer name eth0 netns {holder.pid}")
            self._run(inside, f"ip link set v{node} master bridge0 up")
            self._run(here, f"ip address add 10.99.0.{node + 1}/24 dev eth0")
            self._run(here, "ip link set eth0 up")
            self._run(here, "ip link set lo up")

    def _hold(self, prefix: list[str], kind: str) -> subprocess.Popen[bytes]:
        holder = subprocess.Popen([*prefix, *_SLEEP], stderr=subprocess.PIPE)
        self._holders.append(holder)
        own = Path(f"/proc/self/ns/{kind}").readlink()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if holder.poll() is not None:
                assert holder.stderr is not None
                raise OSError(holder.stderr.read().decode())
            name = Path(f"/proc/{holder.pid}/comm").read_text().strip()
            if name == "sleep" and Path(f"/proc/{holder.pid}/ns/{kind}").readlink() != own:
                return holder
            time.sleep(0.01)
        raise OSError("a namespace was not made within 10 s")

    def _within(self, holder: subprocess.Popen[bytes]) -> list[str]:
        return ["nsenter", "-t", str(holder.pid), *self._user, "-n"]

    @staticmethod
    def _run(inside: list[str], command: str) -> None:
        subprocess.run([*inside, *command.split()], check=True, capture_output=True, timeout=20)

    def _end(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
            if holder.stderr is not None:
                holder.stderr.close()
        self._holders.clear()
