"""The log of steps: whoever takes them misses none and gets none twice."""

import copy
import threading
import time

import numpy as np
import pytest

from headrace.plane import batch_trace, interpreter
from headrace.plane.batch_trace import PHASES, READ, STEP, BatchTrace, StepLog, read_record
from headrace.plane.interpreter import Contention


def add(log, numbers, way=None):
    for number in numbers:
        log.add((0, number, 10 * number, (1 << 64) - 1 - number), 10, (number, number + 0.5), way)


def steps(log, seen=0):
    rows, seen = log.since(seen)
    assert rows.dtype == STEP
    return rows["step"].tolist(), seen


def add_while_taken(monkeypatch, log):
    """Have somebody add 30 between the look at the numbers and the copy."""

    class Ring(bytearray):
        def __getitem__(self, part):
            add(log, range(log.added, log.added + 30))
            return bytearray.__getitem__(self, part)

    monkeypatch.setattr(log, "_ring", Ring(log._ring))


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
    log, read = StepLog(), np.zeros((), READ)
    read["ready_ns"], read["bytes"], read["reads"] = 250_000_000, (1, 2, 3, 4, 5), 7
    add(log, [0], BatchTrace(read.tobytes()))
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


def test_nobody_can_change_what_others_take():
    log = StepLog()
    add(log, range(3))
    rows, _ = log.since(1)
    with pytest.raises(ValueError, match="read-only"):
        rows["step"] = 9
    assert steps(log)[0] == [0, 1, 2]


def test_what_was_seen_of_the_interpreter_is_between_two_steps_and_may_begin_anew(monkeypatch):
    seen = [(), (10, 4, 0.5, 0.25), (12, 5, 0.75, 0.5), (12, 5, 0.75, 0.5), (3, 1, 0.1, 0.0625)]
    told = (Contention(*each) for each in seen)
    monkeypatch.setattr(batch_trace, "contention", lambda: next(told))
    log = StepLog()
    add(log, [1, 2, 3, 4])  # a pass's first step would ask once more
    rows, _ = log.since(0)
    assert rows["looks"].tolist() == [10, 2, 0, 3]
    assert rows["contended"].tolist() == [4, 1, 0, 1]
    assert rows["others_s"].tolist() == [0.25, 0.25, 0, 0.0625]


def test_a_pass_is_marked_where_its_first_step_comes():
    log = StepLog()
    add(log, [5, 6])
    log.add((3, 0, 0, 0), 10, (7.0, 7.5), None)
    (mark,) = log.marks
    assert mark[:3] == (3, 2, 7.0)


def test_what_a_consumer_waited_for_meanwhile_is_kept_as_long_as_its_step():
    log = StepLog(100)
    for number in range(1000):
        way = BatchTrace(read_record(number, number + 0.1, 0.1, 0.0))
        if number % 2:
            later = read_record(number + 0.1, number + 0.3, 0.2, 0.1)
            way.interruptions = [(number + 0.4, later), (number + 0.45, later)]
        add(log, [number], way)
    assert len(log._interruptions) == 50
    rows, _ = log.since(0)
    waited_s = {name: rows["waited_s"][:, at] for at, name in enumerate(PHASES)}
    assert waited_s["read"] == pytest.approx(np.where(rows["step"] % 2, 0.2, 0.1), abs=1e-6)
    assert waited_s["open"] == pytest.approx(np.where(rows["step"] % 2, 0.1, 0.0), abs=1e-6)
    assert waited_s["hand"] == pytest.approx(np.where(rows["step"] % 2, 0.2, 0.4), abs=1e-6)


def test_what_is_put_over_others_while_they_are_taken_is_not_taken_for_them(monkeypatch):
    log = StepLog(100)
    add(log, range(100))

    add_while_taken(monkeypatch, log)
    found, seen = steps(log)
    assert (found, seen) == (list(range(30, 100)), 100)
    monkeypatch.setattr(log, "_ring", bytearray(log._ring))
    assert steps(log, seen) == (list(range(100, 130)), 130)


def test_all_of_them_may_be_put_over(monkeypatch):
    log = StepLog(10)
    add(log, range(5))

    add_while_taken(monkeypatch, log)
    assert steps(log) == ([], 5)


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
    log, ending = StepLog(1 << 15), threading.Event()
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


@pytest.mark.parametrize("serial", [True, False])
def test_a_thread_that_makes_its_own_batches_is_none_of_the_others(monkeypatch, serial):
    way = BatchTrace()
    way.serial = serial
    watch = interpreter._Watch()
    monkeypatch.setattr(interpreter, "_watch", watch)
    monkeypatch.setattr(watch, "thread", threading.current_thread())
    add(StepLog(), [1], way)
    own = {threading.get_native_id()}
    watch._others_s()
    assert own & set(watch._computed[1]) == (set() if serial else own)
