"""What is computed once, and a child that is forked meanwhile."""

from __future__ import annotations

import os
import signal
import threading

from headrace.base.lifetime import lazy


class Answer:
    def __init__(self):
        self.asked = 0
        self.begun, self.ready = threading.Event(), threading.Event()
        self.ready.set()

    @lazy
    def value(self):
        """What it says."""
        self.asked += 1
        self.begun.set()
        self.ready.wait()
        return 7


def test_a_lazy_value_is_computed_once_for_each_instance():
    first, second = Answer(), Answer()
    assert [first.value, first.value, second.value] == [7, 7, 7]
    assert (first.asked, second.asked) == (1, 1)
    assert Answer.value.__doc__ == "What it says."


def test_a_child_forked_while_a_thread_computes_does_not_wait_for_it():
    held = Answer()
    held.ready.clear()
    thread = threading.Thread(target=lambda: held.value)
    thread.start()
    held.begun.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends it where it waits
        os._exit(Answer().value)
    status = os.waitpid(child, 0)[1]
    held.ready.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7
