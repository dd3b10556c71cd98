"""The scaling table: speed beside accuracy, and what is said of runs that are fast because they learn less."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.scaling import (
    EpochLine,
    ScalingOptions,
    ScalingRun,
    measure,
    read_epochs,
    scaling_table,
    table_text,
)
from headrace.cluster.executor import JobState, JobStatus
from headrace.errors import BenchError, ClusterTimeout


def run_of(ranks, seconds, accuracy, *, wall_s=None, epochs=2, state="COMPLETED", samples=1000):
    lines = tuple(
        EpochLine(n, samples, seconds, accuracy, waited_s=seconds / 4, reads=samples, bytes=10**6)
        for n in range(epochs)
    )
    wall = epochs * seconds + 2.0 if wall_s is None else wall_s
    return ScalingRun(ranks, 1, str(ranks), state, wall, lines, f"ranks-{ranks}/job.log")


HAL = {2: (1582, 0.7606), 4: (3003, 0.7624), 8: (5807, 0.7629), 16: (11265, 0.7627),
       32: (19459, 0.7591), 64: (33132, 0.7514)}  # fmt: skip
"""Ranks, img/s and top-1 of HAL's ResNet-50, February 2020."""


def test_h12_a_run_that_is_faster_and_learns_less_is_flagged():
    """HAL's runs of May 2020: 80 percent efficient on 64 GPUs, and top-1 fell from 76.2 to 71.9."""
    table = scaling_table([run_of(4, 2.0, 0.762), run_of(64, 0.15625, 0.719)])
    first, last = table.rows
    assert last.efficiency == pytest.approx(0.8)
    assert not first.accuracy_fell
    assert last.accuracy_fell
    (finding,) = table.findings
    assert "64 ranks" in finding
    assert "4.30 points below" in finding
    assert "71.90% !" in table_text(table)
    assert finding in table_text(table)


def test_hals_own_table_comes_out_as_it_was_published():
    runs = [run_of(n, 1000 / rate, top1) for n, (rate, top1) in HAL.items()]
    table = scaling_table(runs)
    efficiency = [round(100 * row.efficiency, 1) for row in table.rows]
    # 65.5 from rates that were not rounded
    assert efficiency == [100.0, 94.9, 91.8, 89.0, 76.9, 65.4]
    assert [row.hal_efficiency for row in table.rows] == pytest.approx(
        [row.efficiency for row in table.rows]
    )
    others = scaling_table([run_of(1, 2.0, 0.7), run_of(2, 1.0, 0.7)])
    assert [row.hal_efficiency for row in others.rows] == [None, None]
    assert [row.accuracy_fell for row in table.rows] == [False] * 6
    assert scaling_table(runs, tolerance=0.009).rows[-1].accuracy_fell


def test_a_fall_of_just_the_tolerance_is_none():
    table = scaling_table([run_of(1, 2.0, 0.75), run_of(2, 1.0, 0.74)], tolerance=0.01)
    assert not table.findings


def test_parts_add_up_to_the_wall_time():
    table = scaling_table([run_of(1, 2.0, 0.7, wall_s=10.0)])
    split = table.rows[0].split
    assert split.waiting_s == 1.0
    assert split.computing_s == 3.0
    assert split.other_s == 6.0
    assert table.rows[0].whole_per_s == pytest.approx(200.0)
    assert table.rows[0].reads_per_s == pytest.approx(500.0)
    assert table.rows[0].bytes_per_s == pytest.approx(5e5)


def test_what_passed_before_the_first_epoch_and_after_the_last_is_told_from_the_lines_times():
    """A job of 20 s that began at 100: an epoch from 106 to 109, another from 110 to 113, tests of 1 s."""
    epochs = tuple(
        EpochLine(n, 1000, 3.0, 0.7, evaluated_s=1.0, at_s=at) for n, at in ((0, 110.0), (1, 114.5))
    )
    run = ScalingRun(2, 1, "1", "COMPLETED", 20.0, epochs, started_s=100.0)
    split = scaling_table([run]).rows[0].split
    assert (split.starting_s, split.ending_s, split.other_s) == (6.0, 5.5, 0.5)
    late = scaling_table([replace(run, started_s=107.0)]).rows[0].split
    assert (late.starting_s, late.ending_s, late.other_s) == (0.0, 12.0, 0.0)
    unknown = scaling_table([replace(run, started_s=None)]).rows[0].split
    assert (unknown.starting_s, unknown.ending_s, unknown.other_s) == (0.0, 0.0, 12.0)


def test_sizes_that_failed_are_told_and_not_compared_with():
    runs = [run_of(1, 2.0, 0.7, state="FAILED", epochs=1), run_of(2, 1.0, 0.7), run_of(4, 0.6, 0.7)]
    table = scaling_table(runs)
    assert [row.efficiency for row in table.rows][:2] == [None, 1.0]
    assert table.rows[2].efficiency == pytest.approx(1 / 0.6 / 2)
    assert table.findings == (
        "1 rank: the job ended as FAILED after 1 of 2 epochs: ranks-1/job.log",
    )
    assert "FAILED" in table_text(table)
    nothing = scaling_table([run_of(1, 2.0, 0.7, state="TIMEOUT", epochs=0)])
    assert "TIMEOUT" in table_text(nothing)


