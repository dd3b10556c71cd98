"""Depth, statistics, connections, and the native reader's side of the engine."""

from __future__ import annotations

import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.io.objects.engine import ObjectEngine
from headrace.io.objects.options import ReadPolicy, split_options
from objects.conftest import DATA

if TYPE_CHECKING:
    from objects.faulty_proxy import FaultyProxy


class Requests:
    """What `_native.RemoteRequests` is, in plain Python."""

    def __init__(self, url: str, ranges: list[tuple[int, int]]) -> None:
        self.url = os.fsencode(url)
        self.offsets = np.array([o for o, _ in ranges], np.int64)
        self.lengths = np.array([n for _, n in ranges], np.int64)
        self.count = len(ranges)
        self.buffers = [bytearray(n) for _, n in ranges]
        self.finished: dict[int, tuple[int, int]] = {}
        self.all = threading.Event()

    def path(self, _i: int) -> bytes:
        return self.url

    def dest(self, i: int) -> memoryview:
        return memoryview(self.buffers[i])

    def finish(self, i: int, nbytes: int, errno: int) -> None:
        assert i not in self.finished, "finished twice"
        self.finished[i] = (nbytes, errno)
        if len(self.finished) == self.count:
            self.all.set()


def test_a_batch_for_the_native_reader_is_filled_and_finished_once(
    blob: str, engine: ObjectEngine
) -> None:
    requests = Requests(blob, [(i * 997, 500 + i) for i in range(40)])
    engine.read(requests)  # type: ignore[arg-type]  # plain Python's stand-in
    assert requests.all.wait(30)
    assert requests.finished == {i: (500 + i, 0) for i in range(40)}
    for i, data in enumerate(requests.buffers):
        assert bytes(data) == DATA[i * 997 : i * 997 + 500 + i]


def test_a_failed_read_is_finished_with_an_errno_and_remembered(
    bucket: str, engine: ObjectEngine
) -> None:
    requests = Requests(f"{bucket}/absent", [(0, 10), (20, 10)])
    engine.read(requests)  # type: ignore[arg-type]
    assert requests.all.wait(30)
    assert requests.finished == {0: (0, 2), 1: (0, 2)}
    why = engine.why(f"{bucket}/absent", 25)
    assert why is not None
    assert why.fault.status == 404
    assert engine.why(f"{bucket}/absent", 15) is None


def test_the_depth_bounds_what_is_in_flight_and_can_be_turned_live(
    proxy: FaultyProxy, blob: str, options: dict[str, Any]
) -> None:
    proxy.inject("slow", times=None, seconds=0.002)
    engine = ObjectEngine(options | {"reads_in_flight": 3})
    try:
        futures = engine.start([(blob, 0, memoryview(bytearray(800))) for _ in range(12)])
        for future in futures:
            future.result(30)
        assert proxy.open_most <= 3
        engine.turn(8)
        futures = engine.start([(blob, 0, memoryview(bytearray(800))) for _ in range(40)])
        for future in futures:
            future.result(30)
        assert 3 < proxy.open_most <= 8
    finally:
        engine.close()
    assert proxy.injected["slow"] == 52


def test_connections_are_kept_between_reads(
    proxy: FaultyProxy, blob: str, engine: ObjectEngine
) -> None:
    for _ in range(10):
        engine.fetch(blob, 0, memoryview(bytearray(10)))
    assert proxy.connections == 1


def test_the_numbers_count_what_happened(
    proxy: FaultyProxy, blob: str, engine: ObjectEngine
) -> None:
    proxy.inject("status", status=503, times=2)
    for _ in range(5):
        engine.fetch(blob, 0, memoryview(bytearray(100)))
    stats = engine.stats()
    assert (stats.reads, stats.requests, stats.retries, stats.bytes) == (5, 7, 2, 500)
    assert sum(stats.latency_us) == 5
    assert stats.faults == {"status 503": 2}
    assert proxy.injected == {"503": 2}


def test_an_engine_is_sent_by_pickle_with_what_it_knows(blob: str, engine: ObjectEngine) -> None:
    from headrace.io.objects.reading import RemoteObject

    engine.register([RemoteObject(blob, 7, "etag")])
    copy = pickle.loads(pickle.dumps(engine))
    try:
        assert copy.known(blob) == engine.known(blob)
        assert copy.storage_options == engine.storage_options
    finally:
        copy.close()


def test_our_options_and_the_clients_are_told_apart() -> None:
    policy, client = split_options({"deadline_s": 5, "region": "r", "endpoint": "http://e"})
    assert policy == ReadPolicy(deadline_s=5)
    assert client == {"region": "r", "endpoint": "http://e"}


@pytest.mark.parametrize(
    "wrong", [{"deadline_s": 0}, {"stall_s": "5"}, {"reads_in_flight": 0}, {"hedge_s": -1}]
)
def test_senseless_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ObjectEngine(wrong)
