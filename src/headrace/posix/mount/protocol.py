"""FUSE's kernel protocol, the read-only part of it: bytes in, bytes out.

Knows the structs of linux/fuse.h (protocol 7.31 and later, native byte order) and no file descriptor, no
store and no thread. The kernel is trusted as a peer; a request that is too short is refused all the same,
because a cut-off read must not look like another request.
"""

from __future__ import annotations

import enum
import errno
import struct
from typing import NamedTuple, TypeAlias

MAJOR, MINOR_MIN, MINOR = 7, 31, 43
"""7.31 is Linux 5.4; 7.43 the last whose fields are used here (the request timeout)."""

ROOT = 1  # the number of the root folder, as the protocol has it
WRITE_BYTES_MAX = 4096
"""Nothing is written, so requests stay small; the least that the kernel takes."""

REQUEST_BYTES = 16 << 10
"""Longer than any request: two names of at most 4 kB. The kernel asks for 8 KiB or more."""

READ_BYTES_MAX = 1 << 20  # the longest read: 256 pages, what the kernel allows without a sysctl


class Opcode(enum.IntEnum):
    """Requests that are answered with more than ENOSYS or EROFS, or not at all."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    GETXATTR = 22
    LISTXATTR = 23
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44


WRITING = frozenset((4, 6, 8, 9, 10, 11, 12, 13, 16, 21, 24, 35, 43, 45, 47, 51))
"""setattr, symlink, mknod, mkdir, unlink, rmdir, rename, link, write, setxattr, removexattr, create,
fallocate, rename2, copy_file_range, tmpfile."""

_ASYNC_READ = 1 << 0
_DO_READDIRPLUS = 1 << 13
_READDIRPLUS_AUTO = 1 << 14
_NO_OPEN_SUPPORT = 1 << 17
_PARALLEL_DIROPS = 1 << 18
_MAX_PAGES = 1 << 22
_NO_OPENDIR_SUPPORT = 1 << 24
_INIT_EXT = 1 << 30
_REQUEST_TIMEOUT = 1 << 42

_WANTED = (
    _ASYNC_READ | _DO_READDIRPLUS | _READDIRPLUS_AUTO | _NO_OPEN_SUPPORT | _PARALLEL_DIROPS
    | _MAX_PAGES | _NO_OPENDIR_SUPPORT | _INIT_EXT | _REQUEST_TIMEOUT
)  # fmt: skip

_IN_HEADER = struct.Struct("=IIQQIIIHH")
_OUT_HEADER = struct.Struct("=IiQ")
_INIT_IN = struct.Struct("=IIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHIIH22x")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY_OUT = struct.Struct("=QQQQII")
_ATTR_OUT = struct.Struct("=QII")
_RANGE_IN = struct.Struct("=QQIIQII")
_OPEN_OUT = struct.Struct("=QII")
_DIRENT = struct.Struct("=QQII")
_STATFS = struct.Struct("=QQQQQIIII24x")
_XATTR_IN = struct.Struct("=II")

_KEEP_CACHE, _CACHE_DIRECTORY = 1 << 1, 1 << 3

_DIRECTORY_TYPE, _FILE_TYPE = 4, 8  # DT_DIR, DT_REG
_BLOCK_BYTES = 4096

Reply: TypeAlias = tuple[bytes, bytes | memoryview]
"""A whole answer, head and data, to be written in one piece."""


class BadRequestError(ValueError):
    """A request that is no request."""


# -- requests ----------------------------------------------------------------------------------------


class MountRequest(NamedTuple):
    """What every request has."""

    opcode: int
    unique: int
    node: int
    body: memoryview


class InitRequest(NamedTuple):
    """The kernel's offer."""

    major: int
    minor: int
    max_readahead: int
    flags: int

    @property
    def skips_opens(self) -> bool:
        """Whether ENOSYS to OPEN and OPENDIR means: never ask again, and keep what is cached."""
        both = _NO_OPEN_SUPPORT | _NO_OPENDIR_SUPPORT
        return self.flags & both == both


def parse(data: memoryview) -> MountRequest:
    """A request's header and body. Raises BadRequestError if it is shorter than it says."""
    size, opcode, unique, node = _unpacked(_IN_HEADER, data)[:4]
    if size != len(data):
        raise BadRequestError(f"{len(data)} bytes, the header says {size}")
    return MountRequest(opcode, unique, node, data[_IN_HEADER.size :])


def parse_init(body: memoryview) -> InitRequest:
    """The body of INIT."""
    major, minor, readahead, flags = _unpacked(_INIT_IN, body)
    if flags & _INIT_EXT and len(body) >= _INIT_IN.size + 4:
        flags |= struct.unpack_from("=I", body, _INIT_IN.size)[0] << 32
    return InitRequest(major, minor, readahead, flags)


