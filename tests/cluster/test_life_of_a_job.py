"""`headrace cluster status | logs | cancel | wait | resubmit`: one story, on real Slurm and on this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.cluster.executor import Submission
from headrace.cluster.slurm.executor import SlurmExecutor
from tests_shared import until

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = [sys.executable, "-c", "from headrace.cli import main; main()", "cluster"]
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `headrace cluster`; every state of it lies in the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("HEADRACE_JOBS_DIR", str(tmp_path / "jobs"))

    def call(*words, code=0):
        ended = subprocess.run(
            [*PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == code, ended.stderr + ended.stdout
        assert "Traceback" not in ended.stderr
        return ended

    return call


@pytest.fixture(params=["slurm", "local"])
def cluster(request, run, monkeypatch):
    """The same where a real Slurm runs the jobs, and where this machine does."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    monkeypatch.setenv("HEADRACE_EXECUTOR", request.param)
    return run


def submit(cluster, script: str, *words: object) -> str:
    Path("job.sh").write_text(f"#!/bin/bash\n{script}\n")
    return cluster("batch", *words).stdout.split()[-1]


def jobs_of(ended) -> list[dict[str, object]]:
    return json.loads(ended.stdout)["jobs"]


SCRIPT = """#SBATCH --output=out-%A-%a.txt
echo "$1 in $PWD"
while [ ! -e go ]; do sleep 0.05; done
echo gone
exit ${SLURM_ARRAY_TASK_ID:-0}"""


def test_the_life_of_a_job(cluster, tmp_path):
    words = ("--array", "0-2", "-J", "sweep", "job.sh", 'it\'s a "b"')
    job = submit(cluster, SCRIPT, *words)

    def states() -> list[object]:
        return [task["state"] for task in jobs_of(cluster("status", job, "--json"))]

    assert until(
        lambda: states()[:2] == ["RUNNING"] * 2, 60
    )  # a machine of two cores runs no third
    tasks = jobs_of(cluster("status", job, "--json"))
    assert [(t["job"], t["name"]) for t in tasks] == [(f"{job}_{i}", "sweep") for i in range(3)]
    shown = cluster("status").stdout
    assert re.search(rf"^{job}_\[0-[12]\] +sweep +(\S+ +)?running", shown, re.MULTILINE), shown
    assert "is RUNNING" in cluster("resubmit", job, code=3).stderr
    assert f"Name one: {job}_0" in cluster("logs", job, code=3).stderr

    (ended,) = jobs_of(cluster("cancel", f"{job}_2", "--json"))
    assert ended["state"] in ("COMPLETING", "CANCELLED")
    follows = subprocess.Popen(
        [*PROGRAM, "logs", f"{job}_1", "--follow"], stdout=subprocess.PIPE, text=True
    )
    text = f'it\'s a "b" in {tmp_path}\n'
    assert follows.stdout.readline() == text
    (tmp_path / "go").touch()
    assert follows.communicate(timeout=60)[0] == "gone\n"

    over = jobs_of(cluster("wait", job, "--json", code=1))
    assert [t["state"] for t in over] == ["COMPLETED", "FAILED", "CANCELLED"]
    assert (over[1]["exit_code"], over[1]["why"]) == (1, "exit code 1")
    ended = cluster("status", f"{job}_1")
    assert f"headrace cluster logs {job}_1 --lines 50 ({over[1]['output']})" in ended.stderr
    assert over[0]["output"] == str(tmp_path / f"out-{job}-0.txt")
    assert cluster("logs", f"{job}_0", "--lines", 1).stdout == "gone\n"
    document = json.loads(cluster("logs", f"{job}_0", "--json").stdout)
    assert document == {"job": f"{job}_0", "output": over[0]["output"], "text": f"{text}gone\n"}

    # The task that failed once more: the same script, options, arguments and folder.
    (new,) = jobs_of(cluster("resubmit", f"{job}_1", "--json"))
    assert new["of"] == f"{job}_1"
    (again,) = jobs_of(cluster("wait", new["job"], "--json", code=1))
    assert (again["job"], again["name"], again["exit_code"]) == (f"{new['job']}_1", "sweep", 1)
    assert cluster("logs", again["job"]).stdout == f"{text}gone\n"


def test_a_job_that_completes_and_one_that_never_was(cluster):
    job = submit(cluster, "exit 0", "job.sh")
    assert "completed" in cluster("wait", job).stdout
    nobody = int(job) + 1000
    for words in (["status"], ["cancel"], ["wait"], ["logs"]):
        ended = cluster(*words, nobody, code=3)
        assert str(nobody) in ended.stderr
        assert len(re.findall("^error: ", ended.stderr, re.MULTILINE)) == 1
    # Beside one that is known, it is a line.
    both = jobs_of(cluster("status", job, nobody, "--json", code=1))
    assert [(s["job"], s["state"]) for s in both] == [(job, "COMPLETED"), (str(nobody), "UNKNOWN")]
    assert "no job id" in cluster("cancel", "--", "--user=root", code=3).stderr


