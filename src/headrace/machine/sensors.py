"""Sensors: what this node's CPUs, memory, disks, networks and file systems have done.

Each sensor reads one thing, cheaply. It never raises for what the machine lacks or writes in a form that nobody
knows: that is left out, and `why` says so.

Counters of kernels and drivers wrap, begin anew (a device that came back, a module that was reloaded) and
vanish. A counter that is seen for the first time has grown by nothing: what it counted before is not ours.

GPUs are seen through NVML: nvidia-ml-py (`headrace[gpu]`) and the driver. One that falls off the bus is left
out until it is back; each value that a GPU does not support (MIG, vGPU, old ones) is left out alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.base.job import clean
from headrace.machine.host import (
    byte_fields,
    cpu_seconds,
    lines_of,
    number,
    number_in,
    pressure_of,
    unescaped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEVICES_MAX: Final = 64  # disks, interfaces, ports or mounts of one sensor
SensorKey = tuple[str, str]
"""Name of a figure, and what it is of (a device, an interface, a mount; "")."""

_FRESH: Final = 0.5
"""A counter that wrapped has come less far than this share of its range since; one that comes from the
lower half of it cannot have wrapped."""


def grown(before: float, now: float, bits: int = 64) -> float:
    """How much a counter has grown between two readings; never negative."""
    if not (0.0 <= before < math.inf and 0.0 <= now < math.inf):
        return 0.0  # no counter's
    if now >= before:
        return now - before
    span = float(1 << bits)
    around = now + span - before
    if before < span and before > _FRESH * span and around < _FRESH * span:
        return around
    return now  # it began anew


class Growth:
    """Remembers the last values of counters."""

    def __init__(self, bits: int = 64) -> None:
        self._bits = bits
        self._before: Mapping[SensorKey, float] = {}

    def since(self, values: Mapping[SensorKey, float]) -> dict[SensorKey, float]:
        """How much each has grown since the last call; a new counter has grown by 0.

        A counter that is not named any more is forgotten: if it comes back it is new.
        """
        before, self._before = self._before, dict(values)
        return {
            key: grown(before[key], value, self._bits) if key in before else 0.0
            for key, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class SensorReading:
    """One reading of a sensor."""

    grown: dict[SensorKey, float] = field(default_factory=dict)
    """How much counters grew since the last reading."""
    gauges: dict[SensorKey, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Values:
    """What files say now."""

    counters: dict[SensorKey, float] = field(default_factory=dict)
    gauges: dict[SensorKey, float] = field(default_factory=dict)
    milliseconds: dict[SensorKey, float] = field(default_factory=dict)
    """Counters of times in 32 bits, which wrap after 49 days of work."""

    def add(self, name: str, of: str, value: float | None) -> None:
        """To a counter."""
        if value is not None:
            self.counters[name, of] = self.counters.get((name, of), 0.0) + value


class Sensor:
    """Reads one thing of this node."""

    def __init__(self, name: str, root: Path = Path("/")) -> None:
        self.name = name
        self.why = ""
        self._look, self._root = _SENSORS[name], root
        self._counters, self._milliseconds = Growth(), Growth(bits=32)

    def read(self) -> SensorReading:
        """Read it now."""
        values = _Values()
        self.why = self._look(self._root, values)
        times = self._milliseconds.since(values.milliseconds).items()
        counted = self._counters.since(values.counters)
        return SensorReading(counted | {key: ms / 1e3 for key, ms in times}, values.gauges)


def all_sensors(root: Path = Path("/")) -> list[Sensor]:
    """One of each, except the GPUs' (see `GPUs`)."""
    return [Sensor(name, root) for name in _SENSORS]


# Each of these takes what its files say, and returns why there is nothing; '' if there is something.


def _cpu(root: Path, values: _Values) -> str:
    """CPU seconds from /proc/stat: busy, waiting for I/O, and in all."""
    path = root / "proc/stat"
    if (seconds := cpu_seconds(path)) is None:
        return f"{path} cannot be understood"
    for name, each in zip(("cpu_busy_s", "cpu_iowait_s", "cpu_s"), seconds, strict=True):
        values.counters[name, ""] = each
    return ""