def parse_name(body: memoryview) -> bytes:
    """The body of LOOKUP: a name and its NUL."""
    name, end, _ = bytes(body).partition(b"\0")
    if not end:
        raise BadRequestError("a name without its end")
    return name


def parse_range(body: memoryview) -> tuple[int, int]:
    """The body of READ, READDIR and READDIRPLUS: offset and size."""
    _, offset, size, *_ = _unpacked(_RANGE_IN, body)
    return offset, size


def parse_xattr(body: memoryview) -> tuple[int, bytes]:
    """The body of GETXATTR and LISTXATTR: the caller's buffer in bytes, and the name (b"" of a list)."""
    size, _ = _unpacked(_XATTR_IN, body)
    return size, bytes(body[_XATTR_IN.size :]).partition(b"\0")[0]


def _unpacked(layout: struct.Struct, body: memoryview) -> tuple[int, ...]:
    if len(body) < layout.size:
        raise BadRequestError(f"{len(body)} bytes, expected {layout.size} or more")
    return layout.unpack_from(body)


# -- answers -----------------------------------------------------------------------------------------


def init_reply(offer: InitRequest, *, background: int, timeout_s: int) -> bytes:
    """The answer to INIT; empty where the kernel is too old.

    `background` is how many read-ahead requests the kernel may have under way; after `timeout_s` without an
    answer it ends the connection (Linux 6.15 and later).
    """
    if offer.major != MAJOR or offer.minor < MINOR_MIN:
        return b""
    flags = offer.flags & _WANTED
    return _INIT_OUT.pack(
        MAJOR, min(offer.minor, MINOR), offer.max_readahead, flags & 0xFFFFFFFF, background,
        background, WRITE_BYTES_MAX, 1, READ_BYTES_MAX // _BLOCK_BYTES, 0, flags >> 32, 0,
        min(timeout_s, 0xFFFF),
    )  # fmt: skip


OPEN_REPLY = _OPEN_OUT.pack(0, _KEEP_CACHE | _CACHE_DIRECTORY, 0)
"""The answer to OPEN and OPENDIR where ENOSYS will not do: no handle, keep what is cached."""

NO_ATTRIBUTES = bytes(_ATTRIBUTES.size)


def attributes(node: int, size: int, mode: int, mtime_ns: int, owner: tuple[int, int]) -> bytes:
    """What stat shows, as struct fuse_attr; `owner` is user and group."""
    s, ns = divmod(mtime_ns, 10**9)
    # One link, for folders too: "not counted", so that `find` looks into each.
    return _ATTRIBUTES.pack(
        node, size, -(-size // 512), s, s, s, ns, ns, ns, mode, 1, *owner, 0, _BLOCK_BYTES, 0
    )


def attributes_reply(packed: bytes, valid_s: int) -> bytes:
    """The answer to GETATTR."""
    return _ATTR_OUT.pack(valid_s, 0, 0) + packed


def entry_reply(node: int, packed: bytes, valid_s: int) -> bytes:
    """The answer to LOOKUP. Node 0 says that there is nothing, and for how long that is true."""
    return _ENTRY_OUT.pack(node, 0, valid_s, valid_s, 0, 0) + packed


def directory_entry(name: bytes, node: int, place: int, *, is_folder: bool) -> bytes:
    """One entry of READDIR, padded; of READDIRPLUS behind an `entry_reply`."""
    head = _DIRENT.pack(node, place, len(name), _DIRECTORY_TYPE if is_folder else _FILE_TYPE)
    return head + name + bytes(-len(name) % 8)


def statfs_reply(size_bytes: int, files: int, name_bytes_max: int) -> bytes:
    """The answer to STATFS: all used, nothing free."""
    blocks = -(-size_bytes // _BLOCK_BYTES)
    return _STATFS.pack(blocks, 0, 0, files, 0, _BLOCK_BYTES, name_bytes_max, _BLOCK_BYTES, 0)


def xattr_size_reply(size: int) -> bytes:
    """The answer to GETXATTR and LISTXATTR with an empty buffer."""
    return _XATTR_IN.pack(size, 0)


def reply(unique: int, data: bytes | memoryview) -> Reply:
    """A whole answer."""
    return _OUT_HEADER.pack(_OUT_HEADER.size + len(data), 0, unique), data


def error_reply(unique: int, number: int) -> Reply:
    """A whole answer that says which error."""
    assert number in errno.errorcode
    return _OUT_HEADER.pack(_OUT_HEADER.size, -number, unique), b""


def unique_of(answer: Reply) -> int:
    """Which request an answer belongs to."""
    unique: int = _OUT_HEADER.unpack(answer[0])[2]
    return unique
