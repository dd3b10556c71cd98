"""A latch: whoever waits goes on when it is set, whatever moment a signal handler chooses for that."""

import signal
import sys
import threading
import time

import pytest

from headrace.base.lifetime import Latch


def test_it_is_set_once_and_for_all():
    latch = Latch()
    assert not latch.is_set()
    assert not latch.wait(0.0)
    assert not latch.wait(-1.0)
    began = time.monotonic()
    assert not latch.wait(0.05)
    assert time.monotonic() - began >= 0.05
    latch.set()
    latch.set()
    assert latch.is_set()
    assert all(latch.wait(timeout) for timeout in (None, 0.0, 30.0))


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_all_threads_that_wait_go_on(timeout):
    latch = Latch()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(latch.wait(timeout)), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 8


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_signal_handler_ends_the_wait_of_its_own_thread(timeout):
    latch = Latch()
    before = signal.signal(signal.SIGALRM, lambda *_: latch.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        assert latch.wait(timeout)
        assert time.monotonic() - began < 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def interrupted_at(make, step, patience_s=30.0):
    """Wait for what `make` makes, and set it, as a handler would, before that many instructions have run.

    Returns what `wait` did, and whether it was set there; None: it never returned.
    """
    done, found = [False], []

    def run():
        event = make()
        left = [step]

        def trace(frame, kind, _):
            frame.f_trace_opcodes = True
            if kind == "opcode" and not done[0]:
                left[0] -= 1
                if left[0] < 0:
                    done[0] = True
                    event.set()
            return trace

        sys.settrace(trace)
        try:
            found.append(event.wait(0.001))
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience_s)
    return (found[0] if found else None), done[0]


def test_a_handler_may_run_between_any_two_instructions():
    steps = 0
    while True:
        waited, was_set = interrupted_at(Latch, steps)
        assert waited is not None, f"instruction {steps}"
        if not was_set:
            break
        steps += 1
    assert steps > 10  # it was interrupted that often


def test_an_event_would_not_bear_that():
    assert any(interrupted_at(threading.Event, step, 0.5) == (None, True) for step in range(40))
