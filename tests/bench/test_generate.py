"""Generation: the same files whoever writes them; interrupted, it goes on; a full disk leaves nothing half."""

import dataclasses
import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.bench.dataset import DatasetSpec
from headrace.bench.dataset_files import check_files, find_files, generate
from headrace.bench.formats import format_of
from headrace.errors import BenchError, MissingPackage, SourceError, VolumeError
from headrace.store import output_file

from .scaled import spec_of


def spec_in(folder, **section):
    return spec_of({
        "data_folder": str(folder), "format": "npz", "num_files_train": 7, "num_files_eval": 3,
        "num_subfolders_train": 2, "record_length_bytes": 9000, "record_length_bytes_stdev": 2000,
        **section,
    })  # fmt: skip


def digests(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def test_any_number_of_ranks_and_threads_writes_the_same(tmp_path):
    one = generate(spec_in(tmp_path / "one"), threads=1)
    assert (one.files, one.resumed_files) == (10, 0)
    reports = [
        generate(spec_in(tmp_path / "three"), rank=r, world_size=3, threads=2) for r in range(3)
    ]
    assert [r.files for r in reports] == [4, 3, 3]
    assert digests(tmp_path / "one") == digests(tmp_path / "three")
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["train", "valid"]  # and no more
    assert len(find_files(spec_in(tmp_path / "three"), "train")) == 7


@pytest.mark.parametrize("form", ["npy", "tfrecord", "hdf5", "csv"])
def test_buffered_and_direct_files_are_the_same(tmp_path, form):
    section = {"format": form, "num_files_train": 2, "num_files_eval": 0, "num_samples_per_file": 2,
               "record_length_bytes": 5 << 20 if form != "csv" else 100_000}  # fmt: skip
    sizes = [generate(spec_in(tmp_path / str(d), **section), direct=d).bytes for d in (True, False)]
    assert sizes[0] == sizes[1] > 200_000
    assert digests(tmp_path / "True") == digests(tmp_path / "False")


def test_the_same_command_again_does_nothing(tmp_path):
    generate(spec_in(tmp_path))
    before = digests(tmp_path)
    report = generate(spec_in(tmp_path))
    assert (report.resumed_files, report.bytes) == (10, 0)
    assert digests(tmp_path) == before


def test_a_name_without_its_bytes_is_written_again(tmp_path):
    """What a power cut leaves of a file that was not synced."""
    spec = spec_in(tmp_path)
    generate(spec)
    before = digests(tmp_path)
    os.truncate(spec.path("train", 3), 100)
    assert generate(spec).resumed_files == 9
    assert digests(tmp_path) == before


_PROGRAM = """
import sys, time
from headrace.bench.dataset import DatasetSpec
from headrace.bench.dataset_files import generate
spec = DatasetSpec(data_folder=sys.argv[1], format=sys.argv[2], num_files_train=60,
                   record_length_bytes=600_000, num_samples_per_file=int(sys.argv[3]))
print("begun", flush=True)
# It stays in the middle, however late it is killed.
generate(spec, sync=False, threads=4, progress=lambda done, *_: done < 30 or time.sleep(600))
"""


def test_files_are_looked_at_as_far_as_that_needs_no_package(tmp_path, monkeypatch):
    spec = DatasetSpec(data_folder=str(tmp_path), format="hdf5", num_files_train=2)
    generate(spec)
    paths = find_files(spec, "train")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackage):
        format_of(spec).sample_extents(paths[0], spec)
    check_files(spec, {"train": paths})
    Path(paths[1]).write_bytes(b"")
    with pytest.raises(SourceError, match="size is 0"):
        check_files(spec, {"train": paths})


