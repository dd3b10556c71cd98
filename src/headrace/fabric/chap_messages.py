"""Messages of DH-HMAC-CHAP (NVM Express Base 2.0, section 8.13.5): packed, and parsed with suspicion.

What Authentication Send and Receive carry. Every length is judged before it is used; reserved fields
are not looked at. Secrets never pass here: what these messages hold goes over the wire in the clear.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from headrace.fabric.dh import DhGroup
from headrace.fabric.secret import Hash

__all__ = [
    "AUTH_DWORDS",
    "MESSAGE_BYTES_MAX",
    "SECP_NVME",
    "SPSP_CHAP",
    "Challenge",
    "Explanation",
    "Failure",
    "Message",
    "MessageFault",
    "MessageId",
    "Negotiate",
    "Reply",
    "Success1",
    "Success2",
    "check_public",
    "parse",
]

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


class Explanation(IntEnum):
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
        return (
            "authentication failed"
            if self is Explanation.FAILED
            else self.name.lower().replace("_", " ")
        )


class MessageFault(Exception):
    """A message breaks a rule, or the proof in it is wrong.

    Args:
        explanation: what a failure message says.
        what: for our own log.
    """

    def __init__(self, explanation: Explanation, what: str) -> None:
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


def _payload(what: str) -> MessageFault:
    return MessageFault(Explanation.INCORRECT_PAYLOAD, what)


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
            raise _payload(f"AUTH_Negotiate of {len(data)} bytes with {count} protocols")
        for at in range(_NEGOTIATE.size, len(data), _PROTOCOL.size):
            protocol, halen, dhlen, hashes, groups = _PROTOCOL.unpack_from(data, at)
            if protocol != _PROTOCOL_CHAP:
                continue
            if not 1 <= halen <= _IDS_MAX or not 1 <= dhlen <= _IDS_MAX:
                raise _payload(f"{halen} hash functions and {dhlen} groups")
            return cls(tid, tuple(hashes[:halen]), tuple(groups[:dhlen]), secure_channel)
        raise MessageFault(Explanation.PROTOCOL_NOT_USABLE, "DH-HMAC-CHAP was not offered")


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
        hash_, group = _hash(hash_id), _group(group_id)
        if hl != hash_.nbytes:
            raise _payload(f"HL is {hl}, {hash_.name} has {hash_.nbytes}")
        _check_dhvlen(dhvlen, group)
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
            raise _payload(f"a Reply of {len(data)} bytes with HL {hl} and DHVLEN {dhvlen}")
        if valid > 1:
            raise _payload(f"CVALID is {valid}")
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
            raise _payload(f"RVALID is {valid}")
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
            raise _payload(f"a Success2 of {len(data)} bytes")
        return cls(_sized(_SUCCESS2, data)[3])


class Failure(NamedTuple):
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
    def unpack(cls, data: bytes) -> Failure:
        """From a message and what follows it in the buffer."""
        _, number, _, tid, reason, explanation = _sized(_FAILURE, data)
        return cls(tid, explanation, number == MessageId.FAILURE2, reason)

    def __str__(self) -> str:
        known = self.explanation in set(Explanation)
        return Explanation(self.explanation).words if known else f"reason {self.explanation}"


Message = Negotiate | Challenge | Reply | Success1 | Success2 | Failure

_KINDS: dict[tuple[int, int], type[Message]] = {
    (_COMMON, MessageId.NEGOTIATE): Negotiate,
    (_DHCHAP, MessageId.CHALLENGE): Challenge,
    (_DHCHAP, MessageId.REPLY): Reply,
    (_DHCHAP, MessageId.SUCCESS1): Success1,
    (_DHCHAP, MessageId.SUCCESS2): Success2,
    (_COMMON, MessageId.FAILURE1): Failure,
    (_COMMON, MessageId.FAILURE2): Failure,
}


def parse(data: bytes) -> Message:
    """The message that `data` begins with: what hosts send is all of it, a controller may fill it up.

    Raises:
        MessageFault: it is none.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise _payload(f"a message of {len(data)} bytes")
    auth_type, auth_id, _, _ = _sized(_HEAD, data)
    kind = _KINDS.get((auth_type, auth_id))
    if kind is None:
        raise MessageFault(
            Explanation.INCORRECT_MESSAGE, f"AUTH_TYPE {auth_type}, AUTH_ID {auth_id:#04x}"
        )
    return kind.unpack(data)


def _sized(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) < form.size:
        raise _payload(f"{len(data)} bytes, expected at least {form.size}")
    return form.unpack_from(data)


def _values(data: bytes, at: int, *sizes: int) -> list[bytes]:
    """Values of these sizes, one behind the other."""
    if len(data) < at + sum(sizes):
        raise _payload(f"{len(data)} bytes, expected at least {at + sum(sizes)}")
    out = []
    for size in sizes:
        out.append(bytes(data[at : at + size]))
        at += size
    return out


def _hash(number: int) -> Hash:
    try:
        return Hash(number)
    except ValueError:
        raise MessageFault(Explanation.HASH_NOT_USABLE, f"HashID {number}") from None


def _group(number: int) -> DhGroup:
    try:
        return DhGroup(number)
    except ValueError:
        raise MessageFault(Explanation.GROUP_NOT_USABLE, f"DHgID {number}") from None


def _check_dhvlen(dhvlen: int, group: DhGroup) -> None:
    if bool(dhvlen) != bool(group) or dhvlen > group.nbytes or dhvlen % 4:
        raise _payload(f"DHVLEN is {dhvlen}, {group.name} has {group.nbytes}")


def check_public(public: bytes, group: DhGroup) -> None:
    """Judges a Reply's DHVLEN: what it must be is known from the Challenge.

    Raises:
        MessageFault: it is not.
    """
    _check_dhvlen(len(public), group)
