"""Leftovers: what there is of files, memory, descriptors and processes that should be gone."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from soak.actors import state_of

# The tables of a folder that was listed are a memfd too, the process's own.
_MEMORY = re.compile(r"memfd:headrace(?!-directory)|/dev/shm/|/psm_")


# Sockets by which a process hands tensors to others. Whether headrace is there or not, multiprocessing
# removes them when the process ends by itself, and leaves them when it is killed.
_TORCHS = re.compile(r"/pymp-[\w-]+(/listener-[\w-]+)?$")


def is_torchs(name: str) -> bool:
    """Whether it is what torch's killed workers leave, with plain torch too."""
    return _TORCHS.search(name) is not None


def all_processes() -> list[int]:
    """All that there are but this one; those that are dead are fetched first."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and int(p.name) != os.getpid()
    ]


def names_in(*folders: Path) -> set[str]:
    """All paths below folders."""
    found = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found |= {str(p) for p in folder.rglob("*")}
    return found


def processes(pids: list[int]) -> list[str]:
    """Those of them that live, or are dead and were not fetched."""
    return [f"process {pid} ({state})" for pid in pids if (state := state_of(pid))]


def shared_memory(pid: int) -> dict[int, int]:
    """Shared memory that a process has mapped: bytes by inode."""
    found: dict[int, int] = {}
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        span, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and _MEMORY.search(name[0]):
            low, high = (int(end, 16) for end in span.split("-"))
            found[int(inode)] = found.get(int(inode), 0) + high - low
    return found


def descriptors(pid: int) -> dict[str, int]:
    """Open descriptors of a process by kind: socket, pidfd, memfd, file, ..."""
    found: dict[str, int] = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(fd.readlink())
            kind = (
                "memfd" if "memfd:" in name
                else name.partition(":")[0] if not name.startswith("/")
                else "file"
            )  # fmt: skip
            if "[" in name and kind == "anon_inode":
                kind = name.partition("[")[2].rstrip("]")
            found[kind] = found.get(kind, 0) + 1
    return found
