"""Accounts: what jobs had and lost adds up, whatever is told twice, late, by whom and in which order."""

import contextlib
import json
from dataclasses import replace

import pytest

from headrace.machine.sensors import GPU
from headrace.telemetry.accounts import KEPT_S, infer
from headrace.telemetry.history import ENDED, FileHistory, JobRecord, running_parts
from headrace.telemetry.messages import parse_message
from headrace.telemetry.processes import GroupUse
from headrace.telemetry.writing import HistoryWriter, file_of
from telemetry.shared import T0, accounts, message, now, processes, seen, totals


def tell(book, at, **given):
    book.report(parse_message(message(**given), 1, 1000), now(at))


def test_a_rank_for_each_gpu_loses_what_it_waits():
    book, ledger = accounts()
    for rank in range(4):
        tell(book, 10, instance=f"{rank:032x}", gpus=4, ranks=4, worked=6,
             stall={"/scratch": {"storage": 3.0, "decode": 1.0}})  # fmt: skip
    amounts = totals(ledger)
    assert amounts["stall_s", "storage", "/scratch"] == 12
    assert amounts["lost_gpu_s", "storage", "/scratch"] == 12
    assert amounts["lost_gpu_s", "decode", "/scratch"] == 4
    assert amounts["worked_s", "", ""] == 24


def test_one_process_with_all_gpus_loses_them_all():
    book, ledger = accounts()
    tell(book, 10, gpus=8, stall={"": {"storage": 3.0}})
    assert totals(ledger)["lost_gpu_s", "storage", ""] == 24


def test_what_is_told_again_counts_once_and_what_was_lost_counts_late():
    book, ledger = accounts()
    for at, waited in ((2, 1.0), (4, 1.0), (30, 9.0)):
        tell(book, at, stall={"/": {"storage": waited}})
    assert totals(ledger)["stall_s", "storage", "/"] == 9


def test_an_agent_that_comes_again_counts_from_what_was_told():
    book, ledger = accounts()
    tell(book, 2, stall={"/": {"storage": 5.0}})
    page = ledger.take()
    again, second = accounts(
        reports={instance: figures for instance, (_, _, figures) in page.reports.items()},
        last_seen={"4711": page.jobs["4711"].last_s},
    )
    again.report(parse_message(message(stall={"/": {"storage": 7.0}}), 1, 1000), now(10))
    assert totals(second)["stall_s", "storage", "/"] == 2
    assert totals(second)["seconds", "", ""] == pytest.approx(8)


def test_a_worker_of_a_dataloader_brings_bytes_but_no_steps():
    book, ledger = accounts()
    tell(book, 2, consumer=False, worked=5, stall={"/": {"storage": 5.0}},
         tiers={"/": {"source": 100}})  # fmt: skip
    amounts = totals(ledger)
    assert amounts["tier_bytes", "source", "/"] == 100
    assert not any(name in ("stall_s", "worked_s", "lost_gpu_s") for name, _, _ in amounts)
    assert not book.facts()["4711"].measured


def test_nobody_speaks_for_somebody_elses_job():
    book, ledger = accounts()
    book.observe(seen(processes(uid=1000)), 5, now(5))
    book.report(parse_message(message(stall={"/": {"storage": 1e9}}), 66, 1001), now(6))
    assert book.refused == 1
    assert not any(key[1] == "stall_s" for key in ledger.totals)


def test_what_the_node_daemon_was_waited_for_gets_the_causes_that_it_knows():
    book, ledger = accounts()
    tell(book, 2, gpus=1, stall={"/data": {"node": 8.0}})
    assert book.waiting_for_node() == ["4711"]
    book.explain_node({"4711": {"storage": 3.0, "window": 1.0, "memory": 0.0}}, now(3))
    amounts = totals(ledger)
    assert amounts["stall_s", "storage", "/data"] == 6
    assert amounts["lost_gpu_s", "window", "/data"] == 2
    assert not book.waiting_for_node()
    tell(book, 4, gpus=1, stall={"/data": {"node": 9.0}})
    book.explain_node({}, now(5))
    assert totals(ledger)["stall_s", "storage", "/data"] == 7


