"""HDF5 files as a source."""

from __future__ import annotations

import numpy as np
import pytest

h5py = pytest.importorskip("h5py")

from headrace.errors import HeadraceError, SourceError  # noqa: E402
from headrace.store import open_store  # noqa: E402
from headrace.store.pack import index, pack  # noqa: E402
from headrace.store.sources import hdf5  # noqa: E402

from .rows import check_in_place, check_packed_only, read_all, some_values  # noqa: E402

ROWS = np.random.default_rng(1).integers(0, 255, (60, 8, 9), np.uint8)
VALUES = [row.tobytes() for row in ROWS]
LABELS = [i * 7 % 5 for i in range(60)]


def make(path, data=ROWS, *, userblock=0, name="train/x", label="train/y", **options):
    with h5py.File(path, "w", userblock_size=userblock) as f:
        f.create_dataset(name, data=data, **options)
        f[label] = LABELS[: len(data)]
    return path


@pytest.mark.parametrize(
    "options",
    [
        {}, {"userblock": 512}, {"userblock": 4096}, {"chunks": (7, 8, 9)}, {"chunks": (1, 8, 9)},
        {"chunks": (64, 8, 9), "maxshape": (None, 8, 9)}, {"track_order": True},
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_samples_in_place(tmp_path, reference, options):
    path = make(tmp_path / "a.h5", **options)
    check_in_place(path, tmp_path, VALUES, LABELS, reference=reference)
    with open_store(path) as store:
        assert store.names[7] == "a.h5:0000007"
        described = store.manifest.segments[0].source["arrays"]["train/x"]
        assert described == {"shape": [60, 8, 9], "dtype": "uint8"}


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("chunk", [1, 5, 60])
def test_each_way_hdf5_lists_its_chunks_is_read(tmp_path, libver, chunk):
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as f:
        data = f.create_dataset(
            "x", (0, 8, 9), np.uint8, maxshape=(None, 8, 9), chunks=(chunk, 8, 9)
        )
        for row in ROWS:  # grown, so that chunks lie apart
            data.resize(len(data) + 1, axis=0)
            data[-1] = row
            f.create_dataset(f"other/{len(data)}", data=[1.0])
    check_in_place(tmp_path / "a.h5", tmp_path, VALUES, column="x")


@pytest.mark.parametrize("kind", ["<f4", ">i2", "<u8", "S5", "bool"])
def test_each_type_gives_the_bytes_of_its_rows(tmp_path, kind):
    data = np.arange(240).reshape(60, 4).astype(kind)
    path = make(tmp_path / "a.h5", data)
    check_packed_or_in_place(path, tmp_path, [row.tobytes() for row in data])


def check_packed_or_in_place(path, tmp_path, values):
    """Some types are stored otherwise than numpy has them: then they are packed."""
    pack(path, tmp_path / "p.hr")
    with open_store(tmp_path / "p.hr") as store:
        assert read_all(store) == values
    try:
        with open_store(path) as store:
            assert read_all(store) == values
    except SourceError as e:
        assert "stored in another type" in str(e)  # noqa: PT017


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chunks": (7, 4, 9)}, "several chunks"),
        ({"chunks": (7, 8, 9), "compression": "gzip"}, "compressed .gzip."),
        ({"chunks": (7, 8, 9), "compression": "lzf"}, "compressed .lzf."),
        ({"chunks": (7, 8, 9), "shuffle": True}, "compressed .filtered."),
        ({"chunks": (7, 8, 9), "fletcher32": True}, "compressed .filtered."),
    ],
    ids=str,
)
def test_other_layouts_are_packed_only(tmp_path, options, why):
    path = make(tmp_path / "a.h5", **options)
    check_packed_only(path, tmp_path, VALUES, LABELS, why)


def test_rows_of_variable_length_are_packed_only(tmp_path):
    values = some_values()
    with h5py.File(tmp_path / "a.h5", "w") as f:
        data = f.create_dataset("jpegs", (60,), h5py.vlen_dtype(np.uint8))
        for i, value in enumerate(values):
            data[i] = np.frombuffer(value, np.uint8)
        f["labels"] = LABELS
        words = f.create_dataset("words", (60,), h5py.string_dtype())
        words[:] = [f"wörd {i}" for i in range(60)]
    path = tmp_path / "a.h5"
    check_packed_only(path, tmp_path, values, LABELS, "variable length", column="jpegs")
    pack(path, tmp_path / "w.hr", column="words", label="")
    with open_store(tmp_path / "w.hr") as store:
        assert read_all(store) == [f"wörd {i}".encode() for i in range(60)]


