"""Mixtures: exact proportions at every prefix, each source in its own order, any number of sources."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OrderError, StateMismatch
from headrace.order import (
    Balanced,
    Mixed,
    OrderState,
    Sequential,
    Shuffled,
    combine_hashes,
    order_hash,
)
from headrace.order.mixed import pattern_of
from headrace.store.mixture import whole_parts

ORDERS = (Shuffled(100, seed=1), Shuffled(35, seed=2), Shuffled(7, seed=3))


def errors_of(parts, numbers):
    """The largest distance of each source's count from its exact share, over all prefixes."""
    positions = np.arange(1, len(numbers) + 1)
    for source, part in enumerate(parts):
        counts = np.cumsum(numbers == source)
        yield np.abs(counts - positions * (part / sum(parts))).max()


@pytest.mark.parametrize(
    ("parts", "error_max"),
    [((7, 3), 0.5), ((5, 3, 2), 0.8), ((1,) * 10, 0.95), ((1, 1, 2, 3, 5, 8, 13, 21), 1.0)],
)
def test_counts_are_the_exact_shares_at_every_prefix(parts, error_max):
    pattern = pattern_of(parts)
    assert pattern.error_max <= error_max
    assert max(errors_of(parts, pattern.sources(0, 5000))) <= pattern.error_max + 1e-9


