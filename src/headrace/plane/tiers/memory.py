"""How much memory this process may still take: the machine's, and its cgroup's, the smaller."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]

_UNLIMITED = 1 << 60
"""cgroup v1 says 'no limit' with a number near 2^63."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed; page cache counts as free.

    Args:
        root: where `proc` and `sys` are.
    """
    found = [_machine(root)]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _groups(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
    return max(0, min(found))


def _machine(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _groups(top: Path, path: str, limit_name: str, used_name: str) -> list[int]:
    """What each group from ours to the top leaves; a container may see its own as the top."""
    found = []
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            found.append(int(limit) - int(used) + _reclaimable(folder))
        if folder == top:
            break
    return found


def _reclaimable(folder: Path) -> int:
    """Page cache that the kernel gives up first."""
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