def test_gpu_hours_run_from_the_jobs_beginning_to_its_last_word():
    book, ledger = accounts()
    book.observe(seen(processes(gpus=2)), 5, now(30))
    assert totals(ledger)["gpu_s", "", ""] == pytest.approx(60)
    book.observe(seen(processes(gpus=2)), 5, now(35))
    tell(book, 38.5, gpus=2, ended=True)
    book.observe(seen(), 5, now(40))
    assert totals(ledger)["gpu_s", "", ""] == pytest.approx(77)
    assert book.running == []
    book.observe(seen(), 5, now(41 + KEPT_S))
    assert totals(ledger) == {}
    assert book.facts() == {}


def notify(book, at, kind, *, sender=0, **given):
    text = {
        "v": 1,
        "notice": kind,
        "at_s": T0 + at,
        "uid": 1000,
        "job": {"job_id": "4711", "cpus": 4},
        **given,
    }
    book.notice(parse_message(json.dumps(text, separators=(",", ":")).encode(), 1, sender), now(at))


def test_between_prolog_and_epilog_nothing_is_missed():
    """However rarely the agent looks: here once, three seconds after the job began."""
    book, ledger = accounts()
    notify(book, 10, "begin")
    assert book.expecting(1011)
    gpus = [GPU(index=0, busy=0.5, processes=(1,)), GPU(index=1, busy=0.0, memory_total_bytes=80e9)]
    one = processes(began=T0 + 12, gpus=2, cpu_s=0.5)
    one.identity = replace(one.identity, gpu_indices=(0, 1), memory_bytes=1 << 30, partition="gpu")
    book.observe(seen(one, gpus=gpus), 30, now(13))
    assert not book.expecting(1014)
    notify(book, 19, "step", step="0", cpu_s=2.0, sender=1000)
    notify(book, 19, "step", step="0", cpu_s=2.5, sender=1000)
    notify(book, 19.5, "step", step="batch", cpu_s=1.0, sender=1000)
    notify(book, 20, "end")
    book.observe(seen(), 5, now(25))
    amounts = totals(ledger)
    assert amounts["seconds", "", ""] == 10
    assert amounts["cpus_s", "", ""] == 40
    assert amounts["gpu_s", "", ""] == amounts["gpu_watched_s", "", ""] == 20
    assert amounts["gpu_busy_s", "", ""] == 5
    assert amounts["cpu_s", "", ""] == 3.5
    assert (amounts["gpus", "", ""], amounts["gpus_used", "", ""]) == (2, 1)
    assert amounts["memory_asked_bytes", "", ""] == 1 << 30
    assert amounts["partition", "gpu", ""] == 1
    assert book.running == []


def test_a_job_that_is_requeued_did_not_have_what_passed_in_between():
    book, ledger = accounts()
    for began in (0, 130):
        notify(book, began, "begin")
        book.observe(seen(processes(pids=(began + 1,), began=T0 + began)), 5, now(began + 5))
        notify(book, began + 10, "step", step="batch", cpu_s=4.0)
        notify(book, began + 10, "end")
        book.observe(seen(), 5, now(began + 12))
    assert totals(ledger)["seconds", "", ""] == 20
    assert totals(ledger)["cpu_s", "", ""] == 8
    notify(book, 200, "begin")
    notify(book, 205, "begin")  # said twice: the first one counts
    notify(book, 210, "end")
    assert totals(ledger)["seconds", "", ""] == 30


