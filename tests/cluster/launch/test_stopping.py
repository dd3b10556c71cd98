"""All ranks leave at the same step, whenever they are asked, and however the request reaches them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cluster.launch.conductor import Conductor
from headrace.cluster.launch.nodes import NodeState
from headrace.cluster.launch.place import JobPlace
from headrace.cluster.launch.plan import Launch, LaunchOptions
from headrace.cluster.launch.stop_page import (
    HOLD_S,
    PAGE_VARIABLE,
    SETTLE_S,
    RankSlot,
    StopAgreement,
    StopPage,
    StopPhase,
    StopReason,
)
from headrace.cluster.manifest import LaunchReport, RankFailure, judge
from headrace.errors import LaunchError

USR1 = StopReason("SIGUSR1", signal.SIGUSR1, 10.0)
TERM = StopReason("SIGTERM", signal.SIGTERM, 5.0)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_ranks_in_lockstep_leave_together(  # noqa: C901
    ranks, asked_at, random
):
    """A model of ranks with a barrier in each step: nobody is left waiting for one that has left.

    A rank is at (steps done, whether it waits in a check). The request comes between any two actions.
    """
    arrived, passed, left = [0] * ranks, [0] * ranks, [None] * ranks
    hold, stop_at = False, 0
    for tick in range(400 + 40 * ranks):
        if tick == asked_at * ranks:
            hold = True
        # The answer comes some time later; every write before a look at `hold` is seen by then.
        if hold and stop_at == 0 and tick > asked_at * ranks + random.randrange(1, 6):
            stop_at = max(arrived) + 1
        rank = random.randrange(ranks) if tick < 400 else tick % ranks  # in the end all get on
        if left[rank] is not None:
            continue
        if arrived[rank] == passed[rank]:
            # In the step: the collective ends when all have come to it, that is, passed the check before.
            if min(p for p in passed) < passed[rank] or any(
                done is not None and done <= passed[rank] for done in left
            ):
                continue
            arrived[rank] += 1
        if not hold:
            passed[rank] += 1
        elif stop_at:
            if arrived[rank] >= stop_at:
                left[rank] = arrived[rank]
            else:
                passed[rank] += 1
        if all(done is not None for done in left):
            break
    assert len(set(left)) == 1
    assert left[0] is not None


def attending(page: StopPage, local_rank: int) -> RankSlot:
    slot = RankSlot.open(page.address, local_rank)
    slot.attend()
    return slot


def test_ranks_of_a_page_stop_at_the_same_check():
    page = StopPage(3)
    stopped: dict[int, int] = {}

    def train(rank: int) -> None:
        slot, checks = attending(page, rank), 0
        while True:
            barrier.wait(20)
            checks += 1
            if slot.check():
                stopped[rank] = checks
                return

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=train, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    page.hold()
    time.sleep(SETTLE_S)
    page.stop_at(page.furthest() + 1)
    for thread in threads:
        thread.join(20)
    assert len(stopped) == 3
    assert len(set(stopped.values())) == 1
    assert [note.leaving for note in page.notes()] == [True] * 3
    page.close()


def test_who_begins_to_ask_after_the_request_leaves_at_its_first_check_whatever_is_asked_later():
    page = StopPage(2)
    for request in (1, 2):
        page.hold()
        page.stop_at(request if request == 1 else page.furthest() + 1)
        assert attending(page, request - 1).check()
    page.close()


def test_a_program_that_a_rank_runs_does_not_count_for_it():
    page = StopPage(1)
    slot = attending(page, 0)
    slot.check()
    for _ in range(3):
        RankSlot.open(page.address, 0).check()
    slot.check()
    assert page.notes()[0].checks == 2
    page.close()


def test_a_page_that_is_none_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="cannot be opened"):
        RankSlot.open(str(tmp_path / "none"), 0)
    (tmp_path / "other").write_bytes(b"x" * 200)
    with pytest.raises(LaunchError, match="no page of this version"):
        RankSlot.open(str(tmp_path / "other"), 0)
    page = StopPage(2)
    with pytest.raises(LaunchError, match="is for 2 ranks on this node, this is local rank 2"):
        RankSlot.open(page.address, 2)
    page.close()


def test_the_rank_that_made_the_others_fail_is_named():
    """Whoever loses a peer says so at once, before anybody has seen the peer's end."""
    nodes = [NodeState(name, index) for index, name in enumerate("abc")]
    pages = [StopPage(2) for _ in nodes]
    slots = [attending(page, local) for page in pages[:2] for local in range(2)]

    def cause() -> RankFailure | None:
        for node, page in zip(nodes, pages, strict=True):
            node.notes = page.notes()
        return RankFailure.among(nodes)

    slots[3].fail("OSError: seen by nobody yet")
    assert cause() is None
    pages[0].slots[0].end(1)
    nodes[0].codes = {"0": 1}
    slots[0].fail("ConnectionError: closed by peer")
    assert cause() == ("rank 3 (node b) ended with status 1: OSError: seen by nobody yet", 1)
    pages[2].slots[1].end(1)  # by an exception that its script has told nobody
    assert cause().what.startswith("rank 3 ")
    pages[0].slots[1].end(-signal.SIGTERM)  # torchrun ends the others
    assert cause().code == 1
    pages[2].slots[0].end(-signal.SIGKILL)
    assert cause() == ("rank 4 (node c) was ended by SIGKILL", 137)
    for page in pages:
        page.close()


