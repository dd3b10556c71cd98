"""Ranks: the launchers' environments, and what happens when a rank is missing or dies."""

import socket
import threading
import time

import numpy as np
import pytest

from headrace.base.job import Rank
from headrace.bench import ranks
from headrace.bench.ranks import _addresses, _reach, join
from headrace.errors import BenchError


def together(world, folder, do, deadline_s=30.0):
    """What `do(group)` returns or raises in each rank."""
    result = [None] * world

    def rank(number):
        try:
            group = join(Rank(number, world), folder, deadline_s)
            try:
                result[number] = do(group)
            finally:
                group.close()
        except BenchError as e:
            result[number] = e

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return result


def test_values_are_gathered_by_rank_and_sent_to_all(tmp_path):
    def do(group):
        group.barrier()
        gathered = group.gather({"of": group.place.rank})
        return gathered, group.broadcast([1, 2] if group.place.is_first else None)

    result = together(4, tmp_path, do)
    assert result[0] == ([{"of": n} for n in range(4)], [1, 2])
    assert result[1:] == [([], [1, 2])] * 3
    assert list(tmp_path.iterdir()) == []


def test_one_process_needs_nobody(tmp_path):
    group = join(Rank(0, 1), tmp_path)
    group.barrier()
    assert (group.gather(3), group.broadcast(4)) == ([3], 4)


@pytest.mark.parametrize("per_host", [12, 4, 1])
def test_all_take_away_the_latest_moments_whatever_hosts_they_are_on(
    tmp_path, monkeypatch, per_host
):
    """Twelve hosts are a tree of two levels. Their clocks are measured to within a wake-up."""
    numbers = {}
    monkeypatch.setattr(ranks, "this_host", lambda: str(numbers[threading.get_ident()] // per_host))
    steps = 20

    def do(group):
        rank, start_s = group.place.rank, group.broadcast(time.perf_counter())
        ends = []
        for step in range(steps):
            end_s = start_s + step + (0.5 if rank == step % 12 else 0.0)
            ends.append(group.meet(end_s, end_s - 0.25))
        return start_s, ends

    world_join = ranks._listen, ranks._connect
    for name, original in zip(("_listen", "_connect"), world_join, strict=True):

        def known(place, *arguments, original=original):
            numbers[threading.get_ident()] = place.rank
            return original(place, *arguments)

        monkeypatch.setattr(ranks, name, known)
    for start_s, ends in together(12, tmp_path, do):
        expected = [(start_s + step + 0.5, start_s + step + 0.25) for step in range(steps)]
        assert np.array(ends) == pytest.approx(np.array(expected), abs=0.2)
        if per_host == 12:
            assert np.array(ends) == pytest.approx(np.array(expected), abs=1e-8)


def test_who_does_not_come_to_the_barrier_is_named(tmp_path):
    """Rank 1 lives, and does not come; rank 2 may come late."""
    enough = threading.Event()

    def do(group):
        if group.place.rank == 1:
            return enough.wait(60)
        try:
            return group.barrier(0.3 if group.place.is_first else 60.0)
        finally:
            enough.set()

    result = together(3, tmp_path, do)
    assert str(result[0]).startswith("rank 1 did not answer within 0.3 s")
    assert str(result[2]).startswith("rank 1 did not answer within 0.3 s")


def test_missing_ranks_are_named(tmp_path):
    with pytest.raises(BenchError, match=r"rank 1, 2 did not come within 0\.2 s"):
        join(Rank(0, 3), tmp_path, 0.2)
    with pytest.raises(BenchError, match=r"rank 0 did not come"):
        join(Rank(1, 3), tmp_path, 0.2)


def test_an_address_that_a_killed_run_left_is_not_believed(tmp_path):
    done = []
    join_later = threading.Timer(0.3, lambda: done.append(join(Rank(0, 2), tmp_path, 30)))
    with pytest.raises(BenchError):
        join(Rank(0, 2), tmp_path, 0.05)
    for left in tmp_path.glob(".meeting-*"):
        left.unlink()
    name = ".meeting-x.json"
    (tmp_path / name).write_text("{")
    join_later.start()
    group = join(Rank(1, 2), tmp_path, 30)
    join_later.join()
    assert len(done) == 1
    group.close()
    done[0].close()


def test_a_rank_that_dies_is_named_at_once(tmp_path):
    def do(group):
        if group.place.rank == 1:
            return None  # and closes
        return group.gather(1, 60.0)

    result = together(2, tmp_path, do)
    assert "rank 1 is gone" in str(result[0])
    assert "Look at what that rank printed" in str(result[0])


def test_all_are_told_which_rank_died_and_do_not_wait_for_the_slow(tmp_path):
    """Rank 1 lets itself be waited for until rank 0 has seen that rank 2 is dead."""
    seen = threading.Event()

    def do(group):
        group.barrier()  # who has not come yet takes a death for another run's end
        if group.place.rank == 2:
            return None  # and closes
        if group.place.rank == 1:
            assert seen.wait(60)
            return group.broadcast(None, 60.0)
        try:
            return group.gather(1, 60.0)
        finally:
            seen.set()

    result = together(3, tmp_path, do)
    assert "rank 2 is gone" in str(result[0])
    assert str(result[1]) == str(result[0])


def test_a_dead_rank_is_seen_without_waiting_for_it(tmp_path):
    dead, checked = threading.Event(), threading.Event()

    def do(group):
        group.check()
        group.barrier()
        if group.place.rank == 1:
            group.check()
            group.close()
            dead.set()
            return
        assert dead.wait(60)
        try:
            while True:  # until the end of the connection has come
                group.check()
        finally:
            checked.set()

    result = together(2, tmp_path, do)
    assert "rank 1 is gone" in str(result[0])
    assert checked.is_set()


def test_what_came_early_is_not_lost(tmp_path):
    """A fast rank sends the next value before the others have sent the first."""
    fast = threading.Event()

    def do(group):
        if group.place.rank == 2:
            assert fast.wait(60)
        result = [group.gather([group.place.rank, n]) for n in range(2)]
        if group.place.rank == 1:
            fast.set()
        return result

    result = together(3, tmp_path, do)
    assert result[0] == [[[rank, n] for rank in range(3)] for n in range(2)]


def test_an_address_where_nobody_or_somebody_else_answers_is_passed(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        reported = []

        def stranger():
            peer, _ = other.accept()
            with peer:
                reported.append(peer.recv(1000))

        thread = threading.Thread(target=stranger)
        thread.start()
        assert _reach("127.0.0.1", port, "token", 1) is None  # it says nothing, and hangs up
        thread.join()
        assert b"token" in reported[0]
    assert _reach("127.0.0.1", port, "token", 1) is None
    addresses = ["no such host.invalid", *_addresses()]
    assert "127.0.0.1" in addresses
    monkeypatch.setattr(ranks, "_addresses", lambda: addresses)
    assert together(2, tmp_path, lambda group: group.gather(1)) == [[1, 1], []]


def test_a_rank_that_hangs_meets_the_deadline(tmp_path):
    waiting = threading.Event()

    def do(group):
        if group.place.rank == 1:
            waiting.wait(60)
            return None
        try:
            return group.gather(1, 0.1)
        finally:
            waiting.set()

    assert "rank 1 did not answer within 0.1 s" in str(together(2, tmp_path, do)[0])
