"""However a launch ends, nothing of it is left: no process, socket, memory, file or staged byte (H9, H11).

Two nodes of this machine with a rank each, staging and daemons beside them. Everything that a launch starts
inherits a mark, by which it is found; memory and unnamed files live only as long as somebody has them open.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from cluster.launch.launching import TRAINER, Launch, parent, processes_with, seen_counts
from tests_shared import comes_true, until

RANKS = 2


def begin(
    launch: Launch, photos: Path, *more: str, options: tuple[str, ...] = (), **env: str
) -> Path:
    """A staged job of two ranks; returns the folder of its logs when all ranks have made a step."""
    log = launch.folder / "log"
    launch.start(
        "--framework", "plain", "--ranks-per-node", "1", "--stage", str(photos), *options,
        str(TRAINER), str(launch.folder / "checkpoints"), "--log", str(log), *more, **env,
    )  # fmt: skip
    return log


def running(
    launch: Launch, photos: Path, *more: str, options: tuple[str, ...] = (), **env: str
) -> None:
    log = begin(launch, photos, "--pace", "0.2", "--epochs", "50", *more, options=options, **env)
    launch.wait_for_steps(log, RANKS)
    words = " ".join(processes_with(launch.mark).values())
    # What must be gone afterwards is there now.
    assert "stage" in words
    assert "node start" in words
    assert len(launch.supervisors()) == 2
    assert len(launch.ranks()) == RANKS
    assert any("headrace-launch" in left for left in launch.left())


def test_after_success_nothing_is_left(launch, photos):
    begin(launch, photos, options=("--agent",))
    code, out, err = launch.end()
    assert code == 0, err
    assert "the job's report\nheadrace: job 7" in err
    assert out.count("ends at step") == RANKS
    assert launch.left() == []  # at once: the launcher returns when all is gone
    counts = seen_counts(launch.folder / "checkpoints", RANKS)
    assert (counts == 1).all()
    assert counts.shape == (2, 36)
    report = launch.report
    assert report["outcome"] == "completed"
    assert report["ended"] == report["stuck"] == 0
    assert report["staged_samples"] == 36
    assert "36 samples staged" in err


def test_after_a_rank_has_failed_nothing_is_left(launch, photos):
    begin(launch, photos, "--pace", "0.05", "--epochs", "50", "--fail-at", "3")
    code, _, err = launch.end()
    assert code == 9, err
    assert launch.left() == []
    assert launch.report["outcome"] == "failed"
    assert re.search(r"rank 0 \(node n0\) ended with status 9$", err, re.MULTILINE)


def test_torchruns_that_part_while_a_rank_fails_print_no_stack_of_their_store(launch):
    """The node whose ranks ended well waits at the store of the other one's torchrun, which leaves first."""
    pytest.importorskip("torch")
    script = launch.folder / "uneven.py"
    script.write_text(
        "import os, time\n"
        "level = os.environ.get('TORCH_CPP_LOG_LEVEL')\n"
        "os.write(1, f'level {level}\\n'.encode())\n"  # two ranks' lines stay whole
        "if os.environ['RANK'] == '0':\n    time.sleep(1.5)\n    os._exit(9)\n"
    )
    launch.start("--ranks-per-node", "1", "--no-daemon", str(script))
    code, out, err = launch.end()
    assert code == 9, err
    assert out.count("level None") == RANKS  # what ranks print is theirs to say
    assert "TCPStore" not in err
    assert "frame #" not in err


def test_after_a_rank_was_killed_nothing_is_left(launch, photos):
    running(launch, photos)
    os.kill(launch.ranks()[0], signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 128 + signal.SIGKILL, err
    assert launch.left() == []
    assert re.fullmatch(r"rank \d \(node n\d\) was ended by SIGKILL", launch.report["why"])
    assert "out of memory" in launch.report["next_step"]
    assert "next: " in err


def test_after_cancelling_everything_is_saved_and_nothing_is_left(launch, photos):
    running(launch, photos)
    launch.process.send_signal(signal.SIGTERM)
    code, out, err = launch.end()
    assert code == 128 + signal.SIGTERM, err
    assert out.count("leaves at step") == RANKS, err
    assert len({line.rpartition(" ")[2] for line in out.splitlines() if "leaves" in line}) == 1
    assert launch.left() == []
    assert launch.report["outcome"] == "cancelled"
    steps = re.findall(r"leaves at step (\d+)", out)[0]
    assert (
        launch.report["why"] == f"asked to end (SIGTERM); all ranks saved at step {steps} and left"
    )
    assert list((launch.folder / "checkpoints").glob("step-*/manifest.json"))


def test_a_script_that_does_not_ask_is_ended_when_it_is_cancelled(launch, photos):
    running(launch, photos, "--ignore-stop")
    launch.process.send_signal(signal.SIGTERM)
    code, _, err = launch.end()
    assert code == 128 + signal.SIGTERM, err
    assert launch.left() == []
    assert launch.report["ended"] >= RANKS


def test_ranks_that_do_not_leave_in_time_are_ended(launch, photos):
    """One rank is stopped: it cannot take part, and cannot hold up the end."""
    running(launch, photos, options=("--grace", "1"))
    os.kill(launch.ranks()[0], signal.SIGSTOP)
    launch.process.send_signal(signal.SIGTERM)
    code, _, err = launch.end()
    assert code == 128 + signal.SIGTERM, err
    assert "did not leave" in err
    assert launch.left() == []


def test_before_its_time_limit_a_job_saves_and_nothing_is_left(launch, photos):
    end_s = time.time() + 40
    log = begin(
        launch, photos, "--pace", "0.2", "--epochs", "500", options=("--stop-before", "28"),
        HEADRACE_JOB_END_S=f"{end_s:.0f}",
    )  # fmt: skip
    launch.wait_for_steps(log, RANKS)
    code, out, err = launch.end()
    assert code == 75, err
    assert time.time() < end_s
    assert out.count("leaves at step") == RANKS
    assert launch.left() == []
    assert launch.report["outcome"] == "stopped"
    assert "the time limit" in launch.report["why"]


def test_at_its_time_limit_a_job_that_does_not_ask_leaves_nothing(launch, photos):
    """What the scheduler does then: SIGTERM for all processes, a little later SIGKILL."""
    running(launch, photos, "--ignore-stop")
    for number, wait_s in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 30.0)):
        for pid in processes_with(launch.mark):
            with contextlib.suppress(ProcessLookupError):  # the one before it took it along
                os.kill(pid, number)
        comes_true(lambda: not processes_with(launch.mark), wait_s)
    launch.end()
    assert processes_with(launch.mark) == {}
    # Killed all at once: what has a name on the disk waits for the next launch.
    again = Launch(launch.folder, launch.disk)
    begin(again, photos, "--epochs", "1")
    code, _, err = again.end()
    assert code == 0, err
    assert again.left() == []


