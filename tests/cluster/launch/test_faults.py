"""What can go wrong around a launch: a clear error or a clean recovery, and nothing left either way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from cluster.launch.launching import HEADRACE, TRAINER, Launch
from headrace.cluster.launch.conductor import clock_remarks
from headrace.cluster.launch.folders import sweep
from headrace.cluster.launch.nodes import LaunchNodes, NodeConnection
from headrace.cluster.notation import seconds as duration_s
from tests_shared import ROOT, blocks, until

SLEEP = ("--framework", "plain", "--ranks-per-node", "1", "sleep")


def test_two_launches_of_one_job_do_not_meet(launch, photos, tmp_path):
    """Each has its own ports, folders and meeting; both stage and train."""
    words = ("--framework", "plain", "--ranks-per-node", "1", "--stage", str(photos), str(TRAINER))
    other = Launch(tmp_path, launch.disk)
    other.report_file = tmp_path / "other.json"
    launch.start(
        "--manifest", str(tmp_path / "a.json"), *words, str(tmp_path / "a"), "--pace", "0.1"
    )
    other.start(
        "--manifest", str(tmp_path / "b.json"), *words, str(tmp_path / "b"), "--pace", "0.1"
    )
    ends = [launch.end(), other.end()]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert launch.report["staged_samples"] == other.report["staged_samples"] == 36
    assert launch.left() == []
    # The same seed and data: the same order, whatever ran beside it.
    ended = subprocess.run(
        [*HEADRACE, "compare-runs", "--json", str(tmp_path / "a.json"), str(tmp_path / "b.json")],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    keys = {d["key"] for d in json.loads(ended.stdout)["differences"]}
    assert keys == {"command.words"}
    order = json.loads((tmp_path / "a.json").read_text())["order"]
    assert order["hash"] is not None
    assert order["position"] == 36


def test_two_launches_of_one_job_do_not_share_a_gpu(launch):
    gpus = {"HEADRACE_JOB_GPUS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "4,5"}
    script = launch.folder / "gpus.sh"
    script.write_text("#!/bin/sh\necho sees $CUDA_VISIBLE_DEVICES\ntouch $1\nexec sleep 60\n")
    script.chmod(0o755)
    plain = ("--framework", "plain", "--no-daemon")
    flag = launch.folder / "flag"
    launch.start(*plain, "--gpus", "1", str(script), str(flag), nodes=1, **gpus)
    assert until(flag.exists, 30.0)
    other = Launch(launch.folder, launch.disk)
    other.start(*plain, str(script), "x", nodes=1, **gpus)
    code, _, err = other.end()
    assert code == 3
    assert (
        "1 of this node's 2 GPUs are free, expected 2: another `headrace launch` of this job" in err
    )
    third = Launch(launch.folder, launch.disk)
    third.start(
        *plain, "--gpus", "1", "sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES", nodes=1, **gpus
    )
    code, out, err = third.end()
    assert (code, out) == (0, "sees 5\n"), err
    launch.process.send_signal(signal.SIGTERM)
    _, out, _ = launch.end()
    assert out == "sees 4\n"
    assert launch.left() == []


def test_staging_that_fills_a_disk_says_so_and_leaves_nothing(launch, tmp_path):
    source = tmp_path / "large"
    (source / "a").mkdir(parents=True)
    for i in range(8):
        (source / "a" / f"{i}.bin").write_bytes(os.urandom(100_000))
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], check=False
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        shutil.rmtree(launch.disk)
        launch.disk = small
        launch.start("--framework", "plain", "--stage", str(source), "touch", "began", nodes=1)
        code, _, err = launch.end()
        assert code == 3
        assert "node n0: staging failed:" in err
        assert "No space left on device" in err
        assert "next: Free some space" in err
        assert launch.left() == []
        assert not (tmp_path / "began").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_source_that_is_not_there_is_named(launch):
    launch.start("--framework", "plain", "--stage", "nothing-here", "true", nodes=1)
    code, _, err = launch.end()
    assert code == 3
    assert "staging failed" in err
    assert "nothing-here" in err
    assert launch.left() == []


def test_a_node_whose_clock_is_wrong_is_named_and_takes_part(launch, tmp_path):
    """One node's Python lives an hour ahead."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('HEADRACE_NODE_RANK') == '1':\n"
        "    real = time.time\n"
        "    time.time = lambda: real() + 3600\n"
    )
    launch.start(
        "--framework", "plain", "--ranks-per-node", "1", "--no-daemon", "true", PYTHONPATH=str(tmp_path)
    )  # fmt: skip
    code, _, err = launch.end()
    assert code == 0, err
    assert "node n1: its clock is 3600 s ahead" in err
    assert "node n0: its clock" not in err


