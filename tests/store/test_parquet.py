"""Parquet files as a source, and the page headers that are read without pyarrow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from headrace.errors import HeadraceError, SourceError  # noqa: E402
from headrace.store import open_store  # noqa: E402
from headrace.store.pack import index, pack  # noqa: E402
from headrace.store.sources import parquet  # noqa: E402
from headrace.store.sources.parquet import BadThrift, ColumnChunk, list_values, parse_struct  # noqa: E402  # noqa: E402
from headrace.store.sources.scan import NotInPlace  # noqa: E402
from headrace.store.sources.shards import Window  # noqa: E402

from .rows import (  # noqa: E402
    check_in_place,
    check_packed_only,
    check_random_damage,
    check_truncations,
    read_all,
    some_labels,
    some_values,
)

PLAIN = {"compression": "none", "use_dictionary": False, "row_group_size": 25}


def table_of(values, labels, kind=None):
    return pa.table({"image": pa.array(values, kind or pa.binary()), "label": pa.array(labels)})


def make(path, values=None, labels=None, kind=None, **options):
    values = some_values() if values is None else values
    labels = some_labels(len(values)) if labels is None else labels
    pq.write_table(table_of(values, labels, kind), path, **{**PLAIN, **options})
    return path


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("page", [500, 1 << 20])
def test_values_of_plain_pages_are_samples_in_place(tmp_path, version, page):
    path = make(tmp_path / "a.parquet", data_page_version=version, data_page_size=page)
    check_in_place(path, tmp_path, some_values(), some_labels())
    with open_store(path) as store:
        assert store.names[7] == "a.parquet:0000007"


def test_structs_of_bytes_and_path_are_in_place(tmp_path, reference):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [{"bytes": v, "path": None} for v in some_values()]
    path = make(tmp_path / "a.parquet", values, kind=kind)
    check_in_place(path, tmp_path, some_values(), some_labels(), reference=reference)


def test_values_of_one_width_and_required_ones_are_in_place(tmp_path):
    values = [bytes([i]) * 12 for i in range(60)]
    path = make(tmp_path / "a.parquet", values, kind=pa.binary(12))
    check_in_place(path, tmp_path, values, some_labels())
    schema = pa.schema([pa.field("image", pa.binary(), nullable=False), ("label", pa.int32())])
    table = table_of(some_values(), some_labels()).cast(schema)
    pq.write_table(table, path, **PLAIN)
    check_in_place(path, tmp_path, some_values(), some_labels())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"compression": "snappy"}, "SNAPPY"),
        ({"compression": "zstd"}, "ZSTD"),
        ({"use_dictionary": True}, "dictionary-encoded"),
        ({"column_encoding": {"image": "DELTA_LENGTH_BYTE_ARRAY"}}, "DELTA_LENGTH-encoded"),
    ],
    ids=str,
)
def test_other_pages_are_packed_only(tmp_path, options, why):
    values = [bytes([i % 3]) * 900 for i in range(60)]
    path = make(tmp_path / "a.parquet", values, **options)
    check_packed_only(path, tmp_path, values, some_labels(), why)


def test_lists_of_bytes_are_packed_only(tmp_path):
    path = make(tmp_path / "a.parquet", [list(v) for v in some_values()], kind=pa.list_(pa.uint8()))
    check_packed_only(path, tmp_path, some_values(), some_labels(), "nested")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_nulls_are_found_though_they_take_no_place(tmp_path, version):
    values = some_values(30)
    values[4] = None
    path = make(tmp_path / "a.parquet", values, data_page_version=version)
    with pytest.raises(SourceError, match="holds nulls"):
        index(path, tmp_path / "i.hr")
    with pytest.raises(SourceError, match="row 4: 'image' is null"):
        pack(path, tmp_path / "p.hr")
    pack(path, tmp_path / "p.hr", on_error="skip")
    with open_store(tmp_path / "p.hr") as store:
        assert read_all(store) == [v for v in values if v is not None]
        assert store.names[4] == "a.parquet:0000005"


def test_many_files_are_one_source(tmp_path):
    values, labels = some_values(), some_labels()
    for k in range(3):
        part = slice(20 * k, 20 * k + 20)
        make(tmp_path / f"train-{k}.parquet", values[part], labels[part])
    check_in_place(str(tmp_path / "*.parquet"), tmp_path, values, labels)
    paths = [tmp_path / f"train-{k}.parquet" for k in (2, 0)]
    index(paths, tmp_path / "some.hr")
    with open_store(tmp_path / "some.hr") as store:
        assert read_all(store) == values[40:] + values[:20]


def test_listing_reads_lengths_not_values(tmp_path, monkeypatch):
    values = [random.Random(i).randbytes(200_000) for i in range(20)]
    path = make(tmp_path / "a.parquet", values)
    read = []
    original = Window.read

    def counting(self, offset, size):
        read.append(size)
        return original(self, offset, size)

    monkeypatch.setattr(Window, "read", counting)
    index(path, tmp_path / "i.hr", checksum=False)
    assert 0 < sum(read) < 100_000
    with open_store(tmp_path / "i.hr") as store:
        assert read_all(store) == values


def chunk_of(path, **changes):
    """The place of the column `image` in the first row group."""
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    fields = {
        "start": column.data_page_offset, "size": column.total_compressed_size,
        "rows": column.num_values, "width": None, "nullable": True,
    }  # fmt: skip
    return ColumnChunk(**{**fields, **changes})


def test_what_the_footer_says_is_not_believed(tmp_path):
    path = make(tmp_path / "a.parquet")
    size = path.stat().st_size
    chunk = chunk_of(path)
    with Window(str(path)) as window:
        offset, length = list_values(window, chunk)
        assert (len(offset), int(length.sum())) == (25, sum(map(len, some_values()[:25])))
        for changes in (
            {"start": -1}, {"start": 0}, {"start": 1 << 60}, {"start": chunk.start + 1},
            {"size": -1}, {"size": size}, {"size": 1 << 62}, {"size": chunk.size - 1}, {"size": 3},
            {"rows": 0}, {"rows": 24}, {"rows": 26}, {"rows": 1 << 62},
            {"nullable": False}, {"width": 7}, {"width": 1 << 50},
        ):  # fmt: skip
            with pytest.raises((SourceError, NotInPlace)):
                list_values(window, chunk_of(path, **changes))


def test_each_damaged_length_is_refused(tmp_path):
    path = make(tmp_path / "a.parquet", data_page_version="2.0")
    good = path.read_bytes()
    with Window(str(path)) as window:
        offset, _ = list_values(window, chunk_of(path))
    for place in offset.tolist()[::5]:
        for value in (0, 0x7FFFFFFF, 0xFFFFFFFF):
            data = good[: place - 4] + value.to_bytes(4, "little") + good[place:]
            if data == good:
                continue
            path.write_bytes(data)
            with pytest.raises(SourceError):
                index(path, tmp_path / "i.hr")


def test_damage_never_escapes_as_another_error(tmp_path):
    path = make(tmp_path / "a.parquet", data_page_size=500)
    assert check_truncations(path, tmp_path, 3001) > 10
    check_random_damage(path, tmp_path, 40)
    assert check_random_damage(path, tmp_path, 60, where=lambda n: (n - 900, n)) > 20


def test_an_unknown_codec_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """pyarrow 26 calls std::terminate when it is asked for the name of one."""
    path = make(tmp_path / "a.parquet")
    footer, data = footer_of(path), path.read_bytes()
    # Field 4 of the column's metadata, the codec, follows field 3, the path.
    at = data.index(b"\x19\x18\x05image\x15\x00", footer) + len(b"\x19\x18\x05image\x15")
    path.write_bytes(data[:at] + b"\x6f" + data[at + 1 :])
    for act in (lambda: open_store(path), lambda: pack(path, tmp_path / "p.hr")):
        with pytest.raises(SourceError, match="compress"):
            act()


def footer_of(path):
    data = path.read_bytes()
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def test_a_footer_that_is_no_thrift_is_refused(tmp_path):
    path = make(tmp_path / "a.parquet")
    data = path.read_bytes()
    for footer in (b"\x49\xfc\xff\xff\xff\xff\x0f", b"\x1c" * 3000, b""):
        path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        with pytest.raises(SourceError):
            index(path, tmp_path / "i.hr")
    path.write_bytes(data[:-8] + (1 << 31).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(SourceError):
        index(path, tmp_path / "i.hr")


def test_deep_and_endless_headers_are_refused(tmp_path):
    path = tmp_path / "x"
    for header in (
        b"\x1c" * 5000,  # a struct in a struct in ...
        b"\x19" + b"\x19" * 5000,  # a list in a list in ...
        b"\x18\xff\xff\xff\xff\x0f",  # a string of 4 GiB
        b"\x19\xf5\xff\xff\xff\xff\x0f",  # a list of 4 billion
        b"\x15" + b"\xff" * 5000,  # a number without end
        b"\x1f\x00",  # an unknown type
        b"\x15",
        b"",
    ):
        path.write_bytes(b"PAR1" + header)
        with Window(str(path)) as window, pytest.raises(SourceError, match="header of a page"):
            parquet.read_page_header(window, 4, 4 + len(header))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_thrift_struct_or_refused(data):
    try:
        fields, used = parse_struct(data)
    except (IndexError, BadThrift):
        return
    assert 0 < used <= len(data)
    assert all(isinstance(k, int) for k in fields)


def thrift(fields):
    """A writer of compact structs, for the reader's test: integers, booleans and structs."""

    def varint(value):
        out = bytearray()
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*out, value])

    def zigzag(value):
        return varint(value << 1 if value >= 0 else (-value << 1) - 1)

    out, before = bytearray(), 0
    for number, value in sorted(fields.items()):
        kind = 12 if isinstance(value, dict) else (2 - value if isinstance(value, bool) else 6)
        step = number - before
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + zigzag(number)
        if kind == 12:
            out += thrift(value)
        elif kind == 6:
            out += zigzag(value)
        before = number
    return bytes(out) + b"\0"


NUMBERS = st.booleans() | st.integers(-(1 << 62), 1 << 62)
FIELDS = st.dictionaries(
    st.integers(1, 300),
    NUMBERS | st.dictionaries(st.integers(1, 40), NUMBERS, max_size=4),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(FIELDS, st.binary(max_size=20))
def test_what_is_written_in_thrift_is_read_back(fields, tail):
    data = thrift(fields)
    assert parse_struct(data + tail) == (fields, len(data))


@settings(max_examples=200, deadline=None)
@given(FIELDS, st.integers(0, 60))
def test_any_page_header_is_understood_or_refused(tmp_path_factory, fields, tail):
    path = tmp_path_factory.getbasetemp() / "page"
    data = thrift(fields)
    path.write_bytes(b"PAR1" + data + bytes(tail))
    chunk = ColumnChunk(4, len(data) + tail, 5, None, nullable=True)
    with Window(str(path)) as window:
        try:
            offset, length = list_values(window, chunk)
        except (HeadraceError, NotInPlace):
            return
        assert len(offset) == 5
        assert int((offset + length).max()) <= window.size
