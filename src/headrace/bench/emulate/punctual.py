"""Punctual: what is set while deadlines are kept, and set back: for the thread of the step loops.

`punctual`: the interpreter's lock changes hands after 0.5 ms instead of 5, since the thread must not wait so
long for a feeder's; and its timers ring when they are asked to, where Linux would let them be 50 us late to
wake processors less often.

`before_others`: where the system allows it (root, CAP_SYS_NICE or `ulimit -r`), the thread comes before all
that are not real-time. It needs a percent of a processor, and on a busy machine it would wait for its turn
for milliseconds: 6 ms were seen, and 0.09 ms with it (p99 of 150 timers, two processors, load average 8).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["before_others", "punctual"]

_SWITCH_S: Final = 0.0005
_SLACK_NS: Final = 1
_PR_SET_TIMERSLACK: Final = 29
_PR_GET_TIMERSLACK: Final = 30
_RESET_ON_FORK: Final = 0x40000000
_PRIORITY: Final = 1
"""The lowest that is real-time."""


@contextlib.contextmanager
def punctual() -> Iterator[None]:
    """Quick switches and sharp timers for the calling thread; threads that it starts have its timers."""
    with _quick_switches(), _sharp_timers():
        yield


@contextlib.contextmanager
def before_others() -> Iterator[None]:
    """Real-time priority for the calling thread, where it may have it.

    Threads and processes that are started within do not inherit it, and lose their `nice` value with it:
    start them before.
    """
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO | _RESET_ON_FORK, os.sched_param(_PRIORITY))
    except (AttributeError, OSError):  # another system, or not allowed
        yield
        return
    try:
        yield
    finally:
        try:
            os.sched_setscheduler(0, policy, param)
        except PermissionError:  # who is not root may not take back what children would get
            os.sched_setscheduler(0, policy | _RESET_ON_FORK, param)


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _sharp_timers() -> Iterator[None]:
    before_ns = _prctl(_PR_GET_TIMERSLACK, 0)
    _prctl(_PR_SET_TIMERSLACK, _SLACK_NS)
    try:
        yield
    finally:
        if before_ns > 0:
            _prctl(_PR_SET_TIMERSLACK, before_ns)


def _prctl(option: int, value: int) -> int:
    """-1 where the system has no such call: timers are as they are there."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    if call is None:
        return -1
    return int(call(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))
