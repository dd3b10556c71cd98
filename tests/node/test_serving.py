"""What the daemon delivers: the same as without it, from memory that all clients share."""

import gc
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.config import ReaderOptions, TierOptions
from headrace.errors import CorruptSample, SampleNotFound, VolumeError
from headrace.node.link import LinkLost
from headrace.testing import Simulation
from node.conftest import node_loader, report_of, seen, serving, until
from plane.conftest import SAMPLES, content


def status(server):
    return server.describe()


def data_of(server):
    (data,) = status(server)["datasets"]
    return data


@pytest.mark.parametrize("order", ["shuffled", "sequential", "blocked", "balanced"])
def test_batches_order_and_state_are_those_of_the_process_plane(folder, store, order):
    alone = hr.loader(store, 32, seed=3, order=order)
    expected = [seen(alone) for _ in range(2)]
    with serving(folder):
        loader = node_loader(store, order=order)
        assert [seen(loader) for _ in range(2)] == expected
        assert loader.state_dict() == alone.state_dict()
        assert loader.last_order_hash == alone.last_order_hash
        report = report_of(loader)
        assert report.attached
        assert report.direct_batches == 0
        assert report.node_batches > 0
        loader.close()
    alone.close()


def test_a_run_goes_on_with_the_daemon_where_it_stopped_without(folder, store):
    alone = hr.loader(store, 32, seed=3)
    expected = seen(alone)
    alone.set_epoch(0)
    for number, _ in enumerate(alone):
        if number == 4:
            break
    state = alone.state_dict()
    with serving(folder):
        loader = node_loader(store)
        loader.load_state_dict(state)
        assert seen(loader) == expected[5:]
        assert report_of(loader).direct_batches == 0
        loader.close()
    alone.close()


def test_samples_of_several_parts_and_a_choice_of_parts(folder, tmp_path):
    import io
    import tarfile

    shard = tmp_path / "shard.tar"
    with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(40):
            for part, size in (("jpg", 100 + i), ("cls", 3)):
                info = tarfile.TarInfo(f"{i:04d}.{part}")
                info.size = size
                tar.addfile(info, io.BytesIO(bytes([i]) * size))
    for parts in ((), ("cls",)):
        with hr.open(shard) as store, serving(folder):
            alone = hr.loader(store, 16, seed=1, parts=parts)
            loader = node_loader(store, 16, seed=1, parts=parts)
            for one, other in zip(alone, loader, strict=True):
                assert one.part_names == other.part_names
                assert one.lengths.tolist() == other.lengths.tolist()
                assert one.dense()[0].tobytes() == other.dense()[0].tobytes()
            assert report_of(loader).node_batches == 3
            loader.close()
            alone.close()


def test_a_second_job_and_a_second_epoch_read_nothing_from_the_source(folder, store, monkeypatch):
    with serving(folder) as server:
        for job in ("one", "two"):
            monkeypatch.setenv("HEADRACE_JOB", job)
            loader = node_loader(store, seed=len(job))
            for _ in range(2):
                seen(loader)
            loader.close()
        until(lambda: data_of(server)["delivered_bytes"] == 4 * store.nbytes)
        data = data_of(server)
        assert data["source_samples_bytes"] == store.nbytes  # each byte once
        assert data["held_samples"] == SAMPLES