def test_a_clock_that_is_hours_ahead_removes_no_folder_that_is_being_made(tmp_path, monkeypatch):
    made = tmp_path / f"headrace-launch-{os.geteuid()}" / ".new-7-0"
    made.mkdir(parents=True, mode=0o700)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 5 * 3600)
    assert sweep(tmp_path) == []
    assert made.is_dir()
    monkeypatch.setattr(time, "time", lambda: now_s + 49 * 3600)
    assert len(sweep(tmp_path)) == 1
    assert not made.exists()


def test_only_clocks_that_are_wrong_are_named():
    assert clock_remarks({"a": 0.3, "b": -1.9}) == []
    (remark,) = clock_remarks({"a": 0.0, "b": -35.2})
    assert remark.startswith("node b: its clock is 35 s behind")


def test_a_program_that_is_not_there_is_named(launch):
    launch.start("--framework", "plain", "--no-daemon", "no-such-program", nodes=1)
    code, _, err = launch.end()
    assert code == 127
    assert "no-such-program: No such file" in err
    assert launch.left() == []


def test_a_local_folder_that_is_not_there_is_named(launch):
    launch.start("--local", "/nonexistent/disk", *SLEEP, "0", nodes=1)
    code, _, err = launch.end()
    assert code == 3
    assert "/nonexistent/disk: the launch's folder cannot be made" in err


