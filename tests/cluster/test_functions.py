"""Python functions as jobs, on a real Slurm and on this machine: results, errors, arrays, requeueing, ranks."""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import headrace as hr
from headrace.cluster.executor import JobState, executor
from headrace.cluster.request import JOB_OPTIONS
from headrace.errors import ClusterError, ClusterRequestError, ClusterTimeout
from tests_shared import until

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 120.0


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder of the test's in which everything lies."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("HEADRACE_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.setenv("HEADRACE_EXECUTOR", "local")
    return tmp_path


@pytest.fixture(params=["slurm", "local"])
def anywhere(request, here, monkeypatch) -> Path:
    """The same where a real Slurm runs the jobs, and where this machine does."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    monkeypatch.setenv("HEADRACE_EXECUTOR", request.param)
    return here


def told(first: object, second: object = None) -> tuple[object, object, str]:
    print("said", first)
    return first, second, os.environ.get("CUDA_VISIBLE_DEVICES", "")


def fails(text: str) -> None:
    raise LookupError(text)


def waits_for(path: Path) -> str:
    while not path.exists():
        signal.sigtimedwait([], 0.05)
    return path.read_text()


def test_what_a_function_returns(anywhere):
    job = hr.cluster.submit(functools.partial(told, second={"x": 1}), [1, "ü"], gpus=2, time="5m")
    first, second, gpus = job.result(WAIT_S)
    assert (first, second) == ([1, "ü"], {"x": 1})
    if os.environ["HEADRACE_EXECUTOR"] == "slurm":
        assert gpus == "0,1"
    assert job.done()
    assert job.exception() is None
    assert job.logs() == "said [1, 'ü']\n"
    again = pickle.loads(pickle.dumps(job))
    assert (again.job_id, again.result()) == (job.job_id, job.result())
    assert job.folder.parent == anywhere / "headrace-jobs"
    assert job.folder.stat().st_mode & 0o777 == 0o700
    assert job.state is JobState.COMPLETED


def test_what_it_raises_is_raised_with_its_traceback(anywhere):
    job = hr.cluster.submit(fails, "no such thing")
    with pytest.raises(LookupError, match="no such thing") as caught:
        job.result(WAIT_S)
    (note,) = caught.value.__notes__
    assert "in fails" in note
    assert isinstance(job.exception(), LookupError)
    assert job.state is JobState.FAILED
    assert "LookupError: no such thing" in job.logs()


def test_a_job_that_is_cancelled_has_no_result(anywhere):
    job = hr.cluster.submit(waits_for, anywhere / "never", name="patient")
    assert until(lambda: job.state is JobState.RUNNING, WAIT_S)
    assert not job.done()
    with pytest.raises(ClusterTimeout, match=job.job_id):
        job.result(0.2)
    waiting = hr.cluster.submit(told, 1, dependency=f"afterok:{job.job_id}")
    assert until(lambda: waiting.state is JobState.PENDING, WAIT_S)
    with pytest.raises(
        ClusterTimeout, match=rf"{waiting.job_id} is PENDING \(waits for another job\)"
    ):
        waiting.result(0.2)
    waiting.cancel()
    job.cancel()
    with pytest.raises(
        ClusterError, match=f"job {job.job_id} is CANCELLED.*left no result"
    ) as caught:
        job.result(WAIT_S)
    assert caught.value.path == str(job.folder / "result-0-0")
    assert isinstance(job.exception(), ClusterError)


def test_an_array_of_calls(anywhere):
    jobs = hr.cluster.map_array(told, range(3), "abc", at_once=2, name="sweep")
    assert [job.result(WAIT_S)[:2] for job in jobs] == [(0, "a"), (1, "b"), (2, "c")]
    assert len({job.folder for job in jobs}) == 1
    assert jobs[2].logs() == "said 2\n"
    assert hr.cluster.map_array(told, []) == []
    for iterables, lengths in (
        (([1, 2], [3]), "2 and 1"),
        ((range(3), iter("ab"), itertools.repeat(0)), "3, 2 and more than 2"),
    ):
        with pytest.raises(
            ClusterRequestError, match=rf"map_array\(told\): .* have {lengths} elements"
        ):
            hr.cluster.map_array(told, *iterables)
    assert len([*(anywhere / "headrace-jobs").iterdir()]) == 1


def lives(path: Path) -> int:
    """How often it was called; raises at the first time."""
    with path.open("a") as f:
        f.write("x")
    if (count := path.stat().st_size) == 1:
        raise LookupError("the first time")
    return count


def test_a_job_that_is_resubmitted_calls_the_function_once_more(anywhere):
    job = hr.cluster.submit(lives, anywhere / "one")
    assert isinstance(job.exception(WAIT_S), LookupError)
    runs_on = executor()

    def resubmitted(job_id: str) -> str:
        runs_on.wait([job_id], WAIT_S)
        new = runs_on.resubmit(job_id)
        ((status,),) = runs_on.wait([new], WAIT_S).values()
        assert status.state is JobState.COMPLETED
        return new

    new = resubmitted(job.job_id)
    assert job.result() == 2  # the newest
    assert job.state is JobState.FAILED  # of the job that it was
    resubmitted(new)
    assert job.result() == 3

    def started_again(job_id: str) -> None:
        """As its scheduler would, under its number."""
        own = {**os.environ, "HEADRACE_JOB_NODES": "n", "HEADRACE_JOB_ID": job_id}
        program = "from headrace.cluster.functions import main; main()"
        subprocess.run([sys.executable, "-c", program, str(job.folder), "0"], env=own, check=True)

    started_again(new)
    assert job.result() == 4  # another wrote the result since
    started_again(new)
    assert job.result() == 4  # a job keeps its own
    (job.folder / "result-0-0").write_bytes(b"half")
    started_again(new)
    assert job.result() == 5

    jobs = hr.cluster.map_array(lives, [anywhere / "two", anywhere / "three"])
    assert [type(job.exception(WAIT_S)) for job in jobs] == [LookupError, LookupError]
    resubmitted(jobs[1].job_id)
    assert isinstance(jobs[0].exception(), LookupError)
    assert jobs[1].result() == 2


class Counter:
    """A part of a run, such as a model."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state) -> None:
        self.value = int(state["value"])


