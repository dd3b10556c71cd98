"""The answers as bytes, without a kernel: what it may send gets an answer, whatever it is."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.posix.mount import protocol
from headrace.posix.mount.filesystem import DOOR, FileSystem, SampleBytes
from headrace.posix.mount.protocol import ROOT, BadRequestError, Opcode

HEADER = struct.Struct("=IIQQIIIHH")


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "s.hr"
    hr.pack(lambda: [(f"a/{i}", b"x" * i) for i in range(9)], path)
    with hr.open(path) as store:
        yield FileSystem(store, SampleBytes(store), owner=(1, 2), mtime_ns=3 * 10**9)


def request(opcode: int, node: int, body: bytes, unique: int = 7) -> memoryview:
    size = HEADER.size + len(body)
    return memoryview(HEADER.pack(size, opcode, unique, node, 0, 0, 0, 0, 0) + body)


def ask(system, opcode, node, body=b"") -> tuple[int, bytes]:
    head, data = system.answer(request(opcode, node, body), lambda: None)
    size, error, unique = struct.unpack("=IiQ", head)
    assert (size, unique) == (len(head) + len(data), 7)
    assert not (error and data)
    return -error, bytes(data)


def node_of(data: bytes) -> int:
    return struct.unpack_from("=Q", data)[0]


nodes = st.sampled_from(
    [0, ROOT, DOOR, 3, 16, 20, 10**6, 1 << 62, (1 << 62) | (1 << 44)]
) | st.integers(0, 2**64 - 1)


@settings(max_examples=1500, deadline=None)
@given(
    opcode=st.integers(0, 60) | st.sampled_from([int(o) for o in Opcode]),
    node=nodes,
    body=st.binary(max_size=120),
)
def test_any_request_is_answered_or_needs_none(system, opcode, node, body):
    reply = system.answer(request(opcode, node, body), lambda: None)
    if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
        assert reply is None
        return
    head, data = reply
    size, error, unique = struct.unpack("=IiQ", head)
    assert (size, unique) == (16 + len(data), 7)
    assert error == 0 or -error in errno.errorcode


@given(st.binary(max_size=200))
def test_what_is_no_request_is_refused(system, data):
    if len(data) >= 40 and struct.unpack_from("=I", data)[0] == len(data):
        return
    with pytest.raises(BadRequestError):
        system.answer(memoryview(data), lambda: None)


def test_what_writes_is_a_read_only_file_system(system):
    for opcode in protocol.WRITING:
        assert ask(system, opcode, ROOT, bytes(64)) == (errno.EROFS, b"")


def test_a_walk(system):
    error, data = ask(system, Opcode.LOOKUP, ROOT, b"a\0")
    folder = node_of(data)
    assert not error
    error, data = ask(system, Opcode.LOOKUP, folder, b"8\0")
    file = node_of(data)
    assert file == 16 + 8
    error, data = ask(system, Opcode.READ, file, struct.pack("=QQIIQII", 0, 3, 100, 0, 0, 0, 0))
    assert (error, data) == (0, b"x" * 5)
    error, data = ask(system, Opcode.READ, file, struct.pack("=QQIIQII", 0, 8, 100, 0, 0, 0, 0))
    assert (error, data) == (0, b"")
    error, data = ask(system, Opcode.LOOKUP, folder, b"9\0")
    assert (error, node_of(data)) == (0, 0)  # and the kernel may remember that there is none
    assert ask(system, Opcode.LOOKUP, file, b"9\0")[0] == errno.ENOTDIR
    assert ask(system, Opcode.READ, folder, bytes(40))[0] == errno.EISDIR
    assert ask(system, Opcode.READ, 16 + 9, bytes(40))[0] == errno.ESTALE
    assert ask(system, Opcode.GETATTR, (1 << 62) | (1 << 44) | 9, bytes(16))[0] == errno.ESTALE
    assert ask(system, Opcode.LOOKUP, ROOT, b"n" * 256 + b"\0")[0] == errno.ENAMETOOLONG


@pytest.mark.parametrize("opcode", [Opcode.READDIR, Opcode.READDIRPLUS])
@pytest.mark.parametrize("size", [170, 200, 4096])
def test_a_listing_in_pieces_of_any_size_is_the_same(system, opcode, size):
    error, data = ask(system, Opcode.LOOKUP, ROOT, b"a\0")
    folder, names, offset = node_of(data), [], 0
    while True:
        body = struct.pack("=QQIIQII", 0, offset, size, 0, 0, 0, 0)
        error, data = ask(system, opcode, folder, body)
        assert not error
        assert len(data) <= size
        if not data:
            break
        at = 0
        while at < len(data):
            at += 128 if opcode == Opcode.READDIRPLUS else 0
            _, offset, length, kind = struct.unpack_from("=QQII", data, at)
            names.append(data[at + 24 : at + 24 + length])
            assert kind == (8 if names[-1].isdigit() else 4)
            at += 24 + length + -length % 8
    assert names == [b".", b"..", *(b"%d" % i for i in range(9))]


def test_what_the_kernel_offers_is_what_it_gets(system):
    flags = protocol._WANTED
    body = struct.pack("=IIIII", 7, 45, 131072, flags & 0xFFFFFFFF, flags >> 32) + bytes(44)
    error, data = ask(system, Opcode.INIT, 0, body)
    assert (error, len(data)) == (0, 64)
    major, minor, readahead, low = struct.unpack_from("=IIII", data)
    assert (major, minor, readahead) == (7, 43, 131072)
    assert low == flags & 0xFFFFFFFF
    assert struct.unpack_from("=H", data, 40) == (120,)  # the timeout
    old = struct.pack("=IIII", 7, 31, 131072, 1)  # knows none of it
    error, data = ask(system, Opcode.INIT, 0, old)
    assert struct.unpack_from("=IIII", data) == (7, 31, 131072, 1)
    assert ask(system, Opcode.OPEN, 16, bytes(8))[0] == 0
    ask(system, Opcode.INIT, 0, body)
    assert ask(system, Opcode.OPEN, 16, bytes(8))[0] == errno.ENOSYS
    assert ask(system, Opcode.INIT, 0, struct.pack("=IIII", 7, 12, 0, 0))[0] == errno.EPROTO


def test_an_attribute_is_told_by_its_size_first(system):
    name = b"user.headrace.index\0"
    assert ask(system, Opcode.GETXATTR, 18, struct.pack("=II", 0, 0) + name) == (
        0, struct.pack("=II", 1, 0),
    )  # fmt: skip
    assert ask(system, Opcode.GETXATTR, 18, struct.pack("=II", 5, 0) + name) == (0, b"2")
    listed = ask(system, Opcode.LISTXATTR, 18, struct.pack("=II", 4, 0))
    assert listed == (errno.ERANGE, b"")
