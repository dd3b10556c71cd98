"""Stores that lie on namespaces: read like the folder they came from, by every process that has them."""

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import headrace as hr
from fabric.conftest import NQN
from fabric.proxies import Between, Flipper
from headrace.errors import (
    CorruptSample,
    CorruptStore,
    FabricError,
    SourceChanged,
    SourceError,
    StoreNotFound,
    VolumeError,
)
from headrace.fabric import engine as engine_module
from headrace.fabric.image import (
    MANIFEST,
    files_of,
    lay_out,
    pack_catalog,
    parse_header,
    parse_table,
    write_image,
)
from headrace.fabric.subsystem import NSID_MAX, Subsystem
from headrace.fabric.target import Target
from store.conftest import flip, make_folder
from store.reference import open_either
from tests_shared import until

OPTIONS = {"deadline_s": 20, "timeout_s": 5}


class Store(NamedTuple):
    folder: Path
    samples: dict


class Served(NamedTuple):
    target: Target
    subsystem: Subsystem
    samples: dict
    folder: Path

    @property
    def url(self):
        return url_of(self.target, self.subsystem)


def url_of(target, subsystem, nsid=1):
    host, port = target.address
    return f"nvme+tcp://{host}:{port}/{subsystem.nqn}?ns={nsid}"


def pack(root, seed=1):
    samples = make_folder(root / "photos", seed=seed)
    hr.pack(root / "photos", root / "packed", volume_bytes=30_000)
    return Store(root / "packed", samples)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("store"))


@pytest.fixture(params=["export", "image"])
def served(request, packed, tmp_path):
    """A store as a namespace per file, and as one image."""
    subsystem = Subsystem(NQN)
    if request.param == "export":
        subsystem.add_store(packed.folder)
    else:
        write_image(packed.folder, tmp_path / "image")
        subsystem.add(tmp_path / "image")
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        yield Served(target, subsystem, packed.samples, packed.folder)
    subsystem.close()


@pytest.fixture
def exported(packed):
    subsystem = Subsystem(NQN)
    subsystem.add_store(packed.folder)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        yield Served(target, subsystem, packed.samples, packed.folder)
    subsystem.close()


def contents(store):
    return {name: bytes(store.read(i)) for i, name in enumerate(store.names)}


def delivered(loader, store):
    return {store.names[i]: bytes(b[k]) for b in loader for k, i in enumerate(b.indices)}


@pytest.mark.parametrize("digests", [False, True])
def test_a_store_reads_as_its_source(served, digests):
    options = OPTIONS | {"hdgst": digests, "ddgst": digests}
    with hr.open(served.url, storage_options=options) as store, hr.open(served.folder) as local:
        assert store.fingerprint == local.fingerprint
        assert store.classes == local.classes
        assert len(store.segments[0].entry.volumes) > 1
        assert contents(store) == served.samples
        name = max(served.samples, key=lambda n: len(served.samples[n]))
        assert bytes(store.read(name, 10, 20)) == served.samples[name][10:30]


def test_the_reference_reader_reads_it_too(served):
    with open_either(served.url, storage_options=OPTIONS, reference=True) as store:
        assert contents(store) == served.samples


def test_the_loader_delivers_what_a_local_store_delivers(served):
    with hr.open(served.url, storage_options=OPTIONS) as store, hr.open(served.folder) as local:
        over, here = hr.loader(store, 7, seed=3), hr.loader(local, 7, seed=3)
        for a, b in zip(over, here, strict=True):
            assert a.indices.tolist() == b.indices.tolist()
            assert [bytes(x) for x in a] == [bytes(x) for x in b]
        assert delivered(over, store) == served.samples  # a second epoch
        stats = store.objects.stats()
    assert stats.reads > 0
    assert stats.failures == stats.retries == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_workers_make_their_own_connections(exported, method):
    pytest.importorskip("torch")
    from headrace.torch import DataLoader

    with hr.open(exported.url, storage_options=OPTIONS) as store:
        assert bytes(store.read(0)) == exported.samples[store.names[0]]  # the parent is connected
        connected = exported.target.figures()["queues"]
        dataset = Reading(store)
        loader = DataLoader(
            dataset, batch_size=6, num_workers=2, multiprocessing_context=method,
            collate_fn=list, persistent_workers=False,
        )  # fmt: skip
        found = dict(pair for batch in loader for pair in batch)
        assert found == exported.samples
        assert bytes(store.read(1)) == exported.samples[store.names[1]]
        assert store.objects.stats().faults == {}  # nobody disturbed the parent's connections
    assert connected > 0


