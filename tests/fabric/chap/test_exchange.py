"""Exchanges that must fail: wrong proofs, replays, reflections, and messages out of order."""

import pytest

from fabric.chap import reference
from fabric.chap.parties import (
    CONTROLLER_SECRET,
    HOST_KEY,
    PARTIES,
    TID,
    DhGroup,
    Hash,
    converse,
    gate,
    host,
)
from fabric.chap.reference import HOSTNQN, SUBNQN, secret_text
from headrace.fabric.chap import MessageFault, Parties, ReasonExplanation
from headrace.fabric.chap_exchange import ChapRefused

OTHER = secret_text(bytes(range(90, 122)), 1)


def refused(exchange, at_gate):
    """The controller refuses the host; returns its explanation."""
    with pytest.raises(ChapRefused) as raised:
        converse(exchange, at_gate)
    assert not at_gate.authenticated
    assert at_gate.over
    assert not exchange.done
    return raised.value.failure.explanation


def disbelieved(exchange, at_gate):
    """The host refuses the controller; returns its explanation."""
    with pytest.raises(MessageFault) as raised:
        converse(exchange, at_gate)
    assert not exchange.done
    farewell = exchange.farewell()
    assert farewell == reference.failure(0xF0, TID, raised.value.explanation)
    at_gate.send(farewell)
    assert at_gate.over
    assert not at_gate.authenticated
    return raised.value.explanation


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048])
class TestWrongSecrets:
    def test_of_the_host(self, group, both):
        assert (
            refused(host(secret=OTHER, both=both, groups=(group,)), gate())
            == ReasonExplanation.FAILED
        )

    def test_of_the_same_bytes_with_another_transformation(self, group, both):
        wrong = secret_text(bytes(range(32)), 2)
        assert (
            refused(host(secret=wrong, both=both, groups=(group,)), gate())
            == ReasonExplanation.FAILED
        )

    def test_of_another_name(self, group, both):
        """The secret of a host, used by one that calls itself another."""
        parties = Parties(HOSTNQN + "-b", SUBNQN)
        exchange = host(parties=parties, both=both, groups=(group,))
        assert refused(exchange, gate()) == ReasonExplanation.FAILED

    def test_for_another_subsystem(self, group, both):
        parties = Parties(HOSTNQN, SUBNQN + "-b")
        exchange = host(parties=parties, both=both, groups=(group,))
        assert refused(exchange, gate()) == ReasonExplanation.FAILED

    def test_of_the_controller(self, group, both):
        if both:
            exchange, at_gate = host(both=True, groups=(group,)), gate(controller=OTHER)
            assert disbelieved(exchange, at_gate) == ReasonExplanation.FAILED

    def test_of_a_controller_that_has_none(self, group, both):
        if both:
            exchange = host(both=True, groups=(group,))
            assert refused(exchange, gate(controller=None)) == ReasonExplanation.FAILED


def test_every_flipped_bit_of_a_proof_is_refused():
    for bit in range(256):
        exchange, at_gate = host(hashes=(Hash.SHA256,)), gate()
        at_gate.send(exchange.start())
        answer = bytearray(exchange.take(at_gate.receive()))
        answer[16 + bit // 8] ^= 1 << bit % 8
        at_gate.send(bytes(answer))
        assert at_gate.receive() == reference.failure(0xF1, TID, 1)


def test_every_flipped_bit_of_the_controller_s_proof_is_refused():
    for bit in range(256):
        exchange, at_gate = host(both=True, hashes=(Hash.SHA256,)), gate()
        at_gate.send(exchange.start())
        at_gate.send(exchange.take(at_gate.receive()))
        proof = bytearray(at_gate.receive())
        proof[16 + bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageFault, match="does not know the secret"):
            exchange.take(bytes(proof))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048])
def test_a_recorded_exchange_is_worth_nothing(group, both):
    """A replayed Reply: the challenge is another one each time, though names and T_ID are the same."""
    recorded = converse(host(both=both, groups=(group,)), gate())
    at_gate = gate()
    at_gate.send(recorded[0])
    assert at_gate.receive()[16:] != recorded[1][16:]
    at_gate.send(recorded[2])
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.FAILED)
    assert at_gate.over


@pytest.mark.parametrize("group", [DhGroup.NULL, DhGroup.FFDHE2048])
def test_a_replayed_controller_is_not_believed(group):
    """A recorded Challenge gets an answer, and a recorded Success1 proves nothing."""
    recorded = converse(host(both=True, groups=(group,)), gate())
    exchange = host(both=True, groups=(group,))
    exchange.start()
    assert exchange.take(recorded[1]) != recorded[2]
    with pytest.raises(MessageFault, match="does not know the secret"):
        exchange.take(recorded[3])
    assert not exchange.done


