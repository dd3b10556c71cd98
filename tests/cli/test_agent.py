"""`headrace agent`, `job-report`, `starving`, `usage`: as a user calls them."""

import os
import time

import pytest

from headrace import runtime
from headrace.cli.reports import seconds_of
from headrace.cluster.executor import JobState
from headrace.cluster.manifest import write_manifest
from headrace.cluster.slurm.accounting import AccountedJob
from headrace.runtime import agent_folder
from headrace.telemetry.accounts import Ledger
from headrace.telemetry.history import open_history
from headrace.telemetry.writing import HistoryWriter, file_of
from telemetry.test_agent import home
from telemetry.test_history import fill

home = home  # noqa: PLW0127 - a fixture


def test_an_agent_in_the_background_is_started_asked_and_stopped(run, home):
    started = run("agent", "start", "--json").document
    try:
        assert started["history"].startswith(str(home / "history"))
        status = run("agent", "status")
        assert status.code == 0
        assert f"process {started['pid']} looks at {started['node']} every" in status.out
        assert "of a core" in status.out
        assert "jobs     " in status.out
        again = run("agent", "start")
        assert again.code == 3
        assert f"a telemetry agent runs already, process {started['pid']}" in again.err
        assert "looks at" in run("agent", "logs").out
    finally:
        stopped = run("agent", "stop")
    assert stopped.out == f"process {started['pid']} has ended\n"
    assert run("agent", "status").code == 1
    assert run("agent", "stop", "--json").document == {
        "running": False, "folder": str(agent_folder().path),
    }  # fmt: skip


def test_who_asks_for_an_own_agent_where_the_sites_runs_is_told_so(
    run, home, tmp_path, monkeypatch
):
    monkeypatch.setattr(runtime, "SITE_SOCKET", str(tmp_path / "socket"))
    assert "--site" not in run("agent", "status").out
    (tmp_path / "socket").touch()
    for verb in ("status", "stop"):
        assert run("agent", verb).out.endswith("; that of all users is there: --site\n")


@pytest.fixture
def history(home):
    """Two jobs in a history: one starves."""
    ledger = Ledger()
    now = time.time() - 600
    fill(ledger, job="4711", start_s=now, name="resnet", account="physics", alias="4700_11")
    fill(ledger, job="4712", start_s=now, amount=0.01, user="bob", name="\x1b[2J" + "x" * 90)
    for minute in range(3):
        ledger.add("4712", "worked_s", 60.0, now + 60 * minute)
    writer = HistoryWriter(file_of(home / "history", "node0"), "node0")
    assert writer.write(ledger, now=True)
    writer.close()
    return home / "history"


