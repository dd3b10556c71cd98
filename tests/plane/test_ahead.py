"""Reading ahead of datasets: what is served, what falls back, and what each fault does."""

import builtins
import errno
import os
import random
import threading
from pathlib import Path

import pytest

from headrace import _native
from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions, opens
from headrace.plane.stage import Stage
from plane.ahead_files import Hidden, Listed, content, drop_pages, make_files, serve, settle
from tests_shared import until

COUNT = 120
PLAIN = ReadAheadOptions(bypass=False)


@pytest.fixture
def paths(tmp_path):
    return make_files(tmp_path / "files", COUNT)


@pytest.fixture
def ahead(paths):
    with ReadAhead.for_dataset(Listed(paths), PLAIN) as ahead:
        yield ahead
    assert builtins.open is real_open


def test_every_sample_is_served_from_memory_bit_for_bit(paths, ahead):
    order = random.Random(1).sample(range(COUNT), COUNT)
    assert serve(ahead, Listed(paths), order) == [content(i) for i in order]
    assert ahead.figures.served == COUNT
    assert ahead.why_off is None
    until(lambda: ahead.stats().buffered_bytes == 0)  # the last buffer goes a little later
    stats = ahead.stats()
    assert (stats.name, stats.samples, stats.reads) == ("ahead", COUNT, COUNT)
    assert stats.bytes == sum(len(content(i)) for i in range(COUNT))
    assert sum(stats.bytes_by_tier.values()) == stats.bytes
    assert (stats.buffered_bytes, stats.ready_bytes, stats.in_flight) == (0, 0, 0)
    assert isinstance(ahead, Stage)


def test_samples_that_repeat_are_served_each_time(paths, ahead):
    order = [3, 3, 5, 3, 5, 5, 3]
    assert serve(ahead, Listed(paths), order) == [content(i) for i in order]
    assert ahead.figures.served == len(order)


def test_without_the_announcement_of_samples_the_opens_tell_the_progress(paths, ahead):
    ahead.coming(range(COUNT))
    for i in range(0, COUNT, 2):  # every other one is skipped
        settle(ahead)
        assert Path(paths[i]).read_bytes() == content(i)
    assert ahead.figures.served == COUNT // 2
    assert len(ahead.planned) <= 2 * 64


def change(kind: str, path: Path) -> None:
    before = path.stat()
    times = (before.st_atime_ns, before.st_mtime_ns)
    data = path.read_bytes()
    if kind == "vanishes":
        path.unlink()
    elif kind == "grows":
        path.write_bytes(data + b"more")
    elif kind == "shrinks":
        path.write_bytes(data[:-1])
    elif kind == "is replaced, with the same size and mtime":
        other = path.with_suffix(".other")
        other.write_bytes(b"?" * len(data))
        os.utime(other, ns=times)
        other.rename(path)
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (len(data), times[1])
        assert path.stat().st_ino != before.st_ino
    elif kind == "is rewritten in place, and its mtime set back":
        path.write_bytes(b"?" * len(data))
        os.utime(path, ns=times)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, times[1])
    elif kind == "becomes unreadable":
        path.chmod(0)
    elif kind == "becomes a folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("kind", [
    "vanishes", "grows", "shrinks", "is replaced, with the same size and mtime",
    "is rewritten in place, and its mtime set back", "becomes unreadable", "becomes a folder",
])  # fmt: skip
def test_a_file_that_changed_after_it_was_read_is_opened_directly(paths, ahead, kind):
    ahead.coming([7, 8])
    settle(ahead)
    change(kind, Path(paths[7]))  # through Path: its reads of the file are planned ones, too
    ahead.figures.served = 0
    ahead.coming([7])
    settle(ahead)

    def outcome(opener):
        try:
            with opener(paths[7], "rb") as file:
                return file.read()
        except OSError as error:
            return type(error), error.errno, error.filename

    assert outcome(open) == outcome(real_open)
    assert Path(paths[8]).read_bytes() == content(8)


def test_a_change_between_reading_and_opening_is_seen_by_the_look_at_the_path(paths, ahead):
    ahead.coming([7])
    settle(ahead)
    with real_open(paths[7], "r+b") as file:
        file.write(b"!")
    with open(paths[7], "rb") as file:
        assert file.read(1) == b"!"
    assert (ahead.figures.served, ahead.figures.changed) == (0, 1)


def test_what_is_no_regular_file_neither_hangs_nor_harms(tmp_path, ahead):
    fifo, folder = tmp_path / "fifo", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir()
    ahead.coming([fifo, folder, tmp_path / "missing", "a\0b", b"\xff/x"])
    settle(ahead)
    writer = threading.Thread(target=fifo.write_bytes, args=(b"through the pipe",))
    writer.start()
    assert fifo.read_bytes() == b"through the pipe"
    writer.join()
    for path, kind in ((folder, IsADirectoryError), (tmp_path / "missing", FileNotFoundError)):
        with pytest.raises(kind) as error:
            open(path)
        assert error.value.filename == str(path) or error.value.filename == path
    with pytest.raises(ValueError, match="null"):
        open("a\0b")
    assert ahead.figures.changed == 4
    assert ahead.figures.served == 0


