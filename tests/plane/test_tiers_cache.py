"""The cache on the local disk: filled in the background, right after every fault, never in the way."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import HeadraceError, StoreError
from headrace.plane import cache_writer, disk_cache
from headrace.plane.disk_cache import MARK, CacheDirectory, hold, take_lock
from plane import cache_runner
from plane.conftest import SAMPLES, content
from plane.test_tiers import epochs
from store.nth_call import Refusing
from tests_shared import forked, opened_to_others, until

RUNNER = Path(__file__).parent / "cache_runner.py"


@pytest.fixture(scope="module")
def expected(packed):
    with hr.open(packed) as store:
        return epochs(hr.loader(store, 32, seed=3), 2)


def filled(store, cache, count=1, **options):
    """Run some epochs with a cache, close, and return what came and the report."""
    loader = hr.loader(store, 32, seed=3, cache_dir=cache, **options)
    came = epochs(loader, count)
    report, tiers = loader.cache, loader.bytes_by_tier
    (stage,) = [s for s in loader.stages if s.name == "disk"]
    loader.close()
    return came, report, tiers, stage.report()


def folder_of(cache):
    (mark,) = Path(cache).glob(f"*/{MARK}")
    return mark.parent


def volumes_of(cache):
    return sorted(folder_of(cache).glob("segment-*.hrv"))


@pytest.fixture(autouse=True)
def _any_free_space(monkeypatch):
    """The machine's disk may be nearly full: that is another test."""
    monkeypatch.setattr(disk_cache, "disk_reserve", lambda _: 0)


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of 100 kB rather than 64 MiB."""
    monkeypatch.setattr(cache_writer, "segment_bytes", lambda _: 100_000)


def test_the_second_run_reads_the_local_disk(store, tmp_path, expected):
    came, _, tiers, after = filled(store, tmp_path)
    assert came == expected[: len(came)]
    assert tiers["disk"] == 0
    assert after.samples == after.of_samples == after.written == SAMPLES
    came, _, tiers, after = filled(store, tmp_path, 2)
    assert came == expected
    assert tiers["source"] == 0
    assert tiers["disk"] > 0
    assert after.written == 0


def test_the_second_epoch_of_a_run_reads_the_local_disk(store, tmp_path, expected):
    loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path)
    first = epochs(loader)
    loader.stages[0].writer.publish()
    until(lambda: loader.cache.samples >= SAMPLES)
    before = loader.stats.bytes
    assert first + epochs(loader) == expected
    assert loader.bytes_by_tier["disk"] == before
    loader.close()


@pytest.mark.parametrize(
    ("step", "codes"),
    [
        pytest.param(31, (errno.EIO,), id="each 31st call"),
        pytest.param(1, (errno.EIO, errno.ENOSPC), id="all", marks=pytest.mark.slow),
    ],
)
def test_whatever_call_is_refused_all_samples_come_and_the_next_runs_fill_the_cache(
    store, tmp_path, expected, small_segments, step, codes
):
    filled(store, tmp_path / "whole")
    files = {path.name for path in folder_of(tmp_path / "whole").iterdir()}
    refusals = 0
    for code in codes:
        for number in itertools.count(1, step):
            folder = tmp_path / f"{code}-{number}"
            with pytest.MonkeyPatch.context() as patch:
                refusing = Refusing(folder, number, code).install(patch)
                with contextlib.suppress(HeadraceError):  # the folder cannot be made at all
                    came, *_ = filled(store, folder)
                    assert came == expected[: len(came)], (number, refusing.refused)
            if not refusing.refused:
                break
            refusals += 1
            for _ in range(20):  # what does not fit into the writer's queue is left for the next
                came, _, tiers, after = filled(store, folder)
                assert came == expected[: len(came)], (number, refusing.refused)
                if tiers["source"] == 0:
                    break
            assert (tiers["source"], after.samples) == (0, SAMPLES), (number, refusing.refused)
            assert {path.name for path in folder_of(folder).iterdir()} == files
            shutil.rmtree(folder)
    assert refusals > 3


def test_a_whole_cache_is_read_as_a_packed_store_is(store, tmp_path, expected):
    """The knobs and the numbers of a pass that it serves alone are those of its own reader."""
    filled(store, tmp_path)
    loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path, tune=False)
    assert epochs(loader) == expected[: len(loader) + 1]
    (prefetch,) = [s for s in loader.stages_now() if s.name == "prefetch"]
    assert prefetch.stats().samples == SAMPLES
    prefetch.turn({"reads_in_flight": 3, "buffer_bytes": 5 << 20})
    found = loader.reader.native_stats()
    assert (found["reads_in_flight"], found["buffer_bytes"]) == (3, 5 << 20)
    # A segment is lost: what reads the source gets back what it had given up.
    for bad in volumes_of(tmp_path):
        damage(bad)
    rest = epochs(loader, 2)
    assert rest == [*expected[len(loader) + 1 :], *epochs_from(store, 2)]
    assert loader.cache.distrusted_segments > 0
    assert loader.reader.native_stats()["buffer_bytes"] == 5 << 20
    loader.close()


def epochs_from(store, epoch):
    """What epoch `epoch` is without a cache."""
    loader = hr.loader(store, 32, seed=3)
    loader.set_epoch(epoch)
    return epochs(loader)


@pytest.mark.parametrize("direct", [False, True])
def test_both_ways_of_writing_give_the_same_cache(
    store, tmp_path, small_segments, monkeypatch, direct
):
    made = []

    def begun(self, *args, **kwargs):
        made.append(kwargs["direct"])
        begin(self, *args, **kwargs)

    begin = cache_writer.CacheSegment.__init__
    monkeypatch.setattr(cache_writer.CacheSegment, "__init__", begun)
    monkeypatch.setattr(cache_writer, "writes_direct", lambda _: direct)
    filled(store, tmp_path)
    assert set(made) == {direct}
    assert hr.verify(folder_of(tmp_path)).ok
    with hr.open(folder_of(tmp_path)) as cache:
        assert len(cache) == SAMPLES


def test_a_cache_is_an_ordinary_store(store, tmp_path, small_segments):
    filled(store, tmp_path)
    assert hr.verify(folder_of(tmp_path)).ok
    with hr.open(folder_of(tmp_path)) as cache:
        assert len(cache.segments) > 5
        assert sorted(cache.names) == sorted(store.names)
        index = cache.columns["headrace.source_index"]
        assert sorted(index) == list(range(SAMPLES))
        for i in (0, 100, SAMPLES - 1):
            assert bytes(cache.read(i)) == content(int(index[i]))
        assert (cache.labels == store.labels[index]).all()


def test_samples_of_several_parts_are_cached(tmp_path):
    def items():
        for i in range(50):
            parts = {"jpg": bytes([i]) * (100 + i), "cls": str(i).encode()}
            if i % 7 == 3:
                del parts["cls"]
            yield f"{i:03d}", parts, i % 3

    hr.pack(items(), tmp_path / "parts.hr")
    with hr.open(tmp_path / "parts.hr") as store:
        for parts in ((), ("cls",), ("jpg", "cls")):
            plain = hr.loader(store, 8, seed=3, parts=parts)
            batches = [(b.indices.tolist(), list(map(bytes, _slots(b)))) for b in plain]
            for run in range(2):
                loader = hr.loader(store, 8, seed=3, parts=parts, cache_dir=tmp_path / "cache")
                came = [(b.indices.tolist(), list(map(bytes, _slots(b)))) for b in loader]
                assert came == batches
                assert (loader.bytes_by_tier["disk"] > 0) == (run > 0)
                loader.close()
    for mark in (tmp_path / "cache").glob(f"*/{MARK}"):
        assert hr.verify(mark.parent).ok


def _slots(batch):
    starts, lengths = batch.offsets.reshape(-1), batch.lengths.reshape(-1)
    return [batch.data[o : o + n].tobytes() for o, n in zip(starts, lengths, strict=True)]


def test_a_folder_without_checksums_gets_them(photos, tmp_path):
    with hr.open(photos[0]) as store:
        _, _, _, report = filled(store, tmp_path)
        assert report.samples == SAMPLES
    with hr.open(folder_of(tmp_path)) as cache:
        assert all(s.directory.has_crc for s in cache.segments)
    assert hr.verify(folder_of(tmp_path)).ok


def test_a_changed_source_is_read_anew(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.bin").write_bytes(bytes([i]) * 500)
    for k in range(2):
        with hr.open(folder) as store:
            loader = hr.loader(store, 5, cache_dir=tmp_path / "cache", order="sequential")
            came = {
                int(i): bytes(b)
                for batch in loader
                for i, b in zip(batch.indices, batch, strict=True)
            }
            assert loader.bytes_by_tier["disk"] == 0
            loader.close()
            seven = store.find("7.bin")
            assert came[seven] == (b"new" if k else bytes([7]) * 500)
        (folder / "7.bin").write_bytes(b"new")
    assert len(list((tmp_path / "cache").glob(f"*/{MARK}"))) == 2


# -- wrong bytes -----------------------------------------------------------------------------------


def damage(path, at=6000):
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


def test_a_damaged_cached_sample_comes_from_the_source(
    store, tmp_path, expected, small_segments, caplog
):
    filled(store, tmp_path)
    bad = volumes_of(tmp_path)[3]
    damage(bad)
    assert not hr.verify(folder_of(tmp_path)).ok
    came, _, _, report = filled(store, tmp_path)
    assert came == expected[: len(came)]
    assert report.read_again > 0
    assert report.distrusted_segments == 1
    assert sum("source from now on" in r.message for r in caplog.records) == 1
    assert not bad.exists()
    # What was lost is packed again, and the rest was kept.
    _, _, _, report = filled(store, tmp_path)
    assert report.samples == SAMPLES
    assert hr.verify(folder_of(tmp_path)).ok


@pytest.mark.parametrize("what", ["short", "missing", "directory", "manifest"])
def test_a_damaged_cache_is_used_as_far_as_it_is_good(
    store, tmp_path, expected, small_segments, what, caplog
):
    filled(store, tmp_path)
    bad = volumes_of(tmp_path)[2]
    if what == "short":
        os.truncate(bad, 5000)
    elif what == "missing":
        bad.unlink()
    elif what == "directory":
        damage(bad.with_suffix(".hrd"), 100)
    else:
        (folder_of(tmp_path) / "store.json").write_text("{}")
    came, _, tiers, report = filled(store, tmp_path)
    assert came == expected[: len(came)]
    assert (tiers["disk"] == 0) == (what == "manifest")
    assert tiers["source"] > 0
    assert caplog.records
    assert report.samples == SAMPLES
    assert hr.verify(folder_of(tmp_path)).ok


def test_a_segment_that_vanishes_while_it_is_read_comes_from_the_source(
    store, tmp_path, expected, small_segments
):
    filled(store, tmp_path)
    loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path)
    batches = iter(loader)
    came = [next(batches)]
    for volume in volumes_of(tmp_path):
        damage(volume, 5000)
        os.truncate(volume, 4096)
    came += list(batches)
    loader.close()
    assert [[bytes(x) for x in b] for b in came] == [e[2] for e in expected[: len(came)]]


def test_a_failing_source_sample_is_not_cached(tmp_path):
    hr.pack(((f"{i:02d}", bytes([i]) * 3000) for i in range(30)), tmp_path / "s.hr")
    (volume,) = (tmp_path / "s.hr").glob("*.hrv")
    damage(volume, 4096 + 7 * 3000 + 5)
    with hr.open(tmp_path / "s.hr") as store:
        for _ in range(2):
            loader = hr.loader(store, 10, cache_dir=tmp_path / "cache", on_error="skip")
            assert sum(map(len, loader)) == 29
            assert [s.index for s in loader.skipped] == [7]
            loader.close()
    with hr.open(folder_of(tmp_path / "cache")) as cache:
        assert 7 not in cache.columns["headrace.source_index"]


# -- kills -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(packed, tmp_path_factory):
    """What an undisturbed run of two epochs prints."""
    ended = subprocess.run(
        [sys.executable, RUNNER, packed, tmp_path_factory.mktemp("whole"), "2"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return ended.stdout.splitlines()


def test_a_kill_at_any_point_leaves_a_valid_cache(packed, tmp_path, whole_run):
    """Run, kill, resume, again and again: the batches of one run, and a cache that verifies."""
    chance = random.Random(11)
    # Told to go on batch by batch: it does not end while this process waits for a processor.
    command = [sys.executable, RUNNER, packed, tmp_path / "cache", "2", tmp_path / "state", "told"]
    kills = 0
    for _ in range(6):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as run:
            assert run.stdin is not None
            assert run.stdout is not None
            for _ in range(chance.randrange(1, 7)):
                run.stdin.write("\n")
                run.stdin.flush()
                assert run.stdout.readline()
            until((tmp_path / "state").exists)
            time.sleep(chance.random() * 0.02)
            run.send_signal(signal.SIGKILL)
        kills += run.returncode == -signal.SIGKILL
        state = json.loads((tmp_path / "state").read_text())
        assert 0 <= state["epoch"] < 2
        if (folder_of(tmp_path / "cache") / "store.json").exists():
            assert hr.verify(folder_of(tmp_path / "cache")).ok
    assert kills == 6
    ended = subprocess.run(command, input="\n" * 1000, check=True, capture_output=True, text=True)
    seen = ended.stdout.splitlines()
    assert seen
    assert seen == whole_run[-len(seen) :]
    assert hr.verify(folder_of(tmp_path / "cache")).ok
    left = {p.name for p in folder_of(tmp_path / "cache").iterdir()}
    assert not {name for name in left if name.startswith("tail-")}


def test_two_processes_share_one_cache(packed, tmp_path, whole_run):
    command = [sys.executable, RUNNER, packed, tmp_path / "cache", "2"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for run in runs:
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert out.splitlines() == whole_run
    assert hr.verify(folder_of(tmp_path / "cache")).ok
    with hr.open(folder_of(tmp_path / "cache")) as cache:
        index = cache.columns["headrace.source_index"]
        assert len(set(index.tolist())) == len(index)


def test_ranks_fill_one_cache_together(store, tmp_path):
    for rank in range(2):
        loader = hr.loader(store, 16, seed=1, rank=rank, world_size=2, cache_dir=tmp_path)
        for _ in loader:
            pass
        loader.close()
    loader = hr.loader(store, 16, seed=9, cache_dir=tmp_path)
    for _ in loader:
        pass
    assert loader.bytes_by_tier["source"] == 0
    loader.close()


def test_the_tail_is_published_when_the_program_ends(packed, tmp_path):
    code = (
        "import sys, headrace as hr\n"
        "for batch in hr.loader(hr.open(sys.argv[1]), 32, cache_dir=sys.argv[2]): pass\n"
    )
    subprocess.run([sys.executable, "-c", code, packed, tmp_path], check=True)
    with hr.open(folder_of(tmp_path)) as cache:
        assert len(cache) == SAMPLES


# -- no room ---------------------------------------------------------------------------------------


def test_the_quota_holds_and_training_goes_on(store, tmp_path, expected, caplog, small_segments):
    came, _, _, report = filled(store, tmp_path, 2, cache_bytes=900_000)
    assert came == expected
    assert 0 < report.samples < SAMPLES
    assert "900,000" in report.stopped
    assert sum("Training goes on" in r.message for r in caplog.records) == 1
    assert CacheDirectory(tmp_path).used_bytes() <= 900_000
    assert hr.verify(folder_of(tmp_path)).ok


def test_a_full_disk_ends_the_writing_only(store, tmp_path, expected, caplog, monkeypatch):
    """The system refuses a write in the middle of a segment: a file may have 150 kB only."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    monkeypatch.setattr(cache_writer, "segment_bytes", lambda _: 300_000)
    try:
        loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path)
        batches = iter(loader)
        first = next(batches)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limit[1]))
        rest = list(batches)
        loader.stages[0].writer.close()
        report = loader.cache
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert [[bytes(x) for x in b] for b in (first, *rest)] == [
        e[2] for e in expected[: len(loader)]
    ]
    assert "the disk is full" in report.stopped
    assert sum("Training goes on" in r.message for r in caplog.records) == 1
    loader.close()
    came, _, _, _ = filled(store, tmp_path)
    assert came == expected[: len(came)]
    assert hr.verify(folder_of(tmp_path)).ok


MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000) or libc.mount(None, b"/", None, 0x44000, None):
    sys.exit(77)
if libc.mount(b"tmpfs", os.fsencode(sys.argv[2]), b"tmpfs", 0, b"size=1m"):
    sys.exit(77)
import headrace as hr
with hr.open(sys.argv[1]) as store:
    loader = hr.loader(store, 32, cache_dir=sys.argv[2], cache_bytes=1 << 40)
    print(sum(len(batch) for batch in loader))
    loader.stages[0].writer.close()
    print(loader.cache.stopped)
    loader.close()
"""


def test_a_file_system_that_fills_up_ends_the_writing_only(packed, tmp_path):
    """A tmpfs of 1 MiB in a mount namespace of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", MOUNT, packed, tmp_path], check=False, capture_output=True, text=True
    )
    if ended.returncode == 77:
        pytest.skip("needs the right to mount")
    assert ended.returncode == 0, ended.stderr
    samples, stopped = ended.stdout.splitlines()
    assert int(samples) == SAMPLES
    assert "used up" in stopped or "full" in stopped


def test_a_folder_that_cannot_be_written_is_read_only(store, tmp_path, expected):
    """In a child without the right: root writes anywhere."""
    filled(store, tmp_path, cache_bytes=400_000)
    for folder in (tmp_path, folder_of(tmp_path)):
        folder.chmod(0o555)
    with opened_to_others(Path(store.path), tmp_path):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setresuid(65534, 65534, 65534)
                loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path)
                good = epochs(loader) == expected[: len(loader) + 1]
                refused = "ermission denied" in loader.cache.stopped
                status = 0 if good and refused else 2 if good else 3
                loader.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for folder in (folder_of(tmp_path), tmp_path):
        folder.chmod(0o755)


