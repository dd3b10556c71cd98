"""What a folder holds: what is left out is said, what is not plain is refused by name, with a next step."""

import codecs
import gzip
import io
import json
import os
import random
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import SourceError

from .conftest import COMPRESSIONS, compress
from .matrix import COUNT, PICTURES, TEXTS, folder, tars, webdataset_folder


def test_annotations_beside_pictures_are_no_samples(tmp_path):
    root = put(tmp_path / "data", *(f"images/{name}.jpg" for name in "abcdefgh"))
    put(root, "annotations/instances.json")
    report = headrace.index(root, tmp_path / "out")
    assert report.samples == 8
    assert "instances.json" in report.notes[0]


# -- what is left out is said, what is not plain is refused -------------------------------------------


def put(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURES[0] if name.endswith("jpg") else b"x")
    return root


def test_what_is_left_out_is_said(tmp_path):
    source = folder(tmp_path)
    (source / "Thumbs.db").write_bytes(b"x")
    (source / "a" / ".DS_Store").write_bytes(b"x")
    report = headrace.index(source, tmp_path / "out")
    assert report.notes == ["left out, as they are no samples: README.md, Thumbs.db"]
    assert report.kind == "files"
    (tmp_path / "tars").mkdir()
    assert headrace.index(tars(tmp_path / "tars"), tmp_path / "out2").kind == "3 tar files"


