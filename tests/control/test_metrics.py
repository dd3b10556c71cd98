"""Metrics of the controller: their names, their figures, their bounds."""

import asyncio
import re
import threading
import urllib.request
from pathlib import Path

import pytest

from headrace.control.messages import Flow, PlaneState, Register, Report
from headrace.control.policy import parse_policy
from headrace.control.prometheus import LABELS_MAX, OTHER, JobLabels, Labels, serve_metrics
from headrace.control.service.app import (
    TABLE,
    figures_of,
)
from headrace.control.service.arbiter import Arbiter
from headrace.control.service.auth import Refused

PAGE = Path(__file__).parents[2] / "docs/howto/metrics.md"

POLICY = """
version: 1
file_systems: {scratch: {paths: [/scratch], capacity: {bytes_per_s: 1G}}}
jobs: {capped: {cap: {bytes_per_s: 100M}}}
"""


@pytest.fixture
def arbiter():
    return Arbiter(parse_policy(POLICY), "reign", 7, 0.0)


def register(arbiter, at=0.0, name="node1"):
    instance = f"{len(arbiter._planes):032x}"
    return arbiter.register(Register(1, name, "ada", 1, instance), at).plane


def report(arbiter, plane, number, jobs, at=1.0, rate=5e8):
    flows = [Flow(j, "scratch", (rate, 10.0, 0.0), (rate, 0.0, 0.0), (0.0, 0.0, 0.0)) for j in jobs]
    state = PlaneState(held_bytes=100.0, sessions={"a": 2, "b": 1})
    return arbiter.report(plane, Report(number, 1.0, flows, state), at)


def described(arbiter, at=1.0):
    return {"degraded": "", **arbiter.describe(at)}


def samples(figures):
    """{name: {label values: value}}."""
    return {
        s.name: {tuple(t.labels.values()): t.value for t in family.samples if t.name == s.name}
        for family in figures.families()
        for s in family.samples
    }


def test_every_metric_is_documented_as_it_is():
    rows = re.findall(
        r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    documented = {
        name: (kind, re.findall(r"`(\w+)`", labels), text) for name, kind, labels, text in rows
    }
    for m in TABLE:
        assert documented[m.name] == (m.kind, list(m.labels), m.help.removesuffix(".")), m.name


def test_figures_are_those_of_the_controller(arbiter):
    plane = register(arbiter)
    report(arbiter, plane, 1, ["capped", "free"])
    with pytest.raises(Refused):
        report(arbiter, plane, 1, [])  # replayed
    figures = samples(figures_of(described(arbiter)))
    assert figures["headrace_control_epoch"] == {(): 7}
    assert figures["headrace_control_planes"] == {(): 1}
    assert figures["headrace_control_silent_planes"] == {(): 0}
    assert figures["headrace_control_reports_total"] == {(): 1}
    assert figures["headrace_control_refused_total"] == {(): 1}
    assert figures["headrace_control_held_bytes"] == {(): 100}
    assert figures["headrace_control_clients"] == {(): 3}
    assert figures["headrace_control_decide_seconds_count"] == {(): sum(arbiter.decide_us)}
    assert sum(arbiter.decide_us) > 0
    used = figures["headrace_control_job_used_bytes_per_second"]
    assert used == {("capped", "scratch"): 5e8, ("free", "scratch"): 5e8}
    granted = figures["headrace_control_job_granted_bytes_per_second"]
    assert granted["capped", "scratch"] <= 1e8
    capacity = figures["headrace_control_file_system_capacity_bytes_per_second"]
    assert capacity["scratch",] == 1e9
    # Where there is no limit there is no figure either.
    assert ("free", "scratch") not in figures.get(
        "headrace_control_job_granted_reads_per_second", {}
    )


def test_planes_that_are_silent_or_gone_are_told(arbiter):
    register(arbiter)
    silent_at = 4 * arbiter.report_s
    assert samples(figures_of(described(arbiter, silent_at)))["headrace_control_silent_planes"] == {
        (): 1
    }
    arbiter.expire(1000.0)
    figures = samples(figures_of(described(arbiter, 1000.0)))
    assert figures["headrace_control_planes"] == {(): 0}
    assert figures["headrace_control_expired_total"] == {(): 1}


def test_a_thousand_jobs_have_few_labels_and_lose_nothing(arbiter):
    plane, known = register(arbiter), JobLabels()
    report(arbiter, plane, 1, [f"job-{i}" for i in range(1000)], rate=1.0)
    used = samples(figures_of(described(arbiter), known))[
        "headrace_control_job_used_bytes_per_second"
    ]
    assert len(used) == LABELS_MAX + 1
    assert sum(used.values()) == 1000.0
    assert used[OTHER, "scratch"] == 1000 - LABELS_MAX


def test_labels_stay_while_their_names_do():
    labels = Labels(2)
    labels.update(["a", "b", "c"])
    labels.update(["c", "b", OTHER])  # `a` is gone, and makes room
    assert [labels.of(name) for name in ("a", "b", "c", OTHER)] == [OTHER, "b", "c", OTHER]


class _Controller:
    def __init__(self, arbiter):
        self.describe = lambda: described(arbiter)


def test_it_is_served_beside_the_loop(arbiter):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = serve_metrics(
        "0", loop.call_soon_threadsafe, _Controller(arbiter).describe, figures_of
    )
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert "headrace_control_epoch 7.0" in text
