"""What whoever iterates over TensorFlow's data set waited for, and that its loader is watched as others are."""

import time

import numpy as np
import pytest
import tensorflow as tf

import headrace as hr
from headrace.base.causes import Cause
from headrace.control.controller import planes
from headrace.frameworks.tensorflow.loader import Passes
from headrace.tensorflow import Loader
from tests_shared import until

from .samples import BATCH, SAMPLES, STEPS, content

WORK_S = 0.02


@pytest.fixture
def own(tmp_path):
    """A store that no other test's plane is called after."""
    hr.pack(((f"{i:05d}", content(i), i % 7) for i in range(SAMPLES)), tmp_path / "own.hr")
    return tmp_path / "own.hr"


def slowly(data):
    def sleep(data):
        time.sleep(0.05)
        return np.int64(len(data))

    return tf.ensure_shape(tf.numpy_function(sleep, [data], tf.int64), ())


def watched(path):
    return [plane for plane in planes()[0] if str(path) in plane.name]


def test_it_is_watched_from_when_it_is_iterated(own):
    loader = Loader(own, BATCH, epochs=2)
    assert not watched(own)
    batches = iter(loader.dataset())
    next(batches)
    (plane,) = watched(own)
    assert plane.enabled
    assert until(lambda: plane.consumer.batches == 1)
    assert len(list(batches)) == 2 * STEPS - 1


def test_the_wait_for_a_slow_decoder_is_decodings(own):
    loader = Loader(own, BATCH, decode=slowly, prefetch=0, epochs=2)
    for _ in loader:
        pass
    verdict = hr.explain(loader)
    assert verdict.main is Cause.DECODE, verdict
    assert verdict.share(Cause.DECODE) > 0.5
    assert verdict.stall_s == pytest.approx(loader.stats.stall_s, rel=0.01)
    assert "decoding took that time while the batch was waited for" in verdict.evidence


@pytest.mark.parametrize("taken", [2, 1])
def test_a_decoded_batch_waits_for_the_threads_that_decode_the_next(own, taken):
    with hr.open(own) as store:
        loader = hr.loader(store, BATCH)
        run = Passes(loader, 1, decodes=True)
        batches = run.batches()
        for _ in range(taken):
            next(batches)
        asked_s = time.time()
        time.sleep(0.1)
        run.delivered(asked_s, made_unix_s=asked_s + 0.01)
        batches.close()
        decoding_s = hr.explain(loader).causes[Cause.DECODE]
    assert loader.stats.stall_s >= 0.09
    decoded_s = loader.stats.stall_s if taken > 1 else 0.01
    assert decoding_s == pytest.approx(decoded_s, abs=0.02)


@pytest.mark.parametrize("decode", [None, slowly])
def test_no_wait_begins_before_the_consumer_asks(own, decode):
    loader = Loader(own, BATCH, decode=decode, epochs=2)
    for _ in loader.dataset():
        time.sleep(WORK_S)
    steps, _ = loader.stats.steps.since(0)
    assert steps["epoch"].tolist() == [0] * STEPS + [1] * STEPS
    worked_s = steps["asked_s"][1:] - steps["delivered_s"][:-1]
    assert (worked_s >= 0.9 * WORK_S).all()
    # From one epoch to the next nobody says when the work was over.
    assert loader.stats.worked_s >= 2 * (STEPS - 1) * 0.9 * WORK_S


@pytest.mark.parametrize("clock", [-3600.0, 3600.0])
def test_a_clock_that_is_set_makes_no_wait_negative_and_none_longer_than_the_step(
    own, monkeypatch, clock
):
    loader = Loader(own, BATCH)
    batches = iter(loader.dataset())
    next(batches)
    now_s = time.time
    monkeypatch.setattr("headrace.frameworks.tensorflow.loader.time.time", lambda: now_s() + clock)
    assert len(list(batches)) == STEPS - 1
    steps, _ = loader.stats.steps.since(0)
    assert len(steps) == STEPS
    assert (steps["asked_s"] <= steps["delivered_s"]).all()
    assert (steps["asked_s"][1:] >= steps["delivered_s"][:-1]).all()
    assert (steps["waited_s"] >= 0).all()


def test_each_epoch_is_told_of_and_one_that_was_left_early(own, monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    loader = Loader(own, BATCH, epochs=2)
    assert len(list(loader.dataset())) == 2 * STEPS
    said = [line.split(" | ")[:2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        [f"headrace: epoch {epoch} of {own.name}", f"{SAMPLES} samples"] for epoch in (0, 1)
    ]
    batches = iter(loader.dataset())
    next(batches)
    del batches
    told = ""

    def is_told():
        nonlocal told
        told += capsys.readouterr().err
        return bool(told)

    assert until(is_told)
    assert told.startswith(f"headrace: epoch 2 of {own.name} | {BATCH} samples")
