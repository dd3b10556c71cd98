"""What the workers of a loader learned, in memory that they share.

Worker w of this epoch serves other samples than worker w of the next, so each must know what all
have learned. Deltas are appended to an anonymous file (memfd), which forked workers inherit and
spawned ones are handed; each process reads what the others appended since it last looked.

The file has no name: nothing is left behind, however the processes end. A record that was cut short
because its writer was killed is skipped.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from typing import Any

__all__ = ["SharedLog"]

_MAGIC = b"hrLEARN1"
_HEADER = struct.Struct("<8sIIQ")  # magic, bytes, crc32, pid


class SharedLog:
    """Deltas by all processes that hold it. Safe for concurrent writers.

    Args:
        limit_bytes: no record is appended beyond this size.
    """

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._fd = os.memfd_create("headrace-learned", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    def append(self, delta: bytes) -> bool:
        """Hand a delta to the others; False: the log is full, or closed."""
        if self._fd < 0 or os.fstat(self._fd).st_size + len(delta) > self._limit_bytes:
            return False
        record = _HEADER.pack(_MAGIC, len(delta), zlib.crc32(delta), os.getpid()) + delta
        # One write with O_APPEND: the kernel puts concurrent records one after the other.
        return os.write(self._fd, record) == len(record)

    def read_since(self, mark: int) -> tuple[list[bytes], int]:
        """What other processes appended after `mark` (0: the beginning), and the next mark."""
        if self._fd < 0:
            return [], mark
        size = os.fstat(self._fd).st_size
        if size <= mark:
            return [], mark
        data = os.pread(self._fd, size - mark, mark)
        deltas: list[bytes] = []
        at = 0
        while (found := data.find(_MAGIC, at)) >= 0 and found + _HEADER.size <= len(data):
            _, length, crc, pid = _HEADER.unpack_from(data, found)
            start = found + _HEADER.size
            delta = data[start : start + length]
            if len(delta) == length and zlib.crc32(delta) == crc:
                at = start + length
                if pid != os.getpid():
                    deltas.append(delta)
            else:
                at = found + 1  # cut short, or the magic by chance: look for the next
        # A record that is still being written is read next time; one that never will be, too.
        return deltas, mark + at if at or not data else mark

    def close(self) -> None:
        """Let go of the file; the others keep it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        from multiprocessing.reduction import DupFd

        return {"limit_bytes": self._limit_bytes, "fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._limit_bytes = state["limit_bytes"]
        self._fd = state["fd"].detach()