def test_heaps_that_would_keep_hdf5_busy_for_ever_are_refused(tmp_path):
    """An object whose size leads back to itself, beyond its heap or the file; a heap of no size."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        data = f.create_dataset("x", (60,), h5py.vlen_dtype(np.uint8))
        for i, value in enumerate(some_values()):
            data[i] = np.frombuffer(value, np.uint8)
    pack(path, tmp_path / "good.hr")
    good = path.read_bytes()
    heap = good.index(b"GCOL\1\0\0\0")
    refused = 0
    # Sizes of the heap itself, and of its first object.
    for at, value, match in (
        (8, 0, "size of a heap"), (8, 1 << 40, "size of a heap"),
        (24, 2**64 - 16, "size of object 1"), (24, 2**64 - 1, "size of object 1"),
        (24, 1 << 30, "size of object 1"),
    ):  # fmt: skip
        damaged = bytearray(good)
        damaged[heap + at : heap + at + 8] = value.to_bytes(8, "little")
        assert damaged != good
        path.write_bytes(damaged)
        with pytest.raises(SourceError, match=match):
            pack(path, tmp_path / "bad.hr", resume=False)
        refused += 1
    assert refused == 5


def test_external_virtual_and_compact_data_are_packed_only(tmp_path):
    (tmp_path / "raw").write_bytes(ROWS.tobytes())
    with h5py.File(tmp_path / "e.h5", "w") as f:
        f.create_dataset("x", ROWS.shape, "u1", external=[(str(tmp_path / "raw"), 0, ROWS.nbytes)])
    check_packed_only(tmp_path / "e.h5", tmp_path, VALUES, None, "other files")
    make(tmp_path / "a.h5")
    with h5py.File(tmp_path / "v.h5", "w") as f:
        layout = h5py.VirtualLayout(ROWS.shape, "u1")
        layout[:] = h5py.VirtualSource(str(tmp_path / "a.h5"), "train/x", ROWS.shape)
        f.create_virtual_dataset("x", layout)
    check_packed_only(tmp_path / "v.h5", tmp_path, VALUES, None, "other files")
    with h5py.File(tmp_path / "c.h5", "w") as f:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((60, 8))
        data = h5py.h5d.create(f.id, b"x", h5py.h5t.STD_U8LE, space, plan)
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(ROWS[:, :, 0]))
    values = [np.ascontiguousarray(row[:, 0]).tobytes() for row in ROWS]
    check_packed_only(tmp_path / "c.h5", tmp_path, values, None, "header")


def test_rows_that_were_never_written_have_no_place(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        data = f.create_dataset("x", (60, 8), "u1", chunks=(10, 8), fillvalue=7)
        data[:10] = 1
        f.create_dataset("huge", (1 << 38, 1000), "u1", chunks=(1, 1000))
        f.create_dataset("contiguous", (1 << 28,), "u1")
    path = tmp_path / "a.h5"
    check_packed_only(
        path, tmp_path, [b"\1" * 8] * 10 + [b"\7" * 8] * 50, None, "never written", column="x"
    )
    for name in ("huge", "contiguous"):
        for make_store in (index, pack):
            with pytest.raises(SourceError, match="was never written"):
                make_store(path, tmp_path / "o.hr", column=name, overwrite=True)


def test_the_largest_data_set_is_taken_and_others_by_name(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["test/x"], f["test/labels"] = ROWS[:20], LABELS[:20]
        f["train/x"], f["train/labels"] = ROWS, LABELS
        f["mean"] = 3.5
        f["train/float"] = np.ones(60)
        f["loop"] = h5py.SoftLink("/")
    path = tmp_path / "a.h5"
    with open_store(path) as store:
        assert (store.parts, len(store), store.labels.tolist()) == (["train/x"], 60, LABELS)
    with open_store(path, column="test/x") as store:
        assert store.labels.tolist() == LABELS[:20]
    with open_store(path, column=["train/x", "train/float"], label="") as store:
        assert (store.labels, store.parts) == (None, ["train/float", "train/x"])
        assert bytes(store.read(3, part="train/x")) == VALUES[3]
    for options, match in (
        ({"column": "nope"}, "no data set 'nope'.*'test/x'"),
        ({"column": "mean"}, "no data set 'mean'"),
        ({"column": "train"}, "no data set 'train'"),
        ({"column": ["train/x", "test/x"]}, r"have \[20, 60\] rows"),
        ({"column": "train/x", "label": "test/labels"}, r"have \[20, 60\] rows"),
        ({"label": "train/float"}, "expected one integer a row"),
    ):
        with pytest.raises(SourceError, match=match):
            index(path, tmp_path / "i.hr", **options)


def test_several_files_are_one_source(tmp_path):
    for k in range(2):
        make(tmp_path / f"{k}.h5", ROWS[30 * k : 30 * k + 30], chunks=(7, 8, 9))
    with open_store(tmp_path / "*.h5") as store:
        assert read_all(store) == VALUES
        assert store.names[30] == "1.h5:0000000"


def test_what_holds_no_rows_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["scalar"] = 3
    with pytest.raises(SourceError, match="no samples"):
        index(tmp_path / "a.h5", tmp_path / "i.hr")
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("x", (0, 5), "f4")
    with pytest.raises(SourceError, match="no samples"):
        index(tmp_path / "a.h5", tmp_path / "i.hr")


def test_places_that_h5py_says_are_checked(tmp_path, monkeypatch):
    """Whatever the library reads out of a damaged file, no extent leaves the file or overlaps."""
    path = make(tmp_path / "a.h5", chunks=(7, 8, 9))

    class Info:
        def __init__(self, at, byte_offset, size=7 * 72):
            self.chunk_offset, self.byte_offset, self.size = (at, 0, 0), byte_offset, size

    good = [Info(7 * k, 4096 + 504 * k) for k in range(9)]
    cases = {
        "place of a chunk": [*good, Info(0, 4096)],
        "place of a chunk ": [*good[:8], Info(60, 8192)],
        "place of a chunk  ": [*good[:8], Info(1 << 60, 8192)],
        "bytes of a chunk": [*good[:8], Info(56, 8192, 3)],
        "distance of two chunks": [*good[:8], Info(56, 4096 + 100)],
        "end of row": [*good[:8], Info(56, 1 << 60)],
        "never written": good[:8],
    }
    for match, infos in cases.items():
        monkeypatch.setattr(hdf5, "_each_chunk", lambda _, note, i=infos: [note(x) for x in i])
        with pytest.raises(SourceError, match=match.strip()):
            index(path, tmp_path / "i.hr")


@pytest.mark.parametrize("options", [{}, {"chunks": (7, 8, 9)}], ids=str)
def test_damage_never_escapes_as_another_error(tmp_path, options):
    path = make(tmp_path / "a.h5", **options)
    good = path.read_bytes()
    refused = 0
    for size in range(0, len(good), 211):
        path.write_bytes(good[:size])
        with pytest.raises(SourceError):
            index(path, tmp_path / "i.hr")
        refused += 1
    r = np.random.default_rng(2)
    for _ in range(150):
        data = bytearray(good)
        for at in r.integers(0, len(data), 3):
            data[at] = r.integers(256)
        path.write_bytes(data)
        try:
            open_store(path).close()
        except HeadraceError:
            refused += 1
    assert refused > 40


def test_a_chunk_that_is_too_large_for_memory_is_read_in_pieces():
    read = []

    class Array:
        shape = chunks = (64, 16 << 20)
        dtype = np.dtype(np.uint8)

        def __getitem__(self, rows):
            read.append(rows)
            return np.broadcast_to(np.uint8(7), (rows.stop - rows.start, *self.shape[1:]))

    count, row = next(hdf5._array_rows([b""], [Array()], None))
    assert (count, len(row.parts[0][1])) == (64, 16 << 20)
    (rows,) = read
    assert 1 < rows.stop - rows.start <= 16  # of 16 MiB, where 256 MiB are allowed
