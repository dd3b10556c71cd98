"""`headrace cluster` without a cluster: options, JSON, errors, watching; sizes are tested in tests/cluster."""

import contextlib
import json
import os
import pty
import pwd
import select
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster.clusters import busy, mixed
from headrace.cli import cluster_submit, web
from headrace.cluster.executor import JobState, JobStatus
from headrace.cluster.request import JOB_OPTIONS
from headrace.cluster.snapshot import load_snapshot, save_snapshot
from headrace.errors import ClusterError

SCRIPT = "#!/bin/bash\n#SBATCH --job-name=ünï\nsrun true\n"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Snapshots as files, a script, and no site's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HEADRACE_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    save_snapshot(mixed(), tmp_path / "mixed.json")
    save_snapshot(busy(), tmp_path / "busy.json")
    (tmp_path / "job.sh").write_text(SCRIPT)
    return tmp_path


def batch(run, *words):
    return run("cluster", "batch", "--from", "mixed.json", "--dry-run", *words)


def test_each_row_of_the_table_is_an_option(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shown = {name: run("cluster", name, "--help").out for name in ("run", "batch")}
    for ask in JOB_OPTIONS:
        for flag in ask.flags:
            assert f"{flag}" in shown["batch"]
        only_batch = ask.field in ("array", "output", "error", "requeue")
        assert (f" {ask.flag} " in shown["run"]) is not only_batch


def test_dry_run_prints_the_script_and_nothing_else_on_standard_output(program, saved):
    ended = program(
        "cluster", "batch", "--from", "mixed.json", "--dry-run", "-g", "9", "job.sh", "x y"
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith(
        b"#!/bin/bash\n#SBATCH --job-name=\xc3\xbcn\xc3\xaf\n#SBATCH --partition=main\n"
    )
    assert ended.stdout.endswith(b"\nsrun true\n")
    assert ended.stderr.decode().splitlines() == [
        "note: 9 GPUs on 2 nodes: not the same number on each; 8 or 10 would be.",
        "command: sbatch --parsable /dev/stdin 'x y'",
    ]


def test_dry_run_of_the_local_executor_names_no_command_of_slurm(program, run, saved):
    words = ("cluster", "batch", "--executor", "local", "--dry-run", "-g", "1", "job.sh")
    assert program(*words, "x y").stderr.decode().splitlines()[-1] == (
        "This machine runs the script by itself, with 'x y'."
    )
    assert program(*words).stderr.decode().splitlines()[-1] == (
        "This machine runs the script by itself."
    )
    assert run(*words[:-1], "--json", "job.sh").document["command"] is None


def test_dry_run_as_json(run, saved):
    data = batch(run, "--json", "-g", "2", "-t", "4h", "job.sh").document
    assert data["job"] is None
    assert data["command"] == ["sbatch", "--parsable"]
    assert "#SBATCH --time=04:00:00\n" in data["script"]
    assert data["layout"]["gpus_per_node"] == 2
    assert data["remarks"] == []
    data = run(
        "cluster", "run", "--from", "mixed.json", "--dry-run", "--json", "-g", "2", "--", "ls", "-l"
    ).document
    assert data["command"][0] == "salloc"
    assert data["command"][-2:] == ["ls", "-l"]


def test_what_follows_the_script_is_its_own(run, saved):
    data = batch(run, "--json", "-g", "2", "job.sh", "--", "-g", "7", "--time", "x").document
    assert data["layout"]["gpus"] == 2
    assert data["command"][-4:] == ["-g", "7", "--time", "x"]


@pytest.mark.parametrize("word", ["--time=8h", "-t", "--gpus", "--dry-run"])
def test_an_option_of_ours_behind_the_script_is_not_passed_on_in_silence(run, saved, word):
    ended = batch(run, "-g", "2", "job.sh", "--epochs", "3", word, "1")
    assert ended.code == 3
    assert f"{word} stands after job.sh" in ended.err
    assert f"job.sh -- --epochs 3 {word} 1" in ended.err
    assert batch(run, "-g", "2", "job.sh", "--epochs", "3", "--timeout=1").code == 0


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"\n", 3)])
def test_on_a_terminal_it_is_asked_about(saved, answer, code):
    pid, fd = pty.fork()
    if pid == 0:
        words = [
            "cluster",
            "batch",
            "--from",
            "mixed.json",
            "--dry-run",
            "-g2",
            "job.sh",
            "-t",
            "1",
        ]
        os.execv(
            sys.executable,
            [sys.executable, "-c", "from headrace.cli import main; main()", *words],
        )
    try:
        read_until(fd, b"Is it for the script? [y/N] ")
        os.write(fd, answer)
        read_until(fd, b"srun true" if code == 0 else b"Put it before job.sh")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    finally:
        os.close(fd)