def test_two_jobs_in_step_over_cold_data_read_each_byte_once(folder, store, monkeypatch):
    """Same seed, same batches at the same time: what one reads, the other waits for."""
    with serving(folder) as server:
        loaders = []
        for job in ("one", "two", "three"):
            monkeypatch.setenv("HEADRACE_JOB", job)
            loaders.append(node_loader(store, direct="always"))
        epochs = [None] * 3

        def consume(k):
            epochs[k] = seen(loaders[k])

        threads = [threading.Thread(target=consume, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert epochs[0] == epochs[1] == epochs[2]
        data = data_of(server)
        assert data["source_samples_bytes"] == store.nbytes
        until(lambda: data_of(server)["delivered_bytes"] == 3 * store.nbytes)
        assert [report_of(loader).direct_batches for loader in loaders] == [0, 0, 0]
        for loader in loaders:
            loader.close()


def test_the_same_batch_asked_twice_is_read_once(folder, store, link):
    """Workers of one job; no memory for samples, so nothing but the read itself is shared."""
    from headrace.node.wire import Ask

    with serving(folder, ram_bytes=0) as server:
        a, b = _opened(link(), store), _opened(link(), store)
        held = threading.Event()
        data = next(iter(server._datasets._data.values()))
        submit = data.chain.top.submit
        data.chain.top.submit = lambda indices: _Held(submit(indices), held)
        indices = np.arange(10, dtype=np.int64).tobytes()
        for one, number in (a, b):
            one.send(Ask(one.new_ticket(), number, indices, []))
        until(lambda: data.shared_batches == 1)
        held.set()
        replies = [_samples(one) for one, _ in (a, b)]
        assert replies[0].buffer == replies[1].buffer
        assert data_of(server)["source_samples_bytes"] == sum(len(content(i)) for i in range(10))


def test_what_was_read_at_once_is_not_read_again_before_it_is_kept(folder, store, link):
    from headrace.node.wire import Ask

    with serving(folder) as server:
        a, b = _opened(link(), store), _opened(link(), store)
        data = next(iter(server._datasets._data.values()))
        submit = data.chain.top.submit

        def read_at_once(indices):
            pending = submit(indices)
            until(lambda: pending.done)
            return pending

        data.chain.top.submit = read_at_once
        kept = threading.Event()
        server._keeping.submit(kept.wait)
        indices = np.arange(10, dtype=np.int64).tobytes()
        for one, number in (a, b):
            one.send(Ask(one.new_ticket(), number, indices, []))
        until(lambda: data.postponed or data.batches == 2)
        kept.set()
        for one, _ in (a, b):
            assert _samples(one).status == 0
        assert data_of(server)["source_samples_bytes"] == sum(len(content(i)) for i in range(10))


def test_what_waits_to_be_kept_is_counted_by_its_bytes(folder, store, link):
    from headrace.node.wire import Ask

    largest = np.sort(np.argsort([len(content(i)) for i in range(SAMPLES)])[-20:])
    with serving(folder) as server:
        one, number = _opened(link(), store)
        data = next(iter(server._datasets._data.values()))
        kept = threading.Event()
        server._keeping.submit(kept.wait)
        one.send(Ask(one.new_ticket(), number, largest.tobytes(), []))
        assert _samples(one).status == 0
        try:
            until(lambda: data._keeping_bytes)
            assert data._keeping_bytes >= sum(len(content(i)) for i in largest.tolist())
        finally:
            kept.set()
        until(lambda: data._keeping_bytes == 0)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({}, r"1 of 1 reads, one of them in volume .*\.hrv at offset"),
        ({"reads_per_s": 0.001}, "the limits of bytes and reads per second"),
    ],
)
def test_what_is_late_names_what_it_waits_for(folder, store, link, tiers, words):
    from headrace.node.wire import Ask, ReplyStatus

    slow = ReaderOptions(simulate=Simulation(latency_s=20.0))
    with serving(folder, reader=slow, tiers=TierOptions(**tiers)) as server:
        one, number = _opened(link(), store)
        data = next(iter(server._datasets._data.values()))
        for index in (0, 1):  # the limits let the first one go
            one.send(Ask(one.new_ticket(), number, np.int64([index]).tobytes(), []))
        until(lambda: len(data._unread) == 2)
        second = max(data._unread.items())[1].pending
        until(lambda: re.match(words, second.waits_for))
        data._deadline_s = 0.0
        server.call_soon(data.look)
        replies = {reply.ticket: reply for reply in (_samples(one), _samples(one))}
        reply = replies[max(replies)]
        assert reply.status == ReplyStatus.FAILED
        assert re.search("was not read within 0 s: it waits for " + words, reply.message)


