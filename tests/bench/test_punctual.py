"""What the thread of the deadlines sets, and sets back."""

import ctypes
import os
import sys
import threading

import pytest

from headrace.bench import loop as module
from headrace.bench.loop import before_others, punctual


def slack_ns():
    return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)


def state():
    return sys.getswitchinterval(), slack_ns(), os.sched_getscheduler(0), os.getpriority(0, 0)


def test_everything_is_set_back_even_after_an_error():
    before = state()
    with pytest.raises(KeyError), punctual(), before_others():
        assert sys.getswitchinterval() < before[0]
        assert slack_ns() <= 1  # real-time threads have none
        raise KeyError
    assert state() == before


def test_where_real_time_is_allowed_it_is_for_this_thread_alone():
    result = []
    with before_others():
        policy = os.sched_getscheduler(0) & ~module._RESET_ON_FORK
        thread = threading.Thread(target=lambda: result.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
    assert result == [os.SCHED_OTHER]
    if policy != os.SCHED_FIFO:
        pytest.skip("this user may not have real-time threads")


def test_where_it_is_not_allowed_nothing_happens(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    done = []
    with before_others():
        done.append(os.sched_getscheduler(0))
    assert done == [os.SCHED_OTHER]
