"""Environment: what the machine, its limits and a control group allow. Nothing is tried that costs.

What cannot be read is left at its default: a doctor who cannot see says nothing.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.base.text import printable
from headrace.insight.doctor.findings import DataPlace, Environment
from headrace.insight.doctor.reads import PieceReads
from headrace.insight.doctor.samples import Piece, version_of
from headrace.io.objects.location import is_url, root_of, scheme_of, shown
from headrace.machine.host import available_memory, byte_fields, cpu_quota, memory_usages, read_text
from headrace.machine.mounts import is_network, mount_of, mounts

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path("/")

_TRY_S: Final = 0.01
_PACKAGES: Final = ("torch", "pillow", "simplejpeg", "numpy")


def environment(
    root: Path = ROOT, gpus: Callable[[], tuple[tuple[str, ...], str]] | None = None
) -> Environment:
    """Look around, with `proc`, `sys` and `dev` below `root`."""
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    memory = byte_fields(root / "proc/meminfo")
    limits = [usage.limit for usage in memory_usages(root)]
    infinite = resource.RLIM_INFINITY
    soft, hard = (
        1 << 62 if limit == infinite else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    engine, why = _engine()
    disabled = read_text(root / "proc/sys/kernel/io_uring_disabled").strip()
    if why and disabled in ("1", "2"):
        why = f"{why.rstrip('.')} (kernel.io_uring_disabled is {disabled})"
    names, gpu_why = (gpus or _gpus)()
    try:
        shm: os.statvfs_result | None = os.statvfs(root / "dev/shm")
    except OSError:
        shm = None
    return Environment(
        kernel=platform.release(),
        cpus=min(float(affinity), quota) if quota else float(affinity),
        cpus_machine=os.cpu_count() or affinity, cpus_affinity=affinity, cpu_quota=quota,
        memory_bytes=memory.get("MemTotal", 0), memory_free_bytes=available_memory(root),
        memory_limit_bytes=min(limits, default=None),
        swap_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        nofile_soft=soft, nofile_hard=hard,
        memlock_bytes=None if memlock == infinite else memlock,
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else None,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else None,
        engine=engine, engine_why=why,
        pressure={kind: _pressure(root, kind) for kind in ("cpu", "memory", "io")},
        gpus=names, gpu_why=gpu_why, packages=_packages(),
    )  # fmt: skip


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
    versions = {name: version_of(name) for name in _PACKAGES}
    return {name: version for name, version in versions.items() if version}


# -- where the data lie ----------------------------------------------------------------------------------


def place_of(path: str, simulated: str = "", root: Path = ROOT) -> DataPlace:
    """The mount and device of a path, or what a URL says; `simulated`: the label of a storage."""
    if is_url(path):
        return DataPlace(
            mount=shown(root_of(path)),
            file_system=scheme_of(path),
            network=True,
            simulated=simulated,
        )
    mount = mount_of(path, mounts(root))
    if mount is None:
        return DataPlace(simulated=simulated)
    return DataPlace(
        mount=mount.point, file_system=mount.kind, source=mount.source, options=mount.options,
        network=is_network(mount.kind, mount.source), rotational=_rotational(root, mount.device),
        device=mount.device, simulated=simulated,
    )  # fmt: skip


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
