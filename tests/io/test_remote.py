"""Remote volumes read by engines that are written in Python."""

import contextlib
import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace import _native
from headrace.config import ReaderOptions
from headrace.errors import VolumeTimeout
from headrace.io import BatchReader
from tests_shared import until

SAMPLES = 120


class Objects:
    """Objects in a dict, answered by a pool of threads."""

    def __init__(self, objects):
        self.objects = objects
        self.pool = ThreadPoolExecutor(4)
        self.turned = []
        self.batches = 0
        self.fail = None
        self.kept = []
        self.blocked = threading.Event()

    def read(self, requests):
        self.batches += 1
        if self.fail == "raise":
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if self.fail == "block":
            self.blocked.wait()
        if self.fail == "never":
            self.kept.append(requests)
            return
        for i in reversed(range(requests.count)):
            self.pool.submit(self.answer, requests, i)

    def answer(self, requests, i):
        start, length = int(requests.offsets[i]), int(requests.lengths[i])
        data = self.objects[requests.path(i)][start : start + length]
        if self.fail == "enoent":
            assert requests.finish(i, 0, errno.ENOENT)
        elif i % 2:
            requests.dest(i)[: len(data)] = data
            assert requests.finish(i, len(data))
        else:
            assert requests.finish_with(i, data)
        assert not requests.finish(i, 0, errno.EIO)

    def turn(self, reads_in_flight):
        self.turned.append(reads_in_flight)


@pytest.fixture
def remote(tmp_path):
    contents = [np.random.default_rng(i).bytes(100 + 37 * i) for i in range(SAMPLES)]
    hr.pack(((f"{i:03}", data) for i, data in enumerate(contents)), tmp_path / "store")
    store = hr.open(tmp_path / "store")
    segments, objects = [], {}
    for segment in store.segments:
        volumes = []
        for _, path, size, _ in segment.volumes.native():
            url = b"dict://" + path
            with Path(os.fsdecode(path)).open("rb") as file:
                objects[url] = file.read()
            volumes.append(("remote", url, size, -1))
        segments.append((segment.directory, volumes))
    engine = Objects(objects)
    yield _native.Catalog(segments, engine), engine, contents
    engine.pool.shutdown()


def samples_of(batch):
    data = batch.data
    return [bytes(data[o : o + n]) for o, n in zip(batch.offsets, batch.lengths, strict=True)]


def reading_threads():
    tasks = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if (task / "comm").read_text() == "headrace-read\n":
                tasks.append(task)
    return tasks


def test_batches_and_single_samples_come_through_the_engine(remote):
    catalog, engine, contents = remote
    reader = BatchReader(catalog, [0], ReaderOptions())
    assert reader.stats()["reads_in_flight"] > 5
    reader.turn(reads_in_flight=5)
    assert engine.turned == [5]
    order = np.random.default_rng(1).permutation(SAMPLES)
    pending = [reader.submit(order[at : at + 30]) for at in range(0, SAMPLES, 30)]
    found = [sample for p in pending for sample in samples_of(p.take())]
    assert found == [contents[i] for i in order]
    stats = reader.stats()
    assert stats["in_flight_most"] <= 5
    assert stats["reads"] > 0
    reader.close()
    assert samples_of(catalog.read_one(7)) == [contents[7]]
    assert engine.batches > 1


def test_errors_of_the_engine_are_failures_of_their_samples(remote):
    catalog, engine, _ = remote
    reader = BatchReader(catalog, [0], ReaderOptions())
    for fail, number in (("raise", errno.ECONNRESET), ("enoent", errno.ENOENT)):
        engine.fail, engine.batches = fail, 0
        batch = reader.submit(np.arange(3)).take()
        failures = catalog.failures(batch)
        assert [f["errno"] for f in failures] == [number] * 3
        assert failures[0]["path"].startswith("dict://")
        assert engine.batches > 1  # tried again
    reader.close()


def test_a_request_without_an_answer_ends_at_the_deadline_and_late_ones_do_no_harm(remote):
    catalog, engine, contents = remote
    engine.fail = "never"
    reader = BatchReader(catalog, [0], ReaderOptions(deadline_s=3.0))  # the engine is asked before
    job = reader._reader.submit(np.arange(3))
    batch = job.wait(20)
    assert [f["errno"] for f in catalog.failures(batch)] == [errno.ETIMEDOUT] * 3
    reader.close()
    del batch, job, reader
    (requests,) = engine.kept
    assert not requests.open(0)
    requests.dest(0)[:] = b"x" * int(requests.lengths[0])
    assert not requests.finish_with(0, b"late")
    engine.fail = None
    assert samples_of(catalog.read_one(2)) == [contents[2]]


def test_a_batch_whose_engine_does_not_return_ends_at_the_deadline(remote):
    catalog, engine, _ = remote
    engine.fail = "block"
    reader = BatchReader(catalog, [0], ReaderOptions(deadline_s=0.2))
    with pytest.raises(
        VolumeTimeout, match=r"3 samples was not read within 0\.2 s: it waits for 1 of 1 reads"
    ):
        reader.submit(np.arange(3)).take()
    engine.blocked.set()
    reader.close()


def test_signals_are_handled_while_a_batch_is_waited_for(remote):
    catalog, engine, contents = remote
    engine.fail = "never"
    reader = BatchReader(catalog, [0], ReaderOptions(deadline_s=10))

    def answer(*_):
        engine.fail = None
        for requests in engine.kept:
            for i in range(requests.count):
                engine.answer(requests, i)

    pending = reader.submit(np.arange(3))
    until(lambda: engine.kept)
    before = signal.signal(signal.SIGALRM, answer)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert samples_of(pending.take()) == contents[:3]
        assert pending.done
    finally:
        signal.signal(signal.SIGALRM, before)
    reader.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_reader_ends_its_threads_when_it_is_dropped_but_not_in_a_forked_child(remote):
    catalog, engine, _ = remote
    engine.fail = "raise"
    reader = BatchReader(catalog, [0], ReaderOptions())
    reader.submit(np.arange(3)).take()
    assert reading_threads()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        del reader
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del reader
    until(lambda: not reading_threads())


def test_closing_while_the_engine_is_silent_returns(remote):
    catalog, engine, _ = remote
    engine.fail = "never"
    reader = BatchReader(catalog, [0], ReaderOptions())
    pending = reader.submit(np.arange(3))
    while not engine.kept:
        time.sleep(0.001)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        pending.take()


def test_wrong_calls_of_an_engine_are_refused(remote):
    catalog, engine, _ = remote
    engine.fail = "never"
    thread = threading.Thread(target=catalog.read_one, args=(1,))
    thread.start()
    while not engine.kept:
        time.sleep(0.001)
    (requests,) = engine.kept
    with pytest.raises(IndexError):
        requests.dest(1)
    with pytest.raises(TypeError):
        requests.finish_with(0, 17)
    assert requests.open(0)
    assert requests.finish(0, 0, errno.EIO)
    thread.join()


def test_a_store_without_an_engine_says_so(remote):
    catalog, _, _ = remote
    with pytest.raises(ValueError, match="volume kind is 'tape'"):
        _native.Catalog([(None, [("tape", b"x", 1, -1)])])
    del catalog
