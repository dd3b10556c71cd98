"""Ranks: a recipe on this machine, by `headrace launch`, or by hand with what it would tell the ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from headrace.cluster.recipes import recipes_folder
from tests_shared import free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LAUNCH_S = 150.0
FRAMEWORKS = {
    "ddp": "torch",
    "fsdp": "torch",
    "tensorflow": "tensorflow",
    "jax": "jax",
    "mpi": "mpi",
    "gpt": "torch",
}
# Pillow tells some clip art's palettes that they should be converted twice: not our affair.
WARNINGS = ("-W", "error", "-W", "ignore:Palette images", "-W", "ignore::DeprecationWarning")


def environment() -> dict[str, str]:
    """This process's, without jobs around it."""
    strange = ("SLURM", "OMPI", "HEADRACE_", "TORCHELASTIC")
    own = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    # Sums in one order: losses can be compared to the last digit.
    return {
        **own,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def place_of(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """How torch, TensorFlow and JAX meet, for one rank; there is a port more than ranks."""
    size = str(len(ports) - 1)
    workers = [f"127.0.0.1:{port}" for port in ports[1:]]
    task = {"type": "worker", "index": rank}
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}",
        "JAX_NUM_PROCESSES": size, "JAX_PROCESS_ID": str(rank),
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
    }  # fmt: skip


class Ranks:
    """Processes that write into one log. Whatever happens, they are gone when the `with` ends."""

    def __init__(
        self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self.processes = [
                subprocess.Popen(
                    command, cwd=log.parent, env={**environment(), **place},
                    stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                )
                for command, place in commands
            ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def text(self) -> str:
        """What they printed."""
        return self.log.read_text()

    def codes(self) -> list[int]:
        """How they ended, once all have."""
        until_s = time.monotonic() + LAUNCH_S
        return [process.wait(max(0.1, until_s - time.monotonic())) for process in self.processes]

    def signal(self, number: int) -> None:
        """To all of them."""
        for process in self.processes:
            process.send_signal(number)


def by_hand(recipe: str, size: int, log: Path, arguments: Sequence[str]) -> Ranks:
    """A process for each rank, or mpirun over them."""
    program = [sys.executable, *WARNINGS, str(recipes_folder() / recipe / "train.py"), *arguments]
    if recipe == "mpi":
        mpirun = [
            str(shutil.which("mpirun")),
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            str(size),
        ]
        return Ranks([([*mpirun, *program], {})], log)
    ports = free_ports(size + 1)
    return Ranks([(program, place_of(rank, ports)) for rank in range(size)], log)


def launched(recipe: str, size: int, log: Path, arguments: Sequence[str]) -> Ranks:
    """By `headrace launch`."""
    launcher = [sys.executable, "-c", "from headrace.cli import main; main()", "launch"]
    options = [
        "--framework", FRAMEWORKS[recipe], "--ranks-per-node", str(size), "--no-daemon", "--no-agent",
        "--manifest", str(log.with_suffix(".json")), "--local", str(log.parent),
    ]  # fmt: skip
    program = [str(recipes_folder() / recipe / "train.py"), *arguments]
    return Ranks([([*launcher, *options, *program], {})], log)


def epochs_of(log: Path) -> list[dict[str, Any]]:
    """The lines of epochs, without the times."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [
        {k: v for k, v in line.items() if not k.endswith("_s") and k != "seconds"} for line in lines
    ]
