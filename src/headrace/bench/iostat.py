"""iostat.json: what processors and disks did in each second of a run, in the form of `iostat -mdxtcy -o JSON`.

DLIO starts iostat for it, which is on few machines; these are the same counters of the kernel, from our own
sampler, and the same keys. A run of less than a second has one entry, of all of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.bench.results import write_json
from headrace.machine.host import lines_of
from headrace.machine.sensors import disk_counters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.schema import Workload

_INTERVAL_S: Final = 1.0
_SECTOR_MIB: Final = 512 / 2**20
_CPU: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_NOT_DISKS: Final = ("loop", "ram", "zram", "sr", "fd")
_KINDS: Final = {"r": 0, "w": 4, "d": 11}
"""Reads, writes and discards: where in a line of /proc/diskstats their four numbers begin."""

_BUSY_MS, _QUEUE_MS, _FLUSHES, _FLUSH_MS = 9, 10, 15, 16


@contextlib.contextmanager
def sampled(workload: Workload, folder: Path) -> Iterator[None]:
    """Leave an iostat.json of what is done within, where the workload asks for it (`workflow.profiling`)."""
    if not workload.workflow.profiling or workload.profiling.profiler != "iostat":
        yield
        return
    sampler = IostatSampler(workload.profiling.iostat_devices)
    try:
        yield
    finally:
        write_json(folder / "iostat.json", sampler.document())


class IostatSampler:
    """Samples from its making until `document` is called.

    Attributes:
        devices: whole disks by name, with or without /dev/; none: all of them.
        root: where /proc and /sys are.
    """

    def __init__(self, devices: Sequence[str] = (), root: Path = Path("/")) -> None:
        self._root = root
        self._devices = {device.removeprefix("/dev/") for device in devices}
        self._entries: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._last = self._counters()
        self._thread = threading.Thread(target=self._sample, name="headrace-iostat", daemon=True)
        self._thread.start()

    def document(self) -> dict[str, Any]:
        """End, and return what was seen."""
        self._over.set()
        self._thread.join()
        system = os.uname()
        host = {
            "nodename": system.nodename, "sysname": system.sysname, "release": system.release,
            "machine": system.machine, "number-of-cpus": os.cpu_count() or 1,
            "date": time.strftime("%m/%d/%y"), "statistics": self._entries,
        }  # fmt: skip
        return {"sysstat": {"hosts": [host]}}

    def _sample(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            self._entries.append(self._since_last())
        if not self._entries:
            self._entries.append(self._since_last())

    def _counters(self) -> tuple[float, list[int], dict[str, list[float]]]:
        cpu = next(iter(lines_of(self._root / "proc/stat")), "").split()[1:9]
        disks = {
            name: numbers
            for name, numbers in disk_counters(self._root).items()
            if (name in self._devices if self._devices else not name.startswith(_NOT_DISKS))
        }
        return time.monotonic(), [int(word) for word in cpu], disks

    def _since_last(self) -> dict[str, Any]:
        (before_s, cpu_before, before), self._last = self._last, self._counters()
        now_s, cpu_now, now = self._last
        ticks = [b - a for a, b in zip(cpu_before, cpu_now, strict=True)]
        share = dict(
            zip(_CPU, (round(100 * t / max(1, sum(ticks)), 2) for t in ticks), strict=True)
        )
        share["system"] = round(share["system"] + share.pop("irq") + share.pop("softirq"), 2)
        return {
            "timestamp": time.strftime("%m/%d/%y %H:%M:%S"), "avg-cpu": share,
            "disk": [
                _disk(name, [b - a for a, b in zip(before[name], now[name], strict=True)], now_s - before_s)
                for name in now if name in before
            ],
        }  # fmt: skip


def _disk(name: str, done: list[float], seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"disk_device": name, "f/s": done[_FLUSHES] / seconds}
    for kind, at in _KINDS.items():
        count, merged, sectors, spent_ms = done[at : at + 4]
        figures |= {
            f"{kind}/s": count / seconds, f"{kind}MB/s": sectors * _SECTOR_MIB / seconds,
            f"{kind}rqm/s": merged / seconds, f"{kind}rqm": 100 * merged / max(1, merged + count),
            f"{kind}_await": spent_ms / max(1, count),
            f"{kind}areq-sz": sectors / 2 / max(1, count),
        }  # fmt: skip
    figures |= {
        "f_await": done[_FLUSH_MS] / max(1, done[_FLUSHES]),
        "aqu-sz": done[_QUEUE_MS] / 1000 / seconds, "util": min(100.0, done[_BUSY_MS] / 10 / seconds),
    }  # fmt: skip
    return {key: v if isinstance(v, str) else round(v, 2) for key, v in figures.items()}