def test_big_files_and_a_small_budget(tmp_path):
    """Files over half the budget are the user's to read; all others come, and memory stays bounded."""
    folder = tmp_path / "files"
    folder.mkdir()
    sizes = [(300 << 10) if i % 3 else (900 << 10) for i in range(24)]
    paths = [str(folder / str(i)) for i in range(24)]
    for i, path in enumerate(paths):
        Path(path).write_bytes(bytes([i]) * sizes[i])
    options = ReadAheadOptions(bypass=False, buffer_bytes=1 << 20)
    with ReadAhead.for_dataset(Listed(paths), options) as ahead:
        ahead.coming(range(24))
        most = 0
        for i in range(24):
            with ahead.sample(i):
                assert Path(paths[i]).read_bytes() == bytes([i]) * sizes[i]
            native = ahead._reader.stats()
            most = max(most, native["mapped_bytes"])
        assert ahead.figures.late >= 8  # EFBIG
        assert 0 < most <= 1 << 20


def test_the_consumer_opens_directly_what_a_read_does_not_answer(paths, ahead, monkeypatch):
    """The native reader gives up waiting (its own tests stop a read for ever); so does the open."""

    reader = _native.FileReader()

    class Stuck:
        def __init__(self, **_):
            self.reader = reader

        def submit(self, raw):
            job = self.reader.submit(raw)
            return type("Job", (), {
                "done": True, "forget": lambda _self, _slot: None,
                "take": lambda _self, _slot, _seconds: errno.ETIMEDOUT, "keep": job,
            })()  # fmt: skip

        def __getattr__(self, name):
            return getattr(self.reader, name)

    monkeypatch.setattr(_native, "FileReader", Stuck)
    ahead.coming([1])
    with ahead.sample(1):
        assert Path(paths[1]).read_bytes() == content(1)
    assert ahead.figures.late == 1
    assert ahead.why_off is None


def test_a_dataset_that_raises_leaves_nothing_behind(paths, ahead):
    ahead.coming(range(20))
    settle(ahead)
    for i in range(20):
        with pytest.raises(RuntimeError), ahead.sample(i):
            raise RuntimeError
    assert ahead.figures.skipped == 20
    assert not ahead.planned
    until(lambda: ahead.stats().buffered_bytes == 0)


def test_a_plan_that_nobody_follows_switches_itself_off_and_says_why(paths):
    """A guess that is wrong: the dataset opens other files than its list names."""
    dataset = Listed(paths)
    dataset._where = paths[::-1]
    options = ReadAheadOptions(bypass=False, learn=False)
    with ReadAhead.for_dataset(dataset, options) as ahead:
        first = COUNT // 2 - 1
        for _ in range(3):
            assert serve(ahead, dataset, range(first)) == [
                content(COUNT - 1 - i) for i in range(first)
            ]
        assert ahead.figures.served == 0
        assert ahead.figures.planned == ahead.figures.skipped == 2 * first  # then it stopped
        assert "0 were used" in ahead.why_off
        assert ahead.why_off in ahead.explain()


