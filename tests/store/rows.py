"""What the tests of files of rows share: values, and that all ways of opening give them."""

from __future__ import annotations

import random

import pytest

from headrace.errors import HeadraceError, SourceError
from headrace.store import open_store
from headrace.store.pack import index, pack
from headrace.store.verify import verify

from .reference import open_either


def some_values(n=60, seed=1, largest=4000):
    r = random.Random(seed)
    return [r.randbytes(r.choice([0, 1, 17, r.randrange(largest)])) for _ in range(n)]


def some_labels(n=60):
    return [i * 7 % 5 for i in range(n)]


def read_all(store, part=None):
    return [bytes(store.read(i, part=part)) for i in range(len(store))]


def check_in_place(source, tmp_path, values, labels=None, *, reference=False, **options):
    """Opened, indexed and packed, a source gives the same samples, and the index copies nothing."""
    with open_either(source, reference=reference, **options) as store:
        assert read_all(store) == values
        names = list(store.names)
    for make in (index, pack):
        target = tmp_path / f"{make.__name__}.hr"
        make(source, target, overwrite=True, **options)
        with open_either(target, reference=reference) as store:
            assert read_all(store) == values
            assert list(store.names) == names
            assert (None if store.labels is None else store.labels.tolist()) == labels
            kinds = {v.kind for v in store.segments[0].entry.volumes}
        assert kinds == ({"file"} if make is index else {"packed"})
        assert verify(target).ok


def check_packed_only(source, tmp_path, values, labels, why, **options):
    """A source that lies in no one place is refused with the reason, and packed."""
    for act in (lambda: index(source, tmp_path / "i.hr", **options),
                lambda: open_store(source, **options)):  # fmt: skip
        with pytest.raises(SourceError, match=f"(?s)front to back.*{why}.*[Pp]ack"):
            act()
    assert not (tmp_path / "i.hr").exists()
    pack(source, tmp_path / "p.hr", overwrite=True, **options)
    with open_store(tmp_path / "p.hr") as store:
        assert read_all(store) == values
        assert (None if store.labels is None else store.labels.tolist()) == labels


def check_truncations(path, tmp_path, step, *, packs=True):
    """No truncation escapes as another error; the file is put back."""
    good = path.read_bytes()
    refused = 0
    for size in range(0, len(good), step):
        path.write_bytes(good[:size])
        for make in (index, pack) if packs else (index,):
            try:
                make(path, tmp_path / "t.hr", overwrite=True)
            except SourceError:
                refused += 1
    path.write_bytes(good)
    assert refused > 0
    return refused


def check_random_damage(path, tmp_path, rounds, seed=3, *, where=None):
    """No flipped bytes escape as another error than ours; the file is put back."""
    good = path.read_bytes()
    r = random.Random(seed)
    refused = 0
    for _ in range(rounds):
        data = bytearray(good)
        for _ in range(r.choice([1, 3, 20])):
            at = r.randrange(*where(len(data))) if where else r.randrange(len(data))
            data[at] = r.randrange(256)
        path.write_bytes(data)
        try:
            open_store(path).close()
            pack(path, tmp_path / "d.hr", overwrite=True)
        except HeadraceError:
            refused += 1
    path.write_bytes(good)
    return refused
