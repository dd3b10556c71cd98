"""Arrow IPC files and streams as a source."""

from __future__ import annotations

import json
import os

import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.ipc  # noqa: E402, F401 - pa.ipc

from headrace.errors import MissingPackage, SourceError  # noqa: E402
from headrace.store import open_store  # noqa: E402
from headrace.store.pack import append, index, pack  # noqa: E402
from headrace.store.sources import arrow  # noqa: E402
from headrace.store.sources.arrow import values_of  # noqa: E402

from .rows import (  # noqa: E402
    check_in_place,
    check_packed_only,
    check_random_damage,
    check_truncations,
    read_all,
    some_labels,
    some_values,
)


def make(path, table, *, compression=None, rows=25, stream=False):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as f, new(f, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def table_of(values, labels=None, kind=None):
    kind = kind or pa.binary()
    columns = {"image": pa.array(values, kind)}
    if labels is not None:
        columns["label"] = pa.array(labels)
    return pa.table(columns)


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_values_are_samples_in_place(tmp_path, reference, stream):
    values, labels = some_values(), some_labels()
    path = make(tmp_path / "a.arrow", table_of(values, labels), stream=stream)
    check_in_place(path, tmp_path, values, labels, reference=reference)
    with open_store(path) as store:
        assert store.names[7] == "a.arrow:0000007"


def list_of(values):
    return [list(v) for v in values]


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        (pa.large_binary(), list),
        (pa.struct([("path", pa.string()), ("bytes", pa.binary())]),
         lambda values: [{"bytes": v, "path": "x.png"} for v in values]),
        (pa.list_(pa.uint8()), list_of),
        (pa.large_list(pa.uint8()), list_of),
    ],
    ids=("large binary", "image", "list", "large list"),
)  # fmt: skip
def test_each_type_of_bytes_is_known(tmp_path, kind, wrap):
    values, labels = some_values(), some_labels()
    path = make(tmp_path / "a.arrow", table_of(wrap(values), labels, kind))
    check_in_place(path, tmp_path, values, labels)


@pytest.mark.parametrize("kind", [pa.binary(12), pa.list_(pa.uint8(), 12)], ids=str)
def test_values_of_one_width_are_known(tmp_path, kind):
    values = [bytes([i]) * 12 for i in range(60)]
    wrapped = values if kind == pa.binary(12) else list_of(values)
    path = make(tmp_path / "a.arrow", table_of(wrapped, None, kind))
    check_in_place(path, tmp_path, values)


def test_views_are_packed_only(tmp_path):
    values, labels = some_values(), some_labels()
    path = make(tmp_path / "a.arrow", table_of(values, labels, pa.binary_view()))
    check_packed_only(path, tmp_path, values, labels, "several buffers")


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_compressed_buffers_are_packed_only(tmp_path, compression, stream):
    values = [bytes([i]) * 900 for i in range(60)]
    table = table_of(values, some_labels())
    path = make(tmp_path / "a.arrow", table, compression=compression, stream=stream)
    check_packed_only(path, tmp_path, values, some_labels(), "compressed")


def test_several_files_and_several_columns(tmp_path):
    values = some_values(40)
    table = pa.table({"a": values, "b": values[::-1], "y": list(range(40))})
    for k in range(2):
        make(tmp_path / f"{k}.arrow", table.slice(20 * k, 20))
    with open_store(tmp_path / "*.arrow", column=("b", "a")) as store:
        assert store.parts == ["a", "b"]
        assert (read_all(store, "a"), read_all(store, "b")) == (values, values[::-1])
        assert store.labels.tolist() == list(range(40))
        assert store.names[20] == "1.arrow:0000000"
    make(tmp_path / "1.arrow", table.drop_columns("b"))
    with pytest.raises(SourceError, match=r"1.arrow: there is no column 'b'"):
        index(tmp_path / "*.arrow", tmp_path / "i.hr", column=["a", "b"])


def test_nulls_are_refused_or_skipped_under_their_numbers(tmp_path):
    values = some_values(10)
    values[3] = values[8] = None
    path = make(tmp_path / "a.arrow", table_of(values, [*range(9), None]))
    with pytest.raises(SourceError, match=r"(?s)2 things.*row 3 of 'image' is null"):
        index(path, tmp_path / "i.hr")
    for make_store in (index, pack):
        report = make_store(path, tmp_path / "i.hr", on_error="skip", overwrite=True)
        assert (report.samples, len(report.skipped)) == (8, 2)
        with open_store(tmp_path / "i.hr") as store:
            assert read_all(store) == [v for v in values if v is not None]
            assert store.names[3] == "a.arrow:0000004"
            assert store.labels.tolist() == [0, 1, 2, 4, 5, 6, 7, -1]


