"""Checkpoints on another number of ranks: equal values once, cut arrays cut anew, the rest refused."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.checkpoint import Checkpointer, Sharded
from headrace.errors import CheckpointError, CorruptCheckpoint
from headrace.order import combine_hashes

JOB = Path(__file__).with_name("resharding_job.py")


def cut(whole, rank, ranks, dim=0):
    """A rank's part, as DTensor cuts."""
    each = -(-whole.shape[dim] // ranks)
    start = min(whole.shape[dim], rank * each)
    place = [slice(None)] * whole.ndim
    place[dim] = slice(start, start + each)
    offsets = [0] * whole.ndim
    offsets[dim] = start
    return Sharded(np.ascontiguousarray(whole[tuple(place)]), whole.shape, tuple(offsets))


def save(folder, step, trees, **more):
    for rank, tree in enumerate(trees):
        with Checkpointer(folder, rank=rank, world_size=len(trees), run="r", **more) as one:
            one.save(tree, step)


def load(folder, ranks, **more):
    return [hr.checkpoint.load(folder, rank=r, world_size=ranks, **more).tree for r in range(ranks)]


def joined(parts):
    whole = np.full(parts[0].shape, 255, parts[0].local.dtype)
    for part in parts:
        place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.local.shape, strict=True))
        whole[place] = part.local
    return whole


@pytest.mark.parametrize("ranks", list(itertools.product((1, 2, 3, 4, 7), repeat=2)))
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_cut_is_cut_anew(tmp_path, ranks, dim):
    before, after = ranks
    whole = np.arange(5 * 6 * 2, dtype=np.float32).reshape(5, 6, 2)
    same = {"w": np.arange(3), "nan": math.nan, "text": ["a", (1, None)]}
    save(tmp_path, 1, [{**same, "cut": cut(whole, r, before, dim)} for r in range(before)])
    trees = load(tmp_path, after)
    assert (joined([tree["cut"] for tree in trees]) == whole).all()
    for r, tree in enumerate(trees):
        assert tree["w"].tolist() == [0, 1, 2]
        assert math.isnan(tree["nan"])
        assert tree["text"] == ["a", (1, None)]
        if before > 1:  # one rank holds all: along which dimension others cut is not known
            assert tree["cut"].offsets == cut(whole, r, after, dim).offsets


def test_like_says_which_part_is_wanted(tmp_path):
    whole = np.arange(24, dtype=np.int16).reshape(4, 6)
    save(tmp_path, 1, [{"cut": cut(whole, r, 4)} for r in range(4)])
    wanted = Sharded(np.zeros((2, 3)), (4, 6), (1, 2))
    for ranks in (1, 3, 4):  # four saved it: they may cut otherwise, too
        tree = hr.checkpoint.load(tmp_path, rank=0, world_size=ranks, like={"cut": wanted}).tree
        assert tree["cut"].local.tolist() == whole[1:3, 2:5].tolist()
        assert tree["cut"].local.dtype == np.int16
    whole_of_it = {"cut": np.zeros((4, 6), np.int16)}
    tree = hr.checkpoint.load(tmp_path, rank=1, world_size=2, like=whole_of_it).tree
    assert tree["cut"].tolist() == whole.tolist()
    save(tmp_path, 2, [{"cut": whole}])
    tree = hr.checkpoint.load(tmp_path, rank=1, world_size=2, like={"cut": wanted}).tree
    assert tree["cut"].local.tolist() == whole[1:3, 2:5].tolist()
    with pytest.raises(CheckpointError, match=r"cut has shape \[4, 6\], expected \[4, 7\]"):
        hr.checkpoint.load(
            tmp_path, rank=1, world_size=2, like={"cut": Sharded(whole, (4, 7), (0, 0))}
        )


