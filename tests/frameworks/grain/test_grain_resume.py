"""Stop and resume equals never stopped: at every batch, as Grain's own iterators have it."""

import gc
import json
import threading
import weakref

import grain
import pytest

import headrace as hr
from headrace.errors import OrderError, StateMismatch
from headrace.grain import dataset
from tests_shared import own_bytes, threads, until

from .decoders import number_of
from .samples import BATCH, SAMPLES, STEPS


def values(batch):
    return batch["indices"].tolist(), batch["labels"].tolist()


WAYS = {
    "buffer": {},
    "blocked": {"order": "blocked"},
    "decoded": {"decode": number_of},
}


def prefetched(batches):
    return grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrap", [iter, lambda d: iter(prefetched(d))], ids=["plain", "prefetched"])
def test_resume_equals_never_stopped_at_every_batch(path, way, wrap):
    batches = dataset(path, BATCH, seed=11, epochs=3, **WAYS[way])
    it = wrap(batches)
    states, whole = [it.get_state()], []
    for batch in it:
        whole.append(values(batch))
        states.append(it.get_state())
    assert len(whole) == 3 * STEPS
    for at, state in enumerate(states):
        resumed = wrap(batches)
        resumed.set_state(json.loads(json.dumps(state)))
        assert [values(batch) for batch in resumed] == whole[at:], at
        resumed.close()


def test_grains_own_check_of_checkpoints_passes(path):
    batches = dataset(path, BATCH, seed=11, epochs=2, decode=number_of)
    grain.experimental.assert_equal_output_after_checkpoint(batches)


def test_an_iterator_may_go_back(path):
    it = iter(dataset(path, BATCH, seed=11))
    state = it.get_state()
    first = [values(batch) for batch in it]
    it.set_state(state)
    assert [values(batch) for batch in it] == first


def test_grains_checkpoint_handler_saves_and_restores(path, tmp_path):
    from etils import epath

    handler = grain.checkpoint.CheckpointHandler()
    batches = dataset(path, BATCH, seed=11)
    it = iter(batches)
    next(it)
    handler.save(epath.Path(tmp_path), it)
    rest = [values(batch) for batch in it]
    restored = handler.restore(epath.Path(tmp_path), iter(batches))
    assert [values(batch) for batch in restored] == rest
    assert len(rest) == STEPS - 1


def test_a_run_goes_on_with_another_world_size(path):
    first = iter(dataset(path, BATCH, seed=1))
    seen = [i for _ in range(2) for i in next(first)["indices"].tolist()]
    for rank in (0, 1):
        rest = iter(dataset(path, 8, seed=1, rank=rank, world_size=2, tail="exact"))
        rest.set_state(first.get_state())
        seen += [i for batch in rest for i in batch["indices"].tolist()]
    assert sorted(seen) == list(range(SAMPLES))


def test_workers_deliver_and_resume_in_the_same_order(path):
    """Two workers share three batches an epoch: their turns cross its end."""
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    batches = dataset(path, 20, seed=11, epochs=2, decode=number_of)
    whole = [values(batch) for batch in batches]
    assert len(whole) == 6
    it = iter(batches.mp_prefetch(options))
    begun = [values(next(it))]  # the second worker's state is still its beginning
    state = json.loads(json.dumps(it.get_state()))
    it.close()
    resumed = iter(batches.mp_prefetch(options))
    resumed.set_state(state)
    rest = [values(batch) for batch in resumed]
    resumed.close()
    assert begun + rest == whole


def test_shares_take_turns_at_every_state(path):
    """The same without processes: each share resumes at each of its batches."""
    whole = [values(b) for b in dataset(path, BATCH, seed=11, epochs=3)]
    for workers in (2, 3, 5, 7):
        for first in range(workers):
            share = dataset(path, BATCH, seed=11, epochs=3)
            share.set_slice(slice(first, None, workers))
            it = iter(share)
            states, own = [it.get_state()], []
            for batch in it:
                own.append(values(batch))
                states.append(it.get_state())
            assert own == whole[first::workers]
            for at, state in enumerate(states):
                resumed = iter(share)
                resumed.set_state(state)
                assert [values(batch) for batch in resumed] == own[at:]


def test_states_of_others_are_refused(path, equal_path):
    state = iter(dataset(path, BATCH, seed=1)).get_state()
    with pytest.raises(StateMismatch):
        iter(dataset(equal_path, BATCH, seed=1)).set_state(state)
    with pytest.raises(StateMismatch):
        iter(dataset(path, BATCH, seed=2)).set_state(state)
    damaged = {k: v for k, v in state.items() if k != "epoch"}
    with pytest.raises(OrderError):
        iter(dataset(path, BATCH, seed=1)).set_state(damaged)
    share = dataset(path, BATCH, seed=1)
    share.set_slice(slice(1, None, 2))
    with pytest.raises(OrderError, match="worker 1 of 2"):
        iter(share).set_state({**state, "step": 2})


def decoding():
    """Decoding threads of this process, whoever they work for."""
    return sum("headrace-decode" in thread.name for thread in threading.enumerate())


def test_a_closed_iterator_leaves_no_threads(path):
    rounds = 10
    before = decoding()
    for i in range(1 + rounds):
        it = iter(dataset(path, BATCH, decode=number_of, threads=3))
        next(it)
        it.close()
        with pytest.raises(ValueError, match="closed iterator"):
            next(it)
        if i == 0:
            before_all = threads()
    assert decoding() <= before  # those that other tests dropped may have ended meanwhile
    # Grain and JAX begin threads of their own when they like: one left by each iterator would be more.
    assert until(lambda: threads() < before_all + rounds)


def test_an_iterator_that_nobody_closed_ends(path):
    it = iter(dataset(path, BATCH, decode=number_of, threads=3))
    next(it)
    assert decoding()
    del it
    gc.collect()
    until(lambda: not decoding())
    assert not decoding()


def test_the_collector_may_drop_an_iterator_while_a_thread_holds_the_lock_of_threading(path):
    """Where the process once stood still: a decoding thread cannot end without that lock."""
    it = iter(dataset(path, BATCH, decode=number_of, threads=3))
    next(it)
    dropped = weakref.ref(it)
    it.itself = it  # only the collector ends it
    del it
    with threading._shutdown_locks_lock:
        gc.collect()
    until(lambda: dropped() is None)
    assert dropped() is None


def test_memory_stays_flat_over_many_epochs(equal_path):
    it = iter(dataset(equal_path, BATCH, epochs=50))
    sizes, batches = [], 0
    for batch in it:
        batches += 1
        del batch
        if batches % STEPS == 0:
            sizes.append(own_bytes())
    assert batches == 50 * STEPS
    assert max(sizes[25:]) < sizes[10] + (8 << 20)
    with hr.open(equal_path) as store:
        assert len(store) == SAMPLES
