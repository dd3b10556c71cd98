"""Keys that do something, and those that say that they do nothing."""

import time
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.dataset_files import find_files, generate
from headrace.bench.engines import Delivered
from headrace.bench.engines import native as preprocessing
from headrace.bench.session import notes_of
from headrace.bench.values import TimeDistribution
from headrace.errors import BenchError, SourceError


def loaded(*overrides, workload="unet3d_h100"):
    given = [f"++workload.{each}" for each in overrides]
    return load_workload(parse_command_line([f"workload={workload}", *given]))


@pytest.mark.parametrize(
    ("engine", "overrides", "message"),
    [
        ("headrace", ["reader.shuffle_size=2"], "over the whole data set"),
        ("torch", ["reader.shuffle_size=2"], "over the whole data set"),
        ("tensorflow", ["reader.shuffle_size=2"], "tfrecord files alone"),
        ("tensorflow", ["reader.shuffle_size=2", "dataset.format=tfrecord"], None),
        ("headrace", ["reader.transfer_size=2"], "as a whole"),
        ("headrace", ["reader.computation_threads=2"], "nothing is computed"),
        ("tensorflow", ["reader.computation_threads=2"], None),
        ("headrace", ["reader.pin_memory=True"], "not pinned"),
        ("torch", ["reader.pin_memory=True"], None),
        ("headrace", ["reader.preprocess_time=1"], None),
        ("custom:a:B", ["reader.preprocess_time=1"], "left to the engine"),
        ("headrace", ["reader.write_threads=2"], "nothing is generated"),
        ("headrace", ["reader.write_threads=2", "workflow.generate_data=True"], None),
        ("headrace", ["dataset.data_gen_method=numpy"], "own generator"),
        ("headrace", ["dataset.listing_validation_interval=2"], "without dataset.skip_listing"),
        ("headrace", ["dataset.listing_validation_interval=2", "dataset.skip_listing=True"], None),
        ("headrace", ["checkpoint.type=all_ranks"], "follows from model.parallelism"),
        ("headrace", ["checkpoint.recovery_rank_shift=True"], "runs of checkpoints alone"),
        ("headrace", ["checkpoint.epochs_between_checkpoints=2"], None),
        ("headrace", ["checkpoint.epochs_between_checkpoints=2",
                      "checkpoint.steps_between_checkpoints=9"], "says when they are written"),
    ],
)  # fmt: skip
def test_a_key_without_effect_says_so(engine, overrides, message):
    key = overrides[0].split("=")[0]
    of_key = [n for n in notes_of(loaded(f"reader.engine={engine}", *overrides)) if key in n]
    if message is None:
        assert not of_key
    else:
        assert len(of_key) == 1
        assert message in of_key[0]
        assert overrides[0] in of_key[0]  # where it was given


def test_skip_listing_names_files_and_looks_for_some(tmp_path):
    spec = loaded(
        "dataset.skip_listing=True", "dataset.listing_validation_interval=3",
        "dataset.num_files_train=8", "dataset.record_length_bytes=100",
        "dataset.record_length_bytes_stdev=0", f"dataset.data_folder={tmp_path}",
    )  # fmt: skip
    assert spec.listing_interval == 3
    generate(spec.workload.dataset)
    listed = find_files(spec.workload.dataset, "train")
    assert find_files(spec.workload.dataset, "train", 3) == listed
    (tmp_path / "train/stray.npz").touch()
    assert find_files(spec.workload.dataset, "train", 3) == listed
    for number, result in ((3, True), (7, True), (4, False)):
        path = Path(listed[number])
        away = path.rename(tmp_path / "away")
        if result:
            with pytest.raises(SourceError, match="skip_listing"):
                find_files(spec.workload.dataset, "train", 3)
        else:
            find_files(spec.workload.dataset, "train", 3)
        away.rename(path)


class Batches:
    def __init__(self, fails_at=None):
        self.fails_at, self.given, self.closed = fails_at, 0, False

    def next(self):
        if self.given == self.fails_at:
            raise BenchError("file 7 cannot be read")
        self.given += 1
        return Delivered(4, 10)

    def close(self):
        self.closed = True


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def preprocessed(monkeypatch, source, workers):
    clock = Clock()
    monkeypatch.setattr(preprocessing, "time", clock)
    times = TimeDistribution("constant", (0.001,))
    generated = preprocessing._Preprocessed(source, 4, workers, times, np.random.default_rng(0))
    return generated, clock


def test_a_batch_takes_the_time_of_its_samples(monkeypatch):
    """Two workers take the first two batches at once: both are there after 4 ms."""
    source = Batches()
    generated, clock = preprocessed(monkeypatch, source, 2)
    while source.given < 2 or generated._done.qsize() < 2:  # before the clock moves
        time.sleep(0.001)
    for expected_s in (0.004, 0.004):
        assert generated.next() == Delivered(4, 10)
        assert clock.now_s == pytest.approx(100 + expected_s)
    generated.close()
    assert source.closed


def test_what_the_engine_raises_comes_through(monkeypatch):
    generated, _ = preprocessed(monkeypatch, Batches(fails_at=1), 1)
    generated.next()
    with pytest.raises(BenchError, match="file 7"):
        generated.next()
    generated.close()
