"""Orders from C: their batches are those of Python's loader, whichever rank asks and wherever it begins."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import headrace as hr
from capi.library import Failed, Order
from headrace.order import Balanced, Blocked, Opportunistic, Sequential, Shuffled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from capi.library import Library

SEED = 2**64 - 1
NEAR = ((3, 10), (10, 12), (40, 61))

ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "sequential": {},
    "blocked": {"block_samples": 10, "window_blocks": 3},
    "blocked, a window larger than the data": {"block_samples": 1000, "window_blocks": 2**48},
    "blocked, one by one": {"block_samples": 1, "window_blocks": 1},
    "opportunistic": {"resident": NEAR},
    "opportunistic in several epochs": {"resident": NEAR, "resident_epochs": 9},
    "opportunistic, nothing near": {},
    "balanced": {},
}
every_order = pytest.mark.parametrize("name", ORDERS)


def kind_of(name: str) -> str:
    return name.replace(",", "").split(maxsplit=1)[0]


def in_python(name: str, store: hr.Store) -> Any:
    given = ORDERS[name]
    n = len(store)
    if kind_of(name) == "blocked":
        return Blocked(n, given["block_samples"], given["window_blocks"], seed=SEED)
    if kind_of(name) == "opportunistic":
        near = given.get("resident", ())
        return Opportunistic(n, near, seed=SEED, epochs=given.get("resident_epochs", 1))
    if kind_of(name) == "balanced":
        return Balanced(store.labels, seed=SEED)
    return Sequential(n) if kind_of(name) == "sequential" else Shuffled(n, seed=SEED)


def begun(library: Library, mount: Any, name: str, rank: int = 0, world: int = 1) -> Any:
    sequence = library.sequence(mount, SEED, rank, world)
    library.order(sequence, kind_of(name), **ORDERS[name])
    return sequence


def batches(library: Library, sequence: Any, n: int) -> Iterator[list[tuple[int, int, bytes]]]:
    """What is left of the epoch."""
    while (batch := library.batch(sequence, n)) is not None:
        yield [(index, label, data) for index, label, [data] in batch.content()]
        library.release(batch)


def made(target: Path, samples: int) -> Path:
    random = np.random.default_rng(samples)
    hr.pack(
        (
            {"name": f"n/{i:05}", "data": random.bytes(int(random.integers(0, 40))), "label": i % 7}
            for i in range(samples)
        ),
        target,
    )
    return target


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More samples than a permutation keeps in a table, so that the network is used."""
    return made(tmp_path_factory.mktemp("numbers") / "numbers.hr", 5003)


@every_order
@pytest.mark.parametrize(
    ("world", "batch", "tail"), [(1, 64, "exact"), (3, 100, "pad"), (7, 300, "drop")]
)
def test_batches_are_pythons(
    library: Library, numbers: Path, name: str, world: int, batch: int, tail: Any
):
    mount = library.mount(numbers)
    with hr.open(numbers) as store:
        order = in_python(name, store)
        for rank in {0, world - 1}:
            sequence = begun(library, mount, name, rank, world)
            library.set(sequence, "HR_SET_TAIL", library.codes[f"HR_TAIL_{tail.upper()}"])
            loader = hr.loader(store, batch, order=order, rank=rank, world_size=world, tail=tail)
            for _ in range(3):
                expected = [
                    [(int(b.indices[i]), int(b.labels[i]), bytes(b[i])) for i in range(len(b))]
                    for b in loader
                ]
                assert list(batches(library, sequence, batch)) == expected
            loader.close()
            library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        (n, k)
        for n in ORDERS
        for k in (1, 2, 61, 97)
        if k >= NEAR[-1][1] or "resident" not in ORDERS[n]
    ],
)
def test_stores_of_few_samples(library: Library, tmp_path: Path, name: str, samples: int):
    """One, a prime, fewer than a block or a window; the last block is short, or is the only one."""
    path = made(tmp_path / "few.hr", samples)
    mount = library.mount(path)
    sequence = begun(library, mount, name)
    with hr.open(path) as store:
        order = in_python(name, store)
        for epoch in range(12):
            found = [i for batch in batches(library, sequence, 13) for i, _, _ in batch]
            assert found == order.indices(epoch, 0, samples).tolist()
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


@every_order
def test_it_goes_on_where_others_stopped(library: Library, numbers: Path, name: str):
    """Two ranks stop in the second epoch; three go on from the position that both of them say."""
    mount = library.mount(numbers)
    stopped = set()
    for rank in range(2):
        sequence = begun(library, mount, name, rank, 2)
        library.epoch(sequence, 500)
        for _ in range(3):
            batch = library.batch(sequence, 111)
            assert batch is not None
            library.release(batch)
        stopped.add(tuple(library.get(sequence, f"HR_SET_{w}") for w in ("EPOCH", "POSITION")))
        library.call("hr_sequence_close", sequence)
    assert stopped == {(1, 666)}
    rest = []
    for rank in range(3):
        sequence = begun(library, mount, name, rank, 3)
        library.set(sequence, "HR_SET_TAIL", library.codes["HR_TAIL_EXACT"])
        library.set(sequence, "HR_SET_EPOCH", 1)
        library.set(sequence, "HR_SET_POSITION", 666)
        rest.append([[i for i, _, _ in each] for each in batches(library, sequence, 90)])
        library.call("hr_sequence_close", sequence)
    found = [i for step in zip(*rest, strict=True) for each in step for i in each]
    with hr.open(numbers) as store:
        assert found == in_python(name, store).indices(1, 666, 5003).tolist()
    library.call("hr_unmount", mount)


