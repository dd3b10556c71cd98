"""PRISMA's weaknesses turned round, in the node daemon: the rest of them; see test_prisma_node.py.

P2   no byte is delivered before it was read and checked
P3   concurrent readers of one sample are safe
P4   a consumer that skips, stops early or goes on elsewhere blocks nobody
P5   what the daemon does not know is read directly
P7   memory is counted in bytes, not in files
P8   nothing grows with epochs
P9   the daemon's work for a batch is the same for 1 and 64 clients
P13  others run while a batch is waited for, and failures raise
P15  order depends on seed, epoch, rank and world size alone
"""

import threading

import numpy as np
import pytest

import headrace as hr
from headrace.errors import CorruptSample, HeadraceError
from headrace.node.wire import Ask, ReplyStatus, Samples
from node.conftest import folder, link, node_loader, report_of, seen, serving, until  # noqa: F401
from node.test_hostile import opened
from plane.conftest import SAMPLES, content, packed, store  # noqa: F401

# Fixtures are known by their names.
# ruff: noqa: F811

pytestmark = pytest.mark.usefixtures("patient")


def ask(one, number, indices):
    """Send a request, and return its ticket."""
    wire = np.array(indices, np.int64).tobytes()
    one.send(Ask(one.new_ticket(), number, wire, []))
    return one._ticket


def data_of(server):
    (data,) = server.describe()["datasets"]
    return data


def test_p2_no_byte_is_delivered_before_it_is_read_and_checked(folder, tmp_path, link):
    path = tmp_path / "damaged.hr"
    hr.pack(((f"{i}", bytes([i]) * 5000, 0) for i in range(20)), path)
    volume = next(path.glob("**/*.hrv"))
    damaged = bytearray(volume.read_bytes())
    damaged[damaged.index(bytes([9]) * 5000) + 100] ^= 1
    volume.write_bytes(damaged)
    with hr.open(path) as store, serving(folder):
        one = link()
        number = opened(one, store)
        for indices, status in (
            ([8], ReplyStatus.OK),
            ([8, 9, 10], ReplyStatus.FAILED),
            ([10], ReplyStatus.OK),
        ):
            ask(one, number, indices)
            reply = one.wait(Samples, 30)
            assert reply.status is status
            assert bool(reply.nbytes) == bool(reply.buffer) == (status is ReplyStatus.OK)
        loader = node_loader(store, 5)
        with pytest.raises(CorruptSample, match="checksum"):
            seen(loader)
        loader.close()


def test_p3_many_may_read_the_same_samples_at_once(folder, store):
    """The same batches in the same order, from nothing: all are read, waited for and shared at once."""
    with serving(folder) as server:
        wrong, threads = [], []
        loaders = [node_loader(store, 16, seed=4, direct="always") for _ in range(8)]

        def consume(loader):
            for batch in loader:
                for index, sample in zip(batch.indices.tolist(), batch, strict=True):
                    if bytes(sample) != content(index):
                        wrong.append(index)

        for loader in loaders:
            threads.append(threading.Thread(target=consume, args=(loader,)))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert wrong == []
        assert data_of(server)["source_samples_bytes"] == store.nbytes
        assert sum(report_of(loader).direct_batches for loader in loaders) == 0
        for loader in loaders:
            loader.close()


def test_p4_who_skips_and_stops_blocks_nobody_and_leaves_nothing(folder, store):
    with serving(folder, window_bytes=1 << 20) as server:
        leaver, stayer = node_loader(store, 8), node_loader(store, 8, seed=8)
        state = None
        for epoch in range(6):  # leaves each epoch somewhere else, requests under way
            leaver.set_epoch(epoch)
            for count, _ in enumerate(leaver):
                if count == epoch * 3:
                    state = leaver.state_dict()
                    break
        leaver.load_state_dict(state)
        rest = sum(len(batch) for batch in leaver)
        assert rest == SAMPLES - 8 * (5 * 3 + 1)
        assert sum(len(b[2]) for b in seen(stayer)) == SAMPLES
        assert report_of(stayer).direct_batches == 0
        leaver.close()
        stayer.close()
        until(lambda: not server.describe()["sessions"])
        until(lambda: not server.describe()["jobs"])
        until(lambda: data_of(server)["reading"] == 0)


def test_p5_what_the_daemon_cannot_find_is_read_directly(folder, store, tmp_path):
    """Gone from its path, open here: nobody waits for it."""
    path = tmp_path / "gone.hr"
    hr.pack(((f"{i}", bytes([i]) * 100, 0) for i in range(64)), path)
    with hr.open(path) as gone, serving(folder):
        alone = hr.loader(gone, 16, seed=3)
        expected = seen(alone)
        alone.close()
        path.rename(tmp_path / "elsewhere.hr")
        with pytest.raises(HeadraceError, match=r"gone\.hr"):
            hr.open(path)  # it is gone indeed; what is open here stays so
        loader, other = node_loader(gone, 16), node_loader(store)
        assert seen(loader) == expected
        report = report_of(loader)
        assert (report.node_batches, report.attached) == (0, False)
        assert "gone.hr" in report.why
        assert sum(len(b[2]) for b in seen(other)) == SAMPLES
        assert report_of(other).direct_batches == 0
        loader.close()
        other.close()


