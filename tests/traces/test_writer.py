"""The writing thread: nothing is lost, nobody waits, and each way to end leaves a run that can be read."""

import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import TraceError
from headrace.order import Shuffled, Slices
from headrace.plane import LoaderStats
from headrace.plane.batch_trace import PHASES, READ, BatchTrace, StepLog
from headrace.trace import flush, follow, read_run, writer
from headrace.trace.format import TraceFile, bytes_max
from headrace.trace.writer import _without_secrets
from tests_shared import until

from .runs import about, steps_of

ORDER = Shuffled(2000, seed=3)
ABOUT = about(ORDER, Slices(2000, 10))
ROWS = steps_of(ORDER, Slices(2000, 10), 0)


@pytest.fixture(autouse=True)
def own_writer(monkeypatch):
    """A thread for each test: another test's loader that still lives would have the machine's counters."""
    own = writer._Writer()
    monkeypatch.setattr(writer, "_writer", own)
    yield own
    own.stop()


class Owner:
    """Stands for a loader."""

    def __init__(self, steps):
        self.stats = LoaderStats(steps=steps)


def way_of(row):
    """A way that waits as the row does: reading, and then decoding."""
    read = np.zeros((), READ)
    read["ready_ns"] = round((row["asked_s"] + row["waited_s"][PHASES.index("read")]) * 1e9)
    read["bytes"] = row["bytes"]
    way = BatchTrace(read.tobytes())
    way.decoding_s, way.decoded_s = read["ready_ns"] * 1e-9, row["delivered_s"]
    return way


def add(log, rows):
    for row in rows:
        place = tuple(row[name].item() for name in ("epoch", "step", "position", "order_hash"))
        times = row["asked_s"].item(), row["delivered_s"].item()
        log.add(place, row["samples"].item(), times, way_of(row))


def same(found, rows):
    """Whether steps are those that were added; what was seen of the interpreter meanwhile is not theirs."""
    exact = (
        "epoch",
        "step",
        "position",
        "order_hash",
        "samples",
        "asked_s",
        "delivered_s",
        "bytes",
    )
    assert all(np.array_equal(found[name], rows[name]) for name in exact)
    assert np.allclose(found["waited_s"], rows["waited_s"], atol=1e-6)
    return True


def traces(folder):
    try:
        return read_run(folder).ranks
    except TraceError:  # not begun
        return ()


def test_steps_are_written_while_a_loader_lives_and_the_file_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_JOB_ID", "7")
    monkeypatch.setenv("HEADRACE_NODE", "vm-1")
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path / "run"), ABOUT, owner)
    assert not (tmp_path / "run").exists()
    add(log, ROWS[:150])
    until(lambda: sum(len(t.steps) for t in traces(tmp_path / "run")) == 150)
    assert traces(tmp_path / "run")[0].cut == "the process has not ended yet"
    add(log, ROWS[150:])
    del owner
    gc.collect()
    until(lambda: not traces(tmp_path / "run")[0].cut)
    found = read_run(tmp_path / "run")
    assert same(found.ranks[0].steps, ROWS)
    assert found.ranks[0].where == "vm-1"
    assert found.facts["source"] == "/data/train.hr"
    assert found.facts["headrace"]


def test_what_is_there_can_be_written_at_once(tmp_path):
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path), ABOUT, owner)
    add(log, ROWS)
    del owner
    flush()
    (trace,) = read_run(tmp_path).ranks
    assert len(trace.steps) == len(ROWS)
    assert not trace.cut


def test_a_followed_log_can_be_copied_to_another_process(tmp_path):
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path / "run"), ABOUT, owner)
    add(pickle.loads(pickle.dumps(log)), ROWS[:3])
    assert log.added == 0
    del owner


def test_a_loader_that_delivers_nothing_leaves_no_file(tmp_path):
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path / "run"), ABOUT, owner)
    other = StepLog()
    writes = Owner(other)
    follow(str(tmp_path / "other"), ABOUT, writes)
    add(other, ROWS[:1])
    until(lambda: traces(tmp_path / "other"))
    assert not (tmp_path / "run").exists()


def test_steps_that_came_too_fast_are_counted(tmp_path):
    log = StepLog(50)
    owner = Owner(log)
    with writer._writer._writing:  # the thread, which others may have begun, takes none meanwhile
        add(log, ROWS[:-1])
        follow(str(tmp_path), ABOUT, owner)
        add(log, ROWS[-1:])
    until(lambda: traces(tmp_path))
    until(lambda: traces(tmp_path)[0].lost + len(traces(tmp_path)[0].steps) == len(ROWS))
    assert traces(tmp_path)[0].lost == 150


