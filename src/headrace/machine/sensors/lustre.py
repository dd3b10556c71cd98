"""Lustre: what the client read, wrote and looked up, by mount, from llite's `stats`.

    read_bytes                1234 samples [bytes] 4096 4194304 5000000000
    open                      88 samples [usecs] 3 900 12345

One folder for each mount, `FSNAME-INSTANCE`; which lies below /sys/kernel/debug (readable by root) or
/proc/fs, by version. Sums are there since 2.10; without them the mean is not known, and only operations
are told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace.base.job import clean
from headrace.machine.counters import Growth
from headrace.machine.sensors import Key, Reading, lines_of, number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lustre"]

MOUNTS_MAX: Final = 32

_FOLDERS: Final = ("proc/fs/lustre/llite", "sys/kernel/debug/lustre/llite")
_METADATA: Final = frozenset(
    {
        "open", "close", "getattr", "setattr", "statfs", "alloc_inode", "getxattr", "create", "link",
        "unlink", "symlink", "mkdir", "rmdir", "mknod", "rename", "readdir", "inode_permission",
    }
)  # fmt: skip


class Lustre:
    """Bytes, operations and seconds of each mount, named as the file system."""

    name = "lustre"

    def __init__(self, root: Path) -> None:
        self._folders = [root / folder for folder in _FOLDERS]
        self._growth = Growth()
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        found: dict[Key, float] = {}
        seen = 0
        for folder in self._folders:
            try:
                mounts = sorted(folder.iterdir())[:MOUNTS_MAX]
            except OSError:
                continue
            for mount in mounts:
                seen += _add_mount(found, mount)
            if seen:
                break
        self.why = "" if seen else "no Lustre client's counters can be read here"
        return Reading(self._growth.since(found))


def _add_mount(found: dict[Key, float], folder: Path) -> bool:
    name = clean(folder.name.rpartition("-")[0] or folder.name)
    lines = lines_of(folder / "stats")
    for line in lines:
        words = line.split()
        if len(words) < 4 or words[2] != "samples":
            continue
        count, total = number(words[1]), number(words[6]) if len(words) >= 7 else None
        if count is None:
            continue
        if words[0] in ("read_bytes", "write_bytes"):
            kind = words[0].removesuffix("_bytes")
            _add(found, f"fs_{kind}_operations", name, count)
            _add(found, f"fs_{'read' if kind == 'read' else 'written'}_bytes", name, total)
        elif words[0] in ("read", "write"):
            _add(found, f"fs_{words[0]}_s", name, _seconds(words, total))
        elif words[0] in _METADATA:
            _add(found, "fs_metadata_operations", name, count)
            _add(found, "fs_metadata_s", name, _seconds(words, total))
    return bool(lines)


def _seconds(words: list[str], total: float | None) -> float | None:
    micro = words[3].startswith("[usec")
    return None if total is None or not micro else total / 1e6


def _add(found: dict[Key, float], name: str, mount: str, value: float | None) -> None:
    if value is not None:
        found[name, mount] = found.get((name, mount), 0.0) + value
