"""What a `dataset` section means: names, folders, sizes as DLIO has them; mistakes are refused."""

import math

import numpy as np
import pytest

from headrace.bench.dataset import Column, DatasetSpec, Hdf5Spec, ParquetSpec

from .scaled import spec_of


def test_files_are_named_as_dlio_names_them():
    spec = DatasetSpec(data_folder="d", format="npz", num_files_train=168, num_files_eval=2)
    assert spec.path("train", 7) == "d/train/img_007_of_168.npz"
    assert spec.path("valid", 1) == "d/valid/img_1_of_2.npz"
    assert [spec.number(*f) for f in spec.files()] == list(range(170))


def test_subfolders_take_files_in_turn():
    spec = DatasetSpec(format="jpeg", num_files_train=20, num_subfolders_train=12)
    assert spec.file_name("train", 13) == "train/01/img_13_of_20.jpeg"
    assert spec.subfolders("train")[-1] == "train/11"
    assert DatasetSpec(num_subfolders_train=1).subfolders("train") == ("train",)


@pytest.mark.parametrize(
    ("compression", "extension"),
    [("none", "csv"), ("gzip", "csv.gz"), ("bz2", "csv.bz2"), ("zip", "csv.zip"), ("xz", "csv.xz")],
)
def test_compressed_csv_has_its_own_name(compression, extension):
    assert DatasetSpec(format="csv", compression=compression).extension == extension


def test_resnets_record_is_a_square_of_338():
    """Of 114,660.07 bytes: 338 x 338."""
    spec = DatasetSpec(
        num_files_train=1024, num_samples_per_file=1251, record_length_bytes=114660.07
    )
    assert set(spec.sample_bytes().tolist()) == {338 * 338}
    assert spec.sample_bytes().sum() * spec.num_samples_per_file == 1024 * 1251 * 338 * 338
    assert spec.nominal_bytes == 114660.07


def test_sizes_are_drawn_as_dlio_draws_them():
    """numpy.random.seed(10) and two sides for each file, of training and evaluation together."""
    spec = DatasetSpec(
        format="npz", num_files_train=5, num_files_eval=2,
        record_length_bytes=146600628, record_length_bytes_stdev=68341808,
    )  # fmt: skip
    np.random.seed(10)  # noqa: NPY002  # as DLIO does
    side, stdev = int(math.sqrt(146600628)), 68341808 / 2.0 / math.sqrt(146600628)
    drawn = [max(int(d), 1) for d in np.random.normal(side, stdev, 2 * 7)]  # noqa: NPY002
    np.random.seed()  # noqa: NPY002
    assert spec.sample_shapes().tolist() == [drawn[2 * i : 2 * i + 2] for i in range(7)]
    assert drawn[:2] == [15865, 14125]


def test_a_side_is_at_least_one():
    spec = DatasetSpec(num_files_train=500, record_length_bytes=4, record_length_bytes_stdev=40)
    assert spec.sample_shapes().min() == 1


def test_dims_and_element_type_replace_the_length():
    spec = DatasetSpec(format="hdf5", record_dims=(4, 3, 2), record_element_type="float32",
                       num_files_train=2, num_samples_per_file=3)  # fmt: skip
    assert spec.sample_shapes().tolist() == [[4, 3, 2]] * 2
    assert spec.sample_bytes().sum() * spec.num_samples_per_file == 2 * 3 * 96
    assert spec.resized_shape == (9, 9)


def test_a_section_of_yaml_becomes_a_spec():
    spec = spec_of({
        "data_folder": "data/flux/", "format": "parquet", "record_dims": [8, 2],
        "parquet": {"columns": [{"name": "a", "dtype": "binary", "size": 9, "read": False}, "b"],
                    "row_group_size": 64},
        "hdf5": {"chunk_dims": [1, 8]},
    })  # fmt: skip
    assert spec.data_folder == "data/flux"
    assert spec.record_dims == (8, 2)
    assert spec.hdf5 == Hdf5Spec(chunk_dims=(1, 8))
    columns = (Column(name="a", dtype="binary", size=9, read=False), Column(name="b"))
    assert spec.parquet == ParquetSpec(columns=columns, row_group_size=64)


MISTAKES = [
    ({"format": "npzz"}, "dataset.format is 'npzz', expected one of tfrecord, hdf5"),
    ({"num_files_train": "8"}, "dataset.num_files_train is '8', expected a whole number"),
    ({"num_files_train": True}, "whole number"),
    ({"num_samples_per_file": 0}, "at least 1"),
    ({"record_length_bytes": 0}, "record_length_bytes is 0"),
    ({"record_length_bytes": float("nan")}, "record_length_bytes"),
    ({"record_dims": [0, 2]}, "record_dims"),
    ({"record_dims": [4, 4], "record_length_bytes_stdev": 3}, "0 with record_dims"),
    ({"record_element_type": "float33"}, "numpy number type"),
    ({"record_element_type": "O"}, "numpy number type"),
    ({"file_prefix": "../img"}, "file_prefix"),
    ({"format": "tfrecord", "compression": "gzip"}, "dataset.compression is 'gzip', expected one of none"),
    ({"format": "jpeg", "num_samples_per_file": 2}, "one sample"),
    ({"format": "png", "record_dims": [3, 3, 3]}, "2 dimensions"),
    ({"format": "jpeg", "record_dims": [2, 3, 4]}, "does not support more than 2 dimensions, but got 3"),
    ({"format": "hdf5", "record_dims": [5, 2], "hdf5": {"num_dset_per_record": 2}}, "divisor"),
    ({"parquet": {"columns": ["a", "a"]}}, "names that differ"),
    ({"parquet": {"columns": [{"name": "a", "dtype": "complex"}]}}, "parquet.columns.a.dtype"),
    ({"parquet": {"columns": [{"dtyp": "int8"}]}}, "parquet.columns.dtyp is unknown"),
    ({"parquet": {"partition_by": "a"}}, "partition_by"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), MISTAKES, ids=lambda v: str(v)[:40])
def test_mistakes_say_field_found_and_expected(section, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        spec_of(section)
