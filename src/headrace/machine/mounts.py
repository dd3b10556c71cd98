"""Mounts: which file system a path lies on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TABLE = "proc/self/mountinfo"
_BYTES_MAX = 4 << 20


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


def file_system_of(path: str, root: Path = Path("/")) -> str:
    """What people call the file system that a path lies on: where it is mounted, or whose URL it is.

    Args:
        path: need not exist; a URL too.
        root: where `proc` is.
    """
    scheme, colons, rest = path.partition("://")
    if colons and scheme.replace("+", "").isalnum():
        return f"{scheme}://{rest.partition('/')[0]}"
    real = os.path.realpath(path)
    below = (m.point for m in mounts(root) if _is_below(real, m.point))
    return max(below, key=len, default="")


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


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
    r"""As the kernel writes spaces, tabs, newlines and backslashes: in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
