"""MDS shards as a source, against a writer of their published layout."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError, SourceError
from headrace.store import open_store
from headrace.store.pack import index, pack
from headrace.store.sources.mds import _parse_config

from .rows import (
    check_in_place,
    check_random_damage,
    check_truncations,
    read_all,
    some_labels,
    some_values,
)

ENCODINGS = {"label": ("int", 8), "x": ("bytes", None), "z": ("str", None)}


def encode(encoding, value):
    if encoding == "int":
        return struct.pack("<q", value)
    return value.encode() if isinstance(value, str) else value


def shard_bytes(samples, encodings):
    """One shard; columns stand in the order of their names."""
    names = sorted(encodings)
    config = json.dumps({
        "column_names": names,
        "column_encodings": [encodings[n][0] for n in names],
        "column_sizes": [encodings[n][1] for n in names],
        "compression": None, "format": "mds", "hashes": [], "size_limit": 1 << 26,
    }).encode()  # fmt: skip
    blobs = []
    for sample in samples:
        data = [encode(encodings[n][0], sample[n]) for n in names]
        sizes = [len(d) for d, n in zip(data, names, strict=True) if encodings[n][1] is None]
        blobs.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data))
    first = 4 + 4 * (len(blobs) + 1) + len(config)
    offsets = np.cumsum([first, *map(len, blobs)])
    head = struct.pack(f"<{len(blobs) + 2}I", len(blobs), *offsets.tolist())
    return head + config + b"".join(blobs)


def make_mds(folder, samples, encodings, per_shard=25):
    folder.mkdir(exist_ok=True)
    shards = []
    for k, at in enumerate(range(0, len(samples), per_shard)):
        data = shard_bytes(samples[at : at + per_shard], encodings)
        name = f"shard.{k:05d}.mds"
        (folder / name).write_bytes(data)
        shards.append({
            "format": "mds", "version": 2, "compression": None, "samples": per_shard,
            "raw_data": {"basename": name, "bytes": len(data), "hashes": {}}, "zip_data": None,
        })  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def one_column(folder, values, labels):
    encodings = {"label": ENCODINGS["label"], "x": ENCODINGS["x"]}
    samples = [{"x": v, "label": y} for v, y in zip(values, labels, strict=True)]
    return make_mds(folder, samples, encodings)


def test_samples_are_columns_of_bytes_and_a_label(tmp_path, reference):
    values, labels = some_values(), some_labels()
    root = one_column(tmp_path / "mds", values, labels)
    check_in_place(root, tmp_path, values, labels, reference=reference)
    with open_store(root) as store:
        assert store.names[26] == "shard.00001.mds:0000001"
        assert store.parts == ["x"]
    with open_store(root / "shard.00001.mds") as store:
        assert read_all(store) == values[25:50]


def test_several_columns_are_parts(tmp_path):
    values = some_values(30)
    samples = [{"x": v, "z": f"text {i}", "label": i} for i, v in enumerate(values)]
    root = make_mds(tmp_path / "mds", samples, ENCODINGS)
    index(root, tmp_path / "i.hr")
    with open_store(tmp_path / "i.hr") as store:
        assert store.parts == ["x", "z"]
        assert read_all(store, "x") == values
        assert read_all(store, "z") == [f"text {i}".encode() for i in range(30)]
    check_in_place(root, tmp_path, values, None, column="x", label="")
    with pytest.raises(SourceError, match="no column 'q'"):
        index(root, tmp_path / "q.hr", column="q")
    with pytest.raises(SourceError, match="'x' has the type bytes, expected integers"):
        index(root, tmp_path / "q.hr", label="x")


def test_real_shards_of_the_mosaicml_package(tmp_path):
    streaming = pytest.importorskip("streaming")
    values, labels = some_values(), some_labels()
    with streaming.MDSWriter(
        out=str(tmp_path / "mds"), columns={"x": "bytes", "label": "int"}, size_limit=50_000
    ) as writer:
        for value, label in zip(values, labels, strict=True):
            writer.write({"x": value, "label": label})
    check_in_place(tmp_path / "mds", tmp_path, values, labels)


def test_index_json_cannot_lead_out_of_its_folder(tmp_path):
    root = one_column(tmp_path / "mds", some_values(), some_labels())
    good = json.loads((root / "index.json").read_text())
    (tmp_path / "secret.mds").write_bytes((root / "shard.00000.mds").read_bytes())
    for name in ("../secret.mds", str(tmp_path / "secret.mds"), "", 7, None, "a\0b"):
        good["shards"][0]["raw_data"]["basename"] = name
        (root / "index.json").write_text(json.dumps(good))
        with pytest.raises(SourceError, match="name of shard 0"):
            index(root, tmp_path / "i.hr")


def test_missing_and_compressed_shards_are_said(tmp_path):
    root = one_column(tmp_path / "mds", some_values(), some_labels())
    shard = root / "shard.00001.mds"
    data = shard.read_bytes()
    shard.write_bytes(data + b"x")
    with pytest.raises(SourceError, match=r"shard.00001.mds: size in bytes"):
        index(root, tmp_path / "i.hr")
    shard.unlink()
    with pytest.raises(SourceError, match="Fetch the shard again"):
        index(root, tmp_path / "i.hr")
    listed = json.loads((root / "index.json").read_text())
    listed["shards"][1]["compression"] = "zstd:7"
    (root / "index.json").write_text(json.dumps(listed))
    with pytest.raises(SourceError, match=r"only compressed .zstd:7."):
        index(root, tmp_path / "i.hr")


def test_another_index_json_leaves_a_folder_a_folder(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    for name in ("a.png", "b.png", "c.png"):
        (root / name).write_bytes(b"a")
    for text in ("{}", "[]", '{"shards": 3}', '{"shards": [3]}', "nonsense", "[" * 100_000):
        (root / "index.json").write_text(text)
        with open_store(root) as store:
            assert [str(name) for name in store.names] == ["a.png", "b.png", "c.png"]


def test_lengths_that_leave_the_file_are_refused(tmp_path):
    root = one_column(tmp_path / "mds", some_values(), some_labels())
    shard = root / "shard.00000.mds"
    good = shard.read_bytes()
    for at, value, message in (
        (0, 0xFFFFFFFF, "number of samples"),
        (0, 1 << 20, "number of samples"),
        (4, 0, "offsets"),  # the first sample overlaps the table
        (4 + 4 * 25, len(good) + 1, "offsets"),
        (8, 0xFFFFFFF0, "offsets"),  # beyond the file, and not ascending
        (int.from_bytes(good[4:8], "little"), 0xFFFFFFFF, "end of sample 0"),
        (int.from_bytes(good[4:8], "little"), 3, "end of sample 0"),
    ):
        damaged = good[:at] + struct.pack("<I", value) + good[at + 4 :]
        assert damaged != good
        shard.write_bytes(damaged)
        with pytest.raises(SourceError, match=message):
            index(shard, tmp_path / "i.hr")


def test_damage_never_escapes_as_another_error(tmp_path):
    root = one_column(tmp_path / "mds", some_values(), some_labels())
    shard = root / "shard.00000.mds"
    assert check_truncations(shard, tmp_path, 997) > 20
    head = int.from_bytes(shard.read_bytes()[4:8], "little")
    assert check_random_damage(shard, tmp_path, 60, where=lambda _: (0, head + 50)) > 20


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_shard_or_an_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.mds"
    path.write_bytes(data)
    with pytest.raises(HeadraceError):
        open_store(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(JSON, JSON, JSON)
def test_any_description_of_columns_is_understood_or_refused(names, encodings, sizes):
    text = json.dumps({"column_names": names, "column_encodings": encodings, "column_sizes": sizes})
    try:
        columns = _parse_config("x.mds", text.encode(), 0)
    except SourceError:
        return
    assert all(c.size is None or 0 < c.size < 1 << 32 for c in columns)


def test_a_deep_description_is_no_recursion_error(tmp_path):
    path = tmp_path / "deep.mds"
    config = b"[" * 200_000
    path.write_bytes(struct.pack("<2I", 0, 8 + len(config)) + config)
    with pytest.raises(SourceError, match="description of the columns"):
        index(path, tmp_path / "i.hr")
    with pytest.raises(SourceError):
        pack(path, tmp_path / "i.hr")


# -- arrays of MDS, and LitData's chunks ---------------------------------------------------------------


def array_bytes(values, dtype=None):
    """An array as MDS's encoding `ndarray` writes it; `ndarray:<dtype>` if the type is given."""
    codes = {"uint16": 16, "int32": 33, "float32": 34}
    width = next(w for w in (0, 1, 2, 3) if max(values.shape) < 1 << (8 << w))
    shape = np.array(values.shape, f"<u{1 << width}").tobytes()
    kind = b"" if dtype else bytes([codes[values.dtype.name]])
    return kind + bytes([values.ndim << 2 | width]) + shape + values.tobytes()


