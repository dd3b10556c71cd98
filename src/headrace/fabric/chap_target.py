"""A controller's side of DH-HMAC-CHAP: a state machine without sockets, one for each queue.

What Authentication Send brings goes into `send`, and `receive` is what Authentication Receive takes.
A fault is answered by AUTH_Failure1 in the next `receive`, and then the connection ends (`over`). A
host may authenticate again on a queue where it has before.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from headrace.fabric.chap_host import GROUPS, HASHES
from headrace.fabric.chap_messages import (
    Challenge,
    Explanation,
    Failure,
    Message,
    MessageFault,
    Negotiate,
    Reply,
    Success1,
    Success2,
    check_public,
    parse,
)
from headrace.fabric.chap_proof import Parties, Proof, sequence_number
from headrace.fabric.dh import DhGroup, DhKey

if TYPE_CHECKING:
    from headrace.fabric.secret import Hash, HostSecret

__all__ = ["ChapTarget", "Gate"]


class _Step(Enum):
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

    def gate(self) -> Gate:
        """A queue's."""
        return Gate(self)


class Gate:
    """One queue's. See the module.

    Invariants:
      - nothing that came before `authenticated` has any effect but on this object
      - a challenge is answered at most once
    """

    def __init__(self, chap: ChapTarget) -> None:
        self._chap = chap
        self._step = _Step.NEGOTIATE
        self._tid = 0
        self._challenge = b""
        self._sequence = 0
        self._key: DhKey | None = None
        self._proof: Proof | None = None
        self._success = Success1(0, 0)
        self._explanation = Explanation.FAILED
        self.authenticated = False
        self.why = ""
        """What went wrong."""

    @property
    def over(self) -> bool:
        """It failed and the host knows: the connection ends."""
        return self._step is _Step.OVER

    @property
    def message_bytes(self) -> int:
        """Of what `receive` gives next."""
        if self._step is _Step.CHALLENGE:
            return len(self._make_challenge().pack())
        if self._step is _Step.SUCCESS1:
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
        if self._step is _Step.CHALLENGE:
            self._step = _Step.REPLY
            return self._make_challenge().pack()
        if self._step is _Step.SUCCESS1:
            asked = self._success.response is not None
            self._step = _Step.SUCCESS2 if asked else _Step.DONE
            self.authenticated = self.authenticated or not asked
            return self._success.pack()
        if self._step is not _Step.FAILED:
            what = f"a message is asked for at {self._step.name}"
            self._fail(MessageFault(Explanation.INCORRECT_MESSAGE, what))
        self._step = _Step.OVER
        return self._make_failure().pack()

    # -- messages ---------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        step = self._step
        if isinstance(message, Failure) and message.from_host and step is not _Step.FAILED:
            self.authenticated = False
            self.why = f"the host does not believe us: {message}"
            self._step = _Step.OVER
        elif isinstance(message, Negotiate) and step in {_Step.NEGOTIATE, _Step.DONE}:
            self._negotiate(message)
        elif isinstance(message, Reply) and step is _Step.REPLY:
            self._judge(message)
        elif isinstance(message, Success2) and step is _Step.SUCCESS2:
            self._check_tid(message.tid)
            self._step = _Step.DONE
            self.authenticated = True
        else:
            what = f"{type(message).__name__} at {step.name}"
            raise MessageFault(Explanation.INCORRECT_MESSAGE, what)

    def _negotiate(self, message: Negotiate) -> None:
        self._tid = message.tid
        if message.secure_channel:
            what = f"SC_C is {message.secure_channel}, there is no secure channel here"
            raise MessageFault(Explanation.SECURE_CHANNEL_MISMATCH, what)
        chosen = next((each for each in self._chap.hashes if each in message.hashes), None)
        if chosen is None:
            what = f"hash functions {message.hashes} were offered"
            raise MessageFault(Explanation.HASH_NOT_USABLE, what)
        group = next((each for each in self._chap.groups if each in message.groups), None)
        if group is None:
            what = f"groups {message.groups} were offered"
            raise MessageFault(Explanation.GROUP_NOT_USABLE, what)
        self._proof = Proof(self._chap.parties, chosen, self._tid)
        self._key = None
        if group is not DhGroup.NULL:
            self._key = DhKey(group)
        self._challenge = secrets.token_bytes(chosen.nbytes)
        self._sequence = sequence_number()
        self._step = _Step.CHALLENGE

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
            raise MessageFault(Explanation.INCORRECT_PAYLOAD, f"HL is {len(message.response)}")
        known = self._chap.secrets
        expected = proof.of_host(known.secret, self._challenge, self._sequence)
        if not hmac.compare_digest(message.response, expected):
            raise MessageFault(Explanation.FAILED, "the host does not know the secret")
        response = None
        if message.challenge is not None:
            if known.controller is None:
                what = "the host asks for our proof, and there is no controller's secret for it"
                raise MessageFault(Explanation.FAILED, what)
            if hmac.compare_digest(message.challenge, self._challenge):
                raise MessageFault(Explanation.FAILED, "our own challenge came back")
            response = proof.of_controller(known.controller, message.challenge, message.sequence)
        self._success = Success1(self._tid, proof.hash.nbytes, response)
        self._step = _Step.SUCCESS1

    def _agreed(self, message: Reply) -> Proof:
        assert self._proof is not None
        check_public(message.public, self._key.group if self._key else DhGroup.NULL)
        if self._key is None:
            return self._proof
        try:
            return self._proof._replace(shared=self._key.exchange(message.public))
        except ValueError as e:
            raise MessageFault(Explanation.INCORRECT_PAYLOAD, str(e)) from None

    def _make_failure(self) -> Failure:
        return Failure(self._tid, self._explanation, from_host=False)

    def _check_tid(self, tid: int) -> None:
        if tid != self._tid:
            what = f"T_ID is {tid}, the exchange has {self._tid}"
            raise MessageFault(Explanation.INCORRECT_PAYLOAD, what)

    def _fail(self, fault: MessageFault) -> None:
        self.authenticated = False
        self.why = str(fault)
        self._explanation = fault.explanation
        self._step = _Step.FAILED
