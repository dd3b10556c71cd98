"""The queue's figures, and its screens: each width is compared whole with a kept file."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from cluster.clusters import NOW_S, busy, cluster, hal, huge, node
from headrace.cli.cluster_queue import queue_view, span_text, status_table
from headrace.cluster.executor import JobState, JobStatus
from headrace.cluster.manifest import write_manifest
from headrace.cluster.snapshot import (
    Allocation,
    ClusterJob,
    Partition,
    queue_board,
    reason_text,
    task_count,
)

HERE = Path(__file__).parent
STALLS = {"102": 0.31, "101": 0.02}


def screen(board, width=120, rows=20, *, colour=False):
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=colour, color_system="256" if colour else None
    )
    console.print(queue_view(board, width, rows))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [140, 90, 60, 40])
def test_the_screen_is_as_it_was_kept(width):
    shown = screen(queue_board(busy(), stalls=STALLS), width)
    assert shown == (HERE / f"expected/queue-{width}.txt").read_text()


@pytest.mark.parametrize("width", [30, 50, 80, 200])
@pytest.mark.parametrize("which", [busy, hal, lambda: huge(60, 600)])
def test_no_line_is_wider_than_the_terminal(which, width):
    for line in screen(queue_board(which(), stalls=STALLS), width).splitlines():
        assert len(line) <= width, line


def test_totals():
    totals = queue_board(busy()).totals
    assert (totals.nodes, totals.nodes_free, totals.nodes_away) == (4, 1, 1)
    assert (totals.gpus, totals.gpus_used, totals.gpus_free, totals.gpus_away) == (16, 6, 6, 4)
    assert (totals.running, totals.waiting, totals.gpus_wanted) == (2, 10, 37)


def test_who_has_which_gpu():
    rows = {row.node.name: row for row in queue_board(busy()).nodes}
    assert rows["gpu0"].holders == ("102", "", "101", "")
    assert rows["gpu1"].holders == ("102",) * 4
    assert rows["gpu2"].gpus_free == 4
    assert rows["gpu3"].gpus_free == 0


def test_gpus_whose_indices_nobody_says_are_counted_once():
    """An old Slurm says that two of a job's GPUs are on the node, and not which."""
    job = ClusterJob("7", "x", "ann", "a", "p", JobState.RUNNING, nodes=("n",), gpu_count=2,
              allocations=(Allocation("n", 8, 1, 2),), started_s=NOW_S)  # fmt: skip
    partitions = [Partition("p", ("n",))]
    row = queue_board(cluster([node("n", 4)], partitions, [job])).nodes[0]
    assert (row.holders, row.unplaced_gpus, row.gpus_free) == (("",) * 4, 2, 2)
    row = queue_board(cluster([node("n", 4, gpus_allocated=(1, 3))], partitions, [job])).nodes[0]
    assert (row.holders, row.unplaced_gpus, row.gpus_free) == (("", "?", "", "?"), 0, 2)


def test_indices_beyond_a_nodes_gpus_do_no_harm():
    job = ClusterJob("7", "x", "ann", "a", "p", JobState.RUNNING, nodes=("n",),
              allocations=(Allocation("n", 8, 1, 1, (9,)),))  # fmt: skip
    board = queue_board(
        cluster([node("n", 2, gpus_allocated=(9,))], [Partition("p", ("n",))], [job])
    )
    assert board.nodes[0].holders == ("", "")
    screen(board)


@pytest.mark.parametrize(
    ("picked", "nodes", "running", "waiting"),
    [
        ({}, 4, 2, 3), ({"users": ["ann"]}, 1, 1, 2), ({"nodes": ["gpu1"]}, 1, 1, 0),
        ({"users": ["ann"], "nodes": ["gpu1"]}, 0, 0, 0), ({"users": ["nobody"]}, 0, 0, 0),
        ({"partitions": ["other"]}, 0, 0, 0),
    ],
)  # fmt: skip
def test_what_is_selected(picked, nodes, running, waiting):
    board = queue_board(busy(), **picked)
    assert (len(board.nodes), len(board.running), len(board.waiting)) == (nodes, running, waiting)
    assert board.totals.nodes == 4


def test_times_and_reasons():
    board = queue_board(busy(), stalls=STALLS)
    first, second = board.running
    assert (first.job.job_id, first.ran_s, first.ends_in_s, first.stall) == (
        "102",
        7200,
        None,
        0.31,
    )
    assert (second.ends_in_s, second.gpu_indices) == (10_800, {"gpu0": (2,)})
    assert [row.job.job_id for row in board.waiting] == ["103_1", "103_[2-9]", "104"]
    assert (board.waiting[0].waited_s, board.waiting[0].starts_in_s) == (600, 5400)


def test_a_clock_that_is_behind_makes_no_negative_times():
    early = dataclasses.replace(busy(), taken_s=NOW_S - 100_000)
    board = queue_board(early)
    assert all((row.ran_s or 0) >= 0 for row in board.running)
    assert all((row.waited_s or 0) >= 0 for row in board.waiting)
    screen(board)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Resources", "first in line: waits until enough is free"), ("(Priority)", "others are ahead"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", "nodes it asks for are away or reserved"),
        ("QOSMaxGRESPerUser", "as many GPUs as its QoS lets a user have"),
        ("AssocGrpGRES", "all that its account has is in use"), ("NewInSlurm31", "NewInSlurm31"),
        ("", "the scheduler has not looked at it yet"),
    ],
)  # fmt: skip
def test_reasons_in_words(reason, text):
    assert reason_text(reason) == text


