"""ArrayRecord files as a source: packed through their own package, where it is installed."""

from __future__ import annotations

import pytest

from headrace.errors import MissingPackage, SourceError
from headrace.store import open_store
from headrace.store.pack import index, pack
from headrace.store.sources.detect import RIEGELI_MAGIC

from .rows import read_all, some_values


def writer_of(path, options):
    module = pytest.importorskip("array_record.python.array_record_module")
    return module.ArrayRecordWriter(str(path), options)


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:8,zstd"])
def test_records_are_packed_and_cannot_be_indexed(tmp_path, options):
    values = some_values(40, largest=90_000)
    path = tmp_path / "a.array_record"
    writer = writer_of(path, options)
    for value in values:
        writer.write(value)
    writer.close()
    if "uncompressed" in options:
        # Why: longer records than a block are nowhere in one piece.
        data = path.read_bytes()
        assert any(value not in data for value in values)
        assert all(value in data for value in values if len(value) < 20)
    with pytest.raises(SourceError, match=r"(?s)64 KiB blocks.*Pack it"):
        index(path, tmp_path / "i.hr")
    pack(path, tmp_path / "p.hr")
    with open_store(tmp_path / "p.hr") as store:
        assert read_all(store) == values
        assert store.names[7] == "a.array_record:0000007"


def test_truncated_files_are_refused_though_their_reader_says_nothing(tmp_path):
    path = tmp_path / "a.array_record"
    writer = writer_of(path, "group_size:1,uncompressed")
    for value in some_values(60, largest=9000):
        writer.write(value)
    writer.close()
    good = path.read_bytes()
    for size in (0, 1, 63, 64, 1000, 65_536, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(SourceError):
            pack(path, tmp_path / "p.hr", overwrite=True)


def test_without_the_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "array_record.python.array_record_module", None)
    (tmp_path / "x").write_bytes(RIEGELI_MAGIC + bytes(100))
    with pytest.raises(MissingPackage, match=r"pip install 'headrace\[array-record\]'"):
        pack(tmp_path / "x", tmp_path / "p.hr")