FAILS = """
import headrace as hr
hr.cluster.should_stop()
error = ValueError("no number")
error.add_note("in sample 7")
raise error
"""


def as_rank(page: StopPage, script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, PAGE_VARIABLE: page.address, "LOCAL_RANK": "0"}
    return subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30,
        env=environment,
    )  # fmt: skip


def test_what_is_noted_on_an_exception_is_not_taken_for_it():
    page = StopPage(1)
    assert as_rank(page, FAILS).stderr.endswith("ValueError: no number\nin sample 7\n")
    assert page.notes()[0].error == "ValueError: no number"
    page.close()


@pytest.mark.parametrize(
    ("text", "read"),
    [("OSError: " + "é" * 200, "OSError: " + "é" * 95), ("a\x1b[2J\ud800", "a\\x1b[2J?")],
)
def test_an_exceptions_text_is_cut_between_characters_and_moves_no_cursor(text, read):
    page = StopPage(1)
    attending(page, 0).fail(text)
    assert page.notes()[0].error == read
    page.close()


def test_who_sees_that_a_rank_resumed_sees_where_its_loader_stood():
    page, seen = StopPage(1), []

    class Watched(RankSlot):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            seen.append(page.notes()[0])

    Watched.open(page.address, 0).resume(12, 1, 96)
    assert {note.resumed_position for note in seen if note.resumed} == {96}
    assert seen[-1].resumed == 12
    page.close()


RESUMES = """
import headrace as hr
class Part:
    def state_dict(self):
        raise OSError("no weights")
hr.cluster.resume("{folder}", part=Part())
"""


def test_what_resuming_raises_is_told_and_who_loads_is_not_waited_for(tmp_path):
    page = StopPage(1)
    as_rank(page, RESUMES.format(folder=tmp_path))
    (note,) = page.notes()
    assert note.error == "OSError: no weights"
    assert not note.attends
    page.close()


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("saves saves done", "all ranks saved at step 21 and left"),
        ("saves leaves", "not all ranks had saved"),
        ("saves fails", "not all ranks had saved"),
        ("leaves leaves", "the ranks left"),
    ],
)
def test_a_cancelled_job_goes_on_from_what_all_of_its_ranks_have_saved(ends, how):
    node, page = NodeState("a", 0), StopPage(len(ends.split()))
    for local, end in enumerate(ends.split()):
        slot = attending(page, local)
        if end in {"saves", "leaves"}:
            page.hold()
            page.stop_at(1)
            assert slot.check()
        if end == "saves":
            slot.saved = 21
        page.slots[local].end(end == "fails")
    node.notes = page.notes()
    report = LaunchReport(job="7")
    judge(report, [node], None, StopAgreement(TERM, 0.0))
    assert report.why == f"SIGTERM; {how}"
    assert bool(report.next_step) == how.startswith("all")
    page.close()


def test_an_agreement_takes_the_furthest_check_of_all_nodes():
    agreement = StopAgreement(USR1, 0.0)
    assert not agreement.counted([4, None], 1.0)
    assert agreement.counted([4, 6], 2.0)
    assert (agreement.phase, agreement.check) == (StopPhase.LEAVING, 7)
    assert not agreement.late(11.9)
    assert agreement.late(12.1)