def test_only_root_begins_and_ends_jobs_and_a_step_is_its_owners_and_no_more_than_there_was():
    book, ledger = accounts()
    notify(book, 10, "begin", sender=1000)
    assert book.facts() == {}
    notify(book, 10, "begin")
    notify(book, 15, "end", sender=1000)
    notify(book, 15, "step", step="0", cpu_s=9.0, sender=1001)
    assert (book.running, book.refused) == (["4711"], 3)
    notify(book, 15, "step", step="0", cpu_s=1e9, sender=1000)
    assert totals(ledger)["cpu_s", "", ""] == 4 * 5


def test_an_agent_that_comes_again_counts_no_cpu_time_twice():
    book, ledger = accounts(last_seen={"4711": T0 + 100})
    book.observe(seen(processes(cpu_s=80.0)), 5, now(105))
    book.observe(seen(processes(cpu_s=2.0)), 5, now(110))
    notify(book, 111, "step", step="batch", cpu_s=83.0)
    assert totals(ledger)["cpu_s", "", ""] == 2


def test_gpus_are_a_jobs_by_their_processes_or_their_numbers():
    book, ledger = accounts()
    gpus = [
        GPU(index=0, busy=0.5, memory_bytes=3.0, processes=(1,)),
        GPU(index=1, busy=0.2, memory_bytes=4.0, processes=(99,)),
        GPU(index=2, busy=1.0, memory_bytes=9.0),
    ]
    book.observe(
        seen(processes(), gpus=gpus, job_of=lambda pid: "4711" if pid == 99 else ""), 5, now(5)
    )
    book.observe(
        seen(processes(), gpus=gpus, job_of=lambda pid: "4711" if pid == 99 else ""), 5, now(10)
    )
    amounts = totals(ledger)
    assert amounts["gpu_watched_s", "", ""] == 10
    assert amounts["gpu_busy_s", "", ""] == pytest.approx(3.5)
    assert amounts["gpu_memory_bytes", "", ""] == 7
    assert amounts["gpus", "", ""] == 2


def test_a_long_sleep_of_the_machine_is_no_gpu_work():
    book, ledger = accounts(usual_s=5.0)
    gpus = [GPU(index=0, busy=1.0, processes=(1,))]
    book.observe(seen(processes(), gpus=gpus), 5, now(5))
    book.observe(seen(processes(), gpus=gpus), 3600, now(3605))
    assert totals(ledger)["gpu_busy_s", "", ""] == 15


def test_a_group_tells_of_processes_that_came_and_went():
    book, ledger = accounts()
    groups = {"4711": GroupUse(cpu_s=100.0, memory_bytes=50.0, io_pressure_s=7.0)}
    book.observe(seen(processes(cpu_s=3.0), groups=groups), 5, now(5))
    groups = {"4711": GroupUse(cpu_s=110.0, memory_bytes=40.0, io_pressure_s=9.0)}
    book.observe(seen(processes(cpu_s=1.0), groups=groups), 5, now(10))
    amounts = totals(ledger)
    assert amounts["cpu_s", "", ""] == 110
    assert amounts["memory_bytes", "", ""] == 50
    assert amounts["io_pressure_s", "", ""] == 2


