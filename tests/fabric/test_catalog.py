"""The catalog of a namespace: there and back, and every field of it wrong."""

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.errors import CorruptStore
from headrace.fabric.image import (
    ENTRIES_MAX,
    MAGIC,
    PAGE_BYTES,
    CatalogEntry,
    lay_out,
    pack_catalog,
    parse_header,
    parse_table,
)

WHERE = "nvme+tcp://node:4420/nqn.2026-11.io.example:one?ns=1"
FILES = [("store.json", 700), ("segment-0000.hrd", 9000), ("volume-0000.hrv", 40_000), ("e", 0)]
WHOLE = 1 << 20


def crc(data):
    return _native.crc32c(np.frombuffer(bytes(data), np.uint8), 0)


def parse(data, whole=WHOLE):
    header = parse_header(data[:PAGE_BYTES], WHERE, namespace_bytes=whole)
    table = data[PAGE_BYTES : PAGE_BYTES + header.table_bytes]
    return parse_table(header, table, WHERE, namespace_bytes=whole)


def sealed(data, table_bytes=None):
    """The same with both checksums right."""
    data = bytearray(data)
    nbytes = struct.unpack_from("<Q", data, 16)[0] if table_bytes is None else table_bytes
    struct.pack_into("<I", data, 24, crc(data[PAGE_BYTES : PAGE_BYTES + nbytes]))
    struct.pack_into("<I", data, 28, 0)
    struct.pack_into("<I", data, 28, crc(data[:PAGE_BYTES]))
    return bytes(data)


def test_there_and_back():
    entries = lay_out(FILES)
    data = pack_catalog(entries)
    assert len(data) == 2 * PAGE_BYTES
    assert parse(data) == {e.name: e for e in entries}
    assert all(e.offset % PAGE_BYTES == 0 for e in entries)
    assert entries[0].offset == 2 * PAGE_BYTES


def test_the_bytes_are_those_of_the_documentation():
    data = pack_catalog([CatalogEntry("ab", 2, 4096, 5)])
    table = struct.pack("<IIQQ8s", 2, 2, 4096, 5, b"ab")
    assert data[PAGE_BYTES:] == table.ljust(PAGE_BYTES, b"\0")
    head = struct.pack("<8sIIQI", MAGIC, 1, 1, 32, crc(table))
    assert data[:28] == head
    assert data[28:32] == struct.pack("<I", crc(head.ljust(PAGE_BYTES, b"\0")))
    assert not any(data[32:PAGE_BYTES])


NAME = st.text("abcdefghij-_.é", min_size=1, max_size=20).filter(lambda n: n not in (".", ".."))