@given(weights=st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=60))
@settings(max_examples=40, deadline=None)
def test_no_proportions_are_kept_worse_than_to_one_sample(weights):
    parts = whole_parts(weights)
    pattern = pattern_of(parts)
    assert pattern.error_max < 1.25
    assert max(errors_of(parts, pattern.sources(0, 3000))) <= pattern.error_max + 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_proportions_of_one_denominator_are_kept_to_less_than_one_sample(seed):
    """Also where no tree of pairs does it; the pattern goes on through its periods as it began."""
    rng = np.random.default_rng(seed)
    parts = tuple(rng.integers(1, 1000 if seed % 2 else 50, 15 + 5 * seed).tolist())
    pattern, total = pattern_of(parts), sum(parts)
    assert pattern.error_max < 1
    numbers = pattern.sources(0, 2 * total + 5000)
    assert max(errors_of(parts, numbers)) <= pattern.error_max + 1e-9
    for position in (0, 1, 4095, 4096, total - 1, total, total + 4097, 2 * total):
        assert (
            pattern.counts(position)
            == np.bincount(numbers[:position], minlength=len(parts)).tolist()
        )
    far = 10**12 // total * total
    assert (pattern.sources(far + 3, far + 900) == numbers[3:900]).all()
    assert pattern.counts(far) == [far // total * part for part in parts]


def test_far_positions_follow_the_proportions_as_near_ones_do():
    parts = whole_parts([0.5, 2**0.5 / 3, 1e-3, 1 / 7])
    pattern, total = pattern_of(parts), sum(parts)
    for position in (10**12 + 7, 2**47):
        numbers = pattern.sources(position, position + 4000)
        before, after = pattern.counts(position), pattern.counts(position + 4000)
        counted = np.bincount(numbers, minlength=4).tolist()
        assert counted == [b - a for a, b in zip(before, after, strict=True)]
        for count, part in zip(before, parts, strict=True):
            assert abs(count - Fraction(position * part, total)) <= Fraction(pattern.error_max)


def test_ten_million_draws_have_the_ratios_asked_for():
    """To 10^-6, as the proportions were given and not as they were rounded."""
    weights = [0.61803398875, 0.2, 0.1, 0.05, 0.03196601125]
    numbers = pattern_of(whole_parts(weights)).sources(0, 10_000_000)
    ratios = np.bincount(numbers) / 10_000_000
    assert np.abs(ratios - weights).max() < 1e-6


def test_decimals_are_taken_as_they_are_written():
    assert whole_parts([0.7, 0.3]) == (7, 3)
    assert whole_parts([70_000, 30_000]) == (7, 3)
    assert whole_parts([1 / 3, 1 / 3, 1 / 3]) == (1, 1, 1)
    assert sum(whole_parts([2**0.5, 1.0])) == 2**30


@pytest.mark.parametrize("stop", ["first", "last", 500])
@pytest.mark.parametrize("block", [1, 5])
def test_each_source_comes_in_its_own_order_through_all_epochs(stop, block):
    mixed = Mixed(ORDERS, ((0, (7, 2, 1)),), stop=stop, block=block)
    drawn = np.concatenate([mixed.indices(epoch, 0, mixed.length) for epoch in range(4)])
    sources = mixed.source_of(drawn)
    for number, order in enumerate(ORDERS):
        own = drawn[sources == number] - [0, 100, 135][number]
        epochs = -(-len(own) // order.length)
        wanted = np.concatenate([order.indices(e, 0, order.length) for e in range(epochs)])
        assert np.array_equal(own, wanted[: len(own)])
    if block > 1:
        assert all(len(set(batch)) == 1 for batch in sources.reshape(-1, block).tolist())


def test_an_epoch_ends_with_the_first_or_the_last_source_that_has_given_all():
    """Counted by hand: sample after sample until the source is exhausted."""
    numbers = pattern_of((7, 2, 1)).sources(0, 5000).tolist()
    for stop, repeats, wanted in (
        ("first", (1, 1, 1), any), ("last", (1, 1, 1), all), ("first", (2, 9, 9), any)
    ):  # fmt: skip
        left = Counter({i: order.length * repeats[i] for i, order in enumerate(ORDERS)})
        for length, number in enumerate(numbers, 1):  # noqa: B007 - used behind the loop
            left[number] -= 1
            if wanted(left[i] <= 0 for i in range(3)):
                break
        assert Mixed(ORDERS, ((0, (7, 2, 1)),), stop=stop, repeats=repeats).length == length


def test_counts_are_delivered_to_the_sample():
    mixed = Mixed(ORDERS, ((0, (1234, 777, 1)),), stop=2012)
    drawn = mixed.source_of(mixed.indices(0, 0, mixed.length))
    assert np.bincount(drawn).tolist() == [1234, 777, 1]


def test_a_schedule_changes_proportions_at_its_steps():
    mixed = Mixed(ORDERS, ((0, (1, 0, 0)), (50, (0, 1, 1)), (150, (1, 1, 0))), stop=250)
    sources = mixed.source_of(mixed.indices(0, 0, 250))
    counts = [
        np.bincount(sources[a:b], minlength=3).tolist() for a, b in ((0, 50), (50, 150), (150, 250))
    ]
    assert counts == [[50, 0, 0], [0, 50, 50], [50, 50, 0]]
    assert mixed.counts(170) == [60, 60, 50]


def test_the_hash_of_an_epoch_does_not_depend_on_how_it_is_cut():
    mixed = Mixed(ORDERS, ((0, (7, 2, 1)),), stop=100_000)
    whole = order_hash(0, mixed.indices(1, 0, 100_000))
    cuts = [0, 1, 77, 8190, 8193, 30_000, 30_001, 99_999, 100_000]
    parts = [order_hash(a, mixed.indices(1, a, b)) for a, b in pairwise(cuts)]
    assert combine_hashes(*parts) == whole


@pytest.mark.parametrize("block", [1, 4])
def test_new_proportions_go_on_with_the_samples_that_come_next(block):
    """A source's own order has no gap and no repetition where the proportions change."""
    old = Mixed(ORDERS, ((0, (7, 2, 1)),), stop="never", block=block)
    new = Mixed(ORDERS, ((0, (1, 1, 3)),), stop="never", block=block)
    begun = new.resumed(1, 0, old.basis(0, 202))
    drawn = np.concatenate([old.indices(0, 0, 202), begun.indices(1, 0, 200)])
    sources = begun.source_of(drawn)
    for number, order in enumerate(ORDERS):
        own = drawn[sources == number] - [0, 100, 135][number]
        wanted = np.concatenate([order.indices(e, 0, order.length) for e in range(30)])
        assert np.array_equal(own, wanted[: len(own)])
    again = new.resumed(1, 120, begun.basis(1, 120))
    assert np.array_equal(again.indices(1, 120, 200), begun.indices(1, 120, 200))
    assert again.digest() == new.digest()


def test_a_state_keeps_what_each_source_has_given():
    mixed = Mixed(ORDERS, ((0, (7, 2, 1)),), seed=5)
    state = OrderState(
        seed=5, epoch=2, position=30, fingerprint="f", order_digest=mixed.digest(),
        basis=mixed.basis(2, 30),
    )  # fmt: skip
    loaded = OrderState.from_dict(state.to_dict())
    assert loaded == state
    assert mixed.resumed(2, 30, loaded.basis).drawn_at(0 + 2, 0) == mixed.drawn_at(2, 0)
    assert "basis" not in OrderState.begin(ORDERS[0], "f").to_dict()


def test_new_proportions_are_no_way_to_go_on_in_other_orders_of_the_sources():
    old = Mixed(ORDERS, ((0, (7, 2, 1)),), seed=5)
    state = OrderState(
        seed=5, epoch=2, position=30, fingerprint="f", order_digest=old.digest(),
        basis=old.basis(2, 30),
    ).to_dict()  # fmt: skip
    assert Mixed(ORDERS, ((0, (1, 1, 3)),), seed=5).continue_from(state)["epoch"] == 3
    others = [Shuffled(ORDERS[0].length, seed=99), *ORDERS[1:]]
    with pytest.raises(StateMismatch, match="in other orders"):
        Mixed(others, ((0, (1, 1, 3)),), seed=5).continue_from(state)


@pytest.mark.parametrize("basis", [(), (1, 2), (0, 0, 0)])
def test_a_state_of_another_order_is_refused(basis):
    with pytest.raises(StateMismatch):
        Mixed(ORDERS, ((0, (7, 2, 1)),)).resumed(0, 30, basis)
    with pytest.raises(StateMismatch, match="mixture"):
        ORDERS[0].resumed(0, 0, (1, 2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: whole_parts([0.5, -0.1]), "a proportion is -0.1, expected a finite number"),
        (lambda: whole_parts([float("nan")]), "a proportion is nan"),
        (lambda: whole_parts([0, 0]), "all 2 proportions are 0"),
        (lambda: whole_parts([1.0, 1e-12]), "expected 0 or at least 1e-9"),
        (
            lambda: Mixed(ORDERS, ((0, (1, 2)),)),
            r"proportions from 0 on are \(1, 2\) for 3 sources",
        ),
        (lambda: Mixed(ORDERS, ((5, (1, 2, 3)),)), "phases begin at"),
        (lambda: Mixed(ORDERS, ((0, (1, 1, 1)),), stop="soon"), "stop is 'soon'"),
        (lambda: Mixed(ORDERS, ((0, (1, 1, 0)),), stop="last"), "source 2 is never exhausted"),
        (lambda: Mixed(ORDERS, ((0, (1, 1, 1)),), block=8), "no whole batch of 8 samples"),
        (lambda: Mixed(ORDERS, ((0, (1, 1, 1)),), stop=30, block=8), "expected whole batches of 8"),
        (lambda: Mixed((), ()), "number of sources is 0"),
    ],
)
def test_impossible_mixtures_are_refused(make, message):
    with pytest.raises(OrderError, match=message):
        make()


def test_sources_may_have_any_order():
    labels = np.arange(40) % 4
    mixed = Mixed((Sequential(10), Balanced(labels, seed=1)), ((0, (1, 1)),), stop=80)
    drawn = mixed.indices(0, 0, 80)
    sources = mixed.source_of(drawn)
    assert drawn[sources == 0].tolist() == [*range(10)] * 4
    assert np.bincount(labels[drawn[sources == 1] - 10]).tolist() == [10] * 4