def test_starving_in_eighty_columns_without_colours(run, history, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ended = run("starving")
    assert ended.code == 0
    assert ended.out.splitlines()[0].startswith("0.0083 of 0.10 GPU-hours (8%) were lost")
    assert "4700_11 resnet" in ended.out
    assert "bob" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "\x1b" not in ended.out
    assert "nobody starved" in run("starving", "--user", "bob").out
    assert "nobody starved" in run("starving", "--last", "1m").out
    assert run("starving", "--json").document["jobs"][0]["stall"] == 0.5


def test_usage_and_the_report(run, history, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ended = run("usage", "--from", "history")
    first = [line.split()[0] for line in ended.out.splitlines()]
    assert first == ["USER", "ann", "bob", "all", "hours", "wasted"]
    days = run("usage", "--from", "history", "--by", "hour", "--last", "2h", "--json").document[
        "rows"
    ]
    assert sum(row["gpu_hours"] for row in days) == pytest.approx(0.1)
    assert run("usage", "--by", "year").code == 2
    assert max(map(len, ended.out.splitlines())) <= 80
    assert len(run("usage", "--from", "history", "--user", "bob", "--json").document["rows"]) == 1
    report = run("job-report", "4700_11")
    assert report.out.startswith("headrace: job 4700_11 (resnet) of ann, 1 node")
    assert "\x1b" not in run("job-report", "4712").out


def test_the_report_of_a_task_has_what_its_launch_says(run, home, monkeypatch, tmp_path):
    """By the name that people write; of the second launch in one life, which agents count as a restart."""
    ledger, began_s = Ledger(), time.time() - 600
    fill(ledger, start_s=began_s, alias="4700_11", restarts=1)
    writer = HistoryWriter(file_of(home / "history", "node0"), "node0")
    assert writer.write(ledger, now=True)
    writer.close()
    for name, why in (("4700_11-0", "node b is lost"), ("4700_11-0-2", "rank 0 failed")):
        result = {"outcome": "failed", "why": why, "resumed": ""}
        manifest = {"run": {"began_s": began_s}, "layout": {"nodes": 2}, "result": result}
        write_manifest(tmp_path / f"headrace-runs/{name}.json", manifest)
    monkeypatch.chdir(tmp_path)
    for job in ("4711", "4700_11"):
        assert run("job-report", job, "--json").document["cause"] == "rank 0 failed"
    hints = [line for line in run("job-report", "4711").out.splitlines() if "hint" in line]
    assert [hint.split(": ")[-1] for hint in hints] == ["headrace cluster logs 4700_11 --lines 50"]


def test_the_report_of_a_job_that_failed_says_why_and_shows_what_it_printed(
    run, history, monkeypatch
):
    booked = AccountedJob(
        "9", "train", JobState.FAILED, exit_code=1, user="ann", account="", partition="", elapsed_s=5.0,
        limit_minutes=None, cpu_count=1, gpu_count=0, node_count=1, cpu_s=None, memory_peak_mib=None,
    )  # fmt: skip
    monkeypatch.setattr("headrace.cli.reports._books", lambda **_: [booked])
    assert [line.split(None, 1) for line in run("job-report", "9").out.splitlines()[-2:]] == [
        ["run", "exit code 1"],
        ["hint", "see what it printed last: headrace cluster logs 9 --lines 50"],
    ]


def test_what_cannot_be_is_told_and_how(run, history, home):
    unknown = run("job-report", "9")
    assert unknown.code == 3
    assert "nothing is known of job 9" in unknown.err
    nowhere = run("starving", "--history", str(home / "nowhere"))
    assert nowhere.code == 3
    assert "there is no history" in nowhere.err
    assert run("starving", "--last", "soon").code == 2
    assert run("usage", "--from", "books").code == 2
    assert run("agent", "start", "--interval", "0").code == 2
    assert run("agent", "start", "--keep-days", "-1").code == 2


def test_a_damaged_file_is_named_beside_the_result(run, history):
    file_of(history, "node1").write_bytes(b"no database" * 1000)
    ended = run("starving")
    assert ended.code == 0
    assert "left out" in ended.err
    assert "node1" in ended.err
    assert len(run("starving", "--json").document["skipped"]) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("24h", 86400), ("30m", 1800), ("7d", 604800), ("2", 7200), ("1.5h", 5400)],
)
def test_stretches_of_time(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "0", "1y", "9" * 30, "1e9d"])
def test_what_is_no_stretch_of_time(text):
    with pytest.raises(ValueError, match="no stretch of time"):
        seconds_of(text)


def test_files_of_single_jobs_go_when_they_are_old(home):
    folder = home / "history"
    ledger = Ledger()
    fill(ledger, job="1")
    old = HistoryWriter(file_of(folder, "node0", "1"), "node0")
    old.write(ledger, now=True)
    path = file_of(folder, "node0", "1")
    os.utime(path, (1e9, 1e9))
    HistoryWriter(file_of(folder, "node0", "2"), "node0").close()
    assert path.exists(), "somebody writes it"
    old.close()
    os.utime(path, (1e9, 1e9))
    HistoryWriter(file_of(folder, "node0", "2"), "node0").close()
    assert not path.exists()
    assert open_history(folder).records(0, 4e9) == []