def test_a_data_set_that_is_closed_answers_what_it_has_not_read(
    folder, store, link, tmp_path, monkeypatch
):
    """A client that goes leaves its reads behind: they hold memory of its job until they end."""
    from headrace.node.wire import Ask

    monkeypatch.setattr("headrace.node.datasets.DATASETS_MAX", 1)
    hr.pack([("a", b"a", 0)], tmp_path / "other.hr")
    with serving(folder, ram_bytes=1 << 20) as server, hr.open(tmp_path / "other.hr") as other:
        one, number = _opened(link(), store)
        data = next(iter(server._datasets._data.values()))
        submit = data.chain.top.submit
        data.chain.top.submit = lambda indices: _Held(submit(indices), threading.Event())
        for last in (10, 12):  # the second waits for the first, in part
            indices = np.arange(last, dtype=np.int64).tobytes()
            one.send(Ask(one.new_ticket(), number, indices, []))
        until(lambda: data.postponed == 1)
        one.close()
        until(lambda: not status(server)["sessions"])
        assert server.budget.held_bytes > 0
        _opened(link(), other)
        until(lambda: server.budget.held_bytes == 0)
        assert data.failed == 2


@pytest.mark.parametrize("error", [VolumeError("it is away"), RuntimeError("a mistake of ours")])
def test_a_data_set_that_cannot_be_read_leaves_no_descriptor(
    folder, store, link, monkeypatch, error
):
    from headrace.node.wire import ReplyStatus

    with serving(folder):
        one = link()
        assert _open(one, store, ("no such part",)).status == ReplyStatus.MISMATCH
        gc.collect()  # what other tests left in cycles must not go meanwhile
        before = _descriptors()
        with monkeypatch.context() as patched:
            patched.setattr("headrace.plane.pipeline.Pipeline.begin", _raise(error))
            for _ in range(3):
                reply = _open(one, store)
                assert (reply.status, str(error) in reply.message) == (ReplyStatus.NOT_FOUND, True)
        until(lambda: _descriptors() <= before)  # threads look into /proc now and then
        assert _open(one, store).status == ReplyStatus.OK


def _descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_mistake_in_one_clients_answer_costs_the_others_nothing(
    folder, store, link, monkeypatch, caplog
):
    """It is hung up on: without an answer it would wait for ever."""
    from headrace.node import session
    from headrace.node.wire import Ask

    right, answers = session._samples, []

    def wrong_at_first(*arguments):
        answers.append(arguments)
        return right(*arguments) if len(answers) > 1 else 1 // 0

    monkeypatch.setattr(session, "_samples", wrong_at_first)
    held = threading.Event()
    with serving(folder) as server:
        clients = [_opened(link(), store) for _ in range(3)]
        data = next(iter(server._datasets._data.values()))
        submit = data.chain.top.submit
        data.chain.top.submit = lambda indices: _Held(submit(indices), held)
        for one, number in clients:
            indices = np.arange(10, dtype=np.int64).tobytes()
            one.send(Ask(one.new_ticket(), number, indices, []))
        until(lambda: data.shared_batches == 2)
        held.set()
        until(lambda: len(status(server)["sessions"]) == 2)
        lost = [one for one, _ in clients if not _is_answered(one)]
        assert len(lost) == 1
    assert "ZeroDivisionError" in caplog.text


def _is_answered(link):
    try:
        return _samples(link).status == 0
    except LinkLost:
        return False


def test_a_mistake_while_a_failure_is_described_is_an_answer_too(
    folder, damaged, link, monkeypatch, caplog
):
    from headrace.node.wire import Ask, ReplyStatus

    monkeypatch.setattr(type(damaged), "failure_error", _raise(RuntimeError("a mistake")))
    with serving(folder):
        one, number = _opened(link(), damaged)
        one.send(Ask(one.new_ticket(), number, np.arange(50, dtype=np.int64).tobytes(), []))
        reply = _samples(one)
        assert (reply.status, reply.message) == (ReplyStatus.FAILED, "RuntimeError: a mistake")
    assert "a batch failed" in caplog.text


def _raise(error):
    def fails(*_):
        raise error

    return fails


class _Held:
    """Reads that are not done before an event, however fast they were."""

    def __init__(self, pending, event):
        self._pending, self._event = pending, event

    @property
    def done(self):
        return self._event.is_set() and self._pending.done

    def __getattr__(self, name):
        return getattr(self._pending, name)


