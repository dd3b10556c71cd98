"""Mounts: which file system a path lies on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TABLE = "proc/self/mountinfo"
_BYTES_MAX = 4 << 20
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs", "yas",
    }
)  # fmt: skip
_NETWORK_FUSE = (
    "alluxio", "beeond", "blobfuse", "ceph", "daos", "gcsfuse", "geesefs", "gluster", "goofys",
    "juicefs", "mount-s3", "mountpoint-s3", "rclone", "s3fs", "sshfs", "dfuse", "seaweed", "weka",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system where it is mounted."""

    point: str
    kind: str
    """As the kernel names it: `ext4`, `nfs4`, `lustre`."""
    source: str
    """What is mounted: `server:/export`."""
    device: str
    """Major and minor number, as `8:1`."""
    options: tuple[str, ...] = ()
    """Of the mount and of the file system, as the kernel names them: `rw`, `relatime`, `rsize=1048576`."""


def mounts(root: Path = Path("/")) -> list[Mount]:
    """All mounts that this process sees, the last ones on top; [] where that cannot be read."""
    try:
        with (root / _TABLE).open("rb") as table:
            text = table.read(_BYTES_MAX)
    except OSError:
        return []
    parsed = (_mount_of(line) for line in os.fsdecode(text).splitlines())
    return [mount for mount in parsed if mount is not None]


def is_network(kind: str, source: str = "") -> bool:
    """Whether a file system's bytes come from another machine, as far as the kernel's words tell.

    Args:
        kind: as the kernel names it.
        source: what is mounted: FUSE's programs are known by it.
    """
    if kind.startswith("fuse"):
        text = f"{kind} {source}".lower()
        return any(name in text for name in _NETWORK_FUSE)
    return kind in _NETWORK


def mount_of(path: str, table: Sequence[Mount]) -> Mount | None:
    """The mount that a path lies on.

    Args:
        path: need not exist.
        table: `mounts()`; of several at one point the last one is on top.
    """
    real = os.path.realpath(path)
    below = [m for m in table if real == m.point or real.startswith(m.point.rstrip("/") + "/")]
    return max(reversed(below), key=lambda mount: len(mount.point), default=None)


def file_system_of(path: str, root: Path = Path("/")) -> str:
    """What people call the file system that a path lies on: where it is mounted, or whose URL it is."""
    scheme, colons, rest = path.partition("://")
    if colons and scheme.replace("+", "").isalnum():
        return f"{scheme}://{rest.partition('/')[0]}"
    mount = mount_of(path, mounts(root))
    return "" if mount is None else mount.point


def is_remote(path: str) -> bool:
    """Whether files there lie on another machine, or behind a program: slow to open, whatever is cached."""
    mount = mount_of(path, mounts())
    return mount is not None and (mount.kind.startswith("fuse") or is_network(mount.kind))


def _mount_of(line: str) -> Mount | None:
    left, dash, right = line.partition(" - ")
    words, rest = left.split(" "), right.split(" ")
    if not dash or len(words) < 6 or len(rest) < 2:
        return None
    options = [*words[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ())]
    return Mount(
        unescaped(words[4]), rest[0], unescaped(rest[1]), words[2],
        tuple(dict.fromkeys(unescaped(option) for option in options if option)),
    )  # fmt: skip


def unescaped(text: str) -> str:
    r"""What the kernel writes in octal: spaces, tabs, newlines, backslashes and `#`."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), text)
