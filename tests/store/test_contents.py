"""What a folder holds: every kind of data set that people bring, written by the library that it is from.

Each is packed, indexed where it can be, and examined; count, labels and bytes are those of the library that
wrote it. What is not read is refused by name, with a next step.
"""

import csv
import gzip
import io
import json
import random
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import headrace
from headrace.errors import SourceError
from headrace.insight.doctor.survey import survey

COUNT = 30


def picture(i):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(i).integers(0, 255, (8, 8, 3), np.uint8)).save(
        out, "JPEG"
    )
    return out.getvalue()


PICTURES = [picture(i) for i in range(COUNT)]
TEXTS = [json.dumps({"text": f"line {i}", "label": i % 3}) for i in range(COUNT)]


def shards(parts=3):
    """Which samples go into each of several files."""
    return [range(k * COUNT // parts, (k + 1) * COUNT // parts) for k in range(parts)]


# -- writers: each returns what a sample must be: [(bytes, label)], in order -------------------------


def pictures_in_folders(root):
    samples = []
    for i, data in enumerate(PICTURES):
        path = root / "ab"[i % 2] / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        samples.append((str(path.relative_to(root)), data, i % 2))
    (root / "README.md").write_text("pictures")
    (root / "Thumbs.db").write_bytes(b"x")
    (root / "a/.DS_Store").write_bytes(b"x")
    return [(data, label) for _, data, label in sorted(samples)]


def pictures_with_annotations(root):
    for name, data in zip("abcdefgh", PICTURES, strict=False):
        path = root / "images" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "annotations").mkdir()
    (root / "annotations/instances.json").write_text(json.dumps({"images": [], "annotations": []}))
    return [(data, 0) for data in PICTURES[:8]]


def webdataset(root):
    import webdataset

    root.mkdir()
    for k, numbers in enumerate(shards()):
        with webdataset.TarWriter(str(root / f"shard-{k:06d}.tar")) as writer:
            for i in numbers:
                writer.write({"__key__": f"{i:06d}", "jpg": PICTURES[i]})
    (root / "_SUCCESS").touch()
    return [(data, -1) for data in PICTURES]


def plain_tars(root):
    root.mkdir()
    for k, numbers in enumerate(shards()):
        with tarfile.open(root / f"{k}.tar", "w") as tar:
            for i in numbers:
                info = tarfile.TarInfo(f"{i:06d}.jpg")
                info.size = len(PICTURES[i])
                tar.addfile(info, io.BytesIO(PICTURES[i]))
    return [(data, -1) for data in PICTURES]


def parquet(root, compression="snappy"):
    import pyarrow as pa
    import pyarrow.parquet as pq

    root.mkdir()
    for k, numbers in enumerate(shards()):
        table = pa.table(
            {
                "image": [PICTURES[i] for i in numbers],
                "label": list(numbers),
                "caption": ["x"] * len(numbers),
            }
        )
        pq.write_table(
            table, root / f"part-{k}.parquet", compression=compression, use_dictionary=False
        )
    (root / "_metadata").write_bytes(b"x")
    return [(data, i) for i, data in enumerate(PICTURES)]


def parquet_in_place(root):
    return parquet(root, "none")


def arrow(root):
    import pyarrow as pa

    root.mkdir()
    for k, numbers in enumerate(shards()):
        table = pa.table({"image": [PICTURES[i] for i in numbers], "label": list(numbers)})
        with (
            pa.OSFile(str(root / f"{k}.arrow"), "wb") as f,
            pa.ipc.new_file(f, table.schema) as writer,
        ):
            writer.write_table(table)
    return [(data, i) for i, data in enumerate(PICTURES)]


def hdf5(root):
    import h5py

    root.mkdir()
    rows = np.arange(COUNT * 4, dtype="<f4").reshape(COUNT, 4)
    for k, numbers in enumerate(shards()):
        with h5py.File(root / f"{k}.h5", "w") as f:
            f["x"], f["label"] = rows[numbers], np.array(numbers)
    return [(row.tobytes(), i) for i, row in enumerate(rows)]


def json_lines(root):
    root.mkdir()
    for k, numbers in enumerate(shards()):
        (root / f"{k}.jsonl").write_text("\n".join(TEXTS[i] for i in numbers) + "\n\n" * (k == 1))
    return [(text.encode(), -1) for text in TEXTS]


def compressed_json_lines(root):
    root.mkdir()
    for k, numbers in enumerate(shards()):
        (root / f"{k}.jsonl.gz").write_bytes(
            gzip.compress("\n".join(TEXTS[i] for i in numbers).encode())
        )
    return [(text.encode(), -1) for text in TEXTS]


def hugging_face(root):
    import datasets

    whole = datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(COUNT))})
    whole.save_to_disk(str(root), num_shards=2)
    return [(text.encode(), i) for i, text in enumerate(TEXTS)]


