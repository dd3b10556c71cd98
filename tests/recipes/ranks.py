"""Ranks: a recipe's processes on this machine, started by hand with what a launcher would tell them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from headrace.cluster.recipes import recipes_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STEPS_A_LAUNCH_S = 100.0


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def environment_of(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """How torch, TensorFlow and JAX meet, for one rank; there is a port more than ranks."""
    size = len(ports) - 1
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "HEADRACE_"))}
    workers = [f"127.0.0.1:{port}" for port in ports[1:]]
    return {
        **own,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}",
        "JAX_NUM_PROCESSES": str(size), "JAX_PROCESS_ID": str(rank),
        "TF_CONFIG": json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        ),
        # Sums in one order: losses can be compared to the last digit.
        "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1",
    }  # fmt: skip


class Ranks:
    """A recipe on some ranks. Whatever happens, its processes are gone when the `with` ends."""

    def __init__(self, recipe: str, size: int, log: Path, arguments: Sequence[str]) -> None:
        script = recipes_folder() / recipe / "train.py"
        ports = free_ports(size + 1)
        self.log = log
        # Pillow tells some clip art's palettes that they should be converted twice: not our affair.
        warnings = [
            "-W",
            "error",
            "-W",
            "ignore:Palette images",
            "-W",
            "ignore::DeprecationWarning",
        ]
        with log.open("ab") as out:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, *warnings, str(script), *arguments],
                    env=environment_of(rank, ports), stdout=out, stderr=subprocess.STDOUT,
                )
                for rank in range(size)
            ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def text(self) -> str:
        """What they printed."""
        return self.log.read_text()

    def wait(self) -> None:
        """Until all have ended well."""
        until_s = time.monotonic() + STEPS_A_LAUNCH_S
        for process in self.processes:
            code = process.wait(max(0.1, until_s - time.monotonic()))
            assert code == 0, self.text()

    def signal(self, number: int) -> None:
        """To all of them."""
        for process in self.processes:
            process.send_signal(number)


def epochs_of(log: Path) -> list[dict[str, Any]]:
    """The lines of epochs, without the times."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [
        {k: v for k, v in line.items() if not k.endswith("_s") and k != "seconds"} for line in lines
    ]
