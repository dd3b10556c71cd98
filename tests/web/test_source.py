"""A real cluster's pictures: out of history files, a scheduler's snapshot and a controller."""

import contextlib
import dataclasses
import re
import shutil
import time
from functools import partial

import pytest

from control.service import controller, parent
from headrace.base.job import JobIdentity
from headrace.cluster.executor import JobState
from headrace.cluster.manifest import write_manifest
from headrace.cluster.snapshot import Allocation, ClusterJob, ClusterSnapshot, Node, Partition
from headrace.control.client import Client, Endpoint
from headrace.errors import ClusterError, TelemetryError
from headrace.insight.usage import starving_of
from headrace.telemetry.accounts import JobFacts, Ledger
from headrace.telemetry.history import ENDED, FileHistory
from headrace.telemetry.writing import HistoryWriter, file_of
from headrace.web.source import ClusterSource
from headrace.web.views import UNKNOWN, nodes_of_scheduler

controller, parent = controller, parent  # noqa: PLW0127 - fixtures

NOW = time.time() // 60 * 60  # files that were not written for long are not looked at
LONG_S = 600


def write(folder, node, jobs, now=NOW, *, ended=False):
    """A node's history: for each job the share that it stalled in each of the last ten minutes."""
    ledger = Ledger()
    for job, (stall, gpus, cause, system) in jobs.items():
        for at in range(int(now) - LONG_S, int(now), 60):
            for name, amount, label, fs in (
                ("seconds", 60.0, "", ""), ("gpu_s", 60.0 * gpus, "", ""), ("gpus", gpus, "", ""),
                ("worked_s", 60.0 * (1 - stall), "", ""), ("stall_s", 60.0 * stall, cause, system),
                ("lost_gpu_s", 60.0 * stall * gpus, cause, system), ("gpu_watched_s", 60.0 * gpus, "", ""),
                ("gpu_busy_s", 30.0 * gpus, "", ""), ("tier_bytes", 6e9, "source", system),
                ("partition", 1.0, "gpux4", ""),
            ):  # fmt: skip
                ledger.add(job, name, amount, at, label, fs)
        if ended:
            ledger.add(job, ENDED, now, now - 1)
        facts = JobFacts(
            JobIdentity(job_id=job, name="train", user="ann"), "ann", now - LONG_S, now, True
        )
        ledger.know(job, facts)
    writer = HistoryWriter(file_of(folder, node), node)
    assert writer.write(ledger, now=True)
    writer.close()


@pytest.fixture
def history(tmp_path):
    folder = tmp_path / "history"
    folder.mkdir()
    write(folder, "n1", {"17": (0.5, 4, "metadata", "/scratch"), "18": (0.0, 2, "decode", "")})
    write(folder, "n2", {"17": (0.1, 4, "metadata", "/scratch")})
    return folder


def watching(history, **given):
    return ClusterSource(str(history), clock=lambda: NOW, **given)


def cells(cluster):
    """Node, job and stall of each GPU."""
    gpus, at = [], 0
    for node in cluster.nodes:
        for _ in range(node.gpus):
            holder = cluster.holders[at]
            job = cluster.jobs[holder].job_id if holder >= 0 else ""
            stall = int(cluster.stall[at])
            gpus.append((node.name, job, None if stall == UNKNOWN else stall / 200))
            at += 1
    return gpus


def test_agents_alone_are_enough(history):
    cluster = watching(history).cluster()
    assert cells(cluster) == (
        [("n1", "17", 0.5)] * 4 + [("n1", "18", 0.0)] * 2 + [("n2", "17", 0.1)] * 4
    )
    by_id = {job.job_id: job for job in cluster.jobs}
    assert (by_id["17"].gpus, by_id["17"].nodes, by_id["17"].cause) == (8, 2, "metadata")
    assert cluster.totals()["busy"] == 0.5


def snapshot():
    def node(name, gpus, taken, **more):
        return Node(name, ("mixed",), 8, 1000, gpus=gpus, gpus_allocated=taken,
                    partitions=("gpu",), **more)  # fmt: skip

    jobs = (
        ClusterJob("17", "train", "ann", "proj", "gpu", JobState.RUNNING, nodes=("n1", "n2"), gpu_count=4,
            allocations=(Allocation("n1", 4, 10, 2, (1, 3)), Allocation("n2", 4, 10, 2))),
        ClusterJob("20", "unseen", "bob", "proj", "gpu", JobState.RUNNING, nodes=("n1",), gpu_count=1,
            allocations=(Allocation("n1", 4, 10, 1, (0,)),)),
        ClusterJob("21", "later", "bob", "proj", "gpu", JobState.PENDING),
    )  # fmt: skip
    nodes = (node("n1", 4, (0, 1, 3)), node("n2", 2, (0, 1)),
             Node("n3", ("down",), 8, 1000, gpus=1, partitions=("gpu",), reason="burnt"))  # fmt: skip
    return ClusterSnapshot("c", "22", NOW, nodes, (Partition("gpu", ("n1", "n2", "n3")),), jobs)