def test_a_node_that_does_not_count_is_not_waited_for():
    agreement = StopAgreement(USR1, 0.0)
    assert agreement.counted([4, None], HOLD_S)
    assert agreement.check == 5


def test_that_nobody_asks_is_not_said_before_all_nodes_have_said_it():
    """Ranks of the silent node may be behind their first check, and would part."""
    agreement = StopAgreement(USR1, 0.0)
    assert not agreement.counted([-1, None], HOLD_S + 60.0)
    assert agreement.counted([-1, 8], HOLD_S + 61.0)
    assert (agreement.phase, agreement.check) == (StopPhase.LEAVING, 9)
    assert StopAgreement(TERM, 0.0).counted([-1, None], HOLD_S)  # all is ended then


def test_nobody_leaves_where_no_script_asks():
    agreement = StopAgreement(USR1, 0.0)
    assert agreement.counted([-1, -1], 0.1)
    assert (agreement.phase, agreement.check) == (StopPhase.NOBODY, 1)
    agreement.leaves(100.0)  # who has loaded by then has its time all the same
    assert agreement.phase is StopPhase.LEAVING
    assert not agreement.late(109.9)
    assert agreement.late(110.1)


def test_the_time_limit_does_not_wait_for_ranks_that_begin_to_ask_late():
    agreement = StopAgreement(StopReason("the time limit", 0, 10.0), 0.0)
    agreement.counted([-1], 0.1)
    agreement.leaves(8.0)
    assert not agreement.late(9.9)
    assert agreement.late(10.1)


def test_each_sigusr1_reaches_scripts_that_do_not_ask():
    launch = Launch.of(JobPlace.here(), LaunchOptions(framework="plain"), ["train.sh"])
    conductor, sent = Conductor(launch), []
    node = NodeState("a", 0)
    conductor.nodes = SimpleNamespace(all=[node], send=lambda kind, **_: sent.append(kind))

    def turn(now_s: float, *signals: int) -> None:
        conductor._signals += signals
        conductor._answer_signals(now_s)
        node.held = -1
        conductor._stop_is_over(now_s)

    turn(1.0, signal.SIGUSR1)
    turn(2.0)
    turn(3.0, signal.SIGUSR1)
    assert sent == ["hold", "stop_at", "forward"] * 2
    assert len(conductor.report.remarks) == 1
    conductor._ask(StopReason("the time limit", 0, 10.0), 4.0)
    turn(5.0, signal.SIGUSR1)  # while the nodes count
    assert sent[-1] == "forward"


def test_ranks_go_on_where_it_cannot_be_written_that_they_resumed():
    def full(_: str) -> None:
        raise LaunchError("runs/7-1.json: the run's manifest cannot be written: No space left.")

    launch = Launch.of(JobPlace.here(), LaunchOptions(framework="plain"), ["train.sh"])
    conductor, node, page = Conductor(launch, resumed=full), NodeState("a", 0), StopPage(1)
    attending(page, 0).resume(12, 1, 96)
    node.notes = page.notes()
    said = [(node, {"kind": "ranks"})] * 2
    conductor.nodes = SimpleNamespace(all=[node], receive=lambda _: said)
    conductor._receive(begun=True)
    assert conductor.report.resumed == "resumed at step 12 (epoch 1, position 96)"
    assert [text[-14:] for text in conductor.report.remarks] == ["No space left."]
    page.close()


def test_cancelling_beats_requeueing_and_not_the_other_way_round():
    agreement = StopAgreement(USR1, 0.0)
    agreement.counted([1], 0.0)
    agreement.overridden(TERM, 2.0)
    assert agreement.reason is TERM
    assert agreement.late(7.1)
    agreement.overridden(USR1, 7.1)
    assert agreement.reason is TERM


ALONE = """
import headrace as hr, os, signal
assert not hr.cluster.should_stop()
os.kill(os.getpid(), signal.{name})
assert hr.cluster.should_stop()
assert hr.cluster.should_stop()
print("saved")
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_process_alone_listens_to_signals_itself(name):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HEADRACE", "RANK"))}
    ended = subprocess.run(
        [sys.executable, "-c", ALONE.format(name=name)], check=False, capture_output=True, text=True,
        env=clean, timeout=30,
    )  # fmt: skip
    assert ended.stdout == "saved\n", ended.stderr
