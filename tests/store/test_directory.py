"""The `.hrd` file: what is written is read back; damage is always noticed."""

from __future__ import annotations

import itertools
import os
import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.base.checksum import crc32c
from headrace.errors import CorruptStore, HeadraceError, SampleNotFound, SourceError
from headrace.store.directory import (
    DirectoryColumns,
    join_names,
    write_directory,
)
from headrace.store.format import PAGE_BYTES
from headrace.store.segment import memory_file

from .reference import ReferenceDirectory, level_counts, parse_header, rows_of, section_end

DIRECTORIES = {True: ReferenceDirectory, False: _native.Directory}


def make_columns(seed: int, n: int = 300, *, shuffled: bool = True) -> DirectoryColumns:
    r = random.Random(seed)
    names = [b"class%d/%06d.png" % (i % 7, i) for i in range(n)]
    if shuffled:
        r.shuffle(names)
    blob, offsets = join_names(names)
    counts = np.array([r.choice([1, 1, 2, 3]) for _ in range(n)], np.uint64)
    m = int(counts.sum())
    firsts = np.zeros(n + 1, np.uint64)
    np.cumsum(counts, out=firsts[1:])
    rng = np.random.default_rng(seed)
    return DirectoryColumns(
        blob,
        offsets,
        volume=rng.integers(0, 300, m).astype(np.uint32),
        offset=rng.integers(0, 1 << 40, m).astype(np.uint64),
        length=rng.integers(0, 1 << 20, m).astype(np.uint64),
        crc=rng.integers(0, 1 << 32, m).astype(np.uint32),
        mtime=rng.integers(-5, 1 << 60, m),
        first_extent=firsts,
        part=np.concatenate([np.arange(c) for c in counts]).astype(np.uint8),
        part_names=(b"cls", b"jpg", b"\xff.png"),
        labels=rng.integers(-1, 200, n),
        class_names=tuple(b"class %d" % i for i in range(200)),
        columns={"width": rng.integers(0, 9999, n).astype(np.uint16), "score": rng.random(n)},
    )


def check(directory, c: DirectoryColumns) -> None:
    n = c.samples
    names = [c.name(i) for i in range(n)]
    assert (directory.samples, directory.extents) == (n, c.extents)
    assert directory.names(np.arange(n)) == names
    assert directory.find_many(names).tolist() == list(range(n))
    assert directory.labels.tolist() == c.labels.tolist()
    assert not directory.labels.flags.writeable
    assert directory.class_names == list(c.class_names)
    assert directory.part_names == list(c.part_names)
    assert directory.columns.keys() == c.columns.keys()
    for key, values in c.columns.items():
        assert directory.columns[key].dtype == values.dtype
        assert directory.columns[key].tolist() == values.tolist()
    wanted = np.array([n - 1, 0, 5, 5])
    firsts = c.firsts.astype(int)
    rows = list(itertools.chain(*(range(firsts[i], firsts[i + 1]) for i in wanted)))
    found = directory.extents_of(wanted)
    for key in ("volume", "offset", "length", "crc"):
        assert found[key].tolist() == getattr(c, key)[rows].tolist()
    assert found["mtime_ns"].tolist() == c.mtime[rows].tolist()
    assert found["part"].tolist() == c.part[rows].tolist()
    assert found["sample"].tolist() == [i for i in wanted for _ in range(firsts[i], firsts[i + 1])]
    assert directory.verify() == []


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_written_is_read(tmp_path, reference, shuffled):
    c = make_columns(1, shuffled=shuffled)
    header = write_directory(c, tmp_path / "a.hrd")
    directory = DIRECTORIES[reference].open(os.fsencode(tmp_path / "a.hrd"))
    check(directory, c)
    assert directory.uuid == header.uuid
    assert directory.header() == header.to_page() == (tmp_path / "a.hrd").read_bytes()[:PAGE_BYTES]


def test_memory_and_file_hold_the_same_bytes(tmp_path):
    c = make_columns(2)
    write_directory(c, tmp_path / "a.hrd")
    with memory_file() as fd:
        write_directory(make_columns(2), fd)
        size = os.fstat(fd).st_size
        assert os.pread(fd, size, 0) == (tmp_path / "a.hrd").read_bytes()


def test_columns_that_say_nothing_take_no_room(tmp_path):
    blob, offsets = join_names([b"%04d" % i for i in range(2000)])
    zero, length = np.zeros(2000, np.uint8), np.full(2000, 255, np.uint32)
    c = DirectoryColumns(blob, offsets, zero, zero, length, labels=np.full(2000, -1))
    header = write_directory(c, tmp_path / "a.hrd")
    section, layout = rows_of(header)
    assert (layout.row_bytes, section.width) == (1, 1)
    directory = ReferenceDirectory.open(str(tmp_path / "a.hrd"))
    assert directory.labels is None
    assert directory.extents_of([7])["mtime_ns"].tolist() == [-1]
    assert not directory.has_crc


