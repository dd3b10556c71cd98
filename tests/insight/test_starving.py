"""Jobs whose stalls were injected with a SlowVolume: `starving`, `usage` and the job report tell the truth.

Each job is a real process that reads through headrace and measures by itself, around `next`, how long it
waited. An agent looks on. What is recorded is compared with what the job measured, within 2 percent.
"""

import json
import os
import subprocess
import sys

import pytest

import headrace as hr
from headrace.runtime import agent_folder
from headrace.telemetry import job_report, stalls
from headrace.telemetry.report import LITTLE
from telemetry.test_agent import AgentProcess, home

home = home  # noqa: PLW0127 - a fixture

PROGRAM = """
import json, sys, time
import headrace as hr
from headrace.io import Simulation
from headrace.testing import SlowVolume

store, bytes_per_s, step_s, batches = sys.argv[1], *map(float, sys.argv[2:])
slow = SlowVolume(Simulation(name="slow", bandwidth_bytes_per_s=bytes_per_s))
waited_s = worked_s = 0.0
done = 0
# No memory of what was read: each epoch comes from the slow storage.
loader = hr.loader(store, 4, simulate=slow, tune=False, ram_bytes=0)
began = time.perf_counter()
while done < batches:
    it = iter(loader)
    while done < batches:
        asked = time.perf_counter()
        if next(it, None) is None:
            break
        got = time.perf_counter()
        waited_s += got - asked
        done += 1
        if done < batches:
            time.sleep(step_s)
            worked_s += time.perf_counter() - got
it.close()  # or what the process's end takes would be work, too
print(json.dumps({"waited_s": waited_s, "worked_s": worked_s,
                  "seconds": time.perf_counter() - began}))
"""

SAMPLE_BYTES = 100_000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    (folder / "src").mkdir()
    for i in range(40):
        (folder / "src" / f"{i:02d}.bin").write_bytes(os.urandom(SAMPLE_BYTES))
    hr.pack(folder / "src", folder / "s.hr")
    return folder / "s.hr"


class Job:
    """A job of several ranks on this node, each a process."""

    def __init__(self, store, job, bytes_per_s, step_s, batches, *, ranks=1, gpus=1):
        self.job, self.gpus, self.ranks = job, gpus, ranks
        self.steps_s, self.read_s = step_s * (batches - 1), batches * 4 * SAMPLE_BYTES / bytes_per_s
        environment = os.environ | {
            "HEADRACE_JOB_ID": job, "HEADRACE_JOB_NAME": f"train-{job}", "LOCAL_WORLD_SIZE": str(ranks),
            "HEADRACE_JOB_GPUS_PER_NODE": str(gpus), "HEADRACE_JOB_ACCOUNT": "physics",
        }  # fmt: skip
        words = [str(store), str(bytes_per_s), str(step_s), str(batches)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words], env=environment, stdout=subprocess.PIPE
            )
            for _ in range(ranks)
        ]

    def wait(self):
        """What the ranks measured, added up."""
        outs = []
        for process in self._processes:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            outs.append(json.loads(out))
        self.waited_s = sum(out["waited_s"] for out in outs)
        self.worked_s = sum(out["worked_s"] for out in outs)
        self.seconds = [out["seconds"] for out in outs]
        self.stall = self.waited_s / (self.waited_s + self.worked_s)
        self.lost_gpu_s = self.waited_s * self.gpus / self.ranks


def near(value):
    """Within 2 percent."""
    return pytest.approx(value, rel=0.02)