def test_columns_that_are_left_out_are_said(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    import datasets

    rows = {
        "image": PICTURES[:3],
        "width": [1, 2, 3],
        "caption": ["a", "b", "c"],
        "label": [0, 1, 0],
    }
    arrow, parquet, table = tmp_path / "t.arrow", tmp_path / "t.parquet", pa.table(rows)
    pq.write_table(table, parquet)
    with pa.OSFile(str(arrow), "wb") as f, pa.ipc.new_file(f, table.schema) as writer:
        writer.write_table(table)
    how = ", --column takes those of bytes, text or numbers, as parts"
    left = f"columns left out: 'caption'; samples are 'image'{how}"
    for at, source in enumerate((arrow, parquet, datasets.Dataset(table))):
        assert headrace.pack(source, tmp_path / f"out{at}").notes == [left]
        with headrace.open(tmp_path / f"out{at}") as store:
            assert store.columns["width"].tolist() == [1, 2, 3]
    both = headrace.pack(parquet, tmp_path / "both", column=("image", "caption"))
    assert both.notes == [f"columns left out: 'width'; samples are 'image', 'caption'{how}"]
    for at, source in enumerate((arrow, parquet, datasets.Dataset(table))):
        one = headrace.pack(source, tmp_path / f"one{at}", column="image")
        assert one.notes == [f"columns left out: 'width', 'caption'; samples are 'image'{how}"]
    with headrace.open(tmp_path / "both") as store:
        parts = [bytes(store.read(1, part=part)) for part in ("caption", "image")]
    assert parts == [b"b", PICTURES[1]]
    put(tmp_path / "files", "a.jpg")
    (tmp_path / "files" / "list.csv").write_text("path,split,label\na.jpg,train,cat\n")
    listed = headrace.index(tmp_path / "files" / "list.csv", tmp_path / "listed")
    assert listed.notes == ["columns left out: 'split'"]


def test_words_by_number_are_samples_or_classes_but_not_left_out_for_numbers(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = pa.array(["one", "two", "one", None, "größer"]).dictionary_encode()
    table = pa.table({"text": words, "id": range(5)})
    arrow, parquet = tmp_path / "t.arrow", tmp_path / "t.parquet"
    pq.write_table(table, parquet)
    with pa.OSFile(str(arrow), "wb") as f, pa.ipc.new_file(f, table.schema) as writer:
        writer.write_table(table)
    for at, source in enumerate((arrow, parquet)):
        with pytest.raises(SourceError, match="'text' is a dictionary of strings") as error:
            headrace.pack(source, tmp_path / "out")
        assert "--column text" in error.value.next_step
        with pytest.raises(SourceError, match="is null"):
            headrace.pack(source, tmp_path / "out", column="text")
        headrace.pack(source, tmp_path / f"{at}", column="text", on_error="skip")
        with headrace.open(tmp_path / f"{at}") as store:
            assert [bytes(store.read(i)).decode() for i in range(4)] == [
                "one",
                "two",
                "one",
                "größer",
            ]
        report = headrace.pack(source, tmp_path / f"label{at}", label="text")
        with headrace.open(report.path) as store:
            assert store.labels.tolist() == [0, 1, 0, -1, 2]


def labelled_tables(tmp_path, labels: list[int | None]):
    """The same rows as an Arrow file, a compressed Parquet file, a data set in memory, and a list of files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import datasets

    table = pa.table({"image": PICTURES[: len(labels)], "label": pa.array(labels, pa.int64())})
    with (
        pa.OSFile(str(tmp_path / "t.arrow"), "wb") as f,
        pa.ipc.new_file(f, table.schema) as writer,
    ):
        writer.write_table(table)
    pq.write_table(table, tmp_path / "t.parquet", compression="zstd")
    files = [f"{i}.jpg" for i in range(len(labels))]
    put(tmp_path, *files)
    rows = [f"{f},{'' if n is None else n}" for f, n in zip(files, labels, strict=True)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    tables = tmp_path / "t.arrow", tmp_path / "t.parquet", datasets.Dataset(table)
    return [*tables, tmp_path / "list.csv"]


def test_samples_without_a_label_are_counted(tmp_path, caplog):
    note = "without a label: 2 of 5 samples, which get -1"
    sources = labelled_tables(tmp_path, [0, None, 1, None, 1])
    for at, source in enumerate(sources):
        report = headrace.pack(source, tmp_path / f"out{at}")
        assert (report.unlabelled_samples, report.notes) == (2, [note])
    report = headrace.index(sources[0], tmp_path / "in place")
    assert (report.unlabelled_samples, report.notes) == (2, [note])
    for opened in (lambda: headrace.open(sources[0]), lambda: headrace.from_hf(sources[2])):
        caplog.clear()
        with opened() as store:
            assert store.labels.tolist() == [0, -1, 1, -1, 1]
        assert note in caplog.text
    packed = headrace.pack([b"a", ("b", b"b", 3)], tmp_path / "iterable")
    assert packed.notes == ["without a label: 1 of 2 samples, which get -1"]
    assert headrace.pack([b"a", b"b"], tmp_path / "none").notes == []


def test_labels_that_are_all_null_are_refused_where_they_were_asked_for(tmp_path):
    for at, source in enumerate(labelled_tables(tmp_path, [None] * 3)):
        report = headrace.pack(source, tmp_path / f"found{at}")
        assert report.notes == ["without a label: 3 of 3 samples, which get -1"]
        with pytest.raises(SourceError, match="no sample has a label: all 3 values of 'label'"):
            headrace.pack(source, tmp_path / f"asked{at}", label="label")
        assert not (tmp_path / f"asked{at}").exists()
    with pytest.raises(SourceError, match="no sample has a label"):
        headrace.index(tmp_path / "t.arrow", tmp_path / "in place", label="label")


def test_data_sets_beside_those_that_are_taken_are_said(tmp_path):
    import h5py
    import zarr

    rows = np.zeros((5, 3))
    with h5py.File(tmp_path / "x.h5", "w") as f:
        f["images"], f["masks"], f["label"] = rows, rows[:, :1], np.arange(5)
    left = "columns left out: 'masks'; --column takes others, as parts"
    assert headrace.index(tmp_path / "x.h5", tmp_path / "out").notes == [left]
    assert headrace.pack(tmp_path / "x.h5", tmp_path / "one", column="images").notes == [left]
    group = zarr.open_group(str(tmp_path / "z"), mode="w")
    for name, values in (("x", rows), ("label", np.arange(5)), ("scale", np.array(2.5))):
        group.create_array(name, shape=values.shape, dtype=values.dtype)[...] = values
    assert headrace.pack(tmp_path / "z", tmp_path / "out2").notes == ["columns left out: 'scale'"]


REFUSED = {
    "pictures with as many texts": (["1.jpg", "2.jpg", "1.txt", "2.txt"], "several kinds"),
    "a tar among pictures": (["1.jpg", "2.jpg", "more.tar"], "several kinds"),
    "sounds and pictures": (["1.wav", "2.wav", "3.wav", "1.jpg", "2.jpg"], "several kinds"),
    "splits of pictures": (["train/a/1.jpg", "val/a/1.jpg"], "several splits"),
    "splits of shards": (["train-00.tar", "test-00.tar"], "several splits"),
    "shards in folders by split": (["train/0.parquet", "validation/0.parquet"], "several splits"),
    "nanoGPT's tokens": (["train.bin", "val.bin"], "token files as nanoGPT"),
    "a Delta table": (["_delta_log/0.json", "part-0.parquet"], "a Delta table"),
    "a Deep Lake data set": (["dataset_meta.json", "images/chunk"], "a Deep Lake"),
}


@pytest.mark.parametrize("names", REFUSED.values(), ids=REFUSED)
def test_what_may_be_several_things_is_refused(names, tmp_path):
    root = put(tmp_path / "data", *names[0])
    for attempt in (headrace.index, headrace.pack):
        with pytest.raises(SourceError, match=names[1]) as error:
            attempt(root, tmp_path / "out")
        assert error.value.next_step
        assert not (tmp_path / "out").exists()
    # The user's own word decides.
    report = headrace.index(root, tmp_path / "out", format="files")
    assert report.samples == len(names[0])


def test_a_word_takes_a_kind(tmp_path):
    root = put(tmp_path / "data", "1.jpg", "2.jpg", "1.txt", "2.txt")
    report = headrace.index(root, tmp_path / "out", format="image")
    assert report.samples == 2
    assert "1.txt" in report.notes[0]
    with pytest.raises(SourceError, match="no file is audio"):
        headrace.index(root, tmp_path / "out2", format="audio")
    with pytest.raises(ValueError, match="format is 'pictures', expected one of files"):
        headrace.index(root, tmp_path / "out2", format="pictures")


def test_one_split_is_taken_and_so_are_many_if_that_is_said(tmp_path):
    root = put(tmp_path / "data", "train/a/1.jpg", "train/b/2.jpg", "val/a/1.jpg")
    assert headrace.index(root / "train", tmp_path / "one").samples == 2
    assert headrace.index(root, tmp_path / "all", format="image").samples == 3


def test_megatron_and_litdata_and_dataset_dict_are_named(tmp_path):
    root = put(tmp_path / "megatron", "x.bin")
    (root / "x.idx").write_bytes(b"MMIDIDX\0\0" + bytes(25))
    with pytest.raises(SourceError, match=r"its version is 0, expected 1"):
        headrace.index(root, tmp_path / "out")
    put(root, "a.jpg")
    with pytest.raises(SourceError, match=r"Megatron's token files and others \(a.jpg\)"):
        headrace.index(root, tmp_path / "out")
    root = put(tmp_path / "litdata", "chunk-0-0.bin")
    (root / "index.json").write_text(json.dumps({"chunks": [], "config": {"compression": "zstd"}}))
    with pytest.raises(SourceError, match=r"a LitData data set with compression \(zstd\)"):
        headrace.pack(root, tmp_path / "out")
    root = put(tmp_path / "dict", "train/x", "test/x")
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(SourceError, match="with the splits train, test") as error:
        headrace.pack(root, tmp_path / "out")
    assert error.value.next_step == f"Name one: {root}/train"


def coco(root):
    """As COCO lays it out: `val2017` beside `annotations`; two categories whose ids have gaps."""
    images, annotations = [], []
    for i in range(9):
        put(root / "val2017", f"{i:012d}.jpg")
        images.append({"id": 1000 - i, "file_name": f"{i:012d}.jpg", "width": 8, "height": 8})
        for k in range(i % 3):
            category = (90, 7)[(i + k) % 2]
            box = {"id": 9 * i + k, "image_id": 1000 - i, "category_id": category}
            annotations.append(box | {"bbox": [0, 1, 2.5, k]})
    categories = [{"id": 90, "name": "dog"}, {"id": 7, "name": "cat"}]
    path = root / "annotations" / "instances_val2017.json"
    path.parent.mkdir()
    document = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(document))
    return path, document


def test_pictures_of_coco_come_with_their_annotations(tmp_path):
    path, document = coco(tmp_path / "coco")
    report = headrace.pack(path, tmp_path / "out")
    assert (report.samples, report.skipped) == (9, [])
    with headrace.open(tmp_path / "out") as store:
        assert store.classes == ["cat", "dog"]
        assert store.labels.tolist() == [-1, 0, -1, -1, 1, -1, -1, 0, -1]
        for i, image in enumerate(document["images"]):
            sample = store.find(image["file_name"])
            assert bytes(store.read(sample, part="image")) == PICTURES[0]
            boxes = json.loads(bytes(store.read(sample, part="annotations")))
            assert boxes == [a for a in document["annotations"] if a["image_id"] == 1000 - i]
    another = path.with_name("instances_val2018.json")
    another.write_bytes(path.read_bytes())
    with pytest.raises(SourceError, match=r"val2018\.json: is a second COCO file"):
        headrace.pack([path, another], tmp_path / "two")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("images"), "JSON without COCO's images"),
        (lambda d: d["images"].append(d["images"][0]), "2 images have the id 1000"),
        (lambda d: d["annotations"][0].update(image_id=[1]), "image None, which is not listed"),
        (lambda d: d["images"][0].update(file_name="gone.jpg"), "gone.jpg, lies in none of"),
        (lambda d: d["images"][1].update(file_name="gone.jpg"), "gone.jpg: cannot be read"),
        (lambda d: d["images"].clear(), "no samples"),
    ],
)
def test_a_coco_file_that_contradicts_itself_is_refused(change, message, tmp_path):
    path, document = coco(tmp_path / "coco")
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(SourceError, match=message):
        headrace.pack(path, tmp_path / "out")


def test_what_a_stream_leaves_out_is_reported(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    import datasets

    table = pa.table({"image": [PICTURES[0], None, PICTURES[1]]})
    pq.write_table(table, tmp_path / "t.parquet")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as tar:
        for i in range(2):
            info = tarfile.TarInfo(f"{i}.jpg")
            info.size = len(PICTURES[i])
            tar.addfile(info, io.BytesIO(PICTURES[i]))
        link = tarfile.TarInfo("2.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "0.jpg"
        tar.addfile(link)
    coco_file, document = coco(tmp_path / "coco")
    (tmp_path / "coco/val2017" / document["images"][4]["file_name"]).unlink()
    rows = datasets.Dataset.from_dict({"image": [PICTURES[0], None, PICTURES[1]]})
    for source, kept, reason in (
        (tmp_path / "t.parquet", 2, "row 1: 'image' is null"),
        (rows, 2, "row 1 of 'image' is null"),
        (tmp_path / "t.tar.gz", 2, "'2.jpg' is no regular file"),
        (coco_file, 8, "cannot be read: .* No such file"),
    ):
        with pytest.raises(SourceError, match=reason):
            headrace.pack(source, tmp_path / "out", overwrite=True)
        report = headrace.pack(source, tmp_path / "out", on_error="skip", overwrite=True)
        assert report.samples == kept
        assert len(report.skipped) == 1
        assert re.search(reason, str(report.skipped[0]))


def test_numbers_in_braces_stand_for_files(tmp_path):
    source = webdataset_folder(tmp_path)
    report = headrace.index(str(source / "shard-{000000..000001}.tar"), tmp_path / "out")
    assert report.samples == 2 * COUNT // 3


def test_a_manifest_that_names_what_is_not_there_or_nothing_is_refused(tmp_path):
    table = tmp_path / "list.csv"
    table.write_text("path,label\nmissing.jpg,1\n")
    with pytest.raises(SourceError, match=r"line 2 cannot be read: No such file"):
        headrace.index(table, tmp_path / "out")
    table.write_text("name,label\nmissing.jpg,1\n")
    with pytest.raises(SourceError, match="without a column of paths"):
        headrace.index(table, tmp_path / "out")
    table.write_text("path,label\na.jpg\n")
    with pytest.raises(SourceError, match="line 2 has 1 fields, the header 2"):
        headrace.index(table, tmp_path / "out")
    table.write_text("path,label\n")
    with pytest.raises(SourceError, match="no samples"):
        headrace.index(table, tmp_path / "out")


def labels_of_table(tmp_path, cells: list[str], end: str = "csv"):
    """Labels and class names of a table with these cells, which names as many files."""
    files = [f"{i}.jpg" for i in range(len(cells))]
    put(tmp_path, *files)
    tab = "\t" if end == "tsv" else ","
    rows = [f"{file}{tab}{cell}" for file, cell in zip(files, cells, strict=True)]
    path = tmp_path / f"list.{end}"
    path.write_text("\n".join([f"path{tab}label", *rows]))
    headrace.index(path, tmp_path / "out", overwrite=True)
    with headrace.open(tmp_path / "out") as store:
        return store.labels.tolist(), store.classes


NULLS = ["", " ", "nan", "NaN", "NA", "N/A", "None", "null", "NULL", "<NA>"]


@pytest.mark.parametrize("end", ["csv", "tsv"])
def test_whole_numbers_of_a_table_are_its_labels_however_they_are_written(tmp_path, end):
    """As pandas writes a column of integers that has nulls: as floats, and in no order of text."""
    cells = [*(f"{i}.0" for i in range(12)), " 7", "1e1", "-1", str(2**63 - 1), f"{2**53 + 1}.0"]
    labels = [*range(12), 7, 10, -1, 2**63 - 1, 2**53 + 1]
    assert labels_of_table(tmp_path, cells, end) == (labels, None)
    with_nulls = labels + [-1] * len(NULLS)
    assert labels_of_table(tmp_path, cells + NULLS, end) == (with_nulls, None)


def test_words_of_a_table_are_classes_by_name_and_nulls_are_none(tmp_path):
    labels, names = labels_of_table(tmp_path, ["dog", *NULLS, "cat", "1_0", "dog", "Na"])
    assert (labels, list(names)) == (
        [3, *[-1] * len(NULLS), 2, 0, 3, 1],
        ["1_0", "Na", "cat", "dog"],
    )


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["0", "", "1", "?"],
            r"line 5: 'label' is '\?', expected a whole number as in line 2: 'label' is '0'",
        ),
        (
            ["cat", "7.0"],
            r"line 2: 'label' is 'cat', expected a whole number as in line 3: 'label' is '7.0'",
        ),
        (["0", "1_0"], "line 3: 'label' is '1_0'"),
        (["0", "0.5"], "line 3: 'label' is '0.5', expected a whole number, -1"),
        (["0", "1." + "0" * 40 + "1"], "line 3: .*expected a whole number, -1"),
        (["0", "1e400"], "line 3: 'label' is '1e400', expected a whole number, -1"),
        (["0", str(2**63)], "line 3: 'label' is '9223372036854775808'"),
        (["0", "-2.0"], "line 3: 'label' is '-2.0'"),
        (["0", "inf"], "line 3: 'label' is 'inf'"),
    ],
)
def test_labels_of_a_table_that_could_be_taken_wrongly_are_refused(tmp_path, cells, message):
    with pytest.raises(SourceError, match=message):
        labels_of_table(tmp_path, cells)
    assert not (tmp_path / "out").exists()


def test_errors_of_a_table_say_the_line_of_the_file(tmp_path):
    put(tmp_path, "a.jpg")
    path = tmp_path / "list.csv"
    head = 'path,note,label\na.jpg,"two\nlines",0\n\n'  # ends with line 4
    for row, message in (
        ("b.jpg,,1\n", "line 5 cannot be read: No such file"),
        ("b.jpg,1\n", "line 5 has 2 fields, the header 3"),
        ("a.jpg,,x\n", "line 5: 'label' is 'x', expected a whole number as in line 2"),
    ):
        path.write_text(head + row)
        with pytest.raises(SourceError, match=message):
            headrace.index(path, tmp_path / "out")


@pytest.mark.parametrize("kind", ["jsonl", "lines"])
def test_lines_end_as_on_unix_or_windows_wherever_blocks_of_a_file_end(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("headrace.store.sources.text._BLOCK", 5)
    dice, pieces = random.Random(3), [b"12", b"7", b" ", b"\t", b"\r\n", b"\n", b"\r\n\r\n"]
    for case in range(60):
        data = b"".join(dice.choices(pieces, k=dice.randrange(1, 30)))
        if data.endswith(b" ") or case % 2:
            data += b"3"
        lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
        expected = [line for line in lines if (line.strip() if kind == "jsonl" else line)]
        if kind == "jsonl" and (not expected or len(expected[0].split()) > 1):
            continue  # nothing, or no JSON
        mark = codecs.BOM_UTF8 if case % 3 else b""
        (tmp_path / "x.txt").write_bytes(mark + data)
        (tmp_path / "x.txt.gz").write_bytes(gzip.compress(mark + data))
        for source in ("x.txt", "x.txt.gz"):
            target = tmp_path / f"{case}{source}"
            headrace.pack(tmp_path / source, target, format=kind)
            with headrace.open(target) as store:
                assert [bytes(store.read(i)) for i in range(len(store))] == expected, data
                rows = [int(name.rpartition(b":")[2]) for name in map(os.fsencode, store.names)]
                assert [lines[row] for row in rows] == expected


@pytest.mark.parametrize("data", [b'{"a": 1}\r{"a": 2}\r', b"\xef\xbb\xbfone\r\rtwo"])
def test_lines_of_old_macs_are_refused_and_not_one_sample(tmp_path, data):
    (tmp_path / "x.txt").write_bytes(data)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(data))
    for source in ("x.txt", "x.txt.gz"):
        for kind in ("jsonl", "lines"):
            with pytest.raises(
                SourceError, match=rf"{source}: its lines end with carriage returns"
            ):
                headrace.pack(tmp_path / source, tmp_path / "out", format=kind)


def test_lines_of_a_folder_of_texts_are_samples_if_that_is_said(tmp_path):
    root = tmp_path / "texts"
    put(root, "b/2.log", "README.md")
    (root / "1.txt").write_text("one\ntwo\n")
    (root / "3.txt.gz").write_bytes(gzip.compress(b"three"))
    report = headrace.pack(root, tmp_path / "out", format="lines")
    assert (report.samples, report.kind) == (4, "3 lines files")
    assert report.notes == ["left out, as they are no samples: README.md"]


def test_lines_that_are_no_json_are_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{broken\n{}\n")
    with pytest.raises(SourceError, match="line 1 is no JSON"):
        headrace.index(path, tmp_path / "out")
    path.write_bytes(codecs.BOM_UTF16 + "{}\n{}\n".encode("utf-16-le"))
    with pytest.raises(SourceError, match="line 1 is no JSON: 'utf-8'"):
        headrace.index(path, tmp_path / "out")
    path.write_text('{"label": 1}\n{"label": 1, "label": 2}\n')
    with pytest.raises(SourceError, match="line 2 is no JSON: it has 'label' twice"):
        headrace.index(path, tmp_path / "out", label="label")
    path.write_bytes(gzip.compress(b"{}\n" * 100)[:-9])
    with pytest.raises(SourceError, match="no sound compressed file"):
        headrace.pack(path, tmp_path / "out")


def test_labels_of_lines_are_named_where_nobody_takes_them(tmp_path):
    lines = (
        b'\n{"text": "a", "label": null}\n{"text": "b", "label": 1}\n{"text": "c", "label": 0}\n'
    )
    note = "labels left out: line 3 has 'label'; --label label (in Python label='label') takes it"
    for name, data in (("x.jsonl", lines), ("x.jsonl.gz", gzip.compress(lines))):
        (tmp_path / name).write_bytes(data)
        unasked = headrace.pack(tmp_path / name, tmp_path / f"{name}.unasked")
        assert unasked.notes[0].startswith(note)
        assert len(unasked.notes) == 1
        for label, labels in (("label", [-1, 1, 0]), ("", None)):
            report = headrace.pack(tmp_path / name, tmp_path / f"{name}.{label}", label=label)
            assert report.notes == (
                ["without a label: 1 of 3 samples, which get -1"] if label else []
            )
            with headrace.open(report.path) as store:
                assert (store.labels is None) == (labels is None)
                assert labels is None or store.labels.tolist() == labels
    for no_label in (
        b'{"label": "word"}',
        b'{"label": true}',
        b'{"labels": [1]}',
        b'["label"]',
        b'{"text": "label"}',
    ):
        (tmp_path / "x.jsonl").write_bytes(no_label)
        assert headrace.pack(tmp_path / "x.jsonl", tmp_path / "out", overwrite=True).notes == []


def test_each_file_is_read_as_its_own_first_bytes_say(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    halves = b"\n".join(line.encode() for line in TEXTS[:4]), TEXTS[4].encode()
    (root / "0.jsonl").write_bytes(codecs.BOM_UTF8 + b"\n".join(halves))
    for end in COMPRESSIONS:
        # As one writes who appends to a compressed file: streams, one behind the other, with padding.
        streams = compress(end, codecs.BOM_UTF8 + halves[0]), compress(end, b"\n" + halves[1])
        (root / f"{end}.jsonl.{end}").write_bytes(bytes(9000).join(streams) + bytes(4))
    assert headrace.pack(root, tmp_path / "out").samples == 25
    with headrace.open(tmp_path / "out") as store:
        assert [bytes(store.read(i)).decode() for i in range(25)] == TEXTS[:5] * 5
    assert headrace.index(root / "0.jsonl", tmp_path / "index").samples == 5
    with headrace.open(tmp_path / "index") as store:
        assert bytes(store.read(0)).decode() == TEXTS[0]


@pytest.mark.parametrize("end", COMPRESSIONS)
def test_a_damaged_compressed_file_loses_no_line_in_silence(tmp_path, end):
    path = tmp_path / f"x.jsonl.{end}"
    data = compress(end, b"".join(b'{"text": "line %d"}\n' % (i * i) for i in range(50_000)))
    for wrong in (
        data[: len(data) // 2],
        data[:-3],
        data[:2000] + bytes(8) + data[2008:],
        data + b"x",
    ):
        path.write_bytes(wrong)
        with pytest.raises(SourceError, match=r"x.jsonl.*no sound compressed file"):
            headrace.pack(path, tmp_path / "out", resume=False)


def test_labels_of_lines_are_taken_from_a_key(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(TEXTS))
    headrace.index(path, tmp_path / "out", label="label")
    with headrace.open(tmp_path / "out") as store:
        assert store.labels.tolist() == [i % 3 for i in range(COUNT)]


def test_lines_without_a_label_get_none_and_other_values_are_refused_in_place_and_packed(tmp_path):
    values = ["1", "null", None, "NaN", "2.0", "-1", str(2**63 - 1)]
    rows = ["{}" if value is None else f'{{"label": {value}}}' for value in values]
    path, packed = tmp_path / "x.jsonl", tmp_path / "x.jsonl.gz"
    ways = ((path, headrace.index, bytes), (packed, headrace.pack, gzip.compress))
    for source, write, encode in ways:
        source.write_bytes(encode("\n".join(rows).encode()))
        report = write(source, tmp_path / f"{source.name}.hr", label="label")
        assert report.notes == ["without a label: 4 of 7 samples, which get -1"]
        with headrace.open(report.path) as store:
            assert store.labels.tolist() == [1, -1, -1, -1, 2, -1, 2**63 - 1]
        for wrong, reason in (
            ('"one"', "is 'one', expected an integer"),
            ('"1"', "is '1', expected an integer"),
            ("true", "is True, expected an integer"),
            ("0.5", "is 0.5, expected an integer"),
            (f"{2**53}.0", "expected an integer"),
            (f"{2**63}", "expected -1 to"),
            ("-2", "expected -1 to"),
        ):
            source.write_bytes(encode(f'{{"label": 1}}\n\n{{"label": {wrong}}}\n'.encode()))
            with pytest.raises(SourceError, match=f"'label' of line 3 .*{re.escape(reason)}"):
                write(source, tmp_path / "out", label="label")
        source.write_bytes(encode(b'{"label": null}\n{}\n'))
        with pytest.raises(SourceError, match="no sample has a label"):
            write(source, tmp_path / "out", label="label")


def test_an_lmdb_of_named_databases_is_refused(tmp_path):
    import lmdb

    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24, max_dbs=2) as environment:
        for name in (b"train", b"test"):
            inner = environment.open_db(name)
            with environment.begin(write=True) as transaction:
                transaction.put(b"1", b"x", db=inner)
    with pytest.raises(SourceError, match="look like named databases"):
        headrace.pack(tmp_path / "db", tmp_path / "out")


def test_damaged_libraries_folders_are_refused(tmp_path):
    (tmp_path / "lmdb").mkdir()
    (tmp_path / "lmdb/data.mdb").write_bytes(b"\0" * 8192)
    with pytest.raises(SourceError, match="no sound LMDB"):
        headrace.pack(tmp_path / "lmdb", tmp_path / "out")
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr/zarr.json").write_text("{")
    with pytest.raises(SourceError, match="no sound Zarr"):
        headrace.pack(tmp_path / "zarr", tmp_path / "out")
    (tmp_path / "lance/_versions").mkdir(parents=True)
    (tmp_path / "lance/_transactions").mkdir()
    with pytest.raises(SourceError, match="no sound Lance"):
        headrace.pack(tmp_path / "lance", tmp_path / "out")