def test_a_reply_cannot_be_sent_twice():
    exchange, at_gate = host(), gate()
    at_gate.send(exchange.start())
    answer = exchange.take(at_gate.receive())
    at_gate.send(answer)
    at_gate.send(answer)
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.INCORRECT_MESSAGE)


def test_a_wrong_reply_has_no_second_try():
    exchange, at_gate = host(), gate()
    at_gate.send(exchange.start())
    answer = exchange.take(at_gate.receive())
    at_gate.send(answer[:16] + bytes(len(answer) - 16))
    at_gate.send(answer)
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.INCORRECT_MESSAGE)
    assert not at_gate.authenticated


def test_a_reflected_challenge_is_refused():
    """Who knows no secret asks the controller to answer its own challenge."""
    at_gate = gate()
    at_gate.send(reference.negotiate(TID, b"\1", b"\0"))
    message = at_gate.receive()
    value, sequence = message[16:], int.from_bytes(message[12:16], "little")
    at_gate.send(reference.reply(TID, bytes(32), value, sequence))
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.FAILED)
    # Even a host that knows its own secret must not have its challenge answered.
    at_gate = gate()
    at_gate.send(reference.negotiate(TID, b"\1", b"\0"))
    message = at_gate.receive()
    value, sequence = message[16:], int.from_bytes(message[12:16], "little")
    proof = reference.response(HOST_KEY, 1, value, sequence, TID, "HostHost", HOSTNQN, SUBNQN)
    at_gate.send(reference.reply(TID, proof, value, sequence))
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.FAILED)
    assert at_gate.why.endswith("came back")


def test_a_controller_s_proof_is_no_host_s():
    """An attacker in the middle has one exchange's challenge proved in another, the other way round."""
    value = bytes(range(32))
    keys = {
        reference.response(HOST_KEY, 1, value, 5, TID, role, a, b)
        for role, a, b in (
            ("HostHost", HOSTNQN, SUBNQN), ("Controller", SUBNQN, HOSTNQN),
            ("HostHost", SUBNQN, HOSTNQN), ("Controller", HOSTNQN, SUBNQN),
        )
    }  # fmt: skip
    assert len(keys) == 4


def test_a_reflected_public_value_is_refused():
    exchange, at_gate = host(groups=(DhGroup.FFDHE2048,)), gate()
    at_gate.send(exchange.start())
    message = at_gate.receive()
    answer = exchange.take(message)
    at_gate.send(answer[:-256] + message[-256:])
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.INCORRECT_PAYLOAD)


@pytest.mark.parametrize("value", [bytes(256), b"\1".rjust(256, b"\0"), b"\xff" * 256])
def test_public_values_that_make_the_shared_one_known(value):
    exchange, at_gate = host(groups=(DhGroup.FFDHE2048,)), gate()
    at_gate.send(exchange.start())
    message = at_gate.receive()
    answer = exchange.take(message)
    at_gate.send(answer[:-256] + value)
    assert at_gate.receive() == reference.failure(0xF1, TID, ReasonExplanation.INCORRECT_PAYLOAD)
    exchange = host(groups=(DhGroup.FFDHE2048,))
    exchange.start()
    with pytest.raises(MessageFault) as raised:
        exchange.take(message[:-256] + value)
    assert raised.value.explanation == ReasonExplanation.INCORRECT_PAYLOAD


# -- order ----------------------------------------------------------------------------------------


def at_step(step, **options):
    """A controller that has come so far, and the host."""
    exchange, at_gate = host(both=True), gate(**options)
    if step == "start":
        return exchange, at_gate
    at_gate.send(exchange.start())
    if step == "negotiated":
        return exchange, at_gate
    message = at_gate.receive()
    if step == "challenged":
        return exchange, at_gate
    at_gate.send(exchange.take(message))
    if step == "replied":
        return exchange, at_gate
    message = at_gate.receive()
    if step == "success1":
        return exchange, at_gate
    at_gate.send(exchange.take(message))
    assert step == "done"
    return exchange, at_gate


