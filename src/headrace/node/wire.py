"""Wire: the messages between a node daemon and its clients, and their frames; see docs/protocol.md.

A frame is a length (4 bytes, little-endian) and so many bytes of MessagePack. Bytes in, messages out:
nothing here reads or writes sockets. A length is checked before memory is taken for what follows.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL = 5  # the version of the protocol. Both sides must have the same.
HELLO_BYTES_MAX = 4096  # a frame of somebody who has not said hello
FRAME_BYTES_MAX = 16 << 20  # any other frame
INDICES_MAX = 1 << 18
"""Samples of one batch: with three columns of int64 and several parts, a reply fits a frame."""

PARTS_MAX = 64
ROOTS_MAX = 64  # folders of one unmodified program
FDS_MAX = 16  # descriptors that come with one `Buffers`
_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """The other side does not keep to the protocol."""


class ReplyStatus(IntEnum):
    """How a request ended; every reply has one."""

    OK = 0
    WORKING = 1  # it is under way
    BUSY = 2  # no memory within the client's or the job's window: read directly
    FAILED = 3  # a sample cannot be read; read directly, which says why
    NOT_FOUND = 4  # the data set cannot be opened here
    MISMATCH = 5  # the data here is another
    BAD_REQUEST = 6  # the request breaks the protocol; the connection is closed
    VERSION = 7  # the daemon speaks another version
    REFUSED = 8  # the daemon does not serve this user, or no more clients
    STOPPING = 9  # the daemon ends


Text = Annotated[str, Meta(max_length=1024)]
Ticket = Annotated[int, Meta(ge=1, le=1 << 62)]
"""Numbers a client's requests, each higher than the one before. A batch is leased by its ticket."""
Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class _Message(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a client."""

    protocol: Count
    job: Annotated[str, Meta(max_length=256)]
    """Clients of one job share a quota."""


class Direct(_Message, frozen=True):
    """How a source that is no store is opened; see `SourceOptions`."""

    extensions: Annotated[tuple[Text, ...], Meta(max_length=64)] | None
    prefix_names: bool
    column: Annotated[tuple[Text, ...], Meta(max_length=64)] | None
    label: Text | None
    format: Text | None


class Pictures(_Message, frozen=True):
    """What is done to pictures once, for all clients that ask for it; see `headrace.Images.kept`."""

    part: Text
    keep_short: Annotated[int, Meta(ge=1, le=1 << 30)]
    filter: Text
    exact: bool
    orient: bool
    background: tuple[int, int, int] | None
    max_pixels: Count


class Open(_Message, frozen=True, tag="open"):
    """Asks for a data set."""

    ticket: Ticket
    path: Annotated[bytes, Meta(max_length=4096)]
    """Absolute, or a URL."""
    segments: Annotated[int, Meta(ge=1, le=1 << 20)]
    fingerprint: Annotated[str, Meta(max_length=128)]
    parts: Annotated[list[Text], Meta(min_length=1, max_length=PARTS_MAX)]
    direct: Direct | None
    pictures: Pictures | None = None


class Ask(_Message, frozen=True, tag="ask"):
    """Asks for a batch."""

    ticket: Ticket
    dataset: Count
    indices: bytes  # int64, little-endian
    released: list[Ticket]  # leases that are given back


class Hurry(_Message, frozen=True, tag="hurry"):
    """The client waits for this batch, and uses all that it was given."""

    ticket: Ticket


class Release(_Message, frozen=True, tag="release"):
    """Gives leases back."""

    leases: list[Ticket]


class Abandon(_Message, frozen=True, tag="abandon"):
    """Gives leases back whose memory may be looked at for ever."""

    leases: list[Ticket]


class Files(_Message, frozen=True, tag="files"):
    """Asks for files of an unmodified program: a board that says where copies are. Once per connection."""

    ticket: Ticket
    roots: Annotated[
        list[Annotated[bytes, Meta(min_length=1, max_length=4096)]],
        Meta(min_length=1, max_length=ROOTS_MAX),
    ]
    """Absolute paths of folders."""
    order: Annotated[bytes, Meta(max_length=4096)] | None
    """Absolute path of a file that lists paths in the order of their opens, one a line."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None
    """The program opens all files in the order of `headrace.order` with this seed."""
    immutable: bool  # nobody changes the files while the program runs
    simulate: Text | None  # a slow storage that they lie on


class FilesAsked(_Message, frozen=True, tag="filesasked"):
    """Asks for the figures of this connection's run."""

    ticket: Ticket


class Used(_Message, frozen=True, tag="used"):
    """What the client has gathered from the cache by itself since it last said so."""

    dataset: Count
    batches: Count
    samples: Count
    bytes: Count


class Dropped(_Message, frozen=True, tag="dropped"):
    """Answers `Gone`: the client has no mapping of these any more."""

    dataset: Count
    identities: list[Count]


Seconds = Annotated[float, Meta(ge=0.0, le=86400.0)]


class Note(_Message, frozen=True, tag="note"):
    """How a client's consumer fared since the note before; no reply. See `headrace.node.notes`."""

    waited_s: Seconds  # waited for what the daemon was asked for; the daemon knows why
    direct_s: Seconds  # waited for batches that the client read by itself
    decode_s: Seconds  # waited for the client's own work between the plane and the consumer
    worked_s: Seconds  # worked: the training step
    batches: Count  # delivered to it, however they were read
    samples: Count
    nbytes: Count
    direct_batches: Count  # batches among them that the client read by itself


class StatusAsked(_Message, frozen=True, tag="status"):
    """Asks for a report."""

    ticket: Ticket


class StopAsked(_Message, frozen=True, tag="stop"):
    """Asks the daemon to end."""

    ticket: Ticket


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answers `Hello`."""

    status: ReplyStatus
    message: str
    protocol: int
    window_bytes: int  # what one client may hold; beyond it requests wait
    requests_max: int  # requests that may wait for an answer


class Opened(_Message, frozen=True, tag="opened"):
    """Answers `Open`."""

    ticket: int
    status: ReplyStatus
    message: str
    dataset: int


class Buffers(_Message, frozen=True, tag="buffers"):
    """Brings memory, one descriptor for each; `Samples` refer to it."""

    buffers: Annotated[list[tuple[int, int]], Meta(max_length=FDS_MAX)]
    """(identity, bytes)."""


class Retired(_Message, frozen=True, tag="retired"):
    """These buffers will not be referred to again."""

    buffers: list[int]


class Cache(_Message, frozen=True, tag="cache"):
    """Brings memory of a data set's cache, one descriptor for each; see native/io/held.h."""

    dataset: int
    samples: Count
    parts: Annotated[int, Meta(ge=1, le=PARTS_MAX)]
    slabs: Annotated[list[tuple[int, int, int]], Meta(max_length=FDS_MAX)]
    """(identity, number, bytes). Number 0: the index, a new one; what came before is of no use."""


class Ahead(_Message, frozen=True, tag="ahead"):
    """How far the client may ask ahead of its consumer, from now on."""

    dataset: int
    nbytes: Annotated[int, Meta(ge=1, le=1 << 62)]
    """Of batches that were asked for and not taken."""


class Gone(_Message, frozen=True, tag="gone"):
    """Memory of a cache that the daemon has given back; to be unmapped, and answered."""

    dataset: int
    identities: list[Count]


class Samples(_Message, frozen=True, tag="samples"):
    """Answers `Ask`. The lease is the ticket."""

    ticket: int
    status: ReplyStatus
    message: str = ""
    buffer: int = 0
    nbytes: int = 0  # used bytes, from the buffer's beginning
    offsets: bytes = b""  # int64, one per sample and part
    lengths: bytes = b""
    labels: bytes = b""  # int64, one per sample; -1: none
    ram_bytes: int = 0  # how much of it was in memory
    way: bytes = b""
    """How it was read: a record of `headrace.plane.batch_trace.READ`; empty: that is not known."""


class Working(_Message, frozen=True, tag="working"):
    """Answers `Hurry` where the batch is under way, or has been answered."""

    ticket: int
    status: ReplyStatus


class FilesReady(_Message, frozen=True, tag="filesready"):
    """Answers `Files`, first at once, and again whenever there is a newer board.

    Brings two descriptors, board and ring, where `board_ino` is not 0; they replace those before.
    """

    ticket: int
    status: ReplyStatus
    message: str = ""
    files: int = 0  # files that the board knows
    nbytes: int = 0  # their bytes
    complete: bool = False  # whether all files below the roots have been found
    board_ino: int = 0
    board_fd: int = -1
    """The daemon's own descriptor: programs that the launcher starts find it as /proc/DAEMON/fd/N."""
    ring_ino: int = 0
    ring_fd: int = -1


class DaemonReport(_Message, frozen=True, tag="report"):
    """Answers `StatusAsked`, `FilesAsked` and `StopAsked`."""

    ticket: int
    status: ReplyStatus
    json: bytes


Request = (
    Hello | Open | Ask | Hurry | Release | Abandon | Note | Used | Dropped | Files | FilesAsked
    | StatusAsked | StopAsked
)  # fmt: skip
Reply = (
    Welcome
    | Opened
    | Ahead
    | Buffers
    | Retired
    | Cache
    | Gone
    | Samples
    | Working
    | FilesReady
    | DaemonReport
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)


def encode(message: Struct) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    """What a client says; raises WireError if it is no request."""
    return _decode(_requests, body)  # type: ignore[no-any-return]


def decode_reply(body: bytes | bytearray | memoryview) -> Reply:
    """What the daemon says; raises WireError if it is no reply."""
    return _decode(_replies, body)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | bytearray | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise WireError(f"no message of protocol {PROTOCOL}: {e}") from e


class Splitter:
    """Cuts a stream of bytes into frames; the largest that is accepted may be changed between frames."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._pending = bytearray()

    @property
    def partial(self) -> bool:
        """Whether the beginning of a frame waits for its rest."""
        return bool(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take more bytes; yields the bodies of frames that are complete.

        Raises WireError if a frame is empty or too large.
        """
        self._pending += data
        at = 0
        try:
            while len(self._pending) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._pending, at)
                if not 1 <= size <= self.frame_bytes_max:
                    raise WireError(
                        f"a frame of {size} bytes, expected 1 to {self.frame_bytes_max}"
                    )
                end = at + _LENGTH.size + size
                if len(self._pending) < end:
                    break
                body = bytes(memoryview(self._pending)[at + _LENGTH.size : end])
                at = end
                yield body
        finally:
            del self._pending[:at]
