"""The arbiter: reports in, leases out, in a time that the test makes."""

import math

import pytest

from control.ruled import FS, World, total
from headrace.control.messages import Report
from headrace.control.policy import parse_policy
from headrace.control.service.arbiter import PLANES_MAX, Arbiter
from headrace.control.service.auth import Refused


def settled(world, rounds=4):
    for _ in range(rounds):
        world.round()


def test_what_is_not_limited_has_no_limit():
    world = World("")
    plane = world.plane()
    plane.wants = {"a": 1e12}
    settled(world)
    assert plane.granted("a") is None
    assert plane.used["a"][0] == 1e12


def test_a_cap_holds_over_all_planes_of_a_job():
    world = World(FS + "jobs: {a: {cap: {bytes_per_s: 30}}}")
    planes = [world.plane() for _ in range(3)]
    for plane in planes:
        plane.wants = {"a": 50.0}
    settled(world)
    assert total(planes, "a") == pytest.approx(30)
    assert [p.granted("a") for p in planes] == pytest.approx([10, 10, 10])


def test_leases_never_add_up_to_more_than_there_is():
    """Also not while a share moves: who gets more waits until who gets less has heard of it."""
    world = World()
    one, two = world.plane(), world.plane()
    one.wants = {"a": 500.0}
    settled(world)
    assert one.granted("a") == pytest.approx(100)
    two.wants = {"b": 500.0}
    for _ in range(4):
        for plane in (two, one):  # the one that wakes reports first
            world.now += 0.5
            plane.report(0.5)
            assert (one.granted("a") or 0) + (two.granted("b") or 0) <= 100 + 2
    assert one.granted("a") == pytest.approx(50)
    assert two.granted("b") == pytest.approx(50)


def test_users_share_before_their_jobs_do():
    world = World(FS + "users: {u: {weight: 3}}")
    many, one = world.plane("u"), world.plane("v")
    many.wants = dict.fromkeys("abc", 500.0)
    one.wants = {"d": 500.0}
    settled(world)
    assert [many.granted(j) for j in "abc"] == pytest.approx([25, 25, 25])
    assert one.granted("d") == pytest.approx(25)


def test_a_new_policy_holds_with_the_next_report():
    world = World()
    plane = world.plane()
    plane.wants = {"a": 500.0, "b": 500.0}
    settled(world)
    world.arbiter.set_policy(parse_policy(FS + "jobs: {a: {weight: 4}}"), 2)
    world.round()
    assert [plane.granted(j) for j in "ab"] == pytest.approx([80, 20])


def test_a_flow_of_rest_is_forgotten_after_a_while():
    world = World()
    plane = world.plane()
    plane.wants = {"a": 10.0}
    settled(world)
    plane.wants = {}
    settled(world, 40)
    assert plane.lease.grants == []
    assert len(world.arbiter._table) == 0


def test_a_report_that_was_replayed_or_comes_late_changes_nothing():
    world = World()
    plane = world.plane()
    plane.wants = {"a": 10.0}
    settled(world)
    before = world.state()["planes"]
    for sequence in (plane.sequence, plane.sequence - 1):
        with pytest.raises(Refused, match="replayed, or late") as caught:
            world.arbiter.report(plane.lease.plane, Report(sequence, 1.0, []), world.now)
        assert caught.value.status == 409
    assert world.state()["planes"] == before
    assert world.arbiter.refused == 2


def test_an_unknown_plane_is_told_to_register():
    world = World()
    with pytest.raises(Refused, match="register") as caught:
        world.arbiter.report("0" * 32, Report(1, 1.0, []), world.now)
    assert caught.value.status == 404
    with pytest.raises(Refused):
        world.arbiter.leave("0" * 32)


def test_a_plane_that_registers_again_is_the_same_one():
    world = World()
    plane = world.plane()
    old = plane.lease.plane
    again = world.arbiter.register(plane.hello, world.now)
    assert len(world.state()["planes"]) == 1
    assert again.plane != old
    with pytest.raises(Refused):
        world.arbiter.report(old, Report(1, 1.0, []), world.now)


def test_a_plane_that_leaves_gives_back_what_it_has():
    world = World()
    one, two = world.plane(), world.plane()
    for plane in (one, two):
        plane.wants = {"a": 500.0}
    settled(world)
    world.arbiter.leave(one.lease.plane)
    one.silent = True
    world.round()
    assert two.granted("a") == pytest.approx(100)


def test_planes_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr("headrace.control.service.arbiter.PLANES_MAX", 2)
    world = World()
    world.plane()
    world.plane()
    with pytest.raises(Refused, match="registered already") as caught:
        world.plane()
    assert caught.value.status == 503
    assert PLANES_MAX >= 1000


def test_planes_report_less_often_when_there_are_many():
    world = World()
    assert world.arbiter.report_s == 0.25
    for _ in range(400):
        world.plane()
    assert world.arbiter.report_s == 1.0


def test_who_rules_next_does_not_hand_out_again_what_still_runs():
    world = World(FS + "lease_s: 10")
    gone, here = world.plane(), world.plane()
    for plane in (gone, here):
        plane.wants = {"a": 500.0}
    settled(world)
    saved = world.arbiter.outstanding(world.now)
    second = Arbiter(parse_policy(FS + "lease_s: 10"), "reign", 2, 50.0)
    second.adopt(saved, 50.0)
    world.arbiter, world.now = second, 50.0
    here.lease = second.register(here.hello, world.now)
    here.sequence = 0
    gone.silent = True
    world.round()
    assert here.granted("a") == pytest.approx(50)
    settled(world, 10)
    assert second.expired == 1
    assert here.granted("a") == pytest.approx(100)


def test_a_lease_names_reign_epoch_and_what_happens_when_it_ends():
    world = World("when_expired: {bytes_per_s: 7}\nlease_s: 3\njobs: {a: {cache_bytes: 1k}}", 9)
    plane = world.plane()
    plane.wants = {"a": 1.0}
    world.round()
    lease = plane.lease
    assert (lease.reign, lease.epoch, lease.sequence, lease.lease_s) == ("reign", 9, 1, 3.0)
    assert lease.when_expired == (7.0, None, None)
    assert lease.caches == {"a": 1000}
    assert lease.report_s <= lease.lease_s / 4


def test_what_is_told_to_those_who_watch_is_plain():
    world = World()
    plane = world.plane()
    plane.wants = {"a": 500.0}
    settled(world)
    state = world.state()
    (flow,) = state["planes"][0]["flows"]
    assert flow["granted"]["bytes_per_s"] == pytest.approx(100)
    assert flow["demand"]["bytes_per_s"] is None
    assert state["file_systems"][0]["capacity"]["metadata_per_s"] is None
    assert not any(isinstance(v, float) and math.isinf(v) for v in flow["used"].values())
