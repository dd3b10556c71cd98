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


LINES_MAX: Final = 4096


def lines_of(path: Path) -> list[str]:
    """The lines of a file of the kernel, at most `LINES_MAX`; [] where it cannot be read."""
    return read_text(path, 1 << 20).splitlines()[:LINES_MAX]


def number(word: str) -> float | None:
    """A counter's value; None if it is none."""
    word = word.strip()
    return float(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None


def fields_of(path: Path) -> dict[str, float]:
    """Counters by name, of lines like those of `memory.stat`: `inactive_file 4096`."""
    pairs = (line.partition(" ") for line in lines_of(path))
    values = {name: number(value) for name, _, value in pairs}
    return {name: value for name, value in values.items() if value is not None}


def pressure_of(path: Path) -> dict[str, float]:
    """Seconds of a pressure file, of the node or of a control group; {} without one.

    `some`: at least one task waited. `full`: nobody did anything else.
    """
    seconds = {}
    for line in lines_of(path):
        words = line.split()
        total = next((word for word in words[1:] if word.startswith("total=")), "")
        value = number(total.removeprefix("total="))
        if words[:1] in (["some"], ["full"]) and value is not None:
            seconds[words[0]] = value / 1e6
    return seconds


def cpu_seconds(path: Path) -> tuple[float, float, float] | None:
    """CPU seconds of /proc/stat: in use, waiting for I/O, and in all; None: it cannot be understood."""
    words = read_text(path, 512).partition("\n")[0].split()
    ticks = [number(word) for word in words[1:9]]
    if words[:1] != ["cpu"] or len(ticks) < 5 or None in ticks:
        return None
    seconds = [(tick or 0.0) / os.sysconf("SC_CLK_TCK") for tick in ticks]
    idle, iowait = seconds[3:5]
    return sum(seconds) - idle - iowait, iowait, sum(seconds)


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
        prefix, counts = "total_" if version == 1 else "", fields_of(group / "memory.stat")
        cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
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


def read_host(now_s: float) -> HostCounters:
    """Read the counters, in some ten microseconds."""
    busy_s, _, all_s = cpu_seconds(Path("/proc/stat")) or (math.nan,) * 3
    io_s = pressure_of(Path("/proc/pressure/io")).get("some", math.nan)
    return HostCounters(now_s, busy_s, all_s, io_s)
