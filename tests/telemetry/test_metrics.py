"""The agent's metrics: documented, with their units, bounded; and read back out of a real Prometheus."""

import re
import time
from pathlib import Path

import pytest

from headrace.base.job import JobIdentity
from headrace.control.prometheus import LABELS_MAX, OTHER, JobLabels
from headrace.telemetry.accounts import NODE, JobFacts, Ledger
from headrace.telemetry.history import open_history
from headrace.telemetry.metrics import TABLE, figures_of
from headrace.web.views import nodes_of_agents

PAGE = Path(__file__).parents[2] / "docs/howto/agent.md"


def test_the_page_lists_all_and_nothing_else():
    rows = re.findall(
        r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    documented = [
        (name, kind, re.findall(r"`(\w+)`", labels), text) for name, kind, labels, text in rows
    ]
    served = [(m.name, m.kind, list(m.labels), m.help.removesuffix(".")) for m in TABLE]
    assert documented == served


def test_names_carry_their_units():
    for metric in TABLE:
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|us|kb|mb|percent)\b", metric.name), metric.name


def facts(job, measured=True):
    return JobFacts(JobIdentity(job_id=job, name="n"), "ann", 0.0, 1.0, measured=measured)


def values(figures, name):
    return {
        tuple(sample.labels.values()): sample.value
        for family in figures.families()
        for sample in family.samples
        if sample.name == name
    }


def test_every_figure_of_the_ledger_has_a_place():
    ledger = Ledger()
    for name in ("seconds", "gpu_s", "gpu_watched_s", "gpu_busy_s", "cpu_s", "read_bytes",
                 "written_bytes", "io_pressure_s", "samples", "batches", "worked_s", "gpus",
                 "memory_bytes", "gpu_memory_bytes", "cpus_s", "gpus_used", "memory_asked_bytes",
                 "gpu_memory_asked_bytes", "node_cpus", "node_memory_bytes", "node_gpus"):  # fmt: skip
        ledger.add("1", name, 2.0, 0.0)
    ledger.add("1", "partition", 1.0, 0.0, "gpu")
    for name in ("stall_s", "inferred_s", "lost_gpu_s", "inferred_gpu_s"):
        ledger.add("1", name, 2.0, 0.0, "storage", "/s")
    ledger.add("1", "tier_bytes", 2.0, 0.0, "ram", "/s")
    for name, label in (("cpu_busy_s", ""), ("cpu_s", ""), ("disk_read_bytes", "sda"),
                        ("disk_written_bytes", "sda"), ("disk_busy_s", "sda"),
                        ("network_received_bytes", "eth0"), ("network_sent_bytes", "eth0"),
                        ("fs_read_bytes", "/s"), ("fs_written_bytes", "/s"),
                        ("fs_read_operations", "/s"), ("fs_read_s", "/s"),
                        ("io_pressure_s", "some")):  # fmt: skip
        ledger.add(NODE, name, 2.0, 0.0, label)
    ledger.gauges = {("memory_bytes", ""): 1.0, ("memory_available_bytes", ""): 1.0,
                     ("gpu_busy", "0"): 1.0, ("gpu_memory_bytes", "0"): 1.0,
                     ("gpu_power_w", "0"): 1.0}  # fmt: skip
    state = dict.fromkeys(("jobs", "look_seconds", "interval_seconds", "messages_total",
                           "refused_total", "waiting_entries"), 1.0)  # fmt: skip
    figures = figures_of(ledger, {"1": facts("1")}, state, "n", JobLabels())
    for metric in TABLE:
        assert values(figures, metric.name), metric.name


def test_labels_are_bounded():
    ledger, known = Ledger(), {}
    for i in range(3 * LABELS_MAX):
        known[str(i)] = facts(str(i))
        ledger.add(str(i), "gpu_s", 1.0, 0.0)
        ledger.add(str(i), "gpus", 4.0, 0.0)
        ledger.add(str(i), "stall_s", 1.0, 0.0, "storage", f"/{i}")
    figures = figures_of(ledger, known, {}, "n", JobLabels())
    by_job = values(figures, "headrace_agent_job_gpu_seconds_total")
    assert len(by_job) == LABELS_MAX + 1
    assert by_job[OTHER,] == 2 * LABELS_MAX
    assert len(values(figures, "headrace_agent_job_info")) == LABELS_MAX
    assert len(values(figures, "headrace_agent_job_gpus")) == LABELS_MAX
    stalls = values(figures, "headrace_agent_job_stall_seconds_total")
    assert len({labels[2] for labels in stalls}) == LABELS_MAX + 1


