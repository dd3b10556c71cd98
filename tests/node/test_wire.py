"""Frames and messages: whatever comes in, an error or a message comes out, within bounded memory."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.node import wire
from headrace.node.wire import (
    Abandon,
    Ask,
    Buffers,
    DaemonReport,
    Direct,
    Hello,
    Hurry,
    Open,
    Opened,
    Pictures,
    Release,
    ReplyStatus,
    Retired,
    Samples,
    Splitter,
    StatusAsked,
    StopAsked,
    Welcome,
    WireError,
    Working,
    decode_reply,
    decode_request,
    encode,
)

REQUESTS = [
    Hello(wire.PROTOCOL, "job"),
    Open(1, b"/data", 3, "ab" * 16, [""], None),
    Open(
        2,
        b"/data/*.tar",
        1,
        "cd",
        ["jpg", "cls"],
        Direct((".png",), False, ("image",), "label", "files"),
        Pictures("jpg", 256, "bilinear", False, True, (255, 255, 255), 1 << 26),
    ),
    Ask(3, 1, bytes(80), [1, 2]),
    Hurry(3),
    Release([3, 4]),
    Abandon([5]),
    StatusAsked(6),
    StopAsked(7),
]
REPLIES = [
    Welcome(ReplyStatus.OK, "", 1, 1 << 28, 4096),
    Opened(1, ReplyStatus.NOT_FOUND, "no such folder", 0),
    Buffers([(1, 4096), (2, 1 << 30)]),
    Retired([1, 2, 3]),
    Samples(3, ReplyStatus.OK, "", 1, 100, bytes(16), bytes(16), bytes(16), 50),
    Samples(4, ReplyStatus.BUSY, "no room"),
    Working(4, ReplyStatus.WORKING),
    DaemonReport(6, ReplyStatus.OK, b"{}"),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_come_back_as_they_were(message):
    (body,) = Splitter().feed(encode(message))
    assert decode_request(body) == message
    with pytest.raises(WireError):
        decode_reply(body)


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_come_back_as_they_were(message):
    (body,) = Splitter().feed(encode(message))
    assert decode_reply(body) == message
    with pytest.raises(WireError):
        decode_request(body)


def test_a_frame_is_its_length_and_messagepack():
    """Golden bytes: another version of the protocol must not look like this one."""
    assert encode(Hello(1, "a")) == struct.pack("<I", 10) + b"\x93\xa5hello\x01\xa1a"


@given(st.lists(st.sampled_from(REQUESTS), max_size=5), st.data())
def test_every_split_gives_the_same_messages(messages, data):
    stream = b"".join(map(encode, messages))
    splitter, got, at = Splitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        got += [decode_request(body) for body in splitter.feed(stream[at : at + size])]
        at += size
    assert got == messages
    assert not splitter.partial


@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_a_message(garbage):
    splitter = Splitter(1000)
    try:
        for body in splitter.feed(garbage):
            for decode in (decode_request, decode_reply):
                try:
                    message = decode(body)
                except WireError:
                    continue
                assert isinstance(message, msgspec.Struct)
    except WireError:
        pass
    assert len(splitter._pending) <= len(garbage)


@given(st.sampled_from([*REQUESTS, *REPLIES]), st.data())
def test_truncated_and_flipped_messages_are_an_error_or_a_message(message, data):
    body = bytearray(encode(message)[4:])
    cut = data.draw(st.integers(0, len(body)))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[at] ^= data.draw(st.integers(1, 255))
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(WireError):
            decode(bytes(body[:cut]))


@pytest.mark.parametrize("size", [0, 1001, 1 << 31, (1 << 32) - 1])
def test_a_length_is_refused_before_memory_is_taken(size):
    splitter = Splitter(1000)
    with pytest.raises(WireError, match=f"{size} bytes"):
        list(splitter.feed(struct.pack("<I", size)))


@pytest.mark.parametrize(
    "message",
    [
        ["hello", 1, "x" * 300],
        ["hello", 1, "a", "more"],
        ["hello", -1, "a"],
        ["ask", 0, 1, b"", []],
        ["ask", 1 << 63, 1, b"", []],
        ["ask", 1, 1, "text", []],
        ["ask", 1, 1, b"", [0]],
        ["open", 1, b"/" * 5000, 1, "f", [""], None],
        ["open", 1, b"/", 0, "f", [""], None],
        ["open", 1, b"/", 1, "f", [], None],
        ["open", 1, b"/", 1, "f", [""] * 65, None],
        ["unknown", 1],
        [],
        {"hello": 1},
        7,
    ],
)
def test_fields_have_bounds(message):
    with pytest.raises(WireError):
        decode_request(msgspec.msgpack.encode(message))


def test_deep_nesting_is_refused():
    with pytest.raises(WireError):
        decode_request(b"\x91" * 100_000 + b"\xc0")
