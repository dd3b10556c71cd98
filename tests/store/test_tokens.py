"""Files of tokens: documents are what their index says, and nothing of them is guessed or believed."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace
from headrace.errors import HeadraceError, SourceError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def documents_of(dtype, count=20):
    rng = np.random.default_rng(7)
    return [rng.integers(0, 100, n).astype(dtype) for n in rng.integers(0, 50, count)]


def write_pair(folder, documents, name="train_text_document", sequences=1, modes=False):
    """A pair as Megatron writes it, each document of some sequences; returns the `.bin`."""
    folder.mkdir(exist_ok=True)
    parts = [part for d in documents for part in np.array_split(d, sequences)]
    dtype = documents[0].dtype
    (folder / f"{name}.bin").write_bytes(b"".join(part.tobytes() for part in parts))
    lengths = np.array([len(part) for part in parts], "<i4")
    offsets = (np.cumsum(lengths.astype("<i8")) - lengths) * dtype.itemsize
    borders = np.arange(len(documents) + 1, dtype="<i8") * sequences
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype.name], len(parts), len(borders))
    index = head + lengths.tobytes() + offsets.astype("<i8").tobytes() + borders.tobytes()
    (folder / f"{name}.idx").write_bytes(index + bytes(len(parts)) * modes)
    return folder / f"{name}.bin"


def read(store, dtype):
    return [np.frombuffer(store.read(i), dtype).tolist() for i in range(len(store))]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(("sequences", "modes"), [(1, False), (3, True)])
def test_megatrons_pairs_are_read_in_place(tmp_path, dtype, sequences, modes):
    documents = documents_of(dtype)
    data = write_pair(tmp_path / "data", documents, sequences=sequences, modes=modes)
    expected = [d.tolist() for d in documents]
    for path in (data, data.with_suffix(".idx"), data.parent):
        with headrace.open(path) as store:
            assert read(store, dtype) == expected
    headrace.index(data, tmp_path / "index")
    headrace.pack(data.parent, tmp_path / "pack")
    for store in ("index", "pack"):
        assert json.loads((tmp_path / store / "store.json").read_bytes())["segments"][0]["source"][
            "tokens"
        ] == {"dtype": dtype}
        with (
            headrace.open(tmp_path / store) as opened,
            headrace.tokens(opened, 16, 4, shuffle=False) as batches,
        ):
            rows = np.concatenate([batch.inputs for batch in batches]).reshape(-1)
            assert rows.tolist() == np.concatenate(documents)[: len(rows)].tolist()


def test_several_pairs_are_one_source_and_splits_are_not(tmp_path):
    first, second = documents_of("uint16"), documents_of("uint16", 5)
    for name in ("part_0", "part_1"):
        write_pair(tmp_path / "data", first if name == "part_0" else second, name)
    with headrace.open(tmp_path / "data") as store:
        assert read(store, "uint16") == [d.tolist() for d in (*first, *second)]
    for name in ("train_text_document", "valid_text_document"):
        write_pair(tmp_path / "splits", first, name)
    with pytest.raises(SourceError, match="several splits"):
        headrace.open(tmp_path / "splits")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_index_is_refused_or_harmless(tmp_path, data):
    """Whatever an index says: an error of ours, or documents that lie in the file."""
    path = write_pair(tmp_path / "data", documents_of("uint16"))
    index = path.with_suffix(".idx")
    raw = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(9, len(raw) - 1))
        raw[at] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
    index.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        with headrace.open(path) as store:
            assert store.nbytes <= 64 * path.stat().st_size
            for i in range(len(store)):
                store.read(i)
    except HeadraceError as e:
        if not e.next_step:
            raise


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (9, struct.pack("<Q", 2), "version is 2, expected 1"),
        (17, b"\x06", "tokens are float64, expected integers"),
        (17, b"\x63", "of the type 99"),
        (18, struct.pack("<Q", 1 << 60), "what fits into"),
        (26, struct.pack("<Q", 1 << 62), "what fits into"),
        (34, struct.pack("<i", -1), "place of sequence 0"),
        (34, struct.pack("<i", 1 << 30), "place of sequence 0"),
        (34 + 4 * 20, struct.pack("<q", 1 << 50), "place of sequence 0"),
        (34 + 12 * 20, struct.pack("<q", 3), "ascending from 0 to 20"),
        (34 + 12 * 20 + 8, struct.pack("<q", -3), "ascending from 0 to 20"),
    ],
)
def test_an_index_that_lies_is_refused_by_name(tmp_path, at, value, message):
    path = write_pair(tmp_path / "data", documents_of("uint16"))
    index = path.with_suffix(".idx")
    raw = bytearray(index.read_bytes())
    raw[at : at + len(value)] = value
    index.write_bytes(raw)
    with pytest.raises(SourceError, match=message):
        headrace.open(path)


def test_bare_files_are_read_as_the_user_says_and_not_otherwise(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    path = tmp_path / "train.bin"
    tokens.tofile(path)
    with pytest.raises(SourceError, match=r"train\.bin: begins with") as error:
        headrace.open(path)
    assert "--as uint16" in error.value.next_step
    with (
        headrace.open(path, format="uint16") as store,
        headrace.tokens(store, 100, 1, shuffle=False) as batches,
    ):
        assert np.concatenate([b.inputs[0] for b in batches]).tolist() == list(range(900))
    with pytest.raises(
        ValueError, match="stored is 'uint8', the store says that tokens are uint16"
    ):
        headrace.tokens(headrace.open(path, format="uint16"), 100, 1, stored="uint8")
    path.write_bytes(bytes(1001))
    with pytest.raises(SourceError, match="1,001 bytes, expected a multiple of 2"):
        headrace.open(path, format="uint16")


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")]
)
def test_llmc_says_what_it_holds(tmp_path, magic, version, dtype):
    tokens = np.arange(500, dtype=dtype)
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens)
    path = tmp_path / "train_000001.bin"
    path.write_bytes(head.tobytes() + tokens.tobytes())
    with headrace.open(path) as store:
        assert read(store, dtype) == [tokens.tolist()]
    with pytest.raises(SourceError, match=f"its tokens are {dtype}, the format is int64"):
        headrace.open(path, format="int64")
    path.write_bytes(head.tobytes() + tokens.tobytes()[:-4])
    with pytest.raises(SourceError, match="number of tokens is 500"):
        headrace.open(path)