def test_an_index_outside_is_named(tmp_path, reference):
    write_directory(make_columns(1), tmp_path / "a.hrd")
    directory = DIRECTORIES[reference].open(os.fsencode(tmp_path / "a.hrd"))
    for bad in (-1, 300):
        with pytest.raises(SampleNotFound, match=str(bad)):
            directory.name(bad)
        with pytest.raises(SampleNotFound, match=str(bad)):
            directory.extents_of(np.array([0, bad]))


def test_bad_columns_are_refused(tmp_path):
    c = make_columns(1)
    c.columns["text"] = np.array(["x"] * 300)
    with pytest.raises(SourceError, match="'text'"):
        write_directory(c, tmp_path / "a.hrd")
    c = make_columns(1)
    c.columns = {f"column{i}": np.zeros(300) for i in range(60)}
    with pytest.raises(SourceError, match="sections, expected at most 60"):
        write_directory(c, tmp_path / "a.hrd")


def read_everything(cls, path):
    """All that a directory says, or the error that it raises."""
    d = cls.open(os.fsencode(path))
    every = np.arange(d.samples)
    found = d.extents_of(every)
    return (
        d.samples, d.names(every), {k: v.tolist() for k, v in found.items()}, d.labels.tolist(),
        {k: v.tolist() for k, v in d.columns.items()}, d.class_names, d.part_names,
        d.find_many(d.names(every)).tolist(),
    )  # fmt: skip


def test_every_flip_is_detected_or_harmless(tmp_path, reference):
    """Flips over the whole file, denser in the header: an error, or exactly the same answers."""
    cls = DIRECTORIES[reference]
    path = tmp_path / "a.hrd"
    write_directory(make_columns(3, n=60), path)
    good = path.read_bytes()
    truth = read_everything(cls, path)
    r = random.Random(7)
    offsets = [*range(0, 1400, 11), *(r.randrange(len(good)) for _ in range(120))]
    injected = detected = harmless = 0
    for offset in offsets:
        data = bytearray(good)
        data[offset] ^= 1 << r.randrange(8)
        path.write_bytes(data)
        injected += 1
        try:
            found = read_everything(cls, path)
        except HeadraceError as e:
            detected += str(path) in str(e)
        else:
            assert found == truth, f"a wrong answer after a flip at {offset}"
            harmless += 1
    assert injected == detected + harmless
    assert detected > 180


def test_truncation_extension_and_overwriting_are_detected(tmp_path, reference):
    cls = DIRECTORIES[reference]
    path = tmp_path / "a.hrd"
    write_directory(make_columns(4, n=120), path)
    good = path.read_bytes()
    r = random.Random(5)
    cases = [good[: r.randrange(len(good))] for _ in range(30)]
    cases += [b"", good[:PAGE_BYTES], good + b"\0", good + good, bytes(len(good))]
    cases += [r.randbytes(len(good)), b"\x89PNG\r\n\x1a\n" + good[8:]]
    for data in cases:
        path.write_bytes(data)
        with pytest.raises(HeadraceError):
            read_everything(cls, path)


def _patched(good: bytes, patches: dict[int, bytes]) -> bytes:
    """A directory with fields changed and the header's own checksum made right again."""
    data = bytearray(good)
    for offset, value in patches.items():
        data[offset : offset + len(value)] = value
    data[12:16] = bytes(4)
    data[12:16] = crc32c(bytes(data[:PAGE_BYTES])).to_bytes(4, "little")
    return bytes(data)


SECTION = 128