def test_p7_a_window_counts_bytes_whatever_the_samples_sizes(folder, tmp_path, link):
    path = tmp_path / "sizes.hr"
    large = 300_000
    hr.pack(((f"{i}", bytes([i]) * (large if i % 2 else 10), 0) for i in range(80)), path)
    window = 2 << 20
    with hr.open(path) as store, serving(folder, window_bytes=window, ram_bytes=0) as server:
        for odd in (0, 1):
            one = link(f"job-{odd}")
            number = opened(one, store)
            for k in range(odd, 80, 2):
                ask(one, number, [k])
            until(lambda job=f"job-{odd}", held=odd * window // 2: _settled(server, job, held))
            session = _session(server, f"job-{odd}")
            if odd:
                assert session["waiting"] > 30
                assert session["held_bytes"] <= window + large * 2
            else:  # forty tiny ones are not many bytes
                until(lambda job=f"job-{odd}": _session(server, job)["leases"] == 40)
                assert _session(server, f"job-{odd}")["waiting"] == 0


def _session(server, job):
    (found,) = [s for s in server.describe()["sessions"] if s["job"] == job]
    return found


def _settled(server, job, held_bytes):
    """All forty requests are answered, or wait for memory, of which so much is held."""
    session = _session(server, job)
    return session["leases"] + session["waiting"] == 40 and session["held_bytes"] >= held_bytes


def test_p8_nothing_grows_with_epochs(folder, store):
    """The first batch of any epoch costs what the first of all does."""
    with serving(folder) as server:
        loader = node_loader(store)
        asked = []
        for epoch in (0, 1, 10**6):
            loader.set_epoch(epoch)
            iterator = iter(loader)
            next(iterator)
            (node,) = [s for s in loader.stages if s.name == "node"]
            asked.append(node.stats().in_flight)
            (session,) = server.describe()["sessions"]
            assert session["leases"] + session["waiting"] <= 2 * len(loader)
            del iterator
        assert asked[2] <= asked[1] + 1 <= len(loader) + 1
        loader.close()


def test_p9_one_read_for_any_number_of_clients(folder, store, link):
    """Not a time but the work: what is read, and how many messages a client gets for its batch."""
    read_bytes, messages = [], []
    indices = list(range(20))
    for clients in (1, 64):
        with serving(folder) as server:
            links = [link(f"job-{k}") for k in range(clients)]
            numbers = [opened(one, store) for one in links]
            for one, number in zip(links, numbers, strict=True):
                ask(one, number, indices)
            for one in links:
                assert one.wait(Samples, 30).status is ReplyStatus.OK
            read_bytes.append(data_of(server)["source_samples_bytes"])
            messages.append(max(len(one._kept) for one in links))
            assert data_of(server)["delivered_samples"] == 20 * clients
            for one in links:
                one.close()
    assert read_bytes[0] == read_bytes[1] == sum(len(content(i)) for i in indices)
    assert messages[0] >= messages[1] - 1


def test_p13_others_run_while_a_batch_is_waited_for(folder, store):
    with serving(folder) as server:
        loader = node_loader(store)
        next(iter(loader))
        held, ran = threading.Event(), []
        data = next(iter(server._datasets._data.values()))
        submit = data.chain.top.submit
        data.chain.top.submit = lambda indices: (held.wait(60), submit(indices))[1]
        got = []
        consumer = threading.Thread(target=lambda: got.append(next(iter(loader))))
        consumer.start()
        for _ in range(1000):
            ran += [not got]
        held.set()
        consumer.join(20)
        assert not consumer.is_alive()
        assert all(ran)
        assert len(got) == 1
        loader.close()


def test_p15_order_is_that_of_seed_epoch_rank_and_world_size(folder, store):
    def epochs(plane, rank):
        loader = hr.loader(store, 10, seed=5, rank=rank, world_size=3, plane=plane)
        found = [[b.indices.tolist() for b in loader] for _ in range(2)]
        loader.close()
        return found

    with serving(folder) as server:
        over = [epochs("node", rank) for rank in range(3)]
        assert over == [epochs("process", rank) for rank in range(3)]
        # What clients took out of the daemon's memory by themselves they say when they end.
        until(lambda: data_of(server)["delivered_samples"] >= 2 * SAMPLES)
    flat = sorted(i for rank in over for b in rank[0] for i in b)
    assert set(flat) == set(range(SAMPLES))