def _memory(root: Path, values: _Values) -> str:
    """Bytes of memory from /proc/meminfo; what the kernel would give back counts as available."""
    path = root / "proc/meminfo"
    fields = byte_fields(path)
    for name, field_name in (("memory", "MemTotal"), ("memory_available", "MemAvailable")):
        if field_name in fields:
            values.gauges[f"{name}_bytes", ""] = float(fields[field_name])
    return "" if values.gauges else f"{path} cannot be understood"


def _psi(root: Path, values: _Values) -> str:
    """Seconds that tasks waited for CPU, memory and I/O, from /proc/pressure.

    Kernels since 4.20 have it, unless they were started without.
    """
    folder = root / "proc/pressure"
    for kind in ("cpu", "memory", "io"):
        for share, seconds in pressure_of(folder / kind).items():
            values.counters[f"{kind}_pressure_s", share] = seconds
    return "" if values.counters else f"{folder} is not there: this kernel tells no pressure"


_SECTOR_BYTES: Final = 512  # of /proc/diskstats, whatever the device has
_VIRTUAL_DISKS: Final = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")


def disk_counters(root: Path = Path("/")) -> dict[str, list[float]]:
    """The 17 numbers that /proc/diskstats has of each disk since it was started, by its name.

    Whole disks only: a partition's figures are its disk's too. What older kernels do not count is 0.
    """
    try:
        whole = {entry.name.replace("!", "/") for entry in (root / "sys/block").iterdir()}
    except OSError:
        whole = set()  # partitions are counted too
    disks = {}
    for line in lines_of(root / "proc/diskstats"):
        words = line.split()
        numbers = [value for word in words[3:20] if (value := number(word)) is not None]
        sound = len(words) >= 14 and len(numbers) == len(words[3:20])
        if sound and (not whole or words[2] in whole):
            disks[words[2]] = numbers + [0.0] * (17 - len(numbers))
    return disks


def _disk(root: Path, values: _Values) -> str:
    """Bytes and seconds of each disk; those of a RAID or a volume manager are those of what they lie on."""
    counters, milliseconds, disks = values.counters, values.milliseconds, 0
    for name, numbers in disk_counters(root).items():
        if disks >= DEVICES_MAX or name.startswith(_VIRTUAL_DISKS):
            continue
        disks += 1
        disk = clean(name)
        reads, _, sectors_read, read_ms, writes, _, sectors_written, write_ms, _, busy_ms = numbers[
            :10
        ]
        counters |= {
            ("disk_read_bytes", disk): _SECTOR_BYTES * sectors_read,
            ("disk_written_bytes", disk): _SECTOR_BYTES * sectors_written,
            ("disk_reads", disk): reads, ("disk_writes", disk): writes,
        }  # fmt: skip
        times = (("read", read_ms), ("write", write_ms), ("busy", busy_ms))
        milliseconds |= {(f"disk_{name}_s", disk): ms for name, ms in times}
    return "" if disks else f"{root / 'proc/diskstats'} names no disk"


_VIRTUAL_INTERFACES: Final = (
    "lo", "veth", "docker", "br-", "virbr", "cni", "flannel", "cali", "tap", "tun",
)  # fmt: skip


def _network(root: Path, values: _Values) -> str:
    """Bytes of each interface, from /proc/net/dev.

    Interfaces of containers and bridges are left out: their bytes pass a real one too, or no wire at all.
    RDMA passes none of these; its ports count in words of 4 bytes, below /sys/class/infiniband.
    """
    path, counters = root / "proc/net/dev", values.counters
    for line in lines_of(path)[2:]:
        name, colon, rest = line.rpartition(":")
        words = rest.split()
        if not colon or len(words) < 16 or len(counters) >= 2 * DEVICES_MAX:
            continue
        interface = clean(name.strip())
        received, sent = number(words[0]), number(words[8])
        if interface.startswith(_VIRTUAL_INTERFACES) or received is None or sent is None:
            continue
        counters["network_received_bytes", interface] = received
        counters["network_sent_bytes", interface] = sent
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*/counters"))
    for folder in ports[:DEVICES_MAX]:
        port = clean(f"{folder.parts[-4]}/{folder.parts[-2]}")
        for file, name in (("port_rcv_data", "received"), ("port_xmit_data", "sent")):
            if (words_of_4 := number_in(folder / file)) is not None:
                counters[f"network_{name}_bytes", port] = 4 * words_of_4
    return "" if counters else f"{path} names no interface with a wire"


