"""No Slurm, half of one, one that is away, slow or talks nonsense: each is an error that says what it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headrace.cluster.executor import JobState, SchedulerUnavailable, Submission, executor
from headrace.cluster.slurm.accounting import read_accounting
from headrace.cluster.slurm.commands import Commands, refusal
from headrace.cluster.slurm.executor import SlurmExecutor
from headrace.cluster.slurm.scontrol import read_snapshot
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout

FIXTURES = Path(__file__).parent / "fixtures"
SCRIPT = Submission(b"#!/bin/sh\ntrue\n")


def refused(name: str) -> tuple[int, str]:
    status, _, text = (FIXTURES / "22.05" / f"refused-{name}.txt").read_text().partition("\n")
    return int(status), text


@pytest.mark.usefixtures("fake")
def test_without_slurm_it_says_so_and_the_local_executor_is_chosen():
    with pytest.raises(ClusterError, match=r"sbatch is not installed.*HEADRACE_EXECUTOR=local"):
        SlurmExecutor().submit(SCRIPT)
    with pytest.raises(ClusterError, match="scontrol is not installed"):
        read_snapshot()
    with pytest.raises(ClusterError, match="scontrol is not installed"):
        read_accounting(Commands())
    assert executor().name == "local"


def test_which_executor_is_chosen(fake, monkeypatch):
    fake("sbatch", "")
    assert executor().name == "slurm"
    monkeypatch.setenv("HEADRACE_EXECUTOR", "local")
    assert executor().name == "local"
    assert executor("slurm").name == "slurm"
    with pytest.raises(ClusterRequestError, match="'pbs'"):
        executor("pbs")


def test_half_a_slurm(fake):
    # What Debian's package says when it is installed and nothing else was done.
    fake("sbatch", "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")
    with pytest.raises(ClusterError, match="not set up here") as caught:
        SlurmExecutor().submit(SCRIPT)
    assert not isinstance(caught.value, ClusterRequestError)
    # sbatch without the other commands.
    fake("sbatch", "echo 17")
    assert SlurmExecutor().submit(SCRIPT) == "17"
    with pytest.raises(ClusterError, match="scontrol is not installed"):
        SlurmExecutor().status(["17"])
    fake("scontrol", "").chmod(0o644)
    with pytest.raises(ClusterError, match=r"scontrol (cannot be run|is not installed)"):
        SlurmExecutor().status(["17"])


def test_a_program_that_is_none(fake):
    path = fake("sbatch", "")
    path.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ClusterError, match="cannot be run"):
        SlurmExecutor().submit(SCRIPT)


def test_a_controller_that_is_away(fake):
    said = (FIXTURES / "22.05/no-controller.txt").read_text().strip()
    fake("sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(SchedulerUnavailable, match="scontrol ping"):
        SlurmExecutor().submit(SCRIPT)


@pytest.mark.parametrize(
    "name",
    [
        "array",
        "feature",
        "gpu-type",
        "gpus",
        "gres",
        "memory",
        "option",
        "partition",
        "reservation",
        "time",
    ],
)
def test_what_a_cluster_refuses_is_the_requests_fault(name):
    status, text = refused(name)
    error = refusal("sbatch", status, text)
    assert isinstance(error, ClusterRequestError)
    last = text.strip().splitlines()[0].rpartition(": ")[2]
    assert last in str(error)


def test_what_takes_too_long_is_ended(fake, tmp_path):
    fake("sbatch", f"echo $$ >{tmp_path}/pid; exec sleep 60")
    for deadline_s in (0.5, 4.0, 16.0):
        began = time.monotonic()
        with pytest.raises(ClusterTimeout, match="not known") as caught:
            SlurmExecutor(Commands(deadline_s=deadline_s)).submit(SCRIPT)
        assert time.monotonic() - began < deadline_s + 10
        if (tmp_path / "pid").exists():  # on a busy machine it has not begun by then
            break
    assert "squeue" in str(caught.value)
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_an_answer_that_is_none(fake):
    fake("sbatch", "echo 'Submitted batch job'")
    with pytest.raises(ClusterError, match="expected the number of a job"):
        SlurmExecutor().submit(SCRIPT)
    fake("scontrol", "echo 'Segmentation fault'")
    with pytest.raises(ClusterError, match="cannot be read"):
        SlurmExecutor().status(["17"])
    fake("scontrol", "echo JobId=17")
    with pytest.raises(ClusterError, match="cannot be read"):
        SlurmExecutor().status(["17"])


def test_other_clusters_and_sites_words(fake, caplog):
    fake("sbatch", "echo 'sbatch: your quota is nearly used' >&2; echo 'hello'; echo '17;lab'")
    assert SlurmExecutor().submit(SCRIPT) == "17"
    assert caplog.messages == ["sbatch: your quota is nearly used"]


def test_the_callers_settings_of_slurms_commands_do_not_change_what_is_read(
    fake, monkeypatch, tmp_path
):
    monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    fake(
        "scontrol",
        f"env >{tmp_path}/env; echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    )
    assert SlurmExecutor().status(["17"]) == {"17": []}
    environment = (tmp_path / "env").read_text().splitlines()
    assert "SLURM_TIME_FORMAT=%s" in environment
    assert not any(line.startswith("SQUEUE_FORMAT") for line in environment)


def test_a_job_that_vanished_is_found_in_the_books(fake, tmp_path):
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    line = (FIXTURES / "23.02/sacct.txt").read_text().splitlines()[0]
    fake("sacct", f"echo '{line}'")
    (status,) = SlurmExecutor().wait(["101"], 5)["101"]
    assert (status.state, status.exit_code, status.name) == (JobState.COMPLETED, 0, "train it")


def test_a_job_that_vanished_without_a_trace_is_unknown(fake):
    fake("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    (status,) = SlurmExecutor().wait(["101"], 5)["101"]
    assert status.state == JobState.UNKNOWN
    assert "MinJobAge" in status.reason


def test_waiting_bears_an_outage_but_not_for_ever(fake, tmp_path):
    job = (
        (FIXTURES / "22.05/task.txt").read_text().replace("JobState=PENDING", "JobState=COMPLETED")
    )
    (tmp_path / "job").write_text(
        job.replace("ArrayJobId", "HetJobId").replace("ArrayTaskId=3", "")
    )
    away = "{ echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1; }"
    counted = f"echo x >>{tmp_path}/asked; test $(wc -l <{tmp_path}/asked) -gt 3"
    fake("scontrol", f"{counted} || {away}; cat {tmp_path}/job")
    number = job.partition("=")[2].split()[0]
    (status,) = SlurmExecutor().wait([number], 20)[number]
    assert status.state == JobState.COMPLETED
    assert len((tmp_path / "asked").read_text().split()) == 4
    fake("scontrol", away)
    impatient = SlurmExecutor()
    impatient.outage_s = 0.3
    with pytest.raises(SchedulerUnavailable):
        impatient.wait([number], 20)
    with pytest.raises(ClusterTimeout, match="Slurm is away"):
        SlurmExecutor().wait([number], 0.3)


def test_clocks_that_differ_do_not_confuse(fake):
    """The cluster's clock is an hour ahead, in another zone: times come as seconds, states are what counts."""
    ahead = int(time.time()) + 3600
    text = (FIXTURES / "25.05/jobs.txt").read_text().partition("\nJobId=102")[0]
    text = text.replace("1795332994", str(ahead)).replace("JobState=RUNNING", "JobState=COMPLETED")
    fake("scontrol", f"cat <<'EOF'\n{text}\nEOF")
    (status,) = SlurmExecutor().wait(["101"], 5)["101"]
    assert (status.state, status.started_s) == (JobState.COMPLETED, float(ahead))


