"""Files served from memory behave as files opened from disk, and no other open is touched."""

import builtins
import io
import json
import mmap
import os
import pickle
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.io.replaced import real_open
from headrace.plane.read_ahead import ReadAhead, ReadAheadOptions, opens
from plane.ahead_files import open_descriptors, settle

real = real_open
TEXT = "first line\r\nsecond é\n\nlast".encode()


@pytest.fixture
def planned(tmp_path):
    """Write a file, have it read ahead, and return its path: its next open is served from memory."""
    aheads = []

    def plan(data: bytes, times: int = 1, name: str = "data.bin") -> str:
        path = tmp_path / name
        path.write_bytes(data)
        time.sleep(0.03)
        ahead = ReadAhead(1, None, ReadAheadOptions(bypass=False))
        aheads.append(ahead)
        ahead.coming([str(path)] * times)
        settle(ahead)
        return str(path)

    yield plan
    served = sum(ahead.figures.served for ahead in aheads)
    for ahead in aheads:
        ahead.close()
    assert served > 0, "nothing was served from memory: the test proves nothing"
    assert builtins.open is real


def in_memory(file) -> bool:
    raw = file if isinstance(file, io.FileIO) else getattr(file, "buffer", file).raw
    return isinstance(raw, opens.AheadFile)


def drive(file) -> list[object]:
    """What a program may do with a binary file, as one list of results."""
    results: list[object] = []
    with file:
        results += [file.readable(), file.writable(), file.seekable(), file.isatty(), file.mode]
        results += [file.name, file.closed, file.tell(), file.read(5), file.tell(), file.read(0)]
        results += [file.readline(), file.seek(3), file.readline(4), file.seek(0, 2), file.read()]
        results += [file.seek(-min(4, file.tell()), 2), file.read()]
        results += [file.read(), file.read(10), file.seek(0), file.readlines()]
        results += [file.seek(10**6), file.read(), file.tell(), file.seek(0), list(file)]
        buffer = bytearray(7)
        results += [file.seek(2), file.readinto(buffer), bytes(buffer), file.seek(1, 1)]
        for wrong in (lambda: file.write(b"x"), lambda: file.seek(-1), lambda: file.seek(0, 9),
                      lambda: file.truncate(1)):  # fmt: skip
            with pytest.raises((OSError, ValueError)) as error:
                wrong()
            results.append(error.type)
    results.append(file.closed)
    for after in (file.read, file.tell, file.fileno, lambda: file.seek(0), file.readable):
        with pytest.raises(ValueError):
            after()
    file.close()
    return results


@pytest.mark.parametrize("data", [b"", b"x", TEXT, bytes(range(256)) * 1000])
@pytest.mark.parametrize("buffering", [-1, 0, 16])
def test_a_binary_file_from_memory_acts_as_one_from_disk(planned, data, buffering):
    path = planned(data)
    file = open(path, "rb", buffering)
    assert in_memory(file)
    assert type(file) is (opens.AheadFile if buffering == 0 else io.BufferedReader)
    assert drive(file) == drive(real(path, "rb", buffering))


@pytest.mark.parametrize("options", [
    {}, {"encoding": "utf-8"}, {"encoding": "latin-1", "newline": ""}, {"newline": "\n"},
    {"errors": "replace", "encoding": "ascii"}, {"buffering": 1},
])  # fmt: skip
def test_a_text_file_from_memory_acts_as_one_from_disk(planned, options):
    path = planned(TEXT)
    with open(path, **options) as file, real(path, **options) as expected:
        assert in_memory(file)
        assert type(file) is io.TextIOWrapper
        assert (file.name, file.mode, file.encoding, file.errors, file.line_buffering) == (
            expected.name, expected.mode, expected.encoding, expected.errors,
            expected.line_buffering,
        )  # fmt: skip
        assert file.readline() == expected.readline()
        assert file.tell() == expected.tell()
        assert file.read() == expected.read()
        assert file.newlines == expected.newlines


def test_every_way_to_name_the_file_is_served(planned):
    path = planned(TEXT, times=5)
    assert Path(path).read_bytes() == TEXT
    assert Path(path).read_text("utf-8") == TEXT.decode().replace("\r\n", "\n")
    with open(os.fsencode(path), "rb") as file:
        assert in_memory(file)
        assert file.name == os.fsencode(path)
    with io.open(Path(path), mode="rb") as file:  # noqa: UP020
        assert in_memory(file)
        assert file.name == path
    with open(file=path, mode="br") as file:
        assert in_memory(file)
    with open(path, "rb") as file:  # all planned uses are gone
        assert not in_memory(file)