@pytest.mark.parametrize("encoding", ["ndarray", "ndarray:uint16"])
def test_arrays_of_one_dimension_are_documents_of_tokens(tmp_path, encoding):
    documents = [np.arange(n, dtype=np.uint16) for n in (1, 255, 256, 70_000, 3)]
    samples = [{"tokens": array_bytes(d, encoding[8:]), "n": i} for i, d in enumerate(documents)]
    root = make_mds(tmp_path / "mds", samples, {"tokens": (encoding, None), "n": ("int", 8)}, 2)
    report = index(root, tmp_path / "i.hr")
    assert report.notes == ["columns left out: 'n'; --column takes them as parts"]
    with open_store(tmp_path / "i.hr") as store:
        assert read_all(store) == [d.tobytes() for d in documents]
        source = store.segments[0].entry.source
        assert (source["tokens"], source["dtypes"]) == ({"dtype": "uint16"}, {"tokens": "uint16"})


@pytest.mark.parametrize(
    "arrays",
    [
        [np.zeros((2, 3), np.uint16), np.zeros((6, 1), np.uint16)],
        [np.zeros(4, np.uint16), np.zeros(4, np.int32)],
        [np.zeros(4, np.uint16), np.zeros((2, 2), np.uint16)],
    ],
)
def test_arrays_that_differ_keep_what_says_what_they_are(tmp_path, arrays):
    samples = [{"x": array_bytes(a)} for a in arrays]
    root = make_mds(tmp_path / "mds", samples, {"x": ("ndarray", None)})
    with open_store(root) as store:
        assert read_all(store) == [array_bytes(a) for a in arrays]
        assert "tokens" not in store.segments[0].entry.source