MESSAGES = {
    "Negotiate": reference.negotiate(TID),
    "Challenge": reference.challenge(TID, 1, 0, 1, bytes(32)),
    "Reply": reference.reply(TID, bytes(64)),
    "Success1": reference.success1(TID, 64),
    "Success2": reference.success2(TID),
    "Failure1": reference.failure(0xF1, TID, 1),
}
STEPS = {
    "start": "Negotiate", "negotiated": "", "challenged": "Reply", "replied": "",
    "success1": "Success2", "done": "Negotiate",
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("step", STEPS)
def test_a_controller_takes_each_message_at_its_time_alone(step, name):
    _, at_gate = at_step(step)
    at_gate.send(MESSAGES[name])
    if STEPS[step] == name:
        explanation = ReasonExplanation.FAILED if name == "Reply" else 0
    else:
        explanation = ReasonExplanation.INCORRECT_MESSAGE
    if explanation:
        assert at_gate.receive() == reference.failure(
            0xF1, 0 if step == "start" else TID, explanation
        )
        assert at_gate.over
        assert not at_gate.authenticated
    else:
        assert not at_gate.over


@pytest.mark.parametrize("step", ["start", "challenged", "success1", "done"])
def test_a_message_that_is_asked_for_too_early(step):
    _, at_gate = at_step(step)
    tid = 0 if step == "start" else TID
    assert at_gate.receive() == reference.failure(0xF1, tid, ReasonExplanation.INCORRECT_MESSAGE)
    assert at_gate.over
    assert not at_gate.authenticated


@pytest.mark.parametrize("step", STEPS)
def test_a_host_that_gives_up_is_let_go(step):
    _, at_gate = at_step(step)
    at_gate.send(reference.failure(0xF0, TID, 1))
    assert at_gate.over
    assert not at_gate.authenticated


def host_at(step):
    exchange, at_gate = host(both=True), gate()
    at_gate.send(exchange.start())
    if step == "success1":
        at_gate.send(exchange.take(at_gate.receive()))
    if step == "done":
        exchange = host()
        at_gate = gate()
        converse(exchange, at_gate)
    return exchange


@pytest.mark.parametrize("name", [*MESSAGES, "Failure2"])
@pytest.mark.parametrize("step", ["challenge", "success1", "done"])
def test_a_host_takes_each_message_at_its_time_alone(step, name):
    exchange = host_at(step)
    message = {**MESSAGES, "Failure2": reference.failure(0xF0, TID, 1)}[name]
    if name == "Failure1":
        with pytest.raises(ChapRefused):
            exchange.take(message)
    elif (step, name) == ("challenge", "Challenge"):
        assert exchange.take(message)[1] == 2
    else:
        expected = (
            ReasonExplanation.FAILED
            if name == step.title()
            else ReasonExplanation.INCORRECT_MESSAGE
        )
        with pytest.raises(MessageFault) as raised:
            exchange.take(message)
        assert raised.value.explanation == expected
        assert exchange.farewell() == reference.failure(0xF0, TID, expected)
    assert not exchange.done


def test_a_host_may_authenticate_again():
    _, at_gate = at_step("done")
    assert at_gate.authenticated
    converse(host(both=True), at_gate)
    assert at_gate.authenticated
    with pytest.raises(ChapRefused):
        converse(host(secret=OTHER), at_gate)
    assert at_gate.over
    assert not at_gate.authenticated


def test_what_was_not_offered_is_not_taken():
    for message in (
        reference.challenge(TID, Hash.SHA256, DhGroup.NULL, 1, bytes(32)),
        reference.challenge(TID, Hash.SHA512, DhGroup.NULL, 1, bytes(64)),
    ):
        exchange = host(hashes=(Hash.SHA256,), groups=(DhGroup.FFDHE2048,))
        exchange.start()
        with pytest.raises(MessageFault, match="was not offered"):
            exchange.take(message)


def test_nothing_in_common():
    exchange = host(hashes=(Hash.SHA256,))
    assert refused(exchange, gate(hashes=(Hash.SHA512,))) == ReasonExplanation.HASH_NOT_USABLE
    exchange = host(groups=(DhGroup.NULL,))
    assert (
        refused(exchange, gate(groups=(DhGroup.FFDHE2048,))) == ReasonExplanation.GROUP_NOT_USABLE
    )


def test_a_secure_channel_is_refused():
    at_gate = gate()
    at_gate.send(reference.negotiate(TID, sc_c=1))
    assert at_gate.receive() == reference.failure(
        0xF1, TID, ReasonExplanation.SECURE_CHANNEL_MISMATCH
    )


def test_names_and_secrets_are_in_no_object_s_words():
    exchange, at_gate = host(both=True), gate()
    converse(exchange, at_gate)
    shown = f"{exchange._chap!r} {at_gate._chap!r} {exchange!r} {at_gate!r}"
    assert HOSTNQN in shown
    shown += f"{exchange._proof!r} {at_gate._proof!r} {exchange._proof._replace(shared=HOST_KEY)!r}"
    assert repr(HOST_KEY)[2:20] not in shown
    assert CONTROLLER_SECRET[10:30] not in shown
    assert PARTIES.subnqn in shown