@every_order
def test_batches_may_change_their_size(library: Library, numbers: Path, name: str):
    mount = library.mount(numbers)
    sequence = begun(library, mount, name)
    found: list[int] = []
    for n in (1, 700, 3, 3, 29, 50):
        batch = library.batch(sequence, n)
        assert batch is not None
        assert batch.position == len(found)
        found += [index for index, _, _ in batch.content()]
        library.release(batch)
    with hr.open(numbers) as store:
        assert found == in_python(name, store).indices(0, 0, len(found)).tolist()
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("blocked", {}, "block_samples is 0, expected 1 to 281474976710656"),
        ("blocked", {"block_samples": 4}, "window_blocks is 0"),
        ("blocked", {"block_samples": 2**48 + 1, "window_blocks": 1}, "block_samples is 281474976710657"),
        ("opportunistic", {"resident": ((0, 38),)}, "a resident range is 0 to 38, expected 0 to 37"),
        ("opportunistic", {"resident": ((0, 5), (4, 6))}, "4 to 6, expected 5 to 37, ascending"),
        ("opportunistic", {"resident": ((6, 5),)}, "6 to 5"),
        ("opportunistic", {"resident_ranges": 1, "resident": None}, "resident is null"),
        ("balanced", {}, "no labels, and a balanced order needs them"),
        ("shuffled", {"kind": 6}, "the order's kind is 6, expected one of HR_ORDER_"),
        ("shuffled", {"size": 8}, "order's size is 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    library: Library, tmp_path: Path, kind: str, fields: dict[str, Any], words: str
):
    hr.pack([(f"{i}", b"x" * i) for i in range(37)], tmp_path / "s.hr")
    mount = library.mount(tmp_path / "s.hr")
    sequence = library.sequence(mount, 4)
    with pytest.raises(Failed) as failed:
        if fields.get("resident", ()) is None or "kind" in fields or "size" in fields:
            order = Order(size=ctypes.sizeof(Order), kind=library.codes[f"HR_ORDER_{kind.upper()}"])
            for name, value in fields.items():
                setattr(order, name, value)
            library.call("hr_sequence_order", sequence, ctypes.byref(order))
        else:
            library.order(sequence, kind, **fields)
    assert failed.value.name == "HR_ERR_ARGUMENT"
    assert words in failed.value.message
    # The order that there was stays.
    found = [index for index, _, _ in library.epoch(sequence, 5)]
    assert found == Shuffled(37, seed=4).indices(0, 0, 37).tolist()
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_an_order_is_set_before_the_first_batch(library: Library, numbers: Path):
    mount = library.mount(numbers)
    sequence = begun(library, mount, "blocked")
    library.order(sequence, "sequential")  # still
    batch = library.batch(sequence, 3)
    assert batch is not None
    assert [index for index, _, _ in batch.content()] == [0, 1, 2]
    library.release(batch)
    library.set(sequence, "HR_SET_EPOCH", 0)
    with pytest.raises(Failed, match="HR_ERR_ARGUMENT: a batch was asked for"):
        library.order(sequence, "shuffled")
    with pytest.raises(Failed, match="HR_ERR_ARGUMENT: order is null"):
        library.call("hr_sequence_order", sequence, None)
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_samples_without_a_label_never_come(library: Library, tmp_path: Path):
    hr.pack([(f"{i}", b"x", -1 if i else 0) for i in range(5)], tmp_path / "s.hr")
    mount = library.mount(tmp_path / "s.hr")
    sequence = library.sequence(mount, 4)
    library.order(sequence, "balanced")
    assert {index for index, _, _ in library.epoch(sequence, 5)} == {0}
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)


def test_a_damaged_sample_fails_its_own_batch(library: Library, tmp_path: Path):
    """And no other of its window; marked, all others are delivered."""
    path = made(tmp_path / "s.hr", 61)
    with hr.open(path) as store:
        order = in_python("blocked", store)
        damaged = int(order.indices(0, 0, 61)[14])  # in the fourth batch, and the first window
        extent = store.segments[0].extents(damaged)[0]
    volume = next(path.glob("*.hrv"))
    data = bytearray(volume.read_bytes())
    data[extent.offset] ^= 1
    volume.write_bytes(data)
    mount = library.mount(path)
    sequence = begun(library, mount, "blocked")
    expected = order.indices(0, 0, 61).tolist()
    for at in range(0, 12, 4):
        batch = library.batch(sequence, 4)
        assert batch is not None
        assert [index for index, _, _ in batch.content()] == expected[at : at + 4]
        library.release(batch)
    for _ in range(2):  # it stays where it is
        with pytest.raises(Failed, match=f"HR_ERR_CORRUPT_SAMPLE: sample {damaged}"):
            library.batch(sequence, 4)
    library.set(sequence, "HR_SET_ON_ERROR", library.codes["HR_ON_ERROR_MARK"])
    rest = library.epoch(sequence, 4)
    assert [index for index, _, _ in rest] == expected[12:]
    assert [index for index, _, [content] in rest if content is None] == [damaged]
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)