class Reading:
    """A data set that reads by hand."""

    def __init__(self, store):
        self.store = store

    def __len__(self):
        return len(self.store)

    def __getitem__(self, i):
        return self.store.names[i], bytes(self.store.read(i))


def test_headraces_torch_loader_reads_it(served):
    pytest.importorskip("torch")
    from headrace.torch import DataLoader

    with hr.open(served.url, storage_options=OPTIONS) as store:
        loader = DataLoader(store, batch_size=8)
        found = [int(i) for batch in loader for i in batch.indices]
        assert sorted(found) == list(range(len(store)))


def test_a_pickled_store_opens_in_a_fresh_process(served):
    with hr.open(served.url, storage_options=OPTIONS) as store:
        name = store.names[3]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(_read, (pickle.dumps(store), name)) == served.samples[name]


def _read(pickled, name):
    with pickle.loads(pickled) as store:
        return bytes(store.read(name))


def test_a_pickled_store_refuses_other_data(tmp_path, exported):
    with hr.open(exported.url, storage_options=OPTIONS) as store:
        sent = pickle.dumps(store)
    exported.subsystem.close()
    exported.subsystem.add_store(pack(tmp_path, seed=2).folder)
    with pytest.raises(SourceChanged, match="fingerprint"):
        pickle.loads(sent)


def test_a_forked_child_reads_by_itself_and_leaves_the_parents_connections_alone(exported):
    with hr.open(exported.url, storage_options=OPTIONS) as store:
        loader = hr.loader(store, 8)
        first = next(iter(loader))
        assert len(first)
        sockets = _sockets()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                right = contents(store) == exported.samples
                own = _sockets() - sockets
                store.close()
                gc.collect()
                left = _sockets() - sockets
                os.write(write, json.dumps([right, len(own) > 0, len(left)]).encode())
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert json.loads(os.read(read, 100)) == [True, True, 0]
        assert contents(store) == exported.samples
        assert store.objects.stats().faults == {}
        os.close(read)
        os.close(write)


def _sockets():
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(fd.readlink()))
    return {text for text in found if text.startswith("socket:")}


_LIFE = """
import gc, os, sys, threading, time
import headrace as hr

def alive():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()

url, how = sys.argv[1:]
with hr.open(url) as store:  # what a process makes once and keeps is there now
    sum(len(b) for b in hr.loader(store, 8))
gc.collect()
until_s = time.monotonic() + 30
while (alive()[0] > 2 or alive()[2] > 1) and time.monotonic() < until_s:
    time.sleep(0.01)  # Python joins threads a moment before they are gone
time.sleep(0.5)
before = alive()
assert before[0] <= 2 and before[2] == 1, threading.enumerate()
stores = [hr.open(url) for _ in range(3)]
assert len({id(s.objects.native) for s in stores}) == 1  # one engine for all of them
loader = hr.loader(stores[0], 8)
assert sum(len(b) for b in loader) == len(stores[0])
del loader
wanted = [bytes(stores[0].read(i)) for i in range(len(stores[0]))]
last = stores.pop()
while stores:
    store = stores.pop()
    if how == "close":
        store.close()
del store
gc.collect()
assert [bytes(last.read(i)) for i in range(len(last))] == wanted  # it still has its connections
assert alive() > before
if how == "close":
    last.close()
if how != "leave":
    del last
    gc.collect()
    until_s = time.monotonic() + 30
    left = lambda: any(now > then for now, then in zip(alive(), before))
    while left() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not left(), (before, alive(), threading.enumerate())
print("ended")
"""


