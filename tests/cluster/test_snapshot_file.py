"""A snapshot is the same after it was a file, and what is none is refused in words."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.clusters import busy, hal, huge, mixed
from headrace.base.documents import seal
from headrace.cluster.snapshot import (
    Allocation,
    Node,
    load_snapshot,
    occupied,
    save_snapshot,
    snapshot_from_json,
    snapshot_to_json,
)
from headrace.errors import ClusterError


def test_jobs_occupy_the_nodes_that_they_hold_and_no_others():
    # A head node without processors, as Ray's, is not full because it has none.
    nodes = [
        Node(name=name, states=("idle",), cpus=cpus, memory_mib=1, gpus=2)
        for name, cpus in (("head", 0), ("full", 2), ("half", 4), ("free", 2))
    ]
    held = (Allocation("full", 2, 1, 1, (1,)), Allocation("half", 2, 1, 1))
    job = replace(busy().jobs[0], allocations=held)
    now = occupied(nodes, [job])
    assert [node.states for node in now] == [("idle",), ("allocated",), ("mixed",), ("idle",)]
    assert [node.gpus_allocated for node in now] == [(), (1,), (0,), ()]
    assert (now[0], now[3]) == (nodes[0], nodes[3])


@pytest.mark.parametrize("which", [hal, mixed, busy, lambda: huge(50, 300)])
def test_it_comes_back_the_same(tmp_path, which):
    path = tmp_path / "snapshot.json"
    save_snapshot(which(), path)
    assert load_snapshot(path) == which()
    assert [p.name for p in tmp_path.iterdir()] == ["snapshot.json"]


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "snapshot.json"
    save_snapshot(huge(50, 300), path)
    save_snapshot(busy(), path)
    assert load_snapshot(path) == busy()


def test_it_is_plain_json():
    data = json.loads(snapshot_to_json(busy()))
    assert data["format"] == "headrace-cluster-snapshot-2"
    assert data["snapshot"]["jobs"][0]["state"] == "RUNNING"
    assert data["snapshot"]["nodes"][0]["gpus_allocated"] == [0, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no JSON"), (b"{", "no JSON"), (b"\xff\xfe", "no JSON"), (b"[]", "format is ''"),
        (b"[" * 100_000, "format is ''"), (b"{}", "format is ''"),
        (b'{"format": "snapshot-2", "snapshot": {}}', "format is 'snapshot-2', expected"),
        (b'{"format": 3}', "format is ''"),
        (b'{"format": "headrace-cluster-snapshot-2", "snapshot": {}}', "checksum is missing"),
        (seal(b'{"format": "headrace-cluster-snapshot-2", "snapshot": {}}'), "`$.snapshot`"),
        (seal(b'{"format": "headrace-cluster-snapshot-2", "snapshot": {"cluster": 3}}'), "snapshot.cluster`"),
    ],
)  # fmt: skip
def test_what_is_none(text, says):
    with pytest.raises(ClusterError) as e:
        snapshot_from_json(text, "file.json")
    assert says in str(e.value)
    assert "file.json" in str(e.value)


def test_a_wrong_state_is_named():
    text = snapshot_to_json(busy()).replace(b'"RUNNING"', b'"SPRINTING"')
    with pytest.raises(ClusterError, match="the snapshot is damaged: its checksum is"):
        snapshot_from_json(text)
    body = text[: text.rindex(b', "crc32c"')] + b"}"
    with pytest.raises(ClusterError, match=r"SPRINTING.*jobs"):
        snapshot_from_json(seal(body))


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ClusterError, match=r"none\.json: No such file"):
        load_snapshot(tmp_path / "none.json")
    with pytest.raises(ClusterError, match="No such file"):
        save_snapshot(busy(), tmp_path / "no" / "where.json")


@given(st.binary())
def test_any_bytes_are_a_snapshot_or_an_error(data):
    with pytest.raises(ClusterError):
        snapshot_from_json(data)