_NFS_KINDS: Final = {"READ:": "read", "WRITE:": "write", "COMMIT:": "write"}
"""A commit is the end of a write."""


def _nfs(root: Path, values: _Values) -> str:
    """Bytes, operations and seconds of each NFS mount, from /proc/self/mountstats.

    For each mount the kernel lists bytes (`bytes:`, the 5th and 6th number are what crossed the wire) and, by
    operation, requests, transmissions, timeouts, bytes sent and received, and milliseconds in the queue, on
    the wire and in all.
    """
    mount, in_operations, mounts = "", False, 0
    for line in lines_of(root / "proc/self/mountstats"):
        words = line.split()
        if words[:1] == ["device"]:
            mount, in_operations = _nfs_mount(words), False
            mounts += bool(mount)
            mount = mount if mounts <= DEVICES_MAX else ""
        elif not mount:
            continue
        elif words[:1] == ["bytes:"] and len(words) >= 7:
            values.add("fs_read_bytes", mount, number(words[5]))
            values.add("fs_written_bytes", mount, number(words[6]))
        elif words[:2] == ["per-op", "statistics"]:
            in_operations = True
        elif in_operations and len(words) >= 9 and words[0].endswith(":"):
            numbers = [number(word) for word in words[1:9]]
            if None in numbers:
                continue
            kind = _NFS_KINDS.get(words[0], "metadata")
            values.add(f"fs_{kind}_operations", mount, numbers[0])
            values.add(f"fs_{kind}_s", mount, (numbers[7] or 0.0) / 1e3)
    return "" if mounts else "no NFS is mounted here"


def _nfs_mount(words: list[str]) -> str:
    """`device SERVER:/EXPORT mounted on /POINT with fstype nfs4 ...`; '' for other file systems."""
    if not {"fstype", "on", "with"}.issubset(words):
        return ""
    kind = words[words.index("fstype") + 1 :][:1]
    if not kind or not kind[0].startswith("nfs") or kind[0] == "nfsd":
        return ""
    return clean(unescaped(" ".join(words[words.index("on") + 1 : words.index("with")])))


_LUSTRE_FOLDERS: Final = ("proc/fs/lustre/llite", "sys/kernel/debug/lustre/llite")
_LUSTRE_METADATA: Final = frozenset(
    {
        "open", "close", "getattr", "setattr", "statfs", "alloc_inode", "getxattr", "create", "link",
        "unlink", "symlink", "mkdir", "rmdir", "mknod", "rename", "readdir", "inode_permission",
    }
)  # fmt: skip


def _lustre(root: Path, values: _Values) -> str:
    """Bytes, operations and seconds of each Lustre mount, named as the file system, from llite's `stats`.

        read_bytes                1234 samples [bytes] 4096 4194304 5000000000
        open                      88 samples [usecs] 3 900 12345

    One folder for each mount, `FSNAME-INSTANCE`; which lies below /sys/kernel/debug (readable by root) or
    /proc/fs, by version. Sums are there since 2.10; without them the mean is not known, and only operations
    are counted.
    """
    seen = False
    for folder in _LUSTRE_FOLDERS:
        try:
            mounts = sorted((root / folder).iterdir())[:DEVICES_MAX]
        except OSError:
            continue
        for mount in mounts:
            lines = lines_of(mount / "stats")
            seen |= bool(lines)
            _add_lustre(values, clean(mount.name.rpartition("-")[0] or mount.name), lines)
        if seen:
            break
    return "" if seen else "no Lustre client's counters can be read here"


def _add_lustre(values: _Values, mount: str, lines: list[str]) -> None:
    for line in lines:
        words = line.split()
        if len(words) < 4 or words[2] != "samples":
            continue
        name, count = words[0], number(words[1])
        total = number(words[6]) if len(words) >= 7 else None
        seconds = total / 1e6 if total is not None and words[3].startswith("[usec") else None
        if count is None:
            continue
        if name in ("read_bytes", "write_bytes"):
            kind = name.removesuffix("_bytes")
            values.add(f"fs_{kind}_operations", mount, count)
            values.add("fs_read_bytes" if kind == "read" else "fs_written_bytes", mount, total)
        elif name in ("read", "write"):
            values.add(f"fs_{name}_s", mount, seconds)
        elif name in _LUSTRE_METADATA:
            values.add("fs_metadata_operations", mount, count)
            values.add("fs_metadata_s", mount, seconds)