def test_a_killed_launcher_takes_everything_with_it(launch, photos):
    running(launch, photos)
    launch.process.kill()
    launch.end()

    def left():
        # The nodes' own disks are clean; a few kB where they met wait for the next launch.
        return [text for text in launch.left() if not text.startswith("folder")]

    until(lambda: not left(), 15.0)
    assert left() == []
    again = Launch(launch.folder, launch.disk)
    begin(again, photos, "--epochs", "1")
    code, _, err = again.end()
    assert code == 0, err
    assert "removed what a killed launch had left" in err
    assert again.left() == []


@pytest.mark.parametrize("who", ["guards", "supervisors"])
def test_a_killed_node_launcher_leaves_nothing(launch, photos, who):
    running(launch, photos)
    os.kill(getattr(launch, who)()[0], signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 75, err
    assert "is lost" in err
    assert launch.leaves_nothing() == []


def test_a_node_of_which_everything_is_killed_at_once_leaves_what_the_next_launch_removes(
    launch, photos
):
    running(launch, photos)
    guard = launch.guards()[0]
    supervisor = next(p for p in launch.supervisors() if Path(f"/proc/{p}/stat").read_text()
                      .rpartition(")")[2].split()[1] == str(guard))  # fmt: skip
    # Both at once: neither can clean up after the other.
    os.kill(guard, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 75, err
    assert until(lambda: not processes_with(launch.mark), 15.0)
    assert [text for text in launch.left() if text.startswith("file")]
    again = Launch(launch.folder, launch.disk)
    begin(again, photos, "--epochs", "1")
    code, _, err = again.end()
    assert code == 0, err
    assert "removed what a killed launch had left" in err
    assert again.left() == []


def test_a_silent_node_is_lost_in_time(launch, photos):
    """Its launcher is stopped: it answers nothing, and its ranks run on."""
    running(launch, photos, options=("--silence", "6"))
    supervisor = launch.supervisors()[0]
    os.kill(supervisor, signal.SIGSTOP)
    code, _, err = launch.end()
    assert code == 75, err
    assert "has said nothing for 6 s" in err
    assert launch.leaves_nothing() == []


def test_a_rank_that_fails_because_a_node_is_lost_is_no_failure_of_the_script(launch, photos):
    """The node is silent before it is missed; a rank of another node fails first."""
    running(launch, photos, options=("--silence", "6"), HEADRACE_JOB_REQUEUE="1")
    silent, other = sorted(launch.supervisors())
    os.kill(silent, signal.SIGSTOP)
    (rank,) = [pid for pid in launch.ranks() if parent(pid) == other]
    os.kill(rank, signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 75, err
    assert launch.report["outcome"] == "requeued", err
    assert len(launch.report["lost"]) == 1
    assert launch.leaves_nothing() == []


def test_a_background_process_of_a_rank_is_ended(launch):
    """Detached twice over, in a session of its own: still below the node's launcher."""
    script = launch.folder / "detach.sh"
    script.write_text(
        "#!/bin/sh\nsetsid sh -c 'sleep 300 & sleep 300' > /dev/null 2>&1 &\nexit 0\n"
    )
    script.chmod(0o755)
    launch.start("--framework", "plain", "--ranks-per-node", "1", str(script))
    code, _, err = launch.end()
    assert code == 0, err
    assert launch.left() == []
    assert launch.report["ended"] >= 2


def test_other_processes_of_the_user_are_left_alone(launch, photos, tmp_path):
    """H11: a launcher ends exactly what it started."""
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as bystander:
        try:
            running(launch, photos)
            launch.process.send_signal(signal.SIGTERM)
            launch.end()
            assert launch.left() == []
            assert bystander.poll() is None
        finally:
            bystander.kill()