@pytest.mark.parametrize("how", ["close", "drop", "leave"])
def test_the_last_store_leaves_no_thread_and_no_descriptor(exported, how):
    """In a process of its own, which ends in order whatever is left open."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", _LIFE, exported.url, how],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ended\n", "", 0)


def test_a_closed_store_says_so(exported):
    store = hr.open(exported.url, storage_options=OPTIONS)
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.read(0)


def test_directories_are_kept_in_a_folder(exported, tmp_path):
    options = OPTIONS | {"directory_cache": str(tmp_path / "kept")}
    with hr.open(exported.url, storage_options=options) as store:
        first = store.objects.stats().bytes
        kept = list((tmp_path / "kept").iterdir())
        assert [p.suffix for p in kept] == [".hrd"]
        size = kept[0].stat().st_size
    with hr.open(exported.url, storage_options=options) as store:
        assert store.objects.stats().bytes <= first - size
        assert contents(store) == exported.samples


def test_appended_segments(tmp_path):
    store = pack(tmp_path)
    more = make_folder(tmp_path / "more" / "later", seed=9)
    hr.append(tmp_path / "more", store.folder)
    subsystem = Subsystem(NQN)
    subsystem.add_store(store.folder)
    with (
        Target([subsystem], ("127.0.0.1", 0)) as target,
        hr.open(url_of(target, subsystem)) as opened,
    ):
        assert len(opened) == len(store.samples) + len(more)
        with hr.open(store.folder) as local:
            assert contents(opened) == contents(local)
    subsystem.close()


def test_several_stores_of_one_subsystem(tmp_path, packed):
    other = pack(tmp_path, seed=5)
    subsystem = Subsystem(NQN)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        found = [subsystem.add_store(s.folder).nsid for s in (packed, other)]
        for nsid, each in zip(found, (packed, other), strict=True):
            with hr.open(url_of(target, subsystem, nsid), storage_options=OPTIONS) as store:
                assert contents(store) == each.samples
    subsystem.close()


# -- faults ---------------------------------------------------------------------------------------


class Slow(Between):
    """Lets a share of the target's bytes through, then closes everything and refuses."""

    left = None
    cut = 0

    def change(self, received, back):
        if back and self.left is not None:
            self.left -= len(received)
            if self.left < 0:
                self.cut += 1
                self.end()
                raise OSError("cut")
        return received


def large_store(root, samples=200, size=40_000):
    """One whose batch takes a while: 8 MB."""
    random = np.random.default_rng(7)
    (root / "photos" / "a").mkdir(parents=True)
    found = {}
    for i in range(samples):
        data = random.bytes(size)
        (root / "photos" / "a" / f"{i:03}.bin").write_bytes(data)
        found[f"a/{i:03}.bin"] = data
    hr.pack(root / "photos", root / "packed")
    return Store(root / "packed", found)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return large_store(tmp_path_factory.mktemp("large"))


def test_a_target_that_dies_in_the_middle_of_a_batch_and_comes_back(large):
    subsystem = Subsystem(NQN)
    subsystem.add_store(large.folder)
    target = Target([subsystem], ("127.0.0.1", 0))
    with Slow(target.address) as proxy:
        url = f"nvme+tcp://127.0.0.1:{proxy.port}/{NQN}?ns=1"
        with hr.open(url, storage_options=OPTIONS) as store:
            loader = hr.loader(store, 200, tune=False)
            proxy.left = 3_000_000  # of 8 MB
            killed = []

            def kill():
                assert until(lambda: proxy.cut > 0)
                target.close()
                killed.append(Target([subsystem], target.address))
                proxy.left = None
                proxy.again()

            killer = threading.Thread(target=kill)
            killer.start()
            assert delivered(loader, store) == large.samples  # one batch, whole and right
            killer.join()
            faults = store.objects.stats().faults
    assert proxy.cut > 0
    assert faults["lost_queues"] >= 1
    assert faults["reconnects"] >= 1
    killed[0].close()
    subsystem.close()


