"""Shards: where the samples of a tar or TFRecord file lie, for programs that read such files from begin to end.

What such a program reads says nothing of the samples. Only headers are read, and nothing is unpacked; a file
that is gone, compressed or damaged has none.
"""

from __future__ import annotations

import os
import struct
import tarfile
from typing import Final

__all__ = ["records_of"]

_RECORDS_MAX: Final = 1_000_000


def records_of(path: str, size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of each sample in the order of the file; empty where it is no such file."""
    try:
        if path.endswith(".tar"):
            return _of_tar(path)
        if ".tfrecord" in os.path.basename(path):
            return _of_tfrecord(path, size)
    except (OSError, tarfile.TarError, ValueError, EOFError):
        pass
    return []


def _of_tar(path: str) -> list[tuple[int, int]]:
    """WebDataset's rule: members that share a name up to its first dot are one sample."""
    found: list[tuple[int, int]] = []
    last = None
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, name = os.path.split(member.name)
            key = os.path.join(folder, name.split(".", 1)[0])
            end = member.offset_data + member.size
            if key == last:
                found[-1] = (found[-1][0], end - found[-1][0])
            elif len(found) == _RECORDS_MAX:
                break
            else:
                found.append((member.offset, end - member.offset))
            last = key
    return found


def _of_tfrecord(path: str, size: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    with open(path, "rb", buffering=0) as f:
        at = 0
        while at + 16 <= size and len(found) < _RECORDS_MAX:
            (length,) = struct.unpack("<Q", os.pread(f.fileno(), 12, at)[:8])
            nbytes = length + 16
            if nbytes > size - at:
                return []
            found.append((at, nbytes))
            at += nbytes
    return found
