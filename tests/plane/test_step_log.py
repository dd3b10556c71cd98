"""The log of steps: whoever takes them misses none and gets none twice, and a step is worked out once."""

import copy
import gc
import threading
import time
import weakref

import numpy as np
import pytest

from headrace.plane import step
from headrace.plane.interpreter import Contention
from headrace.plane.step import STEP, StepLog
from headrace.plane.way import Way


def add(log, numbers, way=None):
    for number in numbers:
        log.came((0, number, 10 * number, (1 << 64) - 1 - number), 10, (number, number + 0.5), way)


def steps(log, seen=0):
    rows, seen = log.since(seen)
    assert rows.dtype == STEP
    return rows["step"].tolist(), seen


def test_each_is_taken_once_by_each():
    log = StepLog()
    assert steps(log) == ([], 0)
    add(log, range(3))
    first, seen = steps(log)
    assert (first, seen) == ([0, 1, 2], 3)
    assert steps(log, seen) == ([], 3)
    add(log, range(3, 5))
    assert steps(log, seen) == ([3, 4], 5)
    assert steps(log) == (list(range(5)), 5)
    assert steps(log, 99) == ([], 99)


def test_places_times_and_bytes_are_those_that_were_told():
    log, way = StepLog(), Way()
    way.ready_s, way.bytes, way.reads, way.serial = 0.25, (1, 2, 3, 4, 5), 7, False
    add(log, [0], way)
    ((row,), _) = log.since(0)
    assert row[["epoch", "step", "position", "samples", "order_hash"]].tolist() == (
        0, 0, 0, 10, (1 << 64) - 1,
    )  # fmt: skip
    assert (row["asked_s"], row["delivered_s"], row["reads"]) == (0.0, 0.5, 7)
    assert row["bytes"].tolist() == [1, 2, 3, 4, 5]
    assert row["waited_s"].sum() == pytest.approx(0.5)


@pytest.mark.parametrize("taken", [1, 7, 300])
def test_old_ones_are_dropped_and_counted(taken):
    """Whether they are taken in between or not."""
    log, seen = StepLog(100), 0
    for begin in range(0, 1000, taken):
        add(log, range(begin, min(1000, begin + taken)))
        found, now = steps(log, seen)
        assert found == list(range(max(seen, now - 100), now))
        seen = now
    assert steps(log) == (list(range(900, 1000)), 1000)
    assert sum(map(len, log._done.blocks)) <= 100 + max(taken, step._BLOCK)


def test_they_are_worked_out_once(monkeypatch):
    log, worked_out = StepLog(), []
    rows_of = step._rows_of
    monkeypatch.setattr(
        step, "_rows_of", lambda came: worked_out.append(len(came)) or rows_of(came)
    )
    add(log, range(600))
    for _ in range(3):
        assert steps(log)[0] == list(range(600))
    add(log, [600])
    assert steps(log, 10)[0] == list(range(10, 601))
    assert worked_out == [600, 1]


def test_nobody_can_change_what_others_take():
    log = StepLog()
    add(log, range(3))
    rows, _ = log.since(1)
    with pytest.raises(ValueError, match="read-only"):
        rows["step"] = 9
    assert steps(log)[0] == [0, 1, 2]


def test_what_was_seen_of_the_interpreter_is_between_two_steps_and_may_begin_anew(monkeypatch):
    seen = [(), (10, 4, 0.5, 0.25), (12, 5, 0.75, 0.5), (3, 1, 0.1, 0.0625)]
    told = (Contention(*each) for each in seen)
    monkeypatch.setattr(step, "contention", lambda: next(told))
    log = StepLog()
    add(log, [1, 2, 3])  # a pass's first step would ask once more
    rows, _ = log.since(0)
    assert rows["looks"].tolist() == [10, 2, 3]
    assert rows["contended"].tolist() == [4, 1, 1]
    assert rows["others_s"].tolist() == [0.25, 0.25, 0.0625]


def test_a_way_that_is_its_own_detour_is_dropped_with_the_log():
    log, way = StepLog(), Way()
    way.ready_s = 0.25

    class Sentinel(list):
        """Can be referred to weakly."""

    way.detours = Sentinel([(0.5, way)])
    gone = weakref.ref(way.detours)
    add(log, [0], way)
    assert len(log.since(0)[0]) == 1
    gc.disable()
    try:
        del log, way
        assert gone() is None
    finally:
        gc.enable()


def test_a_copy_goes_its_own_way():
    log = StepLog()
    add(log, range(2))
    steps(log)
    other = copy.deepcopy(log)
    add(other, [2])
    assert steps(other)[0] == [0, 1, 2]
    assert steps(log)[0] == [0, 1]


def test_it_wakes_once_whoever_waits_for_steps():
    log, woken = StepLog(), []
    log.first = lambda: woken.append(log.added)
    add(log, range(3))
    assert woken == [1]


def test_two_take_while_one_adds():
    log, ending = StepLog(1 << 20), threading.Event()
    count = 20_000
    found = [[], []]

    def adding():
        add(log, range(count))
        ending.set()

    def taking(mine):
        seen, until_s = 0, time.monotonic() + 60
        # Not for ever: whoever lost one would keep the processors from the tests that follow.
        while (not ending.is_set() or len(mine) < count) and time.monotonic() < until_s:
            rows, seen = log.since(seen)
            mine += rows["step"].tolist()

    threads = [threading.Thread(target=adding)]
    threads += [threading.Thread(target=taking, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [list(range(count))] * 2
    assert np.array_equal(log.since(0)[0]["position"], 10 * np.arange(count))
