"""What clients gather from the daemon's memory by themselves: always right, counted, and given back."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import _native
from headrace.node import link as links
from headrace.node.mapped import SharedCache
from headrace.node.wire import Cache, WireError
from node.conftest import node_loader, report_of, seen, serving, until
from plane.conftest import SAMPLES, content

TESTS = Path(__file__).resolve().parents[1]


def data_of(server):
    (data,) = server.describe()["datasets"]
    return data


def cache_of(loader):
    """What a loader has of the daemon's cache."""
    (node,) = [s for s in loader.stages if s.name == "node"]
    return node._link.cache


@pytest.fixture
def quick(monkeypatch):
    """Links are looked after every 20 ms."""
    monkeypatch.setattr(links, "LOOK_AFTER_S", 0.02)


@pytest.mark.parametrize("order", ["shuffled", "blocked"])
def test_what_is_held_takes_no_message_and_is_the_same(folder, store, order):
    alone = hr.loader(store, 32, seed=3, order=order)
    expected = [seen(alone) for _ in range(3)]
    alone.close()
    with serving(folder) as server:
        loader = node_loader(store, order=order)
        assert seen(loader) == expected[0]
        before = report_of(loader).node_batches
        until(lambda: _held(loader) == SAMPLES)
        assert [seen(loader) for _ in range(2)] == expected[1:]
        report = report_of(loader)
        assert report.gathered_batches == report.node_batches - before > 0
        assert report.direct_batches == 0
        loader.close()
        until(lambda: data_of(server)["delivered_samples"] >= 3 * SAMPLES)
        data = data_of(server)
        assert data["delivered_bytes"] == 3 * store.nbytes
        assert data["gathered_bytes"] == 2 * store.nbytes
        assert data["source_samples_bytes"] == store.nbytes


def _held(loader):
    """Samples that the client finds by itself; takes in what the daemon says."""
    (node,) = [s for s in loader.stages if s.name == "node"]
    node.drain(node._link)
    view = cache_of(loader).view
    if view is None:
        return 0
    return SAMPLES - view.look_up(np.arange(SAMPLES)).missing_count


@given(st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=40), st.integers(0, 3))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_samples_while_the_memory_goes_up_and_down(moving, indices, ahead):
    loader = moving
    batch = loader.reader.fetch(np.array(indices)).batch
    for _ in range(ahead):  # others that nobody takes
        loader.reader._stages.top.submit(np.array(indices[::-1]))
    assert batch.indices.tolist() == indices
    assert [bytes(b) for b in batch] == [content(i) for i in indices]


@pytest.fixture
def moving(folder, store, quick):
    """A loader of a daemon whose memory for samples is another every few milliseconds."""
    with serving(folder, ram_bytes=8 << 20) as server:
        loader = node_loader(store)
        seen(loader)
        held, done = set(), threading.Event()

        def move():
            rng = random.Random(1)
            while not done.wait(0.003):
                quota = rng.choice([1, 300_000, 700_000, 8 << 20])
                for data in list(server._datasets._data.values()):
                    data.set_quota(quota)
                    held.add(data.chain.ram.held_samples)
                server.call_soon(lambda: None)

        thread = threading.Thread(target=move)
        thread.start()
        yield loader
        done.set()
        thread.join()
        assert len(held) > 2  # it moved indeed
        report = report_of(loader)
        assert report.attached
        assert report.direct_batches == 0
        loader.close()


def test_memory_that_is_given_back_is_unmapped_though_the_consumer_sleeps(folder, store, quick):
    with serving(folder) as server:
        loader = node_loader(store)
        seen(loader)
        until(lambda: _held(loader) == SAMPLES)
        (node,) = [s for s in loader.stages if s.name == "node"]
        assert cache_of(loader).view.mapped_bytes > store.nbytes
        server.call_soon(lambda: server._datasets._data[_key(server)].set_quota(1))
        until(lambda: cache_of(loader).view is None)  # nobody asks for anything meanwhile
        until(lambda: data_of(server)["lingering_bytes"] == 0)
        assert node._link is not None
        assert [i for b in seen(loader) for i in b[2]]
        loader.close()


