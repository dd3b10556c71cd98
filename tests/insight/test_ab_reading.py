"""What of a run is data, where it lies, and whether two runs read the same."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.insight.ab.running import (
    ROOTS_MAX,
    Agreement,
    Match,
    compare_orders,
    folders_of,
    reading_of,
    worst,
)
from headrace.insight.record.job import is_data
from headrace.posix.opens import FileOpen


def opened(path, *, flags=os.O_RDONLY, process=1, began_ns=0, read=0):
    return FileOpen(
        path, flags, process, process, began_ns, 5, read > 0, read, 7 * (read > 0), 0, 0
    )


@pytest.mark.parametrize(
    "path",
    [
        b"/usr/lib/python3.11/json/__init__.py", b"/home/a/.venv/lib/libtorch.so", b"/etc/passwd",
        b"/opt/env/site-packages/torch/version.txt", b"/x/__pycache__/m.cpython-311.pyc",
        b"/proc/cpuinfo", b"/home/a/train.py", b"/usr/lib/x/libc.so.6", b"/srv/env/pyvenv.cfg",
    ],
)  # fmt: skip
def test_code_and_the_system_are_not_data(path):
    assert not is_data(path)


@pytest.mark.parametrize(
    "path",
    [
        b"/data/a.jpg",
        b"/usr/share/openclipart/png/a.png",
        b"/tmp/x/python/1.bin",
        b"/d/odd\xff\n.npy",
    ],
)
def test_the_rest_is(path):
    assert is_data(path)


def test_a_reading_leaves_out_what_the_run_wrote_and_what_it_is():
    opens = [
        opened(b"/p/prog", began_ns=1),
        opened(b"/d/log.txt", flags=os.O_WRONLY | os.O_CREAT, began_ns=2),
        opened(b"/d/log.txt", began_ns=3),
        opened(b"/d/1.png", began_ns=4, read=100, process=2),
        opened(b"/d/2.png", began_ns=5, read=10, process=3),
        opened(b"/elsewhere/3.png", began_ns=6),
    ]
    found = reading_of(opens, not_data={b"/p/prog"})
    assert found.files == (b"/d/1.png", b"/d/2.png", b"/elsewhere/3.png")
    assert found.written == {b"/d/log.txt"}
    assert (found.first_ns, found.nbytes, found.readers) == (4, 110, 3)
    assert found.busy_ns == 3 * 5 + 2 * 7
    assert reading_of(opens, roots=["/d"]).files == (b"/d/1.png", b"/d/2.png")
    assert reading_of([]).first_ns is None


def _tree(root, *folders):
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return os.fsencode(root)


def test_sisters_become_their_parent(tmp_path):
    root = _tree(tmp_path, *(f"data/{part}/{c}" for part in ("train", "val") for c in "abc"))
    files = [root + b"/data/%s/%c/%d.jpg" % (part, c, i)
             for part in (b"train", b"val") for c in b"abc" for i in range(4)]  # fmt: skip
    assert folders_of(files) == [str(tmp_path / "data")]


def test_a_list_beside_the_data_does_not_make_the_home_folder_a_root(tmp_path):
    root = _tree(tmp_path, "home/data/a", "home/data/b", "home/other", "home/more")
    files = [root + b"/home/labels.csv"]
    files += [root + b"/home/data/%c/%d" % (c, i) for c in b"ab" for i in range(100)]
    assert folders_of(files) == [str(tmp_path / "home/data")]


def test_two_of_many_folders_stay_two(tmp_path):
    root = _tree(tmp_path, "images", "masks", *(f"other{i}" for i in range(5)))
    files = [root + b"/%s/%d" % (name, i) for name in (b"images", b"masks") for i in range(9)]
    assert folders_of(files) == [str(tmp_path / "images"), str(tmp_path / "masks")]


def test_the_working_folder_is_not_served_for_what_lies_below_it(tmp_path):
    root = _tree(tmp_path, "images", "masks")
    files = [root + b"/images/1", root + b"/masks/1"]
    assert folders_of(files) == [str(tmp_path)]
    assert folders_of(files, avoid=[root]) == [str(tmp_path / "images"), str(tmp_path / "masks")]


def test_there_are_not_more_folders_than_can_be_served_and_never_all_of_the_disk(tmp_path):
    files = [b"/nowhere/%d/x/%d/f" % (i, i) for i in range(40)]
    assert len(folders_of(files)) == ROOTS_MAX
    assert folders_of([b"/a"]) == []


# -- order -------------------------------------------------------------------------------------------

OPENS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([b"/a", b"/b", b"/c"])), max_size=20)


@given(OPENS, st.integers(10, 20))
def test_the_same_opens_are_the_same_whatever_the_processes_are_called(opens, shift):
    assert compare_orders(opens, [(p + shift, path) for p, path in opens]).in_order


@given(OPENS, st.randoms(use_true_random=False))
def test_processes_that_overtake_each_other_keep_their_own_order(opens, draw):
    queues = {p: [o for o in opens if o[0] == p] for p, _ in opens}
    other = []
    while any(queues.values()):
        other.append(draw.choice([q for q in queues.values() if q]).pop(0))
    found = compare_orders(opens, other)
    assert found.in_order
    assert found.moved < max(1, len(opens))


@given(OPENS, st.randoms(use_true_random=False))
def test_a_shuffle_is_no_other_set_of_files(opens, draw):
    other = list(opens)
    draw.shuffle(other)
    assert compare_orders(opens, other).sameness is not Agreement.OTHER_FILES


def test_what_differs_is_named():
    found = compare_orders([(1, b"/a"), (1, b"/b")], [(1, b"/b"), (1, b"/c")])
    assert found == Match(Agreement.OTHER_FILES, 2, 0, (b"/a",), (b"/c",))
    again = compare_orders([(1, b"/a")], [(1, b"/a"), (1, b"/a")])
    assert (again.sameness, again.only_second) == (Agreement.OTHER_FILES, (b"/a",))
    moved = compare_orders(
        [(1, b"/a"), (1, b"/b"), (1, b"/c")], [(1, b"/c"), (1, b"/b"), (1, b"/a")]
    )
    assert (moved.sameness, moved.moved) == (Agreement.OTHER_ORDER, 2)


@given(OPENS, st.randoms(use_true_random=False))
def test_what_reads_ahead_is_asked_for_its_files_alone(opens, draw):
    other = [*opens, *opens[:2]]
    draw.shuffle(other)
    assert compare_orders(opens, other, ahead=True).sameness is Agreement.AHEAD
    more = compare_orders(opens, [*other, (1, b"/more")], ahead=True)
    assert (more.sameness, more.only_second) == (Agreement.OTHER_FILES, (b"/more",))


def test_the_worst_of_several_counts():
    same, other = Match(Agreement.SAME, 3), Match(Agreement.OTHER_ORDER, 3, 2)
    assert worst([same, other, same]) is other
    assert worst([]) is None
