"""Tiers change where samples come from and when, never which and in what order."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace import _native
from headrace.config import TierOptions, tier_options
from headrace.plane.cache_writer import publish_after_s, segment_bytes
from headrace.plane.rate_limit import Throttle, TokenBucket
from headrace.plane.stage import Stage
from headrace.plane.tiers import memory_quota
from plane.conftest import SAMPLES
from tests_shared import ROOT, STEADY_MALLOC, until


def epochs(loader, count=1):
    """Everything that a loader delivers: indices, labels and bytes, in order, and the hashes."""
    found = []
    for _ in range(count):
        for batch in loader:
            labels = batch.labels.tolist()
            found.append((batch.indices.tolist(), labels, [bytes(b) for b in batch]))
        found.append(loader.last_order_hash)
    return found


@pytest.fixture(scope="module")
def expected(packed):
    with hr.open(packed) as store:
        return epochs(hr.loader(store, 32, seed=3), 3)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_tiers_give_the_same_batches(data, packed, tmp_path_factory, photos):
    choose = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    where = choose(packed, photos[0])
    order = choose("shuffled", "blocked", "sequential")
    batch_size = choose(1, 32, 200)
    options = {}
    if choose(True, False):
        options["cache_dir"] = tmp_path_factory.mktemp("cache")
        options["cache_bytes"] = choose(None, 200_000, 1 << 30)
    options["ram_bytes"] = choose(None, 300_000, 64 << 20, "auto")
    options["bytes_per_s"] = choose(None, 1e9)
    stop_at = choose(None, 1, 3)
    with hr.open(where) as store:
        plain = hr.loader(store, batch_size, seed=3, order=order)
        tiered = hr.loader(store, batch_size, seed=3, order=order, **options)
        if stop_at is not None:
            for loader in (plain, tiered):
                batches = iter(loader)
                for _ in range(stop_at):
                    next(batches)
            assert tiered.state_dict() == plain.state_dict()
            tiered.close()
            tiered = hr.loader(store, batch_size, seed=3, order=order, **options)
            tiered.load_state_dict(plain.state_dict())
            plain.load_state_dict(plain.state_dict())
        assert epochs(tiered, 2) == epochs(plain, 2)
        tiered.close()


def test_the_second_epoch_comes_from_memory(store, expected):
    loader = hr.loader(store, 32, seed=3, ram_bytes=64 << 20)
    first = epochs(loader)
    assert loader.bytes_by_tier["ram"] == 0
    before = loader.stats.bytes
    assert first + epochs(loader, 2) == expected
    assert loader.bytes_by_tier == {"ram": 2 * before, "disk": 0, "source": before}
    loader.close()


def test_memory_keeps_to_its_quota_and_what_is_kept_stays(store, expected):
    loader = hr.loader(store, 32, seed=3, ram_bytes=1 << 20)
    first = epochs(loader)
    (ram,) = loader.stages
    held = ram.held_samples
    assert 0 < ram.held_bytes <= 1 << 20
    assert 0 < held < SAMPLES
    assert first + epochs(loader, 2) == expected
    assert ram.held_samples >= held  # a small one may still have found room
    assert ram.held_bytes <= 1 << 20
    assert 0 < loader.bytes_by_tier["ram"] < loader.stats.bytes
    loader.close()
    assert ram.held_bytes == 0


def test_a_smaller_quota_gives_memory_back_at_once(store, expected):
    loader = hr.loader(store, 32, seed=3, ram_bytes=8 << 20)
    batches = iter(loader)
    kept = [next(batches) for _ in range(12)]
    (ram,) = loader.stages
    before = ram.held_bytes
    ram.turn({"cache_bytes": 100_000})
    assert ram.held_bytes <= 100_000 < before
    assert ram.knobs() == {"cache_bytes": 100_000}
    kept += list(batches)
    assert [b.indices.tolist() for b in kept] == [e[0] for e in expected[: len(kept)]]
    assert [[bytes(x) for x in b] for b in kept] == [e[2] for e in expected[: len(kept)]]
    with pytest.raises(ValueError, match="cache_bytes is 0"):
        ram.turn({"cache_bytes": 0})
    loader.close()


def test_memory_is_given_back_when_it_runs_short(store, monkeypatch):
    monkeypatch.setattr("headrace.plane.tiers._PRESSURE_CHECK_S", 0.0)
    loader = hr.loader(store, 32, seed=3, ram_bytes="auto")
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    (ram,) = loader.stages
    assert ram.held_samples > 0
    monkeypatch.setattr("headrace.plane.tiers.available_memory", lambda: 0)
    for _ in batches:
        pass
    assert ram.held_samples == 0
    loader.close()


def test_batches_under_way_survive_a_shrinking_quota(store):
    """Looked up before, gathered after: the memory must not have gone to somebody else."""
    reader = hr.loader(store, 32).reader
    batch = reader.fetch(np.arange(100)).batch
    expected = [bytes(b) for b in batch]
    cache = _native.SampleCache(samples=SAMPLES, parts=1, quota_bytes=8 << 20)
    native = reader._stages.top.submit(np.arange(100)).take()
    assert cache.insert(native) == 100
    hits = cache.look_up(np.arange(100))
    cache.set_quota(0)
    assert cache.held_samples == 0
    gathered = cache.gather(hits, None)
    found = [
        gathered.data[o : o + n].tobytes()
        for o, n in zip(gathered.offsets, gathered.lengths, strict=True)
    ]
    assert found == expected
    del hits
    assert cache.mapped_bytes == 0


def test_threads_share_one_memory_tier(store):
    """Eight threads read random batches while the quota goes up and down."""
    loader = hr.loader(store, 8, ram_bytes=2 << 20)
    whole = {
        int(i): bytes(b)
        for batch in hr.loader(store, 64)
        for i, b in zip(batch.indices, batch, strict=True)
    }
    loader.reader.fetch(np.arange(4))
    (ram,) = loader.stages
    wrong, done = [], threading.Event()

    def read(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            batch = loader.reader.fetch(random.integers(0, SAMPLES, 20)).batch
            pairs = zip(batch.indices, batch, strict=True)
            wrong.extend(int(i) for i, b in pairs if bytes(b) != whole[int(i)])

    def turn():
        while not done.is_set():
            for quota in (200_000, 3 << 20):
                ram.turn({"cache_bytes": quota})
                done.wait(0.001)

    turner = threading.Thread(target=turn)
    readers = [threading.Thread(target=read, args=(k,)) for k in range(8)]
    for thread in (turner, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    done.set()
    turner.join()
    assert wrong == []
    loader.close()


def test_a_forked_child_makes_its_own_tiers(store, expected, tmp_path):
    loader = hr.loader(store, 32, seed=3, ram_bytes=8 << 20, cache_dir=tmp_path / "cache")
    assert epochs(loader) == expected[: len(loader) + 1]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if epochs(loader, 2) == expected[len(loader) + 1 :] else 2
            loader.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert epochs(loader, 2) == expected[len(loader) + 1 :]
    loader.close()


FIFTY_EPOCHS = """
import sys
import headrace as hr
from tests_shared import own_bytes