def _key(server):
    (key,) = server._datasets._data
    return key


def test_memory_that_a_client_does_not_let_go_of_counts(folder, store, monkeypatch, tmp_path):
    """The next data set gets what is left, until the client has dropped it or is gone."""
    monkeypatch.setattr(links, "LOOK_AFTER_S", 3600.0)
    path = tmp_path / "other.hr"
    hr.pack(((f"{i}", bytes([i % 251]) * 4000, 0) for i in range(SAMPLES)), path)
    total = 3 << 20
    with serving(folder, ram_bytes=total) as server, hr.open(path) as other:
        stuck = node_loader(store)
        seen(stuck)
        until(lambda: data_of(server)["held_bytes"] > total // 2)  # kept a little later
        reader = node_loader(other)
        seen(reader)
        until(lambda: any(d["lingering_bytes"] for d in server.describe()["datasets"]))
        server.call_soon(server.share)
        for _ in range(3):
            seen(reader)
            datasets = server.describe()["datasets"]
            assert sum(d["held_bytes"] + d["lingering_bytes"] for d in datasets) <= total
        stuck.close()
        until(lambda: not any(d["lingering_bytes"] for d in server.describe()["datasets"]))
        reader.close()


def test_a_forked_child_gathers_anew_and_the_parent_goes_on(folder, store):
    alone = hr.loader(store, 32, seed=3)
    expected = [seen(alone) for _ in range(3)]
    with serving(folder):
        loader = node_loader(store)
        assert seen(loader) == expected[0]
        until(lambda: _held(loader) == SAMPLES)
        iterator = iter(loader)
        first = next(iterator)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                loader.load_state_dict({**loader.state_dict()})
                kept = [bytes(s) for s in first] == [content(int(i)) for i in first.indices]
                got = loader.reader.fetch(np.arange(40)).batch
                code = (
                    0 if kept and [bytes(s) for s in got] == [content(i) for i in range(40)] else 2
                )
            finally:
                os._exit(code)
        rest = [b.indices.tolist() for b in iterator]
        assert [first.indices.tolist(), *rest] == [b[2] for b in expected[1]]
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert report_of(loader).gathered_batches >= 16
        loader.close()
    alone.close()


def test_the_daemon_is_killed_while_its_memory_is_gathered(folder, daemon, store, quick):
    """What is gathered stays right; its memory is let go of, and reading goes on directly."""
    alone = hr.loader(store, 8, seed=3)
    expected = [seen(alone) for _ in range(40)]
    alone.close()
    one = daemon()
    loader = node_loader(store, 8)
    got = [seen(loader)]
    until(lambda: _held(loader) == SAMPLES)
    cache = cache_of(loader)
    got.append(seen(loader))  # gathered, however long the machine stands still from now on
    threading.Timer(0.05, lambda: one.process.send_signal(signal.SIGKILL)).start()
    got += [seen(loader) for _ in range(38)]
    assert got == expected
    until(lambda: one.process.poll() == -signal.SIGKILL)
    until(lambda: cache.view is None)
    seen(loader)
    report = report_of(loader)
    assert report.gathered_batches > 0
    assert report.direct_batches > 0
    assert not report.attached
    loader.close()


def test_clients_add_no_memory_of_their_own(folder, daemon, tmp_path):
    """R6: what a client maps of the cache is the daemon's; its private memory is a few batches."""
    path = tmp_path / "large.hr"
    hr.pack(((f"{i}", os.urandom(100_000), 0) for i in range(600)), path)
    daemon(ram_bytes=128 << 20)
    code = (
        "import sys, headrace as hr\n"
        "from node.conftest import be_patient; be_patient()\n"
        "loader = hr.loader(hr.open(sys.argv[1]), 20, plane='node')\n"
        "for _ in range(5):\n"  # what is read is kept a little later than it comes
        "    for batch in loader: pass\n"
        "report = loader.stages[-1].report()\n"
        "assert report.gathered_batches > 60 and not report.direct_batches, report\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )
        for _ in range(3)
    ]
    try:
        assert [client.stdout.readline() for client in clients] == [b"ready\n"] * 3
        for client in clients:
            memory = _shared_memory_of(client.pid)
            assert memory["Rss"] > 40 << 20  # it has the cache mapped
            assert memory["Pss"] < memory["Rss"] // 2
            assert memory["Private_Dirty"] < 4 * 20 * 100_000  # memory of batches that it held last
    finally:
        for client in clients:
            client.communicate(timeout=20)


def _shared_memory_of(pid):
    """Bytes of the daemon's memory that a process has mapped."""
    sums, ours = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            if ours and name in sums:
                sums[name] += int(value.split()[0]) * 1024
        elif "-" in line.split(maxsplit=1)[0]:
            ours = "memfd:headrace" in line
    return sums


def memfd(nbytes, seals=True):
    import fcntl

    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(nbytes))
    if seals:
        fcntl.fcntl(fd, 1033, 0x0002 | 0x0010)  # F_ADD_SEALS: shrink, future write
    return fd