def test_nothing_of_an_option_can_be_a_command(fake, tmp_path):
    fake("sbatch", f"printf '%s\\n' \"$@\" >{tmp_path}/args; cat >{tmp_path}/script; echo 17")
    options = ("--job-name=a b; rm -rf $HOME `x`", "--comment=é\n")
    SlurmExecutor().submit(Submission(SCRIPT.script, options))
    assert (tmp_path / "args").read_text() == f"--parsable\n{options[0]}\n{options[1]}\n"
    assert (tmp_path / "script").read_bytes() == SCRIPT.script
    assert os.environ["PATH"].startswith(str(tmp_path))


def test_a_job_that_started_again_is_in_the_list_of_jobs_completed_once(fake, tmp_path):
    line = (
        "JobId=7 UserId=root(0) Name=j JobState={} Partition=p TimeLimit=5 StartTime=2026-11-27T05:0{}:00 "
        "EndTime=2026-11-27T05:0{}:30 NodeList=n NodeCnt=1 ProcCnt=8 Account= QOS= Tres=cpu=8 ExitCode=0:0\n"
    )
    lives = ("NODE_FAIL", 0, 0), ("REQUEUED", 0, 0), ("COMPLETED", 4, 5)
    done = tmp_path / "done.log"
    done.write_text("".join(line.format(*life) for life in lives))
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    fake("scontrol", f"echo 'JobCompType = jobcomp/filetxt'; echo 'JobCompLoc = {done}'")
    (job,) = read_accounting(Commands(), job_ids=["7"])
    assert (job.state, job.elapsed_s) == (JobState.COMPLETED, 90.0)
