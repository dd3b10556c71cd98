"""The demo: the same each time, within what GPUs can do, and called a demo everywhere."""

import numpy as np
import pytest

from headrace.web.demo import PLAYED_S, DemoSource
from headrace.web.views import IDLE


@pytest.fixture(scope="module")
def demo():
    clock = [1_800_000_000.0]
    source = DemoSource(nodes=60, clock=lambda: clock[0])
    source.clock = clock
    return source


def test_the_recording_plays_the_same(demo):
    other = DemoSource(nodes=60, clock=lambda: demo.clock[0])
    a, b = demo.cluster(), other.cluster()
    assert np.array_equal(a.stall, b.stall)
    assert [j.job_id for j in a.jobs] == [j.job_id for j in b.jobs]


def test_it_is_live_and_begins_anew(demo):
    first = demo.cluster()
    demo.clock[0] += 2.0
    second = demo.cluster()
    assert not np.array_equal(first.stall, second.stall)
    demo.clock[0] += PLAYED_S - 2.0
    assert np.array_equal(demo.cluster().holders, first.holders)


def test_its_parts_agree(demo):
    cluster = demo.cluster()
    running = {job.job_id for job in cluster.jobs}
    records = {record.job_id: record for record in demo.records()}
    assert running <= set(records)
    held = [cluster.jobs[h] for h in cluster.holders.tolist() if h != IDLE]
    for job in cluster.jobs:
        assert sum(each is job for each in held) == job.gpus
        page = demo.job(job.job_id)
        assert page["running"] is True
        assert page["facts"]["gpus"] == job.gpus
        assert len(page["ranks"]) == job.nodes
        assert len(page["times"]) == len(page["stall"]) == len(page["tiers"]["ram"])
    assert all(0 <= r.stall <= 1 for r in records.values())
    assert {fs["name"] for fs in demo.storage()} == {
        "/scratch",
        "/datasets",
        "/project",
        "s3://corpora",
    }


def test_pages_of_jobs_are_there(served):
    """Running ones and those that ended: a page is JSON, whatever the recording's arrays hold."""
    jobs = served.ask("/api/starving").document["jobs"][:4]
    for job in jobs:
        assert (
            served.ask(f"/api/job?id={job['job_id']}").document["facts"]["job_id"] == job["job_id"]
        )
    assert len(jobs) == 4


def test_an_unknown_job_is_none(demo):
    assert demo.job("7") is None
    assert demo.job("<script>") is None


@pytest.mark.parametrize(
    "path", ["/", "/starving", "/storage", "/runs", "/policies", "/stores", "/signin"]
)
def test_every_page_says_that_it_is_a_demo(served, path):
    assert b"recorded demo" in served.ask(path).body
