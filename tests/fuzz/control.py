"""Bodies of requests to the controller: what is no message is refused, what is one harms nobody else."""

from __future__ import annotations

from headrace.control import messages
from headrace.control.messages import Flow, PlaneState, Register, Report
from headrace.control.policy import parse_policy
from headrace.control.service.arbiter import Arbiter
from headrace.control.service.auth import Refused

POLICY = """
version: 1
file_systems: {scratch: {paths: [/scratch], capacity: {bytes_per_s: 100M}}}
jobs: {a: {cap: {bytes_per_s: 50M}}}
"""


def seeds() -> list[bytes]:
    flow = Flow("a", "scratch", (1e6, 3.0, 0.0), (5e5, 0.0, 0.0), (0.5, 0.0, 0.0))
    state = PlaneState(1e9, 2e9, {"ram": 1.0}, {"storage": 0.5}, {"a": 2})
    register = Register(messages.API, "node-1", "user", 17, "0123456789abcdef" * 2)
    return [messages.encode(m) for m in (Report(2, 1.0, [flow], state), register)]


def one_input(data: bytes) -> str:
    now = 100.0
    arbiter = Arbiter(parse_policy(POLICY), "reign", 1, now)
    good = Register(messages.API, "other", "user", 1, "f" * 32)
    other = arbiter.register(good, now).plane
    outcome = "refused"
    for kind in (Register, Report):
        try:
            message = messages.decode(kind, data)
        except ValueError:
            continue
        try:
            if isinstance(message, Register):
                lease = arbiter.register(message, now)
            else:
                key = arbiter.register(Register(messages.API, "n", "u", 2, "e" * 32), now).plane
                lease = arbiter.report(key, message, now + 1)
        except Refused:
            continue
        outcome = "accepted"
        assert all(rate is None or rate >= 0 for grant in lease.grants for rate in grant.rates)
        messages.encode(lease)
        messages.encode(arbiter.describe(now + 1))
    # A plane that keeps to the rules is answered, whatever was said before.
    assert arbiter.report(other, Report(1, 1.0, []), now + 2).sequence == 1
    return outcome
