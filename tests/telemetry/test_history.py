"""The history: whole after whatever happens to its file, its disk, its clock; read together from a folder."""

import os
import resource
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.base.job import JobIdentity
from headrace.errors import TelemetryError
from headrace.telemetry.accounts import JobFacts, Ledger
from headrace.telemetry.history import open_history
from headrace.telemetry.messages import parse_message
from headrace.telemetry.report import job_report
from headrace.telemetry.writing import STEADY_S, HistoryWriter, file_of
from telemetry.shared import T0, accounts, message, now


def fill(ledger, job="4711", minutes=3, start_s=T0, amount=10.0, user="ann", **identity):
    """Some minutes of a job that waits half of its time."""
    for minute in range(minutes):
        at = start_s + 60 * minute
        ledger.add(job, "seconds", 60, at)
        ledger.add(job, "gpu_s", 60, at)
        ledger.add(job, "worked_s", amount, at)
        ledger.add(job, "stall_s", amount, at, "storage", "/scratch")
        ledger.add(job, "lost_gpu_s", amount, at, "storage", "/scratch")
        ledger.add(job, "gpus", 1, at)
    facts = JobFacts(
        JobIdentity(job_id=job, **identity), user, start_s, start_s + 60 * minutes, measured=True
    )
    ledger.know(job, facts)


class Clocks:
    def __init__(self):
        self.mono, self.unix = 1000.0, T0

    def pass_(self, seconds):
        self.mono += seconds
        self.unix += seconds


@pytest.fixture
def clocks():
    return Clocks()


@pytest.fixture
def writer_of(tmp_path, clocks):
    writers = []

    def make(node="node0", job="", **options):
        path = file_of(tmp_path, node, job)
        writers.append(
            HistoryWriter(path, node, mono=lambda: clocks.mono, unix=lambda: clocks.unix, **options)
        )
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()


def records(folder, since_s=0.0, until_s=4e9, job_id=""):
    history = open_history(folder)
    return history.records(since_s, until_s, job_id)


def test_what_is_written_is_read_in_the_stretch_that_is_asked_for(writer_of, tmp_path):
    ledger, writer = Ledger(), writer_of()
    fill(ledger, alias="4700_11", name="train", account="physics", restarts=2)
    assert writer.write(ledger, now=True)
    assert not ledger.waiting
    (record,) = records(tmp_path)
    assert (record.user, record.account, record.name) == ("ann", "physics", "train")
    assert ", 2 restarts, stalls measured" in job_report(tmp_path, "4711").text()
    assert record.waited == {"storage": 30.0}
    assert record.lost_by_file_system == {"/scratch": 30.0}
    assert record.stall == 0.5
    assert record.figures["gpus", "", ""] == 1
    assert records(tmp_path, T0 + 60, T0 + 120)[0].waited == {"storage": 20.0}
    assert records(tmp_path, T0 + 1000) == []
    assert records(tmp_path, job_id="4700_11")[0].job_id == "4711"
    assert records(tmp_path, job_id="9") == []


def test_a_report_leaves_out_what_another_job_of_the_same_number_did(writer_of, tmp_path):
    """Another cluster counts from 1, too. The minute in which the job began is its own."""
    began_s = T0 + 86_400 + 30
    ledger, writer = Ledger(), writer_of()
    fill(ledger, name="old", amount=20.0)
    assert writer.write(ledger, now=True)
    fill(ledger, name="new", start_s=began_s - 30)
    assert writer.write(ledger, now=True)
    whole, own = job_report(tmp_path, "4711"), job_report(tmp_path, "4711", began_s)
    assert whole.record.waited == {"storage": 90.0}
    assert own.record.waited == {"storage": 30.0}
    assert own.record.name == "new"
    assert whole.as_dict()["first_s"] == T0
    assert own.as_dict()["first_s"] == began_s
    assert own.as_dict()["seconds"] == 150


