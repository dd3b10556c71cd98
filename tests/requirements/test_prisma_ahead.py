"""PRISMA's weaknesses turned round, for files that are read ahead: each test bears its number.

P7, P8 and P13 to P15 concern the store's readers, too, and have their tests beside them.
"""

import builtins
import os
import random
import threading
import time
from pathlib import Path

import pytest

from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions
from headrace.plane.read_ahead.opens import AheadFile
from plane.ahead_files import Hidden, Listed, content, make_files, serve, settle

COUNT = 150
PLAIN = ReadAheadOptions(bypass=False)


@pytest.fixture
def paths(tmp_path):
    return make_files(tmp_path / "files", COUNT)


@pytest.fixture
def ahead(paths):
    with ReadAhead.for_dataset(Listed(paths), PLAIN) as ahead:
        yield ahead


def test_p1_reading_at_or_past_the_end_gives_nothing_at_once(paths, ahead):
    ahead.coming([0])
    settle(ahead)
    with open(paths[0], "rb", buffering=0) as file:
        assert isinstance(file, AheadFile)
        size = len(content(0))
        for position in (size, size + 1, 1 << 40):
            file.seek(position)
            assert (file.read(10), file.read(), file.readinto(bytearray(4))) == (b"", b"", 0)
            assert file.tell() == position
        file.seek(size - 3)
        assert file.read(10) == content(0)[-3:]


def test_p2_no_byte_is_given_before_it_is_read(paths, ahead):
    """Opened as soon as they are announced, in any order: every open gives the whole true file."""
    for seed in range(10):
        order = random.Random(seed).sample(range(COUNT), COUNT)
        ahead.coming(order)
        for index in order:
            with ahead.sample(index):
                assert Path(paths[index]).read_bytes() == content(index)
    assert ahead.figures.served > 0
    assert ahead.figures.changed == 0


