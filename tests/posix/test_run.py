"""`headrace run`: a program is served, ends as it ends, and what was not seen is said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from posix_placing import run

from headrace.errors import NodeError
from headrace.node.daemon import ask_status
from headrace.node.link import LinkLost
from headrace.node.wire import DaemonReport, FilesReady, ReplyStatus
from headrace.posix.attachment import Attachment, Page
from headrace.posix.launch import ProgramOptions, launch
from headrace.runtime import RuntimeFolder
from tests_shared import until

WAIT_S = 30.0
FILES = 15  # regular ones below the folder `files`
HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]


@pytest.fixture
def runtime(monkeypatch):
    """A runtime folder in which no daemon runs, and a place for private ones."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setenv("HEADRACE_RUNTIME_DIR", f"{folder}/rt")
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        assert [p.name for p in Path(folder).iterdir() if p.name.startswith("headrace-run")] == []


@pytest.fixture
def report(tmp_path):
    """Runs a command by `headrace run`; returns its end and the report."""

    def go(*arguments, **options):
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        command = [*HEADRACE, "run", "--report", str(path)]
        ended = run([*command, *map(str, arguments)], **options)
        return ended, json.loads(path.read_text()) if path.exists() else None

    return go


@pytest.fixture
def daemon(runtime):
    """A node daemon of the user."""
    from headrace.node.daemon import start, stop
    from headrace.runtime import runtime_folder

    folder = runtime_folder()
    start(folder, ["--ram", "64M"])
    yield folder
    with contextlib.suppress(FileNotFoundError):
        stop(folder, force=True)
    folder.log.unlink(missing_ok=True)


@contextlib.contextmanager
def when_copied(folders, go):
    """Makes the file `go` when one of the daemons, whose folders it is asked for, has copies of all files."""
    over = threading.Event()

    def copied(folder):
        with contextlib.suppress(FileNotFoundError, NodeError, LinkLost):
            roots = ask_status(folder)["files"]["roots"]
            return sum(root["copies"] for root in roots) >= FILES
        return False

    def watch():
        until(lambda: over.is_set() or any(copied(folder) for folder in folders()))
        go.touch()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def test_a_simulated_storage_is_read_once_and_then_served_from_memory(
    files, report, daemon, tmp_path
):
    go = tmp_path / "go"
    wait = f"until [ -e {go} ]; do sleep 0.05; done"
    program = f"cat {files}/*.bin | cksum; {wait}; cat {files}/*.bin | cksum"
    expected = run(["bash", "-c", program.replace(wait, ":")])
    with when_copied(lambda: [daemon], go):
        (status, out, err), written = report(
            "--root", files, "--simulate", "lustre", "--", "bash", "-c", program
        )
    assert (status, out) == (0, expected[1])
    assert written["opens"]["copy"] >= 12
    assert written["opens"]["refused"] == 0
    assert not written["private_daemon"]
    assert written["daemon"]["opens"]["ram"] == written["opens"]["copy"]
    assert b"from memory" in err
    assert b"(simulated lustre)" in err


def test_without_a_daemon_one_is_started_for_the_run_and_leaves_nothing(
    files, report, runtime, tmp_path
):
    go = tmp_path / "go"
    program = (
        "import glob, os, sys, time\n"
        "def read(): return sum(len(open(p, 'rb').read()) for p in glob.glob(sys.argv[1] + '/*.bin'))\n"
        "read()\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)\nprint(read())"
    )
    command = ["--root", files, "--simulate", "nfs", "--", sys.executable, "-c", program, files, go]

    def private():
        return [RuntimeFolder(path) for path in runtime.glob("headrace-run-*")]

    with when_copied(private, go):
        (status, out, err), written = report(*command)
    assert status == 0, err
    assert int(out) == sum(p.stat().st_size for p in files.glob("*.bin"))
    assert written["private_daemon"]
    assert written["opens"]["copy"] > 0
    assert list(runtime.iterdir()) == []


def test_a_baseline_is_simulated_and_not_served(files, report, runtime):
    began = time.monotonic()
    (status, _, err), written = report(
        "--root", files, "--simulate", "hdd", "--simulate-only", "--", "cat", *files.glob("*.bin")
    )
    assert status == 0, err
    assert written["opens"]["copy"] == 0
    assert written["opens"]["unknown"] == 12
    assert time.monotonic() - began > 12 * 0.01  # a seek each, and one for its bytes