def test_a_signal_alone_ends_nothing(cluster):
    job = submit(
        cluster, "trap 'echo got; exit 0' USR1; touch ready; while :; do sleep 0.05; done", "job.sh"
    )
    assert until(Path("ready").exists, 60)
    assert "expected a signal" in cluster("cancel", job, "--signal", "BOO", code=2).stderr
    cluster("cancel", job, "--signal", "usr1")
    cluster("wait", job)
    assert cluster("logs", job).stdout == "got\n"


@pytest.mark.parametrize("words", [["wait"], ["logs", "--follow"]])
def test_ctrl_c_leaves_the_job_alone(cluster, words):
    job = submit(cluster, "echo begun; while [ ! -e go ]; do sleep 0.05; done", "job.sh")
    until(lambda: Path(f"slurm-{job}.out").exists() and "begun" in cluster("logs", job).stdout, 60)
    process = subprocess.Popen(
        [*PROGRAM, *words, job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert (process.stderr if words == ["wait"] else process.stdout).readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (
        130,
        "interrupted: the job goes on; headrace cluster cancel ends it\n",
    )
    Path("go").touch()
    assert "completed" in cluster("wait", job).stdout


def test_a_job_that_slurm_forgot_is_submitted_again_as_it_was(run, fake):
    """From what was written down: Slurm keeps neither options nor arguments, and a script only for minutes."""
    fake("sbatch", 'printf "%s\\n" "$PWD" "$@" >args; cat >script; echo 17')
    fake("scontrol", f"case $* in *config*) echo 'ClusterName = lab';; *) {UNKNOWN};; esac")
    Path("there").mkdir()
    script = "#!/bin/sh\necho \udcff\n".encode(errors="surrogateescape")
    options = ("--job-name=a b",)
    ex = SlurmExecutor()
    ex.submit(Submission(script, options, ("x 'y'",), Path("there"), {"A": "1"}, cluster="lab"))
    first = Path("there/args").read_text()
    Path("there/args").unlink()
    assert json.loads(run("resubmit", 17, "--executor", "slurm", "--json").stdout) == {
        "jobs": [{"job": "17", "of": "17"}]
    }
    assert Path("there/args").read_text() == first
    assert Path("there/script").read_bytes() == script
    # Another job of that number, of another cluster or of a thousand jobs before, is not taken for it.
    for number in (1017, 18):
        ended = run("resubmit", number, "--executor", "slurm", code=3)
        assert f"what was submitted as job {number} is not known" in ended.stderr
    fake("scontrol", f"case $* in *config*) echo 'ClusterName = other';; *) {UNKNOWN};; esac")
    assert "other" in run("resubmit", 17, "--executor", "slurm", code=3).stderr
    (record,) = Path("STATE/headrace/submitted/lab").iterdir()
    assert record.stat().st_mode & 0o777 == 0o600
    fake("scontrol", f"case $* in *config*) echo 'ClusterName = lab';; *) {UNKNOWN};; esac")
    record.write_bytes(record.read_bytes().replace(b"a b", b"a c"))
    assert str(record) in run("resubmit", 17, "--executor", "slurm", code=3).stderr
    # Where nothing can be written down, the job is submitted all the same.
    record.unlink()
    record.parent.rmdir()
    record.parent.touch()
    assert ex.submit(Submission(script, directory=Path("there"), cluster="lab")) == "17"


@pytest.mark.parametrize(
    ("scontrol", "says"),
    [
        (None, "scontrol is not installed here"),
        ("echo 'Segmentation fault'", "cannot be read"),
        ("echo JobId=17 JobName=x; printf '   JobState=RUN'", "cannot be read"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "slurmctld is down"),
        ("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1", "slurmctld is overloaded"),
    ],
    ids=["missing", "garbage", "half", "away", "slow"],
)  # fmt: skip
@pytest.mark.parametrize("command", ["status", "logs", "cancel", "resubmit"])
def test_a_scheduler_that_does_not_answer_well_is_one_clear_error(
    run, fake, command, scontrol, says
):
    if scontrol is not None:
        fake("scontrol", scontrol)
    for more in ([], ["--json"])[command != "status" :]:
        ended = run(command, "17", "--executor", "slurm", *more, code=3)
        message = json.loads(ended.stdout)["error"]["message"] if more else ended.stderr
        assert says in message or says in ended.stdout


def test_of_ones_own_jobs_a_squeue_that_talks_nonsense_is_an_error(run, fake):
    fake("squeue", "echo 'slurm_load_jobs: 17 jobs'")
    assert (
        "squeue says 'jobs', expected the numbers"
        in run("status", "--executor", "slurm", code=3).stderr
    )
    fake("squeue", "true")
    assert run("status", "--executor", "slurm").stderr == "You have no jobs here.\n"