def _beegfs(root: Path, values: _Values) -> str:
    """That BeeGFS is mounted here: its client keeps no counters that can be read.

    Clients' figures are kept by BeeGFS's servers, and asking those from every node all the time would be a
    load of its own. What jobs read is known from their own processes' counters, and from headrace.
    """
    try:
        clients = sorted(path.name for path in (root / "proc/fs/beegfs").iterdir())
    except OSError:
        return "no BeeGFS is mounted here"
    values.gauges |= {("fs_mounted", clean(name)): 1.0 for name in clients[:DEVICES_MAX]}
    return "BeeGFS's client keeps no counters: its servers do"


_SENSORS: Final[dict[str, Callable[[Path, _Values], str]]] = {
    "cpu": _cpu, "memory": _memory, "psi": _psi, "disk": _disk, "network": _network, "nfs": _nfs,
    "lustre": _lustre, "beegfs": _beegfs,
}  # fmt: skip


# -- GPUs -----------------------------------------------------------------------------------------

GPUS_MAX: Final = 64
PROCESSES_MAX: Final = 256

RETRY_LOOKS: Final = 60
"""A driver that was not there is looked for again after so many looks: it may be loaded later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One GPU at a moment; what it does not tell is None."""

    index: int
    busy: float | None = None  # share of the last sampling period in which a kernel ran, 0 to 1
    memory_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    processes: tuple[int, ...] = ()  # process ids that compute on it


def _nvml() -> Any:
    import pynvml

    return pynvml


class GPUs:
    """The GPUs of this node."""

    name = "gpu"

    def __init__(self, module: Callable[[], Any] = _nvml) -> None:
        self._module = module
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._looks = 0
        self.why = ""

    def read(self) -> list[GPU]:
        """What there is now; [] without GPUs."""
        if self._nvml is None and not self._begin():
            return []
        looks = (self._look(index, handle) for index, handle in enumerate(self._handles))
        gpus = [gpu for gpu in looks if gpu is not None]
        if self._handles and not gpus:
            self._end("no GPU answers any more")
        return gpus

    def close(self) -> None:
        """Let go of the driver."""
        self._end("closed")

    def _begin(self) -> bool:
        self._looks += 1
        if self._looks % RETRY_LOOKS != 1:
            return False
        try:
            nvml = self._module()
        except ImportError:
            self.why = "nvidia-ml-py is not installed. Install it: pip install 'headrace[gpu]'"
            return False
        try:
            nvml.nvmlInit()
            count = min(int(nvml.nvmlDeviceGetCount()), GPUS_MAX)
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception as e:  # noqa: BLE001 - a driver's errors are its own
            self.why = f"the NVIDIA driver does not answer: {e}"
            return False
        self._nvml, self.why = nvml, "" if count else "the NVIDIA driver knows no GPU"
        return True

    def _end(self, why: str) -> None:
        nvml, self._nvml, self._handles, self.why = self._nvml, None, [], why
        self._looks = 0 if why == "closed" else 1
        if nvml is not None:
            _asked(nvml.nvmlShutdown)

    def _look(self, index: int, handle: Any) -> GPU | None:
        nvml = self._nvml
        busy = _number(_asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        sizes = _asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        memory, total = (_number(getattr(sizes, name, None)) for name in ("used", "total"))
        power = _number(_asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle)))
        running = _asked(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if busy is None and memory is None and running is None:
            return None
        pids = (getattr(process, "pid", None) for process in running or ())
        return GPU(
            index=index,
            busy=None if busy is None else min(1.0, busy / 100),
            memory_bytes=memory,
            memory_total_bytes=total,
            power_w=None if power is None else power / 1e3,
            processes=tuple(pid for pid in pids if isinstance(pid, int))[:PROCESSES_MAX],
        )


def _asked(call: Callable[[], Any]) -> Any:
    """What the driver says; None if it refuses."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - NVMLError, and whatever a driver in trouble raises
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if value >= 0 else None