def test_p3_many_threads_may_open_the_same_files_at_once(paths, ahead):
    threads, rounds = 8, 3
    order = [i % COUNT for i in range(threads * rounds * COUNT)]
    wrong: list[int] = []
    positions = iter(order)
    lock = threading.Lock()

    def consume() -> None:
        while True:
            with lock:
                index = next(positions, None)
            if index is None:
                return
            with ahead.sample(index):
                if Path(paths[index]).read_bytes() != content(index):
                    wrong.append(index)

    ahead.coming(order)
    workers = [threading.Thread(target=consume) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert ahead.figures.served > 0
    ahead.close()
    figures = ahead.figures
    assert figures.planned >= figures.served + figures.skipped + figures.changed + figures.late


def test_p4_a_consumer_that_skips_blocks_nobody_and_leaves_nothing(paths):
    """It takes every tenth sample, stops in the middle, and begins again elsewhere."""
    options = ReadAheadOptions(bypass=False, buffer_bytes=512 << 10)
    with ReadAhead.for_dataset(Listed(paths), options) as ahead:
        for start in (0, 3, 7):
            ahead.coming(range(COUNT))
            for index in range(start, COUNT - 40, 10):
                settle(ahead)
                with ahead.sample(index):
                    assert Path(paths[index]).read_bytes() == content(index)
        assert ahead.figures.skipped >= 64
        assert ahead.stats().buffered_bytes <= 512 << 10
        reason = ahead.why_off
        assert reason is not None
        assert "never opened" in reason
        ahead.close()
        assert not ahead.planned
        assert Path(paths[0]).read_bytes() == content(0)


def test_p5_a_name_outside_the_plan_is_read_directly(paths, ahead, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"not planned")
    ahead.coming(range(10))
    settle(ahead)
    with open(other, "rb") as file:
        assert not isinstance(file.raw, AheadFile)
        assert file.read() == b"not planned"
    with ahead.sample(77):  # a sample that nobody announced
        assert Path(paths[77]).read_bytes() == content(77)
    with ahead.sample(0):
        assert Path(paths[0]).read_bytes() == content(0)
    assert ahead.figures.served == 1


def test_p6_a_missing_file_is_an_error_with_its_name_to_its_reader_only(paths, ahead):
    Path(paths[5]).unlink()
    ahead.coming(range(10))
    settle(ahead)
    for index in range(10):
        with ahead.sample(index):
            if index == 5:
                with pytest.raises(FileNotFoundError) as found:
                    Path(paths[5]).read_bytes()
                with pytest.raises(FileNotFoundError) as expected:
                    real_open(paths[5], "rb")
                assert str(found.value) == str(expected.value)
            else:
                assert Path(paths[index]).read_bytes() == content(index)
    assert (ahead.figures.served, ahead.figures.changed) == (9, 1)


def test_p7_the_budget_is_in_bytes_and_kept(paths):
    options = ReadAheadOptions(bypass=False, buffer_bytes=256 << 10)
    total = sum(len(content(i)) for i in range(COUNT))
    assert total > 4 * options.buffer_bytes
    with ReadAhead.for_dataset(Listed(paths), options) as ahead:
        ahead.coming(range(COUNT))
        most = 0
        for index in range(COUNT):
            settle(ahead)
            most = max(most, ahead._reader.stats()["mapped_bytes"])
            with ahead.sample(index):
                assert Path(paths[index]).read_bytes() == content(index)
        assert ahead.figures.served > 0.9 * COUNT
        assert 0 < most <= options.buffer_bytes


def test_p8_the_plan_does_not_grow_with_the_epochs(paths):
    options = ReadAheadOptions(bypass=False, plan_max=2 * COUNT)
    dataset = Listed(paths)
    with ReadAhead.for_dataset(dataset, options) as ahead:
        assert ahead.coming(range(COUNT)) == COUNT
        assert ahead.coming(i % COUNT for i in range(90 * COUNT)) == COUNT
        assert ahead.room == 0
        for _ in range(5):
            serve(ahead, dataset, range(COUNT), ready=False)
            assert len(ahead._later) + len(ahead._plan) <= 2 * COUNT


def test_p9_the_work_for_a_sample_is_the_same_for_1_and_64_consumers(paths):
    """Counted, not timed: function calls into the package per sample."""
    import sys

    calls = {}
    for consumers in (1, 64):
        with ReadAhead.for_dataset(
            Listed(paths), ReadAheadOptions(bypass=False, learn=False)
        ) as ahead:
            count = [0]

            def note(frame, event, arg, count=count):
                if event == "call" and "/read_ahead/" in frame.f_code.co_filename:
                    count[0] += 1

            ahead.coming(range(COUNT))
            gate = threading.Barrier(consumers)
            share = iter(range(COUNT))

            def consume(gate=gate, share=share, note=note, ahead=ahead):
                gate.wait()
                sys.setprofile(note)
                for index in share:
                    with ahead.sample(index):
                        Path(paths[index]).read_bytes()
                sys.setprofile(None)

            workers = [threading.Thread(target=consume) for _ in range(consumers)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            calls[consumers] = count[0] / COUNT
    assert calls[1] > 5
    assert calls[64] < 2 * calls[1]


def test_p10_a_range_costs_its_own_bytes(paths, ahead):
    """Parts of a file are views of the memory it was read to: no copy of the whole is made."""
    import tracemalloc

    big = Path(paths[0]).with_name("big")
    big.write_bytes(bytes(8 << 20))
    time.sleep(0.03)
    ahead.coming([big])
    settle(ahead)
    with open(big, "rb", buffering=0) as file:
        assert isinstance(file, AheadFile)
        tracemalloc.start()
        for position in range(0, 8 << 20, 1 << 20):
            file.seek(position)
            assert file.read(1000) == bytes(1000)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 1 << 20


def test_p12_no_name_ends_the_process(paths, ahead, tmp_path):
    """Longer than any limit, or of bytes that are no text: an error, or the file."""
    deep = tmp_path
    for _ in range(6):
        deep /= "d" * 200
    deep.mkdir(parents=True)
    names = [
        deep / "a file with a long path",
        Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe\x80 \n'\"")),
        tmp_path / "snowman \u2603",
    ]
    for name in names:
        name.write_bytes(bytes(name))
    assert len(bytes(names[0])) > 999
    time.sleep(0.03)
    long = [tmp_path / ("x" * 300), "y" * 100_000, b"z\0z", ""]
    ahead.coming([*names, *long])
    settle(ahead)
    for name in names:
        assert name.read_bytes() == bytes(name)
    assert ahead.figures.served == len(names)
    for name in long:
        with pytest.raises((OSError, ValueError)) as found:
            open(name, "rb")
        with pytest.raises(found.type):
            real_open(name, "rb")
    dataset = Hidden([str(name) for name in names])
    with ReadAhead.for_dataset(dataset, PLAIN) as learning:
        for _ in range(2):
            assert serve(learning, dataset, range(3)) == [bytes(name) for name in names]
        assert learning.figures.served == 3


def test_p16_training_and_validation_are_served_at_the_same_time(paths, tmp_path):
    train = Listed(paths)
    other = make_files(tmp_path / "validation", 40)
    validation = Listed(other)
    with ReadAhead.for_dataset(train, PLAIN) as a, ReadAhead.for_dataset(validation, PLAIN) as b:
        a.coming(range(COUNT))
        b.coming(range(40))
        for index in range(COUNT):
            settle(a)
            settle(b)
            with a.sample(index):
                assert train[index] == content(index)
            if index < 40:
                with b.sample(index):
                    assert validation[index] == content(index)
        assert (a.figures.served, b.figures.served) == (COUNT, 40)
        b.close()
        assert builtins.open is not real_open
        assert serve(a, train, range(20)) == [content(i) for i in range(20)]
        assert a.figures.served == COUNT + 20
    assert builtins.open is real_open
