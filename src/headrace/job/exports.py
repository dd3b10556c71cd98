"""NodeExports: what one node exports: its share's directory and volume, and copies of other shares."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from headrace.closing import Closing
from headrace.fabric.subsystem import Subsystem
from headrace.fabric.target import Target, TargetOptions
from headrace.job.engine import identity_of

if TYPE_CHECKING:
    from headrace.job.local_file import LocalFile

__all__ = ["NodeExports"]

_ASSOCIATIONS_MAX = 4096
"""Each process of each node has one with every target."""


class NodeExports(Closing):
    """A target with one subsystem, for this session's hosts only.

    Args:
        session: of the job.
        node: our rank.
        host: the address to listen on.
        port: 0 takes a free one.

    Raises:
        FabricError: the address cannot be listened on.
    """

    def __init__(self, session: str, node: int, host: str, port: int = 0) -> None:
        # A server that is started again is another subsystem: nobody must take its files for the old.
        self.nqn = f"nqn.2026-11.io.headrace:job:{session}:node-{node}:{secrets.token_hex(4)}"
        self.subsystem = Subsystem(self.nqn, hosts=[identity_of(session).nqn])
        self.target = Target(
            [self.subsystem], (host, port), TargetOptions(associations_max=_ASSOCIATIONS_MAX)
        )

    @property
    def address(self) -> str:
        """`host:port` as URLs have it."""
        host, port = self.target.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def add(self, file: LocalFile, written: int | None = None) -> tuple[int, str]:
        """Exports a file; only its first `written` bytes if given. Returns its NSID and URL."""
        namespace = self.subsystem.add(file.path)
        if written is not None:
            self.subsystem.exports.set_written(namespace.nsid, written)
        return namespace.nsid, f"nvme+tcp://{self.address}/{self.nqn}?ns={namespace.nsid}"

    def set_written(self, nsid: int, nbytes: int) -> None:
        """Moves a namespace's mark."""
        self.subsystem.exports.set_written(nsid, nbytes)

    def close(self) -> None:
        """Serves no longer."""
        self.target.close()
        self.subsystem.close()