def test_a_target_that_is_gone_for_good_is_one_clear_error_within_the_deadline(exported):
    options = OPTIONS | {"deadline_s": 3.0, "timeout_s": 3.0}
    with hr.open(exported.url, storage_options=options) as store:
        loader = hr.loader(store, len(store), tune=False)
        exported.target.close()
        with pytest.raises(VolumeError, match="the target") as caught:
            next(iter(loader))
        with pytest.raises(VolumeError):
            store.read(3)
        assert store.objects.stats().failures > 0
    assert "nvme+tcp://" in str(caught.value)
    assert "deadline_s" in str(caught.value)
    assert "sample " in str(caught.value)


@pytest.mark.parametrize("kind", ["export", "image"])
def test_a_namespace_that_is_replaced_by_another_store_is_refused(tmp_path, packed, kind):
    """The same address, NQN and namespace; other samples of other bytes."""
    other = pack(tmp_path, seed=2)
    image = tmp_path / "image"

    def export(folder):
        subsystem = Subsystem(NQN)
        if kind == "export":
            subsystem.add_store(folder)
        else:
            image.unlink(missing_ok=True)
            write_image(folder, image)
            subsystem.add(image)
        return subsystem

    target = Target([export(packed.folder)], ("127.0.0.1", 0))
    url = f"nvme+tcp://127.0.0.1:{target.address[1]}/{NQN}?ns=1"
    with hr.open(url, storage_options=OPTIONS | {"deadline_s": 15}) as store:
        assert bytes(store.read(5)) == packed.samples[store.names[5]]
        target.close()
        with Target([export(other.folder)], target.address):
            with pytest.raises(SourceChanged, match="another namespace stands in its place"):
                for i in range(len(store)):
                    assert bytes(store.read(i)) == packed.samples[store.names[i]]
            with pytest.raises(SourceChanged):
                next(iter(hr.loader(store, 8, tune=False)))


@pytest.mark.parametrize("field", [0, 8, 12, 16, 24, 28, 40, 4096, 4100, 4104, 4112, 4120])
def test_a_damaged_catalog_page_is_named_when_the_store_is_opened(tmp_path, packed, field):
    image = tmp_path / "image"
    write_image(packed.folder, image)
    flip(image, field)
    subsystem = Subsystem(NQN)
    subsystem.add(image)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        url = url_of(target, subsystem)
        with pytest.raises(CorruptStore, match="expected") as caught:
            hr.open(url, storage_options=OPTIONS)
    subsystem.close()
    assert url in str(caught.value)
    assert caught.value.next_step


def test_a_catalog_that_points_elsewhere_is_found_by_what_lies_there(tmp_path, packed):
    """Right checksums, and volumes in each other's places: their headers say who they are."""
    files = files_of(packed.folder)
    entries = lay_out([(MANIFEST, len(files.manifest)), *files.sizes.items()])
    image = tmp_path / "image"
    write_image(packed.folder, image)
    volumes = [e for e in entries if e.name.endswith(".hrv")]
    a, b = volumes[:2]
    swapped = {a: replace(b, name=a.name), b: replace(a, name=b.name)}
    data = bytearray(image.read_bytes())
    table = pack_catalog([swapped.get(e, e) for e in entries])
    data[: len(table)] = table
    image.write_bytes(data)
    subsystem = Subsystem(NQN)
    subsystem.add(image)
    with (
        Target([subsystem], ("127.0.0.1", 0)) as target,
        pytest.raises(CorruptStore, match="volumes cannot be used"),
    ):
        hr.open(url_of(target, subsystem), storage_options=OPTIONS)
    subsystem.close()


