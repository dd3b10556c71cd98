"""File: one rank's trace, written from the front to the back, and never more than so many bytes.

Each chunk is one `write`: whoever is killed leaves whole chunks, and at most one that is cut off. When the
room is used up, or the disk refuses, the file says so at its end and grows no more.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.trace.format import CHUNK_BYTES_MAX, EVENT, STEPS, chunk, header_line, trace_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BYTES_MAX", "TraceFile", "bytes_max", "write_once"]

LOG = logging.getLogger("headrace.trace")

BYTES_MAX: Final = 1 << 30
"""Of one file: nine million steps. HEADRACE_TRACE_BYTES sets another limit."""

_END_BYTES: Final = 4096
"""Is left free for the file's last word."""

_FILES_MAX: Final = 1_000_000


def bytes_max() -> int:
    """How large a file may become.

    Raises:
        ValueError: HEADRACE_TRACE_BYTES is no number of bytes.
    """
    text = os.environ.get("HEADRACE_TRACE_BYTES", "").strip()
    if not text:
        return BYTES_MAX
    if not (text.isascii() and text.isdigit()) or int(text) < 1 << 16:
        raise ValueError(
            f"HEADRACE_TRACE_BYTES is {text!r}, expected a number of bytes, at least 65536"
        )
    return int(text)


class TraceFile:
    """Appends to a file of its own, that nobody else writes.

    Args:
        folder: the run's; is made.
        rank: whose.
        header: what the file says of itself.
        most: bytes.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: str, rank: int, header: Mapping[str, Any], most: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._fd, self.path = _new_file(folder, rank)
        self._left = most - _END_BYTES
        self.open = True
        self._put(header_line(header))

    def steps(self, rows: NDArray[np.void]) -> None:
        """Append steps, dtype `STEP`."""
        together = CHUNK_BYTES_MAX // rows.dtype.itemsize
        for begin in range(0, len(rows), together):
            self._put(chunk(STEPS, rows[begin : begin + together].tobytes()))

    def event(self, event: Mapping[str, Any]) -> None:
        """Append an event; one that is larger than a chunk may be is left out."""
        payload = json.dumps(event, separators=(",", ":")).encode()
        if len(payload) <= CHUNK_BYTES_MAX:
            self._put(chunk(EVENT, payload))

    def close(self, why: str) -> None:
        """Say why it ends, and end."""
        if self.open:
            self.open = False
            end = {"kind": "end", "at_s": time.monotonic(), "why": why}
            with suppress(OSError):
                os.write(self._fd, chunk(EVENT, json.dumps(end).encode()))
            self.forget()

    def forget(self) -> None:
        """Let go of it without a word: it belongs to the process that this one was forked from."""
        self.open = False
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def _put(self, data: bytes) -> None:
        if not self.open:
            return
        if len(data) > self._left:
            self._stop("it has reached the size that HEADRACE_TRACE_BYTES allows")
            return
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as e:
            self._stop(f"it could not be written: {e.strerror}")
            return
        self._left -= len(data)

    def _stop(self, why: str) -> None:
        LOG.warning("%s: the trace ends here, the run goes on: %s", self.path, why)
        self.close(why)


def _new_file(folder: str, rank: int) -> tuple[int, str]:
    """A file that was not there: what another process or an earlier run wrote is left alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND
    for number in range(_FILES_MAX):
        path = str(Path(folder, trace_name(rank, number)))
        with suppress(FileExistsError):
            return os.open(path, flags, 0o666), path
    raise FileExistsError(f"{folder} has {_FILES_MAX:,} traces of rank {rank}")


def write_once(path: Path, data: bytes) -> None:
    """Write a file unless it is there; nobody ever sees half of it."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    try:
        with suppress(FileExistsError):
            try:
                os.link(draft, path)
            except PermissionError:  # a file system without links
                draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