class FakePrometheus:
    """Answers `query_range` with series of its own."""

    def __init__(self, monkeypatch, series):
        self.queries = []

        def ask(_, what, **fields):
            assert what == "query_range"
            self.queries.append(fields["query"])
            name = fields["query"].partition("{")[0]
            return [
                {"metric": {"__name__": name, **labels}, "values": values}
                for labels, values in series.get(name, ())
            ]

        monkeypatch.setattr("headrace.telemetry.metrics.PrometheusHistory._ask", ask)


def test_a_prometheus_is_a_history_too(monkeypatch):
    now = time.time()
    at = [[now - 120 + 15 * i] for i in range(8)]
    job = {"job_name": "4711", "instance": "n0"}
    wait = {**job, "cause": "storage", "file_system": "/s", "quality": "measured"}
    begin = "headrace_agent_job_"
    series = {
        f"{begin}info": [({**job, "alias": "47_1", "title": "t", "user": "ann", "account": "a",
                          "quality": "measured"}, [[*t, "1"] for t in at])],
        # It begins with the job, wraps nowhere, and once begins anew: the agent was restarted.
        f"{begin}stall_seconds_total": [
            (wait, [[*t, str(v)] for t, v in zip(at, (5, 6, 7, 8, 1, 2, 3, 4), strict=True)])
        ],
        f"{begin}lost_gpu_seconds_total": [(wait, [[*at[0], "2"], [*at[7], "NaN"]])],
        f"{begin}work_seconds_total": [(job, [[*at[0], "12"]])],
        f"{begin}gpus": [(job, [[*at[0], "4"], [*at[1], "3"]]), ({**job, "instance": "n1"}, [[*at[0], "4"]])],
    }  # fmt: skip
    FakePrometheus(monkeypatch, series)
    (record,) = open_history("http://prometheus:9090").records(now - 3600, now)
    assert (record.job_id, record.alias, record.user) == ("4711", "47_1", "ann")
    assert record.nodes == ("n0", "n1")
    assert record.waited == {"storage": 12.0}
    assert record.lost == {"storage": 2.0}
    assert record.stall == 0.5
    assert record.figures["gpus", "", ""] == 8


def test_a_prometheus_tells_each_nodes_part_of_a_job(monkeypatch):
    now = time.time()
    begin = "headrace_agent_job_"
    job = [{"job_name": "4711", "instance": f"n{at}:9478"} for at in range(2)]
    series = {
        f"{begin}gpus": [(job[0], [[now - 30, "4"]]), (job[1], [[now - 30, "2"]])],
        f"{begin}work_seconds_total": [(each, [[now - 30, "12"]]) for each in job],
    }
    FakePrometheus(monkeypatch, series)
    parts = open_history("http://prometheus:9090").parts(now - 60, now)
    assert [(node, part.figures["gpus", "", ""]) for node, part in parts] == [("n0", 4), ("n1", 2)]
    layout = nodes_of_agents(parts)
    assert [(box.name, box.gpus) for box in layout.nodes] == [("n0", 4), ("n1", 2)]
    assert layout.jobs["4711"].gpus == 6


def test_a_counter_that_was_there_before_the_stretch_counts_from_its_first_value(monkeypatch):
    now = time.time()
    job = {"job_name": "4711", "instance": "n0"}
    series = {"headrace_agent_job_work_seconds_total": [(job, [[now - 3595, "100"], [now, "130"]])]}
    FakePrometheus(monkeypatch, series)
    (record,) = open_history("http://p:9090").records(now - 3600, now)
    assert record.total("worked_s") == 30


def test_hostile_names_are_quoted_in_queries(monkeypatch):
    nasty = '1"} or vector(1) #\\'
    now = time.time()
    info = [({"job_name": nasty, "instance": "n"}, [[now, "1"]])]
    asked = FakePrometheus(monkeypatch, {"headrace_agent_job_info": info})
    open_history("http://p:9090").records(now - 60, now, nasty)
    for query in asked.queries:
        inside = re.search(r'"((?:[^"\\]|\\.)*)"}$', query)
        assert inside, query


def test_what_is_no_prometheus_is_told():
    from headrace.errors import TelemetryError

    with pytest.raises(TelemetryError, match="Prometheus does not answer as it should"):
        open_history("http://127.0.0.1:9").records(0, 1)
