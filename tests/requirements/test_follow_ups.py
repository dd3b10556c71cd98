"""Requirements from PRISMA's follow-ups (PAIO, PADLL, Cheferd) that the control plane meets.

F6   limits are run-time policy                               here; tests/plane/test_limit.py
F7   allocation does not depend on the order of jobs          here
F8   undeclared demand gets its fair share                    here
F9   a silent node holds its lease until it expires           here; tests/control/test_ruler.py
F10  a job's share follows its planes' use                    here
F11  a job that wakes has its fair share within two rounds    here
F12  operations and bytes are controlled at once              here; tests/plane/test_limit.py
F13  typed policies, authenticated connections, the controller outlives its peers
                                                              here; tests/control/test_service.py
F14  limits are leases that end in a declared default         here; tests/node/test_rate_limits.py
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.ruled import FS, World, total
from control.service import controller, parent, request  # noqa: F401
from control.shared_out import cases, share
from headrace.control.policy import PolicyError, parse_policy
from headrace.control.sharing import SharingProblem, decide
from headrace.node.rate_limits import RateLimits
from node.test_rate_limits import Client, Clock, Data, go_on, lease


def test_f6_a_limit_is_turned_while_data_flows():
    clock = Clock()
    rate_limits = RateLimits(clock)
    client = Client(rate_limits, "a", Data())
    rate_limits.apply(lease({}), clock.now)
    client.pump()
    for rate in (100.0, 1000.0, 10.0):
        rate_limits.apply(lease({"a": (rate, None, None)}, lease_s=60), clock.now)
        go_on(rate_limits, clock, 1.0)  # what was overdrawn before
        before = client.got
        go_on(rate_limits, clock, 10.0)
        assert client.got - before == pytest.approx(rate, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_f7_the_order_of_users_jobs_and_planes_does_not_matter(case, random):
    p = case.problem
    users, jobs, flows = (list(range(n)) for n in (len(p.system), len(p.user), len(p.job)))
    for numbers in (users, jobs, flows):
        random.shuffle(numbers)
    user_at = np.argsort(users)
    job_at = np.argsort(jobs)
    shuffled = SharingProblem(
        capacity=p.capacity, system=p.system[users], user_weight=p.user_weight[users],
        user_cap=p.user_cap[users], user_guarantee=p.user_guarantee[users],
        user=user_at[p.user[jobs]], job_weight=p.job_weight[jobs], job_cap=p.job_cap[jobs],
        job_guarantee=p.job_guarantee[jobs], priority=p.priority[jobs],
        job=job_at[p.job[flows]], demand=p.demand[flows], held=p.held[flows], grant=p.grant[flows],
    )  # fmt: skip
    one, other = share(case), decide(shuffled)
    np.testing.assert_allclose(other.flows, one.flows[flows], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(other.jobs, one.jobs[jobs], rtol=1e-9, atol=1e-9)


def test_f8_a_job_without_any_rule_gets_its_fair_share():
    world = World(FS + "jobs: {declared: {weight: 1}}")
    plane = world.plane()
    plane.wants = {"declared": 500.0, "unheard-of": 500.0}
    for _ in range(3):
        world.round()
    assert [plane.granted(j) for j in ("declared", "unheard-of")] == pytest.approx([50, 50])


def test_f9_a_silent_node_holds_its_lease_until_it_ends_and_then_frees_it():
    world = World(FS + "lease_s: 20")
    silent, other = world.plane(), world.plane()
    for plane in (silent, other):
        plane.wants = {plane.instance: 500.0}
    for _ in range(4):
        world.round()
    silent.silent = True
    held = []
    for _ in range(25):
        world.round()
        held.append(other.granted(other.instance))
    assert held[:19] == pytest.approx([50] * 19)  # neither more of it nor less
    assert held[21:] == pytest.approx([100] * 4)
    assert world.arbiter.expired == 1


def test_f10_a_jobs_share_follows_the_use_of_its_planes():
    world = World(FS + "jobs: {a: {cap: {bytes_per_s: 60}}}")
    planes = [world.plane() for _ in range(3)]
    for plane, want in zip(planes, (500.0, 6.0, 0.0), strict=True):
        plane.wants = {"a": want}
    for _ in range(6):
        world.round()
    busy, little, idle = (plane.granted("a") for plane in planes)
    assert planes[1].used["a"][0] == 6.0
    assert little == pytest.approx(6.3, abs=0.7)
    assert idle <= 1.0
    assert busy == pytest.approx(60 - little, abs=1)
    planes[0].wants, planes[2].wants = {"a": 0.0}, {"a": 500.0}
    for _ in range(4):
        world.round()
    assert planes[2].granted("a") == pytest.approx(60 - 6.6, abs=4.5)
    assert total(planes, "a") <= 61


@pytest.mark.parametrize("others", [1, 3, 9])
def test_f11_a_job_that_wakes_has_its_fair_share_within_two_rounds(others):
    world = World()
    busy = [world.plane() for _ in range(others)]
    for plane in busy:
        plane.wants = {plane.instance: 500.0}
    asleep = world.plane()
    asleep.wants = {"wakes": 0.0}
    for _ in range(6):
        world.round()
    assert sum(p.granted(p.instance) for p in busy) == pytest.approx(100, abs=1)
    asleep.wants = {"wakes": 500.0}
    world.round()
    world.round()
    assert asleep.granted("wakes") == pytest.approx(100 / (others + 1), rel=0.02)


def test_f12_operations_and_bytes_are_shared_out_at_once():
    policy = FS.replace("reads_per_s: 1000", "reads_per_s: 1000, metadata_per_s: 50")
    world = World(policy)
    plane = world.plane()
    # One job reads large samples, one small ones, one opens files.
    plane.wants = {
        "large": (500.0, 5.0, 0.0), "small": (20.0, 5000.0, 0.0), "opens": (0.0, 0.0, 400.0),
        "opens more": (1.0, 0.0, 400.0),
    }  # fmt: skip
    for _ in range(12):
        world.round()
    used = plane.used
    assert used["small"][1] == pytest.approx(1000 - 5, rel=0.05)
    assert used["large"][0] == pytest.approx(100 - used["small"][0], rel=0.05)
    assert used["opens"][2] == pytest.approx(25, rel=0.05)
    assert used["opens more"][2] == pytest.approx(25, rel=0.05)
    for r, most in enumerate((100, 1000, 50)):
        assert sum(u[r] for u in used.values()) <= most * 1.0001


def test_f13_policies_are_typed_and_who_asks_is_known(controller):  # noqa: F811
    with pytest.raises(PolicyError, match="did you mean 'weight'"):
        parse_policy("jobs: {a: {wieght: 2}}")
    assert request(controller, "GET", "/v1/policy")[0] == 200  # the kernel says who we are
    assert request(controller, "GET", "/v1/policy", tcp=True)[0] == 401
    assert request(controller, "GET", "/v1/policy", tcp=True, token="wrong" * 8)[0] == 401
    assert request(controller, "GET", "/v1/policy", tcp=True, token=controller.token)[0] == 200
    lease = controller.plane()
    assert request(controller, "DELETE", f"/v1/planes/{lease['plane']}")[0] == 200
    assert controller.state()["planes"] == []  # the last one is gone
    assert controller.process.poll() is None  # and it is still there


def test_f14_when_the_lease_ends_the_declared_default_holds():
    clock = Clock()
    for expired, rates in ((None, (None,) * 3), ((20.0, None, None), (20.0, None, None))):
        rate_limits = RateLimits(clock)
        rate_limits.apply(lease({}), clock.now)  # says what lies where
        rate_limits.limit("a", "/scratch")
        given_lease = lease({"a": (5.0, 5.0, None)}, lease_s=10.0, expired=expired)
        rate_limits.apply(given_lease, clock.now)
        clock.now += 9.9
        assert rate_limits.limit("a", "/scratch").rates == (5.0, 5.0, None)
        clock.now += 0.2
        assert rate_limits.limit("a", "/scratch").rates == rates