loader = hr.loader(sys.argv[1], 100, ram_bytes=1 << 20, cache_dir=sys.argv[2])
for _ in range(60):
    for _ in loader:
        pass
    print(own_bytes())
assert loader.stages[-1].held_bytes <= 1 << 20
loader.close()
"""


def test_memory_is_flat_over_fifty_epochs(packed, tmp_path):
    """With a memory tier that holds half, and a cache that holds the rest. In a process that gives back what it
    frees; how many buffers are on their way at an epoch's end is chance, so the least of ten counts.
    """
    ran = subprocess.run(
        [sys.executable, "-c", FIFTY_EPOCHS, packed, tmp_path / "cache"],
        env=os.environ | STEADY_MALLOC | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    sizes = [int(size) for size in ran.stdout.split()]
    assert len(sizes) == 60
    assert min(sizes[50:]) < min(sizes[10:20]) + (2 << 20), sizes


def test_every_stage_publishes_and_accepts_knobs(store, tmp_path):
    loader = hr.loader(
        store, 32, ram_bytes=1 << 20, cache_dir=tmp_path, cache_bytes=1 << 20, bytes_per_s=1e9
    )
    for _ in loader:
        pass
    assert [stage.name for stage in loader.stages] == ["throttle", "disk", "ram"]
    for stage in loader.stages:
        assert isinstance(stage, Stage)
        stats = stage.stats()
        assert stats.name == stage.name
        assert stats.samples == SAMPLES
        assert stats.bytes == loader.stats.bytes
        assert stage.knobs()
        stage.turn(stage.knobs())
        stage.turn({"decode_threads": 3})
        for name in stage.knobs():
            with pytest.raises(ValueError, match=name):
                stage.turn({name: -1})
    loader.close()


# -- throttle --------------------------------------------------------------------------------------


@given(
    rate=st.floats(1, 1e9),
    asks=st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10**8)), min_size=1, max_size=50),
)
def test_a_bucket_lets_no_more_through_than_its_rate(rate, asks):
    now = 0.0
    bucket = TokenBucket(rate, now)
    passed = 0
    for pause, units in asks:
        now += pause
        now += bucket.wait_s(now) * (1 + 1e-9) + 1e-9
        # What went before is paid for; the last one may be in debt.
        assert passed <= rate * (now + 0.25) * (1 + 1e-6)
        bucket.spend(units)
        passed += units


def test_a_bucket_does_not_wait_for_ever_for_a_large_request():
    bucket = TokenBucket(10.0, 0.0)
    bucket.spend(1000)
    assert bucket.wait_s(0.0) == 100.0
    assert bucket.wait_s(50.0) == pytest.approx(50.0)
    bucket.set_rate(100.0, 50.0)
    assert bucket.wait_s(50.0) == pytest.approx(5.0)
    bucket.set_rate(None, 50.0)
    assert bucket.wait_s(50.0) == 0.0


@pytest.fixture
def cold(monkeypatch):
    """As if nothing came out of the page cache: everything is paid for."""
    gate = "headrace.plane.rate_limit._Gate.settle"
    monkeypatch.setattr(gate, lambda *_: None)


def test_a_limit_holds_reads_back_and_can_be_turned_live(store, cold):
    loader = hr.loader(store, 50, bytes_per_s=1000.0)
    batches = iter(loader)
    next(batches)
    (throttle,) = loader.stages
    assert throttle.stats().in_flight > 0
    held = throttle.stats().in_flight
    time.sleep(0.1)
    assert throttle.stats().in_flight == held  # 100 bytes later
    throttle.limit(bytes_per_s=None, reads_per_s=None)
    assert len(list(batches)) == len(loader) - 1
    assert throttle.stats().busy_s > 0
    loader.close()


@pytest.fixture
def narrow(store, cold):
    """A throttle without a limit yet, above a reader that can work on three batches at a time."""
    reader = hr.loader(store, 50)._reader
    throttle = Throttle(
        reader._reader(),
        lambda _: 1000,
        bytes_per_s=1e12,
        room=lambda: 3000,
    )
    yield throttle
    throttle.close()
    reader.close()


def ask(throttle, count):
    return [throttle.submit(np.arange(at, at + 4)) for at in range(0, 4 * count, 4)]


def test_a_limit_that_is_lowered_holds_for_what_was_asked_for_before(narrow):
    asked = ask(narrow, 40)
    until(lambda: narrow.stats().in_flight == 37)
    narrow.limit(bytes_per_s=1.0, reads_per_s=None)
    assert [each.take().indices[0] for each in asked[:3]] == [0, 4, 8]
    time.sleep(0.2)
    assert narrow.stats().in_flight >= 36  # for one the bucket had saved up
    narrow.limit(bytes_per_s=1e12, reads_per_s=None)
    assert [each.take().indices[0] for each in asked[3:]] == list(range(12, 160, 4))


def test_batches_that_nobody_takes_keep_no_room(narrow):
    """A pass that was given up had requests under way: the next one must not wait for them."""
    given_up = ask(narrow, 3)
    until(lambda: all(each.began.is_set() for each in given_up))
    asked = ask(narrow, 2)
    time.sleep(0.1)
    assert not asked[0].began.is_set()
    given_up.clear()
    until(lambda: all(each.began.is_set() for each in asked))


def test_whoever_waits_is_let_go_without_room(narrow):
    """Batches may be taken in any order: the room that is missing may be that of those before."""
    asked = ask(narrow, 40)
    until(lambda: narrow.stats().in_flight == 37)
    for at, each in reversed(list(enumerate(asked))):
        assert each.take().indices[0] == 4 * at


def test_a_limit_of_reads_is_kept(store, cold):
    started = time.monotonic()
    loader = hr.loader(store, 50, reads_per_s=2000.0)
    assert sum(len(batch) for batch in loader) == SAMPLES
    # All but the last batch are paid for, less what the bucket has saved up.
    assert time.monotonic() - started > (SAMPLES - 50) / 2000 - 0.25
    loader.close()


def test_what_is_resident_is_paid_back(store):
    list(hr.loader(store, 50))
    loader = hr.loader(store, 50, bytes_per_s=50_000_000.0)
    assert sum(len(batch) for batch in loader) == SAMPLES
    assert loader.stages[0].stats().bytes == loader.stats.bytes
    assert loader.stats.cached_reads > 0
    loader.close()
    loader = hr.loader(store, 50, reads_per_s=2.0, deadline_s=20)  # else each batch takes 25 s
    assert sum(len(batch) for batch in loader) == SAMPLES
    loader.close()


def test_a_held_back_batch_has_a_deadline_and_a_cause(store, cold):
    loader = hr.loader(store, 100, bytes_per_s=0.001, deadline_s=3.0)
    batches = iter(loader)
    next(batches)  # which is let go at once
    with pytest.raises(hr.errors.VolumeTimeout, match=r"0\.001 bytes"):
        next(batches)
    loader.close()


def test_closing_lets_go_of_what_is_held_back(store, cold):
    loader = hr.loader(store, 100, bytes_per_s=0.001)
    batches = iter(loader)
    next(batches)
    running = {t.name for t in threading.enumerate()}
    assert "headrace-throttle" in running
    batches.close()
    loader.close()
    until(lambda: "headrace-throttle" not in {t.name for t in threading.enumerate()})


def test_an_index_outside_is_refused_through_every_stage(store, tmp_path):
    loader = hr.loader(store, 32, ram_bytes=1 << 20, cache_dir=tmp_path, bytes_per_s=1e9)
    for bad in (SAMPLES, -1):
        with pytest.raises(hr.errors.SampleNotFound):
            loader.reader.fetch(np.array([0, bad]))
    loader.close()


# -- policy and options ----------------------------------------------------------------------------


@given(data_bytes=st.integers(0, 1 << 50), available=st.integers(0, 1 << 44))
def test_memory_is_taken_by_itself_only_where_it_pays(data_bytes, available):
    sizes = {"data_bytes": data_bytes, "available_bytes": available}
    assert memory_quota(None, far=False, **sizes) == 0
    assert memory_quota(12345, far=False, **sizes) == 12345
    quota = memory_quota(None, far=True, **sizes)
    assert quota == memory_quota("auto", far=False, **sizes)
    assert 0 <= quota <= available / 2
    assert quota == 0 or available - quota >= 2 << 30


@given(st.integers(0, 1 << 50), st.integers(0, 10_000))
def test_segments_stay_few_and_losses_small(data_bytes, segments):
    assert 64 << 20 <= segment_bytes(data_bytes) <= 1 << 30
    assert publish_after_s(segments) >= 30


def test_options_come_from_arguments_then_the_environment():
    environment = {"HEADRACE_RAM_BYTES": "auto", "HEADRACE_CACHE_DIR": "/there"}
    options, rest, origins = tier_options(
        {"cache_dir": b"/here", "workers": 2, "bytes_per_s": None}, environment
    )
    assert options == TierOptions(cache_dir="/here", ram_bytes="auto")
    assert rest == {"workers": 2}
    assert origins["cache_dir"] == "argument"
    assert origins["ram_bytes"] == "environment"
    assert origins["bytes_per_s"] == "default"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"ram_bytes": "much"}, "ram_bytes is 'much'"),
        ({"ram_bytes": -1}, "ram_bytes is -1"),
        ({"bytes_per_s": 0}, "bytes_per_s is 0"),
        ({"cache_bytes": 5}, "no cache_dir"),
        ({"cache_dir": "x", "cache_bytes": True}, "cache_bytes is True"),
    ],
)
def test_options_out_of_bounds_are_refused(store, given, word):
    with pytest.raises(ValueError, match=word):
        hr.loader(store, 10, **given)


def test_nothing_is_logged_when_all_is_well(store, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "headrace"):
        loader = hr.loader(store, 32, cache_dir=tmp_path / "new" / "cache", ram_bytes=1 << 20)
        epochs(loader, 2)
        loader.close()
    # At this level each pass has its line; nothing else is worth one.
    assert [record.name for record in caplog.records] == ["headrace.epoch"] * 2
