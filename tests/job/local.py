"""A job whose nodes are threads of this process: for what needs no network and no processes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from headrace.base.job import NodePlace
from headrace.job.meeting import Meeting
from headrace.job.server import NodeServer, StageOptions

if TYPE_CHECKING:
    from pathlib import Path


class LocalJob:
    """`nodes` servers on loopback addresses; `run` stages all of them.

    Args:
        source: what is staged.
        folder: the meeting folder and the local disks.
        nodes: how many.
        options: of `StageOptions`.
    """

    def __init__(self, source: Any, folder: Path, nodes: int = 2, **options: Any) -> None:
        self.meet = folder / "meet"
        self.where = f"headrace://{self.meet}"
        self.meeting = Meeting(self.meet)
        self.failures: list[BaseException] = []
        self.remarks: list[str] = []
        self.servers = []
        for node in range(nodes):
            local = folder / f"disk-{node}"
            local.mkdir(exist_ok=True)
            self.servers.append(
                NodeServer(
                    source if node == 0 else None, self.meeting, NodePlace(node, nodes),
                    StageOptions(local=str(local), address=f"127.0.0.{node + 2}", **options),
                    self.remarks.append,
                )
            )  # fmt: skip

    def each(self, *steps: str) -> LocalJob:
        """All servers take these steps, each in a thread, and end them together."""
        for step in steps:
            threads = [
                threading.Thread(target=self._take, args=(s, step), daemon=True)
                for s in self.servers
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        if self.failures:
            raise self.failures[0]
        return self

    def _take(self, server: NodeServer, step: str) -> None:
        try:
            getattr(server, step)()
        except BaseException as e:  # noqa: BLE001 - the test's thread raises it
            self.failures.append(e)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in reversed(self.servers):
            server.close()
