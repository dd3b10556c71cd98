"""RateLimits: who may go, who waits, in a time that the test makes."""

import numpy as np
import pytest

from headrace.control.messages import Grant, Lease, Place
from headrace.node.rate_limits import FREE, RateLimits
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

    def __init__(self, rate_limits, job, data, asked=10**9):
        self.rate_limits, self.job, self.data, self.asked = rate_limits, job, data, asked
        self.got = 0

    def pump(self):
        while self.got < self.asked:
            if self.rate_limits.admit(self, self.job, self.data, np.array([7])) is None:
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
def rate_limits(clock):
    return RateLimits(clock)


def lease(grants, *, sequence=1, lease_s=10.0, expired=None):
    return Lease(
        "key", "reign", 1, sequence, lease_s, 1.0, expired, [Place("fs", ["/scratch"])],
        [Grant(job, "fs", rates) for job, rates in grants.items()], {},
    )  # fmt: skip


def go_on(rate_limits, clock, seconds):
    end = clock.now + seconds
    while (wait_s := rate_limits.wait_s()) is not None and clock.now + wait_s < end:
        clock.now += max(wait_s, 1e-4)
        rate_limits.let_go()
    clock.now = end


def limited(rate_limits, clock, **rates):
    """Jobs that are known, with their limits in bytes a second."""
    rate_limits.apply(lease({}), clock.now)
    for job in rates:
        rate_limits.limit(job, "/scratch/a")
    rate_limits.apply(lease({job: (rate, None, None) for job, rate in rates.items()}), clock.now)


def test_nobody_waits_where_nothing_was_leased(rate_limits):
    client = Client(rate_limits, "a", Data(), asked=1000)
    client.pump()
    assert client.got == 1000
    assert rate_limits.wait_s() is None


def test_jobs_go_at_the_pace_of_their_leases_and_do_not_hold_one_another_up(rate_limits, clock):
    limited(rate_limits, clock, a=100.0, b=1000.0)
    slow, fast = Client(rate_limits, "a", Data()), Client(rate_limits, "b", Data())
    for client in (slow, fast):
        client.pump()
    go_on(rate_limits, clock, 9.0)
    assert slow.got == pytest.approx(90, abs=2)
    assert fast.got == pytest.approx(900, abs=10)


def test_clients_of_one_job_take_turns(rate_limits, clock):
    limited(rate_limits, clock, a=300.0)
    clients = [Client(rate_limits, "a", Data()) for _ in range(3)]
    for client in clients:
        client.pump()
    go_on(rate_limits, clock, 9.0)
    assert [c.got for c in clients] == pytest.approx([90, 90, 90], abs=3)


def test_what_a_cache_holds_is_free(rate_limits, clock):
    limited(rate_limits, clock, a=1.0)
    client = Client(rate_limits, "a", Data(cached=8), asked=1000)
    client.pump()
    assert client.got == 1000
    charge = rate_limits.admit(client, "a", Data(cached=8), np.array([1, 2]))
    assert charge.cost is FREE


def test_a_client_that_goes_does_not_keep_others_waiting(rate_limits, clock):
    limited(rate_limits, clock, a=100.0)
    first, second = Client(rate_limits, "a", Data()), Client(rate_limits, "a", Data())
    first.pump()
    second.pump()
    assert rate_limits.holds(first)
    assert rate_limits.holds(second)
    rate_limits.forget(first)
    go_on(rate_limits, clock, 5.0)
    assert second.got == pytest.approx(50, abs=2)


def test_a_lease_ends_by_the_clock_from_when_it_was_asked_for(rate_limits, clock):
    limited(rate_limits, clock, a=10.0)
    client = Client(rate_limits, "a", Data())
    client.pump()
    asked_at = clock.now
    clock.now += 3.0  # the answer took so long
    rate_limits.apply(lease({"a": (10.0, None, None)}, lease_s=5.0), asked_at)
    assert rate_limits.left_s == pytest.approx(2.0)
    client.asked = 10_000
    go_on(rate_limits, clock, 1.9)
    assert client.got < 10
    go_on(rate_limits, clock, 0.2)
    assert client.got == 10_000  # it runs free
    assert rate_limits.describe()["lapses"] == 1
    assert rate_limits.left_s == 0.0


def test_a_lease_that_ended_before_it_came_does_not_hold(rate_limits, clock):
    rate_limits.limit("a", "/scratch/a")
    asked_at = clock.now
    clock.now += 11.0
    rate_limits.apply(lease({"a": (10.0, None, None)}), asked_at)
    assert not rate_limits.limit("a", "/scratch/a").limited


def test_after_the_lease_the_declared_floor_holds_also_for_who_comes_then(rate_limits, clock):
    limited(rate_limits, clock, a=1000.0)
    rate_limits.apply(lease({"a": (1000.0, None, None)}, expired=(50.0, None, None)), clock.now)
    clock.now += 11.0
    assert rate_limits.limit("a", "/scratch/a").rates == (50.0, None, None)
    assert rate_limits.limit("new", "/scratch/b").rates == (50.0, None, None)
    # and the next lease ends that
    rate_limits.apply(lease({"a": (1000.0, None, None)}), clock.now)
    assert rate_limits.limit("a", "/scratch/a").rates == (1000.0, None, None)


def test_a_job_that_the_controller_does_not_know_waits_for_its_answer(clock):
    poked = []
    rate_limits = RateLimits(clock, lambda: poked.append(clock.now))
    rate_limits.apply(lease({}), clock.now)
    client = Client(rate_limits, "new", Data())
    client.pump()
    assert client.got == 1  # the first batch passes, so that there is something to report
    assert poked
    (flow,) = rate_limits.usage()
    assert (flow.job, flow.file_system, flow.used[0]) == ("new", "fs", 10.0)
    assert flow.waiting[0] == 10.0
    rate_limits.apply(lease({"new": (100.0, None, None)}), clock.now)
    go_on(rate_limits, clock, 5.0)
    assert client.got == pytest.approx(50, abs=2)


def test_a_job_that_begins_while_the_controller_is_gone_waits_a_second_and_no_more(
    rate_limits, clock
):
    rate_limits.apply(lease({}, lease_s=60.0), clock.now)
    client = Client(rate_limits, "new", Data(), asked=1000)
    client.pump()
    go_on(rate_limits, clock, 0.9)
    assert client.got == 1
    go_on(rate_limits, clock, 0.3)
    assert client.got == 1000
    assert rate_limits.left_s > 0


def test_paths_belong_to_the_longest_mount_and_to_other(rate_limits, clock, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    given = lease({})
    given.file_systems = [Place("root", ["/"]), Place("far", [str(tmp_path / "far")])]
    rate_limits.apply(given, clock.now)
    for path in ("/etc", str(tmp_path / "far"), str(tmp_path / "near/x"), "s3://bucket/x"):
        rate_limits.limit("a", path)
    systems = {flow["file_system"] for flow in rate_limits.describe()["flows"]}
    assert systems == {"root", "far", "other"}
    assert str(tmp_path / "far") + "ther" not in systems


def test_no_wall_clock_is_looked_at():
    """A clock that jumps must not end or lengthen a lease: only monotonic time is read."""
    import inspect

    from headrace.control.service import arbiter
    from headrace.node import rate_limits
    from headrace.plane import rate_limit

    for module in (arbiter, rate_limits, rate_limit):
        text = inspect.getsource(module)
        assert "time.time(" not in text
        assert "datetime" not in text
