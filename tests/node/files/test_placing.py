"""Placing: copies of far files are made, kept within quotas, shared and given back."""

import os
import time

import numpy as np

from headrace.io import Simulation
from headrace.io.simulation import PRESETS
from headrace.node.files.root_files import READS_FIRST
from headrace.node.files.run import ProgramRun
from node.conftest import serving, until
from node.files.conftest import (
    COPY,
    ORIGINAL,
    bytes_of,
    copies_of,
    keep_quotas,
    make_files,
    run_of,
    settle,
)
from tests_shared import comes_true


def total(paths):
    return sum(path.stat().st_size for path in paths)


def open_in_order(program, run, order, *, wait):
    """Open as a program with the shim would; how many were copies.

    A file that is due is no longer copied, as a program would not wait for it: then the original is opened.
    """
    copies = 0
    for file in order:
        if wait:
            comes_true(lambda file=file: run.board.placed(file), 3.0)
        placed = run.board.placed(file)
        copies += placed
        program.opened([file], COPY if placed else ORIGINAL)
    return copies


def test_far_files_are_copied_once_and_shown_on_the_board(tmp_path, folder, program, monkeypatch):
    show = ProgramRun.show

    def late(*arguments):
        time.sleep(0.01)  # a copy is counted once it is on the board
        show(*arguments)

    monkeypatch.setattr(ProgramRun, "show", late)
    paths = make_files(tmp_path / "data", 50)
    settle()
    with serving(folder) as server:
        answer = program(tmp_path / "data", simulate="nfs").ready()
        assert (answer.files, answer.nbytes, answer.complete) == (50, total(paths), True)
        copies, run = copies_of(server), run_of(server)
        until(lambda: len(copies) == 50)
        for k, path in enumerate(paths):
            assert run.find(os.fsencode(path)) == k
            assert run.board.placed(k)
            copy = copies.by_path[os.fsencode(path)]
            assert bytes_of(copy, copies) == path.read_bytes()
            own, original = os.fstat(copy.fd), path.stat()  # what programs see that ask the kernel
            assert (own.st_mode, own.st_mtime_ns) == (original.st_mode, original.st_mtime_ns)
        assert copies.figures.source_bytes == total(paths)


def test_a_far_file_costs_an_open_and_a_read(tmp_path, folder, program):
    """It is known what it is: nobody looks at it once more."""
    make_files(tmp_path / "data", 50)
    settle()
    with serving(folder) as server:
        program(tmp_path / "data", simulate="nfs").ready()
        (root,) = server.files._roots.values()
        until(lambda: len(root.copies) == 50)
        of_scan = 1 + 5 + 50  # folders, and the files in them
        assert root.model.stats()["requests"] == of_scan + 2 * 50