def test_agents_of_many_nodes_are_read_together(writer_of, tmp_path):
    for node in ("node0", "node1"):
        ledger = Ledger()
        fill(ledger)
        writer_of(node).write(ledger, now=True)
    (record,) = records(tmp_path)
    assert record.nodes == ("node0", "node1")
    assert record.gpu_hours == pytest.approx(2 * 180 / 3600)
    assert record.figures["gpus", "", ""] == 2


def test_two_agents_that_saw_the_same_job_do_not_count_it_twice(writer_of, tmp_path):
    for job, minutes in (("", 2), ("4711", 3)):
        ledger = Ledger()
        fill(ledger, minutes=minutes)
        writer_of(job=job).write(ledger, now=True)
    assert len(list(tmp_path.glob("*.telemetry"))) == 2
    (record,) = records(tmp_path)
    assert record.waited == {"storage": 30.0}


def test_a_second_agent_of_a_node_is_refused_with_the_first_ones_number(writer_of):
    writer_of()
    with pytest.raises(TelemetryError, match=rf"another agent writes .* process {os.getpid()}"):
        writer_of()


KILLED = """
import os, sys
from pathlib import Path
from headrace.telemetry.accounts import Ledger
from headrace.telemetry.writing import HistoryWriter, file_of
sys.path.insert(0, {tests!r})
from telemetry.test_history import fill
folder = Path(sys.argv[1])
writer = HistoryWriter(file_of(folder, "node0"), "node0")
ledger = Ledger()
fill(ledger, minutes=3)
assert writer.write(ledger)
print("written", flush=True)
fill(ledger, minutes=50, job="5")
import threading
threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), 9)).start()
while True:
    writer.write(ledger)
    fill(ledger, minutes=50, job="5")
"""


@pytest.mark.parametrize("after_s", [0.0, 0.03])
def test_an_agent_that_is_killed_leaves_its_history_whole(tmp_path, writer_of, after_s):
    program = KILLED.format(tests=str(Path(__file__).resolve().parents[1]))
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path, str(after_s)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == -9, ended.stderr
    assert ended.stdout == "written\n"
    before = {record.job_id: record for record in records(tmp_path)}
    assert before["4711"].waited == {"storage": 30.0}
    writer, ledger = writer_of(), Ledger()
    fill(ledger, job="6")
    assert writer.write(ledger, now=True)
    assert {record.job_id for record in records(tmp_path)} == {*before, "6"}


