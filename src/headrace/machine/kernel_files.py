"""Files of the kernel: short texts below /proc and /sys; what cannot be read says nothing."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["byte_fields", "read_text"]

_FILE_BYTES_MAX = 1 << 16
_KILOBYTES = re.compile(r"\s*([0-9]{1,15}) kB\s*")


def read_text(path: Path) -> str:
    """What a file says; '' where it cannot be read."""
    # Not `open`: a sample that is being watched would seem to have opened this file.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _FILE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def byte_fields(path: Path) -> dict[str, int]:
    """Bytes by name, of lines like those of /proc/meminfo: `MemFree:  1024 kB`."""
    found = {}
    for line in read_text(path).splitlines():
        name, _, rest = line.partition(":")
        if (number := _KILOBYTES.fullmatch(rest)) is not None:
            found[name] = int(number[1]) * 1024
    return found