@pytest.mark.parametrize("digests", [False, True])
def test_wrong_bytes_of_samples(large, digests):
    """Flipped on the way. With digests the fabric reads them again, without them the samples' own
    checksums find them: never a wrong byte."""
    subsystem = Subsystem(NQN)
    subsystem.add_store(large.folder)
    options = OPTIONS | {"hdgst": True, "ddgst": digests}
    with Target([subsystem], ("127.0.0.1", 0)) as target, Flipper(target.address) as flipper:
        url = f"nvme+tcp://127.0.0.1:{flipper.port}/{NQN}?ns=1"
        with hr.open(url, storage_options=options) as store:
            flipper.every = 1_500_000
            loader = hr.loader(store, 20, tune=False, on_error="skip")
            found = delivered(loader, store)
            flipper.every = 0
            stats = store.objects.stats()
            assert flipper.flipped > 0
            assert all(found[name] == large.samples[name] for name in found)
            if digests:
                assert found == large.samples
                assert sum(stats.faults.values()) > 0
                assert stats.retries > 0
    subsystem.close()


def test_damage_on_the_targets_disk_is_named_by_sample(tmp_path, packed):
    image = tmp_path / "image"
    write_image(packed.folder, image)
    with hr.open(packed.folder) as local:
        index = next(i for i in range(len(local)) if local.parts_of(i)[""] > 100)
        extent = local.segments[0].extents(index)[0]
        volume = local.segments[0].entry.volumes[extent.volume].path
    entry = {e.name: e for e in catalog_of(image)}[volume]
    flip(image, entry.offset + extent.offset + 50)
    subsystem = Subsystem(NQN)
    subsystem.add(image)
    with Target([subsystem], ("127.0.0.1", 0)) as target:
        url = url_of(target, subsystem)
        with hr.open(url, storage_options=OPTIONS) as store:
            with pytest.raises(CorruptSample) as caught:
                store.read(index)
            assert caught.value.index == index
            report = hr.verify(url)
            assert [bad.index for bad in report.bad_samples] == [index]
            for loader in (hr.loader(store, 8, on_error="skip"),):
                assert len(delivered(loader, store)) == len(store) - 1
    subsystem.close()


def catalog_of(image):
    data = image.read_bytes()
    header = parse_header(data[:4096], "image", namespace_bytes=len(data))
    table = data[4096 : 4096 + header.table_bytes]
    return parse_table(header, table, "image", namespace_bytes=len(data)).values()


# -- what cannot be opened or exported -----------------------------------------------------------


def test_a_namespace_without_a_store(tmp_path):
    (tmp_path / "disk").write_bytes(np.random.default_rng(1).bytes(10_000))
    subsystem = Subsystem(NQN)
    subsystem.add(tmp_path / "disk")
    with (
        Target([subsystem], ("127.0.0.1", 0)) as target,
        pytest.raises(CorruptStore, match="no store lies here"),
    ):
        hr.open(url_of(target, subsystem), storage_options=OPTIONS)
    subsystem.close()


