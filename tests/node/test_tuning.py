"""The daemon's tuner: one plane for all consumers of a data set, its buffer shared out fairly among them."""

import sys
import threading
import time

import numpy as np
import pytest

from headrace.base.causes import Cause
from headrace.config import ReaderOptions
from headrace.node import tuning
from headrace.node.tuning import ServedPlane
from headrace.node.wire import Note
from headrace.plane.stage import StageStats
from headrace.testing import Simulation
from node.conftest import node_loader, seen, serving, until

MIB = 1 << 20


class Pipe:
    """A pipeline whose knobs are all there is."""

    stages = ()

    def __init__(self):
        self._knobs = {"reads_in_flight": 128, "buffer_bytes": 64 * MIB}

    def knobs(self):
        return dict(self._knobs)

    def turn(self, knobs):
        self._knobs |= knobs

    def stats(self):
        return StageStats(name="prefetch")


class Client:
    """A session that remembers how far it was told to ask ahead."""

    def __init__(self, name):
        self.job = type("Job", (), {"name": name})
        self.ahead = []

    def say(self, message):
        self.ahead.append(message.nbytes)


@pytest.fixture
def clock(monkeypatch):
    """Moves when a test says so."""
    now = [1000.0]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def plane(clock, monkeypatch):
    monkeypatch.setenv("HEADRACE_TUNE", "0")
    made = ServedPlane(1, "photos", Pipe(), ReaderOptions(), lambda function: function())
    assert not made.plane.enabled
    yield made
    made.close()


def note(waited_s=0.0, worked_s=0.0, batches=0):
    return Note(waited_s, 0.0, 0.0, worked_s, batches, 32 * batches, 3200 * batches, 0)


def test_the_buffer_is_shared_out_among_jobs_and_then_among_their_clients(plane):
    clients = [Client("a"), Client("a"), Client("b")]
    for client in clients:
        plane.join(client)
    plane.turn({"buffer_bytes": 120 * MIB})
    assert [client.ahead[-1] // MIB for client in clients] == [30, 30, 60]
    plane.leave(clients[2])
    assert [client.ahead[-1] // MIB for client in clients[:2]] == [60, 60]


def test_a_client_brings_what_its_own_process_would_begin_with(plane):
    for count in (1, 2, 3):
        plane.join(Client("a"))
        assert plane.knobs() == {"reads_in_flight": 128 * count, "buffer_bytes": 64 * MIB * count}


def test_consumers_that_rest_leave_their_share_to_others(plane, clock):
    busy, resting = Client("a"), Client("b")
    for client in (busy, resting):
        plane.join(client)
        plane.note(client, note(waited_s=0.1))
    plane.turn({"buffer_bytes": 100 * MIB})
    assert (busy.ahead[-1], resting.ahead[-1]) == (50 * MIB, 50 * MIB)
    clock[0] += tuning.SPAN_MAX_S + 1.0
    plane.note(busy, note(waited_s=0.1))
    plane.look(1 << 40)
    assert busy.ahead[-1] == 100 * MIB
    plane.note(resting, note(waited_s=0.1))
    plane.look(1 << 40)
    assert (busy.ahead[-1], resting.ahead[-1]) == (50 * MIB, 50 * MIB)


def test_what_a_note_says_is_spread_over_the_time_that_it_is_about(plane, clock):
    client = Client("a")
    plane.join(client)
    plane.note(client, note(batches=1))
    for _ in range(3):
        clock[0] += 1.0
        before = plane.consumer()
        plane.note(client, note(waited_s=0.25, worked_s=0.75, batches=10))
        assert plane.consumer() == before
        clock[0] += 0.5
        after = plane.consumer()
        assert after.waited_s - before.waited_s == pytest.approx(0.125)
        assert after.batches - before.batches == 5
        clock[0] -= 0.5


def test_of_several_consumers_the_mean_waits_and_the_sum_is_delivered(plane, clock):
    clients = [Client("a"), Client("b")]
    for client in clients:
        plane.join(client)
        plane.note(client, note(batches=1))
    clock[0] += 1.0
    before = plane.consumer()
    for client in clients:
        plane.note(client, note(waited_s=0.4, worked_s=0.6, batches=10))
    clock[0] += 1.0
    after = plane.consumer()
    assert after.waited_s - before.waited_s == pytest.approx(0.4)
    assert after.worked_s - before.worked_s == pytest.approx(0.6)
    assert after.batches - before.batches == 20
    for client in clients:
        plane.leave(client)
    assert plane.consumer() == after


def test_what_consumers_did_never_goes_back_while_they_come_and_go(plane, monkeypatch):
    """The controller looks at them from its own thread."""
    monkeypatch.setattr(tuning.time, "monotonic", time.perf_counter)
    batches, done = [0], threading.Event()

    def watch():
        while not done.is_set():
            batches.append(plane.consumer().batches)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3000):
            client = Client("a")
            plane.join(client)
            plane.note(client, note(worked_s=1e-4, batches=100))
            plane.note(client, note(worked_s=1e-4, batches=100))
            plane.leave(client)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        watcher.join()
    assert batches == sorted(batches)
    assert plane.consumer().batches == 3000 * 200


def test_reads_in_flight_rise_for_a_slow_storage_and_fall_for_a_slow_consumer(folder, store):
    """Nothing is kept: every epoch is read. The consumer's pace alone changes."""
    slow = Simulation(latency_s=0.05)
    with serving(folder, ram_bytes=0, reader=ReaderOptions(simulate=slow)) as server:
        loader = node_loader(store, batch=4)

        def allowed():
            (data,) = server.describe()["datasets"]
            return data["reads"]["in_flight_max"]

        began = allowed_first = 0
        while began < 200 and allowed_first <= 128:
            began += 1
            seen(loader)
            allowed_first = allowed()
        assert allowed_first > 128
        begun = 0
        while begun < 200 and allowed() > 64:
            begun += 1
            for _ in loader:
                time.sleep(0.05)
        assert allowed() <= 64
        loader.close()


def test_the_causes_of_waiting_name_the_daemons_own_limits(folder, store):
    """One read at a time, though the storage could do many: that is not the storage's."""
    options = ReaderOptions(simulate=Simulation(latency_s=0.01), reads_in_flight=1)
    with serving(folder, ram_bytes=0, reader=options) as server:
        loader = node_loader(store, batch=8)

        def state():
            seen(loader)
            return server.describe()

        def held_back():  # within the last second, in which the consumer must have waited
            (data,) = state()["datasets"]
            return data["held_back"] == Cause.PREFETCH.phrase

        until(lambda: state()["stall_s"][Cause.PREFETCH] > 0.0)
        until(held_back)
        (data,) = server.describe()["datasets"]
        assert data["tuning"]["knobs"]["reads_in_flight"]["frozen"]
        loader.close()


def test_a_batch_from_the_daemon_says_how_it_was_read(folder, store):
    with serving(folder, ram_bytes=0, reader=ReaderOptions(simulate=Simulation(latency_s=0.01))):
        loader = node_loader(store, batch=8)
        seen(loader)
        steps, _ = loader.stats.steps.since(0)
        assert np.all(steps["reads"] > 0)
        assert np.all(steps["read_s"] > 0.005)
        loader.close()
