"""The agent: which leases count. No socket: the controller is a function."""

import msgspec
import pytest

from headrace.control.client import Endpoint, Refusal
from headrace.control.messages import Lease, Register, Report, encode
from headrace.errors import ControlError
from headrace.node.rate_limits import LeaseAgent


class Limits:
    left_s = 0.0

    def __init__(self):
        self.kept = []

    def usage(self):
        return []

    def holdings(self):
        return []

    def apply(self, lease, asked_at):
        self.kept.append((lease, asked_at))
        self.left_s = lease.lease_s


class Controller:
    """Answers as it is told."""

    deadline_s = 5.0

    def __init__(self):
        self.reign, self.epoch, self.offset = "reign", 5, 0
        self.asked = []
        self.refuse = None

    def ask(self, method, path, body=None):
        self.asked.append((method, path))
        if self.refuse is not None:
            refuse, self.refuse = self.refuse, None
            raise refuse
        sequence = 0
        if path.endswith("/report"):
            sequence = msgspec.json.decode(body, type=Report).sequence
        else:
            msgspec.json.decode(body, type=Register)
        return encode(
            Lease("key", self.reign, self.epoch, sequence + self.offset, 9.0, 0.5, None, [], [], {})
        )

    def close(self):
        pass


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def rig():
    limits, controller = Limits(), Controller()
    agent = LeaseAgent(Endpoint(url="unix:/nowhere"), limits, clock=Clock())
    agent._client = controller
    return agent, limits, controller


def test_it_registers_reports_and_keeps_to_what_it_is_told(rig):
    agent, limits, controller = rig
    assert agent.turn() == 0.0
    assert agent.turn() == 0.5
    assert controller.asked == [("POST", "/v1/planes"), ("POST", "/v1/planes/key/report")]
    assert [asked_at for _, asked_at in limits.kept] == [50.0, 50.0]


def test_a_lease_of_an_older_controller_is_void(rig):
    agent, limits, controller = rig
    agent.turn()
    controller.epoch = 4
    with pytest.raises(ControlError, match="an older controller answers, with epoch 4"):
        agent.turn()
    limits.left_s = 0.0  # also when no lease runs any more
    with pytest.raises(ControlError, match="older"):
        agent.turn()
    assert len(limits.kept) == 1
    assert agent.describe()["void_leases"] == 2
    controller.epoch = 6
    agent.turn()
    assert limits.kept[-1][0].epoch == 6


def test_a_lease_of_another_database_counts_only_when_none_runs(rig):
    agent, limits, controller = rig
    agent.turn()
    controller.reign, controller.epoch = "another", 99
    with pytest.raises(ControlError, match="another controller answers"):
        agent.turn()
    limits.left_s = 0.0
    agent.turn()
    assert limits.kept[-1][0].reign == "another"


@pytest.mark.parametrize("offset", [-1, 1])
def test_an_answer_to_another_report_is_void(rig, offset):
    agent, limits, controller = rig
    agent.turn()
    controller.offset = offset
    with pytest.raises(ControlError):
        agent.turn()
    assert len(limits.kept) == 1


@pytest.mark.parametrize("status", [404, 409])
def test_a_controller_that_does_not_know_it_is_told_again(rig, status):
    agent, limits, controller = rig
    agent.turn()
    agent.turn()
    refusal = Refusal("no such plane", status=status)
    assert agent._refused(refusal) == 0.0
    agent.turn()
    assert controller.asked[-1] == ("POST", "/v1/planes")
    assert limits.kept[-1][0].sequence == 0


def test_who_may_not_does_not_ask_all_the_time(rig):
    agent, _, _ = rig
    assert agent._refused(Refusal("who?", status=401)) >= 5.0
    assert "who?" in agent.describe()["why"]


def test_garbage_from_a_controller_is_an_error_of_values(rig, monkeypatch):
    agent, limits, controller = rig
    for garbage in (b"", b"[]", b"{", b"\xff", b'{"plane": 1}', b"[" * 100_000):
        monkeypatch.setattr(controller, "ask", lambda *_, garbage=garbage: garbage)
        with pytest.raises(ValueError):
            agent.turn()
    assert limits.kept == []
