"""DLIO's configuration: what is honoured, what is refused, and how it is said."""

import numpy as np
import pytest

from headrace.bench.config import load_workload, parse_command_line
from headrace.bench.schema import ALIASES, KEYS
from headrace.bench.values import TimeDistribution
from headrace.errors import WorkloadError


@pytest.fixture
def own(tmp_path):
    """Writes a workload of the user's and loads it with overrides."""
    folder = tmp_path / "conf" / "workload"
    folder.mkdir(parents=True)

    def load(text, *overrides):
        (folder / "mine.yaml").write_text(text)
        words = ["workload=mine", *overrides, f"--config-dir={tmp_path / 'conf'}"]
        return load_workload(parse_command_line(words))

    return load


def refused(load, *args):
    with pytest.raises(WorkloadError) as caught:
        load(*args)
    return str(caught.value)


def test_overrides_win_in_the_order_given(own):
    loaded = own(
        "reader:\n  batch_size: 2\n  sample_shuffle: seed\n",
        "++workload.reader.batch_size=8",
        "workload.reader.batch_size=9",
        "+workload.train.epochs=3",
        "~workload.reader.sample_shuffle",
    )
    assert loaded.workload.reader.batch_size == 9
    assert loaded.workload.reader.sample_shuffle == "off"
    assert loaded.workload.train.epochs == 3
    assert loaded.document == {"reader": {"batch_size": 9}, "train": {"epochs": 3}}


def test_hydra_words_are_understood():
    line = parse_command_line(
        ["workload=a", "--config-dir", "D", "++hydra.run.dir=/r", "++hydra.output_subdir=dlio_config",
         "++workload.train.epochs=2", "hydra.job.chdir=False"]
    )  # fmt: skip
    assert (line.workload, line.config_dir, line.run_dir) == ("a", "D", "/r")
    assert line.output_subdir == "dlio_config"
    assert line.task_overrides == ("workload=a", "++workload.train.epochs=2")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("-m", "run the command once for each value"),
        ("--config-name=x", "workload=NAME"),
        ("++reader.batch_size=3", "did you mean ++workload.reader.batch_size=3?"),
        ("num_files_train=3", "did you mean ++workload.dataset.num_files_train=3?"),
        ("hydra.launcher=slurm", "only hydra.run.dir"),
        ("unet3d_h100", "expected KEY=VALUE such as workload=unet3d_h100"),
        ("~workload", "needs a workload"),
        ("--frobnicate", "not known"),
    ],
)
def test_words_that_make_no_sense_are_errors(word, message):
    with pytest.raises(WorkloadError, match=message.replace("?", r"\?").replace("+", r"\+")):
        parse_command_line([word])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train:\n  epochs:\n    foo: 3\n", "train.epochs.foo"),
        ("dataset:\n  hdf5:\n    chunk_dims:\n      x: [1]\n", "dataset.hdf5.chunk_dims.x"),
        ("framework:\n  name: pytorch\n", "framework.name"),
    ],
)
def test_a_key_has_no_keys_below_it(own, text, key):
    with pytest.raises(
        WorkloadError, match=rf"{key} is not known; did you mean {key.rpartition('.')[0]}"
    ):
        own(text)
    with pytest.raises(WorkloadError, match=f"{key} is not known"):
        own("", f"++workload.{key}=3")