@pytest.mark.parametrize("form", ["npz", "hdf5", "jpeg"])
def test_a_killed_run_leaves_whole_files_and_is_resumed(tmp_path, form):
    folder, samples = tmp_path / "killed", "1"
    command = [sys.executable, "-c", _PROGRAM, str(folder), form, samples]
    for pause_s in (0.0, 0.01, 0.03, 0.1):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(pause_s)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
    assert len([name for name in digests(folder) if name.endswith(form)]) < 60
    spec = DatasetSpec(data_folder=str(folder), format=form, num_files_train=60,
                       record_length_bytes=600_000)  # fmt: skip
    if [name for name in digests(folder) if name.endswith(form)]:
        with pytest.raises(SourceError, match="half-generated"):
            find_files(spec, "train")
    report = generate(spec, sync=False)
    assert report.files == 60
    clean = DatasetSpec(data_folder=str(tmp_path / "clean"), format=form, num_files_train=60,
                        record_length_bytes=600_000)  # fmt: skip
    generate(clean, sync=False)
    result = digests(folder)
    assert result == digests(tmp_path / "clean")
    assert len(find_files(spec, "train")) == 60
    assert not [name for name in result if ".part" in name]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, with room for some files."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", place],
        check=False,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("a file system of its own needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_fills_up_stops_all(small_disk, monkeypatch):
    monkeypatch.setattr("headrace.bench.dataset_files.check_free_space", lambda *_: None)
    spec = spec_in(small_disk, num_files_train=30)
    with pytest.raises(VolumeError, match=r"img_\d+_of_30.npz: the disk is full") as raised:
        generate(spec)
    assert raised.value.errno == errno.ENOSPC
    files = [p for p in small_disk.rglob("*") if p.is_file()]
    assert 0 < len(files) < 30
    assert all(p.stat().st_size > 2000 and p.suffix == ".npz" for p in files)
    with pytest.raises(SourceError, match="half-generated"):
        find_files(spec, "train")


def test_a_disk_that_fills_up_leaves_nothing_half_of_formats_that_libraries_write(
    tmp_path, monkeypatch
):
    spec = spec_in(tmp_path, num_files_train=30, format="csv")
    real, left = os.write, [400_000]

    def small_disk(fd, data):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(output_file.os, "write", small_disk)
    with pytest.raises(VolumeError, match=r"img_\d+_of_30.csv: the disk is full") as raised:
        generate(spec)
    monkeypatch.undo()
    assert left[0] < 0
    assert raised.value.errno == errno.ENOSPC
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert 0 < len(files) < 30
    assert all(p.stat().st_size > 2000 and p.suffix == ".csv" for p in files)
    with pytest.raises(SourceError, match="half-generated"):
        find_files(spec, "train")
    assert generate(spec).resumed_files == len(files)


def test_what_cannot_fit_is_not_begun(tmp_path):
    with pytest.raises(VolumeError, match="are needed"):
        generate(spec_in(tmp_path, record_length_bytes=1 << 47, record_length_bytes_stdev=0))
    assert not list(tmp_path.rglob("*.npz"))


def test_a_folder_of_others_is_never_written(tmp_path):
    (tmp_path / "train/0").mkdir(parents=True)
    (tmp_path / "train/0/mine.npz").write_bytes(b"x")
    for overwrite in (False, True):
        with pytest.raises(SourceError, match=r"not generated, as .*mine.npz"):
            generate(spec_in(tmp_path), overwrite=overwrite)
    assert digests(tmp_path) == {"train/0/mine.npz": hashlib.sha256(b"x").hexdigest()}


def test_another_data_set_is_replaced_only_when_asked(tmp_path):
    generate(spec_in(tmp_path, format="tfrecord"))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        SourceError, match=r"another data set: .*tfrecord is none of its.*--overwrite"
    ):
        generate(spec_in(tmp_path))
    generate(spec_in(tmp_path), overwrite=True)
    names = set(digests(tmp_path))
    assert "notes.txt" in names
    assert not [n for n in names if "tfrecord" in n]
    assert len(names) == 11


def test_a_rank_writes_nothing_before_the_folder_is_prepared(tmp_path):
    def gone():
        raise BenchError("rank 0 is gone")

    with pytest.raises(BenchError, match="rank 0 is gone"):
        generate(spec_in(tmp_path), rank=1, world_size=2, ready=gone)
    assert not list(tmp_path.iterdir())


def test_progress_counts_all_samples(tmp_path):
    seen = []
    generate(spec_in(tmp_path, num_samples_per_file=5), progress=lambda *a: seen.append(a))
    assert max(seen)[:2] == (50, 50)
    assert max(s[2] for s in seen) == 5 * spec_in(tmp_path).sample_bytes().sum()


def test_too_few_files_are_counted(tmp_path):
    generate(spec_in(tmp_path))
    Path(spec_in(tmp_path).path("train", 2)).unlink()
    for fewer in (7, 5):
        with pytest.raises(
            SourceError, match="half-generated: by their names its files are 7, and 6"
        ):
            find_files(spec_in(tmp_path, num_files_train=fewer), "train")
    generate(spec_in(tmp_path))
    assert len(find_files(spec_in(tmp_path, num_files_train=5), "train")) == 5
    with pytest.raises(
        SourceError, match=r"has 7 files that end with \.npz, expected num_files_train = 8"
    ):
        find_files(spec_in(tmp_path, num_files_train=8), "train")


