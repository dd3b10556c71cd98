"""Host: what this machine and the control groups that we run in let us take, and how busy it is.

Control groups are of version 1 or 2. A group is bound by its ancestors too, so all of them are read. Inside a
container the group's path may not exist below the mount; its nearest ancestor that does is the container's
own. A file that cannot be read sets no limit.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_LIMIT: Final = 1 << 60
"""Version 1 says "unlimited" by a huge number that depends on the page size."""

_FILE_BYTES_MAX: Final = 1 << 16
_KILOBYTES: Final = re.compile(r"\s*([0-9]{1,15}) kB\s*")


# -- files of the kernel --------------------------------------------------------------------------


def read_text(path: Path, bytes_max: int = _FILE_BYTES_MAX) -> str:
    """What a short file below /proc or /sys says; '' where it cannot be read."""
    # Not `open`: a sample that is being watched would seem to have opened this file.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    chunks = []
    try:
        # The kernel gives large files page by page.
        while bytes_max > 0 and (chunk := os.read(fd, bytes_max)):
            chunks.append(chunk)
            bytes_max -= len(chunk)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return b"".join(chunks).decode(errors="replace")


def byte_fields(path: Path) -> dict[str, int]:
    """Bytes by name, of lines like those of /proc/meminfo: `MemFree:  1024 kB`."""
    fields = {}
    for line in read_text(path).splitlines():
        name, _, rest = line.partition(":")
        if (number := _KILOBYTES.fullmatch(rest)) is not None:
            fields[name] = int(number[1]) * 1024
    return fields


# -- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """One group's memory."""

    name: str
    limit: int
    used: int
    """Bytes, without page cache, which the kernel takes back before it kills."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed; page cache counts as free."""
    groups = [usage.limit - usage.used for usage in memory_usages(root)]
    machine = byte_fields(root / "proc/meminfo").get("MemAvailable", NO_LIMIT)
    return max(0, min(machine, *groups, NO_LIMIT))


def fits_in_free_memory(nbytes: float, root: Path = Path("/")) -> bool:
    """Whether `nbytes` are at most half of what is free; False where that is not known."""
    available = available_memory(root)
    return available < NO_LIMIT and nbytes <= available / 2


def memory_usages(root: Path) -> list[MemoryUsage]:
    """The memory limits of this process's groups and their ancestors, the process's own first."""
    usages = []
    for group, version in _groups(root, "memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (
            _number(group / name)
            for name in (names if version == 1 else ("memory.max", "memory.current"))
        )
        if limit is None or used is None or limit >= NO_LIMIT:
            continue
        prefix = "total_" if version == 1 else ""
        cached = sum(
            int(value)
            for name, _, value in (
                line.partition(" ") for line in read_text(group / "memory.stat").splitlines()
            )
            if name in (f"{prefix}inactive_file", f"{prefix}active_file") and value.isdigit()
        )
        label = f"cgroup v{version} {group.relative_to(root)}"
        usages.append(MemoryUsage(label, limit, max(0, used - cached)))
    return usages


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


def _number(path: Path) -> int | None:
    try:
        return int(read_text(path).strip())
    except ValueError:
        return None  # "max", empty, or no such file


# -- how busy -------------------------------------------------------------------------------------


class HostUse(NamedTuple):
    """What happened between two moments; NaN: not known."""

    cpu_share: float
    """Of the processors, in use."""
    io_pressure: float
    """Share of the time in which some task waited for I/O."""


class HostCounters(NamedTuple):
    """What the kernel counted so far; NaN: it does not say."""

    at_s: float = math.nan
    """Monotonic."""
    busy_s: float = math.nan
    """Of all processors together."""
    all_s: float = math.nan
    """The same, idle time included."""
    io_waited_s: float = math.nan

    def since(self, before: HostCounters) -> HostUse:
        """What happened since an earlier reading."""
        return HostUse(
            _share(self.busy_s - before.busy_s, self.all_s - before.all_s),
            _share(self.io_waited_s - before.io_waited_s, self.at_s - before.at_s),
        )


def _share(part: float, whole: float) -> float:
    """NaN for what cannot be: a counter wrapped, or began anew."""
    if not (whole > 0.0 and 0.0 <= part < math.inf and math.isfinite(whole)):
        return math.nan
    return min(1.0, part / whole)


def read_host(now_s: float, root: Path = Path("/proc")) -> HostCounters:
    """Read the counters, in some ten microseconds."""
    busy_s = all_s = io_s = math.nan
    try:
        with (root / "stat").open() as f:
            words = f.readline().split()
        ticks = [int(word) for word in words[1:9]]
        idle = ticks[3] + ticks[4]  # idle, iowait
        if words[0] == "cpu":
            ticks_per_s = os.sysconf("SC_CLK_TCK")
            all_s, busy_s = sum(ticks) / ticks_per_s, (sum(ticks) - idle) / ticks_per_s
    except (OSError, ValueError, IndexError):
        pass
    try:
        with (root / "pressure/io").open() as f:
            line = f.readline()
        if line.startswith("some"):
            io_s = int(line.rpartition("total=")[2]) * 1e-6
    except (OSError, ValueError):
        pass
    return HostCounters(now_s, busy_s, all_s, io_s)
