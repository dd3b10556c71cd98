"""What a data set is said to be, whatever lies there; and clear errors where there is none."""

import os
import shutil

import numpy as np
import pytest

import headrace as hr
from headrace.errors import CorruptStore, SourceError, StoreNotFound
from headrace.insight.doctor.survey import survey
from headrace.insight.doctor.text import _data
from tests_shared import opened_to_others, png

from .test_records import LATER, write_tar, write_tfrecord


def look(path):
    return survey(path, LATER)


def test_a_folder_of_images(photos):
    data, pool = look(photos)
    sizes = [p.stat().st_size for p in photos.glob("*/*.png")]
    assert (data.kind, data.format, data.samples, data.exact) == ("folder", "png", 36, True)
    assert (data.classes, data.nbytes, data.size_max) == (3, sum(sizes), max(sizes))
    assert data.size_p10 <= data.size_p50 <= data.size_p90
    assert pool.whole_files
    assert sorted(p.length for p in pool.pieces) == sorted(sizes)


def test_other_files_beside_images_are_left_out(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "p")
    for name in ("README.md", "labels.csv", "LICENSE"):
        (folder / name).write_text("x")
    data, pool = look(folder)
    assert (data.format, data.samples, data.classes) == ("png", 36, 3)
    assert all(p.path.endswith(".png") for p in pool.pieces)
    assert any("no images" in note for note in data.notes)
    for name in ("stray.png", "another.png"):
        shutil.copy(next(photos.glob("*/*.png")), folder / name)
    data, _ = look(folder)
    assert (data.samples, data.classes) == (38, 0)
    assert any("2 files lie in no class folder, the first is another.png" in n for n in data.notes)


def test_pictures_of_several_formats_are_told_apart(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "p")
    for i, path in enumerate(sorted(folder.glob("*/*.png"))):
        if i % 4 == 0:
            path.rename(path.with_suffix(".jpg"))
    data, _ = look(folder)
    assert data.formats == (("png", 0.75), ("jpeg", 0.25))
    assert _data(data).startswith("36 files (75% png, 25% jpeg) in 3 classes")


def test_empty_files_are_counted(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "p")
    (folder / "cats/empty.png").touch()
    data, pool = look(folder)
    empty = "empty files: 1 of 37 that were looked at, the first: cats/empty.png"
    assert empty in data.notes
    assert all(p.length for p in pool.pieces)


def test_files_that_are_left_out_are_counted_and_the_first_is_named(photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "p")
    (folder / "cats/Thumbs.db").write_bytes(b"x")
    (folder / "cats/notes.txt").write_bytes(b"x")
    data, _ = look(folder)
    assert data.samples == 36
    beside, others = data.notes
    assert (
        beside == "1 left out beside the data (READMEs, checksums, ...), the first: cats/Thumbs.db"
    )
    assert others == "1 of 37 files are no images and are left out, as cats/notes.txt"


def test_a_folder_of_tars(tmp_path):
    for shard in range(3):
        members = [(f"{shard}{i}.png", png(i)) for i in range(5)]
        write_tar(tmp_path / f"{shard}.tar", [*members, (f"{shard}9.json", b"{}")])
    data, pool = look(tmp_path)
    assert (data.kind, data.format, data.samples, data.exact) == ("shards", "png in tar", 18, True)
    assert data.files == 3
    piece = next(p for p in pool.pieces if p.length > 10)
    with open(piece.path, "rb") as file:
        file.seek(piece.offset)
        assert file.read(4) == b"\x89PNG"


def test_a_compressed_tar_is_looked_at_in_blocks(tmp_path):
    write_tar(tmp_path / "a.tar.gz", [(f"{i}.bin", os.urandom(5000)) for i in range(20)], "w:gz")
    data, pool = look(tmp_path / "a.tar.gz")
    assert not data.in_place
    assert not pool.true_samples
    assert any("front to back" in note for note in data.notes)


