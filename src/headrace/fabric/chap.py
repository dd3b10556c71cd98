"""DH-HMAC-CHAP (NVM Express Base 2.0, section 8.13.5): its messages, proofs and Diffie-Hellman groups.

Messages are what Authentication Send and Receive carry. Every length is judged before it is used; reserved
fields are not looked at. Secrets never pass here: what messages hold goes over the wire in the clear.

The groups are those of RFC 7919, ffdhe2048 to ffdhe8192, in integers of Python. They do not take
constant time, and need not: an exponent is drawn for one exchange and used twice, so there is nothing to
average over, and what the exchange adds to the HMAC is that a recorded handshake does not help to guess
a secret. `cryptography` has announced that it removes these groups, and the standard asks for them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headrace.fabric.identity import Hash

if TYPE_CHECKING:
    from headrace.fabric.identity import Secret

_IdT = TypeVar("_IdT", bound=IntEnum)

MESSAGE_BYTES_MAX = 4096
"""The largest that has a meaning, a Reply with ffdhe8192, has 1168."""

AUTH_DWORDS = struct.Struct("<xBBBI16x")
"""SPSP0, SPSP1, SECP, TL or AL, from CDW10."""
SECP_NVME, SPSP_CHAP = 0xE9, 1

_COMMON, _DHCHAP = 0, 1
"""AUTH_TYPE."""
_PROTOCOL_CHAP = 1
"""AUTHID."""
_IDS_MAX = 30


class MessageId(IntEnum):
    """AUTH_ID of either type: the numbers of the two do not meet but for Negotiate's 0."""

    NEGOTIATE = 0x00
    CHALLENGE = 0x01
    REPLY = 0x02
    SUCCESS1 = 0x03
    SUCCESS2 = 0x04
    FAILURE2 = 0xF0
    FAILURE1 = 0xF1


class ReasonExplanation(IntEnum):
    """Reason Code Explanation of a failure."""

    FAILED = 1
    PROTOCOL_NOT_USABLE = 2
    SECURE_CHANNEL_MISMATCH = 3
    HASH_NOT_USABLE = 4
    GROUP_NOT_USABLE = 5
    INCORRECT_PAYLOAD = 6
    INCORRECT_MESSAGE = 7

    @property
    def words(self) -> str:
        """For people."""
        text = self.name.lower().replace("_", " ")
        return "authentication failed" if self is ReasonExplanation.FAILED else text


class MessageFault(Exception):
    """A message breaks a rule, or the proof in it is wrong.

    Args:
        explanation: what a failure message says.
        what: for our own log.
    """

    def __init__(self, explanation: ReasonExplanation, what: str) -> None:
        super().__init__(f"{explanation.words}: {what}")
        self.explanation = explanation
        self.what = what


_HEAD = struct.Struct("<BBHH")  # AUTH_TYPE, AUTH_ID, reserved, T_ID
_NEGOTIATE = struct.Struct("<BBHHBB")
_PROTOCOL = struct.Struct("<BxBB30s30s")
_CHALLENGE = struct.Struct("<BBHHBxBBHI")
_REPLY = struct.Struct("<BBHHBxBxHI")
_SUCCESS1 = struct.Struct("<BBHHBxB7x")
_SUCCESS2 = struct.Struct("<BBHH10x")
_FAILURE = struct.Struct("<BBHHBB")


def payload_fault(what: str) -> MessageFault:
    """The fault of a message whose fields are wrong."""
    return MessageFault(ReasonExplanation.INCORRECT_PAYLOAD, what)


def message_fault(what: str) -> MessageFault:
    """The fault of a message that is none, or whose turn it is not."""
    return MessageFault(ReasonExplanation.INCORRECT_MESSAGE, what)


class Negotiate(NamedTuple):
    """AUTH_Negotiate: what a host can do."""

    tid: int
    hashes: tuple[int, ...]
    """HashIDs, known to us or not, as they were offered."""
    groups: tuple[int, ...]
    secure_channel: int = 0
    """SC_C."""

    def pack(self) -> bytes:
        """The bytes: one descriptor."""
        head = _NEGOTIATE.pack(_COMMON, MessageId.NEGOTIATE, 0, self.tid, self.secure_channel, 1)
        hashes, groups = bytes(self.hashes), bytes(self.groups)
        return head + _PROTOCOL.pack(_PROTOCOL_CHAP, len(hashes), len(groups), hashes, groups)

    @classmethod
    def unpack(cls, data: bytes) -> Negotiate:
        """From a whole message."""
        _, _, _, tid, secure_channel, count = _sized(_NEGOTIATE, data)
        if len(data) != _NEGOTIATE.size + count * _PROTOCOL.size:
            raise payload_fault(f"AUTH_Negotiate of {len(data)} bytes with {count} protocols")
        for at in range(_NEGOTIATE.size, len(data), _PROTOCOL.size):
            protocol, halen, dhlen, hashes, groups = _PROTOCOL.unpack_from(data, at)
            if protocol != _PROTOCOL_CHAP:
                continue
            if not 1 <= halen <= _IDS_MAX or not 1 <= dhlen <= _IDS_MAX:
                raise payload_fault(f"{halen} hash functions and {dhlen} groups")
            return cls(tid, tuple(hashes[:halen]), tuple(groups[:dhlen]), secure_channel)
        raise MessageFault(ReasonExplanation.PROTOCOL_NOT_USABLE, "DH-HMAC-CHAP was not offered")