def test_unknown_keys_name_file_line_and_what_was_meant(own):
    message = refused(own, "framework: pytorch\nreader:\n  batch_sise: 3\ntrian:\n  epochs: 2\n")
    assert "mine.yaml:3: reader.batch_sise is not known; did you mean reader.batch_size?" in message
    assert "mine.yaml:5: trian.epochs is not known; did you mean train.epochs?" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  epochs: 2.5", "mine.yaml:2: train.epochs is 2.5, expected a whole number of at least 1"),
        ("train:\n  epochs: true", "expected a whole number"),
        ("train:\n  computation_time: fast", "expected a number of at least 0 (seconds)"),
        ("train:\n  computation_time: -1", "expected a number of at least 0"),
        ("train:\n  computation_time: {type: normal, mean: 1}", "for the type normal exactly mean, stdev"),
        ("train:\n  computation_time: {type: cauchy}", "a type of normal"),
        ("train:\n  computation_time: .nan", "expected a number"),
        ("reader:\n  file_shuffle: sometimes", "one of off, seed, random"),
        ("reader:\n  read_type: memory", "says nothing about storage"),
        ("dataset:\n  format: zarr", "expected one of tfrecord"),
        ("dataset:\n  format: npz\n  compression: zstd", "mine.yaml:3: dataset.compression is 'zstd'"),
        ("dataset:\n  record_dims: [4, x]", "expected a list, each a whole number"),
        ("dataset:\n  enable_chunking: true", "does nothing with it"),
        ("dataset:\n  parquet:\n    columns: [{name: a, dtyp: int8}]", "columns.dtyp is unknown"),
        ("metric:\n  au: 90", "at most 1"),
        ("reader:\n  reader_classname: a.b", "custom:MODULE:CLASS"),
        ("dataset:\n  data_folder: ${oc.env:HOME}", "interpolation"),
        ("defaults: [base]", "files are not composed"),
        ("train:\n  epochs: 1\n  epochs: 2", "mine.yaml:3: train.epochs stands there twice"),
        ("- 1", "expected sections"),
        ("a: [", "is no YAML"),
        ("train:\n  computation_time_stdev: 0.1", "train.computation_time is missing"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_errors(own, text, message):
    assert message in refused(own, text)


def test_all_problems_are_told_at_once(own):
    message = refused(own, "train: {epochs: 0}\nmetric: {au: 2}", "++workload.reader.batch_size=0")
    assert len(message.splitlines()) == 3
    assert "command line: ++workload.reader.batch_size=0" in message


def test_traps_are_honoured_and_told(own):
    loaded = own(
        "model: {model_size: 99}\ndataset: {record_length: 10}\ndata_reader: {batch_size: 3}"
    )
    assert loaded.workload.model.model_size_bytes == 99
    assert loaded.workload.dataset.record_length_bytes == 10
    assert loaded.workload.reader.batch_size == 3
    assert len(loaded.notes) == 2


def test_bare_off_means_off_and_exponents_are_numbers(own):
    loaded = own("reader: {sample_shuffle: off}\ntrain: {computation_time: 1e-3}",
                 "++workload.reader.file_shuffle=off")  # fmt: skip
    assert (loaded.workload.reader.sample_shuffle, loaded.workload.reader.file_shuffle) == (
        "off",
        "off",
    )
    assert loaded.workload.train.computation_time.mean_s == 0.001


def test_storage_root_is_joined_as_in_dlio(own):
    text = "storage: {storage_root: /mnt/x}\ndataset: {data_folder: data/a/}"
    assert own(text).workload.dataset.data_folder == "/mnt/x/data/a"
    assert own(text, "++workload.dataset.data_folder=/b").workload.dataset.data_folder == "/b"


def test_free_mappings_are_kept(own):
    loaded = own("storage: {storage_type: s3, storage_root: b, storage_options: {endpoint_url: 'http://x'}}",
                 "++workload.storage.storage_options.region=eu")  # fmt: skip
    assert loaded.workload.storage.storage_options == {"endpoint_url": "http://x", "region": "eu"}


def test_a_file_can_be_named_itself(tmp_path):
    (tmp_path / "w.yaml").write_text("train: {epochs: 7}")
    assert (
        load_workload(parse_command_line([f"workload={tmp_path}/w.yaml"])).workload.train.epochs
        == 7
    )
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_workload(parse_command_line([f"workload={tmp_path}/none.yaml"]))


def test_a_misspelt_workload_is_told_the_right_one(tmp_path):
    with pytest.raises(WorkloadError, match="Did you mean unet3d_h100"):
        load_workload(parse_command_line(["workload=unet3d_h10"]))
    with pytest.raises(WorkloadError, match="is no folder"):
        load_workload(parse_command_line(["workload=default", f"--config-dir={tmp_path}/none"]))


@pytest.mark.parametrize(
    ("given", "kind", "mean"),
    [
        ("{mean: 2}", "constant", 2),
        ("{mean: 2, stdev: 0.5}", "normal", 2),
        ("{type: uniform, min: 1, max: 3}", "uniform", 2),
        ("{type: gamma, shape: 4, scale: 0.5}", "gamma", 2),
        ("{type: exponential, scale: 2}", "exponential", 2),
        ("{type: poisson, lam: 2}", "poisson", 2),
    ],
)
def test_time_distributions_are_dlios(own, given, kind, mean):
    time = own(f"train:\n  computation_time: {given}").workload.train.computation_time
    assert (time.kind, time.mean_s) == (kind, mean)
    drawn = time.draw(np.random.default_rng(1), 4000)
    assert drawn.min() >= 0
    assert abs(drawn.mean() - mean) < 0.15
    assert kind == "constant" or drawn.std() > 0.1


def test_one_part_of_a_distribution_is_changed(own):
    """It once stood for the whole: a scale of 0.2 became a constant time."""
    text = "train:\n  computation_time: {type: gamma, shape: 4, scale: 0.1}"
    time = own(text, "++workload.train.computation_time.scale=0.2").workload.train.computation_time
    assert time == TimeDistribution("gamma", (4.0, 0.2))
    message = refused(own, text, "++workload.train.computation_time.width=0.2")
    assert "for the type gamma exactly shape, scale" in message


def test_stdev_keys_make_normal_distributions(own):
    train = own("train: {computation_time: 2, computation_time_stdev: 0.5}").workload.train
    assert train.computation_time == TimeDistribution("normal", (2.0, 0.5))


def test_every_key_has_a_fate():
    for name, key in KEYS.items():
        assert key.convert is not None or key.reason, name
        assert key.only is None or key.reason, name
    assert {target for target, _ in ALIASES.values()} <= set(KEYS)