def test_labels_are_words_of_a_dictionary_or_class_labels(tmp_path):
    words = [f"c{i % 3}" for i in (2, 0, 1, 2, 2, 0)]
    table = table_of(some_values(6)).append_column("label", pa.array(words).dictionary_encode())
    path = make(tmp_path / "a.arrow", table)
    with open_store(path) as store:
        assert [store.classes[i] for i in store.labels] == words
    feature = {"info": {"features": {"label": {"names": ["x", "y", "z"], "_type": "ClassLabel"}}}}
    table = table_of(some_values(6), [0, 1, 2, 0, 1, 2])
    path = make(path, table.replace_schema_metadata({"huggingface": json.dumps(feature)}))
    with open_store(path) as store:
        assert store.classes == ["x", "y", "z"]
    for bad in (b"nonsense", b"[" * 100_000, b"{}", b'{"info": 3}'):  # advice, no part of the data
        make(path, table.replace_schema_metadata({"huggingface": bad}))
        with open_store(path) as store:
            assert (len(store), store.classes) == (6, None)


def test_words_are_numbered_alike_in_all_files(tmp_path):
    for k, words in enumerate((["b", "a", "b"], ["a", "c", "b"])):
        table = table_of(some_values(3)).append_column("y", pa.array(words).dictionary_encode())
        make(tmp_path / f"{k}.arrow", table)
    with open_store(tmp_path / "*.arrow") as store:
        assert [store.classes[i] for i in store.labels] == ["b", "a", "b", "a", "c", "b"]


def test_what_cannot_be_meant_is_said_with_the_columns(tmp_path):
    def refused(match, table, **options):
        path = make(tmp_path / "a.arrow", table)
        with pytest.raises(SourceError, match=match):
            index(path, tmp_path / "i.hr", **options)

    two = pa.table({"a": [b"1"], "b": [b"2"], "n": [1.5]})
    refused("2 columns hold bytes .'a', 'b'.", two)
    refused("no column holds bytes, text or numbers", pa.table({"n": [True]}))
    refused("a list of numbers holds a null", pa.table({"n": [[1, None]]}))
    refused("there is no column 'c'", two, column="c")
    refused("'n' has the type bool", pa.table({"a": [b"1"], "n": [True]}), column="n")
    refused("'n' has the type double", two, column="a", label="n")
    refused("no samples", table_of([]))
    refused("a label in 'label' is -5", table_of([b"1"], [-5]))
    with pytest.raises(ValueError, match="is for tables"):
        index([b"1"], tmp_path / "i.hr", column="a")
    with pytest.raises(ValueError, match="among the columns"):
        index(tmp_path / "a.arrow", tmp_path / "i.hr", column="a", label="a")


def test_offsets_that_leave_the_values_are_refused(tmp_path):
    """pyarrow looks at the last one only: the others are for us."""
    values = [bytes([65 + i]) * 100 for i in range(8)]
    path = make(tmp_path / "a.arrow", table_of(values))
    good = path.read_bytes()
    # The offsets 0, 100, 200, ... as they stand in the file.
    table = b"".join((100 * i).to_bytes(4, "little") for i in range(9))
    at = good.index(table)
    for place, value, match in (
        (8, 800_000, "larger than values"), (8, 0x7FFFFFFF, "larger than values"),
        (4, 50, "order of"), (4, -300, "order of"), (4, 0x7FFFFFFF, "order of"),
        (0, -1, "egative offset"), (8, 801, "larger than values"),
    ):  # fmt: skip
        data = bytearray(good)
        data[at + 4 * place : at + 4 * place + 4] = value.to_bytes(4, "little", signed=True)
        path.write_bytes(data)
        with pytest.raises(SourceError, match=match):
            index(path, tmp_path / "i.hr")