@pytest.mark.parametrize(
    ("slabs", "sizes", "sealed"),
    [
        ([(1, 1, 4096)], [4096], True),  # no index
        ([(1, 0, 4096)], [4096], False),  # it could shrink
        ([(1, 0, 8192)], [4096], True),  # smaller than said
        ([(1, 0, 64)], [4096], True),  # too small for the samples
        ([(1, 0, 4096)], [], True),  # no descriptor
        ([(1, 0, 4096), (2, 1, 4096), (3, 1, 4096)], [4096] * 3, True),  # twice
        ([(1, 0, 4096), (2, 1 << 32, 4096)], [4096] * 2, True),
        ([(1, -1, 4096)], [4096], True),
    ],
)
def test_memory_that_is_not_what_it_should_be_ends_the_link(slabs, sizes, sealed):
    fds = [memfd(size, sealed) for size in sizes]
    try:
        with pytest.raises(WireError):
            SharedCache().add(Cache(1, 100, 1, slabs), fds)
    finally:
        for fd in fds:
            os.close(fd)


def test_a_damaged_index_costs_the_daemon_its_client_and_no_byte(folder, store):
    """A daemon gone mad: its index says that samples lie where others do."""
    alone = hr.loader(store, 32, seed=3)
    expected = [seen(alone) for _ in range(2)]
    alone.close()
    with serving(folder):
        loader = node_loader(store)
        assert seen(loader) == expected[0]
        until(lambda: _held(loader) == SAMPLES)
        cache = cache_of(loader)
        numbers = sorted(cache._numbers.values())
        words = np.full(SAMPLES, (numbers[1] << 32) | 7, np.uint64)
        index, slab = memfd(0, False), memfd(1 << 16)
        os.write(index, words.tobytes().ljust(4096, b"\0"))
        import fcntl

        fcntl.fcntl(index, 1033, 0x0002 | 0x0010)
        view = _native.CacheView(index, 4096, samples=SAMPLES, parts=1)
        view.add_slab(numbers[1], slab, 1 << 16)
        os.close(index)
        os.close(slab)
        cache.view = view
        assert seen(loader) == expected[1]
        report = report_of(loader)
        assert report.direct_batches > 0
        assert "damaged" in report.why
        loader.close()


def test_nothing_of_a_closed_loader_stays_mapped(folder, store):
    def mapped():
        gc.collect()
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if "memfd:headrace" in line and " r--s " in line]

    with serving(folder):
        before = set(mapped())
        loader = node_loader(store)
        for _ in range(2):
            seen(loader)
        until(lambda: set(mapped()) - before)
        loader.close()
        del loader
        until(lambda: not set(mapped()) - before)
