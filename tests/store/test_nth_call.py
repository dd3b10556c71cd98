"""Every call that changes files is refused once: a typed error, the right advice, and nothing left behind.

`each 5th call` is for every day; `all` refuses each call with each of the errors.
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from itertools import count

import numpy as np
import pytest

from headrace.checkpoint import Checkpointer, CheckpointOptions
from headrace.errors import HeadraceError
from headrace.fabric.image import write_image
from headrace.store import open_store
from headrace.store.pack import append, index, pack
from headrace.store.packing import PackOptions
from headrace.store.repair import repair

from .conftest import contents, flip
from .nth_call import Refusing

OPTIONS = PackOptions(volume_bytes=8192, journal_bytes=3000)
RANGES = (
    pytest.param(5, (errno.EIO,), id="each 5th call"),
    pytest.param(1, (errno.EIO, errno.ENOSPC, errno.EINTR), id="all", marks=pytest.mark.slow),
)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.bin").write_bytes(bytes([i]) * (700 * i + 1))
    return folder


def nothing(source, folder):
    pass


def a_store(source, folder):
    pack(source, folder / "out.hr", options=OPTIONS)


def another_store(source, folder):
    pack([("other", b"x")], folder / "out.hr", options=OPTIONS)


def a_damaged_store(source, folder):
    a_store(source, folder)
    flip(min((folder / "out.hr").glob("*.hrv")), 4100)


MORE = [("more1", b"x" * 5000), ("more2", b"y")]
OPERATIONS = {
    "pack": (nothing, lambda source, folder: pack(source, folder / "out.hr", options=OPTIONS)),
    "overwrite": (
        another_store,
        lambda source, folder: pack(source, folder / "out.hr", options=OPTIONS, overwrite=True),
    ),
    "index": (nothing, lambda source, folder: index(source, folder / "out.hr")),
    "append": (
        a_store,
        lambda _, folder: append(MORE, folder / "out.hr", options=OPTIONS),
    ),
    "repair": (a_damaged_store, lambda _, folder: repair(folder / "out.hr")),
}


def stored(folder):
    """What the store holds; None where there is none, or not all of it can be read."""
    try:
        with open_store(folder / "out.hr") as store:
            return contents(store)
    except HeadraceError:
        return None


def refused_calls(tmp_path, prepare, run, step, codes):
    """(the call that was refused, the error or None, the folder) for each number and code."""
    for code in codes:
        for number in count(1, step):
            folder = tmp_path / "run"
            folder.mkdir()
            prepare(folder)
            error = None
            with pytest.MonkeyPatch.context() as patch:
                refusing = Refusing(folder, number, code).install(patch)
                try:
                    run(folder)
                except Exception as e:  # noqa: BLE001 - looked at by the test
                    error = e
            if not refusing.refused:
                shutil.rmtree(folder)
                break
            if error is not None:
                assert isinstance(error, HeadraceError), (refusing.refused, number, error)
                assert isinstance(error, OSError), (refusing.refused, number, error)
                assert error.errno == code
                assert error.next_step
            yield refusing.refused, error, folder
            del error  # its traceback holds this frame, and so what the call had open
            shutil.rmtree(folder)


@pytest.mark.parametrize(("step", "codes"), RANGES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_refused_call_is_a_typed_error_and_the_next_run_is_right(
    tmp_path, source, name, step, codes
):
    """Of pack's calls 30 of 243 ended in a bare OSError, and 6 advised a resume that ended in StoreExists."""
    prepare, run = OPERATIONS[name]
    whole = tmp_path / "whole"
    whole.mkdir()
    prepare(source, whole)
    run(source, whole)
    expected = stored(whole)
    files = {p.name for p in (whole / "out.hr").iterdir()}
    counts = Counter()
    for call, error, folder in refused_calls(
        tmp_path, lambda f: prepare(source, f), lambda f: run(source, f), step, codes
    ):
        counts["refused" if error else "survived"] += 1
        done = stored(folder) == expected
        assert done or error is not None, call
        if error is not None and "The store can be used" in str(error):
            assert done, call
            assert [p.name for p in folder.iterdir()] == ["out.hr"], call
        elif not done:
            run(source, folder)
            assert stored(folder) == expected, call
            assert [p.name for p in folder.iterdir()] == ["out.hr"], call
            assert {p.name for p in (folder / "out.hr").iterdir()} == files, call
    assert counts["refused"] >= 3, counts


@pytest.mark.parametrize(("step", "codes"), RANGES)
def test_a_refused_call_of_a_checkpoint(tmp_path, step, codes):
    def save(folder):
        options = CheckpointOptions(asynchronous=False, durability="fsync")
        with Checkpointer(folder / "c", options=options) as checkpointer:
            checkpointer.save({"w": np.arange(5)}, 7)

    def loaded(folder):
        with Checkpointer(folder / "c") as checkpointer:
            return checkpointer.load().tree["w"].tolist()

    refusals = 0
    for call, error, folder in refused_calls(tmp_path, lambda _: None, save, step, codes):
        refusals += 1
        assert error is not None, call
        if "manifest.json" not in {p.name for p in folder.rglob("*")}:
            save(folder)
        assert loaded(folder) == [0, 1, 2, 3, 4], call
        assert not [p.name for p in folder.rglob("*.new")], call
    assert refusals > 3


@pytest.mark.parametrize(("step", "codes"), RANGES)
def test_a_refused_call_of_an_image(tmp_path, source, step, codes):
    a_store(source, tmp_path)

    def write(folder):
        write_image(tmp_path / "out.hr", folder / "image", force=True)

    refusals = 0
    for call, error, folder in refused_calls(tmp_path, lambda _: None, write, step, codes):
        refusals += 1
        assert error is not None, call
        write(folder)
        assert [p.name for p in folder.iterdir()] == ["image"], call
    assert refusals > 1
