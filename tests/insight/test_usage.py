"""Usage and starving of records that are made up: books and history together, ranks, shares, nothing."""

import time
from dataclasses import dataclass, replace

import pytest

from headrace.base.causes import Cause
from headrace.insight.usage import starving_of, usage_by
from headrace.telemetry.history import JobRecord
from headrace.telemetry.report import JobReport, hint_of, hours_text
from headrace.telemetry.waste import Booked, JobUse, use_of

HOUR = 3600.0


def record(
    job_id, user="ann", account="a", lost_h=0.0, gpu_h=1.0, measured=True, busy=None, **more
):
    wait, lost = ("stall_s", "lost_gpu_s") if measured else ("inferred_s", "inferred_gpu_s")
    figures = {
        ("seconds", "", ""): gpu_h * HOUR, ("gpu_s", "", ""): gpu_h * HOUR, ("cpu_s", "", ""): HOUR,
        (wait, "storage", "/scratch"): lost_h * HOUR, (lost, "storage", "/scratch"): lost_h * HOUR,
        ("worked_s", "", ""): (gpu_h - lost_h) * HOUR,
    }  # fmt: skip
    if busy is not None:
        watched_s = gpu_h * HOUR
        figures |= {("gpu_watched_s", "", ""): watched_s, ("gpu_busy_s", "", ""): watched_s * busy}
    return JobRecord(
        job_id=job_id, user=user, account=account, nodes=("n0",), measured=measured,
        figures=figures, last_s=gpu_h * HOUR, **more,
    )  # fmt: skip


@dataclass
class Book:
    job_id: str
    user: str = "ann"
    account: str = "a"
    partition: str = "gpu"
    started_s: float | None = 0.0
    ended_s: float | None = HOUR
    gpu_count: int = 2
    cpu_count: int = 8
    node_count: int = 1
    cpu_s: float | None = None
    memory_mib: int = 0
    memory_peak_mib: int | None = None
    task_count: int = 1


def test_jobs_are_ranked_by_gpu_hours_lost():
    found = starving_of(
        [record("1", lost_h=0.2), record("2", user="bob", lost_h=0.5, measured=False), record("3")],
        0.0, HOUR,
    )  # fmt: skip
    assert [job.job_id for job in found.jobs] == ["2", "1"]
    assert [job.quality for job in found.jobs] == ["inferred", "measured"]
    assert [(group.name, group.jobs) for group in found.users] == [("bob", 1), ("ann", 1)]
    assert found.file_systems[0].lost_gpu_hours == pytest.approx(0.7)
    assert found.causes[0].name == "storage"
    assert found.gpu_hours == 3
    assert "0.70 of 3.00 GPU-hours (23%)" in found.answer


def test_without_gpus_jobs_are_ranked_by_waiting():
    cpu = record("1", gpu_h=0.0)
    cpu.figures |= {("stall_s", "decode", ""): 50.0, ("worked_s", "", ""): 50.0}
    found = starving_of([cpu], 0.0, HOUR)
    assert found.jobs[0].stall == 0.5
    assert found.answer == "job 1 starved most: waited 50.0 s for data, most for decode"


def test_jobs_that_hardly_waited_are_counted_as_left_out():
    brief = record("1", gpu_h=0.0)
    brief.figures |= {("stall_s", "decode", ""): 0.04, ("worked_s", "", ""): 1.0}
    long = [record(name, gpu_h=0.0) for name in "23"]
    for job in long:
        job.figures |= {("stall_s", "decode", ""): 0.2, ("worked_s", "", ""): 21.0}
    found = starving_of([brief, *long, record("4")], 0.0, HOUR)
    assert [job.job_id for job in found.jobs] == ["1"]
    assert found.notes == ["2 more jobs waited for data, under 1% of the time: left out"]
    # Others waited longer.
    assert found.answer == "job 1 starved most: waited 40 ms for data, most for decode"
    assert "no job is known to have waited 1% of its time" in starving_of(long, 0.0, HOUR).answer


def test_a_stall_of_nearly_nothing_has_no_cause_in_the_report():
    job = record("1", gpu_h=0.0)
    job.figures |= {("stall_s", "decode", "/data"): 0.131, ("worked_s", "", ""): 40.0}
    text = JobReport(job).text()
    assert "waited 0.1 s" in text
    assert "decode" not in text
    job.figures["worked_s", "", ""] = 10.0
    assert "stall        decode 100%" in JobReport(job).text()


def test_of_a_job_that_nobody_gave_processors_it_is_said_how_much_it_used_of_them():
    assert "  CPU          1.00 hours used\n" in JobReport(record("1")).text()


@pytest.mark.parametrize("by", ["job", "user", "partition", "hour"])
def test_what_was_used_of_nobody_knows_how_much_is_in_no_share_of_jobs_together(by):
    known, unknown = record("1", gpu_h=0.5), record("2", gpu_h=0.5)
    known.figures[("cpus_s", "", "")] = 4 * HOUR
    for job in (known, unknown):
        job.figures |= {("memory_bytes", "", ""): 8.0}
    known.figures[("memory_asked_bytes", "", "")] = 16.0
    usage = usage_by(by, lambda *_: [unknown, known], None, 0.0, HOUR)
    for row in (usage.total, *([] if by == "job" else usage.rows)):
        plain = row.as_dict(by)
        assert (row.cpu_hours, plain["cpu_use"], plain["cpu_coverage"]) == (4.0, 0.25, 1.0)
        assert (plain["memory_use"], plain["memory_coverage"]) == (0.5, 1.0)


