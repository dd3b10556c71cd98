"""Diffie-Hellman over the finite-field groups of RFC 7919, ffdhe2048 to ffdhe8192.

In Python's integers. They do not take constant time, and need not: an exponent is drawn for one
exchange and used twice, so there is nothing to average over, and what the exchange adds to the
HMAC is that a recorded handshake does not help to guess a secret. `cryptography` has announced that
it removes these groups, and the standard asks for them.
"""

from __future__ import annotations

import secrets
from enum import IntEnum
from functools import cache

__all__ = ["DhGroup", "DhKey"]


class DhGroup(IntEnum):
    """Groups, by the specification's identifiers."""

    NULL = 0
    FFDHE2048 = 1
    FFDHE3072 = 2
    FFDHE4096 = 3
    FFDHE6144 = 4
    FFDHE8192 = 5

    @property
    def nbytes(self) -> int:
        """Of a public value; 0 of NULL."""
        return _GROUPS[self][0] // 8 if self else 0


# Bits; the number that makes the prime (RFC 7919, appendix A); bits of an exponent, which are at
# least those of section 5.2.
_GROUPS = {
    DhGroup.FFDHE2048: (2048, 560316, 256),
    DhGroup.FFDHE3072: (3072, 2625351, 288),
    DhGroup.FFDHE4096: (4096, 5736041, 352),
    DhGroup.FFDHE6144: (6144, 15705020, 384),
    DhGroup.FFDHE8192: (8192, 10965728, 416),
}
_GENERATOR = 2
_GUARD_BITS = 64


@cache
def prime(group: DhGroup) -> int:
    """2^b - 2^(b-64) + (floor(2^(b-130) e) + X) 2^64 - 1."""
    bits, number, _ = _GROUPS[group]
    high: int = (1 << bits) - (1 << bits - 64)
    return high + (_e(bits - 130) + number << 64) - 1


def _e(bits: int) -> int:
    """floor(2^bits e): the sum of 1/k!."""
    term, total, k = 1 << bits + _GUARD_BITS, 0, 0
    while term:
        total += term
        k += 1
        term //= k
    return total >> _GUARD_BITS


class DhKey:
    """One exchange's key.

    Args:
        group: not NULL.
    """

    __slots__ = ("_exponent", "group", "public")

    def __init__(self, group: DhGroup) -> None:
        self.group = group
        self._exponent = 1 << _GROUPS[group][2] | secrets.randbits(_GROUPS[group][2])
        value = pow(_GENERATOR, self._exponent, prime(group))
        self.public = value.to_bytes(group.nbytes, "big")

    def exchange(self, peer: bytes) -> bytes:
        """The shared value, as long as the prime.

        Args:
            peer: the other's public value, big-endian.

        Raises:
            ValueError: it is none of the group, or our own.
        """
        value = int.from_bytes(peer, "big")
        modulus = prime(self.group)
        if len(peer) > self.group.nbytes or not 1 < value < modulus - 1:
            raise ValueError(f"a public value that is not of {self.group.name}")
        if value == int.from_bytes(self.public, "big"):
            raise ValueError("our own public value came back")
        return pow(value, self._exponent, modulus).to_bytes(self.group.nbytes, "big")

    def __repr__(self) -> str:
        return f"DhKey({self.group.name})"