class Challenge(NamedTuple):
    """DH-HMAC-CHAP_Challenge: the controller's."""

    tid: int
    hash: Hash
    group: DhGroup
    sequence: int
    value: bytes
    """C1."""
    public: bytes = b""
    """g^x mod p; empty with NULL."""

    def pack(self) -> bytes:
        """The bytes."""
        head = _CHALLENGE.pack(
            _DHCHAP, MessageId.CHALLENGE, 0, self.tid, len(self.value), self.hash, self.group,
            len(self.public), self.sequence,
        )  # fmt: skip
        return head + self.value + self.public

    @classmethod
    def unpack(cls, data: bytes) -> Challenge:
        """From a message and what follows it in the buffer."""
        _, _, _, tid, hl, hash_id, group_id, dhvlen, sequence = _sized(_CHALLENGE, data)
        hash_ = _known(Hash, hash_id, ReasonExplanation.HASH_NOT_USABLE, "HashID")
        group = _known(DhGroup, group_id, ReasonExplanation.GROUP_NOT_USABLE, "DHgID")
        if hl != hash_.nbytes:
            raise payload_fault(f"HL is {hl}, {hash_.name} has {hash_.nbytes}")
        check_dhvlen(dhvlen, group)
        value, public = _values(data, _CHALLENGE.size, hl, dhvlen)
        return cls(tid, hash_, group, sequence, value, public)


class Reply(NamedTuple):
    """DH-HMAC-CHAP_Reply: the host's proof, and its own challenge if it has one."""

    tid: int
    response: bytes
    """R1."""
    challenge: bytes | None = None
    """C2: the controller is to prove itself too."""
    sequence: int = 0
    public: bytes = b""

    def pack(self) -> bytes:
        """The bytes."""
        valid = self.challenge is not None
        head = _REPLY.pack(
            _DHCHAP, MessageId.REPLY, 0, self.tid, len(self.response), valid, len(self.public),
            self.sequence,
        )  # fmt: skip
        return head + self.response + (self.challenge or bytes(len(self.response))) + self.public

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """From a whole message."""
        _, _, _, tid, hl, valid, dhvlen, sequence = _sized(_REPLY, data)
        if len(data) != _REPLY.size + 2 * hl + dhvlen:
            raise payload_fault(f"a Reply of {len(data)} bytes with HL {hl} and DHVLEN {dhvlen}")
        if valid > 1:
            raise payload_fault(f"CVALID is {valid}")
        response, challenge, public = _values(data, _REPLY.size, hl, hl, dhvlen)
        return cls(tid, response, challenge if valid else None, sequence, public)


class Success1(NamedTuple):
    """DH-HMAC-CHAP_Success1: the host is in; the controller's proof, if one was asked for."""

    tid: int
    hash_bytes: int
    response: bytes | None = None
    """R2."""

    def pack(self) -> bytes:
        """The bytes: HL is said, and RVAL there, whether it is valid or not."""
        head = _SUCCESS1.pack(
            _DHCHAP, MessageId.SUCCESS1, 0, self.tid, self.hash_bytes, self.response is not None
        )
        return head + (self.response or bytes(self.hash_bytes))

    @classmethod
    def unpack(cls, data: bytes) -> Success1:
        """From a message and what follows it in the buffer."""
        _, _, _, tid, hl, valid = _sized(_SUCCESS1, data)
        if valid > 1:
            raise payload_fault(f"RVALID is {valid}")
        if not valid:
            return cls(tid, hl)
        (response,) = _values(data, _SUCCESS1.size, hl)
        return cls(tid, hl, response)


class Success2(NamedTuple):
    """DH-HMAC-CHAP_Success2: the controller's proof was right."""

    tid: int

    def pack(self) -> bytes:
        """The bytes."""
        return _SUCCESS2.pack(_DHCHAP, MessageId.SUCCESS2, 0, self.tid)

    @classmethod
    def unpack(cls, data: bytes) -> Success2:
        """From a whole message."""
        if len(data) != _SUCCESS2.size:
            raise payload_fault(f"a Success2 of {len(data)} bytes")
        return cls(_sized(_SUCCESS2, data)[3])