@pytest.mark.parametrize("locked", [take_lock, lambda path: hold(path.parent, exclusive=True)])
def test_a_process_forked_while_the_cache_is_locked_does_not_keep_the_lock(
    tmp_path, monkeypatch, locked
):
    """Its writer locks it in a thread, and torch's workers are forked at any time."""
    monkeypatch.setattr(disk_cache, "_LOCK_S", 0.0)
    with contextlib.ExitStack() as stack:
        with locked(tmp_path / "lock") as free:
            assert free in {None, True}
            stack.enter_context(forked())
        with locked(tmp_path / "lock") as free:
            assert free in {None, True}


def test_sixty_four_file_descriptors_are_enough(packed, tmp_path):
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "import headrace as hr\n"
        "from headrace.plane import cache_writer\n"
        "cache_writer.segment_bytes = lambda _: 20_000\n"
        "for run in range(2):\n"
        "    loader = hr.loader(hr.open(sys.argv[1]), 8, seed=3, cache_dir=sys.argv[2])\n"
        "    for epoch in range(2):\n"
        "        print(sum(len(b) for b in loader), loader.last_order_hash)\n"
        "    loader.close()\n"
        "print(len(loader.source.segments), loader.stats.samples)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, packed, tmp_path], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines[:4]] == [SAMPLES] * 4
    assert lines[:2] == lines[2:4]
    assert len(volumes_of(tmp_path)) > 32


