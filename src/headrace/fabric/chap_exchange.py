"""Both sides of DH-HMAC-CHAP, without sockets, one object for each queue; each is a generator of its messages.

The host: `start` is what to send first; then what was received goes into `take`, which says what to send
next. A fault raises `MessageFault`; `farewell` is what the controller is told then.

The controller: what Authentication Send brings goes into `send`, and `receive` is what Authentication
Receive takes. A fault is answered by AUTH_Failure1 in the next `receive`, and then the connection ends
(`over`). A host may authenticate again on a queue where it has before.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from headrace.fabric.chap import (
    AuthFailure,
    Challenge,
    ChapProof,
    DhGroup,
    DhKey,
    Message,
    MessageFault,
    Negotiate,
    Parties,
    Reply,
    Success1,
    Success2,
    check_dhvlen,
    message_fault,
    parse,
    payload_fault,
    sequence_number,
)
from headrace.fabric.chap import ReasonExplanation as Reason
from headrace.fabric.identity import Hash

if TYPE_CHECKING:
    from collections.abc import Generator

    from headrace.fabric.identity import HostSecret

_MessageT = TypeVar("_MessageT", Negotiate, Challenge, Reply, Success1, Success2)

HASHES = (Hash.SHA512, Hash.SHA384, Hash.SHA256)
GROUPS = (
    DhGroup.FFDHE3072, DhGroup.FFDHE2048, DhGroup.FFDHE4096, DhGroup.FFDHE6144, DhGroup.FFDHE8192,
    DhGroup.NULL,
)  # fmt: skip
"""What is liked best comes first: 3072 bits are held to be as hard as keys of 128, and take milliseconds."""


class ChapRefused(Exception):
    """The controller said that it does not believe us."""

    def __init__(self, failure: AuthFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ChapSetup:
    """What all queues of an association have in common, on either side.

    Attributes:
        parties: the names.
        secrets: what the host proves to know, and what the controller does; without the latter, a host
            asks for no proof, and a controller cannot give one.
        hashes: that are offered or taken, the best first.
        groups: likewise.
    """

    parties: Parties
    secrets: HostSecret
    hashes: tuple[Hash, ...] = HASHES
    groups: tuple[DhGroup, ...] = GROUPS


def _expected(message: Message | None, kind: type[_MessageT], tid: int | None) -> _MessageT:
    """The message, if it is of the kind whose turn it is, and of this exchange."""
    if not isinstance(message, kind):
        raise message_fault(f"{type(message).__name__}, expected {kind.__name__}")
    if tid is not None and message.tid != tid:
        raise payload_fault(f"T_ID is {message.tid}, the exchange has {tid}")
    return message


def _expect_taken(message: Message | None) -> None:
    """See that a host takes our message before it sends its next one."""
    if message is not None:
        raise message_fault(f"{type(message).__name__}, and it has not taken ours")


def _shared(key: DhKey | None, public: bytes) -> bytes:
    """The shared value; empty with NULL."""
    try:
        return b"" if key is None else key.exchange(public)
    except ValueError as e:
        raise payload_fault(str(e)) from None


class Exchange:
    """A host's exchange on one queue. See the module.

    Args:
        chap: what all queues of the association have in common.
        tid: T_ID: another one for each exchange of an association.
    """

    def __init__(self, chap: ChapSetup, tid: int) -> None:
        self._chap = chap
        self._tid = tid
        self._proof: ChapProof | None = None
        self._talk = self._conversation()
        self._fault: MessageFault | None = None
        self.done = False
        """Both sides have proved what they were asked to."""

    def start(self) -> bytes:
        """AUTH_Negotiate."""
        return next(self._talk) or b""

    def take(self, data: bytes) -> bytes | None:
        """Takes a message of the controller's; returns the next of ours, None if there is none.

        Raises:
            ChapRefused: the controller ends it.
            MessageFault: we do: `farewell` tells it.
        """
        try:
            message = parse(data)
            if isinstance(message, AuthFailure) and not message.from_host:
                raise ChapRefused(message)  # noqa: TRY301 - as what the conversation raises
            return self._talk.send(message)
        except StopIteration:  # it has failed before
            raise message_fault("the exchange is over") from None
        except (ChapRefused, MessageFault) as e:
            self.done = False
            self._fault = e if isinstance(e, MessageFault) else None
            raise

    def farewell(self) -> bytes | None:
        """AUTH_Failure2, after a fault of the controller's."""
        if self._fault is None:
            return None
        return AuthFailure(self._tid, self._fault.explanation, from_host=True).pack()

    def _conversation(self) -> Generator[bytes | None, Message, None]:
        chap, tid, known = self._chap, self._tid, self._chap.secrets
        message = yield Negotiate(tid, chap.hashes, chap.groups).pack()
        challenge = _expected(message, Challenge, tid)
        if challenge.hash not in chap.hashes:
            raise MessageFault(Reason.HASH_NOT_USABLE, f"{challenge.hash.name} was not offered")
        if challenge.group not in chap.groups:
            raise MessageFault(Reason.GROUP_NOT_USABLE, f"{challenge.group.name} was not offered")
        key = DhKey(challenge.group) if challenge.group else None
        shared = _shared(key, challenge.public)
        self._proof = proof = ChapProof(chap.parties, challenge.hash, tid, shared)
        response = proof.of_host(known.secret, challenge.value, challenge.sequence)
        reply = Reply(tid, response, public=key.public if key else b"")
        value, sequence = secrets.token_bytes(proof.hash.nbytes), sequence_number()
        if known.controller is not None:
            reply = reply._replace(challenge=value, sequence=sequence)
        message = yield reply.pack()
        success = _expected(message, Success1, tid)
        if success.hash_bytes != proof.hash.nbytes:
            raise payload_fault(f"HL is {success.hash_bytes}")
        if known.controller is not None:
            if success.response is None:
                raise MessageFault(Reason.FAILED, "the controller proves nothing")
            expected = proof.of_controller(known.controller, value, sequence)
            if not hmac.compare_digest(success.response, expected):
                raise MessageFault(Reason.FAILED, "the controller does not know the secret")
        self.done = True
        message = yield Success2(tid).pack() if known.controller is not None else None
        raise message_fault(f"{type(message).__name__} at the end")