def counts(folder: Path, stop_after: int) -> tuple[int, int]:
    """Counts until it is asked to stop, and saves; in its second life a little further."""
    counter = Counter()
    run = hr.cluster.resume(folder / "checkpoints", counter=counter)
    while not (run.restored and counter.value >= stop_after):
        counter.value += 1
        (folder / "steps").write_text(str(counter.value))
        if run.step():
            raise SystemExit
        signal.sigtimedwait([], 0.02)
    return counter.value, hr.cluster.restarts()


def test_a_function_that_is_asked_to_stop_goes_on_in_the_jobs_next_life(anywhere, request):
    job = hr.cluster.submit(counts, anywhere, 10, time="10m")
    assert until((anywhere / "steps").exists, WAIT_S)
    runs_on = executor()
    runs_on.cancel([job.job_id], signal.SIGUSR1)
    if os.environ["HEADRACE_EXECUTOR"] == "slurm":
        slurm = request.getfixturevalue("slurm")
        assert until(lambda: slurm.job_state(job.job_id) == "PENDING", WAIT_S), job.logs()
        assert not job.done()
        slurm.begin_now(job.job_id)
    value, restarts = job.result(WAIT_S)
    assert (value >= 10, restarts) == (True, 1), job.logs()
    # The warning comes in good time: two minutes before the end, or half of a short time.
    assert "B:USR1@120" in _directives(anywhere, job)
    short = hr.cluster.submit(told, 1, time="1m")
    assert "B:USR1@30" in _directives(anywhere, short)
    short.cancel()


def _directives(here: Path, job: hr.cluster.FunctionJob) -> str:
    written = [
        *here.glob(f"jobs/{job.job_id}/script"),
        *here.glob("STATE/headrace/submitted/*/*.json"),
    ]
    return "".join(path.read_text() for path in written if path.name == "script" or
                   f'"job":"{job.job_id}"' in path.read_text())  # fmt: skip


def rank_of(text: str) -> tuple[str, str]:
    return text, os.environ["RANK"]


def test_each_rank_of_a_launch_runs_the_function(anywhere):
    launch = ["--framework", "plain", "--ranks-per-node", "2", "--no-daemon", "--no-agent"]
    job = hr.cluster.submit(rank_of, "x", launch=launch, nodes=1, cpus=2, tasks_per_node=1)
    assert job.result(WAIT_S) == [("x", "0"), ("x", "1")], job.logs()
    failing = hr.cluster.submit(
        fails, "in a rank", launch=launch, nodes=1, cpus=2, tasks_per_node=1
    )
    with pytest.raises(LookupError, match="in a rank"):
        failing.result(WAIT_S)

    # Results of a job and of another that was submitted in its place are no list.
    before = (job.folder / "result-0-1").read_bytes()
    executor().wait([job.job_id], WAIT_S)
    new = executor().resubmit(job.job_id)
    executor().wait([new], WAIT_S)
    assert job.result() == [("x", "0"), ("x", "1")]
    (job.folder / "result-0-1").write_bytes(before)
    with pytest.raises(
        ClusterError, match=f"is of job {job.job_id}, and rank 0's result of job {new}"
    ):
        job.result()