def _open(link, store, parts=("",)):
    from headrace.node.wire import Open, Opened

    link.send(
        Open(link.new_ticket(), os.fsencode(store.path), 1, store.fingerprint, list(parts), None)
    )
    return link.wait(Opened, 10)


def _opened(link, store):
    """A link on which a store is open, and its number there."""
    opened = _open(link, store)
    assert opened.status == 0, opened.message
    return link, opened.dataset


def _samples(link):
    from headrace.node.wire import Samples

    return link.wait(Samples, 10)


def test_quotas_of_memory_hold_and_what_is_beyond_is_still_right(folder, store, monkeypatch):
    quota = 600_000
    assert store.nbytes > 2 * quota
    with serving(folder, ram_bytes=quota) as server:
        loader = node_loader(store)
        first = seen(loader)
        until(lambda: data_of(server)["held_bytes"])  # what was read is kept a little later
        second = seen(loader)
        assert sorted(i for b in first for i in b[2]) == list(range(SAMPLES))
        assert len(second) == len(first)
        held = data_of(server)["held_bytes"]
        assert 0 < held <= quota
        until(lambda: data_of(server)["ram_bytes"])
        assert data_of(server)["ram_bytes"] < store.nbytes
        loader.close()
    with serving(folder, ram_bytes=64 << 20, job_ram_bytes=quota) as server:
        loader = node_loader(store)
        seen(loader)
        held = until(lambda: data_of(server)["held_bytes"])
        assert 0 < held <= quota
        loader.close()


