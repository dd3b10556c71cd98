"""Slices: equal steps, exactly once, and resume anywhere with any world size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OrderError
from headrace.order import OrderState, Shuffled, Slices, combine_hashes, order_hash

LENGTHS = st.integers(0, 300)
BATCHES = st.integers(1, 40)
WORLDS = st.integers(1, 9)
TAILS = st.sampled_from(["drop", "pad", "exact"])


def ranks(length, batch_size, world_size, tail="exact"):
    return [Slices(length, batch_size, rank, world_size, tail) for rank in range(world_size)]


def positions(rank, step, from_position=0):
    """The positions within the epoch of a rank's batch, wrapped where padded."""
    return np.arange(*rank.span(step, from_position)) % rank.length


def deliver(world, step, from_position=0):
    """The positions that all ranks take at one step, in rank order."""
    return np.concatenate([positions(rank, step, from_position) for rank in world])


@given(length=LENGTHS, batch_size=BATCHES, world_size=WORLDS, tail=TAILS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_rank_has_the_same_steps_and_the_sequence_is_global(
    length, batch_size, world_size, tail, data
):
    start = data.draw(st.integers(0, length))
    world = ranks(length, batch_size, world_size, tail)
    steps = world[0].steps(start)
    assert {rank.steps(start) for rank in world} == {steps}
    delivered = [deliver(world, step, start) for step in range(steps)]
    sequence = np.concatenate([np.empty(0, np.int64), *delivered])
    left = length - start
    full = world_size * batch_size
    expected = {"drop": left // full * full, "pad": -(-left // full) * full, "exact": left}[tail]
    # All ranks together see the epoch's positions in order, wrapped where padded.
    assert np.array_equal(sequence, np.arange(start, start + expected) % max(length, 1))
    for step in range(steps):
        sizes = [len(positions(rank, step, start)) for rank in world]
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        if tail != "exact" or step < steps - 1:
            assert set(sizes) == {batch_size}
        reached = world[0].position_after(step + 1, start)
        assert reached == min(start + (step + 1) * full, length)


@given(
    length=st.integers(1, 300),
    runs=st.lists(st.tuples(WORLDS, BATCHES, st.integers(0, 12)), min_size=3, max_size=4),
    epoch=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_a_run_resumed_with_other_world_sizes_delivers_every_sample_once(length, runs, epoch):
    """Stop anywhere, twice or more, each time with another world and batch size."""
    order = Shuffled(length, seed=8)
    state = OrderState.begin(order, "data", epoch)
    delivered = []
    runs = [*runs, (2, 7, 10**9)]  # the last run goes to the end
    for world_size, batch_size, stop_after in runs:
        state.check(order, "data")
        world = ranks(length, batch_size, world_size)
        start = state.position
        steps = min(stop_after, world[0].steps(start))
        hashes = []
        for step in range(steps):
            for rank in world:
                batch = rank.indices(order, epoch, step, start)
                hashes.append(order_hash(rank.span(step, start)[0], batch))
                delivered.append(batch)
        state = OrderState.from_dict(state.to_dict())
        state = state.delivered(world[0].position_after(steps, start), *hashes)
    whole = order.indices(epoch, 0, length)
    assert np.array_equal(np.concatenate(delivered), whole)
    assert state.position == length
    assert state.order_hash == order_hash(0, whole)


@given(length=st.integers(1, 300), batch_size=BATCHES, tail=TAILS)
@settings(max_examples=80, deadline=None)
def test_the_global_hash_is_that_of_one_rank_for_any_world_size(length, batch_size, tail):
    """Full global batches of 12 x batch_size: the same for 1, 2, 3, 4, 6 and 12 ranks."""
    order = Shuffled(length, seed=8)
    hashes = set()
    for world_size in (1, 2, 3, 4, 6, 12):
        parts = []
        for rank in ranks(length, batch_size * 12 // world_size, world_size, tail):
            for step in range(rank.steps()):
                batch = rank.indices(order, 0, step)
                parts.append(order_hash(rank.span(step)[0], batch))
        hashes.add(combine_hashes(*parts))
    assert len(hashes) == 1


def test_padding_wraps_as_often_as_needed():
    world = ranks(length=3, batch_size=4, world_size=2, tail="pad")
    assert world[0].steps() == 1
    assert [positions(rank, 0).tolist() for rank in world] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert world[1].span(0) == (4, 8)
    assert world[0].position_after(1) == 3
    order = Shuffled(3, seed=1)
    whole = order.indices(0, 0, 3)
    assert world[1].indices(order, 0, 0).tolist() == whole[[1, 2, 0, 1]].tolist()


def test_exact_shares_out_the_remainder_and_may_leave_a_rank_empty():
    world = ranks(length=10, batch_size=2, world_size=4, tail="exact")
    assert [rank.span(1) for rank in world] == [(8, 9), (9, 10), (10, 10), (10, 10)]
    assert positions(world[3], 1).shape == (0,)


def test_an_empty_rest_has_no_steps():
    for tail in ("drop", "pad", "exact"):
        assert Slices(10, 2, 0, 2, tail).steps(10) == 0
        assert Slices(0, 2, 0, 2, tail).steps() == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slices(-1, 1), "length is -1"),
        (lambda: Slices(10, 0), "batch_size is 0"),
        (lambda: Slices(10, 1, 0, 0), "world_size is 0"),
        (lambda: Slices(10, 1, 2, 2), "rank is 2, expected 0 to 1"),
        (lambda: Slices(10, 1, -1, 2), "rank is -1"),
        (lambda: Slices(10, 1, tail="keep"), "tail is 'keep', expected 'drop', 'pad' or 'exact'"),
        (lambda: Slices(10, 1).steps(11), "from_position is 11, expected 0 to 10"),
        (lambda: Slices(10, 5).span(2), "step is 2, expected 0 to 1"),
        (lambda: Slices(0, 5).span(0), "step is 0, but no step is left"),
        (lambda: Slices(10, 5).position_after(3), "steps is 3, expected 0 to 2"),
        (lambda: Slices(10, 5).indices(Shuffled(9), 0, 0), "order has 9 positions, the slices 10"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(OrderError, match=message):
        make()
