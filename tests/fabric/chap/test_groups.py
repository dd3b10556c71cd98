"""The groups of RFC 7919, against OpenSSL's primes; and what is refused of a peer's public value."""

import hashlib

import pytest

from headrace.fabric.chap import DhGroup, DhKey, prime

# SHA-256 of the primes, big-endian, as `openssl genpkey -algorithm DH -pkeyopt group:...` has them.
PRIMES = {
    DhGroup.FFDHE2048: "9cd3b7f336872f46c09428d1bbc19877a4d440512cda8d1c1cf0cd6e33698966",
    DhGroup.FFDHE3072: "0eaf67db3a839156d5013494a5318a772b5697d270d721f37f092efc69ea5a17",
    DhGroup.FFDHE4096: "4648414224ac881b3d0dc59b466f96d06a558278776807797ecf1f66ff397b3e",
    DhGroup.FFDHE6144: "227ac9066b3ddd9e193670cda2388fa884f65ba0cf98b742d1fe77a6687c79c7",
    DhGroup.FFDHE8192: "770b14efaf6f049929c523113b3fa99a8d11dab1b18af3609590122075d19833",
}


@pytest.mark.parametrize("group", PRIMES)
def test_primes(group):
    value = prime(group).to_bytes(group.nbytes, "big")
    assert hashlib.sha256(value).hexdigest() == PRIMES[group]


@pytest.mark.parametrize("group", PRIMES)
def test_both_ends_reckon_the_same(group):
    one, other = DhKey(group), DhKey(group)
    shared = one.exchange(other.public)
    assert shared == other.exchange(one.public)
    assert len(shared) == len(one.public) == group.nbytes
    assert one.public != other.public
    assert str(one._exponent) not in repr(one)


def test_a_short_public_value_is_the_same_number():
    key = DhKey(DhGroup.FFDHE2048)
    assert key.exchange(b"\5") == key.exchange(bytes(255) + b"\5")


@pytest.mark.parametrize("value", [0, 1, prime(DhGroup.FFDHE2048) - 1, prime(DhGroup.FFDHE2048)])
def test_values_that_give_the_secret_away(value):
    with pytest.raises(ValueError, match="not of FFDHE2048"):
        DhKey(DhGroup.FFDHE2048).exchange(value.to_bytes(256, "big"))


def test_values_that_are_too_long_or_our_own():
    key = DhKey(DhGroup.FFDHE2048)
    with pytest.raises(ValueError, match="not of"):
        key.exchange(bytes(4) + key.public)
    with pytest.raises(ValueError, match="our own"):
        key.exchange(key.public)