SCRIPT = """
import sys
from dataclasses import dataclass
import headrace as hr

@dataclass
class Answer:
    value: int

def twice(value):
    return Answer(2 * value.value)

GUARD
    print(hr.cluster.submit(twice, Answer(21), time="5m").result(60))
"""


def test_functions_and_classes_of_a_script(here):
    """As the standard library's processes do it: the job imports the script under another name."""
    for guard, code in (('if __name__ == "__main__":', 0), ("if True:", 1)):
        (here / "my script.py").write_text(SCRIPT.replace("GUARD", guard))
        ended = subprocess.run(
            [sys.executable, "my script.py"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        if code == 0:
            assert ended.stdout == "Answer(value=42)\n"
        else:
            assert "jobs would submit jobs for ever" in ended.stderr
    ended = subprocess.run(
        [sys.executable], input=SCRIPT.replace("GUARD", "if True:"), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert "defined in an interactive session" in ended.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": 2}, "there is no option 'gpu'; did you mean gpus"),
        ({"epochs": 2}, "functools.partial"),
        ({"array": "0-3"}, "there is no option 'array'"),
        ({"name": "a", "job_name": "b"}, "'job_name' is said twice; 'name' is the same"),
        ({"time": 2}, "minutes to Slurm, hours to some sites"),
        ({"time": "90"}, 'time="90m"'),
        ({"gpus": 0}, "expected a number from 1"),
        ({"executor": "pbs"}, "there is no executor 'pbs'"),
        ({"directory": "none"}, "working directory does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for(here, options, says):
    with pytest.raises(ClusterRequestError) as caught:
        hr.cluster.submit(told, 1, **options)
    assert says in str(caught.value)
    assert not [*here.glob("headrace-jobs/*")]


def test_every_option_of_batch_may_be_asked_for_by_its_word_in_the_table(here):
    words = [option.flag[2:].replace("-", "_") for option in JOB_OPTIONS]
    for word in {*words} - {"array"}:
        with pytest.raises(ClusterRequestError, match="there is no option 'gpu'"):
            hr.cluster.submit(told, 1, **{word: "x", "gpu": 2})  # the first one is known
    (here / "elsewhere").mkdir()
    job = hr.cluster.submit(os.getcwd, job_name="sweep", chdir=str(here / "elsewhere"))
    assert job.result(WAIT_S) == str(here / "elsewhere")
    assert job.folder.name.startswith("sweep-")


def test_what_cannot_be_pickled_is_not_submitted(here):
    with pytest.raises(
        ClusterRequestError, match=r"submit\(<lambda>\): the call cannot be pickled"
    ):
        hr.cluster.submit(lambda: 1)
    with pytest.raises(ClusterRequestError, match="top level"):
        hr.cluster.submit(told, (i for i in range(3)))
    assert not (here / "headrace-jobs").exists()


class Stubborn(Exception):
    """It can be pickled, and not be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def ends(how: str) -> object:
    if how == "exit":
        sys.exit(0)
    if how == "killed":
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stubborn":
        raise Stubborn(1, 2)
    return open(os.devnull)  # noqa: PTH123


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "the function ended by SystemExit"),
        ("stubborn", "Stubborn: 1 and 2 cannot be pickled"),
        ("file", "what it returned cannot be pickled"),
        ("killed", "is FAILED: ended by signal 9, Killed, and left no result"),
    ],
)
def test_no_end_goes_unsaid(here, how, says):
    job = hr.cluster.submit(ends, how)
    with pytest.raises(ClusterError, match=says) as caught:
        job.result(WAIT_S)
    if how == "killed":
        assert "the last words" in caught.value.__notes__[0]
        assert f"headrace cluster logs {job.job_id}" in str(caught.value)


def test_a_result_that_cannot_be_read_is_an_error_that_names_the_file(here):
    job = hr.cluster.submit(told, "a" * 100)
    job.result(WAIT_S)
    path = job.folder / "result-0-0"
    whole = path.read_bytes()
    for bad in (whole[:-1], whole.replace(b"aaa", b"aab", 1), b"", whole.partition(b"\n")[2]):
        path.write_bytes(bad)
        with pytest.raises(ClusterError, match="its checksum does not match") as caught:
            job.result()
        assert caught.value.path == str(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ClusterError, match="cannot be read"):
        job.result()