def test_a_job_that_is_completing_is_shown_as_such(run, saved):
    seen = busy()
    jobs = [
        replace(job, state=JobState.COMPLETING) if job.job_id == "101" else job for job in seen.jobs
    ]
    save_snapshot(replace(seen, jobs=tuple(jobs)), saved / "ending.json")
    (line,) = [line for line in run("cluster", "queue", "--from", "ending.json").out.splitlines()
               if line.startswith("101 ")]  # fmt: skip
    assert "completing" in line


def test_quiet_says_nothing(run, saved):
    assert batch(run, "-q", "-g", "9", "job.sh").err == ""


def test_a_site_of_another_cluster_is_remarked(run, saved):
    (saved / "site.yaml").write_text("cluster: elsewhere\n")
    assert (
        "site.yaml is of cluster elsewhere, this is mixed"
        in batch(run, "--site", "site.yaml", "-g1", "job.sh").err
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["-g", "0", "job.sh"], 3, "the command line: --gpus is '0'"),
        (["-g", "1", "none.sh"], 3, "none.sh: the script cannot be read: No such file"),
        (["-g", "1", "."], 3, "cannot be read: Is a directory"),
        (["-t", "soon", "-g", "1", "job.sh"], 3, "'soon' is no time limit"),
        (["-g", "1", "--site", "none.yaml", "job.sh"], 3, "none.yaml: No such file"),
        (["--gpu", "1", "job.sh"], 2, "--gpu"),
        ([], 2, "script"),
    ],
)
def test_mistakes(run, saved, words, code, says):
    ended = batch(run, *words)
    assert ended.code == code
    assert says in ended.err.replace("'SCRIPT'", "script")
    ended = batch(run, "--json", *words)
    assert ended.code == code
    assert says in ended.document["error"]["message"].replace("'SCRIPT'", "script")


def test_an_unknown_executor(run, saved):
    ended = run("cluster", "queue", "--executor", "pbs")
    assert ended.code == 3
    assert "there is no executor 'pbs', expected slurm, ray, kubernetes or local" in ended.err