@pytest.fixture
def damaged(tmp_path):
    """A store of 50 samples, one of them damaged."""
    path = tmp_path / "damaged.hr"
    hr.pack(((f"{i}", bytes([i]) * 5000, 0) for i in range(50)), path)
    volume = next(path.glob("**/*.hrv"))
    content = bytearray(volume.read_bytes())
    content[len(content) // 2] ^= 0xFF
    volume.write_bytes(content)
    with hr.open(path) as store:
        yield store


def test_a_damaged_sample_is_reported_by_the_client_itself(folder, damaged):
    store = damaged
    with serving(folder) as server:
        loader = node_loader(store, 10)
        with pytest.raises(CorruptSample, match="checksum"):
            seen(loader)
        loader.close()
        loader = node_loader(store, 10, on_error="skip")
        assert sum(len(b[2]) for b in seen(loader)) == 49
        assert len(loader.skipped) == 1
        assert report_of(loader).direct_batches == 1
        assert data_of(server)["failed_batches"] == 2
        loader.close()


def test_an_index_outside_is_the_same_error(folder, store):
    with serving(folder):
        loader = node_loader(store)
        reader = loader.reader
        assert bytes(reader.fetch(np.array([3])).batch[0]) == content(3)
        with pytest.raises(SampleNotFound):
            reader.fetch(np.array([SAMPLES]))
        assert bytes(reader.fetch(np.array([4])).batch[0]) == content(4)
        assert report_of(loader).node_batches == 2
        loader.close()


def test_other_data_under_the_same_path_is_read_directly(folder, tmp_path):
    path = tmp_path / "data.hr"
    hr.pack(((f"{i}", bytes([i]), 0) for i in range(20)), path)
    with hr.open(path) as store, serving(folder):
        seen(hr.loader(store, 5))  # its files are open from now on
        hr.pack(((f"{i}", bytes([i, i]), 0) for i in range(20)), path, overwrite=True)
        loader = node_loader(store, 5)
        batches = seen(loader)
        assert all(s == bytes([i]) for b in batches for i, s in zip(b[2], b[4], strict=True))
        report = report_of(loader)
        assert (report.attached, report.node_batches) == (False, 0)
        assert "fingerprint" in report.why
        loader.close()


def test_batches_outlive_loader_link_and_daemon(folder, store):
    with serving(folder):
        loader = node_loader(store)
        batches = list(loader)
        assert report_of(loader).node_batches == len(batches)
        again = seen(loader)  # what is held is not written again
        assert len(again) == len(batches)
        loader.close()
    for batch in batches:
        for index, sample in zip(batch.indices, batch, strict=True):
            assert bytes(sample) == content(int(index))


def test_memory_is_given_back_when_batches_go(folder, store):
    with serving(folder) as server:
        loader = node_loader(store)
        for _ in range(6):
            for _batch in loader:
                pass
        until(lambda: status(server)["sessions"][0]["batches"] == 6 * 16)
        (session,) = status(server)["sessions"]
        assert session["held_bytes"] < 8 << 20
        # A handful of buffers goes round: nothing is mapped per batch.
        (node,) = [s for s in loader.stages if s.name == "node"]
        assert len(node._link.mappings._buffers) < 40
        loader.close()
        until(lambda: not status(server)["sessions"])
        assert status(server)["jobs"] == []


def test_samples_cannot_be_written_by_a_client(folder, store):
    with serving(folder):
        loader = node_loader(store)
        batch = next(iter(loader))
        with pytest.raises(ValueError, match="read-only"):
            batch.data[0] = 1
        assert not batch.data.flags.writeable
        assert report_of(loader).node_batches == 1
        loader.close()


def test_a_forked_child_looks_at_its_batches_as_long_as_it_likes(folder, store):
    """The parent lets go and reads on; the child's memory must not change under it."""
    with serving(folder):
        loader = node_loader(store)
        iterator = iter(loader)
        batch = next(iterator)
        index, expected = int(batch.indices[0]), bytes(batch[0])
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0 if bytes(batch[0]) == expected == content(index) else 1)
        del batch
        for _ in range(3):
            for _batch in iterator:
                pass
            iterator = iter(loader)
        assert report_of(loader).node_batches > 30
        os.write(write, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(read)
        os.close(write)
        loader.close()


def test_torch_loader_and_its_workers_use_it(folder, store):
    torch = pytest.importorskip("torch")
    from headrace.torch import DataLoader

    with serving(folder) as server:
        loader = DataLoader(store, 32, shuffle=True, seed=3, plane="node")
        got = [b.indices.tolist() for b in loader]
        alone = hr.loader(store, 32, seed=3)
        assert got == [b.indices.tolist() for b in alone]
        alone.close()
        until(lambda: data_of(server)["delivered_samples"] == SAMPLES)
        assert report_of(loader).node_batches == len(got)
        assert sum(loader.bytes_by_tier.values()) == store.nbytes
        assert loader.cache is None
        decoded = DataLoader(store, 32, shuffle=True, seed=3, plane="node", decode=len, threads=2)
        assert sum(int(torch.as_tensor(x).sum()) for x, _ in decoded) == store.nbytes
        until(lambda: data_of(server)["delivered_samples"] == 2 * SAMPLES)


def test_plane_comes_from_the_environment_and_is_checked(folder, store, monkeypatch):
    with pytest.raises(ValueError, match="plane is 'cloud'"):
        hr.loader(store, 8, plane="cloud")
    with pytest.raises(ValueError, match="simulate"):
        hr.loader(store, 8, plane="node", simulate="lustre")
    monkeypatch.setenv("HEADRACE_PLANE", "node")
    with serving(folder):
        loader = hr.loader(store, 8)
        next(iter(loader))
        assert report_of(loader).node_batches == 1
        loader.close()


def test_a_cache_on_the_local_disk_below_the_memory(folder, store, tmp_path, monkeypatch):
    """The next daemon finds there what this one has read."""
    from headrace.config import TierOptions
    from headrace.plane import disk_cache

    monkeypatch.setattr(disk_cache, "disk_reserve", lambda _: 0)
    alone = hr.loader(store, 32, seed=3)
    expected = seen(alone)
    alone.close()
    tiers = TierOptions(cache_dir=str(tmp_path / "cache"))
    sources = []
    for _ in range(2):
        with serving(folder, ram_bytes=0, tiers=tiers) as server:
            loader = node_loader(store)
            assert seen(loader) == expected
            assert report_of(loader).direct_batches == 0
            loader.close()
            sources.append(data_of(server)["source_samples_bytes"])
    assert sources[0] == store.nbytes
    assert sources[1] < store.nbytes // 2