def cli(*words):
    program = "from headrace.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], check=False, capture_output=True, text=True,
        timeout=60, env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def seen(store, tmp_path_factory):
    """Three jobs that starve differently, under an agent; what they measured, and the history."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("seen")
    for name in list(os.environ):
        if name.startswith(("SLURM", "HEADRACE_JOB", "HEADRACE_AGENT", "HEADRACE_NODE")):
            patch.delenv(name)
    patch.setenv("HEADRACE_RUNTIME_DIR", str(folder / "rt"))
    patch.setenv("HEADRACE_HISTORY", str(folder / "history"))
    agent = AgentProcess(folder)
    try:
        # 400 kB a batch: at 1 MB/s 0.4 s, at 4 MB/s 0.1 s. Steps take 0.1 s: reads go on meanwhile.
        jobs = [
            Job(store, "901", 1e6, 0.1, 15, gpus=4),
            Job(store, "902", 2e6, 0.1, 30, ranks=2, gpus=2),
            Job(store, "903", 1e9, 0.1, 40),
        ]
        for job in jobs:
            job.wait()
        assert agent.end() == 0
        yield {job.job: job for job in jobs}, folder / "history"
    finally:
        if agent.process.poll() is None:
            agent.process.kill()
            agent.process.wait()
        patch.undo()


def test_the_jobs_starved_as_they_were_made_to(seen):
    """At 1 MB/s a batch takes 0.4 s, of which 0.1 s go by while the step works: it waits 0.3 of 0.4 s."""
    jobs, _ = seen
    for job in jobs.values():
        assert min(job.seconds) > 0.9 * max(job.read_s, job.steps_s)
    # Steps and first batches take longer where the machine has much else to do, and data come meanwhile.
    if all(max(job.seconds) < 1.5 * max(job.read_s, job.steps_s) for job in jobs.values()):
        assert jobs["901"].stall > jobs["902"].stall > jobs["903"].stall
        assert jobs["901"].stall > 0.4


@pytest.mark.parametrize("job_id", ["901", "902"])
def test_the_job_report_is_true(seen, job_id):
    jobs, history = seen
    job = jobs[job_id]
    report = job_report(history, job_id)
    record = report.record
    assert record.measured
    assert sum(record.waited.values()) == near(job.waited_s)
    assert record.total("worked_s") == near(job.worked_s)
    assert record.stall == near(job.stall)
    assert sum(record.lost.values()) == near(job.lost_gpu_s)
    assert next(iter(record.waited)) == "latency"
    assert list(record.lost_by_file_system) == ["simulated slow"]
    told = json.loads(cli("job-report", job_id, "--history", str(history), "--json"))
    assert told["gpu_hours_lost"] * 3600 == near(job.lost_gpu_s)
    assert told["stall"] == near(job.stall)
    text = cli("job-report", job_id, "--history", str(history))
    assert text == report.text() + "\n"
    assert f"train-{job_id}" in text
    assert "waited for slow answers of the storage on simulated slow" in " ".join(text.split())


def test_a_job_that_does_not_starve_is_not_said_to(seen):
    jobs, history = seen
    record = job_report(history, "903").record
    assert record.stall == pytest.approx(jobs["903"].stall, abs=0.02)
    assert record.total("worked_s") == near(jobs["903"].worked_s)
    little = record.stall < LITTLE
    assert ("data were there in time" in job_report(history, "903").text()) == little


def test_bytes_are_those_that_were_read(seen):
    _, history = seen
    delivered = 15 * 4 * SAMPLE_BYTES
    by_tier = job_report(history, "901").record.by_label("tier_bytes")
    read = sum(by_tier.values())
    # What was read ahead and not taken counts as well.
    assert delivered <= read <= delivered + 40 * SAMPLE_BYTES


def test_starving_ranks_them_by_gpu_hours_lost(seen):
    jobs, history = seen
    told = json.loads(cli("starving", "--history", str(history), "--last", "1h", "--json"))
    ours = [job for job in told["jobs"] if job["job_id"] in jobs]
    assert [job["job_id"] for job in ours][:2] == ["901", "902"]
    for job in ours[:2]:
        measured = jobs[job["job_id"]]
        assert job["lost_gpu_hours"] * 3600 == near(measured.lost_gpu_s)
        assert job["waited_s"] == near(measured.waited_s)
        assert job["stall"] == near(measured.stall)
        assert (job["cause"], job["file_system"]) == ("latency", "simulated slow")
        assert job["quality"] == "measured"
    (system,) = [each for each in told["file_systems"] if each["name"] == "simulated slow"]
    slow = jobs["901"], jobs["902"]
    assert system["lost_gpu_hours"] * 3600 >= 0.98 * sum(job.lost_gpu_s for job in slow)
    table = cli("starving", "--history", str(history), "--last", "1h")
    assert "901" in table
    assert "\x1b" not in table
    assert max(map(len, table.splitlines())) <= 80


def test_usage_tells_hours_and_efficiency(seen):
    jobs, history = seen
    told = json.loads(
        cli(
            "usage",
            "--from",
            "history",
            "--history",
            str(history),
            "--account",
            "physics",
            "--json",
        )
    )
    (row,) = told["rows"]
    assert row["jobs"] == 3
    lost_s = sum(job.lost_gpu_s for job in jobs.values())
    assert row["lost_gpu_hours"] * 3600 == near(lost_s)
    # No GPU was looked at: what they were good for is not known.
    assert (row["efficiency"], row["gpu_coverage"]) == (None, 0)
    table = cli("usage", "--from", "history", "--history", str(history))
    assert "physics" in table
    assert max(map(len, table.splitlines())) <= 80


def test_the_queue_is_told_how_jobs_fare(seen):
    jobs, history = seen
    found = stalls(history, 3600)
    assert found["901"].share == near(jobs["901"].stall)
    assert (found["901"].cause, found["901"].measured) == ("latency", True)
    assert found["903"].share == pytest.approx(jobs["903"].stall, abs=0.02)
    assert bool(found["903"].cause) == (found["903"].share > 0.01)


def test_nothing_is_left_of_the_agent(seen):
    assert not list(agent_folder().path.glob("*"))
