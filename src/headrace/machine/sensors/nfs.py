"""NFS: what the client read, wrote and waited for, by mount, from /proc/self/mountstats.

For each mount the kernel lists bytes (`bytes:`, the 5th and 6th number are what crossed the wire) and, by
operation, requests, transmissions, timeouts, bytes sent and received, and milliseconds in the queue, on
the wire and in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.job import clean
from headrace.machine.counters import Growth
from headrace.machine.mounts import unescaped
from headrace.machine.sensors import Key, Reading, lines_of, number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NFS"]

MOUNTS_MAX = 64

_DATA = ("READ", "WRITE", "COMMIT")


class NFS:
    """Bytes, operations and seconds of each mount."""

    name = "nfs"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/self/mountstats"
        self._growth = Growth()
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        found: dict[Key, float] = {}
        mount, operations, seen = "", False, 0
        for line in lines_of(self._path):
            words = line.split()
            if words[:1] == ["device"]:
                mount, operations = _mount_of(words), False
                seen += bool(mount)
                mount = mount if seen <= MOUNTS_MAX else ""
            elif not mount:
                continue
            elif words[:1] == ["bytes:"] and len(words) >= 7:
                _add(found, "fs_read_bytes", mount, number(words[5]))
                _add(found, "fs_written_bytes", mount, number(words[6]))
            elif words[:2] == ["per-op", "statistics"]:
                operations = True
            elif operations and len(words) >= 9 and words[0].endswith(":"):
                _operation(found, mount, words)
        self.why = "" if seen else "no NFS is mounted here"
        return Reading(self._growth.since(found))


def _mount_of(words: list[str]) -> str:
    """`device SERVER:/EXPORT mounted on /POINT with fstype nfs4 ...`; '' for other file systems."""
    if "fstype" not in words or "on" not in words:
        return ""
    kind = words[words.index("fstype") + 1 :][:1]
    if not kind or not kind[0].startswith("nfs") or kind[0] == "nfsd":
        return ""
    point = " ".join(words[words.index("on") + 1 : words.index("with")]) if "with" in words else ""
    return clean(unescaped(point))


def _operation(found: dict[Key, float], mount: str, words: list[str]) -> None:
    name = words[0][:-1]
    values = [number(word) for word in words[1:9]]
    if None in values:
        return
    requests, milliseconds = values[0] or 0.0, values[7] or 0.0
    kind = name.lower() if name in ("READ", "WRITE") else "metadata"
    if name in _DATA and kind == "metadata":
        kind = "write"  # a commit is the end of a write
    _add(found, f"fs_{kind}_operations", mount, requests)
    _add(found, f"fs_{kind}_s", mount, milliseconds / 1e3)


def _add(found: dict[Key, float], name: str, mount: str, value: float | None) -> None:
    if value is not None:
        found[name, mount] = found.get((name, mount), 0.0) + value
