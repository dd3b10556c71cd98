"""What whoever iterates over Grain's data set waited for, and that its loader is watched as others are."""

import time

import jax
import pytest

import headrace as hr
from headrace.base.causes import Cause
from headrace.control.controller import planes
from headrace.grain import dataset

from .decoders import number_of
from .samples import BATCH, SAMPLES, STEPS, content

WORK_S = 0.02


@pytest.fixture
def own(tmp_path):
    """A store that no other test's plane is called after."""
    hr.pack(((f"{i:05d}", content(i), i % 7) for i in range(SAMPLES)), tmp_path / "own.hr")
    return tmp_path / "own.hr"


def slowly(data):
    time.sleep(0.01)
    return number_of(data)


def watched(path):
    return [plane for plane in planes()[0] if str(path) in plane.name]


def test_it_is_watched_from_when_it_is_iterated(own):
    batches = iter(dataset(own, BATCH))
    assert not watched(own)
    next(batches)
    (plane,) = watched(own)
    assert plane.enabled
    assert len(list(batches)) == STEPS - 1
    consumer = plane.now().consumer
    assert consumer.batches == STEPS
    batches.close()


def test_workers_have_nobody_who_waits(own):
    """In a worker, which delivers a share of the batches."""
    shares = dataset(own, BATCH)
    shares.set_slice(slice(1, None, 2))
    batches = iter(shares)
    assert len(list(batches)) == STEPS // 2
    assert not watched(own)
    batches.close()


@pytest.mark.parametrize("threads", [0, 2])
def test_the_wait_for_a_slow_decoder_is_decodings(own, threads):
    batches = iter(dataset(own, BATCH, decode=slowly, threads=threads, epochs=2))
    for _ in batches:
        pass
    loader = batches._loader
    verdict = hr.explain(loader)
    assert verdict.main is Cause.DECODE
    assert verdict.share(Cause.DECODE) > 0.5
    assert verdict.stall_s == pytest.approx(loader.stats.stall_s, rel=0.01)
    steps, _ = loader.stats.steps.since(0)
    assert (steps["work_s"] >= 0.01 * steps["samples"]).all()
    assert steps["cpu_s"].sum() < steps["work_s"].sum()
    batches.close()


def test_no_wait_begins_before_the_consumer_asks(own):
    batches = iter(dataset(own, BATCH, device=jax.devices()[0], epochs=2))
    for _ in batches:
        time.sleep(WORK_S)
    stats = batches._loader.stats
    steps, _ = stats.steps.since(0)
    assert steps["epoch"].tolist() == [0] * STEPS + [1] * STEPS
    assert (steps["asked_s"][1:] - steps["delivered_s"][:-1] >= WORK_S).all()
    assert stats.worked_s >= 2 * STEPS * WORK_S
    batches.close()


def test_each_epoch_is_told_of_and_one_that_was_left_early(own, monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_VERDICT", "1")
    batches = iter(dataset(own, BATCH, epochs=None))
    for _ in range(2 * STEPS + 1):
        next(batches)
    batches.close()
    said = [line.split(" | ")[:2] for line in capsys.readouterr().err.splitlines()]
    whole = [[f"headrace: epoch {epoch} of {own.name}", f"{SAMPLES} samples"] for epoch in (0, 1)]
    assert said == [*whole, [f"headrace: epoch 2 of {own.name}", f"{BATCH} samples"]]