def hub_cache(root):
    import pyarrow as pa
    import pyarrow.parquet as pq

    snapshot = root / "snapshots/0123abcd/data"
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs/main").write_text("0123abcd")
    pq.write_table(pa.table({"text": TEXTS}), root / "blobs/feed")
    (snapshot / "train-00000-of-00001.parquet").symlink_to(root / "blobs/feed")
    (snapshot.parent / "README.md").write_text("a card")
    return [(text.encode(), -1) for text in TEXTS]


def zarr_array(root, version=3):
    import zarr

    rows = np.arange(COUNT * 4, dtype="<f4").reshape(COUNT, 4)
    array = zarr.create_array(
        store=str(root), shape=rows.shape, chunks=(7, 4), dtype="f4", zarr_format=version
    )
    array[:] = rows
    return [(np.asarray(zarr.open(str(root), mode="r")[i]).tobytes(), -1) for i in range(COUNT)]


def zarr_2(root):
    return zarr_array(root, 2)


def zarr_group(root):
    import zarr

    group = zarr.open_group(str(root), mode="w")
    for name, values in (("x", np.arange(COUNT * 3.0).reshape(COUNT, 3)), ("y", np.arange(COUNT))):
        group.create_array(
            name, shape=values.shape, chunks=(8, *values.shape[1:]), dtype=values.dtype
        )[:] = values
    read = zarr.open_group(str(root), mode="r")
    return [(np.asarray(read["x"][i]).tobytes(), int(read["y"][i])) for i in range(COUNT)]


def lmdb_folder(root, subdir=True):
    import lmdb

    with lmdb.open(str(root), map_size=1 << 24, subdir=subdir) as environment:
        with environment.begin(write=True) as transaction:
            for i, data in enumerate(PICTURES):
                transaction.put(b"%06d" % i, data)
            transaction.put(b"__len__", b"30")
        with environment.begin() as transaction:
            return [(bytes(value), -1) for key, value in transaction.cursor() if key != b"__len__"]


def lmdb_file(root):
    return lmdb_folder(root, subdir=False)


def lance(root):
    import lance
    import pyarrow as pa

    lance.write_dataset(pa.table({"image": PICTURES, "label": list(range(COUNT))}), str(root))
    rows = lance.dataset(str(root)).to_table().to_pylist()
    return [(row["image"], row["label"]) for row in rows]


def manifest(root):
    pictures_in_folders(root.parent / "pictures")
    names = [f"pictures/{'ab'[i % 2]}/{i:03d}.jpg" for i in range(COUNT)]
    with root.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["path", "class"])
        writer.writerows([name, f"class {i % 3}"] for i, name in enumerate(names))
    return [(PICTURES[i], i % 3) for i in range(COUNT)]


