"""Format: a run's folder, byte by byte.

    RUN/run.json                what the run is: one JSON object
    RUN/rank-00003.trace        what rank 3 did; its second file (another loader, or after a resume)
    RUN/rank-00003-1.trace      has a number

A trace begins with one line of JSON (`Header`, its checksum last), then chunks, little-endian, until the
file ends:

    u32 kind, u32 bytes, u32 crc32c of the payload, u32 crc32c of these 12 bytes, payload

kind 1: steps: records of dtype `STEP`, which the header describes; kind 2: one event: a JSON object with
`kind` and `at_s`. Other kinds are skipped. Traces whose steps are laid out otherwise, those of headrace 0.1
among them, are refused. Times are seconds of the host's monotonic clock; the header says which Unix time that
was. A file may be cut off anywhere: what is whole before the cut counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.base.checksum import crc32c
from headrace.base.documents import DocumentKind, seal, unseal
from headrace.base.files import NewFile
from headrace.errors import TraceError
from headrace.plane.batch_trace import PHASES, STEP
from headrace.plane.stage import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray


VERSION: Final = 2
STEPS: Final = 1
EVENT: Final = 2

HEADER_BYTES_MAX: Final = 64 << 10
CHUNK_BYTES_MAX: Final = 4 << 20
RANKS_MAX: Final = 1 << 20

_CHUNK: Final = struct.Struct("<IIII")
_CHUNK_HEAD: Final = struct.Struct("<III")  # of a chunk, what its head's checksum is of
_LAYOUT: Final = {
    "step": [[name, STEP[name].base.str, list(STEP[name].shape)] for name in STEP.names or ()],
    "phases": list(PHASES), "tiers": list(TIERS),
}  # fmt: skip
"""What a header says of its steps."""
_NAMES: Final = re.compile(r"rank-(\d{5,7})(?:-(\d{1,6}))?\.trace")
_FOREIGN: Final = "Name the folder that `trace=` or HEADRACE_TRACE had."
RUN: Final = DocumentKind(
    name="a run's facts", version=1, unchecked=0, error=TraceError, marks={"headrace_run": 1},
    next_step="Leave the file out to read the traces beside it, or read it with the headrace that wrote it.",
    bytes_max=1 << 20,
)  # fmt: skip
_DAMAGED: Final = "The file is damaged: leave it out to read the rest of the run."
_OTHER: Final = (
    "Read it with the version of headrace that wrote it, or trace a new run, in another folder."
)


def trace_number(name: str) -> tuple[int, int] | None:
    """Rank and number of a file by its name; None: it is no trace."""
    match = _NAMES.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def header_line(fields: Mapping[str, Any]) -> bytes:
    """The first line of a trace; `fields` are what `RankTrace` says about the file."""
    document = {"headrace_trace": VERSION, **fields, **_LAYOUT}
    return seal(json.dumps(document, separators=(",", ":")).encode())


def chunk(kind: int, payload: bytes) -> bytes:
    """A chunk as it stands in the file."""
    head = _CHUNK_HEAD.pack(kind, len(payload), crc32c(payload))
    return head + crc32c(head).to_bytes(4, "little") + payload


def json_object(data: bytes, path: str, what: str) -> dict[str, Any]:
    """A JSON object of a file; raises TraceError if it is none."""
    try:
        document = json.loads(data.decode())
        if b"\\u" in data:  # halves of characters, which nobody could print
            text = json.dumps(document, ensure_ascii=False)
            document = json.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError) as e:
        wrong = f"{path}: {what} is no JSON: {_short(e)}."
        raise TraceError(wrong, path=path, next_step=_FOREIGN) from e
    if not isinstance(document, dict):
        wrong = f"{path}: {what} is a {type(document).__name__}, expected an object."
        raise TraceError(wrong, path=path, next_step=_FOREIGN)
    return document


def read_header(data: bytes, path: str) -> tuple[dict[str, Any], int] | None:
    """The header in a file's first `HEADER_BYTES_MAX` bytes, and where its chunks begin; None: it is cut off.

    Raises TraceError if this is not the beginning of a trace, or of one that is newer than this.
    """
    end = data.find(b"\n")
    if end < 0:
        begin = b'{"headrace_trace":'
        if len(data) < HEADER_BYTES_MAX and (data.startswith(begin) or begin.startswith(data)):
            return None
        raise TraceError(f"{path} is no trace of headrace.", path=path, next_step=_FOREIGN)
    sums = unseal(data[: end + 1])
    if sums is not None and sums[0] != sums[1]:
        raise _damaged(path, 0, f"its first line's checksum is {sums[0]}, it says {sums[1]}")
    header = json_object(data[:end], path, "its first line")
    version = header.get("headrace_trace")
    if version != VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > VERSION
        raise TraceError(
            f"{path} has version {str(version)[:20]} of the format, expected {VERSION}.",
            path=path, next_step=_OTHER if newer or version == 1 else _FOREIGN,
        )  # fmt: skip
    if sums is None:
        raise _damaged(path, 0, "its first line's checksum is missing or damaged")
    if {name: header.get(name) for name in _LAYOUT} != _LAYOUT:
        what = "its steps are laid out as another version of headrace does"
        raise TraceError(f"{path}: {what}.", path=path, next_step=_OTHER)
    return header, end + 1


def chunks(data: memoryview, begin: int, path: str) -> Iterator[tuple[int, memoryview, int]]:
    """The whole chunks of a file from `begin` on: (kind, payload, where it ends), up to what is cut off.

    Raises TraceError if a chunk is not as it was written.
    """
    at, size = begin, len(data)
    while size - at >= _CHUNK.size:
        kind, length, crc, of_head = _CHUNK.unpack_from(data, at)
        if kind == 0 and not any(data[at:]):
            return  # a power failure leaves zeros where the end was to be
        if (stated := crc32c(data[at : at + _CHUNK_HEAD.size])) != of_head:
            what = f"a chunk's head has the checksum {stated:08x}, it says {of_head:08x}"
            raise _damaged(path, at, what)
        if length > CHUNK_BYTES_MAX:
            what = f"a chunk of {length:,} bytes, at most {CHUNK_BYTES_MAX:,} are allowed"
            raise _damaged(path, at, what)
        first = at + _CHUNK.size
        if first + length > size:
            return
        payload = data[first : first + length]
        if (checksum := crc32c(payload) if length else 0) != crc:
            raise _damaged(path, at, f"a chunk's checksum is {checksum:08x}, it says {crc:08x}")
        at = first + length
        yield kind, payload, at


def steps_in(payload: memoryview, offset: int, path: str) -> NDArray[np.void]:
    """The steps of a chunk, dtype `STEP`; raises TraceError if they are not whole, or say what cannot be."""
    if not payload:
        return np.empty(0, STEP)
    if len(payload) % STEP.itemsize:
        what = f"{len(payload):,} bytes of steps of {STEP.itemsize:,} bytes each"
        raise _damaged(path, offset, what)
    rows = np.frombuffer(payload, STEP)
    if not _sensible(rows):
        raise _damaged(path, offset, "a step whose times or amounts cannot be")
    return rows


_SECONDS_MAX: Final = 1e12
_AMOUNT_MAX: Final = 1 << 62


def _sensible(rows: NDArray[np.void]) -> bool:
    """Whether sums over these steps mean something; NaN fails each comparison."""
    for name in STEP.names or ():
        values, kind = rows[name], STEP[name].base.kind
        most = _SECONDS_MAX if kind == "f" else _AMOUNT_MAX
        bounded = kind in "fu" and name not in ("order_hash", "left_out_hash")
        if bounded and not np.all((values >= 0) & (values <= most)):
            return False
    some_left = np.all(rows["left_out"] <= rows["samples"])
    return bool(some_left and np.all(rows["delivered_s"] >= rows["asked_s"]))


def finite(value: Any, otherwise: float = 0.0) -> float:
    """A number of a file's JSON; `otherwise` if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return otherwise
    return float(value) if abs(value) < _AMOUNT_MAX and math.isfinite(value) else otherwise