@pytest.mark.parametrize(
    ("program", "status"), [("exit 7", 7), ("kill -TERM $$", -15), ("kill -KILL $$", -9)]
)
def test_the_exit_status_is_the_programs(files, runtime, report, program, status):
    ended, written = report("--root", files, "--simulate-only", "--simulate", "nfs", "--", "bash", "-c", program)  # fmt: skip
    assert ended[0] == status
    assert written["ended"]["signal"] == max(0, -status)


def test_signals_are_handed_on(files, runtime):
    program = "trap 'echo got it; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    command = [*HEADRACE, "run", "--root", str(files), "--simulate", "nfs",
               "--simulate-only", "--", "bash", "-c", program]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=WAIT_S)
    assert out == b"got it\n"
    assert process.returncode == 3


def test_a_signal_that_another_thread_got_is_handed_on():
    """Linear algebra's threads block nothing, and the kernel may give them what was meant for us."""
    script = """
import os, signal, threading, time
from headrace.posix import launch

def other():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=other).start()
ended = launch.run_program("/bin/sleep", ["sleep", "25"], os.environ)
assert ended.signal == signal.SIGTERM, ended
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, timeout=WAIT_S)
    assert ended.returncode == 0


def test_a_killed_launcher_takes_its_daemon_with_it(files, runtime, tmp_path):
    go = tmp_path / "go"
    program = "echo ready; until [ -e $1 ]; do sleep 0.05; done; cat $0/f03.bin | wc -c"
    command = [*HEADRACE, "run", "--root", str(files), "--",
               "bash", "-c", program, str(files), str(go)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert list(runtime.glob("headrace-run-*"))
        process.kill()
        go.touch()
        out, _ = process.communicate(timeout=WAIT_S)
    assert int(out) == 3 * 977  # the program goes on
    until(lambda: not list(runtime.glob("headrace-run-*")))


def test_a_daemon_that_is_killed_in_the_middle_costs_nothing_but_its_help(
    files, report, daemon, tmp_path
):
    go = tmp_path / "go"
    pid = ask_status(daemon)["pid"]
    program = (
        f"cat {files}/*.bin | cksum; until [ -e {go} ]; do sleep 0.05; done; "
        f"cat {files}/*.bin | cksum; kill -9 {pid}; "
        f"for k in 1 2 3; do cat {files}/*.bin | cksum; sleep 0.1; done"
    )
    expected = run(["bash", "-c", f"cat {files}/*.bin | cksum"])[1] * 5
    with when_copied(lambda: [daemon], go):
        (status, out, err), written = report(
            "--root", files, "--simulate", "nfs", "--", "bash", "-c", program
        )
    assert (status, out) == (0, expected), err
    assert written["opens"]["copy"] > 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert any("lost" in note for note in written["notes"])


STATIC = """
#include <stdio.h>
int main(int c, char** v) { FILE* f = fopen(v[1], "r"); int n = 0; while (fgetc(f) != EOF) n++; printf("%d\\n", n); }
"""


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    (folder / "count.c").write_text(STATIC)
    subprocess.run(["gcc", "-static", "-o", folder / "count", folder / "count.c"], check=True)
    return folder / "count"


def test_a_static_program_is_said_once_and_run(files, report, runtime, static):
    (status, out, err), written = report("--root", files, "--", static, files / "f03.bin")
    assert (status, int(out)) == (0, 3 * 977)
    assert err.count(b"linked statically") == 1
    assert f"headrace mount {files} FOLDER".encode() in err
    assert len(written["unseen"]) == 1


def test_a_script_is_followed_to_its_interpreter(tmp_path, static):
    from headrace.posix.launch import why_unseen

    for name, line in (("a", f"#!{static} -x"), ("b", f"#! {tmp_path}/a"), ("c", "#!/bin/sh")):
        (tmp_path / name).write_text(line + "\n")
        (tmp_path / name).chmod(0o755)
    assert "linked statically" in why_unseen(str(tmp_path / "b"))
    assert why_unseen(str(tmp_path / "c")) == ""
    (tmp_path / "d").write_text("#!/usr/bin/env -S python3 -u\n")
    assert why_unseen(str(tmp_path / "d")) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((4, b"\x01"), "not a 64-bit program"),
        ((18, b"\x15\x00"), "another architecture"),
        ((54, b"\x07\x00"), "no program that the system knows"),
    ],
)
def test_a_program_that_cannot_load_the_shim_is_known_by_its_head(tmp_path, change, reason):
    from headrace.posix.launch import why_unseen

    head = bytearray(Path(os.path.realpath("/bin/true")).read_bytes())
    head[change[0] : change[0] + len(change[1])] = change[1]
    (tmp_path / "odd").write_bytes(head)
    assert reason in why_unseen(str(tmp_path / "odd"))


def test_children_that_cannot_be_seen_are_counted(files, report, runtime, static):
    program = f"{static} {files}/f03.bin; env -i /bin/cat {files}/f02.bin | wc -c; cat {files}/f01.bin | wc -c"
    (status, out, err), written = report("--root", files, "--simulate", "nfs", "--simulate-only",
                                       "--", "bash", "-c", program)  # fmt: skip
    assert (status, out.split()) == (0, [b"2931", b"1954", b"977"])
    assert written["opens"]["blind"] == 2
    assert b"2 started programs could not be seen" in err


def test_the_order_of_opens_is_recorded_and_can_be_given(files, report, daemon, tmp_path):
    names = [f"{files}/f{i:02}.bin" for i in (7, 3, 3, 9)]
    order = tmp_path / "order"
    (status, _, err), written = report(
        "--root", files, "--simulate", "nfs", "--record-order", order, "--", "cat", *names
    )
    assert status == 0, err
    assert order.read_text().split() == names
    (status, _, err), written = report(
        "--root", files, "--simulate", "nfs", "--order", order, "--", "cat", *names
    )
    assert status == 0, err
    assert written["daemon"]["order"]


def test_opens_that_are_not_in_the_recorded_order_are_said(files, runtime, tmp_path):
    order = tmp_path / "order"
    names = [f"{files}/f{i:02}.bin" for i in (7, 3, 9)]
    options = ProgramOptions(roots=[str(files)], record_order=str(order), plane=False)  # no board
    written = launch(["cat", *names], options)
    assert order.read_text() == ""
    assert f"; 3 opens are not in {order}: " in written.line()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--root", "{files}", "--", "/none/such"], 127, "no such file\n  next: "),
        (["--root", "{files}", "--", "no-such-command-anywhere"], 127, "no such command\n  next: "),
        (["no-such-command-anywhere"], 127, "no such command\n  next: "),
        (["--root", "{files}", "--", "{files}/f01.bin"], 126, "not executable"),
        (["--root", "{files}/none", "--", "true"], 2, "no such folder"),
        (["--simulate-only", "--root", "{files}", "--", "true"], 2, "--simulate NAME"),
        (["--", "true"], 2, "--root DIR"),
        (["--no-such-option", "true"], 2, "--no-such-option"),
    ],
)
def test_what_cannot_be_run_says_so(files, report, runtime, arguments, status, words):
    (code, _, err), _ = report(*(a.format(files=files) for a in arguments))
    assert code == status
    assert words in err.decode()


class _Daemon:
    """What comes from a daemon: the board and ring of a plane."""

    peer_pid = os.getpid()

    def __init__(self, plane):
        self._plane = plane

    def take_fds(self, count):
        return [os.dup(fd) for fd in (self._plane.board.fd, self._plane.ring.fd)][:count]


class _Late:
    """A daemon that has counted one more open each time it is asked."""

    def __init__(self, attachment):
        self._attachment, self.asked = attachment, 0

    def new_ticket(self):
        return self.asked + 1

    def send(self, _message):
        self.asked += 1

    def receive(self, _seconds):
        report = {"opens": {"ram": self.asked, "source": 1}, "reports_lost": 1}
        self._attachment._take(self, DaemonReport(1, ReplyStatus.OK, json.dumps(report).encode()))


def test_the_daemons_figures_are_asked_for_until_all_opens_are_in_them(files):
    page = Page([str(files)])
    attachment = Attachment(page, ProgramOptions(roots=[str(files)]))
    daemon = _Late(attachment)
    page.opened = lambda _boards: 7  # as the programs themselves have counted
    attachment._ask_for_report(daemon)
    page.close()
    assert (daemon.asked, attachment._report["opens"]["ram"]) == (5, 5)


@pytest.mark.parametrize("found", [False, True])
def test_files_that_were_not_found_in_time_are_said_and_no_others(files, plane, found):
    served = plane(files)
    page = Page([str(files)])
    attachment = Attachment(page, ProgramOptions(roots=[str(files)]))
    daemon = _Daemon(served)
    attachment._take(daemon, FilesReady(1, ReplyStatus.OK, "scanning"))
    if found:
        board, ring = served.board, served.ring
        ready = FilesReady(1, ReplyStatus.OK, "", 1, 1, True, board.inode, 0, ring.inode, 0)
        attachment._take(daemon, ready)
    attachment.end()
    page.close()
    assert len(attachment.notes) == (not found)