def test_a_small_budget_is_kept(store, tmp_path, expected):
    loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path, budget_bytes=1 << 20)
    assert epochs(loader, 2) == expected
    assert loader.stages[0].writer.queued_bytes <= 1 << 20
    assert loader.reader.mapped_bytes < 8 << 20
    loader.close()


# -- never in the way ------------------------------------------------------------------------------


def test_a_stuck_writer_never_holds_up_the_consumer(store, tmp_path, expected, monkeypatch):
    stuck = threading.Event()
    append = cache_writer.CacheSegment.append

    def wait(self, batch, positions):
        stuck.wait(30)
        append(self, batch, positions)

    monkeypatch.setattr(cache_writer.CacheSegment, "append", wait)
    loader = hr.loader(store, 32, seed=3, cache_dir=tmp_path, budget_bytes=1 << 20)
    assert epochs(loader) == expected[: len(loader) + 1]
    report = loader.cache
    assert report.samples == 0
    assert report.left > 0
    stuck.set()
    loader.close()
    _, _, _, report = filled(store, tmp_path)
    assert report.samples == SAMPLES


def test_a_dropped_loader_ends_its_writer(store, tmp_path):
    loader = hr.loader(store, 32, cache_dir=tmp_path)
    batches = iter(loader)
    next(batches)
    gone = weakref.ref(loader.stages[0])
    assert "headrace-cache-writer" in {t.name for t in threading.enumerate()}
    del batches, loader
    gc.collect()
    assert gone() is None
    until(lambda: "headrace-cache-writer" not in {t.name for t in threading.enumerate()})
    assert hr.verify(folder_of(tmp_path)).ok