def test_a_node_that_does_not_come_is_named(launch, monkeypatch, tmp_path):
    """srun is there, and starts nothing in time."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\nexec sleep 30\n")
    srun.chmod(0o755)
    env = {
        "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_CPUS_ON_NODE": "2",
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    launch.start("--connect-wait", "1", *SLEEP, "0", without=("HEADRACE_JOB_NODES",), **env)
    code, _, err = launch.end()
    assert code == 3
    assert "2 of 2 nodes did not come within 1 s: n0, n1" in err
    srun.write_text("#!/bin/sh\necho srun: error: no room >&2\nexit 1\n")
    launch.start("--connect-wait", "20", *SLEEP, "0", without=("HEADRACE_JOB_NODES",), **env)
    code, _, err = launch.end()
    assert code == 3
    assert "srun: error: no room" in err
    assert "what starts them ended with status 1" in err


def test_usr1_has_a_script_that_asks_save_and_asks_for_a_new_start(launch, photos):
    log = launch.folder / "log"
    words = (
        "--framework", "plain", "--ranks-per-node", "1", str(TRAINER), str(launch.folder / "c"), "--data",
        str(photos), "--log", str(log),
    )  # fmt: skip
    launch.start(*words, "--pace", "0.2", HEADRACE_JOB_REQUEUE="1")
    launch.wait_for_steps(log, 2)
    launch.process.send_signal(signal.SIGUSR1)
    code, out, err = launch.end()
    assert code == 75, err
    assert out.count("leaves at step") == 2
    assert launch.report["outcome"] == "requeued"
    # The next life goes on there, to the end.
    launch.start(*words, HEADRACE_JOB_RESTARTS="1")
    code, out, err = launch.end()
    assert code == 0, err
    assert "begins at step 0" not in out
    assert "restarted once: completed" in err
    from cluster.launch.launching import seen_counts

    assert (seen_counts(launch.folder / "c", 2) == 1).all()


def test_ranks_that_begin_to_ask_after_the_request_leave_all_the_same(launch):
    """What loads for longer than a short job may last must not run into its time limit unasked."""
    script = launch.folder / "late.py"
    script.write_text(
        "import pathlib, time\nimport headrace as hr\npathlib.Path('begun').touch()\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"
        "while not hr.cluster.should_stop():\n    time.sleep(0.05)\n"
    )
    launch.start("--framework", "plain", "--no-daemon", str(script), nodes=1)
    assert until((launch.folder / "begun").exists, 30.0)
    launch.process.send_signal(signal.SIGUSR1)
    assert any("or not yet" in line for line in launch.process.stderr)
    (launch.folder / "go").touch()
    code, _, err = launch.end()
    assert code == 75, err
    assert launch.report["why"] == "asked to start again (SIGUSR1); the ranks left"


def test_usr1_is_handed_to_scripts_that_know_it_and_kills_no_other(launch):
    script = launch.folder / "own.sh"
    script.write_text(
        "#!/bin/bash\ntrap 'echo heard; exit 0' USR1\ntouch $1\nwhile true; do sleep 0.1; done\n"
    )
    script.chmod(0o755)
    # A shell cannot trap a signal that was ignored when it began: Python can.
    python = launch.folder / "own.py"
    python.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('heard', flush=True), sys.exit(0)))\n"
        "pathlib.Path('flag').touch()\n"
        "time.sleep(60)\n"
    )
    launch.start("--framework", "plain", "--no-daemon", str(python), nodes=1)
    assert until((launch.folder / "flag").exists, 30.0)
    launch.process.send_signal(signal.SIGUSR1)
    code, out, err = launch.end()
    assert (code, out) == (0, "heard\n"), err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("59", 59), ("1:00", 60), ("1:00:01", 3601), ("2-01:00:00", 176400), ("UNLIMITED", None), ("", None)],
)  # fmt: skip
def test_what_slurm_says_is_left_is_understood(text, seconds):
    assert duration_s(text, bare_s=1) == seconds


def test_a_dry_run_prints_commands_and_reasons_and_starts_nothing(launch):
    launch.start(
        "--dry-run", "--ranks-per-node", "2", "train.py", "--lr", "0.1", OMP_NUM_THREADS="3"
    )  # fmt: skip
    assert launch.process.wait(30) == 0
    document = launch.report
    assert document["plan"]["ranks_per_node"] == 2
    assert [len(n["commands"]) for n in document["commands"]] == [1, 1]
    (kept,) = [s for s in document["settings"] if s["name"] == "OMP_NUM_THREADS"]
    assert kept["kept"] is True
    assert launch.left() == []
    assert not list(launch.folder.glob("headrace-runs"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "3", "x.py"], "3 GPUs are asked for, the job has 0"),
        (["--framework", "caffe", "x.py"], "framework is 'caffe'"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(launch, words, message):
    (launch.folder / "x.py").touch()
    launch.start(*words)
    code, _, err = launch.end()
    assert code in (2, 3)
    assert message in err


def test_the_documented_script_runs(launch, photos):
    page = ROOT / "docs/howto/launch.md"
    snippet = next(b for b in blocks(page, "python") if "train.py" in b)
    subprocess.run([sys.executable, "-c", snippet], cwd=launch.folder, check=True)
    command = next(b for b in blocks(page, "sh") if "--stage photos" in b).split()
    assert command[:2] == ["headrace", "launch"]
    shutil.copytree(photos, launch.folder / "photos")
    launch.start(*command[2:], nodes=1)
    code, out, err = launch.end()
    assert code == 0, err
    assert out.count("trained 10 steps") == 2


@pytest.fixture
def nodes():
    waiting = LaunchNodes(("one",), "127.0.0.1", "secret", 30.0)
    yield waiting
    waiting.close()


def until_received(nodes, holds):
    """Receives until something holds."""

    def step():
        list(nodes.receive(0.05))
        return holds()

    return until(step)


def has_hung_up(connected):
    """The other end."""
    try:
        return not connected.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def say_hello(nodes, token="secret"):
    node = NodeConnection(socket.create_connection(("127.0.0.1", nodes.port)))
    node.send("hello", token=token, node=0, clock_s=time.time())
    return node


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "hello", "token": "\xc3\xa9", "node": 0}',
        rb'{"kind": "hello", "token": "\udc80", "node": 0}',
        rb'{"kind": "join", "key": "\udc80", "name": "one"}',
        b"[" * 50_000,
        b'{"kind": "hello", "token": "secret", "node": 1e400}',
        b'{"kind": "hello", "token": "secret", "node": -1}',
        b"\xff\x00",
    ],
)
def test_strangers_do_not_end_a_launch(nodes, line):
    with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
        stranger.sendall(line + b"\n")
        stranger.setblocking(False)
        until_received(nodes, lambda: has_hung_up(stranger))  # it is sent away
        with say_hello(nodes)._socket:
            assert until_received(nodes, lambda: nodes.all[0].connection)


def test_nodes_come_where_descriptors_have_high_numbers(nodes):
    """`select` takes none above 1,023: a launch of a thousand nodes would have ended there."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 1200:
        pytest.skip(f"{limits[1]} descriptors are all that there may be")
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(1200, limits[0]), limits[1]))
        held += [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
        node = say_hello(nodes)
        with node._socket:
            assert until_received(nodes, lambda: nodes.all[0].connection).fileno() > 1023
            node.send("held", furthest=3)
            until_received(nodes, lambda: nodes.all[0].held == 3)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_launch_of_many_nodes_may_open_as_many():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        LaunchNodes(("one",) * 500, "127.0.0.1", "secret", 30.0).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 500
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
