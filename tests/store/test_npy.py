"""Numpy's files as a source."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.errors import HeadraceError, SourceError
from headrace.store import open_store
from headrace.store.pack import index, pack

from .reference import open_either


@pytest.mark.parametrize("make", [pack, index])
def test_rows_are_samples(tmp_path, reference, make):
    array = np.random.default_rng(1).normal(size=(40, 3, 5)).astype(np.float32)
    np.save(tmp_path / "a.npy", array)
    make(tmp_path / "a.npy", tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert len(store) == 40
        assert store.names[7] == "0000007"
        for i in range(40):
            row = np.frombuffer(store.read(i), np.float32).reshape(3, 5)
            assert (row == array[i]).all()
        described = store.manifest.segments[0].source["arrays"][""]
        assert described == {"shape": [40, 3, 5], "dtype": "<f4"}


@pytest.mark.parametrize("make", [pack, index])
def test_arrays_of_an_npz_are_parts_and_labels(tmp_path, reference, make):
    rng = np.random.default_rng(2)
    x, z = rng.integers(0, 255, (30, 8, 8), np.uint8), rng.normal(size=(30, 2))
    y = rng.integers(0, 10, 30)
    np.savez(tmp_path / "a.npz", x=x, y=y, z=z)
    make(tmp_path / "a.npz", tmp_path / "out.hr")
    with open_either(tmp_path / "out.hr", reference=reference) as store:
        assert store.parts == ["x", "z"]
        assert store.labels.tolist() == y.tolist()
        for i in range(30):
            assert bytes(store.read(i, part="x")) == x[i].tobytes()
            assert bytes(store.read(i, part="z")) == z[i].tobytes()


def test_a_vector_in_fortran_order_is_rows(tmp_path):
    with (tmp_path / "a.npy").open("wb") as file:  # as Julia writes it
        header = {"descr": "<i4", "fortran_order": True, "shape": (3,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.arange(3, dtype="<i4").tobytes())
    with open_store(tmp_path / "a.npy") as store:
        assert [store.read(i)[0] for i in range(3)] == [0, 1, 2]


def test_labels_alone_are_rows(tmp_path):
    np.savez(tmp_path / "a.npz", y=np.arange(4))
    with open_store(tmp_path / "a.npz") as store:
        assert (len(store), store.labels) == (4, None)


def test_what_cannot_be_rows_is_refused_with_the_reason(tmp_path):
    def refused(match: str, name: str = "a.npy") -> None:
        with pytest.raises(SourceError, match=match):
            index(tmp_path / name, tmp_path / "out.hr")

    np.save(tmp_path / "a.npy", np.asfortranarray(np.ones((4, 5))))
    refused("Fortran order")
    np.save(tmp_path / "a.npy", np.array([{}, []], object), allow_pickle=True)
    refused("Python objects")
    np.save(tmp_path / "a.npy", np.float64(3))
    refused("expected rows")
    np.save(tmp_path / "a.npy", np.ones((0, 5)))
    refused("no samples")
    np.savez_compressed(tmp_path / "a.npz", x=np.ones((4, 5)))
    refused("compressed", "a.npz")
    np.savez(tmp_path / "a.npz", x=np.ones((4, 5)), z=np.ones((3, 5)))
    refused("expected rows", "a.npz")


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_truncation_and_damage_never_escape_as_another_error(tmp_path, name):
    path = tmp_path / name
    array = np.arange(4000, dtype=np.int32).reshape(40, 100)
    (np.save if name == "a.npy" else np.savez)(path, array)
    good = path.read_bytes()
    for size in range(0, len(good), 301):
        path.write_bytes(good[:size])
        with pytest.raises(SourceError):
            index(path, tmp_path / "out.hr")
    r = random.Random(3)
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        at = r.choice([r.randrange(160), r.randrange(len(data) - 160, len(data))])
        data[at] = r.randrange(256)
        path.write_bytes(data)
        try:
            open_store(path).close()
        except HeadraceError:
            refused += 1
    assert refused > 20


def arrays_in(folder, **arrays):
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def test_several_arrays_are_pieces_or_parts_as_is_said(tmp_path):
    rows = np.arange(120, dtype=np.float32).reshape(10, 3, 4)
    pieces = arrays_in(tmp_path / "pieces", a=rows[:4], b=rows[4:])
    parts = arrays_in(tmp_path / "parts", x=rows, z=np.arange(10.0), label=np.arange(10) % 3)
    for root in (pieces, parts):
        for act in (index, pack):
            with pytest.raises(
                SourceError, match="is each a sample, or each of their rows"
            ) as error:
                act(root, tmp_path / "refused.hr")
            assert "--as npy" in error.value.next_step
        assert pack(root, tmp_path / f"{root.name}-files.hr", format="files").samples in (2, 3)
        for act in (index, pack):
            act(root, tmp_path / f"{root.name}.hr", format="npy", overwrite=True)
            with open_store(tmp_path / f"{root.name}.hr") as store:
                assert len(store) == 10
                first = None if root == pieces else "x"
                assert [bytes(store.read(i, part=first)) for i in range(10)] == [
                    r.tobytes() for r in rows
                ]
    with open_store(tmp_path / "parts.hr") as store:
        assert (store.parts, store.labels.tolist()) == (["x", "z"], [i % 3 for i in range(10)])
        assert bytes(store.read(7, part="z")) == np.float64(7).tobytes()
    odd = arrays_in(tmp_path / "odd", x=rows, z=np.arange(9.0))
    with pytest.raises(SourceError, match="neither pieces of one nor of one number of rows"):
        index(odd, tmp_path / "odd.hr", format="npy")


def test_arrays_that_are_samples_stay_samples(tmp_path):
    vectors = arrays_in(tmp_path / "vectors", **{f"{i:03d}": np.arange(i + 5.0) for i in range(70)})
    assert index(vectors, tmp_path / "a.hr").samples == 70
    (tmp_path / "classes").mkdir()
    arrays_in(tmp_path / "classes" / "a", one=np.zeros((4, 4)), two=np.zeros((4, 4)))
    assert index(tmp_path / "classes", tmp_path / "b.hr").samples == 2
    ones = arrays_in(tmp_path / "ones", a=np.zeros((1, 4)), b=np.zeros((1, 9)))
    assert index(ones, tmp_path / "c.hr").samples == 2


@pytest.mark.parametrize("shapes", [((4, 2), (4, 2)), ((4, 2), (4, 3))])
def test_an_npz_under_another_name_is_refused(tmp_path, shapes):
    arrays_in(tmp_path / "rows", a=np.zeros((4, 2), np.uint8))
    with (tmp_path / "rows/b.npy").open("wb") as file:
        np.savez(file, **{f"c{i}": np.zeros(shape, np.uint8) for i, shape in enumerate(shapes)})
    with pytest.raises(SourceError, match=r"b\.npy: is no \.npy file"):
        pack(tmp_path / "rows", tmp_path / "p.hr", format="npy")
