"""Disks: what was read and written, and how long it took, from /proc/diskstats.

Whole disks only: a partition's figures are its disk's too, and a RAID's or a volume manager's are those
of what they lie on. Times are milliseconds in 32 bits, which wrap after 49 days of work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.job import clean
from headrace.machine.counters import Growth
from headrace.machine.sensors import Key, Reading, lines_of, number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Disks"]

DISKS_MAX = 64

_SECTOR_BYTES = 512
"""Of /proc/diskstats, whatever the device has."""

_VIRTUAL = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")


class Disks:
    """Bytes and seconds of each disk."""

    name = "disk"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/diskstats"
        self._block = root / "sys/block"
        self._amounts = Growth()
        self._times = Growth(bits=32)
        self._whole: dict[str, bool] = {}
        self.why = ""

    def read(self) -> Reading:
        """What there is now."""
        amounts: dict[Key, float] = {}
        times: dict[Key, float] = {}
        disks = 0
        for line in lines_of(self._path):
            words = line.split()
            if len(words) < 14 or disks >= DISKS_MAX or not self._is_whole(words[2]):
                continue
            values = [number(word) for word in words[3:14]]
            if None in values:
                continue
            disks += 1
            disk, (reads, _, sectors_read, read_ms, writes, _, sectors_written, write_ms, _, busy_ms, _) = (
                clean(words[2]), [value or 0.0 for value in values],
            )  # fmt: skip
            amounts["disk_read_bytes", disk] = _SECTOR_BYTES * sectors_read
            amounts["disk_written_bytes", disk] = _SECTOR_BYTES * sectors_written
            amounts["disk_reads", disk] = reads
            amounts["disk_writes", disk] = writes
            times["disk_read_s", disk] = read_ms
            times["disk_write_s", disk] = write_ms
            times["disk_busy_s", disk] = busy_ms
        self.why = "" if disks else f"{self._path} names no disk"
        grown = self._amounts.since(amounts)
        return Reading(grown | {key: ms / 1e3 for key, ms in self._times.since(times).items()})

    def _is_whole(self, name: str) -> bool:
        if name not in self._whole:
            if len(self._whole) > 4 * DISKS_MAX:
                self._whole.clear()
            virtual = name.startswith(_VIRTUAL)
            # Where nobody says which are disks, partitions are counted too.
            there = not self._block.is_dir() or (self._block / name.replace("/", "!")).is_dir()
            self._whole[name] = there and not virtual
        return self._whole[name]
