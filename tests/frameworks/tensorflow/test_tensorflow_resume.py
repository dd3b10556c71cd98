"""Stop and resume equals never stopped: at every batch, through TensorFlow's own checkpoints."""

import json

import pytest
import tensorflow as tf

import headrace as hr
from headrace.errors import OrderError, StateMismatch
from headrace.tensorflow import Loader

from .samples import BATCH, STEPS


def numbers_of(element):
    return [tensor.numpy().tolist() for tensor in tf.nest.flatten(element)]


def augmented(data, seed):
    number = tf.io.decode_raw(tf.strings.substr(data, 0, 4), tf.int32)[0]
    return number, tf.random.stateless_uniform([2], seed)


def ahead(batches):
    return batches.map(lambda *e: e, num_parallel_calls=2).prefetch(4)


WAYS = {
    "strings": {},
    "buffer": {"elements": "buffer"},
    "blocked": {"order": "blocked", "block_bytes": None},
    "decoded": {"decode": augmented, "prefetch": 3},
    "transformed": {"transform": ahead, "prefetch": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_resume_equals_never_stopped_at_every_batch(path, tmp_path, way):
    arguments = {k: v for k, v in WAYS[way].items() if v is not None}

    def new():
        return Loader(path, BATCH, seed=11, epochs=2, **arguments)

    loader = new()
    saving = tf.train.Checkpoint(data=loader)
    whole, hashes, saved = [], [], [saving.save(tmp_path / "at-0")]
    for batch in loader.dataset():
        whole.append(values(batch))
        saved.append(saving.save(tmp_path / f"at-{len(whole)}"))
        hashes.append(loader.order_hash)
    assert len(whole) == 2 * STEPS
    resumed = new()  # one for all: it takes TensorFlow longer to build a graph than to run it
    batches = resumed.dataset()
    for at, checkpoint in enumerate(saved[:-1]):
        tf.train.Checkpoint(data=resumed).restore(checkpoint).assert_consumed()
        left = []
        for batch in batches.take(2 * STEPS - at):
            left.append(values(batch))
            assert resumed.order_hash == hashes[at + len(left) - 1]
        # One iterator goes through two epochs, so it may go further than the first run did.
        assert left == whole[at:], at


def values(batch):
    if isinstance(batch, dict):  # where the buffer's gaps lie is not part of the batch
        data = batch["data"].numpy()
        ends = zip(batch["offsets"].numpy(), batch["lengths"].numpy(), strict=True)
        return [data[at : at + n].tobytes() for at, n in ends], batch["labels"].numpy().tolist()
    return numbers_of(batch)


def test_the_state_counts_what_was_delivered_and_not_what_was_taken(path):
    loader = Loader(path, BATCH, seed=1, prefetch=4, transform=lambda d: d.prefetch(4))
    batches = iter(loader.dataset())
    for step in range(1, STEPS):
        next(batches)
        assert loader.position == step * BATCH
        assert loader.stats.batches == step


def test_a_run_goes_on_with_another_world_size(path):
    first = Loader(path, BATCH, seed=1)
    batches = iter(first)
    seen = [s for _ in range(2) for s in next(batches)[0].numpy().tolist()]
    for rank in (0, 1):
        rest = Loader(path, 8, seed=1, rank=rank, world_size=2, tail="exact")
        rest.load_state_dict(first.state_dict())
        seen += [s for data, _ in rest for s in data.numpy().tolist()]
    with hr.open(path) as store:
        assert sorted(seen) == sorted(bytes(s) for b in hr.loader(store, BATCH) for s in b)


def test_leaving_an_epoch_early_goes_on_with_the_next(path):
    loader = Loader(path, BATCH, seed=1)
    next(iter(loader.dataset()))
    assert loader.epoch == 0
    next(iter(loader.dataset()))
    assert (loader.epoch, loader.position) == (1, BATCH)


def test_only_the_newest_iterator_gets_batches(path):
    loader = Loader(path, BATCH, seed=1)
    old = iter(loader.dataset())
    next(old)
    next(iter(loader.dataset()))
    with pytest.raises(tf.errors.OpError, match="this iterator ended when a new one was made"):
        next(old)


def test_a_restored_loader_ends_the_iterators_it_had(path):
    loader = Loader(path, BATCH, seed=1)
    old = iter(loader.dataset())
    state = loader.state_dict()
    next(old)
    loader.load_state_dict(state)
    with pytest.raises(tf.errors.OpError, match="this iterator ended"):
        next(old)
    assert loader.position == 0


def train(path, checkpoint, stop_at=None, resume=False):
    """Trains three epochs of a model that depends on which sample came when."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(7)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)

    def decode(data, seed):
        number = tf.io.decode_raw(tf.strings.substr(data, 0, 4), tf.int32)[0]
        noise = tf.random.stateless_normal([2], seed)
        return tf.concat([[tf.cast(number, tf.float32) / 90], noise], 0)

    loader = Loader(path, BATCH, seed=5, epochs=None, decode=decode)
    saving = tf.train.Checkpoint(model=model, optimizer=model.optimizer, data=loader)
    if resume:
        saving.restore(checkpoint)
    positions = []

    class Saver(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
            positions.append((loader.epoch, loader.position))
            if len(positions) == stop_at:
                saving.write(checkpoint)
                self.model.stop_training = True

    total = 3 * STEPS if not resume else 3 * STEPS - resume
    model.fit(loader.dataset(), steps_per_epoch=stop_at or total, verbose=0, callbacks=[Saver()])
    return model.get_weights(), positions


@pytest.fixture(scope="module")
def never_stopped(path):
    return train(path, None)


@pytest.mark.parametrize("stop_at", [2, STEPS, STEPS + 3])
def test_fit_resumes_to_the_same_weights(path, tmp_path, stop_at, never_stopped):
    checkpoint = str(tmp_path / "checkpoint")
    whole, positions = never_stopped
    assert positions[:2] == [(0, BATCH), (0, 2 * BATCH)]
    assert len(positions) == 3 * STEPS
    stopped, until = train(path, checkpoint, stop_at=stop_at)
    assert until == positions[:stop_at]
    resumed, rest = train(path, checkpoint, resume=stop_at)
    assert rest == positions[stop_at:]
    for a, b, early in zip(whole, resumed, stopped, strict=True):
        assert (a == b).all()
        assert (a != early).any()


def test_a_checkpoint_of_other_data_is_refused(path, equal_path, tmp_path):
    saved = tf.train.Checkpoint(data=Loader(path, BATCH)).save(tmp_path / "other")
    with pytest.raises(StateMismatch):
        tf.train.Checkpoint(data=Loader(equal_path, BATCH)).restore(saved)


def test_a_checkpoint_of_another_seed_is_refused(path, tmp_path):
    saved = tf.train.Checkpoint(data=Loader(path, BATCH, seed=1)).save(tmp_path / "other")
    with pytest.raises(StateMismatch):
        tf.train.Checkpoint(data=Loader(path, BATCH, seed=2)).restore(saved)


def test_a_damaged_state_is_refused(path):
    loader = Loader(path, BATCH)
    with pytest.raises(OrderError, match="not JSON"):
        loader.deserialize(b"\x80\x04")
    state = json.loads(loader.serialize())
    del state["epoch"]
    with pytest.raises(OrderError):
        loader.deserialize(json.dumps(state))
    assert len(list(loader)) == STEPS
