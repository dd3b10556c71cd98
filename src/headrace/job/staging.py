"""`staging`: a node's server in a thread of a program, for who has no place for a command of its own."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from headrace.base.job import NodePlace, which_node
from headrace.job.meeting import Meeting, meeting_folder
from headrace.job.server import NodeServer, StageOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

__all__ = ["staging"]


@contextlib.contextmanager
def staging(
    source: Any,
    meet: str | os.PathLike[str] | None = None,
    *,
    nodes: int | None = None,
    node_rank: int | None = None,
    options: StageOptions | None = None,
) -> Iterator[NodeServer]:
    """Stages and serves this node's share while the block runs. Call it in one process of each node.

    Args:
        source: what is staged: whatever `headrace.index` takes, or a store.
        meet: the meeting folder; HEADRACE_JOB_FOLDER if not given.
        nodes: how many; as the launcher says if not given, else 1.
        node_rank: which of them this is.
        options: everything else.

    Yields:
        The server; its `document` says how far it is.

    Raises:
        HeadraceError: what the server met, when the block ends.
    """
    place = which_node(node_rank, nodes) or NodePlace(0, 1)
    failures: list[BaseException] = []
    with NodeServer(source, Meeting(meeting_folder(meet)), place, options) as server:

        def run() -> None:
            try:
                server.run()
            except BaseException as e:  # noqa: BLE001 - raised where the block ends
                failures.append(e)

        thread = threading.Thread(target=run, name="headrace-stage", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stop.set()
            thread.join()
    if failures:
        raise failures[0]