class AuthFailure(NamedTuple):
    """AUTH_Failure1, the controller's, or AUTH_Failure2, the host's."""

    tid: int
    explanation: int
    from_host: bool
    reason: int = 1
    """1: authentication failure; there is no other."""

    def pack(self) -> bytes:
        """The bytes."""
        number = MessageId.FAILURE2 if self.from_host else MessageId.FAILURE1
        return _FAILURE.pack(_COMMON, number, 0, self.tid, self.reason, self.explanation)

    @classmethod
    def unpack(cls, data: bytes) -> AuthFailure:
        """From a message and what follows it in the buffer."""
        _, number, _, tid, reason, explanation = _sized(_FAILURE, data)
        return cls(tid, explanation, number == MessageId.FAILURE2, reason)

    def __str__(self) -> str:
        known = self.explanation in set(ReasonExplanation)
        return ReasonExplanation(self.explanation).words if known else f"reason {self.explanation}"


Message = Negotiate | Challenge | Reply | Success1 | Success2 | AuthFailure

_KINDS: dict[tuple[int, int], type[Message]] = {
    (_COMMON, MessageId.NEGOTIATE): Negotiate,
    (_DHCHAP, MessageId.CHALLENGE): Challenge,
    (_DHCHAP, MessageId.REPLY): Reply,
    (_DHCHAP, MessageId.SUCCESS1): Success1,
    (_DHCHAP, MessageId.SUCCESS2): Success2,
    (_COMMON, MessageId.FAILURE1): AuthFailure,
    (_COMMON, MessageId.FAILURE2): AuthFailure,
}


def parse(data: bytes) -> Message:
    """The message that `data` begins with: what hosts send is all of it, a controller may fill it up.

    Raises MessageFault if it is none.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise payload_fault(f"a message of {len(data)} bytes")
    auth_type, auth_id, _, _ = _sized(_HEAD, data)
    kind = _KINDS.get((auth_type, auth_id))
    if kind is None:
        raise message_fault(f"AUTH_TYPE {auth_type}, AUTH_ID {auth_id:#04x}")
    return kind.unpack(data)


def _sized(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < form.size:
        raise payload_fault(f"{len(data)} bytes, expected at least {form.size}")
    return form.unpack_from(data)


def _values(data: bytes, at: int, *sizes: int) -> list[bytes]:
    """Values of these sizes, one behind the other."""
    if len(data) < at + sum(sizes):
        raise payload_fault(f"{len(data)} bytes, expected at least {at + sum(sizes)}")
    out = []
    for size in sizes:
        out.append(bytes(data[at : at + size]))
        at += size
    return out


def _known(kind: type[_IdT], number: int, explanation: ReasonExplanation, what: str) -> _IdT:
    """The hash function or group with an identifier."""
    try:
        return kind(number)
    except ValueError:
        raise MessageFault(explanation, f"{what} {number}") from None


def check_dhvlen(dhvlen: int, group: DhGroup) -> None:
    """Judges a DHVLEN: of a Reply, what it must be is known from the Challenge.

    Raises MessageFault if it is another one.
    """
    if bool(dhvlen) != bool(group) or dhvlen > group.nbytes or dhvlen % 4:
        raise payload_fault(f"DHVLEN is {dhvlen}, {group.name} has {group.nbytes}")


_NUMBERS = struct.Struct("<IHB")  # S, T_ID, SC_C


class Parties(NamedTuple):
    """Who talks to whom."""

    hostnqn: str
    subnqn: str


class ChapProof(NamedTuple):
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
        names = f"HostHost{host}\0{controller}"
        return self._response(secret.key(host), challenge, sequence, names)

    def of_controller(self, secret: Secret, challenge: bytes, sequence: int) -> bytes:
        """R2."""
        host, controller = self.parties
        names = f"Controller{controller}\0{host}"
        return self._response(secret.key(controller), challenge, sequence, names)

    def _response(self, key: bytes, challenge: bytes, sequence: int, names: str) -> bytes:
        if self.shared:  # Ca: the challenge under the session key
            session_key = hashlib.new(self.hash.function, self.shared).digest()
            challenge = hmac.digest(session_key, challenge, self.hash.function)
        message = challenge + _NUMBERS.pack(sequence, self.tid, 0) + names.encode()
        return hmac.digest(key, message, self.hash.function)


def sequence_number() -> int:
    """S1 or S2: random, never 0, which says that there is none."""
    return secrets.randbelow((1 << 32) - 1) + 1


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
    term, e, k = 1 << bits - 130 + _GUARD_BITS, 0, 0  # e is the sum of 1/k!
    while term:
        e += term
        k += 1
        term //= k
    return high + ((e >> _GUARD_BITS) + number << 64) - 1


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
