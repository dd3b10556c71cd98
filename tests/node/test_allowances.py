"""Allowances: who may go, who waits, in a time that the test makes."""

import numpy as np
import pytest

from headrace.control.messages import Grant, Lease, Place
from headrace.node.allowances import FREE, Allowances
from headrace.plane.rate_limit import Cost


class Data:
    """A data set of which each sample costs 10 bytes, but those that are cached."""

    def __init__(self, path="/scratch/a", cached=0):
        self.source_path = path
        self.cached = cached

    def cost_of(self, indices):
        missing = int((indices >= self.cached).sum())
        return Cost(10.0 * missing, missing)


class Client:
    """Asks for batches of one sample again and again, as a session does."""

    def __init__(self, allowances, job, data, asked=10**9):
        self.allowances, self.job, self.data, self.asked = allowances, job, data, asked
        self.got = 0

    def pump(self):
        while self.got < self.asked:
            if self.allowances.admit(self, self.job, self.data, np.array([7])) is None:
                return
            self.got += 1


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def allowances(clock):
    return Allowances(clock)


def lease(grants, *, sequence=1, lease_s=10.0, expired=None):
    return Lease(
        "key", "reign", 1, sequence, lease_s, 1.0, expired, [Place("fs", ["/scratch"])],
        [Grant(job, "fs", rates) for job, rates in grants.items()], {},
    )  # fmt: skip


def go_on(allowances, clock, seconds):
    end = clock.now + seconds
    while (wait_s := allowances.wait_s()) is not None and clock.now + wait_s < end:
        clock.now += max(wait_s, 1e-4)
        allowances.let_go()
    clock.now = end


def limited(allowances, clock, **rates):
    """Jobs that are known, with their limits in bytes a second."""
    allowances.apply(lease({}), clock.now)
    for job in rates:
        allowances.limit(job, "/scratch/a")
    allowances.apply(lease({job: (rate, None, None) for job, rate in rates.items()}), clock.now)


def test_nobody_waits_where_nothing_was_leased(allowances):
    client = Client(allowances, "a", Data(), asked=1000)
    client.pump()
    assert client.got == 1000
    assert allowances.wait_s() is None


def test_jobs_go_at_the_pace_of_their_leases_and_do_not_hold_one_another_up(allowances, clock):
    limited(allowances, clock, a=100.0, b=1000.0)
    slow, fast = Client(allowances, "a", Data()), Client(allowances, "b", Data())
    for client in (slow, fast):
        client.pump()
    go_on(allowances, clock, 9.0)
    assert slow.got == pytest.approx(90, abs=2)
    assert fast.got == pytest.approx(900, abs=10)


def test_clients_of_one_job_take_turns(allowances, clock):
    limited(allowances, clock, a=300.0)
    clients = [Client(allowances, "a", Data()) for _ in range(3)]
    for client in clients:
        client.pump()
    go_on(allowances, clock, 9.0)
    assert [c.got for c in clients] == pytest.approx([90, 90, 90], abs=3)


def test_what_a_cache_holds_is_free(allowances, clock):
    limited(allowances, clock, a=1.0)
    client = Client(allowances, "a", Data(cached=8), asked=1000)
    client.pump()
    assert client.got == 1000
    charge = allowances.admit(client, "a", Data(cached=8), np.array([1, 2]))
    assert charge.cost is FREE


def test_a_client_that_goes_does_not_keep_others_waiting(allowances, clock):
    limited(allowances, clock, a=100.0)
    first, second = Client(allowances, "a", Data()), Client(allowances, "a", Data())
    first.pump()
    second.pump()
    assert allowances.holds(first)
    assert allowances.holds(second)
    allowances.forget(first)
    go_on(allowances, clock, 5.0)
    assert second.got == pytest.approx(50, abs=2)


def test_a_lease_ends_by_the_clock_from_when_it_was_asked_for(allowances, clock):
    limited(allowances, clock, a=10.0)
    client = Client(allowances, "a", Data())
    client.pump()
    asked_at = clock.now
    clock.now += 3.0  # the answer took so long
    allowances.apply(lease({"a": (10.0, None, None)}, lease_s=5.0), asked_at)
    assert allowances.left_s == pytest.approx(2.0)
    client.asked = 10_000
    go_on(allowances, clock, 1.9)
    assert client.got < 10
    go_on(allowances, clock, 0.2)
    assert client.got == 10_000  # it runs free
    assert allowances.describe()["lapses"] == 1
    assert allowances.left_s == 0.0


def test_a_lease_that_ended_before_it_came_does_not_hold(allowances, clock):
    allowances.limit("a", "/scratch/a")
    asked_at = clock.now
    clock.now += 11.0
    allowances.apply(lease({"a": (10.0, None, None)}), asked_at)
    assert not allowances.limit("a", "/scratch/a").limited


def test_after_the_lease_the_declared_floor_holds_also_for_who_comes_then(allowances, clock):
    limited(allowances, clock, a=1000.0)
    allowances.apply(lease({"a": (1000.0, None, None)}, expired=(50.0, None, None)), clock.now)
    clock.now += 11.0
    assert allowances.limit("a", "/scratch/a").rates == (50.0, None, None)
    assert allowances.limit("new", "/scratch/b").rates == (50.0, None, None)
    # and the next lease ends that
    allowances.apply(lease({"a": (1000.0, None, None)}), clock.now)
    assert allowances.limit("a", "/scratch/a").rates == (1000.0, None, None)


def test_a_job_that_the_controller_does_not_know_waits_for_its_answer(clock):
    poked = []
    allowances = Allowances(clock, lambda: poked.append(clock.now))
    allowances.apply(lease({}), clock.now)
    client = Client(allowances, "new", Data())
    client.pump()
    assert client.got == 1  # the first batch passes, so that there is something to report
    assert poked
    (flow,) = allowances.usage()
    assert (flow.job, flow.file_system, flow.used[0]) == ("new", "fs", 10.0)
    assert flow.waiting[0] == 10.0
    allowances.apply(lease({"new": (100.0, None, None)}), clock.now)
    go_on(allowances, clock, 5.0)
    assert client.got == pytest.approx(50, abs=2)


def test_a_job_that_begins_while_the_controller_is_gone_waits_a_second_and_no_more(
    allowances, clock
):
    allowances.apply(lease({}, lease_s=60.0), clock.now)
    client = Client(allowances, "new", Data(), asked=1000)
    client.pump()
    go_on(allowances, clock, 0.9)
    assert client.got == 1
    go_on(allowances, clock, 0.3)
    assert client.got == 1000
    assert allowances.left_s > 0


def test_paths_belong_to_the_longest_mount_and_to_other(allowances, clock, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    given = lease({})
    given.file_systems = [Place("root", ["/"]), Place("far", [str(tmp_path / "far")])]
    allowances.apply(given, clock.now)
    for path in ("/etc", str(tmp_path / "far"), str(tmp_path / "near/x"), "s3://bucket/x"):
        allowances.limit("a", path)
    found = {flow["file_system"] for flow in allowances.describe()["flows"]}
    assert found == {"root", "far", "other"}
    assert str(tmp_path / "far") + "ther" not in found


def test_no_wall_clock_is_looked_at():
    """A clock that jumps must not end or lengthen a lease: only monotonic time is read."""
    import inspect

    from headrace.control import agent
    from headrace.control.service import arbiter
    from headrace.node import allowances as node_allowances
    from headrace.plane import rate_limit

    for module in (agent, arbiter, node_allowances, rate_limit):
        text = inspect.getsource(module)
        assert "time.time(" not in text
        assert "datetime" not in text
