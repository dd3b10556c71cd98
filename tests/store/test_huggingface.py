"""`from_hf`: a store over a `datasets.Dataset`, with its order, its labels and no copy.

The package is large and not among those that the tests install; without it these tests are skipped.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

datasets = pytest.importorskip("datasets")

import headrace as hr  # noqa: E402
from headrace.errors import SourceError  # noqa: E402
from headrace.store.sources.huggingface import MappedFiles  # noqa: E402
from tests_shared import write_photos  # noqa: E402

from .rows import read_all, some_values  # noqa: E402

N = 50
FEATURES = datasets.Features(
    {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "elk"])}
)


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def memory():
    rows = [{"bytes": v, "path": None} for v in some_values(N)]
    return datasets.Dataset.from_dict(
        {"image": rows, "label": [i % 3 for i in range(N)]}, features=FEATURES
    )


@pytest.fixture
def disk(memory, tmp_path):
    memory.save_to_disk(tmp_path / "saved", num_shards=3)
    return datasets.load_from_disk(tmp_path / "saved")


def expected(dataset):
    return [r["bytes"] for r in dataset.cast_column("image", datasets.Image(decode=False))["image"]]


def check(dataset, *, copied=False):
    with hr.from_hf(dataset) as store:
        assert read_all(store) == expected(dataset)
        assert store.labels.tolist() == list(dataset["label"])
        assert store.classes == ["cat", "dog", "elk"]
        paths = [v.path for v in store.segments[0].entry.volumes]
        assert all(p.startswith("/proc/") for p in paths) is copied
        loader = hr.loader(store, batch_size=4, order="sequential")
        got = [bytes(batch[i]) for batch in loader for i in range(len(batch))]
        assert got == expected(dataset)


DERIVED = {
    "itself": lambda d: d,
    "shuffle": lambda d: d.shuffle(seed=1),
    "select": lambda d: d.select([3, 3, 5, 49, 0]),
    "slice": lambda d: d.select(range(10, 30)),
    "sort": lambda d: d.sort("label"),
    "filter": lambda d: d.filter(lambda x: x == 1, input_columns="label"),
    "map": lambda d: d.map(lambda x: {"label": (x["label"] + 1) % 3}).shuffle(seed=3),
    "concatenate": lambda d: datasets.concatenate_datasets([d, d.shuffle(seed=3)]),
    "rename": lambda d: d.rename_column("label", "q").rename_column("q", "label"),
    "format": lambda d: d.with_format("numpy"),
    "shard": lambda d: d.shuffle(seed=2).shard(3, 1),
}


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # theirs, in sort
@pytest.mark.parametrize("how", DERIVED)
def test_a_mapped_data_set_is_read_in_place_in_its_own_order(disk, how):
    check(DERIVED[how](disk))


@pytest.mark.parametrize("how", ["itself", "shuffle", "select", "slice"])
def test_a_data_set_in_memory_is_copied_into_memory_once(memory, how):
    check(DERIVED[how](memory), copied=True)


def test_mapped_and_in_memory_together_are_copied(disk, memory):
    check(datasets.concatenate_datasets([disk, memory]), copied=True)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_store_goes_to_another_process_while_this_one_lives(disk, memory, where):
    dataset = (disk if where == "disk" else memory).shuffle(seed=4)
    with hr.from_hf(dataset) as store:
        code = (
            "import sys, pickle; s = pickle.load(sys.stdin.buffer); print(len(s), len(s.read(7)))"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(store), check=True, capture_output=True
        )
        assert ended.stdout.split() == [b"50", str(len(expected(dataset)[7])).encode()]


def test_the_fingerprint_follows_what_is_shown(disk):
    def fingerprint(dataset):
        with hr.from_hf(dataset) as store:
            return store.fingerprint

    assert fingerprint(disk) == fingerprint(disk)
    assert fingerprint(disk) != fingerprint(disk.shuffle(seed=1))
    assert fingerprint(disk.shuffle(seed=1)) == fingerprint(disk.shuffle(seed=1))


def test_images_that_are_known_by_path_are_the_files(tmp_path):
    root = write_photos(tmp_path / "photos")
    dataset = datasets.load_dataset(
        "imagefolder", data_dir=str(root), split="train", cache_dir=str(tmp_path / "c")
    ).shuffle(seed=1)
    with hr.from_hf(dataset) as store:
        plain = dataset.cast_column("image", datasets.Image(decode=False))
        paths = [row["path"] for row in plain["image"]]
        assert read_all(store) == [Path(p).read_bytes() for p in paths]
        assert store.labels.tolist() == list(dataset["label"])
        assert store.segments[0].entry.volumes[0].kind == "tree"
    with pytest.raises(SourceError, match="shows a file twice"):
        hr.from_hf(dataset.select([0, 0]))
    (tmp_path / "photos" / paths[0]).unlink()
    with pytest.raises(SourceError, match="row 0 cannot be read"):
        hr.from_hf(dataset)
    with hr.from_hf(dataset, on_error="skip") as store:
        assert len(store) == len(dataset) - 1


def test_nulls_are_refused_or_skipped(disk, memory, tmp_path):
    rows = [*[{"bytes": v, "path": None} for v in some_values(5)], None]
    nulls = datasets.Dataset.from_dict({"image": rows, "label": [0] * 6}, features=FEATURES)
    nulls.save_to_disk(tmp_path / "nulls")
    for dataset in (nulls, datasets.load_from_disk(tmp_path / "nulls")):
        with pytest.raises(SourceError, match="row 5"):
            hr.from_hf(dataset)
        with hr.from_hf(dataset, on_error="skip") as store:
            assert read_all(store) == some_values(5)


def test_columns_are_chosen_or_named(tmp_path):
    dataset = datasets.Dataset.from_dict({"a": [b"1", b"2"], "b": [b"3", b"4"], "n": [7, 8]})
    with pytest.raises(SourceError, match="2 columns hold bytes"):
        hr.from_hf(dataset)
    with hr.from_hf(dataset, column=["b", "a"], label="n") as store:
        assert (read_all(store, "a"), read_all(store, "b")) == ([b"1", b"2"], [b"3", b"4"])
        assert (store.labels.tolist(), store.classes) == ([7, 8], None)
    with pytest.raises(SourceError, match="no samples"):
        hr.from_hf(dataset.select([]), column="a")
    with pytest.raises(SourceError, match=r"Choose one of its splits: \['train'\]"):
        hr.from_hf(datasets.DatasetDict(train=dataset))
    with pytest.raises(SourceError, match=r"expected a datasets\.Dataset"):
        hr.from_hf([b"1"])


def test_views_of_texts_are_copied(tmp_path):
    pa = pytest.importorskip("pyarrow")
    texts = ["short", "longer than what a view holds itself", ""]
    with hr.from_hf(
        datasets.Dataset(pa.table({"text": pa.array(texts, pa.string_view())}))
    ) as store:
        assert [data.decode() for data in read_all(store)] == texts


def test_data_sets_are_sources_of_index_and_pack_too(disk, memory, tmp_path):
    hr.index(disk.shuffle(seed=1), tmp_path / "i.hr")
    with hr.open(tmp_path / "i.hr") as store:
        assert read_all(store) == expected(disk.shuffle(seed=1))
    with pytest.raises(SourceError, match=r"(?s)in memory.*Pack it"):
        hr.index(memory, tmp_path / "m.hr")
    hr.pack(memory, tmp_path / "m.hr")
    with hr.open(tmp_path / "m.hr") as store:
        assert read_all(store) == expected(memory)
        assert store.classes == ["cat", "dog", "elk"]


def test_a_replaced_file_is_noticed(disk, tmp_path):
    file = next((tmp_path / "saved").glob("data-*.arrow"))
    copy = tmp_path / "copy"
    copy.write_bytes(file.read_bytes())
    copy.replace(file)  # the data set has the old one mapped, which has no name now
    check(disk, copied=True)


def test_places_of_mappings_are_found():
    text = (
        b"1000-3000 r--s 00000000 08:01 7 /data/a b.arrow\n"
        b"3000-4000 r--s 00002000 08:01 7 /data/a b.arrow\n"  # split by the kernel
        b"4000-5000 r--s 00009000 08:01 7 /data/a b.arrow\n"  # another place of it
        b"6000-7000 r--s 00000000 08:01 8 /data/gone (deleted)\n"
        b"8000-9000 rw-p 00000000 00:00 0 \n"
        b"a000-b000 r--s 00001000 08:01 9 /data/n\\012l\n"
    )
    mappings = MappedFiles(text)
    assert mappings.find(0x1000, 0x3000) == ("/data/a b.arrow", 0)
    assert mappings.find(0x3800, 0x800) == ("/data/a b.arrow", 0x2800)
    assert mappings.find(0x3800, 0x801) is None
    assert mappings.find(0x4010, 1) == ("/data/a b.arrow", 0x9010)
    assert mappings.find(0x6000, 1) is None
    assert mappings.find(0x8000, 1) is None
    assert mappings.find(0xA000, 16) == ("/data/n\nl", 0x1000)
    assert mappings.find(0x10, 16) is None
