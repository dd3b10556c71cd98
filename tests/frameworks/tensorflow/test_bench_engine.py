"""The benchmark's engine tensorflow: whole runs, what it reads, and what it says when it cannot."""

import pytest

from headrace.bench.run import SessionOptions
from headrace.bench.session import run_session
from headrace.errors import BenchError

SAMPLES, SAMPLE_BYTES = 32, 4096


@pytest.fixture
def words(tmp_path):
    def make(*overrides):
        return [
            "workload=cosmoflow_h100", "++workload.reader.engine=tensorflow",
            "++workload.workflow.generate_data=True", "++workload.dataset.num_files_train=8",
            "++workload.dataset.num_samples_per_file=4",
            f"++workload.dataset.record_length_bytes={SAMPLE_BYTES}",
            "++workload.dataset.record_length_bytes_stdev=0", "++workload.reader.batch_size=4",
            "++workload.train.computation_time=0.001", "++workload.train.epochs=2",
            f"++workload.dataset.data_folder={tmp_path / 'data'}",
            f"++hydra.run.dir={tmp_path / 'out'}", *overrides,
        ]  # fmt: skip

    return make


@pytest.mark.parametrize("format_name", ["tfrecord", "npz", "npy", "indexed_binary"])
@pytest.mark.parametrize("accelerators", [1, 2])
def test_every_sample_is_read_in_every_epoch(words, format_name, accelerators):
    report = run_session(
        words(
            f"++workload.dataset.format={format_name}", "++workload.reader.computation_threads=2"
        ),
        SessionOptions(accelerators=accelerators),
    )
    own = report.summary["headrace"]
    assert own["engine"] == "tensorflow"
    assert own["bytes"] == 2 * SAMPLES * SAMPLE_BYTES
    assert len(report.summary["metric"]["train_au_percentage"]) == 2


def test_fewer_files_than_accelerators_are_shared(words):
    report = run_session(
        words("++workload.dataset.num_files_train=2", "++workload.dataset.num_samples_per_file=16"),
        SessionOptions(accelerators=4),
    )
    assert report.summary["headrace"]["bytes"] == 2 * SAMPLES * SAMPLE_BYTES


@pytest.mark.parametrize("format_name", ["tfrecord", "npz"])
def test_preprocessing_takes_its_time(words, format_name):
    """8 steps of 4 samples, 20 ms each, by one thread: the epochs take that long at least."""
    report = run_session(words(
        f"++workload.dataset.format={format_name}", "++workload.reader.preprocess_time=0.02",
        "++workload.train.epochs=1", "++workload.reader.computation_threads=1",
    ))  # fmt: skip
    assert report.summary["headrace"]["batch_wait_s"]["mean"] > 0.02


def test_a_damaged_file_is_named(words, tmp_path):
    run_session(words("++workload.workflow.train=False"))
    damaged = sorted((tmp_path / "data/train").glob("*.tfrecord"))[3]
    data = bytearray(damaged.read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(BenchError, match=r"tf\.data failed: .*corrupted record"):
        run_session(words("++workload.workflow.generate_data=False"))
