"""Host: what this machine and our control groups let us take, how busy it is, and what is mounted.

Control groups are of version 1 or 2. A group is bound by its ancestors too, so all of them are read. Inside a
container the group's path may not exist below the mount; its nearest ancestor that does is the container's
own. A file that cannot be read sets no limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def this_host() -> str:
    """The same in processes that can share memory: of one kernel and name, that see each other."""
    boot, seen = read_text(Path("/proc/sys/kernel/random/boot_id")).strip(), 0
    with contextlib.suppress(OSError):
        seen = Path("/proc/self/ns/pid").stat().st_ino
    return f"{socket.gethostname()} {boot} {seen}"


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start time (ticks since boot) of a process; None if there is none."""
    try:
        # The name, in parentheses, may hold anything.
        rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return rest[0].decode(), int(rest[1]), int(rest[19])


def start_time(pid: int) -> int | None:
    """When a process began, in ticks since boot: with its id it names one process only."""
    status = process_stat(pid)
    return None if status is None or status[0] in "ZX" else status[2]


LINES_MAX: Final = 4096


def lines_of(path: Path) -> list[str]:
    """The lines of a file of the kernel, at most `LINES_MAX`; [] where it cannot be read."""
    return read_text(path, 1 << 20).splitlines()[:LINES_MAX]


def number(word: str) -> float | None:
    """A counter's value; None if it is none."""
    word = word.strip()
    return float(word) if word.isascii() and word.isdigit() and len(word) <= 20 else None


def number_in(path: Path) -> float | None:
    """The number that a file of the kernel consists of; None if it says "max", or cannot be read."""
    return number(read_text(path))


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
    used: int  # bytes, without page cache, which the kernel takes back before it kills


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed; page cache counts as free."""
    groups = [usage.limit - usage.used for usage in memory_usages(root)]
    machine = byte_fields(root / "proc/meminfo").get("MemAvailable", NO_LIMIT)
    return max(0, min(machine, *groups, NO_LIMIT))


def fits_in_free_memory(nbytes: float, root: Path = Path("/")) -> bool:
    """Whether `nbytes` are at most half of what is free; False where that is not known."""
    available = available_memory(root)
    return available < NO_LIMIT and nbytes <= available / 2


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as the system lets this process; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = int(Path("/proc/sys/fs/nr_open").read_text())
    for wanted in ((top, top), (hard, hard)):  # the first takes a privilege
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
        except (ValueError, OSError):
            continue
        return wanted[0]
    return soft


def memory_usages(root: Path) -> list[MemoryUsage]:
    """The memory limits of this process's groups and their ancestors, the process's own first."""
    usages = []
    for group, version in _groups(root, "memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (
            number_in(group / name)
            for name in (names if version == 1 else ("memory.max", "memory.current"))
        )
        if limit is None or used is None or limit >= NO_LIMIT:
            continue
        prefix, counts = "total_" if version == 1 else "", fields_of(group / "memory.stat")
        cached = sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        label = f"cgroup v{version} {group.relative_to(root)}"
        usages.append(MemoryUsage(label, int(limit), max(0, int(used) - cached)))
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
        quota, period = (number_in(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota and period:  # -1: no limit, and no number
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


# -- how busy -------------------------------------------------------------------------------------


class HostUse(NamedTuple):
    """What happened between two moments; NaN: not known."""

    cpu_share: float  # of the processors, in use
    io_pressure: float  # share of the time in which some task waited for I/O


class HostCounters(NamedTuple):
    """What the kernel counted so far; NaN: it does not say."""

    at_s: float = math.nan  # monotonic
    busy_s: float = math.nan  # of all processors together
    all_s: float = math.nan  # the same, idle time included
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


class CpuUse(NamedTuple):
    """CPUs that were busy on average; NaN: not known."""

    own: float = math.nan  # of this process, and of those of its children that ended
    others: float = math.nan


class CpuTimes(NamedTuple):
    """CPU seconds so far; NaN: the kernel does not say."""

    at_s: float  # monotonic
    own_s: float
    busy_s: float  # of all processors together

    def until(self, now: CpuTimes) -> CpuUse:
        """What was used between two readings."""
        seconds = max(1e-9, now.at_s - self.at_s)
        own, busy = (now.own_s - self.own_s) / seconds, (now.busy_s - self.busy_s) / seconds
        return CpuUse(own, max(busy - own, 0.0))  # the kernel counts all in ticks


def cpu_times() -> CpuTimes:
    """Read the times that processors were used."""
    times, seconds = os.times(), cpu_seconds(Path("/proc/stat"))
    return CpuTimes(time.monotonic(), sum(times[:4]), math.nan if seconds is None else seconds[0])


# -- mounts -----------------------------------------------------------------------------------------

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
    kind: str  # as the kernel names it: `ext4`, `nfs4`, `lustre`
    source: str  # what is mounted: `server:/export`
    device: str  # major and minor number, as `8:1`
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

    FUSE's programs are known by the `source`, which is what is mounted.
    """
    if kind.startswith("fuse"):
        text = f"{kind} {source}".lower()
        return any(name in text for name in _NETWORK_FUSE)
    return kind in _NETWORK


def mount_of(path: str, table: Sequence[Mount]) -> Mount | None:
    """The mount that a path, which need not exist, lies on; of several in `mounts()` at one point the last."""
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
