"""DH-HMAC-CHAP: whatever messages a peer without the secret sends, it is not believed.

The first byte says who is attacked; then messages, each behind its length in two bytes. Length 0 asks a
controller for its next message.
"""

from __future__ import annotations

from fabric.chap import reference
from fabric.chap.parties import TID, DhGroup, gate, host
from headrace.fabric.chap import MessageFault, parse
from headrace.fabric.chap_exchange import ChapRefused
from headrace.fabric.identity import Secret

MESSAGES = (
    reference.negotiate(TID),
    reference.negotiate(TID, b"\1", b"\0"),
    reference.challenge(TID, 1, 0, 5, bytes(32)),
    reference.challenge(TID, 3, 1, 5, bytes(64), b"\3".rjust(256, b"\0")),
    reference.reply(TID, bytes(32), bytes(32), 7),
    reference.reply(TID, bytes(64), None, 0, b"\3".rjust(256, b"\0")),
    reference.success1(TID, 32, bytes(32)),
    reference.success2(TID),
    reference.failure(0xF0, TID, 1),
    reference.failure(0xF1, TID, 1),
)


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(2, "big") + message for message in messages)


def seeds() -> list[bytes]:
    ask = b""
    single = [bytes((kind,)) + framed(message) for kind in (0, 1) for message in MESSAGES]
    return [
        *single,
        b"\0" + framed(MESSAGES[1], ask, MESSAGES[4], ask, MESSAGES[7]),
        b"\0" + framed(MESSAGES[0], ask, MESSAGES[5], ask),
        b"\1" + framed(MESSAGES[2], MESSAGES[6]),
        b"\2" + b"DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:",
    ]


def one_input(data: bytes) -> str:
    if data[:1] == b"\2":
        return a_secret(data[1:])
    if data[:1] == b"\1":
        return attack_host(messages_of(data[1:]))
    return attack_controller(messages_of(data[1:]))


def messages_of(data: bytes) -> list[bytes]:
    out = []
    while len(data) >= 2 and len(out) < 16:
        size = int.from_bytes(data[:2], "big")
        out.append(data[2 : 2 + size])
        data = data[2 + size :]
    return out


def attack_controller(messages: list[bytes]) -> str:
    at_gate = gate(groups=(DhGroup.NULL, DhGroup.FFDHE2048))
    outcome = "refused"
    for message in messages:
        if message:
            at_gate.send(message)
        else:
            expected = at_gate.message_bytes
            answer = at_gate.receive()
            parse(answer)
            assert at_gate.over or len(answer) == expected
            outcome = outcome if at_gate.over else "accepted"
        assert not at_gate.authenticated
        if at_gate.over:
            break
    return outcome


def attack_host(messages: list[bytes]) -> str:
    exchange = host(both=True, groups=(DhGroup.NULL, DhGroup.FFDHE2048))
    exchange.start()
    outcome = "refused"
    for message in messages:
        try:
            answer = exchange.take(message)
        except ChapRefused:
            return "refused"
        except MessageFault:
            parse(exchange.farewell() or b"")
            break
        assert answer is not None
        parse(answer)
        outcome = "accepted"
    assert not exchange.done
    return outcome


def a_secret(data: bytes) -> str:
    try:
        secret = Secret(data.decode(errors="replace"))
    except ValueError as e:
        return "refused" if len(str(e)) < 100 else "refused with too many words"
    assert 32 <= len(secret.key("nqn")) <= 64
    return "accepted"
