"""A host and a controller that know each other, and reference keys of both."""

from __future__ import annotations

from fabric.chap.reference import HOSTNQN, SUBNQN, secret_text, transformed
from headrace.fabric.chap import DhGroup, Parties
from headrace.fabric.chap_exchange import GROUPS, HASHES, ChapSetup, Exchange, Gate
from headrace.fabric.identity import Hash, HostSecret

HOST_VALUE, CONTROLLER_VALUE = bytes(range(32)), bytes(range(50, 98))
HOST_SECRET, CONTROLLER_SECRET = secret_text(HOST_VALUE, 1), secret_text(CONTROLLER_VALUE, 2)
HOST_KEY = transformed(HOST_VALUE, 1, HOSTNQN)
CONTROLLER_KEY = transformed(CONTROLLER_VALUE, 2, SUBNQN)
PARTIES = Parties(HOSTNQN, SUBNQN)
TID = 0x1234


def host(*, both=False, secret=HOST_SECRET, controller=CONTROLLER_SECRET, parties=PARTIES,
         hashes=HASHES, groups=(DhGroup.NULL,)):  # fmt: skip
    secrets = HostSecret.read(secret, controller if both else None)
    return Exchange(ChapSetup(parties=parties, secrets=secrets, hashes=hashes, groups=groups), TID)


def gate(*, controller=CONTROLLER_SECRET, secret=HOST_SECRET, hashes=HASHES, groups=GROUPS):
    secrets = HostSecret.read(secret, controller)
    return Gate(ChapSetup(parties=PARTIES, secrets=secrets, hashes=hashes, groups=groups))


def converse(exchange, at_gate):
    """Carries messages to and fro until the host is done; returns all of them."""
    messages = [exchange.start()]
    at_gate.send(messages[0])
    while not exchange.done:
        messages.append(at_gate.receive())
        answer = exchange.take(messages[-1].ljust(4096, b"\0"))
        if answer is not None:
            messages.append(answer)
            at_gate.send(answer)
    return messages


__all__ = ["DhGroup", "Hash", "converse", "gate", "host"]