@given(st.dictionaries(NAME, st.integers(0, 1 << 40), min_size=1, max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_names_and_sizes(files):
    entries = lay_out(files.items())
    assert parse(pack_catalog(entries), 1 << 60) == {e.name: e for e in entries}


@given(st.integers(0, 2 * PAGE_BYTES - 1), st.integers(1, 255))
@settings(deadline=None)
def test_a_flipped_byte_is_found_or_is_padding(at, mask):
    data = bytearray(pack_catalog(lay_out(FILES)))
    used = PAGE_BYTES + struct.unpack_from("<Q", data, 16)[0]
    data[at] ^= mask
    if at >= used:  # behind the table
        assert parse(bytes(data))
        return
    with pytest.raises(CorruptStore):
        parse(bytes(data))


HEADER_FIELDS = {
    "magic": (0, b"HRNSCAT2", "no store lies here"),
    "version": (8, struct.pack("<I", 2), "catalog version is 2, expected 1"),
    "no entries": (12, struct.pack("<I", 0), "catalog entries is 0"),
    "too many entries": (12, struct.pack("<I", ENTRIES_MAX + 1), "catalog entries is"),
    "more entries than fit": (12, struct.pack("<I", 1000), "catalog table in bytes"),
    "no table": (16, struct.pack("<Q", 0), "catalog table in bytes is 0"),
    "an odd table": (16, struct.pack("<Q", 161), "catalog table in bytes is 161"),
    "a table behind the end": (16, struct.pack("<Q", WHOLE), "catalog table in bytes"),
    "an endless table": (16, struct.pack("<Q", (1 << 64) - 8), "catalog table in bytes"),
    "something behind": (100, b"\1", "rest of the catalog's header"),
}


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_wrong_field_of_the_header(field):
    at, value, message = HEADER_FIELDS[field]
    data = bytearray(pack_catalog(lay_out(FILES)))
    data[at : at + len(value)] = value
    with pytest.raises(CorruptStore, match=message) as caught:
        parse(sealed(data, table_bytes=152))
    assert WHERE in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize(("at", "what"), [(24, "table checksum"), (28, "header checksum")])
def test_a_wrong_checksum(at, what):
    data = bytearray(pack_catalog(lay_out(FILES)))
    data[at] ^= 1
    if at == 24:
        struct.pack_into("<I", data, 28, 0)
        struct.pack_into("<I", data, 28, crc(data[:PAGE_BYTES]))
    with pytest.raises(CorruptStore, match=what):
        parse(bytes(data))


def test_a_namespace_without_a_store():
    with pytest.raises(CorruptStore, match="no store lies here"):
        parse(bytes(2 * PAGE_BYTES))
    with pytest.raises(CorruptStore, match="first page in bytes is 512"):
        parse_header(bytes(512), WHERE, namespace_bytes=512)


# The first entry: nsid at 0, name_bytes at 4, offset at 8, length at 16, name at 24 ("store.json").
ENTRY_FIELDS = {
    "a name of no bytes": (4, struct.pack("<I", 0), "its name in bytes is 0"),
    "a name behind the end": (4, struct.pack("<I", 1 << 31), "its name in bytes"),
    "a longer name": (4, struct.pack("<I", 17), "its padding is not zero"),
    "a place in the catalog": (8, struct.pack("<Q", 4096), "first byte of 'store.json' is 4,096"),
    "a place over another": (8, struct.pack("<Q", 3 * 4096), "first byte of"),
    "a place far away": (8, struct.pack("<Q", 1 << 63), "its place is"),
    "behind the end": (8, struct.pack("<Q", WHOLE), "last byte of 'store.json'"),
    "an endless length": (16, struct.pack("<Q", (1 << 64) - 1), "its place is"),
    "a length over the next": (16, struct.pack("<Q", 5000), "first byte of 'segment-0000.hrd'"),
    "a way up": (24, b"../../../x", "its name is b'../../../x', expected a relative path"),
    "an absolute name": (24, b"/etc/hosts", "its name is"),
    "an empty part": (24, b"a//bcdefgh", "its name is"),
    "a NUL": (24, b"store\0json", "its name is"),
    "no UTF-8": (24, b"\xff\xfe" + b"a" * 8, "its name is"),
    "a newline": (24, b"store\njson", "its name is"),
    "padding": (24, b"store.json\1", "its padding is not zero"),
}


@pytest.mark.parametrize("field", ENTRY_FIELDS)
def test_a_wrong_field_of_an_entry(field):
    at, value, message = ENTRY_FIELDS[field]
    data = bytearray(pack_catalog(lay_out(FILES)))
    data[PAGE_BYTES + at : PAGE_BYTES + at + len(value)] = value
    with pytest.raises(CorruptStore, match=message) as caught:
        parse(sealed(data))
    assert WHERE in str(caught.value)


def test_a_name_twice():
    entries = lay_out([("a", 1), ("a", 1)])
    with pytest.raises(CorruptStore, match="a second 'a'"):
        parse(pack_catalog(entries))


def test_fewer_and_more_entries_than_the_header_says():
    data = bytearray(pack_catalog(lay_out(FILES)))
    for count, message in (
        (3, "end of the catalog's last entry"),
        (5, "catalog table in bytes is 152"),
    ):
        struct.pack_into("<I", data, 12, count)
        with pytest.raises(CorruptStore, match=message):
            parse(sealed(data))


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_any_table_is_judged(table):
    """Whatever lies there under right checksums: entries, or one clear error."""
    table = table.ljust(-(-max(32, len(table)) // 8) * 8, b"\0")
    data = bytearray(pack_catalog([CatalogEntry("a", 0, 8192, 1)])[:PAGE_BYTES])
    struct.pack_into("<Q", data, 16, len(table))
    data += table
    try:
        assert len(parse(sealed(data))) == 1
    except CorruptStore as e:
        assert "expected" in str(e)  # noqa: PT017 - it may be right, too


@pytest.mark.parametrize("name", ["", "a/../b", "/a", "a\0", "x" * 1025, "a\\b"])
def test_a_name_that_cannot_be_written(name):
    with pytest.raises(ValueError):
        pack_catalog([CatalogEntry(name, 0, 8192, 1)])