@pytest.mark.parametrize(
    ("rate", "waiting", "share"),
    [
        (2e9, 1.0, cache_writer.BUSY_SHARE),
        (2e9, 0.0, 1.0),
        (1e8, 1.0, 1.0),
        (0.0, 1.0, cache_writer.BUSY_SHARE),
    ],
)
def test_a_share_is_written_only_while_a_fast_source_is_waited_for(rate, waiting, share):
    assert cache_writer.writer_share(rate, waiting) == share


def test_a_fast_source_that_is_waited_for_is_packed_over_several_epochs(
    store, tmp_path, expected, monkeypatch
):
    """Each pass writes about its share, whatever is cached already, until all is."""
    monkeypatch.setattr(cache_writer, "writer_share", lambda _rate, _waiting: 0.3)
    monkeypatch.setattr(cache_writer, "_CREDIT_BYTES", 0)
    cached = [0]
    for _ in range(20):
        came, _, _, report = filled(store, tmp_path)
        assert came == expected[: len(came)]
        cached.append(report.samples)
        assert report.left == SAMPLES - report.samples
        if report.samples == SAMPLES:
            break
    assert len(cached) - 1 >= 4
    assert cached[-1] == SAMPLES
    assert all(after - before < 0.5 * SAMPLES for before, after in itertools.pairwise(cached))


