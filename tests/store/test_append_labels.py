"""Labels of appended samples mean the same classes as the store's, or the samples are refused."""

from __future__ import annotations

import gzip

import pytest

from headrace.errors import SourceError
from headrace.store import open_store
from headrace.store.pack import append, pack

from .test_pack import files_of
from .test_shuffled_pack import tar_of


def named(root, classes):
    """A folder of classes with one file each."""
    for name in classes.split():
        (root / name).mkdir(parents=True)
        (root / name / f"{root.name}-{name}").write_bytes(name.encode())
    return root


def numbered(folder, kind, labels):
    """A source whose labels are numbers without names; None: a sample without a label."""
    folder.mkdir()
    if kind == "csv":
        rows = [f"{folder.name}{i},{label}" for i, label in enumerate(labels)]
        for row in rows:
            (folder / row.split(",")[0]).write_bytes(b"data")
        (folder / "list.csv").write_text("\n".join(["filename,label", *rows, ""]))
        return folder / "list.csv"
    samples = [
        {"name": f"{folder.name}{i}", "data": {"cls": b"%d" % label, "bin": b"data"}}
        for i, label in enumerate(labels)
    ]
    if kind == "tar":
        return tar_of(folder / "some.tar", samples, "w")
    tar_of(folder / "some.plain", samples, "w")
    (folder / "some.tar.gz").write_bytes(gzip.compress((folder / "some.plain").read_bytes()))
    return folder / "some.tar.gz"


def labels_of(path):
    with open_store(path) as store:
        classes, labels = store.classes, store.labels
        return classes, None if labels is None else labels.tolist()


KINDS = ["csv", "tar", "tar.gz"]


@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_file_are_not_taken_for_named_classes(tmp_path, kind, shuffle):
    target = tmp_path / "a.hr"
    pack(named(tmp_path / "A", "bee cat"), target)
    before = files_of(target)
    source = numbered(tmp_path / "n", kind, [0, 1])
    with pytest.raises(SourceError, match=r"numbers without names .*'bee', 'cat'") as e:
        append(source, target, shuffle=shuffle)
    assert "label=''" in e.value.next_step
    assert files_of(target) == before
    append(source, target, label="", shuffle=shuffle)
    assert labels_of(target) == (["bee", "cat"], [0, 1, -1, -1])


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_not_given_to_the_numbers_of_a_store(tmp_path, kind):
    target = tmp_path / "i.hr"
    pack(numbered(tmp_path / "n", kind, [0, 1]), target)
    before = files_of(target)
    source = named(tmp_path / "A", "ant bee cat dog")
    with pytest.raises(
        SourceError, match=r"'ant', 'bee', 'cat', \.\.\.\), the store's are numbers"
    ):
        append(source, target)
    assert files_of(target) == before
    append(numbered(tmp_path / "m", kind, [5]), target)
    append(source, target, label="")
    assert labels_of(target) == (None, [0, 1, 5, -1, -1, -1, -1])


@pytest.mark.parametrize("shuffle", [None, 1])
def test_numbers_of_a_program_are_those_of_the_store_s_classes(tmp_path, shuffle):
    target = tmp_path / "a.hr"
    pack(named(tmp_path / "A", "bee cat"), target)
    append([("x", b"x", 1)], target, shuffle=shuffle)
    before = files_of(target)
    with pytest.raises(SourceError, match=r"up to 7, the store has 2 classes .*expected 0 to 1"):
        append([("y", b"y", 0), ("z", b"z", 7)], target, shuffle=shuffle)
    assert files_of(target) == before
    append([("y", b"y", 0), ("z", b"z", 7)], target, label="", shuffle=shuffle)
    assert labels_of(target) == (["bee", "cat"], [0, 1, 1, -1, -1])


def test_samples_without_labels_go_onto_both_and_onto_them_go_both(tmp_path):
    for kind, source, labels in (
        ("names", named(tmp_path / "A", "bee cat"), [0, 1]),
        ("numbers", numbered(tmp_path / "n", "csv", [3, -1]), [3, -1]),
    ):
        classes = ["bee", "cat"] if kind == "names" else None
        first, last = tmp_path / f"{kind}1.hr", tmp_path / f"{kind}2.hr"
        pack([("bare", b"data")], first)
        append(source, first)
        assert labels_of(first) == (classes, [-1, *labels])
        pack(source, last)
        append([("bare", b"data")], last)
        append([("also", b"data", -1)], last)
        assert labels_of(last) == (classes, [*labels, -1, -1])