def test_a_folder_of_tfrecords(tmp_path):
    for shard in range(2):
        write_tfrecord(tmp_path / f"train.tfrecord-0000{shard}-of-00002", [b"x" * 900] * 7)
    data, _ = look(tmp_path)
    assert (data.kind, data.format, data.samples) == ("shards", "tfrecord", 14)
    assert data.size_p50 == 900


def test_shards_that_were_not_seen_whole_are_estimated(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 100] * 5000)
    data, pool = survey(tmp_path / "a.tfrecord", 0.0)  # a shard has 20 ms at the least
    if data.exact:
        pytest.skip("5,000 records were followed in 20 ms")
    assert 2500 < data.samples < 10_000
    assert len(pool.pieces) > 0


def test_a_folder_of_npz_is_of_files(tmp_path):
    for i in range(4):
        np.savez(tmp_path / f"{i}.npz", x=np.zeros((8, 8), np.uint8))
    data, pool = look(tmp_path)
    assert (data.kind, data.format, data.samples) == ("folder", "npz", 4)
    assert pool.whole_files


def test_an_array_is_of_rows(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((50, 100), np.float32))
    data, _ = look(tmp_path / "x.npy")
    assert (data.format, data.samples, data.size_p50) == ("npy", 50, 400)


def test_parquet_and_hdf5(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    h5py = pytest.importorskip("h5py")
    (tmp_path / "p").mkdir()
    table = arrow.table({"image": [bytes(1000)] * 20})
    parquet.write_table(table, tmp_path / "p/a.parquet", compression="none", use_dictionary=False)
    (tmp_path / "h").mkdir()
    with h5py.File(tmp_path / "h/a.h5", "w") as file:
        file["x"] = np.zeros((30, 10), np.float32)
    for name, kind, count in (("p", "parquet", 20), ("h", "hdf5", 30)):
        data, _ = look(tmp_path / name)
        assert (data.format, data.samples, data.in_place) == (kind, count, True), data.notes


def test_rows_of_compressed_tables_are_counted(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for i in range(3):
        table = arrow.table({"image": [os.urandom(100)] * (100 + i)})
        parquet.write_table(table, tmp_path / f"{i}.parquet", compression="zstd")
    data, _ = look(tmp_path)
    assert (data.samples, data.exact, data.blocks, data.in_place) == (303, True, False, False)
    assert _data(data).startswith("303 rows in 3 parquet files, looked at in blocks")


def test_rows_of_files_that_were_not_all_asked_are_an_estimate(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [bytes(100)] * 10})
    for i in range(8):
        parquet.write_table(table, tmp_path / f"{i}.parquet", compression="zstd")
    monkeypatch.setattr("headrace.insight.doctor.samples._FILES_MAX", 4)
    data, _ = look(tmp_path)
    assert (data.samples, data.exact, data.files) == (80, False, 8)
    assert _data(data).startswith("about 80 rows in 8 parquet files")


def test_files_of_a_library_beyond_those_that_were_drawn_are_counted(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(str(tmp_path / "z"), shape=(300, 10), chunks=(10, 10), dtype="f4")
    array[...] = np.random.default_rng(0).random((300, 10))
    files = sum(1 for p in (tmp_path / "z").rglob("*") if p.is_file())
    whole, _ = look(tmp_path / "z")
    monkeypatch.setattr("headrace.insight.doctor.survey.DRAWN_MAX", 5)
    data, _ = look(tmp_path / "z")
    assert (data.samples, data.exact, data.files) == (300, True, files)
    assert data.nbytes == pytest.approx(whole.nbytes, rel=0.7)
    assert _data(data).startswith(f"300 rows in {files} zarr files")


def test_any_file_is_looked_at_in_blocks(tmp_path):
    (tmp_path / "blob").write_bytes(os.urandom(1 << 20))
    data, pool = look(tmp_path / "blob")
    assert (data.kind, data.in_place, data.nbytes) == ("file", False, 1 << 20)
    assert data.blocks
    assert _data(data).startswith("1 file, looked at in blocks")
    assert all(p.offset + p.length <= 1 << 20 for p in pool.pieces)


def test_a_pattern(photos):
    data, _ = look(f"{photos}/cats/*.png")
    assert data.samples == 12


def test_a_packed_store(packed_photos, photos):
    data, pool = look(packed_photos)
    assert (data.kind, data.format, data.samples, data.classes) == ("store", "png", 36, 3)
    assert pool.store is None
    assert not pool.whole_files
    piece = pool.pieces[0]
    with open(piece.path, "rb") as file:
        file.seek(piece.offset)
        assert file.read(4) == b"\x89PNG"


def test_an_index_of_a_folder_is_of_files(photos, tmp_path):
    hr.index(photos, tmp_path / "index.hr")
    data, pool = look(tmp_path / "index.hr")
    assert (data.kind, data.samples) == ("store", 36)
    assert pool.whole_files
    assert all(os.path.isfile(p.path) for p in pool.pieces)


# -- bad input -----------------------------------------------------------------------------------------


def test_nothing_is_there(tmp_path):
    with pytest.raises(StoreNotFound, match="no such file") as caught:
        look(tmp_path / "a/b/c")
    assert str(tmp_path) in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize(
    "what", ["empty", "only folders", "only hidden", "only a pipe", "all empty"]
)
def test_a_folder_without_samples(tmp_path, what):
    if what == "only folders":
        (tmp_path / "a/b").mkdir(parents=True)
    elif what == "only hidden":
        (tmp_path / ".x").touch()
    elif what == "only a pipe":
        os.mkfifo(tmp_path / "pipe")
    elif what == "all empty":
        (tmp_path / "x.jpg").touch()
    with pytest.raises(SourceError) as caught:
        look(tmp_path)
    assert caught.value.next_step


@pytest.mark.parametrize("what", ["link", "pipe", "empty file"])
def test_what_is_neither_file_nor_folder(tmp_path, what):
    path = tmp_path / "x"
    if what == "link":
        path.symlink_to("nowhere")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
    with pytest.raises(SourceError) as caught:
        look(path)
    assert caught.value.next_step


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match="Permission denied"):
        look(tmp_path)


def test_a_damaged_store_is_told(own_store):
    (own_store / "store.json").write_text("{")
    with pytest.raises(CorruptStore):
        look(own_store)


def test_damaged_shards(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(os.urandom(5000))
    with pytest.raises(SourceError, match="expected a TFRecord"):
        look(tmp_path)


def test_hostile_names_are_read_and_told_escaped(tmp_path):
    evil = tmp_path / "\x1b[2J<script>\udcff"
    evil.mkdir()
    (evil / "a\nb.png").write_bytes(png(1))
    data, pool = look(evil)
    assert data.samples == 1
    assert pool.pieces[0].path.endswith("a\nb.png")
    (evil / "a\nb.png").unlink()
    with pytest.raises(SourceError) as caught:
        look(evil)
    assert "\x1b" not in caught.value.message
    assert r"\x1b[2J" in caught.value.message


def test_a_folder_that_only_others_may_read(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    import multiprocessing

    (tmp_path / "locked").mkdir(mode=0o700)
    (tmp_path / "locked/x.png").write_bytes(png(1))
    with opened_to_others(tmp_path):
        context = multiprocessing.get_context("fork")
        said = context.Queue()
        child = context.Process(target=_as_nobody, args=(str(tmp_path / "locked"), said))
        child.start()
        assert "Permission denied" in said.get(timeout=20)
        child.join(20)


def _as_nobody(path, said):
    os.setuid(65534)
    try:
        look(path)
    except SourceError as e:
        said.put(str(e))
    else:
        said.put("it was read")


def test_several_splits_are_refused_as_a_loader_refuses_them(tmp_path):
    for name in ("train/a/1.png", "val/a/2.png", "train/b/3.png", "val/b/4.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    with pytest.raises(
        SourceError, match=r"several splits .*Name one: '.*/train'; or look at all: --ext png"
    ):
        survey(str(tmp_path), LATER)
    assert survey(str(tmp_path), LATER, extensions=[".png"])[0].samples == 4