def _damaged(path: str, offset: int, what: str) -> TraceError:
    return TraceError(
        f"{path}: at byte {offset:,} there is {what}.",
        path=path, offset_bytes=offset, next_step=_DAMAGED,
    )  # fmt: skip


def _short(error: BaseException) -> str:
    return str(error)[:200]


LOG = logging.getLogger("headrace.trace")

BYTES_MAX: Final = 1 << 30
"""Of one file: six million steps. HEADRACE_TRACE_BYTES sets another limit."""

_END_BYTES: Final = 4096  # is left free for the file's last word

_FILES_MAX: Final = 1_000_000


def bytes_max() -> int:
    """How large a file may become; raises ValueError if HEADRACE_TRACE_BYTES is no number of bytes."""
    text = os.environ.get("HEADRACE_TRACE_BYTES", "").strip()
    if not text:
        return BYTES_MAX
    if not (text.isascii() and text.isdigit()) or int(text) < 1 << 16:
        expected = "a number of bytes, at least 65536"
        raise ValueError(f"HEADRACE_TRACE_BYTES is {text!r}, expected {expected}")
    return int(text)


class TraceFile:
    """Appends at most so many bytes to a file of a rank's own; the run's folder is made.

    Raises OSError if it cannot be made.
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
        path = str(Path(folder, f"rank-{rank:05d}{f'-{number}' if number else ''}.trace"))
        with suppress(FileExistsError):
            return os.open(path, flags, 0o666), path
    raise FileExistsError(f"{folder} has {_FILES_MAX:,} traces of rank {rank}")


def write_once(path: Path, data: bytes) -> None:
    """Write a file unless it is there; nobody ever sees half of it."""
    if path.exists():
        return
    with NewFile(path, os.O_WRONLY) as new, suppress(FileExistsError):
        os.write(new.fd, data)
        try:
            new.publish(sync=False, replace=False)
        except PermissionError:  # a file system without links
            new.publish(sync=False)