def test_nobody_there():
    with pytest.raises(FabricError, match="refused"):
        hr.open(f"nvme+tcp://127.0.0.1:1/{NQN}", storage_options=OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hdgest": True}, "has 'hdgest', expected hostnqn"),
        ({"queues": 0}, "queues is 0"),
        ({"queues": "many"}, "queues is 'many', expected int"),
        ({"hostid": "x"}, "hostid is 'x', expected a UUID"),
        ({"hostnqn": "x"}, "'x' is no NQN"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_wrong_options(exported, options, message):
    with pytest.raises(ValueError, match=message):
        hr.open(exported.url, storage_options=options)


def test_options_of_the_command_line(exported):
    from headrace.cli.options import storage_options

    given = storage_options(
        ["queues=1", "ddgst=false", "deadline_s=7", "hostnqn=nqn.2026-11.io.example:me"]
    )
    with hr.open(exported.url, storage_options=given) as store:
        policy = store.objects.policy
        assert (policy.engine.queues, policy.engine.host.ddgst, policy.engine.give_up_s) == (
            1,
            False,
            7.0,
        )
        assert policy.identity.nqn.endswith(":me")


def test_stores_are_not_written_to_namespaces(exported, tmp_path):
    make_folder(tmp_path / "photos")
    with pytest.raises(ValueError, match="namespaces are read-only"):
        hr.pack(tmp_path / "photos", exported.url)


def test_what_cannot_be_exported(tmp_path, packed):
    subsystem = Subsystem(NQN)
    with pytest.raises(StoreNotFound):
        subsystem.add_store(tmp_path)
    make_folder(tmp_path / "photos")
    hr.index(tmp_path / "photos", tmp_path / "index")
    with pytest.raises(SourceError, match="expected a packed store"):
        subsystem.add_store(tmp_path / "index")
    (tmp_path / "hostile").mkdir()
    document = {"segments": [{"directory": "../../etc/passwd", "volumes": []}]}
    (tmp_path / "hostile" / "store.json").write_text(json.dumps(document))
    with pytest.raises(CorruptStore, match="is no file name"):
        subsystem.add_store(tmp_path / "hostile")
    subsystem.add(packed.folder / "store.json", NSID_MAX)
    for nsid in range(1, NSID_MAX - 2):
        subsystem.add(packed.folder / "store.json", nsid)
    with pytest.raises(FabricError, match="room for 2 more namespaces"):
        subsystem.add_store(packed.folder)
    assert len(subsystem.namespaces) == NSID_MAX - 2
    subsystem.close()


def test_an_engine_is_given_back_while_another_one_starts(monkeypatch):
    """The collector drops a store on whatever thread it runs, that of an engine that is being made included."""
    loans = engine_module._Shared()
    monkeypatch.setattr(engine_module, "_shared", loans)

    class Engine:
        def __init__(self, *_):
            self.closed = False
            if first:
                thread = threading.Thread(target=engine_module.give_back, args=(one, first[0]))
                thread.start()
                thread.join(20)
                assert not thread.is_alive(), "borrowing waits for what gives back"

        def owns(self, _):
            return False

        def close(self):
            self.closed = True

    monkeypatch.setattr(engine_module, "FabricEngine", Engine)
    one, other, first = SomeOptions(), SomeOptions(), []
    first.append(engine_module.borrow(one))
    second = engine_module.borrow(other)
    assert first[0].closed
    assert engine_module.borrow(other) is second
    assert [(loan.engine, loan.borrowers) for loan in loans.loans.values()] == [(second, 2)]


@pytest.mark.parametrize("hashes", range(3))
def test_an_engine_whose_last_loan_is_given_back_meanwhile_is_not_lent(monkeypatch, hashes):
    """A store that is dropped gives back wherever the collector runs: also where options are hashed."""
    monkeypatch.setattr(engine_module, "_shared", engine_module._Shared())
    monkeypatch.setattr(engine_module, "FabricEngine", SomeEngine)
    options = HashedOptions()
    first = engine_module.borrow(options)
    options.before = [lambda: None] * hashes + [lambda: engine_module.give_back(options, first)]
    second = engine_module.borrow(options)
    assert not second.closed
    options.before.clear()
    if not first.closed:
        engine_module.give_back(options, first)
    engine_module.give_back(options, second)
    assert second.closed
    assert not engine_module._shared.loans


class SomeEngine:
    closed = False

    def __init__(self, *_):
        pass

    def owns(self, _):
        return False

    def close(self):
        self.closed = True


class SomeOptions:
    """Options of an engine, equal to themselves alone."""

    identity = engine = None


class HashedOptions(SomeOptions):
    """Something happens each time they are hashed."""

    before = ()

    def __hash__(self):
        if self.before:
            self.before.pop(0)()
        return id(self)
