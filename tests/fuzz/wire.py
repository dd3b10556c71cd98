"""Bodies of messages: a message that comes out of any bytes is encoded to one that reads the same."""

from __future__ import annotations

from headrace.node import wire
from node import test_wire


def seeds() -> list[bytes]:
    messages = [*test_wire.REQUESTS, *test_wire.REPLIES]
    return [wire.encode(message)[4:] for message in messages]


def one_input(data: bytes) -> str:
    outcome = "refused"
    for decode in (wire.decode_request, wire.decode_reply):
        try:
            message = decode(data)
        except wire.WireError:
            continue
        outcome = "accepted"
        again = wire.encode(message)
        assert decode(again[4:]) == message
        assert len(again) <= 4 * len(data) + 64  # a reply is no amplifier
    return outcome