WRITERS = {
    "pictures": pictures_in_folders, "coco": pictures_with_annotations, "webdataset": webdataset,
    "tars": plain_tars, "parquet": parquet, "parquet in place": parquet_in_place, "arrow": arrow,
    "hdf5": hdf5, "jsonl": json_lines, "jsonl.gz": compressed_json_lines, "hugging face": hugging_face,
    "hub cache": hub_cache, "zarr 3": zarr_array, "zarr 2": zarr_2, "zarr group": zarr_group,
    "lmdb": lmdb_folder, "lmdb file": lmdb_file, "lance": lance, "manifest": manifest,
}  # fmt: skip
PACKED_ONLY = {
    "parquet",
    "hub cache",
    "jsonl.gz",
    "zarr 3",
    "zarr 2",
    "zarr group",
    "lmdb",
    "lmdb file",
    "lance",
}
NOT_EXAMINED = {
    "zarr 3",
    "zarr 2",
    "zarr group",
    "lmdb",
    "lmdb file",
    "lance",
    "jsonl.gz",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The data set of a kind, written once: its path and its samples."""
    made = {}

    def write(kind):
        if kind not in made:
            root = tmp_path_factory.mktemp("data") / ("list.csv" if kind == "manifest" else "set")
            made[kind] = root, WRITERS[kind](root)
        return made[kind]

    return write


def samples_of(store):
    """(bytes, label) of each sample; the bytes of a sample with one part."""
    labels = store.labels
    return [
        (bytes(store.read(i)), -1 if labels is None else int(labels[i])) for i in range(len(store))
    ]


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_packed_is_what_its_library_wrote(kind, written, tmp_path):
    source, expected = written(kind)
    report = headrace.pack(source, tmp_path / "out")
    assert report.samples == len(expected)
    with headrace.open(tmp_path / "out") as store:
        assert sorted(samples_of(store)) == sorted(expected)


@pytest.mark.parametrize("kind", WRITERS)
def test_an_index_has_the_same_samples_or_says_why_there_is_none(kind, written, tmp_path):
    source, expected = written(kind)
    if kind in PACKED_ONLY:
        with pytest.raises(SourceError, match="can only be read front to back") as error:
            headrace.index(source, tmp_path / "out")
        assert "Pack it" in error.value.next_step
        return
    headrace.index(source, tmp_path / "out")
    with headrace.open(tmp_path / "out") as store, headrace.open(source) as direct:
        some = random.Random(3).sample(range(len(store)), 5)
        for read in (store, direct):
            assert len(read) == len(expected)
            assert {samples_of(read)[i] for i in some} <= set(expected)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_doctor_counts_the_same(kind, written):
    source, expected = written(kind)
    if kind in NOT_EXAMINED:
        with pytest.raises(SourceError) as error:
            data, pool = survey(source, 1.0)
            pool.close()
            assert data.samples != len(expected), "it is counted now: take it out of NOT_EXAMINED"
            assert not data.exact
            raise SourceError("estimated", next_step="Pack it")
        assert "Pack it" in error.value.next_step
        return
    data, pool = survey(source, 1.0)
    pool.close()
    assert (data.samples, data.exact) == (len(expected), True)


# -- what is left out is said, what is not plain is refused -------------------------------------------


def put(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PICTURES[0] if name.endswith("jpg") else b"x")
    return root


def test_what_is_left_out_is_said(written, tmp_path):
    source, _ = written("pictures")
    report = headrace.index(source, tmp_path / "out")
    assert report.notes == ["left out, as they are no samples: README.md, Thumbs.db"]
    assert report.kind == "files"
    assert headrace.index(written("tars")[0], tmp_path / "out2").kind == "3 tar files"


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
    left = "columns left out: 'width', 'caption'; --column takes those of bytes or text"
    for at, source in enumerate((arrow, parquet, datasets.Dataset(table))):
        assert headrace.pack(source, tmp_path / f"out{at}").notes == [left]
    both = headrace.pack(parquet, tmp_path / "both", column=("image", "caption"))
    assert both.notes == []
    with headrace.open(tmp_path / "both") as store:
        parts = [bytes(store.read(1, part=part)) for part in ("caption", "image")]
    assert parts == [b"b", PICTURES[1]]
    put(tmp_path / "files", "a.jpg")
    (tmp_path / "files" / "list.csv").write_text("path,split,label\na.jpg,train,cat\n")
    listed = headrace.index(tmp_path / "files" / "list.csv", tmp_path / "listed")
    assert listed.notes == ["columns left out: 'split'"]


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
    (root / "index.json").write_text(json.dumps({"chunks": [], "config": {}}))
    with pytest.raises(SourceError, match="LitData"):
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


def test_numbers_in_braces_stand_for_files(written, tmp_path):
    source, expected = written("webdataset")
    report = headrace.index(str(source / "shard-{000000..000001}.tar"), tmp_path / "out")
    assert report.samples == 2 * len(expected) // 3
    with headrace.open(str(source / "shard-{000000..000002}.tar")) as store:
        assert len(store) == len(expected)


def test_a_manifest_that_names_what_is_not_there_or_nothing_is_refused(tmp_path):
    table = tmp_path / "list.csv"
    table.write_text("path,label\nmissing.jpg,1\n")
    with pytest.raises(SourceError, match=r"row 0 cannot be read: No such file"):
        headrace.index(table, tmp_path / "out")
    table.write_text("name,label\nmissing.jpg,1\n")
    with pytest.raises(SourceError, match="without a column of paths"):
        headrace.index(table, tmp_path / "out")
    table.write_text("path,label\na.jpg\n")
    with pytest.raises(SourceError, match="row 2 has 1 fields, the header 2"):
        headrace.index(table, tmp_path / "out")
    table.write_text("path,label\n")
    with pytest.raises(SourceError, match="no samples"):
        headrace.index(table, tmp_path / "out")


def test_lines_that_are_no_json_are_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{broken\n{}\n")
    with pytest.raises(SourceError, match="line 1 is no JSON"):
        headrace.index(path, tmp_path / "out")
    path.write_bytes(gzip.compress(b"{}\n" * 100)[:-9])
    with pytest.raises(SourceError, match="no sound compressed file"):
        headrace.pack(path, tmp_path / "out")


def test_labels_of_lines_are_taken_from_a_key(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(TEXTS))
    headrace.index(path, tmp_path / "out", label="label")
    with headrace.open(tmp_path / "out") as store:
        assert store.labels.tolist() == [i % 3 for i in range(COUNT)]
    path.write_text('{"label": 1}\n{"label": "one"}\n')
    with pytest.raises(SourceError, match=r"'label' of line 2 is 'one', expected an integer"):
        headrace.index(path, tmp_path / "out2", label="label")


def test_an_lmdb_of_named_databases_is_refused(tmp_path):
    import lmdb

    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24, max_dbs=2) as environment:
        for name in (b"train", b"test"):
            inner = environment.open_db(name)
            with environment.begin(write=True) as transaction:
                transaction.put(b"1", b"x", db=inner)
    with pytest.raises(SourceError, match="look like named databases"):
        headrace.pack(tmp_path / "db", tmp_path / "out")


def test_damaged_libraries_folders_are_refused(written, tmp_path):
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
