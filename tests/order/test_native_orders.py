"""The native orders give what their definitions in plain Python give."""

from hypothesis import given, settings
from hypothesis import strategies as st
from reference_order import reference_balanced, reference_blocked, reference_opportunistic

from headrace.order import Balanced, Blocked, Opportunistic

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 4)


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 9), SEEDS, EPOCHS)
@settings(max_examples=150, deadline=None)
def test_blocked(samples, block_samples, window_blocks, seed, epoch):
    order = Blocked(samples, block_samples, window_blocks, seed=seed)
    expected = reference_blocked(samples, block_samples, window_blocks, seed, epoch)
    assert order.indices(epoch, 0, samples).tolist() == expected


@given(st.integers(1, 300), st.data(), SEEDS, st.integers(0, 6), EPOCHS)
@settings(max_examples=150, deadline=None)
def test_opportunistic(samples, data, seed, epochs, epoch):
    cuts = sorted(data.draw(st.lists(st.integers(0, samples), max_size=10)))
    resident = tuple(zip(cuts[::2], cuts[1::2], strict=False))
    order = Opportunistic(samples, resident, seed=seed, epochs=epochs)
    expected = reference_opportunistic(samples, resident, seed, epochs, epoch)
    assert order.indices(epoch, 0, samples).tolist() == expected


@given(
    st.lists(st.integers(-2, 6), min_size=1, max_size=60).filter(lambda x: max(x) >= 0),
    st.integers(1, 100),
    SEEDS,
    EPOCHS,
)
@settings(max_examples=100, deadline=None)
def test_balanced(labels, length, seed, epoch):
    order = Balanced(labels, seed=seed, epoch_length=length)
    expected = reference_balanced(labels, seed, length, epoch)
    assert order.indices(epoch, 0, length).tolist() == expected