PROGRAM = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
from headrace.plane.batch_trace import StepLog
from headrace.trace import follow, writer
from traces.test_writer import ABOUT, ROWS, Owner, add, until_written
writer.END_S = 60.0  # the disk does not hang, and may be slow
log = StepLog()
owner = Owner(log)
follow({folder!r}, ABOUT, owner)
{act}
"""


def until_written(folder, *steps):
    """Wait until the files of a run hold so many steps each."""
    until(lambda: sorted(len(trace.steps) for trace in traces(folder)) == sorted(steps))


def run_program(folder, act):
    text = PROGRAM.format(tests=str(Path(__file__).parents[1]), folder=str(folder), act=act)
    return subprocess.run(
        [sys.executable, "-c", text], check=False, timeout=60, capture_output=True
    )


def test_what_came_just_before_the_end_is_written(tmp_path):
    done = run_program(tmp_path / "run", "add(log, ROWS)")
    assert done.returncode == 0, done.stderr
    trace = read_run(tmp_path / "run").ranks[0]
    assert len(trace.steps) == len(ROWS)
    assert not trace.cut
    assert trace.events[-1]["why"] == "exit"


def test_a_state_waits_for_no_disk_that_hangs(tmp_path, monkeypatch):
    begun, hangs = threading.Event(), threading.Event()
    monkeypatch.setattr(writer, "END_S", 0.05)
    monkeypatch.setattr(TraceFile, "_put", lambda *_: (begun.set(), hangs.wait(60)))
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path), ABOUT, owner)
    add(log, ROWS)
    assert begun.wait(60)
    log.settle()
    assert writer._writer._hangs
    monkeypatch.setattr(writer, "END_S", 60)
    log.settle()  # would wait as long, if it did
    monkeypatch.undo()
    hangs.set()
    until(lambda: not writer._writer._hangs)


def test_a_state_in_a_forked_child_waits_for_the_childs_own_file(tmp_path):
    done = run_program(
        tmp_path / "run",
        """
add(log, ROWS[:100])
log.settle()
if (child := os.fork()) == 0:
    log.settle()
    add(log, ROWS[100:130])
    log.settle()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [len(trace.steps) for trace in read_run(tmp_path / "run").ranks] == [100, 30]


def test_a_killed_process_leaves_what_was_written(tmp_path):
    act = "add(log, ROWS); until_written({!r}, len(ROWS)); os.kill(os.getpid(), signal.SIG{})"
    for name in ("TERM", "KILL"):
        done = run_program(tmp_path / name, act.format(str(tmp_path / name), name))
        assert done.returncode == -getattr(signal, f"SIG{name}"), done.stderr
        trace = read_run(tmp_path / name).ranks[0]
        assert len(trace.steps) == len(ROWS)
        assert trace.cut == "the process was killed, or crashed"


def test_a_forked_rank_has_a_file_of_its_own_and_the_parents_goes_on(tmp_path):
    folder = str(tmp_path / "run")
    done = run_program(
        folder,
        f"""
add(log, ROWS[:100])
until_written({folder!r}, 100)
if (child := os.fork()) == 0:
    add(log, ROWS[100:130])
    until_written({folder!r}, 100, 30)
    os._exit(0)
os.waitpid(child, 0)
add(log, ROWS[100:])
""",
    )
    assert done.returncode == 0, done.stderr
    first, second = read_run(tmp_path / "run").ranks
    assert same(first.steps, ROWS)
    assert same(second.steps, ROWS[100:130])
    assert first.pid != second.pid
    assert [bool(first.cut), bool(second.cut)] == [False, True]


def test_a_forked_process_of_multiprocessing_ends_its_file_properly(tmp_path):
    done = run_program(
        tmp_path / "run",
        """
import multiprocessing
rank = multiprocessing.get_context("fork").Process(target=add, args=(log, ROWS))
rank.start()
rank.join()
""",
    )
    assert done.returncode == 0, done.stderr
    (trace,) = read_run(tmp_path / "run").ranks
    assert len(trace.steps) == len(ROWS)
    assert not trace.cut


def test_a_worker_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_is_worker", lambda: True)
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path / "run"), ABOUT, owner)
    add(log, ROWS)
    time.sleep(0.4)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_refuses_ends_the_trace_and_not_the_run(tmp_path, caplog):
    (tmp_path / "run").write_text("in the way")
    log = StepLog()
    owner = Owner(log)
    follow(str(tmp_path / "run"), ABOUT, owner)
    add(log, ROWS)
    until(lambda: "the trace of this loader ends" in caplog.text)
    assert "Traceback" not in caplog.text
    assert (tmp_path / "run").read_text() == "in the way"


def test_the_size_of_a_file_is_a_number_of_bytes(monkeypatch):
    monkeypatch.setenv("HEADRACE_TRACE_BYTES", "a lot")
    with pytest.raises(ValueError, match="a lot"):
        bytes_max()


def test_no_secret_of_the_command_line_is_kept():
    words = ["train.py", "--token=abc", "--api-key", "xyz", "--lr", "0.1", "-x", "--password"]
    assert _without_secrets(words) == [
        "train.py", "--token=***", "--api-key", "***", "--lr", "0.1", "-x", "--password",
    ]  # fmt: skip