@pytest.mark.parametrize(("rate", "direct"), [(0.0, True), (2e9, True), (1e8, False)])
def test_the_page_cache_is_left_alone_beside_a_fast_source(rate, direct):
    assert cache_writer.writes_direct(rate) is direct


# -- the cache directory -------------------------------------------------------------------------


def pack_small(path, seed):
    hr.pack(((f"{i:02d}", bytes([seed, i]) * 20_000) for i in range(20)), path)
    return hr.open(path)


def test_room_is_made_of_complete_caches_that_nobody_uses(tmp_path):
    cache = tmp_path / "cache"
    stores = [pack_small(tmp_path / f"{k}.hr", k) for k in range(3)]
    for k, store in enumerate(stores):
        loader = hr.loader(store, 5, cache_dir=cache, cache_bytes=2_500_000)
        for _ in loader:
            pass
        if k:
            loader.close()
        else:
            kept = loader  # still in use: must stay
            kept.stages[0].writer.close()
    (cache / "foreign").mkdir()
    (cache / "foreign" / "precious").write_bytes(bytes(100))
    found = {info.source for info in CacheDirectory(cache).caches() if info.complete}
    assert found == {str(tmp_path / "0.hr"), str(tmp_path / "2.hr")}
    assert (cache / "foreign" / "precious").exists()
    kept.close()


def test_only_caches_that_nobody_uses_are_removed(store, tmp_path):
    filled(store, tmp_path)
    caches = CacheDirectory(tmp_path)
    (info,) = caches.caches()
    assert info.complete
    assert not info.in_use
    assert info.bytes == caches.used_bytes() > store.nbytes
    with hold(Path(info.path)) as held:
        assert held
        assert caches.caches()[0].in_use
        with pytest.raises(StoreError, match="in use"):
            caches.remove(info.path)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path in (foreign, tmp_path, tmp_path / "nothing"):
        with pytest.raises(StoreError, match="no cache"):
            caches.remove(path)
    assert caches.remove(info.path) == info.bytes
    assert caches.caches() == []
    assert foreign.exists()


def test_a_batch_that_asks_twice_is_cached_once(store, tmp_path):
    loader = hr.loader(store, 32, cache_dir=tmp_path)
    for _ in range(2):
        batch = loader.reader.fetch(np.array([5, 9, 5, 5, 9])).batch
        assert [bytes(b) for b in batch] == [content(i) for i in (5, 9, 5, 5, 9)]
        loader.reader.close()
    with hr.open(folder_of(tmp_path)) as cache:
        assert sorted(cache.columns["headrace.source_index"].tolist()) == [5, 9]


def test_the_runner_is_a_run(packed, tmp_path, capsys):
    """So that the kills above kill what they should."""
    before = cache_writer.publish_after_s
    try:
        cache_runner.main(packed, tmp_path, "1")
    finally:
        cache_writer.publish_after_s = before
    assert len(capsys.readouterr().out.splitlines()) == -(-SAMPLES // cache_runner.BATCH)
    assert len(volumes_of(tmp_path)) > 3


def test_a_log_line_names_the_folder(store, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "headrace"):
        filled(store, tmp_path, cache_bytes=1000)
    assert str(folder_of(tmp_path)) in caplog.text