@pytest.mark.parametrize(
    ("job_id", "count"),
    [
        ("17", 1),
        ("17_3", 1),
        ("17_[2-9]", 8),
        ("17_[1,3,5-7%2]", 5),
        ("17_[0-999...]", 1),
        ("17_[0-10:5]", 3),
    ],
)
def test_the_tasks_of_an_array_that_wait_are_counted(job_id, count):
    assert task_count(job_id) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0m"),
        (59, "1m"),
        (3540, "59m"),
        (3600, "1h 00m"),
        (86_399, "1d 00h"),
        (180_000, "2d 02h"),
        (-5, "0m"),
    ],
)
def test_spans(seconds, text):
    assert span_text(seconds) == text


def test_what_does_not_fit_is_counted():
    shown = screen(queue_board(huge(100, 600)), 120, 5)
    assert len(shown.splitlines()) < 40
    assert len(re.findall(r"… [\d,]+ more (?:nodes|jobs|users)", shown)) == 4
    everything = screen(queue_board(huge(100, 600)), 120, None)
    assert "more" not in everything
    assert len(everything.splitlines()) > 600


def test_nodes_that_are_alike_share_a_line():
    shown = screen(queue_board(hal()))
    assert (
        len([line for line in shown.splitlines() if line.startswith("hal")]) == 2
    )  # the title, and all 16 nodes
    assert "hal[01-16]" in shown
    assert "no jobs" in shown


def test_names_cannot_move_the_cursor():
    job = ClusterJob(
        "7", "\x1b[2J\nx", "\x1b[31mann", "a", "p", JobState.PENDING, reason="\x1b]0;x\x07"
    )
    shown = screen(queue_board(cluster([node("n")], [Partition("p", ("n",))], [job])), 200)
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_names_are_shown_as_they_are_written():
    for name in ("train[/x]", "[red]x", "a[lr=1]"):
        job = ClusterJob("7", name, "[bold]ann", "a", "p", JobState.PENDING, reason="Priority")
        shown = screen(queue_board(cluster([node("n")], [Partition("p", ("n",))], [job])), 200)
        assert name in shown
        assert "[bold]ann" in shown


def test_colours_are_for_terminals():
    board = queue_board(busy())
    assert "\x1b[" in screen(board, colour=True)
    assert "\x1b[" not in screen(board)


def test_a_cluster_without_gpus_shows_its_cpus():
    shown = screen(queue_board(cluster([node("n", cpus_allocated=16)], [Partition("p", ("n",))])))
    assert "CPUs ██" in shown
    assert "GPUs " not in shown.splitlines()[1]


def test_an_empty_cluster():
    assert "0 nodes" in screen(queue_board(cluster([], [])))


@pytest.mark.parametrize(
    ("home", "shown"),
    [("/home/al", "/home/alice/run"), ("/home/alice", "~/run"), ("/", "~/home/alice/run")],
)
def test_what_lies_in_the_home_folder_is_shortened(monkeypatch, home, shown):
    monkeypatch.setenv("HOME", home)
    status = JobStatus("7", "train", JobState.RUNNING, folder=Path("/home/alice/run"))
    table = status_table([status], folders=True)
    assert [str(cell) for cell in table.columns[2].cells] == [shown]


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ({"exit_code": 1}, "exit code 1"),
        ({"exit_code": 137}, "exit code 137: killed by signal 9, often out of memory"),
        ({"exit_code": 143}, "exit code 143: killed by signal 15"),
        ({"signal": 9}, "killed by signal 9, often out of memory"),
        ({"exit_code": 2, "restarts": 1}, "exit code 2, restarted once"),
        ({"exit_code": 143, "state": JobState.CANCELLED}, ""),  # it did as it was asked
        (
            {"signal": 15, "state": JobState.TIMEOUT, "resumed": "resumed at step 9"},
            "resumed at step 9",
        ),
        (
            {"exit_code": 1, "cause": "rank 1 (node b) ended with status 1"},
            "rank 1 (node b) ended with status 1",
        ),
    ],
)
def test_how_a_job_ended_is_readable_in_80_columns(ending, why):
    status = JobStatus(
        "4711",
        "a-job-with-a-long-name",
        nodes=("gpu[0-3]",),
        **{"state": JobState.FAILED, **ending},
    )
    assert why.startswith(status.why)
    out = io.StringIO()
    Console(file=out, width=80).print(status_table([status]))
    shown = " ".join(out.getvalue().split())
    assert f"4711 a-job-with-a-long-name {status.state.lower()}" in shown
    assert shown.endswith(why.split()[-1] if why else "gpu[0-3]")


def test_tasks_that_are_alike_share_a_line_whatever_their_launches_say(tmp_path):
    """A line of one task says what its launch did."""
    for task, code in enumerate((1, 1, 7)):
        result = {"why": f"rank {task} ended with status {code}", "resumed": "resumed at step 21"}
        result["outcome"] = "failed"
        manifest = {"run": {"began_s": 100.0}, "layout": {"nodes": 1}, "result": result}
        write_manifest(tmp_path / f"headrace-runs/9_{task}-0.json", manifest)
    tasks = [
        JobStatus(
            f"9_{task}",
            "sweep",
            JobState.FAILED,
            exit_code=code,
            folder=tmp_path,
            submitted_s=99.0,
            started_s=100.0,
            ended_s=110.0 + task,
        )
        for task, code in enumerate((1, 1, 7))
    ]
    out = io.StringIO()
    Console(file=out, width=120).print(status_table(tasks))
    _, alike, one = out.getvalue().splitlines()
    assert alike.split() == ["9_[0-1]", "sweep", "failed", "10s", "to", "11s", "exit", "code", "1"]
    assert one.endswith(" rank 2 ended with status 7, resumed at step 21")