def test_a_few_steps_are_said_to_be_few():
    short = record("1", gpu_h=0.0)
    short.figures |= {("stall_s", "decode", ""): 2.0, ("batches", "", ""): 1.0}
    assert short.stall is None
    text = JobReport(short).text()
    assert "too few to give a share" in text
    assert "100" not in text
    left = starving_of([short], 0.0, HOUR)
    assert not left.jobs
    assert left.notes == [
        "1 more job waited for data, in too few steps to give a share: left out"
    ]  # fmt: skip
    short.figures["batches", "", ""] = 10.0
    assert short.stall == 1.0
    slow = record("2", gpu_h=0.0)
    slow.figures |= {("stall_s", "decode", ""): 30.0, ("batches", "", ""): 1.0}
    assert slow.stall == 1.0


def test_who_waits_for_decoding_is_not_told_to_ask_for_fewer_cpus():
    job = record("1", gpu_h=0.0)
    job.figures |= {
        ("seconds", "", ""): 100.0, ("cpus_s", "", ""): 400.0, ("cpu_s", "", ""): 40.0,
        ("stall_s", "decode", ""): 50.0, ("worked_s", "", ""): 50.0,
    }  # fmt: skip
    assert not use_of(job).advice
    job.figures["stall_s", "decode", ""] = 0.0
    assert use_of(job).advice == ("1 CPU a node: 0.4 of 4 worked",)


def test_nobody_starves():
    assert "nobody starved" in starving_of([], 0.0, 1.0).answer


def test_hours_from_the_books_and_shares_from_the_history():
    records = [record("1", lost_h=0.5, gpu_h=2.0, busy=0.4), record("9_1", user="zoe")]
    books = [
        Book("1"), Book("2"), Book("3", user="bob", started_s=-HOUR, ended_s=None),
        Book("4", started_s=None), Book("5", started_s=9 * HOUR, ended_s=None),
    ]  # fmt: skip
    found = usage_by("user", lambda *_: records, books, 0.0, 2 * HOUR)
    ann, bob = sorted(found.rows, key=lambda row: row.names)
    assert found.source == "slurm"
    assert (ann.jobs, ann.gpu_hours, ann.use.gpu.coverage) == (2, 4.0, 0.5)
    assert ann.as_dict("user")["gpu_use"] == pytest.approx(0.4)
    assert ann.stall == pytest.approx(0.25)
    # Nobody looked at half of it: what it was good for is not known.
    assert ann.use.gpu.share is ann.as_dict("user")["efficiency"] is None
    assert (bob.gpu_hours, bob.use.gpu.share, bob.stall) == (4.0, None, None)
    assert found.total.jobs == 3


def test_books_that_count_no_gpus_are_helped_by_the_history():
    found = usage_by(
        "user", lambda *_: [record("1", gpu_h=3.0)], [Book("1", gpu_count=0)], 0.0, HOUR
    )
    assert found.total.gpu_hours == 3


def test_tasks_of_an_array_are_found_by_their_other_name():
    found = usage_by(
        "user", lambda *_: [record("18", alias="17_1", lost_h=0.5)], [Book("17_1")], 0.0, HOUR
    )
    assert found.total.lost_gpu_hours == 0.5


