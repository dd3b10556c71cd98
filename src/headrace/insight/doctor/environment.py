"""Environment: what the machine, its limits and a control group allow. Nothing is tried that costs.

What cannot be read is left at its default: a doctor who cannot see says nothing.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.text import printable
from headrace.insight.doctor.findings import Environment, Place
from headrace.insight.doctor.reads import PieceReads
from headrace.insight.doctor.samples import Piece
from headrace.io.objects.location import is_url, root_of, scheme_of, shown
from headrace.machine.host import available_memory, byte_fields, cpu_quota, memory_usages, read_text
from headrace.machine.mounts import Mount, mounts

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path("/")

_NETWORK: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs", "wekafs", "yas",
    }
)  # fmt: skip
_NETWORK_FUSE: Final = (
    "alluxio", "beeond", "blobfuse", "ceph", "daos", "gcsfuse", "geesefs", "gluster", "goofys",
    "juicefs", "mount-s3", "mountpoint-s3", "rclone", "s3fs", "sshfs", "dfuse", "seaweed", "weka",
)  # fmt: skip
_TRY_S: Final = 0.01
_TOLD_PACKAGES: Final = ("torch", "pillow", "simplejpeg", "numpy")


def environment(
    root: Path = ROOT, gpus: Callable[[], tuple[tuple[str, ...], str]] | None = None
) -> Environment:
    """Look around.

    Args:
        root: where `proc`, `sys` and `dev` are.
        gpus: says which there are, and why none is seen.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    memory = byte_fields(root / "proc/meminfo")
    limits = [usage.limit for usage in memory_usages(root)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    engine, why = _engine()
    found, gpu_why = (gpus or _gpus)()
    shm = _space(root / "dev/shm")
    return Environment(
        kernel=platform.release(),
        cpus=min(float(affinity), quota) if quota else float(affinity),
        cpus_machine=os.cpu_count() or affinity, cpus_affinity=affinity, cpu_quota=quota,
        memory_bytes=memory.get("MemTotal", 0), memory_free_bytes=available_memory(root),
        memory_limit_bytes=min(limits, default=None),
        swap_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        nofile_soft=_limit(soft), nofile_hard=_limit(hard),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shm_bytes=shm[0] if shm else None, shm_free_bytes=shm[1] if shm else None,
        engine=engine, engine_why=_because(root, why),
        pressure={kind: _pressure(root, kind) for kind in ("cpu", "memory", "io")},
        gpus=found, gpu_why=gpu_why, packages=_packages(),
    )  # fmt: skip


def _limit(value: int) -> int:
    return 1 << 62 if value == resource.RLIM_INFINITY else value


def _space(path: Path) -> tuple[int, int] | None:
    """Bytes in all and free."""
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return told.f_frsize * told.f_blocks, told.f_frsize * told.f_bavail


def _engine() -> tuple[str, str]:
    """What would read, and why it is not io_uring: found out by making one."""
    path = os.path.realpath(sys.executable)
    try:
        reads = PieceReads([Piece(path, 0, 4096)], direct=True)
    except Exception as e:  # noqa: BLE001 - the reason is the finding
        return "", f"no reader can be made: {e}"
    try:
        reads.rate(1, _TRY_S)  # its threads say what they read with once they have begun
        return reads.engine, reads.engine_why
    finally:
        reads.close()


def _because(root: Path, why: str) -> str:
    disabled = read_text(root / "proc/sys/kernel/io_uring_disabled").strip()
    if why and disabled in ("1", "2"):
        return f"{why.rstrip('.')} (kernel.io_uring_disabled is {disabled})"
    return why


def _pressure(root: Path, kind: str) -> float:
    """Share of the last ten seconds in which some task waited; 0 where the kernel does not say."""
    for line in read_text(root / "proc/pressure" / kind).splitlines():
        words = line.split()
        if words[:1] == ["some"] and len(words) > 1 and words[1].startswith("avg10="):
            try:
                return float(words[1].removeprefix("avg10=")) / 100
            except ValueError:
                return 0.0
    return 0.0


def _gpus() -> tuple[tuple[str, ...], str]:
    """Names of the GPUs that NVML knows, and why none is seen."""
    from headrace.machine.gpu import GPUs

    sensor = GPUs()
    try:
        if not sensor.read():
            return (), sensor.why
        import pynvml

        names = []
        for i in range(pynvml.nvmlDeviceGetCount()):
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))
            names.append(
                printable(name.decode(errors="replace") if isinstance(name, bytes) else name)
            )
        return tuple(names), ""
    except Exception as e:  # noqa: BLE001 - a driver's errors are its own
        return (), f"the NVIDIA driver does not answer: {e}"
    finally:
        sensor.close()


def _packages() -> dict[str, str]:
    """Versions of what is installed; nothing is imported."""
    found = {}
    for name in _TOLD_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# -- where the data lie ----------------------------------------------------------------------------------


def place_of(path: str, simulated: str = "", root: Path = ROOT) -> Place:
    """The mount and device of a path, or what a URL says.

    Args:
        path: a local path or a URL.
        simulated: the label of a storage that is simulated there.
        root: where `proc` and `sys` are.
    """
    if is_url(path):
        return Place(
            mount=shown(root_of(path)),
            file_system=scheme_of(path),
            network=True,
            simulated=simulated,
        )
    real = os.path.realpath(path)
    below = [m for m in mounts(root) if _is_below(real, m.point)]
    if not below:
        return Place(simulated=simulated)
    mount = max(reversed(below), key=lambda m: len(m.point))
    return Place(
        mount=mount.point, file_system=mount.kind, source=mount.source, options=mount.options,
        network=is_network(mount), rotational=_rotational(root, mount.device), device=mount.device,
        simulated=simulated,
    )  # fmt: skip


def is_network(mount: Mount) -> bool:
    """Whether its bytes come from another machine, as far as the kernel's words tell."""
    kind = mount.kind
    if kind.startswith("fuse"):
        text = f"{kind} {mount.source}".lower()
        return any(name in text for name in _NETWORK_FUSE)
    return kind in _NETWORK


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _rotational(root: Path, device: str) -> bool | None:
    """Whether the disk behind a device number turns; None where there is no disk that says so.

    A virtual machine's disk says that it turns, whatever it is: nothing is known of it.
    """
    folder = root / "sys/dev/block" / device
    if "virtio" in os.path.realpath(folder):
        return None
    for place in ("queue/rotational", "../queue/rotational"):
        text = read_text(folder / place).strip()
        if text in ("0", "1"):
            return text == "1"
    return None