def test_the_scheduler_knows_gpus_and_the_history_how_they_fare(history):
    cluster = watching(history, layout=lambda: nodes_of_scheduler(snapshot())).cluster()
    assert cells(cluster) == [
        ("n1", "20", None), ("n1", "17", 0.5), ("n1", "", None), ("n1", "17", 0.5),
        ("n2", "17", 0.1), ("n2", "17", 0.1), ("n3", "", None),
    ]  # fmt: skip
    assert "burnt" in cluster.nodes[2].away
    totals = cluster.totals()
    assert (totals["waiting"], totals["away"], totals["idle"], totals["known"]) == (1, 1, 1, 4)


def test_where_nobody_has_a_gpu_jobs_are_on_nodes(tmp_path):
    folder = tmp_path / "history"
    folder.mkdir()
    write(folder, "n1", {"17": (0.5, 0, "decode", "")})
    without = dataclasses.replace(
        snapshot(),
        nodes=tuple(dataclasses.replace(n, gpus=0, gpus_allocated=()) for n in snapshot().nodes),
    )
    for layout in (None, lambda: nodes_of_scheduler(without)):
        cluster = watching(folder, layout=layout).cluster()
        assert cells(cluster) == [("n1", "17", 0.5)]
        assert not cluster.totals()["has_gpus"]
    assert cluster.totals()["waiting"] == 1


def test_without_a_history_there_are_nodes_and_a_note(tmp_path):
    cluster = watching(
        tmp_path / "nothing", layout=lambda: nodes_of_scheduler(snapshot())
    ).cluster()
    assert len(cluster.nodes) == 3
    assert "no history" in cluster.notes[0]


def test_history_that_nobody_writes_any_more_does_not_look_live(history, tmp_path):
    later = tmp_path / "later"
    later.mkdir()
    for file in history.iterdir():
        shutil.copy(file, later)
    clock = lambda: time.time() + 3600  # noqa: E731
    cluster = ClusterSource(str(later), clock=clock).cluster()
    assert (cells(cluster), cluster.totals()["running"]) == ([], 0)
    (note,) = cluster.notes
    assert re.fullmatch(r"Agents wrote last .+ ago: none runs any more, or none sees a job\.", note)


def test_a_history_that_goes_meanwhile_hides_no_nodes(history, monkeypatch):
    def gone(self):
        raise TelemetryError("there is no history in this folder.")

    monkeypatch.setattr(FileHistory, "written_s", gone)
    source = ClusterSource(
        str(history),
        layout=lambda: nodes_of_scheduler(snapshot()),
        clock=lambda: time.time() + 3600,
    )
    assert len(source.cluster().nodes) == 3


def test_a_schedulers_whole_error_is_shown(history):
    error = ClusterError(f"scontrol says: {'x' * 300}.", next_step="Set SLURM_CONF.")

    def layout():
        raise error

    totals = watching(history, layout=layout).cluster().totals()
    assert totals["notes"] == [str(error)]


def test_with_nothing_at_all_it_is_said_what_to_do(tmp_path):
    with pytest.raises(TelemetryError, match="headrace agent start --history"):
        watching(tmp_path / "nothing").cluster()


def test_a_job_over_time(history):
    page = watching(history).job("17")
    assert len(page["times"]) == LONG_S / 60
    assert page["stall"] == pytest.approx([0.3] * 10)
    assert page["use"] == pytest.approx([0.5] * 10)
    assert page["tiers"]["source"] == pytest.approx([2e8] * 10)
    assert [(place, share) for _, place, share in page["ranks"]] == [("n1", 0.5), ("n2", 0.1)]
    assert page["running"] is True
    assert page["facts"]["partition"] == "gpux4"
    assert page["named"] is True
    assert watching(history).job("99") is None
    assert watching(history).job("") is None


