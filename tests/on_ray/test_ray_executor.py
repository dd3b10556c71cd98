"""The executor of Ray, on a real cluster of several raylets."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from cluster.executor_tests import WAIT_S, ExecutorTests, lives
from headrace.cluster.executor import JobState, Submission
from headrace.errors import ClusterRequestError
from tests_shared import until


class TestRay(ExecutorTests):
    """What holds of every executor, but for what Ray does not have."""

    @pytest.fixture
    def ex(self, ray_cluster):
        return ray_cluster.executor

    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path

    def refuses(self, *options: str) -> None:
        with pytest.raises(ClusterRequestError, match="is not done by Ray"):
            self.submit("true", *options)

    def test_a_limit_on_an_array_is_kept(self):
        self.refuses("--array=0-2%1")

    def test_a_job_starts_after_the_one_that_it_depends_on(self):
        self.refuses("--dependency=afterok:17")

    def test_what_depends_on_success_never_runs_after_a_failure(self):
        self.refuses("--dependency=afternotok:17", "--kill-on-invalid-dep=yes")

    def test_a_signal_reaches_the_script(self):
        with pytest.raises(ClusterRequestError, match="no way to send"):
            self.ex.cancel(["17"], signal=10)

    def test_a_job_that_waits_is_cancelled(self):
        every = "--nodes=3", "--ntasks-per-node=2"
        first = self.submit("touch began; sleep 300", *every)
        assert until((self.folder / "began").exists, WAIT_S)
        second = self.submit("true", *every)
        assert until(lambda: self.ex.one(second).reason == "Resources", WAIT_S)
        self.ex.cancel([second, first])
        ends = self.ex.wait([first, second], WAIT_S)
        assert {s.state for known in ends.values() for s in known} == {JobState.CANCELLED}

    # -- Ray's own -----------------------------------------------------------------------------------

    def test_a_job_is_told_its_nodes_and_holds_their_gpus(self):
        given = "env | grep -e ^HEADRACE_JOB_ -e ^CUDA -e ^RAY_ADDRESS | sort"
        job = self.submit(
            given, "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=1", "--requeue"
        )
        status = self.end(job)
        lines = dict(line.split("=", 1) for line in self.output(job).decode().splitlines())
        assert len(set(status.nodes)) == 2
        assert lines["HEADRACE_JOB_SCHEDULER"] == "ray"
        assert (lines["HEADRACE_JOB_ID"], lines["HEADRACE_JOB_REQUEUE"]) == (job, "1")
        assert lines["HEADRACE_JOB_GPUS_PER_NODE"] == "1"
        assert lines["CUDA_VISIBLE_DEVICES"] == "0"
        assert ":" in lines["RAY_ADDRESS"]

    def test_status_75_starts_a_job_again_on_other_nodes(self):
        script = "echo run $HEADRACE_JOB_RESTARTS; test $HEADRACE_JOB_RESTARTS = 1 || exit 75"
        job = self.submit(script, "--requeue", "--open-mode=append")
        status = self.end(job)
        assert (status.state, status.restarts) == (JobState.COMPLETED, 1)
        assert self.output(job) == b"run 0\nrun 1\n"

    def test_a_job_whose_first_node_dies_starts_again_elsewhere(self, ray_cluster):
        script = "echo $$ >me.$HEADRACE_JOB_RESTARTS; test $HEADRACE_JOB_RESTARTS = 1 || sleep 300; echo fine"
        job, other = self.submit(script, "--requeue"), self.submit("touch began; sleep 300")
        for name in ("me.0", "began"):
            assert until((self.folder / name).exists, WAIT_S)
        before, of_other = self.ex.one(job).nodes, self.ex.one(other).nodes
        for name in {*before, *of_other}:
            ray_cluster.kill_node(name)
        status = self.end(job)
        assert (status.state, status.restarts) == (JobState.COMPLETED, 1)
        assert status.nodes != before
        assert not lives(int((self.folder / "me.0").read_text()))
        lost = self.end(other)  # it may not start again
        assert lost.state == JobState.NODE_FAIL
        assert of_other[0] in lost.reason

    def test_a_job_whose_driver_is_killed_fails_and_leaves_nothing(self):
        job = self.submit("sleep 301 & echo $! >inner; echo $$ >outer; wait")
        assert until((self.folder / "outer").exists, WAIT_S)
        drivers = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.read_bytes().endswith(b"sys.exit(job.main())\0")
        ]
        assert len(drivers) == 1
        os.kill(drivers[0], signal.SIGKILL)
        status = self.end(job)
        assert (status.state, status.exit_code) == (JobState.FAILED, None)
        pids = [int((self.folder / name).read_text()) for name in ("inner", "outer")]
        assert until(lambda: not any(map(lives, pids)), WAIT_S)

    def test_a_job_that_is_over_is_submitted_once_more(self):
        script = b"#!/bin/sh\necho $@\n"
        job = self.ex.submit(Submission(script, arguments=("a b",), directory=self.folder))
        self.end(job)
        again = self.ex.resubmit(job)
        assert again != job
        self.end(again)
        assert self.output(again) == b"a b\n"

    def test_a_job_that_is_too_long_is_ended_after_a_warning(self):
        script = "trap 'echo warned' USR1; touch began; while :; do sleep 0.05; done"
        job = self.submit(script, "--time=0:03", "--signal=B:USR1@2")
        status = self.end(job)
        assert (status.state, status.exit_code) == (JobState.TIMEOUT, None)
        assert self.output(job) == b"warned\n"

    def test_what_this_cluster_can_never_hold_is_refused(self):
        for option in ("--nodes=4", "--cpus-per-task=3", "--gpus=2"):
            with pytest.raises(
                ClusterRequestError, match="of the 4 nodes of this Ray cluster have"
            ):
                self.submit("true", option)

    def test_jobs_are_submitted_from_within_a_job(self):
        program = (
            "from pathlib import Path; from headrace.cluster.executor import Submission, executor; "
            "print(executor().submit(Submission(b'#!/bin/sh\\necho $HEADRACE_JOB_ID\\n', "
            "directory=Path.cwd())))"
        )
        (self.folder / "submit.py").write_text(program)
        outer = self.submit(f"{sys.executable} submit.py", "--nodes=2")
        assert self.end(outer).state == JobState.COMPLETED, self.output(outer)
        inner = self.output(outer).decode().strip()
        assert self.end(inner).state == JobState.COMPLETED
        assert len(self.end(inner).nodes) == 1
        assert self.output(inner).decode().strip() == inner

    def test_a_job_stays_off_the_nodes_that_it_excludes(self, ray_cluster):
        able = [node.name for node in ray_cluster.executor.snapshot().nodes if node.cpus]
        job = self.submit("true", f"--exclude={','.join(able[:2])}")
        assert self.end(job).nodes == (able[2],)
        with pytest.raises(ClusterRequestError, match="and 0 of the 4 nodes of this Ray cluster"):
            self.submit("true", f"--exclude={','.join(able)}")
        self.refuses(f"--nodelist={able[0]}")

    def test_a_folder_that_no_node_sees_is_named(self):
        gone = self.folder / "gone"
        gone.mkdir()
        every = "--nodes=3", "--ntasks-per-node=2"
        first = self.submit("until test -e go; do sleep 0.05; done", *every)
        job = self.ex.submit(Submission(b"#!/bin/sh\n", every, directory=gone))
        gone.rmdir()
        (self.folder / "go").touch()
        assert self.end(first).state == JobState.COMPLETED
        status = self.end(job)
        assert status.state == JobState.FAILED
        assert str(gone) in status.reason
