"""Every proof, hash and group against the plain implementation of reference.py, from both ends."""

import pytest

from fabric.chap import reference
from fabric.chap.parties import (
    CONTROLLER_KEY,
    HOST_KEY,
    TID,
    DhGroup,
    Hash,
    converse,
    gate,
    host,
)
from fabric.chap.reference import HOSTNQN, SUBNQN
from headrace.fabric.chap import prime

EXPONENT = 0x1F3D5B79_02468ACE_13579BDF
CHOICES = [
    *((hash_, group) for hash_ in Hash for group in (DhGroup.NULL, DhGroup.FFDHE2048)),
    (Hash.SHA256, DhGroup.FFDHE8192),
]


def proofs(hash_id, challenge, sequence, c2, s2, shared=None, size=0):
    """R1 and R2."""
    ca = reference.augmented(challenge, hash_id, shared, size)
    r1 = reference.response(HOST_KEY, hash_id, ca, sequence, TID, "HostHost", HOSTNQN, SUBNQN)
    ca2 = reference.augmented(c2, hash_id, shared, size) if c2 else b""
    r2 = reference.response(CONTROLLER_KEY, hash_id, ca2, s2, TID, "Controller", SUBNQN, HOSTNQN)
    return r1, r2


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("hash_", "group"), CHOICES)
def test_our_host_at_a_controller_of_reference(hash_, group, both):
    exchange = host(both=both, groups=(DhGroup.FFDHE4096, group))
    hashes = bytes(map(int, (Hash.SHA512, Hash.SHA384, Hash.SHA256)))
    assert exchange.start() == reference.negotiate(TID, hashes, bytes([3, group]))
    value = bytes(range(7, 7 + hash_.nbytes))
    public = pow(2, EXPONENT, prime(group)).to_bytes(group.nbytes, "big") if group else b""
    answer = exchange.take(reference.challenge(TID, hash_, group, 77, value, public))
    size = hash_.nbytes
    assert len(answer) == 16 + 2 * size + group.nbytes
    theirs = int.from_bytes(answer[16 + 2 * size :], "big")
    shared = pow(theirs, EXPONENT, prime(group)) if group else None
    c2 = answer[16 + size : 16 + 2 * size] if both else None
    s2 = int.from_bytes(answer[12:16], "little")
    r1, r2 = proofs(hash_, value, 77, c2, s2, shared, group.nbytes)
    assert answer == reference.reply(TID, r1, c2, s2, answer[16 + 2 * size :])
    assert (s2 != 0) == both
    last = exchange.take(reference.success1(TID, size, r2 if both else None))
    assert exchange.done
    assert last == (reference.success2(TID) if both else None)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("hash_", "group"), CHOICES)
def test_our_controller_at_a_host_of_reference(hash_, group, both):
    at_gate = gate()
    at_gate.send(reference.negotiate(TID, bytes([9, hash_]), bytes([200, group])))
    message = at_gate.receive()
    size = hash_.nbytes
    value, public = message[16 : 16 + size], message[16 + size :]
    sequence = int.from_bytes(message[12:16], "little")
    assert sequence != 0
    assert message == reference.challenge(TID, hash_, group, sequence, value, public)
    shared = pow(int.from_bytes(public, "big"), EXPONENT, prime(group)) if group else None
    mine = pow(2, EXPONENT, prime(group)).to_bytes(group.nbytes, "big") if group else b""
    c2 = bytes(range(60, 60 + size)) if both else None
    r1, r2 = proofs(hash_, value, sequence, c2, 99, shared, group.nbytes)
    at_gate.send(reference.reply(TID, r1, c2, 99, mine))
    assert not at_gate.authenticated
    assert at_gate.receive() == reference.success1(TID, size, r2 if both else None)
    assert at_gate.authenticated == (not both)
    if both:
        at_gate.send(reference.success2(TID))
    assert at_gate.authenticated
    assert not at_gate.over


@pytest.mark.parametrize("group", DhGroup)
def test_both_of_ours(group):
    exchange, at_gate = host(both=True, groups=(group,)), gate()
    assert len(converse(exchange, at_gate)) == 5
    assert at_gate.authenticated


def test_the_controller_chooses_what_it_likes_best_of_what_is_offered():
    at_gate = gate()
    at_gate.send(reference.negotiate(TID))
    assert at_gate.receive()[8:10] == bytes([Hash.SHA512, DhGroup.FFDHE3072])
    at_gate = gate(hashes=(Hash.SHA256, Hash.SHA512), groups=(DhGroup.NULL,))
    at_gate.send(reference.negotiate(TID))
    assert at_gate.receive()[8:10] == bytes([Hash.SHA256, DhGroup.NULL])


def test_challenges_are_new_each_time():
    seen = set()
    for _ in range(50):
        at_gate = gate()
        at_gate.send(reference.negotiate(TID, groups=b"\0"))
        message = at_gate.receive()
        seen.add(message[16:])
    assert len(seen) == 50