def test_as_many_files_are_read_at_a_time_as_the_tuner_says(tmp_path, folder, program, monkeypatch):
    monkeypatch.setenv("HEADRACE_TUNE", "0")
    # So slow that none of it is over while this thread waits for a processor.
    monkeypatch.setitem(PRESETS, "s3", Simulation(name="s3", latency_s=0.5))
    make_files(tmp_path / "data", 600)
    settle()
    with serving(folder) as server:
        program(tmp_path / "data", simulate="s3").ready()
        (root,) = server.files._roots.values()
        until(lambda: root.reader.stats().in_flight > READS_FIRST // 2)
        root.reader.turn({"reads_in_flight": 3, "buffer_bytes": 1})
        assert root.reader.knobs() == {"reads_in_flight": 3}
        until(lambda: root.reader.stats().in_flight <= 3)
        root.reader.turn({"reads_in_flight": 500})
        until(lambda: len(root.copies) == 600)
        (state,) = server.describe()["files"]["roots"]
        assert state["tuning"]["knobs"]["reads_in_flight"]["high"] >= 500
        assert [stage["name"] for stage in state["tuning"]["stages"]] == ["ahead"]


def test_the_tuner_hears_how_programs_fare(tmp_path, folder, program, monkeypatch):
    """An original takes as long as a read of ours; a copy, and what lies between opens, is the program's."""
    monkeypatch.setenv("HEADRACE_TUNE", "0")
    make_files(tmp_path / "data", 50)
    settle()
    with serving(folder) as server:
        one, other = (program(tmp_path / "data", job=name, simulate="nfs") for name in ("a", "b"))
        one.ready()
        other.ready()
        (root,) = server.files._roots.values()
        until(lambda: len(root.copies) == 50)
        one.opened(range(50), COPY)
        other.opened(range(10), COPY)
        until(lambda: root.reader.consumer().batches == 60)
        assert root.reader.consumer().waited_s == 0.0
        assert root.reader.consumer().worked_s > 0.0
        one.opened(range(20), ORIGINAL)
        until(lambda: root.reader.consumer().batches == 80)
        assert root.reader.consumer().bytes == 80 * 1000
        assert root.reader.consumer().waited_s > 0.0


def test_two_runs_share_the_copies(tmp_path, folder, program):
    """F2: two jobs on one data set fetch it once; and a third one after them not at all."""
    paths = make_files(tmp_path / "data", 60)
    settle()
    with serving(folder) as server:
        both = [program(tmp_path / "data", job=name, simulate="nfs") for name in ("a", "b")]
        for one in both:
            one.ready()
        copies = copies_of(server)
        until(lambda: len(copies) == 60)
        for one in both:
            until(lambda one=one: not one.close() or True)
        until(lambda: not server.files._served)
        later = program(tmp_path / "data", job="c", simulate="nfs")
        later.ready()
        assert all(run_of(server).board.placed(k) for k in range(60))
        assert copies.figures.source_bytes == total(paths)
        assert len(server.files._roots) == 1


def test_a_jobs_quota_holds(tmp_path, folder, program):
    make_files(tmp_path / "a", 40, 20_000)
    make_files(tmp_path / "b", 40, 20_000)
    settle()
    with serving(folder, job_ram_bytes=300_000) as server:
        program(tmp_path / "a", job="one", simulate="nfs").ready()
        program(tmp_path / "b", job="two", simulate="nfs").ready()
        roots = [copies_of(server, k) for k in (0, 1)]
        until(
            lambda: all(len(root) == 300_000 // 22_528 for root in roots)
        )  # 5 pages and 2 KiB each
        for root in roots:
            assert root.held_bytes <= root.quota_bytes <= 300_000
            assert root.figures.evicted_files == 0


def test_a_known_order_makes_room_for_what_comes_next(tmp_path, folder, program):
    """Memory for a quarter of the files, and every open finds a copy: nothing is read for nothing."""
    paths = make_files(tmp_path / "data", 200, 40_000)
    settle()
    order = np.random.default_rng(3).permutation(200)
    listed = tmp_path / "order"
    listed.write_text("\n".join(str(paths[k]) for k in order))
    with serving(folder, ram_bytes=50 * 44_000) as server:
        one = program(tmp_path / "data", order=listed, simulate="nfs")
        one.ready()
        run, copies = run_of(server), copies_of(server)
        for _ in range(2):
            assert open_in_order(one, run, order.tolist(), wait=True) >= 196
            assert copies.held_bytes <= 50 * 44_000
        one.seen(400)
        report = one.report()
    assert (report["order"], report["divergences"]) == ("given", 0)
    assert report["opens"]["ram"] >= 386
    assert copies.figures.evicted_files > 100
    # Some stayed from epoch to epoch; on a busy machine a copy may be given up for one that comes sooner.
    assert copies.figures.source_files - copies.figures.wasted_files < 390


def test_a_learned_order_does_the_same_from_the_second_epoch(tmp_path, folder, program):
    make_files(tmp_path / "data", 200, 40_000)
    settle()
    order = np.random.default_rng(4).permutation(200).tolist()
    with serving(folder, ram_bytes=50 * 44_000) as server:
        one = program(tmp_path / "data", simulate="nfs")
        one.ready()
        run = run_of(server)
        until(lambda: len(copies_of(server)) > 40)
        first = open_in_order(one, run, order, wait=False)
        assert first < 100
        assert not one.report()["learned"]
        assert open_in_order(one, run, order[:20], wait=False) < 20
        until(lambda: one.report()["order"] == "learned")
        assert open_in_order(one, run, order[20:], wait=True) >= 176
        assert one.report()["learned"]


def test_another_order_stops_the_reading_ahead_and_is_said(tmp_path, folder, program):
    paths = make_files(tmp_path / "data", 400, 4000)
    settle()
    listed = tmp_path / "order"
    listed.write_text("\n".join(map(str, paths)))
    with serving(folder, ram_bytes=60 * 7000) as server:
        one = program(tmp_path / "data", order=listed, simulate="nfs")
        one.ready()
        run, copies = run_of(server), copies_of(server)
        open_in_order(one, run, range(100), wait=True)
        evicted = until(lambda: copies.figures.evicted_files)
        open_in_order(one, run, np.random.default_rng(5).permutation(400).tolist(), wait=False)
        one.seen(500)
        report = one.report()
        assert report["divergences"] == 1
        assert report["order"] == ""
        evicted = copies.figures.evicted_files
        open_in_order(one, run, np.random.default_rng(6).permutation(400).tolist(), wait=False)
        one.seen(900)
        assert (
            copies.figures.evicted_files - evicted < 200
        )  # at most one more try, with what was learned


def test_what_a_program_opens_takes_the_place_of_what_it_does_not(tmp_path, folder, program):
    """Memory for a third of the root, of which the program opens the last third, in any order."""
    paths = make_files(tmp_path / "data", 300, 4000, folders=3)
    settle()
    mine = [k for k, path in enumerate(paths) if path.parent.name == "n2"]
    with serving(folder, ram_bytes=110 * 6144) as server:
        one = program(tmp_path / "data", simulate="nfs")
        one.ready()
        run, copies = run_of(server), copies_of(server)
        until(lambda: len(copies) == 110)
        rng = np.random.default_rng(8)
        for _ in range(2):
            open_in_order(one, run, rng.permutation(mine).tolist(), wait=False)
        until(lambda: all(run.board.placed(k) for k in mine))
        with copies._lock:  # not between the two
            assert copies.figures.wasted_files == copies.figures.evicted_files > 0
        assert copies.held_bytes <= 110 * 6144


def test_what_lies_beside_opened_files_is_read_first(tmp_path, folder, program, monkeypatch):
    paths = make_files(tmp_path / "data", 90, folders=3)
    settle()
    with serving(folder, ram_bytes=0) as server:
        one = program(tmp_path / "data", simulate="nfs")
        one.ready()
        run, copies = run_of(server), copies_of(server)
        one.opened([60, 61], ORIGINAL)  # in the last of three folders
        one.opened(range(62, 80), ORIGINAL)
        until(
            lambda: run._ever.sum() == 20
        )  # opens are counted a moment before they are remembered
        (root,) = server.files._roots.values()
        keep_quotas(monkeypatch, root)
        until(lambda: not root.reader.has_rest(run))  # there was no room for any of it
        copies.set_quota(30 * 6144)
        run._read_rest()
        until(lambda: len(copies) == 30)
        beside = [k for k, path in enumerate(paths) if path.parent == paths[60].parent]
        assert sum(run.board.placed(k) for k in beside) == 30


def test_larger_files_wait_for_an_open_and_too_large_ones_are_left_alone(tmp_path, folder, program):
    data = tmp_path / "data"
    data.mkdir()
    sizes = {"a-large": (17 << 20) + 5, "b-huge": 40 << 20, "c-small": 1000, "d-empty": 0}
    for name, size in sizes.items():
        (data / name).write_bytes(os.urandom(size))
    settle()
    with serving(folder, ram_bytes=30 << 20) as server:
        one = program(data, simulate="nfs")
        one.ready()
        run, copies = run_of(server), copies_of(server)
        until(lambda: len(copies) == 2)
        assert run.board.placed(2)
        assert run.board.placed(3)
        one.opened([0, 1], ORIGINAL)
        path = data / "a-large"
        copy = until(lambda: copies.by_path.get(os.fsencode(path)))
        assert run.board.placed(0)
        assert bytes_of(copy, copies) == path.read_bytes()
        assert not run.board.placed(1)


def test_memory_that_is_short_is_given_back(tmp_path, folder, program, monkeypatch):
    make_files(tmp_path / "data", 50, 10_000)
    settle()
    with serving(folder) as server:
        program(tmp_path / "data", simulate="nfs").ready()
        copies, run = copies_of(server), run_of(server)
        until(lambda: len(copies) == 50)
        keep_quotas(monkeypatch, *run.roots)
        copies.set_quota(10 * 14_336)
        assert len(copies) == 10
        assert copies.figures.given_back_files == 40
        assert sum(run.board.placed(k) for k in range(50)) == 10
        assert server.files._descriptors.taken == 10


def test_descriptors_that_are_short_leave_files_alone(tmp_path, folder, program):
    make_files(tmp_path / "data", 50)
    settle()
    with serving(folder) as server:
        server.files._descriptors_limit = 20
        program(tmp_path / "data", simulate="nfs").ready()
        copies = copies_of(server)
        until(lambda: len(copies) == 20)
        assert server.files.describe()["descriptors"] == 20