def test_a_short_job_has_a_point_for_each_ten_seconds(tmp_path):
    """It begins 25 s into a minute, ends 70 s later, and reads 1 kB a second; a node joins for the end."""
    folder = tmp_path / "history"
    folder.mkdir()
    began, ended = int(NOW) - 95, int(NOW) - 25
    for node, first_s in (("n1", began), ("n2", ended - 10)):
        ledger = Ledger()
        ledger.began_s["5"] = first_s
        for at in range(first_s, ended):
            ledger.add("5", "tier_bytes", 1000.0, at, "source", "/scratch")
            ledger.add("5", "worked_s", 1.0, at)
            ledger.add("5", "stall_s", 1.0, at, "storage", "/scratch")
        ledger.know("5", JobFacts(JobIdentity(job_id="5"), "ann", first_s, ended, True))
        with contextlib.closing(HistoryWriter(file_of(folder, node), node)) as writer:
            assert writer.write(ledger, now=True)
    page = watching(folder).job("5")
    begin = began - began % 10
    assert page["times"] == [begin + 10 * at for at in range(8)]
    assert page["tiers"]["source"] == pytest.approx([1000] * 6 + [1500, 2000], rel=1e-3)
    # Of all jobs together, minutes are minutes.
    assert [fs["times"] for fs in watching(folder).storage()] == [[NOW - 120, NOW - 60]]


def test_a_job_that_lost_a_node_says_so_and_one_that_ended_does_not_run(tmp_path):
    folder = tmp_path / "history"
    folder.mkdir()
    job = {"17": (0.5, 4, "metadata", "/scratch")}
    write(folder, "n1", job)
    lost = {"outcome": "continued", "why": "node n2 is lost.", "resumed": "", "wall_s": 60.0}
    document = {"run": {"began_s": NOW - 300}, "layout": {"nodes": 2}, "result": lost}
    write_manifest(tmp_path / "headrace-runs/17-0.json", document)
    source = watching(folder, folder_of={"17": tmp_path}.get)
    page = source.job("17")
    assert page["went_on"] == [{"at": NOW - 240, "text": "node n2 is lost."}]
    assert page["running"]
    assert source.cluster().totals()["running"] == 1
    write(folder, "n1", job, ended=True)
    page = source.job("17")
    assert not page["running"]
    assert [node for _, node, _ in page["ranks"]] == ["n1"]
    assert watching(folder).cluster().totals()["running"] == 0
    assert watching(folder).job("17")["went_on"] == []


def test_who_waits_for_a_file_system(history):
    systems = {fs["name"]: fs for fs in watching(history).storage()}
    assert systems["/scratch"]["top"][0]["job_id"] == "17"
    assert systems["/scratch"]["top"][0]["values"] == pytest.approx([0.6] * 10)
    assert systems["/scratch"]["unit"] == "processes that wait"


def test_who_starves(history):
    starving = starving_of(watching(history).records(), NOW - 86400, NOW)
    assert [(job.job_id, job.cause) for job in starving.jobs] == [("17", "metadata")]
    assert starving.lost_gpu_hours == pytest.approx((0.5 + 0.1) * 4 * LONG_S / 3600)


def test_a_controller_tells_what_is_read_now(history, controller):
    controller.apply("file_systems: {fs: {paths: [/x], capacity: {bytes_per_s: 100M}}}")
    controller.plane(name="n1")
    client = Client(Endpoint(url=controller.url))
    source = watching(history, state=partial(client.document, "GET", "/v1/state"))
    [fs] = [fs for fs in source.storage() if fs["name"] == "fs"]
    assert (fs["capacity"], fs["unit"]) == (100e6, "B/s")
    client.close()


def test_a_controller_that_is_gone_is_a_note(history, tmp_path):
    client = Client(Endpoint(url=f"unix:{tmp_path}/nobody"))
    state = partial(client.document, "GET", "/v1/state")
    cluster = watching(history, state=state).cluster()
    assert "controller" in cluster.notes[0]


def test_hostile_names_in_a_history_are_text(tmp_path, serve):
    folder = tmp_path / "history"
    folder.mkdir()
    write(folder, "<b>n1", {"<script>alert(1)</script>": (0.5, 1, "</script>", "/x\x1b[2J")})
    web = serve(source=watching(folder))
    stream = web.listen("/api/live?grid=1")
    _, full = stream.next()
    stream.close()
    assert full["nodes"]["names"] == ["<b>n1"]
    assert b"\x1b" not in web.ask("/api/starving").body
    for path in (
        "/api/starving",
        "/api/storage",
        "/api/job?id=%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    ):
        answer = web.ask(path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
