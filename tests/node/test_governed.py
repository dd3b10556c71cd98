"""A daemon that keeps to what a controller says; the controller is a process that is killed."""

import os
import signal
import threading

import pytest

import headrace as hr
from control.service import own  # noqa: F401
from headrace.config import ReaderOptions
from headrace.control.client import Endpoint
from headrace.node.datasets import Want, share_out
from headrace.node.jobs import CAUSES
from node.conftest import node_loader, report_of, seen, serving, until

CAP = 1 << 40
"""More than anybody reads here: what is limited is looked at, not timed."""


@pytest.fixture
def governed(folder, own):  # noqa: F811
    """A controller and a daemon that asks it."""
    controller = own()
    # What lies in the page cache is no use of a file system: this storage is simulated, nothing kept.
    options = {"reader": ReaderOptions(simulate="nfs"), "ram_bytes": 1}
    with serving(folder, controller=Endpoint(url=controller.url), **options) as server:
        yield controller, server


def limits_of(server, job):
    flows = [f for f in server.rate_limits.describe()["flows"] if f["job"] == job]
    return flows[0]["limits"]["bytes"] if flows else "unknown"


def policy(lease_s=60, expired="run free", more=""):
    return (
        f"lease_s: {lease_s}\nwhen_expired: {expired}\n"
        f"jobs: {{mine: {{cap: {{bytes_per_s: {CAP}}}, cache_bytes: 1M}}}}\n{more}"
    )


def test_what_the_policy_says_reaches_the_daemon_and_nothing_else_changes(
    governed, store, monkeypatch
):
    controller, server = governed
    monkeypatch.setenv("HEADRACE_JOB", "mine")
    expected = seen(hr.loader(store, 32, seed=3))
    controller.apply(policy())
    loader = node_loader(store)
    assert seen(loader) == expected
    assert report_of(loader).direct_batches == 0
    until(lambda: limits_of(server, "mine") == CAP)
    until(lambda: server._datasets.quotas_of_jobs == {"mine": 1_000_000})
    (plane,) = controller.state()["planes"]
    assert plane["pid"] == os.getpid()
    assert plane["flows"][0]["job"] == "mine"
    until(lambda: controller.state()["planes"][0]["stall_s"].keys() == set(CAUSES))
    assert server.describe()["governed"]["registered"]
    controller.apply(policy(more="users: {'*': {cap: {reads_per_s: 1M}}}"))
    until(lambda: server.rate_limits.describe()["flows"][0]["limits"]["reads"] == 1e6)
    loader.close()


def test_a_job_that_is_held_back_gets_every_sample_once(governed, store, monkeypatch):
    controller, server = governed
    monkeypatch.setenv("HEADRACE_JOB", "slow")
    controller.apply("jobs: {slow: {cap: {bytes_per_s: 3M, reads_per_s: 400}}}\n")
    until(lambda: server.lease_agent.describe()["registered"])
    expected = seen(hr.loader(store, 32, seed=3))
    loader = node_loader(store)
    assert seen(loader) == expected
    assert report_of(loader).direct_batches == 0
    # The client itself knows that a limit held it back, and not the storage.
    assert hr.explain(loader).as_dict()["causes"].get("policy", 0.0) > 0.0
    loader.close()


@pytest.mark.parametrize(("expired", "default"), [("run free", None), ("{bytes_per_s: 900M}", 9e8)])
def test_a_killed_controller_is_an_expired_lease_and_no_more(
    governed, store, monkeypatch, expired, default
):
    controller, server = governed
    monkeypatch.setenv("HEADRACE_JOB", "mine")
    controller.apply(policy(1, expired))
    loader = node_loader(store)
    expected = seen(loader)
    until(lambda: limits_of(server, "mine") == CAP)
    until(lambda: server.rate_limits.describe()["lease_left_s"] <= 1)  # of this policy
    controller.kill()
    until(lambda: limits_of(server, "mine") == default)
    assert server.describe()["governed"]["lapses"] >= 1
    loader.set_epoch(0)
    assert seen(loader) == expected  # it goes on
    assert report_of(loader).direct_batches == 0
    controller.start()
    loader.set_epoch(0)
    seen(loader)
    until(lambda: limits_of(server, "mine") == CAP)
    assert server.describe()["governed"]["epoch"] == 2
    loader.close()


