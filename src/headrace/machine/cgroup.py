"""Control groups, versions 1 and 2: what this process's groups may use, and what they do use.

A group is bound by its ancestors too, so all of them are looked at. Inside a container the group's
path may not exist below the mount; its nearest ancestor that does is the container's own. What
cannot be read says nothing: there is no limit that we know of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.machine.kernel_files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Usage", "cpu_quota", "memory_usages"]

NO_LIMIT = 1 << 60
"""Version 1 says "unlimited" by a huge number that depends on the page size."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One group's memory."""

    name: str
    limit: int
    used: int
    """Bytes, without page cache, which the kernel takes back before it kills."""


def memory_usages(root: Path) -> list[Usage]:
    """The memory limits of this process's groups and their ancestors, the process's own first."""
    found = []
    for group, version in _groups(root, "memory"):
        names = _MEMORY_FILES[version]
        limit, used = (_number(group / name) for name in names)
        if limit is None or used is None or limit >= NO_LIMIT:
            continue
        cached = _page_cache(group / "memory.stat", version)
        label = f"cgroup v{version} {group.relative_to(root)}"
        found.append(Usage(label, limit, max(0, used - cached)))
    return found


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


def cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that this process's groups may use; None: no limit."""
    quotas = []
    for group, version in _groups(root, "cpu"):
        if version == 2:
            words = read_text(group / "cpu.max").split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                quotas.append(int(words[0]) / max(1, int(words[1])))
            continue
        quota, period = (_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's groups, from its own to the root, and their version."""
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # Both versions mounted: version 2 lies in `unified`, if anywhere.
            base = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
            yield from ((group, 2) for group in _with_ancestors(base, path))
        elif controller in controllers.split(","):
            for name in (controllers, controller):
                if (mount / name).is_dir():
                    yield from ((group, 1) for group in _with_ancestors(mount / name, path))
                    break


def _with_ancestors(base: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
    for count in range(len(parts), -1, -1):
        group = base.joinpath(*parts[:count])
        if group.is_dir():
            yield group


def _page_cache(stat: Path, version: int) -> int:
    """Bytes of file pages, which can be dropped."""
    prefix = "" if version == 2 else "total_"
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    total = 0
    for line in read_text(stat).splitlines():
        name, _, value = line.partition(" ")
        if name in wanted and value.isdigit():
            total += int(value)
    return total


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    try:
        return int(text)
    except ValueError:
        return None  # "max", empty, or no such file
