"""Threads that are inside native code, or want the interpreter, when the interpreter ends.

Each script runs in a process of its own. `Late` is dropped when the interpreter has ended for all but the
thread that ends it, and then lets them run for a while: whoever comes back to the interpreter does so there.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from headrace import _native

LATE = """
import sys, threading, time, types
import numpy as np
from headrace import _native

class Late:
    def __del__(self, sleep=time.sleep, write=sys.__stdout__.write, flush=sys.__stdout__.flush):
        sleep(0.3)
        write("late")
        flush()

sys.modules["late"] = types.ModuleType("late")  # which nothing keeps beyond the end of modules
sys.modules["late"].late = Late()
started = threading.Event()

def in_thread(work):
    def run():
        started.set()
        while True:
            work()
    threading.Thread(target=run, daemon=True).start()
    started.wait()

def dest():
    return (np.zeros(1, np.int64), np.full(1, 8, np.int64), np.zeros(8, np.uint8), 10.0)

class Last:
    '''An engine in Python: answers on the native thread that asks it.'''
    def read(self, requests):
        self.asked.set()
        self.answer(requests)
        for i in range(requests.count):
            requests.finish(i, 8)

last = Last()
last.asked = threading.Event()
last.answer = lambda requests: None
engine = _native.FabricInitiator()
failover = _native.FabricFailover(engine, last)
failover.add_volume("v", [])  # nobody has it but `last`
"""

# A call that gives the interpreter away comes back from it.
CALL = """
data = np.zeros(16 << 20, np.uint8)
in_thread(lambda: _native.crc32c(data))
"""

# As above, again and again: what measures how long the interpreter's lock takes.
LOCK_WAIT = """
in_thread(lambda: _native.lock_wait_ns(1_000_000))
"""

# As above, in a destructor.
DESTRUCTOR = """
in_thread(lambda: _native.FileReader().submit([b"/proc/version"]))
"""

# A native thread is in Python code, which comes back from a sleep.
IN_PYTHON = """
last.answer = lambda requests, sleep=time.sleep: sleep(SECONDS)
in_thread(lambda: failover.read_many("v", *dest()))
last.asked.wait()
"""

# A native thread waits for the interpreter's lock from before its end.
WAITS = """
arguments = dest()
sys.setswitchinterval(1000)  # nobody gets it from this thread, which does not wait any more
in_thread(lambda: failover.read_many("v", *arguments))
begin = time.perf_counter()
while time.perf_counter() < begin + 0.05:
    pass
"""

# Requests that were given up are let go of by a native thread later, and with them Python's arrays.
LETS_GO = """
kept = []
last.answer = lambda requests: kept.append(requests)
def give_up():
    offsets, lengths, memory, _ = dest()
    failover.read_many("v", offsets, lengths, memory, 0.01)
    kept.clear()
in_thread(give_up)
last.asked.wait()
"""

# Native threads let go of what a look-up in a cache found, which Python handed over.
GATHERS = """
import tempfile
import headrace as hr
folder = tempfile.TemporaryDirectory()
hr.pack(((f"{i}", bytes(100_000)) for i in range(100)), folder.name + "/store")
with hr.open(folder.name + "/store") as store:
    cache = _native.SampleCache(samples=100, parts=1, quota_bytes=1 << 30)
    for i in range(100):
        cache.insert(store.catalog.read_one(i))
folder.cleanup()
everything = np.arange(100)
gatherer = _native.Gatherer(1 << 30, 2)
gatherer.submit(cache.look_up(everything)).take()  # from now on it knows how much there is to do
sys.setswitchinterval(1000)
for _ in range(100):
    gatherer.submit(cache.look_up(everything))  # nobody takes it
begin = time.perf_counter()
while time.perf_counter() < begin + 0.05:
    pass
"""


def ended(script: str) -> tuple[str, str, int]:
    made = subprocess.run(
        [sys.executable, "-c", LATE + script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return made.stdout, made.stderr, made.returncode


@pytest.mark.parametrize(
    "script",
    [CALL, LOCK_WAIT, DESTRUCTOR, IN_PYTHON.replace("SECONDS", "0.2"), WAITS, LETS_GO, GATHERS],
    ids=["call", "lock_wait", "destructor", "in_python", "waits", "lets_go", "gathers"],
)
def test_the_process_ends_in_order(script):
    assert ended(script) == ("late", "", 0)


@pytest.mark.slow
def test_a_native_thread_that_stays_in_python_is_not_waited_for_without_end():
    assert ended(IN_PYTHON.replace("SECONDS", "5.2")) == ("late", "", 0)


def test_native_code_shares_engines_without_python():
    """Who drops the last reference needs no interpreter, so any thread may, at any time."""
    engine = _native.FabricInitiator()
    failover = _native.FabricFailover(engine, None)
    before = sys.getrefcount(engine), sys.getrefcount(failover)
    catalog = _native.Catalog([], failover)
    assert (sys.getrefcount(engine), sys.getrefcount(failover)) == before
    del catalog


def test_native_code_shares_what_a_look_up_found():
    cache = _native.SampleCache(samples=1, parts=1, quota_bytes=1 << 20)
    hits = cache.look_up(np.zeros(0, np.int64))
    before = sys.getrefcount(hits)
    gatherer = _native.Gatherer(1 << 20, 1)
    job = gatherer.submit(hits)
    assert sys.getrefcount(hits) == before
    del job