def test_a_controller_that_hangs_does_not_hold_data_up(governed, store, monkeypatch):
    controller, server = governed
    monkeypatch.setenv("HEADRACE_JOB", "mine")
    controller.apply(policy(2))
    loader = node_loader(store)
    expected = seen(loader)
    until(lambda: limits_of(server, "mine") == CAP)
    controller.process.send_signal(signal.SIGSTOP)
    try:
        loader.set_epoch(0)
        assert seen(loader) == expected
        until(lambda: limits_of(server, "mine") is None)
    finally:
        controller.process.send_signal(signal.SIGCONT)
    until(lambda: server.describe()["governed"]["lease_left_s"] > 0)
    loader.close()


def test_a_wrong_token_is_said_and_data_goes_on(folder, own, store, tmp_path):  # noqa: F811
    controller = own()
    (tmp_path / "token").write_text("w" * 20)
    url = f"http://127.0.0.1:{controller.port}"
    with serving(folder, controller=Endpoint(url=url, token_file=tmp_path / "token")) as server:
        loader = node_loader(store)
        assert seen(loader)
        until(lambda: "a good token is needed" in server.describe()["governed"]["why"])
        assert not server.describe()["governed"]["registered"]
        loader.close()


def test_a_daemon_without_its_controller_starts_and_finds_it_later(folder, own, store):  # noqa: F811
    controller = own()
    controller.kill()
    with serving(folder, controller=Endpoint(url=controller.url)) as server:
        loader = node_loader(store)
        assert seen(loader)
        until(lambda: "nobody listens" in server.describe()["governed"]["why"])
        controller.start()
        until(lambda: server.describe()["governed"]["registered"])
        loader.close()
    until(lambda: controller.state()["planes"] == [])  # it said goodbye


def test_no_thread_of_the_agent_is_left(folder, own):  # noqa: F811
    controller = own()
    with serving(folder, controller=Endpoint(url=controller.url)) as server:
        until(lambda: server.describe()["governed"]["registered"])
    assert not [t for t in threading.enumerate() if t.name == "headrace-agent"]


def test_of_two_daemons_each_has_its_part_of_a_jobs_cap(own):  # noqa: F811
    """Both through the API: what a daemon does is reported by the test."""
    controller = own()
    controller.apply("jobs: {a: {cap: {bytes_per_s: 100}}}")
    import json

    from control.service import request

    planes = [controller.plane()["plane"] for _ in range(2)]
    for sequence in range(1, 5):
        granted = []
        for plane in planes:
            flow = {"job": "a", "file_system": "other", "used": [50, 1, 0],
                    "waiting": [9, 0, 0], "held_s": [1, 0, 0]}  # fmt: skip
            body = {"sequence": sequence, "seconds": 1.0, "flows": [flow]}
            _, lease = request(
                controller, "POST", f"/v1/planes/{plane}/report", json.dumps(body).encode()
            )
            granted.append(lease["grants"][0]["rates"][0])
        assert sum(granted) <= 101  # a rate is at least 1
        threading.Event().wait(0.05)
    assert granted == pytest.approx([50, 50])


def test_cache_quotas_of_jobs_bound_their_data_sets():
    wants = [Want(1000, 0, frozenset({"a"}), 1.0), Want(1000, 0, frozenset({"b"}), 1.0)]
    assert share_out(1200, None, wants, {"a": 100}) == (100, 1000)
    assert share_out(1200, 300, wants, {"a": 500}) == (500, 300)
    assert share_out(1200, None, wants) == (600, 600)
