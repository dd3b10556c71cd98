"""Slurm's lists of hosts, there and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.notation import compress_hosts, expand_hosts, expand_indices

NAMES = st.builds(
    lambda head, number, width, tail: f"{head}{number:0{width}d}{tail}",
    st.sampled_from(["n", "gpu-", "rack1-node", "a.b"]), st.integers(0, 2000), st.integers(1, 5),
    st.sampled_from(["", "-ib", ".x"]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ("node1",)),
        ("node[0-3,7]", ("node0", "node1", "node2", "node3", "node7")),
        ("gpu-[008-011]", ("gpu-008", "gpu-009", "gpu-010", "gpu-011")),
        ("a[1-2]b[1-2],c", ("a1b1", "a1b2", "a2b1", "a2b2", "c")),
        ("rack[1-2]-n3", ("rack1-n3", "rack2-n3")),
        ("(null)", ()),
        ("None assigned", ()),
        ("", ()),
    ],
)
def test_lists_are_expanded(text, names):
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text", ["a[1-", "a]1[", "a[[1]]", "a[x]", "a[3-1]", "a[1-9999999]", "a,,b", "a[0-999][0-999]"]
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match=r"hosts|range"):
        expand_hosts(text)


@given(st.lists(NAMES, max_size=40))
def test_there_and_back(names):
    assert set(expand_hosts(compress_hosts(names))) == set(names)
    assert len(expand_hosts(compress_hosts(names))) == len(set(names))


def test_indices():
    assert expand_indices("0-3,7") == (0, 1, 2, 3, 7)
    assert expand_indices("0-9:3") == (0, 3, 6, 9)
    assert expand_indices("N/A") == ()
    assert compress_hosts(["node9", "node10", "node11", "login"]) == "login,node[9-11]"
