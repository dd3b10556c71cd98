"""Files that change, vanish or cannot be read, and reports that no program writes."""

import os
import struct
import threading
import time

import numpy as np
import pytest

from headrace.node.files.copies import Copies, DescriptorBudget
from headrace.node.files.root_files import FarReader
from headrace.node.files.tree import identity
from headrace.node.wire import FilesReady, ReplyStatus
from node.conftest import serving, until
from node.files.conftest import (
    COPY,
    HEAD_AT,
    ORIGINAL,
    REFUSED,
    SLOTS_AT,
    UNKNOWN,
    WRITING,
    bytes_of,
    copies_of,
    keep_quotas,
    make_files,
    run_of,
    settle,
)


@pytest.fixture
def served(tmp_path, folder, program):
    """Ten far files, all copied: (server, program, paths)."""
    paths = make_files(tmp_path / "data", 10)
    settle()
    with serving(folder) as server:
        one = program(tmp_path / "data", simulate="nfs")
        one.ready()
        until(lambda: len(copies_of(server)) == 10)
        yield server, one, paths
        one.close()


def test_a_file_opened_for_writing_loses_its_copy(served):
    server, one, paths = served
    copies, run = copies_of(server), run_of(server)
    one.opened([3], WRITING)
    until(lambda: copies.figures.withdrawn_files == 1)  # counted last
    assert not run.board.placed(3)
    assert copies.by_path.get(os.fsencode(paths[3])) is None
    run._read_rest()  # it is not placed again: it may be written to still
    time.sleep(0.05)
    assert not run.board.placed(3)
    until(lambda: one.report()["written"] == 1)


def test_a_file_that_was_changed_loses_its_copy_when_it_is_refused(served):
    server, one, paths = served
    run = run_of(server)
    one.opened([2], REFUSED)  # for some other reason: the file is as it was
    paths[4].write_bytes(b"something else")
    one.opened([4], REFUSED)
    until(lambda: not run.board.placed(4))
    assert run.board.placed(2)
    until(lambda: one.report()["refused"] == 2)


def test_a_changed_file_is_copied_anew_for_the_next_run(served, program, tmp_path):
    server, _, paths = served
    paths[4].write_bytes(b"something else")
    new = tmp_path / "data/n0/new.bin"
    new.write_bytes(b"new")
    settle()
    later = program(tmp_path / "data", job="later", simulate="nfs")
    first = later.ready()
    assert (first.files, first.complete) == (10, False)  # at once, as the last scan has it
    second = later.ready()
    assert (second.files, second.complete) == (11, True)
    copies = copies_of(server)
    until(lambda: len(copies) == 11)
    for path in (*paths, new):
        assert bytes_of(copies.by_path.get(os.fsencode(path)), copies) == path.read_bytes()
    assert not run_of(server).board.placed(4)  # the first run's board knows the file as it was


def test_a_file_whose_time_was_set_back_is_copied_anew_for_the_next_run(served, program, tmp_path):
    """As `touch -r`, `rsync -t` and editors do; only st_ctime tells."""
    server, _, paths = served
    was = os.stat(paths[4])
    paths[4].write_bytes(b"x" * was.st_size)
    os.utime(paths[4], ns=(was.st_atime_ns, was.st_mtime_ns))
    settle()
    later = program(tmp_path / "data", job="later", simulate="nfs")
    later.ready()
    assert later.ready().complete
    copies, run = copies_of(server), run_of(server, 1)
    copy = until(lambda: copies.by_path.get(os.fsencode(paths[4])))
    assert run.board.placed(4)
    assert bytes_of(copy, copies) == paths[4].read_bytes()


def test_files_that_vanish_or_cannot_be_read_are_said(tmp_path, folder, program, monkeypatch):
    paths = make_files(tmp_path / "data", 10)
    settle()
    with serving(folder, ram_bytes=0) as server:
        one = program(tmp_path / "data", simulate="nfs")
        one.ready()
        paths[0].unlink()
        paths[1].unlink()
        paths[1].mkdir()
        paths[2].write_bytes(b"x" * 5)
        settle()
        copies, run = copies_of(server), run_of(server)
        keep_quotas(monkeypatch, *run.roots)
        copies.set_quota(1 << 20)
        run._read_rest()
        until(lambda: len(copies) == 7)
        until(lambda: copies.figures.failures == 3)
        assert not run.board.placed(2)
        text = " ".join(copies.figures.errors)
        assert all(name in text for name in ("No such file", "Is a directory", "Stale"))


def test_a_root_that_vanishes_ends_nothing(tmp_path, folder, program, monkeypatch):
    import shutil

    make_files(tmp_path / "data", 10)
    settle()
    with serving(folder, ram_bytes=0) as server:
        program(tmp_path / "data", simulate="nfs").ready()
        shutil.rmtree(tmp_path / "data")
        copies, run = copies_of(server), run_of(server)
        keep_quotas(monkeypatch, *run.roots)
        copies.set_quota(1 << 20)
        run._read_rest()
        until(lambda: copies.figures.failures == 10)
        again = program(tmp_path / "data", simulate="nfs").ready()
        assert again.status is ReplyStatus.NOT_FOUND


