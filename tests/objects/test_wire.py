"""One connection, fed by hand: what counts as a stall, and what is believed of an answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from headrace.io.objects.connections import Connection, Response, _lines
from headrace.io.objects.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = b'HTTP/1.1 206 OK\r\nContent-Length: %d\r\nETag: "x"\r\nX-Other: y\r\n\r\n'


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps."""

    jumped_s = 0.0

    def time(self) -> float:
        return super().time() + self.jumped_s


class Sent:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.data += data

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def loop() -> Iterator[Clock]:
    made = Clock()
    yield made
    made.close()


def connected() -> tuple[Connection, Sent]:
    connection, sent = Connection(), Sent()
    connection.connection_made(sent)  # type: ignore[arg-type]  # as far as it is used
    return connection, sent


def feed(connection: Connection, data: bytes) -> None:
    while data:
        view = memoryview(connection.get_buffer(-1))
        count = min(len(view), len(data))
        view[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


async def passes(loop: Clock, seconds: float) -> None:
    loop.jumped_s += seconds
    await asyncio.sleep(0.001)  # whatever is due by now happens


def test_bytes_that_come_slowly_are_no_stall(loop: Clock) -> None:
    async def run() -> tuple[Response, bytes]:
        connection, _ = connected()
        dest = bytearray(30)
        answer = asyncio.ensure_future(connection.get(b"GET", memoryview(dest), 10.0))
        await asyncio.sleep(0)
        feed(connection, HEAD % 30)
        for i in range(30):
            await passes(loop, 9.0)
            feed(connection, bytes([i]))
        return await answer, bytes(dest)

    response, data = loop.run_until_complete(run())
    assert (response.status, response.received, data) == (206, 30, bytes(range(30)))
    assert loop.jumped_s == 270


def test_silence_is_a_stall_and_ends_the_connection(loop: Clock) -> None:
    async def run() -> Connection:
        connection, sent = connected()
        answer = asyncio.ensure_future(connection.get(b"GET", memoryview(bytearray(30)), 10.0))
        await asyncio.sleep(0)
        feed(connection, HEAD % 30)
        await passes(loop, 9.0)
        assert not answer.done()
        await passes(loop, 1.5)
        with pytest.raises(Fault, match="stalled: no byte"):
            await answer
        assert sent.aborted
        return connection

    assert not loop.run_until_complete(run()).reusable


def test_only_headers_that_matter_are_kept_in_any_case_and_spacing(loop: Clock) -> None:
    async def run(head: bytes) -> dict[str, str]:
        connection, _ = connected()
        answer = asyncio.ensure_future(connection.get(b"GET", memoryview(bytearray(1)), 10.0))
        await asyncio.sleep(0)
        feed(connection, head + b"z")
        return (await answer).headers

    found = loop.run_until_complete(
        run(
            b"HTTP/1.1 206 OK\r\ncontent-LENGTH:1\r\nContent-Range:   bytes 0-0/9  \r\n"
            b'X-ETag: no\r\nETag: W/"a: b"\r\nServer: s\r\n\r\n'
        )
    )
    assert found == {"content-length": "1", "content-range": "bytes 0-0/9", "etag": 'W/"a: b"'}


@pytest.mark.parametrize("value", ["a\r\nHost: b", "a\nb", "a\0b", "a\r"])
def test_a_header_with_a_line_break_is_never_sent(value: str) -> None:
    with pytest.raises(Fault, match="line break"):
        _lines({"Range": "bytes=0-1", "If-Match": value})


def test_headers_are_sent_as_lines() -> None:
    given: dict[str, Any] = {"Range": "bytes=0-1", "If-Match": '"x"'}
    assert _lines(given) == b'Range: bytes=0-1\r\nIf-Match: "x"\r\n\r\n'
