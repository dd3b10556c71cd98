"""What holds of every executor: a class of tests that a test of each inherits.

It gives `ex`, the executor, and `folder`, where jobs may write and which they reach.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.cluster.executor import JobState, JobStatus, Submission
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout
from tests_shared import until

if TYPE_CHECKING:
    from headrace.cluster.executor import Executor

WAIT_S = 60.0


class ExecutorTests:
    """Of an executor and a folder that its jobs reach."""

    @pytest.fixture(autouse=True)
    def _given(self, ex: Executor, folder: Path) -> None:
        self.ex = ex
        self.folder = folder

    def submit(self, script: str | bytes, *options: str, **kwargs) -> str:
        if isinstance(script, str):
            script = f"#!/bin/bash\n{script}\n".encode()
        return self.ex.submit(Submission(script, options, directory=self.folder, **kwargs))

    def end(self, job_id: str) -> JobStatus:
        (status,) = self.ex.wait([job_id], WAIT_S)[job_id]
        return status

    def state(self, job_id: str) -> set[JobState]:
        return {status.state for status in self.ex.status([job_id])[job_id]}

    def becomes(self, job_id: str, state: JobState) -> None:
        assert until(lambda: self.state(job_id) == {state}, WAIT_S), self.ex.status([job_id])

    def output(self, job_id: str) -> bytes:
        return b"".join(self.ex.logs(job_id))

    # -- one job -----------------------------------------------------------------------------------

    def test_a_job_runs_in_its_folder_and_its_output_is_read(self):
        job = self.submit("pwd; echo said >&2", "--job-name=first")
        status = self.end(job)
        assert (status.state, status.exit_code, status.name) == (JobState.COMPLETED, 0, "first")
        assert status.output == self.folder / f"slurm-{job}.out"
        assert status.submitted_s <= status.started_s <= status.ended_s
        assert status.nodes
        assert self.output(job) == f"{self.folder}\nsaid\n".encode()

    def test_the_script_reaches_it_byte_for_byte(self):
        script = (
            b"#!/bin/bash\n#SBATCH --job-name='a b'\n\n\tif true; then\n\t\tcat <<'EOT'\n"
            b'  "quoted" $HOME `x` \xc3\xa9\xe2\x82\xac\n\nEOT\n\tfi\ncat "$0" > copy\n'
        )
        status = self.end(self.submit(script))
        assert status.state == JobState.COMPLETED
        assert status.name == "a b"
        assert (self.folder / "copy").read_bytes() == script
        assert self.output(status.job_id) == b'  "quoted" $HOME `x` \xc3\xa9\xe2\x82\xac\n\n'

    def test_any_interpreter_is_used(self):
        script = b"#!/usr/bin/env python3\nimport sys\nprint(sys.argv[1:])\n"
        job = self.ex.submit(Submission(script, arguments=("a b", "$c"), directory=self.folder))
        assert self.end(job).state == JobState.COMPLETED
        assert self.output(job) == b"['a b', '$c']\n"

    def test_options_win_over_directives(self):
        job = self.submit(
            b"#!/bin/sh\n#SBATCH --job-name=theirs -o theirs.txt\necho x\n", "--job-name=ours"
        )
        assert self.end(job).name == "ours"
        assert (self.folder / "theirs.txt").read_text() == "x\n"

    def test_the_environment_is_given_on_top_of_the_callers(self, monkeypatch):
        monkeypatch.setenv("FROM_CALLER", "1")
        job = self.submit("echo $FROM_CALLER $GIVEN", environment={"GIVEN": "a b"})
        assert self.end(job).state == JobState.COMPLETED
        assert self.output(job) == b"1 a b\n"

    def test_how_a_script_ended_is_known(self):
        failed, killed = self.submit("exit 3"), self.submit("kill -9 $$")
        assert (self.end(failed).state, self.end(failed).exit_code) == (JobState.FAILED, 3)
        ended = self.end(killed)
        assert (ended.state, ended.exit_code, ended.signal) == (JobState.FAILED, None, 9)

    def test_patterns_of_output_are_filled_in(self):
        job = self.submit("echo x", "--job-name=n", "--output=%x-%j-%6j.txt")
        assert self.end(job).output == self.folder / f"n-{job}-{int(job):06d}.txt"
        assert self.output(job) == b"x\n"

    def test_its_log_is_followed_to_its_end(self):
        job = self.submit("for i in 1 2 3; do echo $i; sleep 0.3; done")
        pieces = list(self.ex.logs(job, follow=True))
        assert b"".join(pieces) == b"1\n2\n3\n"
        assert len(pieces) > 1
        assert self.state(job) == {JobState.COMPLETED}

    def test_its_last_lines_are_read_alone(self):
        job = self.submit("seq 30000; printf end")
        self.end(job)
        for lines, text in ((1, b"end"), (2, b"30000\nend"), (40000, self.output(job))):
            assert b"".join(self.ex.logs(job, lines=lines)) == text

    def test_a_users_jobs_are_known(self):
        jobs = [self.submit("true"), self.submit("true", "--array=0-1")]
        assert self.ex.own()[-2:] == jobs
        self.ex.wait(jobs, WAIT_S)

    # -- many --------------------------------------------------------------------------------------

    def test_an_array_has_an_entry_and_an_output_for_each_task(self):
        script = (
            "echo task ${SLURM_ARRAY_TASK_ID:-$HEADRACE_ARRAY_TASK_ID}; exit $SLURM_ARRAY_TASK_ID"
        )
        job = self.submit(script, "--array=0-2", "--output=a-%A_%a.txt")
        statuses = self.ex.wait([job], WAIT_S)[job]
        assert [s.job_id for s in statuses] == [f"{job}_{i}" for i in range(3)]
        assert [s.exit_code for s in statuses] == [0, 1, 2]
        assert self.output(f"{job}_2") == b"task 2\n"
        assert (self.folder / f"a-{job}_1.txt").read_bytes() == b"task 1\n"
        assert self.ex.status([f"{job}_1"])[f"{job}_1"] == [statuses[1]]
        with pytest.raises(ClusterRequestError, match="array"):
            self.output(job)

    def test_a_limit_on_an_array_is_kept(self):
        # Each task fails if another runs beside it.
        job = self.submit("mkdir alone && sleep 0.4 && rmdir alone", "--array=0-2%1")
        assert {s.state for s in self.ex.wait([job], WAIT_S)[job]} == {JobState.COMPLETED}

    def test_a_job_starts_after_the_one_that_it_depends_on(self):
        first = self.submit("sleep 0.5; echo first >>order")
        second = self.submit("echo second >>order", f"--dependency=afterok:{first}")
        assert self.state(second) <= {JobState.PENDING}
        assert self.end(second).state == JobState.COMPLETED
        assert (self.folder / "order").read_text() == "first\nsecond\n"

    def test_what_depends_on_success_never_runs_after_a_failure(self):
        first = self.submit("exit 1")
        never = self.submit("true", f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes")
        anyway = self.submit("true", f"--dependency=afterany:{first}")
        sad = self.submit("true", f"--dependency=afternotok:{first}")
        assert self.end(never).state == JobState.CANCELLED
        assert self.end(anyway).state == JobState.COMPLETED
        assert self.end(sad).state == JobState.COMPLETED

    # -- cancelling --------------------------------------------------------------------------------

    def test_cancel_ends_the_job_and_all_that_it_started(self):
        job = self.submit("sleep 301 & echo $! >outer; setsid sh -c 'echo $$ >inner; sleep 302'")
        assert until((self.folder / "inner").exists, WAIT_S)
        self.ex.cancel([job])
        assert self.end(job).state == JobState.CANCELLED
        pids = [int((self.folder / name).read_text()) for name in ("inner", "outer")]
        assert until(lambda: not any(map(lives, pids)))
        self.ex.cancel([job])  # over already: no error

    def test_a_job_that_waits_is_cancelled(self):
        first = self.submit("sleep 30")
        second = self.submit("true", f"--dependency=afterany:{first}")
        self.ex.cancel([second])
        assert self.end(second).state == JobState.CANCELLED
        assert self.end(second).exit_code is None
        self.ex.cancel([first])
        assert self.end(first).state == JobState.CANCELLED

    def test_one_task_of_an_array_is_cancelled(self):
        job = self.submit("sleep 0.4", "--array=0-1")
        self.ex.cancel([f"{job}_1"])
        states = [s.state for s in self.ex.wait([job], WAIT_S)[job]]
        assert states == [JobState.COMPLETED, JobState.CANCELLED]

    def test_a_signal_reaches_the_script(self):
        job = self.submit("trap 'echo got; exit 0' USR1; touch ready; while :; do sleep 0.05; done")
        assert until((self.folder / "ready").exists, WAIT_S)
        self.ex.cancel([job], signal=10)
        assert self.end(job).state == JobState.COMPLETED
        assert self.output(job) == b"got\n"

    # -- what goes wrong ---------------------------------------------------------------------------

    def test_an_unknown_job_has_no_entry(self):
        assert self.ex.status(["987654", "987654_3"]) == {"987654": [], "987654_3": []}
        (gone,) = self.ex.wait(["987654"], 5)["987654"]
        assert gone.state == JobState.UNKNOWN
        self.ex.cancel(["987654"])
        with pytest.raises(ClusterError, match="987654"):
            self.output("987654")

    def test_what_is_no_id_is_refused(self):
        with pytest.raises(ClusterRequestError, match="no job id"):
            self.ex.status(["--all"])
        with pytest.raises(ClusterRequestError, match="no job id"):
            self.ex.cancel(["--user=root"])

    def test_waiting_has_an_end(self):
        job = self.submit("sleep 30")
        began = time.monotonic()
        with pytest.raises(ClusterTimeout, match=job):
            self.ex.wait([job], 0.3)
        assert time.monotonic() - began < 10
        self.ex.cancel([job])

    def test_what_cannot_be_asked_is_refused(self):
        for options in (
            ("--array=3-1",),
            ("--time=soon",),
            ("--bogus",),
            ("--dependency=afterok:x",),
        ):
            with pytest.raises(ClusterRequestError):
                self.submit("true", *options)
        with pytest.raises(ClusterRequestError):
            self.ex.submit(Submission(b"no shebang\n", directory=self.folder))
        with pytest.raises(ClusterRequestError, match="does not exist"):
            self.ex.submit(Submission(b"#!/bin/sh\n", directory=self.folder / "none"))


def lives(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