def test_roots_that_are_not_there_are_said(tmp_path, folder, program):
    make_files(tmp_path / "data", 3)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with serving(folder):
        answer = program(tmp_path / "none").ready()
        assert answer.status is ReplyStatus.NOT_FOUND
        assert "none: no such folder" in answer.message
        answer = program(tmp_path / "none", tmp_path / "link", tmp_path / "data/n0").ready()
        assert (answer.status, answer.files) == (ReplyStatus.OK, 3)
        assert "none: no such folder" in answer.message
        answer = program(tmp_path / "data", simulate="floppy").ready()
        assert answer.status is ReplyStatus.BAD_REQUEST
        assert "floppy" in answer.message


def test_an_unreadable_folder_is_said_and_the_rest_served(tmp_path, folder, program, monkeypatch):
    make_files(tmp_path / "data", 10)
    real = os.scandir

    def scandir(path):
        if isinstance(path, bytes) and path.endswith(b"/n3"):
            raise PermissionError(13, "Permission denied", os.fsdecode(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with serving(folder) as server:
        assert program(tmp_path / "data").ready().files == 8
        (state,) = server.describe()["files"]["roots"]
        assert state["unread"] == 1
        assert "Permission denied" in state["errors"][0]


def test_links_round_in_circles_are_walked_once(tmp_path, folder, program):
    paths = make_files(tmp_path / "data", 5)
    (tmp_path / "data/n0/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/one").symlink_to(paths[0])
    (tmp_path / "data/broken").symlink_to("nowhere")
    (tmp_path / "data/kernel").symlink_to("/proc")
    os.mkfifo(tmp_path / "data/pipe")
    with serving(folder):
        assert program(tmp_path / "data").ready().files == 6


def test_hostile_reports_do_no_harm(served):
    """Numbers out of range, kinds that are none, a head that jumps, slots of noise."""
    server, one, _paths = served
    run = run_of(server)
    one.opened([10, 11, 2**31, 2**32 - 2], ORIGINAL)
    one.opened([0xFFFFFFFF], UNKNOWN)
    one.opened([5], 9)
    one.opened([0xFFFFFFFF], COPY)
    until(lambda: run.figures.others["unknown"] == 1)
    noise = np.random.default_rng(1).bytes(65536 * 16)
    one._ring[SLOTS_AT : SLOTS_AT + len(noise)] = noise
    for head in (1 << 63, 5, (1 << 64) - 1, 70_000, 0):
        struct.pack_into("<Q", one._ring, HEAD_AT, head)
        time.sleep(0.02)
    one._ring[:SLOTS_AT] = b"\xff" * SLOTS_AT
    until(lambda: run.figures.others["hostile"] >= 5)
    assert run._thread.is_alive()
    assert all(run.board.placed(k) for k in range(10))


def test_a_ring_that_cannot_be_followed_leaves_the_daemon_alone(served, program, tmp_path):
    server, one, _ = served
    run = run_of(server)

    class Broken:
        lost = 0

        def take(self, _seconds):
            raise RuntimeError("broken")

    run.ring = Broken()
    until(lambda: not run._thread.is_alive())
    assert one.report()["opens"]["ram"] == 0
    program(tmp_path / "data", job="next", simulate="nfs").ready()


def test_a_program_that_ends_leaves_nothing_behind(served):
    server, one, _ = served
    run = run_of(server)
    one.close()
    until(lambda: not server.files._served)
    until(lambda: not run._thread.is_alive())
    assert len(copies_of(server)) == 10  # kept for the next run
    until(lambda: server.describe()["files"]["ended"])  # once its last figures are taken
    assert [one["job"] for one in server.describe()["files"]["ended"]] == ["job"]


def test_a_program_does_not_wait_for_a_scan(tmp_path, folder, program, monkeypatch):
    """F4: it begins without a board, and gets one when the scan has ended."""
    paths = make_files(tmp_path / "data", 10)
    settle()
    go_on, real = threading.Event(), os.scandir

    def scandir(path):
        if isinstance(path, bytes):
            assert go_on.wait(20.0)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with serving(folder) as server:
        one = program(tmp_path / "data", simulate="nfs")
        first = one.link.wait(FilesReady, 20.0)
        assert (first.status, first.board_ino, first.complete) == (ReplyStatus.OK, 0, False)
        assert one.report() == {}
        go_on.set()
        second = one.ready()
        assert (second.files, second.complete) == (10, True)
        until(lambda: len(copies_of(server)) == len(paths))


def test_a_large_file_that_was_changed_a_moment_ago_is_not_copied(tmp_path):
    """Within a tick of the file system's clock nothing tells of another change."""
    path = tmp_path / "large"
    reader = FarReader(os.fsencode(tmp_path), Copies(DescriptorBudget(8)))
    with pytest.raises(OSError, match="a moment ago"):
        for _ in range(200):  # on a busy machine the moment may be over before it is read
            path.write_bytes(bytes(3 << 20))
            os.close(reader._read_big(os.fsencode(path), identity(os.stat(path))))
    settle()
    os.close(reader._read_big(os.fsencode(path), identity(os.stat(path))))
    reader.close()