def test_samples_whose_files_are_unknown_drop_nothing_that_is_planned(tmp_path):
    """One of a hundred samples is known, as after an epoch of which little was learned."""
    paths = make_files(tmp_path / "files", COUNT)
    with ReadAhead(100 * COUNT, options=PLAIN) as ahead:
        for i in range(COUNT):
            ahead._files.knowledge.learn(100 * i, [paths[i]])
        ahead.coming(range(800))
        settle(ahead)
        for key in range(800):
            with ahead.sample(key):
                if key % 100 == 0:
                    Path(paths[key // 100]).read_bytes()
        assert (ahead.figures.served, ahead.figures.skipped) == (8, 0)


def test_what_is_let_go_is_opened_as_ever(paths, ahead):
    ahead.coming(range(COUNT))
    settle(ahead)
    ahead.let_go()
    assert builtins.open is real_open
    assert ahead.planned == {}
    until(lambda: ahead.stats().buffered_bytes == 0)
    order = list(range(COUNT))
    assert serve(ahead, Listed(paths), order) == [content(i) for i in order]
    assert ahead.figures.planned == ahead.figures.served + ahead.figures.skipped
    assert ahead.why_off is None


def test_a_wrong_guess_is_given_up_for_what_is_learned(paths):
    dataset = Listed(paths)
    dataset._where = paths[::-1]
    with ReadAhead.for_dataset(dataset, PLAIN) as ahead:
        serve(ahead, dataset, range(COUNT))
        ahead._judge.reason = None
        before = ahead.figures.served
        assert serve(ahead, dataset, range(COUNT)) == [content(COUNT - 1 - i) for i in range(COUNT)]
        assert ahead.figures.served - before == COUNT


def test_knobs_turn_while_it_serves(paths, ahead):
    ahead.coming(range(COUNT))
    for i in range(COUNT):
        ahead.turn({"reads_in_flight": 1 + i % 9, "buffer_bytes": (1 + i % 5) << 18, "other": 3})
        with ahead.sample(i):
            assert Path(paths[i]).read_bytes() == content(i)
    assert ahead.knobs() == {"reads_in_flight": 3, "buffer_bytes": 5 << 18}
    with pytest.raises(ValueError, match="buffer_bytes is 0"):
        ahead.turn({"buffer_bytes": 0})


def test_a_forked_child_starts_anew_and_the_parent_goes_on(paths, ahead):
    dataset = Listed(paths)
    ahead.coming(range(COUNT))
    settle(ahead)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert builtins.open is real_open
            assert not ahead.planned
            assert dataset[3] == content(3)
            assert serve(ahead, dataset, range(10)) == [content(i) for i in range(10)]
            assert ahead.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    for i in range(COUNT):
        settle(ahead)
        with ahead.sample(i):
            assert dataset[i] == content(i)
    assert ahead.figures.served == COUNT


def test_files_in_the_page_cache_are_left_to_the_dataset_from_the_first(paths):
    dataset = Listed(paths)
    with ReadAhead.for_dataset(dataset) as ahead:
        ahead._bypass.latency_s_max = 10.0  # a loaded machine makes no difference
        for _ in range(2):
            assert serve(ahead, dataset, range(COUNT)) == [content(i) for i in range(COUNT)]
        assert ahead.bypassed
        assert ahead.figures.planned == 0
        assert builtins.open is real_open
        assert "they lie in the page cache" in ahead.explain()
        assert not ahead.reads


def test_files_that_leave_the_page_cache_are_soon_read_ahead(paths):
    dataset = Listed(paths)
    with ReadAhead.for_dataset(dataset) as ahead:
        ahead._bypass.latency_s_max = 10.0
        ahead._bypass.pause = COUNT // 2
        serve(ahead, dataset, range(COUNT))
        assert ahead.bypassed
        for path in paths:
            drop_pages(path)
        if _native.look_at_files([os.fsencode(paths[1])], 1.0)[0]:
            pytest.skip("this file system keeps its pages")
        assert serve(ahead, dataset, range(COUNT)) == [content(i) for i in range(COUNT)]
        assert not ahead.bypassed
        assert ahead.figures.served >= COUNT // 2


def test_files_that_are_read_from_the_page_cache_again_and_again_are_left_to_the_dataset(paths):
    dataset = Listed(paths)
    for path in paths:
        drop_pages(path)
    options = ReadAheadOptions(cold="fill")
    with ReadAhead.for_dataset(dataset, options) as ahead:
        ahead._bypass.latency_s_max = 10.0
        for _ in range(4):
            assert serve(ahead, dataset, range(COUNT)) == [content(i) for i in range(COUNT)]
        assert ahead.bypassed
        assert ahead.figures.served < 4 * COUNT


@pytest.mark.parametrize("odd", ["missing", "folder", "pipe", "b\udcffd"])
def test_a_look_at_odd_paths_ends_and_says_no(tmp_path, odd):
    path = tmp_path / odd
    if odd == "folder":
        path.mkdir()
    elif odd == "pipe":
        os.mkfifo(path)
    assert _native.look_at_files([os.fsencode(path)], 1.0)[0] == 0


def test_what_has_no_samples_or_no_paths_is_not_read_ahead(paths):
    assert ReadAhead.for_dataset(iter([1])) is None
    assert ReadAhead.for_dataset(Hidden(paths), ReadAheadOptions(learn=False)) is None
    with pytest.raises(ValueError, match="reads_in_flight is 0"):
        ReadAheadOptions(reads_in_flight=0)
    with pytest.raises(ValueError, match="cold is 'x'"):
        ReadAheadOptions(cold="x")


def test_a_thread_that_opens_a_planned_file_meanwhile_keeps_no_read_ahead_that_is_closed(
    paths, monkeypatch
):
    """Its open makes room, for which more was ordered, and served: `open` stayed replaced for good."""
    ahead = ReadAhead.for_dataset(
        Listed(paths), ReadAheadOptions(reads_in_flight=1, buffer_bytes=64 << 10, bypass=False)
    )
    ahead.coming([*range(COUNT), *range(COUNT)])
    planned = list(ahead.planned)
    assert planned
    stop = opens.stop_serving

    def stop_and_open(files):
        stop(files)
        for path in planned:
            ahead.take(path)

    monkeypatch.setattr(opens, "stop_serving", stop_and_open)
    assert ahead.close(20)
    assert builtins.open is real_open
