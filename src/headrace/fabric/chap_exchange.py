"""Both sides of DH-HMAC-CHAP: state machines without sockets, one for each queue.

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
from enum import Enum, auto
from typing import TYPE_CHECKING

from headrace.fabric.chap import (
    Challenge,
    ChapProof,
    DhGroup,
    DhKey,
    Failure,
    Message,
    MessageFault,
    Negotiate,
    Parties,
    ReasonExplanation,
    Reply,
    Success1,
    Success2,
    check_dhvlen,
    parse,
    sequence_number,
)
from headrace.fabric.identity import Hash

if TYPE_CHECKING:
    from headrace.fabric.identity import HostSecret, Secret

HASHES = (Hash.SHA512, Hash.SHA384, Hash.SHA256)
GROUPS = (
    DhGroup.FFDHE3072, DhGroup.FFDHE2048, DhGroup.FFDHE4096, DhGroup.FFDHE6144, DhGroup.FFDHE8192,
    DhGroup.NULL,
)  # fmt: skip
"""What is liked best comes first: 3072 bits are held to be as hard as keys of 128, and take milliseconds."""


class ChapRefused(Exception):
    """The controller said that it does not believe us."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _HostStep(Enum):
    START = auto()
    CHALLENGE = auto()
    SUCCESS = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChapHost:
    """What all queues of an association have in common.

    Args:
        parties: the names.
        secret: that we prove to know.
        controller_secret: that the controller is to prove to know; None: it need not.
        hashes: to offer.
        groups: to offer.
    """

    parties: Parties
    secret: Secret
    controller_secret: Secret | None = None
    hashes: tuple[Hash, ...] = HASHES
    groups: tuple[DhGroup, ...] = GROUPS


class Exchange:
    """One queue's exchange. See the module.

    Args:
        chap: what all queues of the association have in common.
        tid: T_ID: another one for each exchange of an association.
    """

    def __init__(self, chap: ChapHost, tid: int) -> None:
        self._chap = chap
        self._tid = tid
        self._step = _HostStep.START
        self._fault: MessageFault | None = None
        self._c2 = secrets.token_bytes(max(Hash).nbytes)
        self._s2 = sequence_number()
        self._proof: ChapProof | None = None

    @property
    def done(self) -> bool:
        """Both sides have proved what they were asked to."""
        return self._step is _HostStep.DONE

    def start(self) -> bytes:
        """AUTH_Negotiate."""
        self._step = _HostStep.CHALLENGE
        return Negotiate(self._tid, self._chap.hashes, self._chap.groups).pack()

    def take(self, data: bytes) -> bytes | None:
        """Takes a message of the controller's; returns the next of ours, None if there is none.

        Raises:
            ChapRefused: the controller ends it.
            MessageFault: we do: `farewell` tells it.
        """
        try:
            message = parse(data)
            if isinstance(message, Failure) and not message.from_host:
                self._step = _HostStep.FAILED
                raise ChapRefused(message)
            return self._take(message)
        except MessageFault as fault:
            self._step = _HostStep.FAILED
            self._fault = fault
            raise

    def farewell(self) -> bytes | None:
        """AUTH_Failure2, after a fault of the controller's."""
        if self._fault is None:
            return None
        return Failure(self._tid, self._fault.explanation, from_host=True).pack()

    def _take(self, message: Message) -> bytes | None:
        if isinstance(message, Challenge) and self._step is _HostStep.CHALLENGE:
            self._check_tid(message.tid)
            return self._reply(message).pack()
        if isinstance(message, Success1) and self._step is _HostStep.SUCCESS:
            self._check_tid(message.tid)
            self._check_controller(message)
            self._step = _HostStep.DONE
            return Success2(self._tid).pack() if self._chap.controller_secret else None
        raise MessageFault(
            ReasonExplanation.INCORRECT_MESSAGE, f"{type(message).__name__} at {self._step.name}"
        )

    def _reply(self, message: Challenge) -> Reply:
        if message.hash not in self._chap.hashes:
            raise MessageFault(
                ReasonExplanation.HASH_NOT_USABLE, f"{message.hash.name} was not offered"
            )
        if message.group not in self._chap.groups:
            raise MessageFault(
                ReasonExplanation.GROUP_NOT_USABLE, f"{message.group.name} was not offered"
            )
        public, shared = _exchange(message)
        self._proof = ChapProof(self._chap.parties, message.hash, self._tid, shared)
        response = self._proof.of_host(self._chap.secret, message.value, message.sequence)
        self._step = _HostStep.SUCCESS
        if self._chap.controller_secret is None:
            return Reply(self._tid, response, public=public)
        self._c2 = self._c2[: message.hash.nbytes]
        return Reply(self._tid, response, self._c2, self._s2, public)

    def _check_controller(self, message: Success1) -> None:
        assert self._proof is not None
        if message.hash_bytes != self._proof.hash.nbytes:
            raise MessageFault(ReasonExplanation.INCORRECT_PAYLOAD, f"HL is {message.hash_bytes}")
        if self._chap.controller_secret is None:
            return
        if message.response is None:
            raise MessageFault(ReasonExplanation.FAILED, "the controller proves nothing")
        expected = self._proof.of_controller(self._chap.controller_secret, self._c2, self._s2)
        if not hmac.compare_digest(message.response, expected):
            raise MessageFault(ReasonExplanation.FAILED, "the controller does not know the secret")

    def _check_tid(self, tid: int) -> None:
        if tid != self._tid:
            raise MessageFault(
                ReasonExplanation.INCORRECT_PAYLOAD, f"T_ID is {tid}, ours {self._tid}"
            )