def test_what_nobody_measures_is_inferred_and_a_measured_job_is_not():
    book, ledger = accounts()
    gpus = [GPU(index=0, busy=0.25, processes=(1,))]
    book.observe(seen(processes(gpus=1), gpus=gpus), 5, now(5))
    book.observe(seen(processes(gpus=1), gpus=gpus, pressure=3.0, busiest="/scratch"), 5, now(10))
    amounts = totals(ledger)
    assert amounts["inferred_s", "storage", "/scratch"] == pytest.approx(3.0)
    assert amounts["inferred_gpu_s", "storage", "/scratch"] == pytest.approx(3.0)
    tell(book, 11, gpus=1, worked=1)
    book.observe(seen(processes(gpus=1), gpus=gpus, pressure=3.0, busiest="/scratch"), 5, now(15))
    assert totals(ledger)["inferred_s", "storage", "/scratch"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("seen_", "expected"),
    [
        # A GPU idle for 70 %, tasks in I/O for 60 %: they overlap by 60 %.
        ({"gpu_busy": 0.3, "io_pressure": 0.6, "cpu_share": 0.2}, {"storage": 6.0}),
        # A busy GPU waits for nothing, however much somebody reads.
        ({"gpu_busy": 1.0, "io_pressure": 1.0, "cpu_share": 0.2}, {}),
        # An idle GPU behind CPUs that are all busy: decoding.
        ({"gpu_busy": 0.4, "io_pressure": 0.0, "cpu_share": 0.97}, {"decode": 6.0}),
        ({"gpu_busy": 0.4, "io_pressure": 0.1, "cpu_share": 0.97}, {"storage": 1.0, "decode": 5.0}),
        # An idle GPU for another reason is not said to be I/O.
        ({"gpu_busy": 0.1, "io_pressure": 0.0, "cpu_share": 0.1}, {}),
        # No GPU to look at.
        ({"io_pressure": 0.8, "cpu_share": 0.1}, {"storage": 8.0}),
        ({"io_pressure": 0.8, "cpu_share": 0.9}, {}),
        ({"io_pressure": 7.0, "gpu_busy": -3.0}, {"storage": 10.0}),
        ({}, {}),
    ],
)
def test_inference_says_no_more_than_it_sees(seen_, expected):
    assert infer(seconds=10.0, **seen_) == pytest.approx(expected)


def test_a_job_that_ended_is_told_apart_from_one_that_nobody_wrote_of_lately(tmp_path):
    def running():
        writer.write(ledger, now=True)
        return [node for node, _ in running_parts(FileHistory(tmp_path).parts(T0 - 150, T0 + 150))]

    book, ledger = accounts()
    with contextlib.closing(HistoryWriter(file_of(tmp_path, "n0"), "n0")) as writer:
        book.observe(seen(processes()), 5, now(5))
        assert running() == ["n0"]
        book.observe(seen(), 5, now(10))
        assert running() == []
        book.observe(seen(processes()), 5, now(20))  # it was started again
        assert running() == ["n0"]
        book.end_all(now(25))
        assert running() == []


def test_a_node_without_which_a_job_went_on_has_no_part_in_it():
    def part(node, last_s, ended_s=0.0):
        figures = {(ENDED, "", ""): ended_s}
        return node, JobRecord(job_id="1", nodes=(node,), last_s=last_s, figures=figures)

    lost, both = part("n1", 98.0), ["n0", "n1"]
    for parts, expected in (
        ([part("n0", 99.0), lost], both),
        ([part("n0", 99.0, 102.0), lost], ["n1"]),  # it may be about to end, too
        ([part("n0", 120.0, 102.0), lost], both),
        ([part("n0", 140.0, 102.0), lost], ["n0"]),
        ([part("n0", 140.0, 141.0), lost], []),
        ([part("n0", 140.0), lost], both),
    ):
        assert [node for node, _ in running_parts(parts)] == expected


def test_a_jobs_first_minutes_are_kept_by_ten_seconds(tmp_path):
    book, ledger = accounts()
    for at in range(5, 605, 5):
        book.observe(seen(processes(read_bytes=7)), 5, now(at))
    with contextlib.closing(HistoryWriter(file_of(tmp_path, "n0"), "n0")) as writer:
        writer.write(ledger, now=True)
    history, whole = FileHistory(tmp_path), (T0 - 60, T0 + 700)
    fine = history.minutes(*whole, "4711", fine_until_s=T0 + 300)
    minute = T0 - T0 % 60
    assert [at - minute for at in fine] == [*range(20, 360, 10), *range(360, 660, 60)]
    read = [record.total("read_bytes") for (record,) in fine.values()]
    assert read == [7, *[14] * 33, *[84] * 4, 35]
    by_minute = history.minutes(*whole, "4711")
    assert [at - minute for at in by_minute] == [*range(0, 660, 60)]
    assert sum(record.total("read_bytes") for (record,) in by_minute.values()) == sum(read)
