"""GpuClaim: which of a node's GPUs are this launch's, so that two launches of one job do not share one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.base.files import lock_path
from headrace.closing import Closing
from headrace.cluster.launch.node_folder import base_folder
from headrace.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["GpuClaim", "visible_gpus"]

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_gpus(environment: Mapping[str, str], count: int) -> tuple[str, tuple[str, ...]]:
    """The variable that says which GPUs a process sees, and what it says; else the first `count`."""
    for name in _VARIABLES:
        if environment.get(name):
            words = tuple(w.strip() for w in environment[name].split(",") if w.strip())
            return name, words[: words.index("-1")] if "-1" in words else words
    return _VARIABLES[0], tuple(str(i) for i in range(count))


class GpuClaim(Closing):
    """Some of a node's GPUs, held by locks that the kernel lets go of with this process.

    Args:
        local: the node's local folder.
        owner: of the GPUs: job and node.
        wanted: how many.
        there: their names, as the variable has them.

    Attributes:
        gpus: ours.

    Raises:
        LaunchError: fewer are free.
    """

    def __init__(self, local: Path, owner: str, wanted: int, there: Sequence[str]) -> None:
        self.gpus: list[str] = []
        self._held: list[tuple[Path, int]] = []
        base = base_folder(local)
        for gpu in there:
            if len(self.gpus) == wanted:
                break
            name = "".join(c if c.isalnum() else "-" for c in f"gpu-{owner}-{gpu}")
            if (fd := lock_path(base / f"{name}.lock")) is not None:
                self.gpus.append(gpu)
                self._held.append((base / f"{name}.lock", fd))
        if len(self.gpus) < wanted:
            free = len(self.gpus)
            self.close()
            another = ": another `headrace launch` of this job has the others" if there else ""
            raise LaunchError(
                f"{free} of this node's {len(there)} GPUs are free, expected {wanted}{another}.",
                next_step="Wait for it, or give each launch its share: --gpus.",
            )

    def close(self) -> None:
        """Lets go of them."""
        for path, fd in self._held:
            path.unlink(missing_ok=True)
            os.close(fd)
        self._held.clear()
