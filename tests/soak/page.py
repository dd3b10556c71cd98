"""Page: a few numbers in a file that a client and its driver both have mapped; a kill loses nothing.

The client says which call it is in since when; the driver says how long it kept the client stopped,
so that the time of a call is the time that it could have run.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NUMBER = struct.Struct("<q")
FIELDS = (
    "call_began_ns",  # 0: in no call
    "call",
    "call_stopped_ns",  # `stopped_ns` when it began
    "batches",
    "node_batches",
    "direct_batches",
    "samples",
    "epochs",
    "wrong",
    "longest_ns",
    "longest_call",
    "attached",
    "worker_errors",
    "resumes",
    "stopped_ns",  # by the driver
)
CALLS = ("open", "loader", "iter", "next", "close", "open and read a file", "stat")
SIZE = 4096


class Page:
    """Numbers by name, as attributes.

    Args:
        path: of the file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as f:
            f.truncate(SIZE)
            self.__dict__["_memory"] = mmap.mmap(f.fileno(), SIZE)

    def __getattr__(self, name: str) -> int:
        return int(_NUMBER.unpack_from(self._memory, 8 * FIELDS.index(name))[0])

    def __setattr__(self, name: str, value: int) -> None:
        _NUMBER.pack_into(self._memory, 8 * FIELDS.index(name), value)
