"""Messages of the wrong length or with a wrong field, to a controller and to a host."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.chap import reference
from fabric.chap.parties import TID, DhGroup, gate, host
from headrace.fabric.chap import DhKey, MessageFault, ReasonExplanation, parse

PAYLOAD, MESSAGE = ReasonExplanation.INCORRECT_PAYLOAD, ReasonExplanation.INCORRECT_MESSAGE


def put(message, at, *values):
    out = bytearray(message)
    out[at : at + len(values)] = values
    return bytes(out)


def negotiated():
    """A controller that waits for a Reply with SHA-256 and ffdhe2048, and a right one but for the proof."""
    at_gate = gate()
    at_gate.send(reference.negotiate(TID, b"\1", b"\1"))
    at_gate.receive()
    public = DhKey(DhGroup.FFDHE2048).public
    return at_gate, reference.reply(TID, bytes(32), bytes(32), 5, public)


def answered(at_gate):
    """What the controller says at last."""
    message = at_gate.receive()
    assert message[:4] == bytes((0, 0xF1, 0, 0))
    assert at_gate.over
    assert not at_gate.authenticated
    return message[7]


NEGOTIATE = reference.negotiate(TID)
NEGOTIATES = {
    "AUTH_TYPE": (put(NEGOTIATE, 0, 1), MESSAGE),
    "AUTH_TYPE 255": (put(NEGOTIATE, 0, 255), MESSAGE),
    "AUTH_ID": (put(NEGOTIATE, 1, 5), MESSAGE),
    "SC_C": (put(NEGOTIATE, 6, 1), ReasonExplanation.SECURE_CHANNEL_MISMATCH),
    "NAPD 0": (put(NEGOTIATE, 7, 0), PAYLOAD),
    "NAPD 0 and nothing": (put(NEGOTIATE, 7, 0)[:8], ReasonExplanation.PROTOCOL_NOT_USABLE),
    "NAPD 2": (put(NEGOTIATE, 7, 2), PAYLOAD),
    "NAPD 255": (put(NEGOTIATE, 7, 255), PAYLOAD),
    "AUTHID": (put(NEGOTIATE, 8, 2), ReasonExplanation.PROTOCOL_NOT_USABLE),
    "HALEN 0": (put(NEGOTIATE, 10, 0), PAYLOAD),
    "HALEN 31": (put(NEGOTIATE, 10, 31), PAYLOAD),
    "HALEN 255": (put(NEGOTIATE, 10, 255), PAYLOAD),
    "DHLEN 0": (put(NEGOTIATE, 11, 0), PAYLOAD),
    "DHLEN 31": (put(NEGOTIATE, 11, 31), PAYLOAD),
    "HashIDs": (put(NEGOTIATE, 12, 0, 4, 255), ReasonExplanation.HASH_NOT_USABLE),
    "DHgIDs": (put(NEGOTIATE, 42, 6, 7, 8, 9, 10, 255), ReasonExplanation.GROUP_NOT_USABLE),
    "a byte more": (NEGOTIATE + b"\0", PAYLOAD),
    "4097 bytes": (NEGOTIATE.ljust(4097, b"\0"), PAYLOAD),
    "8192 bytes": (NEGOTIATE.ljust(8192, b"\0"), PAYLOAD),
    "nothing": (b"", PAYLOAD),
}


@pytest.mark.parametrize("name", NEGOTIATES)
def test_a_wrong_negotiate(name):
    message, explanation = NEGOTIATES[name]
    at_gate = gate()
    at_gate.send(message)
    assert answered(at_gate) == explanation


def test_a_negotiate_with_another_protocol_before_ours():
    other = bytes([77, 0, 255, 255]) + bytes(60)
    at_gate = gate()
    at_gate.send(put(NEGOTIATE, 7, 2)[:8] + other + NEGOTIATE[8:])
    assert at_gate.receive()[1] == 1


def test_reserved_fields_are_not_looked_at():
    at_gate = gate()
    at_gate.send(put(put(NEGOTIATE, 2, 0xAA, 0xBB), 9, 0xCC))
    assert at_gate.receive()[1] == 1


REPLIES = {
    "AUTH_TYPE": (0, [0], MESSAGE),
    "AUTH_ID": (1, [1], PAYLOAD),  # a Challenge by its number, with HashID 1 and DHgID 0
    "T_ID": (4, [0x35], PAYLOAD),
    "HL 0": (6, [0], PAYLOAD),
    "HL 31": (6, [31], PAYLOAD),
    "HL 33": (6, [33], PAYLOAD),
    "HL 255": (6, [255], PAYLOAD),
    "CVALID 2": (8, [2], PAYLOAD),
    "CVALID 255": (8, [255], PAYLOAD),
    "DHVLEN 0": (10, [0, 0], PAYLOAD),
    "DHVLEN 255": (10, [255, 0], PAYLOAD),
    "DHVLEN 260": (10, [4, 1], PAYLOAD),
    "DHVLEN 65535": (10, [255, 255], PAYLOAD),
    "proof": (16, [1], ReasonExplanation.FAILED),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_wrong_reply(name):
    at, values, explanation = REPLIES[name]
    at_gate, message = negotiated()
    at_gate.send(put(message, at, *values))
    assert answered(at_gate) == explanation


@pytest.mark.parametrize("size", [0, 4, 248, 260, 1024])
def test_a_reply_whose_public_value_has_another_size(size):
    at_gate, _ = negotiated()
    at_gate.send(reference.reply(TID, bytes(32), bytes(32), 5, b"\1" * size))
    assert answered(at_gate) == (ReasonExplanation.FAILED if 0 < size < 256 else PAYLOAD)


def test_a_reply_with_another_hash_s_length():
    at_gate, message = negotiated()
    at_gate.send(reference.reply(TID, bytes(64), bytes(64), 5, message[-256:]))
    assert answered(at_gate) == PAYLOAD


def test_a_reply_with_a_public_value_where_none_was_agreed():
    at_gate = gate()
    at_gate.send(reference.negotiate(TID, b"\1", b"\0"))
    at_gate.receive()
    at_gate.send(reference.reply(TID, bytes(32), None, 0, bytes(256)))
    assert answered(at_gate) == PAYLOAD


def test_every_truncation_of_what_a_host_sends():
    counts = 0
    for length in range(len(NEGOTIATE)):
        at_gate = gate()
        at_gate.send(NEGOTIATE[:length])
        assert answered(at_gate) == PAYLOAD
        counts += 1
    message = reference.reply(TID, bytes(32), bytes(32), 5)
    for length in range(len(message)):
        at_gate = gate()
        at_gate.send(reference.negotiate(TID, b"\1", b"\0"))
        at_gate.receive()
        at_gate.send(message[:length])
        assert answered(at_gate) == PAYLOAD
        counts += 1
    print(f"{counts} truncated messages, all refused")


def test_a_success2_with_a_wrong_field():
    good = reference.success2(TID)
    for wrong in (good[:15], good + b"\0", put(good, 4, 0x35), put(good, 0, 0)):
        exchange, at_gate = host(both=True), gate()
        at_gate.send(exchange.start())
        at_gate.send(exchange.take(at_gate.receive()))
        at_gate.receive()
        at_gate.send(wrong)
        assert answered(at_gate) in {PAYLOAD, MESSAGE}


# -- to a host ------------------------------------------------------------------------------------

PUBLIC = DhKey(DhGroup.FFDHE2048).public
CHALLENGE = reference.challenge(TID, 1, 1, 9, bytes(range(32)), PUBLIC)
CHALLENGES = {
    "AUTH_TYPE": (0, [0], MESSAGE),
    "AUTH_ID": (1, [9], MESSAGE),
    "T_ID": (5, [0x13], PAYLOAD),
    "HL 0": (6, [0], PAYLOAD),
    "HL 48": (6, [48], PAYLOAD),
    "HL 255": (6, [255], PAYLOAD),
    "HashID 0": (8, [0], ReasonExplanation.HASH_NOT_USABLE),
    "HashID 4": (8, [4], ReasonExplanation.HASH_NOT_USABLE),
    "HashID 3": (8, [3], PAYLOAD),
    "DHgID 6": (9, [6], ReasonExplanation.GROUP_NOT_USABLE),
    "DHgID 0": (9, [0], PAYLOAD),
    "DHgID 5": (9, [5], ReasonExplanation.GROUP_NOT_USABLE),  # was not offered
    "DHVLEN 0": (10, [0, 0], PAYLOAD),
    "DHVLEN 254": (10, [254, 0], PAYLOAD),
    "DHVLEN 260": (10, [4, 1], PAYLOAD),
    "DHVLEN 65535": (10, [255, 255], PAYLOAD),
}


@pytest.mark.parametrize("name", CHALLENGES)
def test_a_wrong_challenge(name):
    at, values, explanation = CHALLENGES[name]
    exchange = host(groups=(DhGroup.FFDHE2048, DhGroup.NULL))
    exchange.start()
    with pytest.raises(MessageFault) as raised:
        exchange.take(put(CHALLENGE, at, *values))
    assert raised.value.explanation == explanation
    assert exchange.farewell() == reference.failure(0xF0, TID, explanation)


def test_every_truncation_of_what_a_controller_sends():
    for length in range(len(CHALLENGE)):
        exchange = host(groups=(DhGroup.FFDHE2048,))
        exchange.start()
        with pytest.raises(MessageFault) as raised:
            exchange.take(CHALLENGE[:length])
        assert raised.value.explanation == PAYLOAD
    print(f"{len(CHALLENGE)} truncated challenges, all refused")


SUCCESSES = {
    "T_ID": (4, [0], PAYLOAD),
    "HL 0": (6, [0], PAYLOAD),
    "HL 255": (6, [255], PAYLOAD),
    "RVALID 0": (8, [0], ReasonExplanation.FAILED),
    "RVALID 2": (8, [2], PAYLOAD),
    "proof": (16, [1], ReasonExplanation.FAILED),
}


@pytest.mark.parametrize("name", SUCCESSES)
def test_a_wrong_success1(name):
    at, values, explanation = SUCCESSES[name]
    exchange, at_gate = host(both=True), gate()
    at_gate.send(exchange.start())
    at_gate.send(exchange.take(at_gate.receive()))
    message = at_gate.receive()
    with pytest.raises(MessageFault) as raised:
        exchange.take(
            put(message, at, *values) if name != "proof" else put(message, at, message[16] ^ 1)
        )
    assert raised.value.explanation == explanation
    assert not exchange.done


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(data):
    """What parses is packed to what parses the same."""
    try:
        message = parse(data)
    except MessageFault:
        return
    assert parse(message.pack()) == message
