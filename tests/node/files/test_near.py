"""Files of a local disk: nothing is copied, and what is opened next is read into the page cache."""

import os
import time

import numpy as np
import pytest

from headrace.node.files.run import (
    DOZE_AFTER,
    DOZE_STEP,
    PageCacheAhead,
    ProgramRun,
    read_into_page_cache,
)
from headrace.store.residency import resident_bytes
from node.conftest import serving, until
from node.files.conftest import ORIGINAL, copies_of, make_files, run_of


def drop(paths):
    """Put files out of the page cache; whether that can be done here."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return not any(in_page_cache(path) for path in paths)


def in_page_cache(path):
    return resident_bytes(path) == os.stat(path).st_size


def cold(paths):
    if not drop(paths):
        pytest.skip("this file system does not let go of pages")


def test_a_file_is_read_into_the_page_cache(tmp_path):
    path = make_files(tmp_path / "data", 1, 300_000)[0]
    cold([path])
    assert not read_into_page_cache(os.fsencode(path))
    until(lambda: in_page_cache(path))
    assert read_into_page_cache(os.fsencode(path))
    with pytest.raises(FileNotFoundError):
        read_into_page_cache(os.fsencode(tmp_path / "none"))


def test_what_an_order_says_is_read_before_it_is_opened(tmp_path, folder, program):
    paths = make_files(tmp_path / "data", 100, 4096)
    cold(paths)
    order = np.random.default_rng(1).permutation(100).tolist()
    listed = tmp_path / "order"
    listed.write_text("\n".join(str(paths[k].relative_to(tmp_path / "data")) for k in order))
    with serving(folder) as server:
        one = program(tmp_path / "data", order=listed)
        one.ready()
        until(lambda: all(in_page_cache(path) for path in paths))
        until(lambda: one.report()["ahead_files"] == 100)
        one.opened(order, ORIGINAL)
        one.seen(100)
        report = one.report()
        assert report["opens"]["ahead"] == 100
        assert report["order"] == "given"
        assert len(copies_of(server)) == 0
        assert not any(run_of(server).board.placed(k) for k in range(100))


def test_another_order_wastes_no_more_than_the_window(tmp_path, folder, program, monkeypatch):
    follow = ProgramRun._note

    def late(self, opened):
        time.sleep(0.2)  # an open is counted once all that follows from it is done
        follow(self, opened)

    monkeypatch.setattr(ProgramRun, "_note", late)
    paths = make_files(tmp_path / "data", 300, 4096)
    cold(paths)
    listed = tmp_path / "order"
    listed.write_text("\n".join(map(str, paths)))
    with serving(folder) as server:
        one = program(tmp_path / "data", order=listed)
        one.ready()
        until(lambda: one.report()["ahead_files"] == 300)
        one.opened(np.random.default_rng(2).permutation(300).tolist(), ORIGINAL)
        one.seen(300)
        report = one.report()
        assert report["divergences"] == 1
        assert report["ahead_wasted_files"] + report["opens"]["ahead"] == 300
        assert run_of(server)._foresight.order == ""


def test_lines_that_name_no_file_are_said(tmp_path, folder, program):
    make_files(tmp_path / "data", 3)
    listed = tmp_path / "order"
    listed.write_text("n0/00000.bin\nnothing.bin\n")
    with serving(folder):
        assert (
            "1 lines of the order name no file: nothing.bin"
            in program(tmp_path / "data", order=listed).ready().message
        )
        assert (
            "the order cannot be read"
            in program(tmp_path / "data", order=tmp_path / "none").ready().message
        )


def test_hot_files_are_hardly_looked_at(tmp_path):
    paths = [os.fsencode(path) for path in make_files(tmp_path / "data", 400)]
    for path in paths:
        with open(path, "rb") as f:
            f.read()
    ahead = PageCacheAhead(paths, np.full(400, 1000), threads=1)
    try:
        ahead.want(np.arange(DOZE_AFTER))
        until(lambda: ahead.bypassed)
        ahead.want(np.arange(DOZE_AFTER, 400))
        until(lambda: ahead.figures.hot_files == 400)
        assert ahead._hot_in_a_row == DOZE_AFTER + (400 - DOZE_AFTER) // DOZE_STEP
        assert not ahead.opened(np.arange(400)).any()
    finally:
        ahead.close()


def test_the_rest_is_read_while_the_program_does_nothing(tmp_path, folder, program):
    paths = make_files(tmp_path / "data", 30, 4096)
    cold(paths)
    with serving(folder):
        program(tmp_path / "data").ready()
        until(lambda: all(in_page_cache(path) for path in paths))