@pytest.mark.parametrize(
    ("trees", "place"),
    [
        ([{"a": {"x": 1}}, {"a": {"x": 2}}], "a.x"),
        ([{"x": 1}, {"x": True}], "x"),
        ([{"x": np.arange(3)}, {"x": np.arange(1, 4)}], "x"),
        ([{"x": np.zeros((2, 3))}, {"x": np.zeros((3, 2))}], "x"),
        ([{"x": np.zeros(2, np.int32)}, {"x": np.zeros(2, np.float32)}], "x"),
        ([{"x": [1]}, {"x": [1, 2]}], "x"),
        ([{"x": 1}, {"x": 1, "y": 2}], "the tree"),
        ([{"x": [1]}, {"x": (1,)}], "x"),
        ([{"x": Sharded(np.ones(1), (2,), (0,))}, {"x": Sharded(np.ones(1), (3,), (1,))}], "x"),
    ],
)
def test_what_differs_between_ranks_is_refused(tmp_path, trees, place):
    save(tmp_path, 1, trees)
    assert len(load(tmp_path, 2)) == 2  # each rank its own
    with pytest.raises(CheckpointError, match=f"{place} differs between the 2 ranks") as caught:
        load(tmp_path, 3)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_parts_that_are_no_whole_are_refused(tmp_path):
    part = np.ones(2)
    save(tmp_path, 1, [{"x": Sharded(part, (5,), (0,))}, {"x": Sharded(part, (5,), (3,))}])
    with pytest.raises(CheckpointError, match="the parts of x leave a gap"):
        load(tmp_path, 1)
    save(tmp_path, 2, [{"x": Sharded(part, (4,), (0,))}, {"x": Sharded(np.ones(3), (4,), (1,))}])
    with pytest.raises(CheckpointError, match="the parts of x overlap"):
        load(tmp_path, 1)
    # Copies of one part are none: ranks that hold the same.
    save(tmp_path, 3, [{"x": Sharded(part, (4,), (i // 2 * 2,))} for i in range(4)])
    assert load(tmp_path, 1)[0]["x"].local.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="does not lie in an array"):
        Sharded(part, (3,), (2,))


def test_damage_in_another_rank_s_part_is_found(tmp_path):
    whole = np.arange(4096, dtype=np.uint8)
    save(tmp_path, 1, [{"x": cut(whole, r, 2)} for r in range(2)])
    (shard,) = tmp_path.glob("step-*/rank-00001*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="the checksum of x"):
        load(tmp_path, 1)


def test_a_local_folder_is_read_where_nothing_has_to_be_cut(tmp_path):
    whole = np.arange(8)
    parts = [{"x": cut(whole, r, 2), "own": r} for r in range(2)]
    save(tmp_path / "t", 1, parts, local=tmp_path / "l")
    for rank in range(2):
        more = {"rank": rank, "world_size": 2, "local": tmp_path / "l"}
        near = hr.checkpoint.load(tmp_path / "t", like=parts[rank], **more)
        assert near.folder.startswith(str(tmp_path / "l"))
        assert near.tree["x"].local.tolist() == parts[rank]["x"].local.tolist()
        assert near.tree["own"] == rank
        other = Sharded(whole[2:6], (8,), (2,))
        far = hr.checkpoint.load(tmp_path / "t", like={"x": other}, **more)
        assert far.folder == str(tmp_path / "t")
        assert far.tree["x"].local.tolist() == [2, 3, 4, 5]
        assert far.tree["own"] == rank


def test_loaders_go_on_with_other_ranks_and_their_hashes_add_up(tmp_path, packed_photos):
    """4 ranks, then 2, then 4: each sample of the epoch once, and the hash of one rank alone."""
    with hr.open(packed_photos) as store:
        alone = hr.loader(store, 2, seed=3, tail="exact", rank=0, world_size=1)
        list(alone)
        expected = alone.last_order_hash
        seen, hashes = [], []
        for step, (ranks, batches) in enumerate([(4, 2), (2, 3), (4, None)]):
            loaders = [
                hr.loader(store, 2, seed=3, tail="exact", rank=r, world_size=ranks)
                for r in range(ranks)
            ]
            if step:
                for loader, tree in zip(loaders, load(tmp_path, ranks), strict=True):
                    loader.load_state_dict(tree["loader"])
            for loader in loaders:
                for count, batch in enumerate(loader, 1):
                    seen += batch.indices.tolist()
                    if count == batches:
                        break
            if batches:
                save(tmp_path, step, [{"loader": loader.state_dict()} for loader in loaders])
            else:
                hashes = [int(loader.last_order_hash, 16) for loader in loaders]
    assert sorted(seen) == list(range(36))
    assert f"{combine_hashes(*hashes):016x}" == expected


@pytest.mark.slow
def test_a_cut_model_goes_on_with_2_and_again_with_4_processes(tmp_path, packed_photos):
    """DTensors over gloo, and a loader: saved by 4 ranks, gone on by 2, and by 4."""
    pytest.importorskip("torch")
    lives = {0: 4, 1: 2, 2: 4}
    launchers = ("SLURM", "OMPI", "PMI", "TORCHELASTIC", "HEADRACE")
    ended = subprocess.run(
        [sys.executable, str(JOB), str(packed_photos), str(tmp_path / "c"), str(tmp_path), "4:2", "2:2", "4"],
        env={k: v for k, v in os.environ.items() if not k.startswith(launchers)},
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    reports = [
        [json.loads((tmp_path / f"{life}-{rank}.json").read_text()) for rank in range(ranks)]
        for life, ranks in lives.items()
    ]
    seen = [i for life in reports for report in life for i in report["seen"]]
    assert sorted(seen) == list(range(36))
    for before, after in itertools.pairwise(reports):
        assert before[0]["saved"] != before[0]["loaded"]
        for report in after:
            assert report["steps"] == before[0]["steps"] + before[0]["made"]
            assert report["loaded"] == before[0]["saved"]  # the whole tensors, bit for bit
    with hr.open(packed_photos) as store:
        alone = hr.loader(store, 2, seed=3, tail="exact", rank=0, world_size=1)
        list(alone)
    hashes = [int(report["order_hash"], 16) for report in reports[-1]]
    assert f"{combine_hashes(*hashes):016x}" == alone.last_order_hash
