"""A host's side of DH-HMAC-CHAP: a state machine without sockets, one for each queue.

`start` is what to send first; then what was received goes into `take`, which says what to send next.
A fault raises `MessageFault`; `farewell` is what the controller is told then.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from enum import Enum, auto

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
    parse,
)
from headrace.fabric.chap_proof import Parties, Proof, sequence_number
from headrace.fabric.dh import DhGroup, DhKey
from headrace.fabric.secret import Hash, Secret

__all__ = ["GROUPS", "HASHES", "ChapHost", "ChapRefused", "Exchange"]

HASHES = (Hash.SHA512, Hash.SHA384, Hash.SHA256)
GROUPS = (
    DhGroup.FFDHE3072, DhGroup.FFDHE2048, DhGroup.FFDHE4096, DhGroup.FFDHE6144, DhGroup.FFDHE8192,
    DhGroup.NULL,
)  # fmt: skip
"""What is liked best comes first: 3072 bits are held to be as hard as keys of 128, and take milliseconds."""


class ChapRefused(Exception):
    """The controller said that it does not believe us.

    Args:
        failure: what it said.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Step(Enum):
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

    def begin(self, tid: int) -> Exchange:
        """A queue's exchange.

        Args:
            tid: T_ID: another one for each exchange of an association.
        """
        return Exchange(self, tid)


class Exchange:
    """One exchange. See the module."""

    def __init__(self, chap: ChapHost, tid: int) -> None:
        self._chap = chap
        self._tid = tid
        self._step = _Step.START
        self._fault: MessageFault | None = None
        self._c2 = secrets.token_bytes(max(Hash).nbytes)
        self._s2 = sequence_number()
        self._proof: Proof | None = None

    @property
    def done(self) -> bool:
        """Both sides have proved what they were asked to."""
        return self._step is _Step.DONE

    def start(self) -> bytes:
        """AUTH_Negotiate."""
        self._step = _Step.CHALLENGE
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
                self._step = _Step.FAILED
                raise ChapRefused(message)
            return self._take(message)
        except MessageFault as fault:
            self._step = _Step.FAILED
            self._fault = fault
            raise

    def farewell(self) -> bytes | None:
        """AUTH_Failure2, after a fault of the controller's."""
        if self._fault is None:
            return None
        return Failure(self._tid, self._fault.explanation, from_host=True).pack()

    def _take(self, message: Message) -> bytes | None:
        if isinstance(message, Challenge) and self._step is _Step.CHALLENGE:
            self._check_tid(message.tid)
            return self._reply(message).pack()
        if isinstance(message, Success1) and self._step is _Step.SUCCESS:
            self._check_tid(message.tid)
            self._check_controller(message)
            self._step = _Step.DONE
            return Success2(self._tid).pack() if self._chap.controller_secret else None
        raise MessageFault(
            Explanation.INCORRECT_MESSAGE, f"{type(message).__name__} at {self._step.name}"
        )

    def _reply(self, message: Challenge) -> Reply:
        if message.hash not in self._chap.hashes:
            raise MessageFault(Explanation.HASH_NOT_USABLE, f"{message.hash.name} was not offered")
        if message.group not in self._chap.groups:
            raise MessageFault(
                Explanation.GROUP_NOT_USABLE, f"{message.group.name} was not offered"
            )
        public, shared = _exchange(message)
        self._proof = Proof(self._chap.parties, message.hash, self._tid, shared)
        response = self._proof.of_host(self._chap.secret, message.value, message.sequence)
        self._step = _Step.SUCCESS
        if self._chap.controller_secret is None:
            return Reply(self._tid, response, public=public)
        self._c2 = self._c2[: message.hash.nbytes]
        return Reply(self._tid, response, self._c2, self._s2, public)

    def _check_controller(self, message: Success1) -> None:
        assert self._proof is not None
        if message.hash_bytes != self._proof.hash.nbytes:
            raise MessageFault(Explanation.INCORRECT_PAYLOAD, f"HL is {message.hash_bytes}")
        if self._chap.controller_secret is None:
            return
        if message.response is None:
            raise MessageFault(Explanation.FAILED, "the controller proves nothing")
        expected = self._proof.of_controller(self._chap.controller_secret, self._c2, self._s2)
        if not hmac.compare_digest(message.response, expected):
            raise MessageFault(Explanation.FAILED, "the controller does not know the secret")

    def _check_tid(self, tid: int) -> None:
        if tid != self._tid:
            raise MessageFault(Explanation.INCORRECT_PAYLOAD, f"T_ID is {tid}, ours {self._tid}")


def _exchange(message: Challenge) -> tuple[bytes, bytes]:
    """Our public value and the shared one; empty with NULL."""
    if message.group is DhGroup.NULL:
        return b"", b""
    key = DhKey(message.group)
    try:
        return key.public, key.exchange(message.public)
    except ValueError as e:
        raise MessageFault(Explanation.INCORRECT_PAYLOAD, str(e)) from None