@pytest.mark.parametrize(
    "patches",
    [
        pytest.param({24: struct.pack("<Q", 1 << 47)}, id="samples"),
        pytest.param({24: struct.pack("<Q", 1 << 60)}, id="samples-beyond-cap"),
        pytest.param({32: struct.pack("<Q", 1 << 60)}, id="extents"),
        pytest.param({32: struct.pack("<Q", 1)}, id="fewer-extents-than-samples"),
        pytest.param({40: struct.pack("<I", 61)}, id="too-many-sections"),
        pytest.param({40: struct.pack("<I", 0)}, id="no-sections"),
        pytest.param({40: struct.pack("<I", 5)}, id="sections-cut-off"),
        pytest.param({44: struct.pack("<I", 4096)}, id="block-size"),
        pytest.param({56: struct.pack("<Q", 1 << 62)}, id="checksums"),
        pytest.param({72: struct.pack("<Q", 1 << 40)}, id="payload-outside"),
        pytest.param({72: struct.pack("<Q", 4096)}, id="payload-over-checksums"),
        pytest.param({72: struct.pack("<Q", 0), 56: struct.pack("<Q", 1)}, id="payload-in-header"),
        pytest.param({68: struct.pack("<I", 0)}, id="no-parts"),
        pytest.param({68: struct.pack("<I", 70_000)}, id="too-many-parts"),
        pytest.param({8: struct.pack("<I", 2)}, id="version"),
        pytest.param({16: struct.pack("<Q", 1)}, id="file-size"),
        pytest.param({SECTION: struct.pack("<I", 99)}, id="kind"),
        pytest.param({SECTION + 4: struct.pack("<I", 200)}, id="width"),
        pytest.param({SECTION + 8: struct.pack("<Q", 1 << 50)}, id="section-outside"),
        pytest.param({SECTION + 8: struct.pack("<Q", 0)}, id="section-in-header"),
        pytest.param({SECTION + 16: struct.pack("<Q", 1 << 63)}, id="section-bytes"),
        pytest.param({SECTION + 24: struct.pack("<Q", 1 << 61)}, id="section-count"),
        pytest.param({SECTION + 32: b"\x09"}, id="row-layout"),
        pytest.param({SECTION + 64: struct.pack("<I", 1)}, id="section-twice"),
    ],
)
def test_a_lying_header_is_refused_without_a_big_allocation(tmp_path, reference, patches):
    path = tmp_path / "a.hrd"
    write_directory(make_columns(4, n=120), path)
    path.write_bytes(_patched(path.read_bytes(), patches))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptStore):
            read_everything(DIRECTORIES[reference], path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_header_alone_that_says_its_payload_is_itself_is_refused(tmp_path, reference):
    """Such a file has no room for the checksum of its one page: 4 bytes behind its end were read once."""
    path = tmp_path / "a.hrd"
    write_directory(make_columns(4, n=120), path)
    header = {
        16: struct.pack("<Q", PAGE_BYTES),
        40: bytes(4),
        56: struct.pack("<Q", 1),
        72: bytes(8),
    }
    path.write_bytes(_patched(path.read_bytes()[:PAGE_BYTES], header))
    with pytest.raises(CorruptStore, match=r"contradict|payload offset"):
        read_everything(DIRECTORIES[reference], path)


def test_overlapping_sections_are_refused(tmp_path, reference):
    path = tmp_path / "a.hrd"
    header = write_directory(make_columns(4, n=120), path)
    first, second = header.sections[0], header.sections[1]
    assert second.offset > first.offset
    patch = {SECTION + 64 + 8: struct.pack("<Q", first.offset)}
    path.write_bytes(_patched(path.read_bytes(), patch))
    with pytest.raises(CorruptStore):
        read_everything(DIRECTORIES[reference], path)


def test_a_damaged_block_is_listed_by_verify_and_found_on_touch(tmp_path, reference):
    path = tmp_path / "a.hrd"
    header = write_directory(make_columns(5, n=9000), path)
    assert header.checksum_count >= 4
    at = header.payload_offset + 2 * 65_536 + 77
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    directory = DIRECTORIES[reference].open(os.fsencode(path))
    assert directory.verify() == [header.payload_offset + 2 * 65_536]
    with pytest.raises(CorruptStore):
        read_everything(DIRECTORIES[reference], path)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 1 << 63))
def test_random_pages_are_never_believed(start, size):
    page = start.ljust(PAGE_BYTES, b"\0")
    with pytest.raises(CorruptStore):
        parse_header(page, size, "x")


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(16, 800), st.integers(0, 255), min_size=1, max_size=6))
def test_random_headers_with_right_checksums_never_crash(patches):
    """Past the checksum: a forged header gives a consistent header or an error, nothing else."""
    with memory_file() as fd:
        header = write_directory(make_columns(6, n=40), fd)
        size = os.fstat(fd).st_size
    page = _patched(header.to_page(), {k: bytes([v]) for k, v in patches.items()})
    try:
        parsed = parse_header(page, size, "x")
    except CorruptStore:
        return
    for section in parsed.sections:
        assert parsed.payload_offset <= section.offset <= section_end(section) <= size


def test_level_counts():
    assert level_counts(0) == []
    assert level_counts(1) == [1]
    assert level_counts(16) == [16]
    assert level_counts(17) == [17, 2]
    assert level_counts(16**3 + 1) == [4097, 257, 17, 2]