def test_words_of_a_dictionary_are_checked_like_values(tmp_path):
    """pyarrow follows their offsets anywhere, and decodes what is no text."""
    words = ["left " * 20, "right" * 20, "ahead" * 20] * 3
    table = table_of(some_values(9)).append_column("y", pa.array(words).dictionary_encode())
    path = make(tmp_path / "a.arrow", table)
    good = path.read_bytes()
    offsets = b"".join((100 * i).to_bytes(4, "little") for i in range(4))
    at = good.index(offsets)
    for place, value in ((1, 0x7FFFFFF0), (2, 50), (3, 0x7FFFFFF0), (0, -7)):
        data = bytearray(good)
        data[at + 4 * place : at + 4 * place + 4] = value.to_bytes(4, "little", signed=True)
        path.write_bytes(data)
        with pytest.raises(SourceError):
            open_store(path)
    path.write_bytes(good.replace(b"right", b"\xff\xfeght"))
    with open_store(path) as store:  # names are bytes here
        assert store.classes[1].encode(errors="surrogateescape") == b"\xff\xfeght" * 20


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_damage_never_escapes_as_another_error(tmp_path, stream):
    path = make(tmp_path / "a.arrow", table_of(some_values(), some_labels()), stream=stream)
    check_truncations(path, tmp_path, 3001)
    check_random_damage(path, tmp_path, 60)
    # Where the metadata are, most damage is noticed.
    assert check_random_damage(path, tmp_path, 60, where=lambda _: (0, 700)) > 10


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("restored", [False, True])
def test_a_file_truncated_while_it_is_indexed_is_an_error_and_no_crash(
    tmp_path, stream, restored, monkeypatch
):
    """In the middle of listing its rows, where pyarrow's arrays lie over lost pages."""
    path = make(tmp_path / "a.arrow", table_of(some_values(900), some_labels(900)), stream=stream)
    before, content = path.stat(), path.read_bytes()
    assert len(content) > 1 << 16
    calls = 0

    def values_of_truncated(array, where):
        nonlocal calls
        calls += 1
        if calls == 1:
            os.truncate(path, 0)
        try:
            return values_of(array, where)
        finally:
            if restored:
                with path.open("r+b") as file:
                    file.write(content)
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(arrow, "values_of", values_of_truncated)
    with pytest.raises(SourceError, match=r"shrank|size in bytes|modification|sound Arrow|order"):
        index(path, tmp_path / "i.hr")
    assert calls > 0


def test_a_changed_file_is_noticed(tmp_path):
    path = make(tmp_path / "a.arrow", table_of(some_values(), some_labels()))
    index(path, tmp_path / "i.hr")
    make(path, table_of(some_values(seed=2), some_labels()))
    with pytest.raises(SourceError, match="changed after it was indexed"):
        open_store(tmp_path / "i.hr")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = make(tmp_path / "a.arrow", table_of(some_values()))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.types", None)
    with pytest.raises(MissingPackage, match=r"pip install 'headrace\[arrow\]'"):
        open_store(path)


@pytest.mark.parametrize("form", ["arrow", "parquet", "compressed"])
def test_integers_that_nulls_would_round_are_refused(tmp_path, form):
    """Nulls are NaN, and float64 does not hold 2^53 + 1: also where the null lies in another piece."""
    import pyarrow.parquet as pq

    numbers = [1, 2**53 + 1, 3, None]
    table = pa.table({"data": [b"a", b"b", b"c", b"d"], "big": pa.array(numbers, pa.int64())})
    source = tmp_path / ("t.arrow" if form == "arrow" else "t.parquet")
    if form == "arrow":
        with pa.OSFile(str(source), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=2)
    else:
        pq.write_table(
            table, source, row_group_size=2, use_dictionary=False,
            compression="snappy" if form == "compressed" else "none",
        )  # fmt: skip
    with pytest.raises(SourceError, match=r"column 'big' has .*(nulls|point)"):
        pack(source, tmp_path / "p.hr")
    assert not (tmp_path / "p.hr").exists()


def test_integers_that_nulls_would_round_are_refused_over_files_and_segments_too(tmp_path):
    import pyarrow.parquet as pq

    exact, with_null = tmp_path / "0.parquet", tmp_path / "1.parquet"
    for path, numbers in ((exact, [1, 2**53 + 1]), (with_null, [3, None])):
        table = pa.table({"data": [b"a", b"b"], "big": pa.array(numbers, pa.int64())})
        pq.write_table(table, path, use_dictionary=False, compression="none")
    for make in (pack, index):
        with pytest.raises(SourceError, match="column 'big' has nulls"):
            make([exact, with_null], tmp_path / "both.hr")
    pack(exact, tmp_path / "one.hr")
    with pytest.raises(SourceError, match="column 'big' has nulls"):
        append(with_null, tmp_path / "one.hr", prefix_names=True)
    with open_store(tmp_path / "one.hr") as store:
        assert store.columns["big"].tolist() == [1, 2**53 + 1]
