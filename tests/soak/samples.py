"""Samples that say who they are: what each must be is known without asking headrace."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 601  # prime: no batch divides it


def content(index: int) -> bytes:
    """Bytes of one sample: its number, and noise that follows from it; some are empty, some large."""
    if index % 50 == 7:
        return b""
    size = 40_000 + 97 * index if index % 12 == 5 else (index * 7919) % 9000
    return struct.pack("<Q", index) + hashlib.shake_128(b"soak %d" % index).digest(size)


def label(index: int) -> int:
    return index * 7 // SAMPLES


def write_folder(folder: Path) -> None:
    """Files in folders of classes; sorted by name they have the labels of `label`."""
    for i in range(SAMPLES):
        path = folder / f"c{label(i)}" / f"{i:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(i))


def write_store(folder: Path) -> None:
    import headrace as hr

    hr.pack(((f"{i:05d}", content(i), label(i)) for i in range(SAMPLES)), folder)


def digest_of(folder: Path) -> dict[str, tuple[int, ...] | str]:
    """Every path below a folder, with what must not change: bytes, times, inode, mode, owner."""
    found: dict[str, tuple[int, ...] | str] = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file()
        text = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        s = path.stat()  # after reading: access times may change, and are not looked at
        name = str(path.relative_to(folder))
        found[name] = (text, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_mode, s.st_uid)
    return found