def test_without_slurm_it_says_so(run, saved, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    ended = run("cluster", "queue", "--executor", "slurm")
    assert ended.code == 3
    assert "is not installed here" in ended.err
    assert "--executor" in ended.err or "local" in ended.err


def test_this_machine_is_a_cluster_of_one_node(run, saved):
    data = run("cluster", "run", "--executor", "local", "--dry-run", "--json", "-g", "3").document
    assert data["layout"]["nodes"] == 1
    assert data["layout"]["gpus"] == 3
    assert "salloc" not in data["command"]
    board = run("cluster", "queue", "--executor", "local", "--json").document
    assert board["totals"]["nodes"] == 1


def test_the_queue_as_text_and_json(run, saved):
    shown = run("cluster", "queue", "--from", "busy.json")
    assert "gpu0" in shown.out
    assert "\x1b" not in shown.out
    board = run("cluster", "queue", "--from", "busy.json", "--json", "--user", "ann").document
    assert [row["job"] for row in board["running"]] == ["101"]
    assert board["waiting"][0]["starts_in_s"] == 5400
    assert set(board) == {
        "cluster",
        "slurm",
        "taken_s",
        "totals",
        "nodes",
        "running",
        "waiting",
        "users",
    }


def test_me_is_the_caller(run, saved, monkeypatch):
    entry = pwd.struct_passwd(("ann", "x", os.geteuid(), 0, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", {os.geteuid(): entry}.__getitem__)
    monkeypatch.setenv("LOGNAME", "eve")  # anybody can say so
    board = run("cluster", "queue", "--from", "busy.json", "--json", "--user", "me").document
    assert {row["user"] for row in board["waiting"]} == {"ann"}


def test_what_was_seen_is_kept(run, saved):
    assert run("cluster", "queue", "--from", "busy.json", "--save", "kept.json").code == 0
    assert load_snapshot(saved / "kept.json") == busy()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--node", "gpu9"], 2, "there is no node gpu9"), (["--node", "gpu["], 2, "no list of hosts"),
        (["--partition", "x"], 2, "there is no partition x; expected main"),
        (["--watch", "1"], 2, "--watch is 1"),
        (["--rows", "0"], 2, "--rows is 0"), (["--watch", "nan"], 2, "nan, expected a number"),
    ],
)  # fmt: skip
def test_mistakes_of_the_queue(run, saved, words, code, says):
    ended = run("cluster", "queue", "--from", "busy.json", *words)
    assert ended.code == code
    assert says in ended.err


def test_init(run, saved):
    assert run("cluster", "init", "--from", "mixed.json").code == 0
    path = saved / "config/headrace/site.yaml"
    text = path.read_text()
    assert "gpu_partition: main" in text
    path.write_text(f"{text}account: mine\n")
    again = run("cluster", "init", "--from", "mixed.json", "--json")
    assert again.code == 3
    assert path.read_text() != text
    assert "--overwrite" in again.document["error"]["next_step"]
    assert run("cluster", "init", "--from", "mixed.json", "--overwrite", "--json").document[
        "path"
    ] == str(path)
    assert run("cluster", "init", "--from", "mixed.json", "-o", "-").out == path.read_text()


def read_until(fd, text, seconds=30):
    said = b""
    deadline = time.monotonic() + seconds
    while text not in said:
        assert time.monotonic() < deadline, said
        if select.select([fd], [], [], 1)[0]:
            with contextlib.suppress(OSError):
                said += os.read(fd, 65536)
    return said


@pytest.mark.parametrize("colour", [True, False])
def test_watching_on_a_terminal_and_ctrl_c(saved, colour):
    pid, fd = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        os.environ.pop("NO_COLOR", None)
        if not colour:
            os.environ["NO_COLOR"] = "1"
        code = "from headrace.cli import main; main()"
        words = ["cluster", "queue", "--from", "busy.json", "--watch", "5"]
        os.execv(sys.executable, [sys.executable, "-c", code, *words])
    try:
        said = read_until(fd, b"eve")
        assert b"\x1b[?1049h" in said  # a screen of its own
        assert (b"\x1b[36m" in said) is colour
        os.kill(pid, signal.SIGINT)
        said = read_until(fd, b"\x1b[?1049l")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(fd)


def test_watching_goes_on_while_the_source_is_away(saved, monkeypatch, capsys):
    from headrace.cli import cluster_queue
    from headrace.cli.printing import Output

    looks = iter([busy(), None, busy()])

    def source():
        from headrace.errors import ClusterError

        if (seen := next(looks)) is None:
            raise ClusterError("slurmctld does not answer.")
        return seen

    class Over:
        left = 3

        def wait(self, _):
            self.left -= 1
            return self.left == 0

    monkeypatch.setattr("headrace.cli.printing.interrupt", lambda: contextlib.nullcontext(Over()))
    cluster_queue.show_queue(Output(), source, watch=30, rows=5)
    out = capsys.readouterr().out
    assert out.count("llm-pretrain") == 2
    assert "slurmctld does not answer. Still looking." in out


def test_the_documents_of_json_are_whole(run, saved):
    text = run("cluster", "queue", "--from", "busy.json", "--json").out
    assert json.loads(text)["nodes"][0]["gpu_jobs"] == ["102", None, "101", None]


def test_stalls_that_agents_wrote_down_are_shown(run, saved, monkeypatch):
    from types import SimpleNamespace

    from headrace.telemetry import history as stall

    monkeypatch.setattr(stall, "stalls", lambda _: {"102": SimpleNamespace(share=0.31)})
    running = run("cluster", "queue", "--from", "busy.json", "--json").document["running"]
    assert {row["job"]: row["stall"] for row in running} == {"102": 0.31, "101": None}
    assert "31%" in run("cluster", "queue", "--from", "busy.json").out


def test_a_history_that_is_not_there_does_no_harm(run, saved, monkeypatch):
    monkeypatch.setenv("HEADRACE_HISTORY", str(saved / "none"))
    assert run("cluster", "queue", "--from", "busy.json").code == 0


@pytest.mark.parametrize(
    ("reason", "says"),
    [("", "job 7 is CANCELLED."), ("OUT OF TIME", "job 7 is CANCELLED: OUT OF TIME.")],
)
def test_a_command_on_ray_that_was_cancelled_says_so_in_a_whole_sentence(reason, says):
    status = JobStatus("7", "sh", JobState.CANCELLED, reason, signal=15)
    on = SimpleNamespace(submit=lambda _: "7", logs=lambda *_, **__: (), one=lambda _: status)
    plan = SimpleNamespace(command=("true",), layout=SimpleNamespace(words=tuple))
    with pytest.raises(ClusterError) as raised:
        cluster_submit._follow(on, plan, "sh", "")
    assert raised.value.message == says


def test_pages_ask_again_for_the_folder_of_a_job_that_was_not_known_yet(tmp_path, monkeypatch):
    statuses, now = {"17": []}, 0.0
    on = SimpleNamespace(status=lambda jobs: {job: statuses[job] for job in jobs})
    monkeypatch.setattr("headrace.cluster.executor.executor", lambda _: on)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    folder_of = web._folders(None)
    assert folder_of("17") is None
    statuses["17"] = [SimpleNamespace(folder=tmp_path)]
    assert folder_of("17") is None, "the scheduler is not asked each time"
    now = 60.0
    assert folder_of("17") == tmp_path
