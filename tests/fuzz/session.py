"""A client's whole conversation as bytes, with reads that end in any order: accounts must add up.

The first bytes say who speaks and which reads end; the rest are frames, shared out among three clients.
"""

from __future__ import annotations

import numpy as np

from headrace.node.served import ReadOutcome
from headrace.node.wire import (
    PROTOCOL,
    Abandon,
    Ask,
    Hello,
    Hurry,
    Open,
    Release,
    Splitter,
    StatusAsked,
    WireError,
    decode_request,
    encode,
)
from node.fake_host import BATCH_MAX, Host, Memory

STEPS = 12


def seeds() -> list[bytes]:
    some = [np.arange(n, dtype=np.int64).tobytes() for n in (0, 3, BATCH_MAX)]
    asks = [encode(Ask(k + 2, 1 + k % 2, wire, [])) for k, wire in enumerate(some)]
    return [
        bytes(STEPS) + b"".join(asks) + encode(Release([2])) + encode(Abandon([3])),
        bytes(range(STEPS)) + asks[2] + encode(Hurry(4)) + encode(StatusAsked(5)),
        bytes([200] * STEPS) + asks[1] + asks[2] + encode(Ask(9, 1, some[1], [3])),
    ]


def one_input(data: bytes) -> str:
    host, buffer = Host(), 0
    for client, job in zip(host.clients, "aab", strict=True):
        client.session.handle(Hello(PROTOCOL, job))
        for ticket in (1, 2):
            client.session._last_ticket = 0
            client.session.handle(Open(ticket, b"/data", 1, "", [""], None))
        client.session._last_ticket = 1
    host.answer_opens()
    steps, splitter, refused = data[:STEPS] or b"\0", Splitter(4096), 0
    try:
        for number, body in enumerate(splitter.feed(data[STEPS:])):
            step = steps[number % len(steps)]
            client = host.clients[step % 3]
            try:
                message = decode_request(body)
            except WireError:
                refused += 1
                continue
            if isinstance(message, Ask) and len(message.indices) > 8 * BATCH_MAX:
                continue  # a fake data set has no more
            if not client.session.closed:
                refused += not host.say(client, message)
            host.answer_opens(works=bool(step & 4))
            reading = host.data[1 + (step >> 3) % 2].reading
            if reading and step & 16:
                indices, done = reading.pop(step % len(reading))
                buffer += 1
                done(ReadOutcome(Memory(indices, buffer) if step & 32 else None, "failed"))
            host.check()
    except WireError:
        refused += 1
    host.check()
    host.hang_up_all()
    return "refused" if refused else "accepted"