def test_arguments_that_open_refuses_are_refused_as_ever(planned):
    path = planned(TEXT)
    cases = [
        (("rb",), {"encoding": "utf-8"}), (("r",), {"buffering": 0}), (("rb+x",), {}),
        (("rb",), {"closefd": False}), (("r",), {"newline": "x"}), (("rb",), {"unknown": 1}),
        ((), {"mode": None}),
    ]  # fmt: skip
    for arguments, named in cases:
        with pytest.raises((ValueError, TypeError)) as expected:
            real(path, *arguments, **named)
        with pytest.raises(expected.type):
            open(path, *arguments, **named)
    with open(path, "rb") as file:
        assert in_memory(file)


def test_opens_for_writing_and_of_descriptors_pass_through(planned, tmp_path):
    path = planned(TEXT)
    with open(tmp_path / "new", "wb") as file:
        file.write(b"x")
    with open(os.open(path, os.O_RDONLY), "rb") as file:
        assert not in_memory(file)
    with open(path, "rb", opener=os.open) as file:
        assert not in_memory(file)
    with open(path, "rb") as file:
        assert in_memory(file)


def test_the_descriptor_is_a_real_one_at_the_same_position(planned):
    data = bytes(range(256)) * 100
    path = planned(data, times=4)
    before = open_descriptors()
    with open(path, "rb", 0) as file:
        assert file.read(1000) == data[:1000]
        assert open_descriptors() == before
        fd = file.fileno()
        assert os.lseek(fd, 0, os.SEEK_CUR) == 1000
        assert os.fstat(fd).st_size == len(data)
        assert file.read(10) == data[1000:1010]
        assert os.read(fd, 10) == data[1010:1020]
        assert file.name == path
        assert file.tell() == 1020
    assert open_descriptors() == before
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == data
        assert file.read() == data
    with open(path, "rb") as file:
        file.seek(256)
        assert np.fromfile(file, np.uint8, 10).tolist() == list(range(10))
    assert np.fromfile(path, np.uint8).tobytes() == data
    assert open_descriptors() == before


def test_a_file_replaced_while_open_keeps_its_bytes_also_through_its_descriptor(planned):
    path = planned(b"old bytes")
    with open(path, "rb", 0) as file:
        assert file.read(4) == b"old "
        replacement = Path(path + ".new")
        replacement.write_bytes(b"NEW BYTES")
        replacement.rename(path)
        assert os.pread(file.fileno(), 9, 0) == b"old bytes"
        assert file.read() == b"bytes"
        assert file.name == path
    assert Path(path).read_bytes() == b"NEW BYTES"


def test_libraries_read_from_memory(planned, tmp_path):
    array = np.arange(1000).reshape(10, 100)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", array=array)
    Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 30)).save(tmp_path / "a.png")
    torch.save({"x": torch.arange(9)}, tmp_path / "a.pt")
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"a": array}))
    (tmp_path / "a.json").write_text('{"a": [1, 2]}')
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("member", b"member's bytes")

    def plan(name: str, times: int = 1) -> str:
        return planned((tmp_path / name).read_bytes(), times, name)

    assert (np.load(plan("a.npy")) == array).all()
    assert (np.load(plan("a.npy"), mmap_mode="r") == array).all()
    with np.load(plan("a.npz")) as arrays:
        assert (arrays["array"] == array).all()
    with Image.open(plan("a.png")) as image:
        assert np.asarray(image).ravel()[:256].tolist() == list(range(256))
    with open(plan("a.png"), "rb") as file:
        assert Image.open(file).convert("RGB").size == (30, 10)
    assert torch.load(plan("a.pt"))["x"].tolist() == list(range(9))
    with open(plan("a.pickle"), "rb") as file:
        assert (pickle.load(file)["a"] == array).all()
    with open(plan("a.json")) as file:
        assert json.load(file) == {"a": [1, 2]}
    with zipfile.ZipFile(plan("a.zip")) as archive:
        assert archive.read("member") == b"member's bytes"


def test_open_is_replaced_only_while_something_is_read_ahead(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x")
    with ReadAhead(1, None, ReadAheadOptions(bypass=False)) as ahead:
        assert builtins.open is real
        ahead.coming([path])
        assert builtins.open is io.open is not real
        assert pickle.loads(pickle.dumps(open)) is open

        class Holder:  # a function would bind here, and be handed the instance
            opener = open

        with Holder().opener(__file__) as file:
            assert file.name == __file__
    assert builtins.open is io.open is real


def test_somebody_elses_open_is_left_in_place(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(b"x")
    calls = []

    def theirs(*arguments, **named):
        calls.append(arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(builtins, "open", theirs)
    with ReadAhead(1) as ahead:
        ahead.coming([path])
        assert builtins.open is theirs
        with open(path, "rb") as file:
            assert file.read() == b"x"
    assert builtins.open is theirs
    assert calls