@pytest.mark.parametrize(
    ("runs", "tolerance"), [([], 0.01), ([1, 1], 0.01), ([1], 1.0), ([1], -0.1)]
)
def test_what_makes_no_table_is_refused(runs, tolerance):
    with pytest.raises(ValueError, match="expected"):
        scaling_table([run_of(n, 1.0, 0.5) for n in runs], tolerance)


def test_lines_are_found_among_whatever_else_a_log_has():
    good = {"epoch": 0, "samples": 10, "seconds": 2.0, "accuracy": 0.5, "loss": 1.25}
    log = "\n".join(
        [
            "WARNING: {not json} epoch",
            json.dumps({"epoch": 1, "loss": 3}),
            "[rank0]: " + json.dumps(good),
            json.dumps(good | {"epoch": 1, "samples": 4}),
            json.dumps(good | {"epoch": 1, "reads": 7}),  # the epoch was begun anew
            json.dumps(good | {"epoch": 2, "seconds": 0}),
            json.dumps(good | {"epoch": 3, "accuracy": None}),
            json.dumps(good | {"epoch": 4, "accuracy": "high"}),
            json.dumps(good | {"epoch": 5, "seconds": -1.0}),
            json.dumps(good | {"epoch": 6})[:-1],
            '{"epoch": 7, "samples": 10, "seconds": NaN, "accuracy": 0.5}',
            '{"epoch": ' + "9" * 70000 + "}",
        ]
    )
    assert read_epochs(log) == (EpochLine(0, 10, 2.0, 0.5), EpochLine(1, 10, 2.0, 0.5, reads=7))


class OneAtATime:
    """An executor whose jobs print what is asked, and that refuses two at once."""

    name = "fake"

    def __init__(self, log_of):
        self.log_of = log_of
        self.submitted = []
        self.running = None
        self.cancelled = []

    def submit(self, submission):
        assert self.running is None
        self.submitted.append(submission)
        self.running = str(len(self.submitted))
        return self.running

    def wait(self, job_ids, timeout_s=None):
        assert job_ids == [self.running]
        if timeout_s == 0:
            raise ClusterTimeout("it still runs")
        self.running = None
        status = JobStatus(job_ids[0], "x", JobState.COMPLETED, started_s=100.0, ended_s=107.5)
        return {job_ids[0]: [status]}

    def logs(self, job_id, *, follow=False):  # noqa: ARG002 - as every executor has it
        yield self.log_of(self.submitted[int(job_id) - 1]).encode()

    def cancel(self, job_ids, signal=None):  # noqa: ARG002 - likewise
        self.cancelled += job_ids


def project(folder: Path) -> Path:
    folder.mkdir()
    (folder / "job.sh").write_bytes(b"#!/bin/bash\necho \xff\n")
    return folder


def line(submission):
    return '{"epoch": 0, "samples": 8, "seconds": 2, "accuracy": 0.5}\n'


def test_each_size_is_the_users_own_script_with_its_size_on_the_command_line(tmp_path):
    executor = OneAtATime(line)
    options = ScalingOptions(
        project=project(tmp_path / "p"), ranks=(8, 1, 6), out=tmp_path / "out", gpus=True,
        options=("--partition=gpu",), arguments=("--epochs", "1"),
    )  # fmt: skip
    runs = list(measure(executor, options))
    assert [(run.ranks, run.nodes, run.wall_s) for run in runs] == [
        (1, 1, 7.5),
        (6, 2, 7.5),
        (8, 2, 7.5),
    ]
    last = executor.submitted[-1]
    assert last.script == b"#!/bin/bash\necho \xff\n"
    log = tmp_path / "out" / "ranks-8" / "job.log"
    assert last.options == (
        "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--job-name=scaling-8",
        f"--output={log}", "--partition=gpu",
    )  # fmt: skip
    checkpoints = {submission.arguments[1] for submission in executor.submitted}
    assert len(checkpoints) == 3
    assert last.arguments == ("--checkpoints", str(log.with_name("checkpoints")), "--epochs", "1")
    assert last.directory == tmp_path / "p"


def test_a_job_that_nobody_waits_for_any_more_is_cancelled(tmp_path):
    executor = OneAtATime(line)
    options = ScalingOptions(project=project(tmp_path / "p"), out=tmp_path / "out", timeout_s=0)
    with pytest.raises(ClusterTimeout):
        list(measure(executor, options))
    assert executor.cancelled == ["1"]


def test_what_cannot_be_measured_is_refused_before_anything_runs(tmp_path):
    executor = OneAtATime(line)
    with pytest.raises(BenchError, match="headrace init"):
        measure(executor, ScalingOptions(project=tmp_path / "nothing", out=tmp_path / "out"))
    options = ScalingOptions(project=project(tmp_path / "p"), out=tmp_path)
    with pytest.raises(BenchError, match="--out"):
        measure(executor, options)
    assert executor.submitted == []
    for ranks in ((), (0,), (2, 2)):
        with pytest.raises(ValueError, match="ranks"):
            ScalingOptions(project=tmp_path, ranks=ranks)
