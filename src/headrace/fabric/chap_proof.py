"""Proofs of DH-HMAC-CHAP (NVM Express Base 2.0, section 8.13.5): what R1 and R2 are made of."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace.fabric.secret import Hash, Secret

__all__ = ["Parties", "Proof", "sequence_number"]

_NUMBERS = struct.Struct("<IHB")  # S, T_ID, SC_C


class Parties(NamedTuple):
    """Who talks to whom."""

    hostnqn: str
    subnqn: str


class Proof(NamedTuple):
    """What host and controller agreed on before either proves anything."""

    parties: Parties
    hash: Hash
    tid: int
    shared: bytes = b""
    """g^xy mod p; empty with the group NULL."""

    def __repr__(self) -> str:
        return f"Proof({self.parties}, {self.hash.name}, T_ID {self.tid})"

    def of_host(self, secret: Secret, challenge: bytes, sequence: int) -> bytes:
        """R1."""
        host, controller = self.parties
        names = f"HostHost{host}\0{controller}".encode()
        return self._response(secret.key(host), challenge, sequence, names)

    def of_controller(self, secret: Secret, challenge: bytes, sequence: int) -> bytes:
        """R2."""
        host, controller = self.parties
        names = f"Controller{controller}\0{host}".encode()
        return self._response(secret.key(controller), challenge, sequence, names)

    def _response(self, key: bytes, challenge: bytes, sequence: int, names: bytes) -> bytes:
        message = self._augmented(challenge) + _NUMBERS.pack(sequence, self.tid, 0) + names
        return hmac.digest(key, message, self.hash.function)

    def _augmented(self, challenge: bytes) -> bytes:
        """Ca: the challenge under the session key, where there is one."""
        if not self.shared:
            return challenge
        session_key = hashlib.new(self.hash.function, self.shared).digest()
        return hmac.digest(session_key, challenge, self.hash.function)


def sequence_number() -> int:
    """S1 or S2: random, never 0, which says that there is none."""
    return secrets.randbelow((1 << 32) - 1) + 1