@pytest.mark.parametrize("other", ["ndarray:int16", "bytes"])
def test_shards_that_encode_a_part_otherwise_are_refused(tmp_path, other):
    """-1 would be read as 65535 by the first shard's word."""
    shards = []
    for k, encoding in enumerate(("ndarray:uint16", other)):
        values = [{"x": array_bytes(np.arange(4, dtype=np.uint16), "uint16")}] * 2
        data = shard_bytes(values, {"x": (encoding, None)})
        (tmp_path / f"shard.{k:05d}.mds").write_bytes(data)
        raw = {"basename": f"shard.{k:05d}.mds", "bytes": len(data), "hashes": {}}
        shards.append({"format": "mds", "raw_data": raw, "compression": None, "samples": 2})
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    with pytest.raises(SourceError, match=r"encoded as 'x: .*first shard as 'x: ndarray:uint16'"):
        pack(tmp_path, tmp_path / "p.hr")


def chunk_bytes(items, tail=b""):
    """A chunk of LitData's; each item is what lies between two of its offsets."""
    first = 4 * (len(items) + 2)
    offsets = np.cumsum([first, *map(len, items)])
    return (
        struct.pack(f"<{len(items) + 2}I", len(items), *offsets.tolist()) + b"".join(items) + tail
    )


def leaves_bytes(*leaves):
    return struct.pack(f"<{len(leaves)}I", *map(len, leaves)) + b"".join(leaves)


def tree(context, *children):
    kind = None if context is None else "builtins.dict"
    return {
        "type": kind,
        "context": context and json.dumps(context),
        "children_spec": list(children),
    }


def make_litdata(folder, chunks, formats, spec, loader="PyTreeLoader", **config):
    folder.mkdir()
    described = []
    for k, data in enumerate(chunks):
        (folder / f"chunk-0-{k}.bin").write_bytes(data)
        described.append(
            {"chunk_bytes": len(data), "chunk_size": 1, "dim": None, "filename": f"chunk-0-{k}.bin"}
        )
    config |= {"data_format": formats, "data_spec": json.dumps([1, spec]), "item_loader": loader}
    (folder / "index.json").write_text(json.dumps({"chunks": described, "config": config}))
    return folder


