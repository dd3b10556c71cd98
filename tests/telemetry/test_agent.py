"""The agent as a process: it hears loaders, survives kills, and leaves nothing but its history."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from headrace.errors import TelemetryError
from headrace.runtime import agent_folder, agent_sockets, checked
from headrace.telemetry.agent import (
    Agent,
    AgentOptions,
    next_interval,
    node_name,
    own_options,
)
from headrace.telemetry.history import catch_up, history_place, open_history, stalls
from headrace.telemetry.messages import Listener, ask_state
from headrace.telemetry.writing import HistoryWriter, file_of
from telemetry.shared import message
from tests_shared import until

PROGRAM = "from headrace.cli import main; main()"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Runtime folder and history of our own, and no job around us."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "HEADRACE_JOB", "HEADRACE_AGENT", "HEADRACE_NODE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("HEADRACE_HISTORY", str(tmp_path / "history"))
    monkeypatch.setattr(
        "headrace.telemetry.messages.ANSWER_S", 30.0
    )  # from an agent of a busy machine
    return tmp_path


class AgentProcess:
    def __init__(self, home, *arguments):
        self.socket = agent_folder().socket
        self.log = home / "agent.out"
        command = ["agent", "start", "--foreground", "--interval", "0.2", *arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *command], stdout=log, stderr=log
            )
        until(self.serves, 30)

    def serves(self):
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(FileNotFoundError, TimeoutError):
            self.state = ask_state(self.socket)
            return self.state["pid"] == self.process.pid
        return False

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def agent_of(home):
    started = []

    def start(*arguments):
        started.append(AgentProcess(home, *arguments))
        return started[-1]

    yield start
    for agent in started:
        if agent.process.poll() is None:
            agent.process.kill()
            agent.process.wait()


def tell(path, **given):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(message(**given), str(path))


def record(home, job="4711"):
    history = open_history(home / "history")
    records = history.records(0, time.time() + 60, job)
    return records[0] if records else None


def test_what_a_process_tells_is_in_the_history_when_the_agent_ends(home, agent_of):
    agent = agent_of()
    tell(agent.socket, stall={"/scratch": {"storage": 3.0}}, worked=1.0, gpus=2, began=time.time())
    assert agent.end() == 0
    job = record(home)
    assert job.measured
    assert job.waited == {"storage": 3.0}
    assert job.stall == 0.75
    assert sum(job.lost.values()) == 6.0
    assert not agent_folder().path.exists() or list(agent_folder().path.iterdir()) == []


def test_whoever_reads_a_history_finds_a_job_that_has_just_ended(home, agent_of):
    """However rarely the agent looks: it is asked to write first."""
    agent = agent_of("--interval", "20")
    for waited in (3.0, 4.0):
        tell(agent.socket, stall={"/scratch": {"storage": waited}}, worked=1.0, gpus=2)
        catch_up(str(home / "history"))
        assert record(home).waited == {"storage": waited}
    assert ask_state(agent.socket)["interval_s"] == 20


def test_asking_to_write_where_nobody_does_changes_nothing(home, monkeypatch):
    catch_up(str(home / "history"))
    folder = agent_folder()
    folder.path.mkdir(mode=0o700)
    listener = Listener(folder.socket)  # of an agent that hangs
    monkeypatch.setattr("headrace.telemetry.messages.ANSWER_S", 0.01)
    catch_up("s3://bucket/history")
    listener.receive()
    assert not listener.asked_to_write
    for _ in range(66):
        catch_up(str(home / "history"))
    listener.receive()
    assert listener.asked_to_write
    assert len(listener._asking) <= 64
    listener.written()  # they have all gone
    assert not listener.asked_to_write
    listener.close()


def test_an_agent_that_is_killed_and_started_again_loses_and_doubles_nothing(home, agent_of):
    first = agent_of()
    began = time.time()
    tell(first.socket, stall={"/": {"storage": 3.0}}, began=began)
    until(lambda: ask_state(first.socket)["messages"] == 1, 60)
    first.end(signal.SIGKILL)
    # Nobody listens now; what is waited meanwhile is told by the next message.
    with pytest.raises(ConnectionRefusedError):
        tell(first.socket, stall={"/": {"storage": 5.0}}, began=began)
    second = agent_of()
    tell(second.socket, stall={"/": {"storage": 7.0}}, began=began)
    until(lambda: ask_state(second.socket)["messages"] == 1, 60)
    second.end()
    assert record(home).waited == {"storage": 7.0}
    third = agent_of()
    tell(third.socket, stall={"/": {"storage": 7.5}}, began=began)
    third.end()
    assert record(home).waited == {"storage": 7.5}


def test_two_agents_on_one_node_are_one_too_many(home, agent_of):
    first = agent_of()
    second = subprocess.run(
        [sys.executable, "-c", PROGRAM, "agent", "start", "--foreground"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode == 3
    assert f"a telemetry agent runs already, process {first.process.pid}" in second.stderr
    # In another runtime folder it does not find the first one, but the history's lock.
    third = subprocess.run(
        [sys.executable, "-c", PROGRAM, "agent", "start", "--foreground"],
        check=False, capture_output=True, text=True, timeout=60,
        env=os.environ | {"HEADRACE_RUNTIME_DIR": str(home / "other")},
    )  # fmt: skip
    assert third.returncode == 3
    assert f"another agent writes this history, process {first.process.pid}" in third.stderr
    assert first.process.poll() is None


def test_an_agent_of_one_job_runs_beside_and_hears_of_that_job_alone(home, agent_of):
    agent_of()
    log = (home / "job.out").open("wb")
    environment = os.environ | {"HEADRACE_JOB_ID": "77"}
    with log:
        own = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "agent"], env=environment, stdout=log, stderr=log
        )
    try:
        path = agent_folder("77").socket
        until(path.exists, 30)
        assert str(path) in agent_sockets("77")
        tell(path, job="77", stall={"/": {"storage": 2.0}}, began=time.time())
        tell(path, job="78", instance="1" * 32, stall={"/": {"storage": 2.0}}, began=time.time())
        own.terminate()
        assert own.wait(20) == 0
    finally:
        own.kill()
        own.wait()
    assert file_of(home / "history", node_name(), "77").exists()
    assert record(home, "77").waited == {"storage": 2.0}
    assert record(home, "78") is None


def test_prometheus_is_served_with_names_escaped(home, agent_of):
    agent = agent_of("--metrics", "0")
    tell(agent.socket, job='a"b', name="<b>\\", stall={"/x": {"storage": 2.0}}, gpus=1)
    until(lambda: ask_state(agent.socket)["messages"] == 1, 60)
    url = f"http://{agent.state['metrics']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    assert (
        'headrace_agent_job_stall_seconds_total{cause="storage",file_system="/x",'
        'job_name="a\\"b",quality="measured"} 2.0' in text
    )
    assert 'title="<b>\\\\"' in text


def test_messages_that_are_none_are_refused_and_counted(home, agent_of):
    agent = agent_of()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for bad in (b"", b"{", b"\0" * 9000, b"x" * 60000):
            with contextlib.suppress(OSError):
                sock.sendto(bad, str(agent.socket))
    tell(agent.socket, job="ok", stall={"/": {"storage": 1.0}}, began=time.time())
    until(lambda: ask_state(agent.socket)["messages"] == 1, 60)
    assert ask_state(agent.socket)["refused"] >= 1
    agent.end()
    assert record(home, "ok").waited == {"storage": 1.0}


# -- in this process ------------------------------------------------------------------------------


@pytest.fixture
def agent(home):
    """An agent whose looks are taken by hand."""
    folder = agent_folder()
    folder.path.mkdir(mode=0o700)
    listener = Listener(folder.socket)
    writer = HistoryWriter(file_of(home / "history", "node0"), "node0")
    one = Agent(AgentOptions(node="node0", root=home / "empty"), listener, writer)
    yield one
    one.close()
    writer.close()
    listener.close()


def test_a_sensor_that_fails_is_left_out_and_the_others_go_on(agent, caplog):
    class Broken:
        name = "broken"
        why = ""

        def read(self):
            raise RuntimeError("no such luck")

    agent._sensors.append(Broken())
    agent.look()
    agent.look()
    assert "no such luck" in caplog.text
    assert caplog.text.count("is left out from now on") == 1
    assert agent.looks == 2


def test_what_is_missing_is_said_once(agent, caplog):
    caplog.set_level("INFO", "headrace.agent")
    for _ in range(5):
        agent.look()
    assert caplog.text.count("nvidia-ml-py") == 1
    assert "gpu" in agent.state()["without"]


def test_of_many_messages_of_one_process_the_newest_counts(agent):
    path = agent_folder().socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for waited in range(1, 9):
            sock.sendto(message(stall={"/": {"storage": float(waited)}}), str(path))
    agent.look()
    assert agent.messages == 1
    assert agent.ledger.totals["4711", "stall_s", "storage", "/"] == 8


def test_the_daemon_is_asked_why_jobs_wait_for_it(home):
    answers = [{"4711": {"storage": 1.0, "window": 3.0}}]
    folder = agent_folder()
    folder.path.mkdir(mode=0o700)
    listener = Listener(folder.socket)
    agent = Agent(
        AgentOptions(node="n", root=home / "empty"), listener, ask_node=lambda: answers[0]
    )
    tell(folder.socket, stall={"/": {"node": 8.0}})
    agent.look()
    assert agent.ledger.totals["4711", "stall_s", "window", "/"] == 6
    agent.close()
    listener.close()


def test_folders_that_others_may_write_are_told_nothing(tmp_path):
    folder = tmp_path / "rt-agent"
    folder.mkdir(mode=0o700)
    assert checked(str(folder / "socket"))
    folder.chmod(0o770)
    assert not checked(str(folder / "socket"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert not checked(str(link / "socket"))
    assert not checked(str(tmp_path / "nowhere" / "socket"))


def test_looks_come_less_often_where_they_cost_much_or_nothing_runs():
    assert next_interval(5, 1, 0.001) == 5
    assert next_interval(5, 0, 0.001) == 30
    assert next_interval(5, 1, 0.03) == pytest.approx(10)
    assert next_interval(5, 1, 9.0) == 60


def test_within_a_job_the_agent_is_the_jobs(home):
    assert own_options({"HEADRACE_HISTORY": "/h"}).job == ""
    options = own_options({"HEADRACE_HISTORY": "/h", "SLURM_JOB_ID": "9"})
    assert (options.job, options.history) == ("9", Path("/h"))
    assert node_name({"SLURMD_NODENAME": "node3"}) == "node3"


def test_a_history_may_be_read_from_a_url_and_is_kept_in_a_folder():
    environment = {"HEADRACE_HISTORY": "http://p:9090", "XDG_STATE_HOME": "/s"}
    assert history_place(environment) == "http://p:9090"
    assert own_options(environment).history == Path("/s/headrace/history")
    assert history_place({"XDG_STATE_HOME": "/s"}) == "/s/headrace/history"


def test_the_queue_does_not_wait_for_thousands_of_files(tmp_path):
    for i in range(300):
        (tmp_path / f"node{i}.telemetry").write_bytes(b"")
    assert stalls(tmp_path) == {}


def test_asking_where_nobody_listens(home):
    with pytest.raises(FileNotFoundError, match="no agent listens"):
        ask_state(agent_folder().socket)
    with pytest.raises(TelemetryError, match="no history"):
        open_history(home / "history")


def test_a_state_is_json(agent):
    agent.look()
    assert json.loads(json.dumps(agent.state()))["node"] == "node0"