def test_a_full_disk_loses_nothing(writer_of, tmp_path, clocks, caplog):
    """A file may not grow: as on a full disk, writes fail; when there is room again, all is written."""
    writer, ledger = writer_of(), Ledger()
    fill(ledger, job="1")
    assert writer.write(ledger, now=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        for job in range(2, 200):
            fill(ledger, job=str(job))
        assert not writer.write(ledger, now=True)
        assert writer.why
        assert not writer.write(ledger), "it is not tried all the time"
        fill(ledger, job="200")
        assert {record.job_id for record in records(tmp_path)} == {"1"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.waiting
    clocks.pass_(600)
    assert writer.write(ledger)
    assert writer.why == ""
    jobs = records(tmp_path)
    assert len(jobs) == 200
    assert all(record.waited == {"storage": 30.0} for record in jobs)
    assert "cannot be written" in caplog.text


def test_what_waits_for_a_full_disk_is_bounded(monkeypatch):
    monkeypatch.setattr("headrace.telemetry.accounts.WAITING_MAX", 2000)
    ledger = Ledger()
    for day in range(30):
        for job in range(4):
            fill(ledger, job=str(job), minutes=30, start_s=T0 + 1800 * day)
        ledger.give_back(ledger.take())
        assert ledger.waiting <= 2000
    amounts = ledger.take().amounts
    waited = [
        value for (_, job, name, *_), value in amounts.items() if (job, name) == ("3", "stall_s")
    ]
    assert sum(waited) == pytest.approx(30 * 30 * 10.0)
    assert len(waited) < 30 * 30


def test_a_damaged_file_is_kept_aside_and_another_begun(writer_of, tmp_path):
    writer, ledger = writer_of(), Ledger()
    fill(ledger)
    writer.write(ledger, now=True)
    writer.close()
    path = file_of(tmp_path, "node0")
    block = bytearray(path.read_bytes())
    block[0:4096] = b"\xa5" * 4096
    path.write_bytes(block)
    with pytest.raises(TelemetryError, match="no history file can be read"):
        records(tmp_path)
    again = writer_of()
    fill(ledger, job="5")
    assert again.write(ledger, now=True)
    assert [record.job_id for record in records(tmp_path)] == ["5"]
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == bytes(block)


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
def test_damage_inside_a_file_is_found_or_does_no_harm(writer_of, tmp_path, at):
    writer, ledger = writer_of(), Ledger()
    fill(ledger, minutes=300)
    writer.write(ledger, now=True)
    writer.close()
    path = file_of(tmp_path, "node0")
    block = bytearray(path.read_bytes())
    start = int(at * len(block)) // 4096 * 4096
    block[start : start + 4096] = os.urandom(4096)
    path.write_bytes(block)
    with pytest.raises(TelemetryError, match="no history file can be read"):
        records(tmp_path)
    again = writer_of()
    assert again.write(ledger, now=True)
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_a_damaged_file_among_others_is_left_out_and_named(writer_of, tmp_path):
    ledger = Ledger()
    fill(ledger)
    writer_of().write(ledger, now=True)
    file_of(tmp_path, "node1").write_bytes(b"not a database, though long enough to be one" * 100)
    history = open_history(tmp_path)
    assert len(history.records(0, 4e9)) == 1
    (skipped,) = history.skipped
    assert "node1" in skipped


def test_a_file_of_another_node_or_version_is_refused(writer_of, tmp_path):
    writer_of("node0").close()
    path = file_of(tmp_path, "node0")
    with pytest.raises(TelemetryError, match="history of node 'node0', this node is 'node9'"):
        HistoryWriter(path, "node9")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    database.close()
    with pytest.raises(TelemetryError, match="format '99', expected '1'"):
        HistoryWriter(path, "node0")


def test_old_minutes_go_by_age(writer_of, tmp_path, clocks):
    writer, ledger = writer_of(age_s=86400.0), Ledger()
    fill(ledger, job="old")
    writer.write(ledger, now=True)
    for _ in range(30):
        clocks.pass_(3600)
        writer.write(ledger, now=True)
    fill(ledger, job="new", start_s=clocks.unix)
    writer.write(ledger, now=True)
    assert [record.job_id for record in records(tmp_path)] == ["new"]


def test_a_clock_that_jumps_does_not_empty_the_history(writer_of, tmp_path, clocks):
    writer, ledger = writer_of(age_s=86400.0), Ledger()
    fill(ledger)
    writer.write(ledger, now=True)
    clocks.pass_(2 * STEADY_S)
    writer.write(ledger, now=True)
    clocks.unix += 400 * 86400  # a wrong date
    for _ in range(3):
        clocks.pass_(700)
        fill(ledger, job="astray", minutes=1, start_s=clocks.unix)
        writer.write(ledger, now=True)
    assert {record.job_id for record in records(tmp_path)} == {"4711", "astray"}
    clocks.unix -= 400 * 86400  # and back
    for _ in range(20):
        clocks.pass_(700)
        writer.write(ledger, now=True)
    assert "4711" in {record.job_id for record in records(tmp_path)}


def test_a_clock_that_goes_back_adds_to_minutes_that_were_there(writer_of, tmp_path):
    writer, ledger = writer_of(), Ledger()
    for _ in range(2):
        fill(ledger)
        writer.write(ledger, now=True)
    (record,) = records(tmp_path)
    assert record.waited == {"storage": 60.0}
    assert record.figures["gpus", "", ""] == 1, "a peak is no sum"


def test_a_file_stays_within_its_bytes_and_loses_the_oldest(writer_of, tmp_path, clocks):
    writer, ledger = writer_of(bytes_max=1 << 20), Ledger()
    for hour in range(24):
        for device in range(60):
            for minute in range(60):
                at = T0 + 3600 * hour + 60 * minute
                ledger.add(str(hour), "tier_bytes", 1.0, at, f"disk{device}")
        fill(ledger, job=str(hour), minutes=1, start_s=T0 + 3600 * hour)
        clocks.pass_(60)
        assert writer.write(ledger, now=True)
    path = file_of(tmp_path, "node0")
    assert path.stat().st_size <= 1.5 * (1 << 20)
    kept = {int(record.job_id) for record in records(tmp_path)}
    assert 23 in kept
    assert 0 not in kept
    assert kept == set(range(min(kept), 24))


def test_a_reader_sees_whole_minutes_while_an_agent_writes(writer_of, tmp_path):
    writer, ledger = writer_of(), Ledger()
    for turn in range(40):
        fill(ledger, minutes=5)
        writer.write(ledger, now=turn % 3 == 0)
        (record,) = records(tmp_path)
        assert record.waited == {"storage": 50.0 * (turn + 1)}
    assert not list(tmp_path.glob("*-journal"))


def test_folders_that_cannot_be_are_told(tmp_path):
    with pytest.raises(TelemetryError, match="there is no history"):
        open_history(tmp_path / "nowhere")
    with pytest.raises(TelemetryError, match="no history in this folder"):
        records(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TelemetryError, match="no history can be kept there"):
        HistoryWriter(tmp_path / "file" / "x.telemetry", "node0")
    with pytest.raises(ValueError, match="at least"):
        HistoryWriter(tmp_path / "x.telemetry", "node0", bytes_max=5)


def test_a_file_that_is_removed_is_begun_again(writer_of, tmp_path, clocks):
    writer, ledger = writer_of(), Ledger()
    fill(ledger)
    writer.write(ledger, now=True)
    for suffix in ("", "-wal", "-shm"):
        Path(f"{file_of(tmp_path, 'node0')}{suffix}").unlink(missing_ok=True)
    fill(ledger, job="5")
    writer.write(ledger, now=True)
    assert [record.job_id for record in records(tmp_path)] == ["5"]


def test_hostile_names_stay_names(writer_of, tmp_path):
    ledger, writer = Ledger(), writer_of()
    nasty = "'; DROP TABLE jobs; --\x1b[2J"
    fill(ledger, job=nasty, name="<img src=x>")
    writer.write(ledger, now=True)
    (record,) = records(tmp_path)
    assert record.job_id.startswith("'; DROP")
    assert record.job_id.isprintable()
    assert records(tmp_path, job_id=nasty)[0].waited == {"storage": 30.0}


def test_times_of_records_are_near(writer_of, tmp_path):
    ledger, writer = Ledger(), writer_of()
    fill(ledger, start_s=time.time())
    writer.write(ledger, now=True)
    (record,) = records(tmp_path, time.time() - 30)
    assert record.last_s - record.first_s == 180


def test_samples_of_a_killed_process_are_a_least_number(writer_of, tmp_path):
    book, ledger = accounts()

    def tell(at, **given):
        book.report(parse_message(message(worked=at, samples=9 * at, **given), 1, 1000), now(at))

    def text():
        assert writer.write(ledger, now=True)
        return job_report(tmp_path, "4711").text()

    writer = writer_of()
    for instance in ("a" * 32, "b" * 32):
        tell(2, instance=instance)
    tell(4, instance="c" * 32, consumer=False)  # a loader's worker ends without a word
    assert "what 2 processes did in the last 2 s" in text()
    tell(6, instance="a" * 32, ended=True)
    assert "what 1 process did" in text()
    assert ", at least " in text()
    assert job_report(tmp_path, "4711").as_dict()["unended"] == 1
    assert job_report(tmp_path, "4711", T0 + 5).as_dict()["unended"] == 0
    tell(8, instance="b" * 32, ended=True)
    assert "at least" not in text()
    assert "not told" not in text()