LEAF = tree(None)
NESTED = tree(["image", "meta"], LEAF, tree(["id", "label"], LEAF, LEAF))


def make_nested(folder, values, labels):
    items = [
        leaves_bytes(value, struct.pack("<q", i), struct.pack("<q", label))
        for i, (value, label) in enumerate(zip(values, labels, strict=True))
    ]
    chunks = [chunk_bytes(items[at : at + 25]) for at in range(0, len(items), 25)]
    return make_litdata(folder, chunks, ["bytes", "int", "int"], NESTED)


def test_leaves_of_litdata_are_parts_and_labels(tmp_path, reference):
    values, labels = some_values(), some_labels()
    root = make_nested(tmp_path / "lit", values, labels)
    check_in_place(root, tmp_path, values, labels, reference=reference, label="meta.label")
    report = index(root, tmp_path / "other.hr")
    assert report.notes == [
        "columns left out: 'meta.id', 'meta.label'; --column takes them as parts"
    ]
    with open_store(tmp_path / "other.hr") as store:
        assert store.parts == ["image"]
    assert pack(root / "chunk-0-1.bin", tmp_path / "one.hr").samples == 25


@pytest.mark.parametrize(
    ("formats", "dtype"), [(["no_header_tensor:16"], "int32"), (["no_header_numpy:5"], "uint16")]
)
def test_tokens_of_litdata_are_documents(tmp_path, formats, dtype):
    documents = [np.arange(n, dtype=dtype).tobytes() for n in (5, 0, 9)]
    root = make_litdata(
        tmp_path / "lit", [chunk_bytes(documents)] * 2, formats, LEAF, "TokensLoader"
    )
    with open_store(root) as store:
        assert read_all(store) == documents * 2
        assert store.segments[0].entry.source["tokens"] == {"dtype": dtype}


def test_rows_in_arrow_at_the_end_of_a_chunk_are_in_place(tmp_path):
    pa = pytest.importorskip("pyarrow")
    values, labels = some_values(), some_labels()
    sink = pa.BufferOutputStream()
    table = pa.table({"image": pa.array(values, pa.binary()), "label": labels})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    rows = sink.getvalue().to_pybytes()
    tail = rows + struct.pack("<I", len(rows)) + b"LDARW01\0"
    root = make_litdata(tmp_path / "lit", [chunk_bytes([b""] * 60, tail)], ["bytes", "int"], LEAF)
    check_in_place(root, tmp_path, values, labels)
    path = root / "chunk-0-0.bin"
    path.write_bytes(path.read_bytes()[:-12] + struct.pack("<I", 1 << 31) + b"LDARW01\0")
    with pytest.raises(SourceError, match="size of the Arrow file at its end is 2,147,483,648"):
        index(root, tmp_path / "x.hr")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"compression": "zstd"}, r"LitData data set with compression \(zstd\)"),
        ({"encryption": {"algorithm": "fernet"}}, "LitData data set with encryption"),
        ({"item_loader": "ParquetLoader"}, "are those of 'ParquetLoader'"),
        ({"data_format": ["bytes"]}, "data_format and data_spec"),
        ({"data_spec": "[" * 5000}, "data_format and data_spec"),
    ],
)
def test_what_litdata_says_of_itself_is_read_or_refused(tmp_path, config, message):
    root = make_nested(tmp_path / "lit", some_values(), some_labels())
    document = json.loads((root / "index.json").read_text())
    document["config"] |= config
    (root / "index.json").write_text(json.dumps(document))
    with pytest.raises(SourceError, match=message):
        index(root, tmp_path / "x.hr")


def test_damage_of_a_chunk_never_escapes_as_another_error(tmp_path):
    root = make_nested(tmp_path / "lit", some_values(largest=300), some_labels())
    path = root / "chunk-0-0.bin"
    check_truncations(path, tmp_path, 97)
    check_random_damage(path, tmp_path, 60, where=lambda size: (0, min(size, 400)))
    (root / "chunk-0-2.bin").unlink()
    with pytest.raises(SourceError, match="cannot be read"):
        pack(root, tmp_path / "x.hr")