SIDE = {"num_subfolders_train": 0, "record_length_bytes_stdev": 0, "record_length_bytes": 9025}


@pytest.mark.parametrize(
    ("made", "wanted", "message"),
    [
        ({}, {"num_samples_per_file": 2}, "samples on the last axis"),
        ({}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({}, {"record_length_bytes_stdev": 900}, "sample_bytes 9025 instead of"),
        ({}, {"record_element_type": "float32"}, "sample_bytes 9025 instead of 36100"),
        ({"compression": "zip"}, {"compression": "none"}, "compression 'zip' instead of 'none'"),
        ({"compression": "zip"}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({"format": "npy"}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({"format": "hdf5"}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({"format": "hdf5", "compression": "gzip"}, {"compression": "none"}, "'gzip' instead of 'none'"),
        ({"format": "csv"}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({"format": "png"}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({"format": "jpeg"}, {"record_length_bytes": 10000}, "sample_bytes 9025 instead of 10000"),
        ({"format": "tfrecord"}, {"record_length_bytes": 10000}, "the file's size"),
        ({"format": "indexed_binary"}, {"record_length_bytes": 10000}, "the file's size"),
        ({"format": "parquet"}, {"record_length_bytes": 10000}, "column data 'uint8.9025.' instead of"),
        ({"format": "parquet"}, {"compression": "snappy"}, "'none' instead of 'snappy'"),
        ({"format": "parquet", "parquet": {"columns": ["a"]}}, {"parquet": {"columns": ["b"]}},
         "column b 'None' instead of 'float"),
    ],
)  # fmt: skip
def test_a_data_set_of_another_workload_is_refused(tmp_path, made, wanted, message):
    """Whoever made it: only what the files say tells. A run of the workload, and generating over it."""
    generate(spec_in(tmp_path, **SIDE | made))
    before = digests(tmp_path)
    own, other = (spec_in(tmp_path, **SIDE | made | more) for more in ({}, wanted))
    check_files(own, {"train": find_files(own, "train"), "valid": find_files(own, "valid")})
    with pytest.raises(SourceError, match=message):
        check_files(other, {"train": find_files(other, "train")})
    with pytest.raises(SourceError, match=r"holds another data set: .*generate WORDS --overwrite"):
        generate(other)
    assert digests(tmp_path) == before


def test_archives_of_numpy_are_as_large_as_ours(tmp_path):
    """As are DLIO's, which stores in spite of `compression: zip`."""
    spec = spec_in(tmp_path, num_subfolders_train=0, num_files_eval=0)
    (tmp_path / "train").mkdir()
    for index, shape in enumerate(spec.sample_shapes()):
        x = np.zeros((*shape, 1), np.uint8)
        np.savez(spec.path("train", index), x=x, y=np.zeros(1, np.int64))
    paths = find_files(spec, "train")
    check_files(spec, {"train": paths})
    check_files(dataclasses.replace(spec, compression="zip"), {"train": paths})
    os.truncate(spec.path("train", 4), 3000)
    with pytest.raises(SourceError, match=r"img_4_of_7.npz: the file's size is 3,000, expected"):
        check_files(spec, {"train": paths})


def test_pictures_of_another_encoder_have_any_size(tmp_path):
    """As DLIO's own generator makes them."""
    spec = spec_in(tmp_path, **SIDE | {"format": "jpeg", "num_files_eval": 0})
    (tmp_path / "train").mkdir()
    for index in range(7):
        Image.new("L", (95, 95), 30 * index).save(spec.path("train", index))
    check_files(spec, {"train": find_files(spec, "train")})
    Image.new("L", (95, 96)).save(spec.path("train", 6))
    with pytest.raises(
        SourceError, match=r"img_6_of_7.jpeg: the data set was generated with sample_bytes 9120"
    ):
        check_files(spec, {"train": find_files(spec, "train")})


def test_files_that_someone_else_made_are_found_by_their_ending(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("b.npz", "a.npz", ".c.npz", "d.txt"):
        (tmp_path / "train" / name).touch()
    result = find_files(spec_in(tmp_path, num_files_train=2, num_subfolders_train=0), "train")
    assert [Path(p).name for p in result] == ["a.npz", "b.npz"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"no/train/0: cannot be listed"):
        find_files(spec_in(tmp_path / "no"), "train")