def test_the_day_on_which_the_clock_is_changed_is_one_day(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        since_s, until_s = (time.mktime((2026, 10, day, 0, 0, 0, 0, 0, -1)) for day in (24, 27))
        asked = []

        def records_of(begin_s, end_s):
            asked.append((end_s - begin_s) / HOUR)
            return [record("1")]

        found = usage_by("day", records_of, None, since_s, until_s)
    time.tzset()
    assert [row.names for row in found.rows] == [
        ("2026-10-24",), ("2026-10-25",), ("2026-10-26",),
    ]  # fmt: skip
    assert asked == [73, 24, 25, 24]


def test_hours_of_the_history_alone():
    found = usage_by(
        "user", lambda *_: [record("1"), record("2", account="b", lost_h=0.25)], None, 0.0, HOUR
    )
    assert found.source == "history"
    assert {row.names: row.lost_gpu_hours for row in found.rows} == {
        ("ann", "a"): 0, ("ann", "b"): 0.25,
    }  # fmt: skip
    assert {row.use.gpu.share for row in found.rows} == {None}


def used_job(**figures):
    """An hour of two GPUs on a node of 64 CPUs, 512 GB and 4 GPUs."""
    whole = {
        "seconds": HOUR, "gpu_s": 2 * HOUR, "gpu_watched_s": 2 * HOUR, "gpu_busy_s": 0.8 * HOUR,
        "gpus_used": 1, "gpus": 2, "cpus_s": 48 * HOUR, "cpu_s": 4.8 * HOUR,
        "memory_asked_bytes": 384e9, "memory_bytes": 19.2e9, "node_cpus": 64,
        "node_memory_bytes": 512e9, "node_gpus": 4, **figures,
    }  # fmt: skip
    record = JobRecord(job_id="1", nodes=("n0",), measured=True)
    record.figures = {(name, "", ""): value for name, value in whole.items()}
    record.figures["lost_gpu_s", "storage", "/scratch"] = 0.5 * HOUR
    return record


def test_waste_is_told_by_kind_and_what_to_ask_for_next_time():
    use = use_of(used_job())
    assert (use.cpu.share, use.memory.share, use.gpu.share) == pytest.approx((0.1, 0.05, 0.4))
    waste = {kind: seconds / HOUR for kind, seconds in use.waste._asdict().items()}
    # 48 CPUs are those of three GPUs, 384 GB likewise: each keeps one GPU from others.
    assert waste == pytest.approx({"data": 0.5, "idle": 0.7, "cpus": 1.0, "memory": 1.0})
    assert [text.partition(":")[0] for text in use.advice] == [
        "1 GPU", "6 CPUs a node", "--mem=22G",
    ]  # fmt: skip
    # Who uses what it has, or has no more than its GPUs' share, keeps nothing from anybody.
    assert use_of(used_job(cpu_s=48 * HOUR, memory_bytes=384e9)).waste[2:] == (0, 0)
    assert use_of(used_job(cpus_s=32 * HOUR, memory_asked_bytes=256e9)).waste[2:] == (0, 0)


def test_what_is_known_of_less_than_nine_tenths_is_withheld():
    use = use_of(used_job(gpu_watched_s=1.5 * HOUR, seconds=0.8 * HOUR), Booked(HOUR, 1, 48, 2))
    assert (use.gpu.coverage, use.gpu.share) == (0.75, None)
    assert use.cpu.coverage == pytest.approx(0.8)
    assert use.cpu.share is use.memory.share is None
    assert use.advice == ()
    assert use.waste[2:] == (0, 0)
    # The books know the whole job's.
    books = Booked(HOUR, 1, 48, 2, cpu_s=24 * HOUR, memory_asked_bytes=100, memory_bytes=50)
    use = use_of(None, books)
    assert (use.cpu.share, use.memory.share, use.gpu.share) == (0.5, 0.5, None)
    assert use_of(None) == JobUse()


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        (record("1", lost_h=0.3), "it waited for storage on /scratch 30% of its time: pack it"),
        (record("1", lost_h=0.3, measured=False), "of its time, probably: pack it"),
        (record("1", busy=0.9), "nothing to do"),
        (record("1", busy=0.2), "the step itself is the limit"),
        (JobRecord(job_id="1"), "nothing is known of its steps"),
    ],
)
def test_hints(job, hint):
    assert hint in hint_of(job)


@pytest.mark.parametrize("cause", ["storage", "metadata", "latency", "bandwidth", "network"])
@pytest.mark.parametrize("gpu", [True, False])
def test_who_has_staged_is_not_told_to(cause, gpu):
    job = JobRecord(job_id="1", measured=True)
    job.figures = {("stall_s", cause, "headrace://job"): 50.0, ("worked_s", "", ""): 50.0}
    if gpu:
        job.figures["lost_gpu_s", cause, "headrace://job"] = 50.0
    hint = hint_of(job)
    assert " on headrace://job 50% of its time: its data are staged" in hint
    assert "stage it" not in hint
    assert "--stage" not in hint


def test_a_cause_that_nobody_knows_is_another_one():
    job = record("1")
    job.figures["stall_s", "metadata latency", "/home"] = HOUR
    assert next(iter(job.waited)) is Cause.OTHER
    assert "it waited for handing over, or what nobody measured" in hint_of(job)


def test_a_job_that_failed_is_not_told_that_there_is_nothing_to_do():
    report = JobReport(record("1", busy=0.9))
    assert "nothing to do" in report.text()
    failed = replace(report, failed=True)
    assert "hint" not in failed.text()
    assert failed.as_dict()["hint"] == ""


def test_a_report_without_anything_is_one():
    text = JobReport(JobRecord(job_id="1"), ("n1.telemetry: damaged",)).text()
    assert text.startswith("headrace: job 1, 0 nodes, 0 s, stalls inferred")
    assert "damaged" in text


def test_hours_are_short_and_never_nothing():
    assert [hours_text(h) for h in (0.0, 1e-5, 0.0042, 0.5, 12.3, 12345.6)] == [
        "0.00", "under 0.0001", "0.0042", "0.50", "12.30", "12,345.6",
    ]  # fmt: skip


def test_a_report_says_of_whom_its_seconds_are_and_which_hours_were_had():
    text = JobReport(used_job()).text()
    assert "4.80 hours used of 48.00 had, 10% of 48 CPUs a node" in text
    steps = JobReport(record("1", lost_h=0.5)).text()
    assert "worked 1,800.0 s over all ranks, 0 samples" in steps