def _exchange(message: Challenge) -> tuple[bytes, bytes]:
    """Our public value and the shared one; empty with NULL."""
    if message.group is DhGroup.NULL:
        return b"", b""
    key = DhKey(message.group)
    try:
        return key.public, key.exchange(message.public)
    except ValueError as e:
        raise MessageFault(ReasonExplanation.INCORRECT_PAYLOAD, str(e)) from None


class _TargetStep(Enum):
    NEGOTIATE = auto()
    CHALLENGE = auto()
    """To be received."""
    REPLY = auto()
    SUCCESS1 = auto()
    """To be received."""
    SUCCESS2 = auto()
    DONE = auto()
    FAILED = auto()
    """AUTH_Failure1 is to be received."""
    OVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChapTarget:
    """What all queues of an association have in common.

    Args:
        parties: the names.
        secrets: of this host.
        hashes: that are taken, the best first.
        groups: that are taken, the best first.
    """

    parties: Parties
    secrets: HostSecret
    hashes: tuple[Hash, ...] = HASHES
    groups: tuple[DhGroup, ...] = GROUPS


class Gate:
    """One queue's. See the module.

    Invariants:
      - nothing that came before `authenticated` has any effect but on this object
      - a challenge is answered at most once
    """

    def __init__(self, chap: ChapTarget) -> None:
        self._chap = chap
        self._step = _TargetStep.NEGOTIATE
        self._tid = 0
        self._challenge = b""
        self._sequence = 0
        self._key: DhKey | None = None
        self._proof: ChapProof | None = None
        self._success = Success1(0, 0)
        self._explanation = ReasonExplanation.FAILED
        self.authenticated = False
        self.why = ""
        """What went wrong."""

    @property
    def over(self) -> bool:
        """It failed and the host knows: the connection ends."""
        return self._step is _TargetStep.OVER

    @property
    def message_bytes(self) -> int:
        """Of what `receive` gives next."""
        if self._step is _TargetStep.CHALLENGE:
            return len(self._make_challenge().pack())
        if self._step is _TargetStep.SUCCESS1:
            return len(self._success.pack())
        return len(self._make_failure().pack())

    def send(self, data: bytes) -> None:
        """Takes a message of the host's."""
        try:
            self._take(parse(data))
        except MessageFault as fault:
            self._fail(fault)

    def receive(self) -> bytes:
        """The message that the host is to have next."""
        if self._step is _TargetStep.CHALLENGE:
            self._step = _TargetStep.REPLY
            return self._make_challenge().pack()
        if self._step is _TargetStep.SUCCESS1:
            asked = self._success.response is not None
            self._step = _TargetStep.SUCCESS2 if asked else _TargetStep.DONE
            self.authenticated = self.authenticated or not asked
            return self._success.pack()
        if self._step is not _TargetStep.FAILED:
            what = f"a message is asked for at {self._step.name}"
            self._fail(MessageFault(ReasonExplanation.INCORRECT_MESSAGE, what))
        self._step = _TargetStep.OVER
        return self._make_failure().pack()

    # -- messages ---------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        step = self._step
        if isinstance(message, Failure) and message.from_host and step is not _TargetStep.FAILED:
            self.authenticated = False
            self.why = f"the host does not believe us: {message}"
            self._step = _TargetStep.OVER
        elif isinstance(message, Negotiate) and step in {_TargetStep.NEGOTIATE, _TargetStep.DONE}:
            self._negotiate(message)
        elif isinstance(message, Reply) and step is _TargetStep.REPLY:
            self._judge(message)
        elif isinstance(message, Success2) and step is _TargetStep.SUCCESS2:
            self._check_tid(message.tid)
            self._step = _TargetStep.DONE
            self.authenticated = True
        else:
            what = f"{type(message).__name__} at {step.name}"
            raise MessageFault(ReasonExplanation.INCORRECT_MESSAGE, what)

    def _negotiate(self, message: Negotiate) -> None:
        self._tid = message.tid
        if message.secure_channel:
            what = f"SC_C is {message.secure_channel}, there is no secure channel here"
            raise MessageFault(ReasonExplanation.SECURE_CHANNEL_MISMATCH, what)
        chosen = next((each for each in self._chap.hashes if each in message.hashes), None)
        if chosen is None:
            what = f"hash functions {message.hashes} were offered"
            raise MessageFault(ReasonExplanation.HASH_NOT_USABLE, what)
        group = next((each for each in self._chap.groups if each in message.groups), None)
        if group is None:
            what = f"groups {message.groups} were offered"
            raise MessageFault(ReasonExplanation.GROUP_NOT_USABLE, what)
        self._proof = ChapProof(self._chap.parties, chosen, self._tid)
        self._key = None
        if group is not DhGroup.NULL:
            self._key = DhKey(group)
        self._challenge = secrets.token_bytes(chosen.nbytes)
        self._sequence = sequence_number()
        self._step = _TargetStep.CHALLENGE

    def _make_challenge(self) -> Challenge:
        assert self._proof is not None
        group = self._key.group if self._key else DhGroup.NULL
        public = self._key.public if self._key else b""
        return Challenge(
            self._tid, self._proof.hash, group, self._sequence, self._challenge, public
        )

    def _judge(self, message: Reply) -> None:
        """A host's proof; and ours, if it wants one."""
        proof = self._agreed(message)
        self._check_tid(message.tid)
        if len(message.response) != proof.hash.nbytes:
            raise MessageFault(
                ReasonExplanation.INCORRECT_PAYLOAD, f"HL is {len(message.response)}"
            )
        known = self._chap.secrets
        expected = proof.of_host(known.secret, self._challenge, self._sequence)
        if not hmac.compare_digest(message.response, expected):
            raise MessageFault(ReasonExplanation.FAILED, "the host does not know the secret")
        response = None
        if message.challenge is not None:
            if known.controller is None:
                what = "the host asks for our proof, and there is no controller's secret for it"
                raise MessageFault(ReasonExplanation.FAILED, what)
            if hmac.compare_digest(message.challenge, self._challenge):
                raise MessageFault(ReasonExplanation.FAILED, "our own challenge came back")
            response = proof.of_controller(known.controller, message.challenge, message.sequence)
        self._success = Success1(self._tid, proof.hash.nbytes, response)
        self._step = _TargetStep.SUCCESS1

    def _agreed(self, message: Reply) -> ChapProof:
        assert self._proof is not None
        check_dhvlen(len(message.public), self._key.group if self._key else DhGroup.NULL)
        if self._key is None:
            return self._proof
        try:
            return self._proof._replace(shared=self._key.exchange(message.public))
        except ValueError as e:
            raise MessageFault(ReasonExplanation.INCORRECT_PAYLOAD, str(e)) from None

    def _make_failure(self) -> Failure:
        return Failure(self._tid, self._explanation, from_host=False)

    def _check_tid(self, tid: int) -> None:
        if tid != self._tid:
            what = f"T_ID is {tid}, the exchange has {self._tid}"
            raise MessageFault(ReasonExplanation.INCORRECT_PAYLOAD, what)

    def _fail(self, fault: MessageFault) -> None:
        self.authenticated = False
        self.why = str(fault)
        self._explanation = fault.explanation
        self._step = _TargetStep.FAILED