class Gate:
    """A controller's exchanges on one queue. See the module.

    Invariants:
      - nothing that came before `authenticated` has any effect but on this object
      - a challenge is answered at most once
    """

    def __init__(self, chap: ChapSetup) -> None:
        self._chap = chap
        self._tid = 0
        self._proof: ChapProof | None = None
        self._talk = self._conversation()
        self._next = next(self._talk)  # what the host is to have next; None: it is its turn
        self._failed = False
        self.authenticated = False
        self.over = False
        """It failed and the host knows: the connection ends."""
        self.why = ""
        """What went wrong."""

    @property
    def message_bytes(self) -> int:
        """Of what `receive` gives next."""
        return len(self._next or AuthFailure(self._tid, 0, from_host=False).pack())

    def send(self, data: bytes) -> None:
        """Takes a message of the host's."""
        try:
            message = parse(data)
            if isinstance(message, AuthFailure) and message.from_host and not self._failed:
                self.authenticated, self.over = False, True
                self.why = f"the host does not believe us: {message}"
                return
            self._next = self._talk.send(message)
        except MessageFault as fault:
            self._fail(fault)
        except StopIteration:
            self._fail(message_fault("it has failed before"))

    def receive(self) -> bytes:
        """The message that the host is to have next."""
        if self._next is None:
            self._fail(message_fault("a message is asked for, and it is the host's turn"))
        message, self._next = self._next or b"", None
        if self._failed:
            self.over = True
        else:
            self._next = self._talk.send(None)
        return message

    def _fail(self, fault: MessageFault) -> None:
        self._talk.close()
        self.authenticated, self._failed = False, True
        self.why = str(fault)
        self._next = AuthFailure(self._tid, fault.explanation, from_host=False).pack()

    def _conversation(self) -> Generator[bytes | None, Message | None, None]:
        """Yields what the host is to have next, or None for its next message."""
        while True:
            asked = _expected((yield None), Negotiate, None)
            self._tid = tid = asked.tid
            challenge, key = self._challenge(asked)
            self._proof = proof = ChapProof(self._chap.parties, challenge.hash, tid)
            _expect_taken((yield challenge.pack()))
            reply = _expected((yield None), Reply, tid)
            check_dhvlen(len(reply.public), challenge.group)
            proof = proof._replace(shared=_shared(key, reply.public))
            response = self._judge(reply, challenge, proof)
            _expect_taken((yield Success1(tid, proof.hash.nbytes, response).pack()))
            if response is not None:
                _expected((yield None), Success2, tid)
            self.authenticated = True

    def _challenge(self, asked: Negotiate) -> tuple[Challenge, DhKey | None]:
        """The best that both can do; raises MessageFault if there is none."""
        if asked.secure_channel:
            what = f"SC_C is {asked.secure_channel}, there is no secure channel here"
            raise MessageFault(Reason.SECURE_CHANNEL_MISMATCH, what)
        chosen = next((each for each in self._chap.hashes if each in asked.hashes), None)
        if chosen is None:
            what = f"hash functions {asked.hashes} were offered"
            raise MessageFault(Reason.HASH_NOT_USABLE, what)
        group = next((each for each in self._chap.groups if each in asked.groups), None)
        if group is None:
            raise MessageFault(Reason.GROUP_NOT_USABLE, f"groups {asked.groups} were offered")
        key = DhKey(group) if group else None
        value, public = secrets.token_bytes(chosen.nbytes), key.public if key else b""
        return Challenge(asked.tid, chosen, group, sequence_number(), value, public), key

    def _judge(self, reply: Reply, challenge: Challenge, proof: ChapProof) -> bytes | None:
        """Our own proof, if the host wants one; raises MessageFault if the host's is wrong."""
        if len(reply.response) != proof.hash.nbytes:
            raise payload_fault(f"HL is {len(reply.response)}")
        known = self._chap.secrets
        expected = proof.of_host(known.secret, challenge.value, challenge.sequence)
        if not hmac.compare_digest(reply.response, expected):
            raise MessageFault(Reason.FAILED, "the host does not know the secret")
        if reply.challenge is None:
            return None
        if known.controller is None:
            what = "the host asks for our proof, and there is no controller's secret for it"
            raise MessageFault(Reason.FAILED, what)
        if hmac.compare_digest(reply.challenge, challenge.value):
            raise MessageFault(Reason.FAILED, "our own challenge came back")
        return proof.of_controller(known.controller, reply.challenge, reply.sequence)
