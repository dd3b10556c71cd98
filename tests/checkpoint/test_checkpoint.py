"""Saving and loading: what comes back is what was saved, errors come back, old ones go."""

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import headrace as hr
from base.flips import outcomes
from checkpoint.killing import equal
from headrace.checkpoint import Checkpointer, CheckpointOptions, latest, steps
from headrace.checkpoint.folder import read_manifest, read_record
from headrace.checkpoint.tree import TreeSnapshot, take_apart
from headrace.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, VolumeError
from headrace.store import output_file
from tests_shared import until

TREE = {
    "model": {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "empty": np.empty((0, 2), np.int8),
    },
    "optimizer": {0: {"m": np.ones(5, np.float64), "t": np.int64(7)}, 1: {}},
    "rng": (1, 2.5, None, True, "text", [float("inf")]),
    "c": np.array([1 + 2j], np.complex64),
    "transposed": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
}


def same(a, b):
    if isinstance(a, (tuple, dict)) and type(a) is type(b) and not isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return equal(a, b) and (
        not isinstance(a, np.ndarray) or (a.dtype, a.shape) == (b.dtype, b.shape)
    )


@pytest.mark.parametrize("durability", ["none", "fsync", "direct"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_loaded_is_what_was_saved(tmp_path, durability, asynchronous):
    options = CheckpointOptions(durability=durability, asynchronous=asynchronous)
    with Checkpointer(tmp_path / "c", options=options) as checkpointer:
        checkpointer.save(TREE, 3)
        report = checkpointer.wait()
        loaded = checkpointer.load()
    assert same(loaded.tree, TREE)
    assert loaded.step == report.step == 3
    assert report.blocking_s > 0
    assert report.total_s > 0
    assert report.nbytes == sum(leaf.nbytes for leaf in take_apart(TREE)[0])


def test_the_functions_are_the_first_lines(tmp_path):
    for step in (1, 2, 3):
        hr.checkpoint.save({"x": np.full(3, step)}, tmp_path / "c", step)
    assert [r.step for r in hr.checkpoint.wait()][-1:] == [3]
    loaded = hr.checkpoint.load(tmp_path / "c")
    assert (loaded.step, loaded.tree["x"].tolist()) == (3, [3, 3, 3])
    assert latest(tmp_path / "c") == 3
    assert hr.checkpoint.load(tmp_path / "c", 1).tree["x"].tolist() == [1, 1, 1]
    assert latest(tmp_path / "none") is None


def test_training_may_change_its_arrays_at_once(tmp_path):
    weights = np.zeros(3 << 20, np.uint8)
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 6):
            weights[:] = step
            checkpointer.save({"w": weights}, step)
            weights[:] = 99
            checkpointer.wait()
            assert set(checkpointer.load().tree["w"].tolist()) == {step}


def test_a_snapshots_memory_is_used_again():
    snapshot = TreeSnapshot()
    leaves, _ = take_apart({"a": np.ones(1000), "b": np.zeros(3, np.uint8)})
    first = snapshot.take(leaves)
    held = snapshot._memory.nbytes
    again = snapshot.take(leaves)
    assert snapshot._memory.nbytes == held < 9000
    assert np.shares_memory(first[0].source, again[0].source)


def test_old_checkpoints_go(tmp_path):
    with Checkpointer(tmp_path, options=CheckpointOptions(keep=2)) as checkpointer:
        for step in (5, 10, 15, 20):
            checkpointer.save(TREE, step)
    assert steps(tmp_path) == [15, 20]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_was_never_finished_is_not_loaded_and_goes(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        checkpointer.save({"x": 2}, 2)
        checkpointer.wait()
        (tmp_path / "step-000000000002/manifest.json").unlink()
        assert checkpointer.load().tree == {"x": 1}
        checkpointer.save({"x": 3}, 3)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "3"]


def test_several_ranks_make_one_checkpoint(tmp_path):
    ranks = [Checkpointer(tmp_path, rank=r, world_size=3) for r in range(3)]
    for r in (2, 0):
        ranks[r].save({"mine": np.full(4, r)}, 9)
        ranks[r].wait()
    assert steps(tmp_path) == []
    with pytest.raises(CheckpointNotFound, match="no whole checkpoint"):
        ranks[0].load()
    ranks[1].save({"mine": np.full(4, 1)}, 9)
    ranks[1].wait()
    for r, rank in enumerate(ranks):
        assert rank.load().tree["mine"].tolist() == [r] * 4
    with pytest.raises(
        CheckpointError, match="mine differs between the 3 ranks that saved it, and is loaded by 1"
    ):
        hr.checkpoint.load(tmp_path, rank=0, world_size=1)


def test_a_record_of_an_earlier_start_does_not_count(tmp_path):
    """Rank 1's share of step 5 is left by a start of the job that was killed."""
    Checkpointer(tmp_path, rank=1, world_size=2, run="first").save({"x": "old"}, 5)
    hr.checkpoint.wait()
    time.sleep(0.2)
    zero = Checkpointer(tmp_path, rank=0, world_size=2, run="second")
    zero.save({"x": "new"}, 5)
    zero.wait()
    assert steps(tmp_path) == []
    one = Checkpointer(tmp_path, rank=1, world_size=2, run="second")
    one.save({"x": "new"}, 5)
    one.wait()
    assert one.load().tree == {"x": "new"}


def test_a_local_folder_is_written_first_and_read_first(tmp_path):
    target, local = tmp_path / "target", tmp_path / "local"
    with Checkpointer(target, local=local) as checkpointer:
        checkpointer.save(TREE, 1)
        report = checkpointer.wait()
        assert 0 < report.local_s <= report.total_s
        assert checkpointer.load().folder == str(local)
        (target / "step-000000000001/manifest.json").unlink()
        assert checkpointer.load().step == 1  # as if the target had never been reached
    assert same(hr.checkpoint.load(local).tree, TREE)


def test_ranks_go_by_the_target(tmp_path):
    """What is newer in a local folder may not be so on other nodes."""
    places = {"world_size": 2, "local": tmp_path / "local", "run": "r"}
    ranks = [Checkpointer(tmp_path / "t", rank=r, **places) for r in range(2)]
    for rank in ranks:
        rank.save({"x": 1}, 1)
        rank.wait()
    ranks[0].save({"x": 2}, 2)
    ranks[0].wait()
    loaded = ranks[0].load()
    assert (loaded.step, loaded.folder) == (1, str(tmp_path / "local/rank-00000-of-00002"))


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    failed, write = [], os.write

    def full(fd, data):
        if not Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(tmp_path):
            return write(fd, data)  # of other threads
        failed.append(threading.current_thread().name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number, call in enumerate(("save", "wait", "load", "close"), 1):
        checkpointer = Checkpointer(tmp_path / call)
        with monkeypatch.context() as patch:
            patch.setattr(output_file.os, "write", full)
            checkpointer.save({"x": np.ones(9)}, 1)
            until(lambda number=number: len(failed) == number)
        arguments = ({"x": 1}, 2) if call == "save" else ()
        with pytest.raises(VolumeError, match="the disk is full"):
            getattr(checkpointer, call)(*arguments)
        assert not list((tmp_path / call).rglob("*.safetensors*"))
        checkpointer.save({"x": 1}, 1)  # and then it goes on
        checkpointer.wait()
    assert len(failed) == 4
    assert all(name.startswith("checkpoint") for name in failed)


def test_a_step_is_never_overwritten(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        with pytest.raises(CheckpointError, match="a checkpoint of step 1 already"):
            checkpointer.save({"x": 2}, 1)
        assert checkpointer.load().tree == {"x": 1}


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_named(tmp_path):
    with Checkpointer(tmp_path, options=CheckpointOptions(keep=None)) as checkpointer:
        for step in range(1, 7):
            checkpointer.save({"w": np.arange(3000)}, step)
    folders = sorted(tmp_path.iterdir())
    shards = [next(f.glob("*.safetensors")) for f in folders]
    flip(shards[0], -5)
    flip(shards[1], 20)
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    shards[3].unlink()
    (folders[4] / "manifest.json").write_text("{")
    flip(next(folders[5].glob("rank*.json")), 0)
    expected = [
        "checksum of w",
        "header's checksum",
        "the size",
        "no whole",
        "the text",
        "the checksum",
    ]
    for step, message in enumerate(expected, 1):
        with pytest.raises((CorruptCheckpoint, CheckpointNotFound), match=message) as raised:
            hr.checkpoint.load(tmp_path, step)
        assert folders[step - 1].name in raised.value.path or "no whole" in message


@pytest.mark.parametrize(("tree", "message"), [
    ({"a": {"b": object()}}, r"a\.b is a object"),
    ({"a": np.array([object()])}, "a has elements of type object"),
    ({"a": np.array(["x"])}, "elements of type"),
    ({(1, 2): 3}, "the tree has the key"),
    ({"a": b"x"}, "a is a bytes"),
    (lambda: 0, "the tree is a function"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_its_place(tmp_path, tree, message):
    with pytest.raises(TypeError, match=message):
        hr.checkpoint.save(tree, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_a_checkpoint_runs_code(tmp_path):
    """An outline that was tampered with is an error, whatever it says."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    record = next(tmp_path.rglob("rank*.json"))
    text = json.loads(record.read_text())
    size = record.stat().st_size
    for outline in ({"reduce": ["os", "x"]}, {"array": "no"}, {"value": {}}, [], {"dict": 3}):
        changed = json.dumps(text | {"outline": outline}, separators=(",", ":"))
        record.write_text(changed.ljust(size)[: max(size, len(changed))])
        if len(changed) > size:
            continue
        with pytest.raises(CorruptCheckpoint):
            hr.checkpoint.load(tmp_path)


def test_shards_are_safetensors(tmp_path):
    arrays = {f"w{i}": np.full(9 << 20, i, np.uint8) for i in range(4)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(arrays, 1)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    found = {k: v for f in files for k, v in load_file(f).items()}
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[k], v) for k, v in arrays.items())


def test_torch_state_dicts_come_back(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).to(torch.bfloat16)
    shared = torch.arange(6.0)
    # As torch's optimizers have it: numbered parameters, tensors without dimensions, groups.
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": shared}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "maximize": False, "foreach": None, "params": [0]}]
    tree = {
        "model": model.state_dict(),
        "optimizer": {"state": moments, "param_groups": groups},
        "tied": [shared, shared],
        "part": shared.reshape(2, 3)[:, 1],
        "none": torch.empty(0, 3),
    }
    hr.checkpoint.save(tree, tmp_path, 1)
    loaded = hr.checkpoint.load(tmp_path).tree
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded["model"][name], tensor)
        assert loaded["model"][name].dtype == torch.bfloat16
    assert loaded["tied"][0] is loaded["tied"][1]
    assert loaded["part"].tolist() == [1.0, 4.0]
    assert loaded["none"].shape == (0, 3)
    assert loaded["optimizer"]["param_groups"] == groups
    assert loaded["optimizer"]["state"][0]["step"].item() == 3.0
    model.load_state_dict(loaded["model"])
    with pytest.raises(TypeError, match="meta tensor"):
        hr.checkpoint.save({"a": torch.empty(3, device="meta")}, tmp_path, 2)


def test_loading_arrays_needs_no_torch(tmp_path):
    hr.checkpoint.save({"x": np.ones(3)}, tmp_path, 1)
    hr.checkpoint.wait()
    code = (
        "import sys, headrace as hr; c = hr.checkpoint.load(sys.argv[1]);"
        "print(c.step, 'torch' in sys.modules)"
    )
    import subprocess

    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["1", "False"]


def test_wrong_options_are_refused(tmp_path):
    for wrong in ({"keep": 0}, {"durability": "maybe"}, {"writers": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CheckpointOptions(**wrong)
    with pytest.raises(ValueError, match="rank is 2"):
        Checkpointer(tmp_path, rank=2, world_size=2)
    with pytest.raises(ValueError, match="another folder"):
        Checkpointer(tmp_path, local=tmp_path)
    with pytest.raises(ValueError, match="step is -1"):
        Checkpointer(tmp_path).save({}, -1)
    assert Path(tmp_path).exists()


def test_every_flipped_bit_of_every_document_is_found(tmp_path):
    """Of a record's 2,968 flips 263 once loaded another state: `lr` 0.001 became 8.001."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"w": np.ones(2, np.float32), "lr": 0.001, "step": 17}, 7)
        checkpointer.wait()
        record = next(tmp_path.glob("*/rank*.json"))
        for path, read in (
            (record, lambda: read_record(str(tmp_path), 7, 0, 1)),
            (record.with_name("manifest.json"), lambda: read_manifest(str(tmp_path), 7)),
        ):
            good = path.read_bytes()

            def after(bad, path=path, read=read):
                path.write_bytes(bad)
                return read()

            assert outcomes(good, after) == {"CorruptCheckpoint": 8 * len(good)}
            with pytest.raises(CorruptCheckpoint, match="of a") as raised:
                checkpointer.load()
            assert raised.value.path == str(path)
            path.write_bytes(good)
        assert checkpointer.load().tree["lr"] == 0.001


def test_checkpoints_of_before_documents_had_checksums_are_loaded(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"w": np.ones(2, np.float32), "lr": 0.001}, 7)
        checkpointer.wait()
        record = next(tmp_path.glob("*/rank*.json"))
        manifest = record.with_name("manifest.json")
        for document in (record, manifest):
            text = json.loads(document.read_bytes())
            del text["crc32c"], text["version"]
            if document == manifest:
                text |= {
                    "version": 1,
                    "files": {**text["files"], record.name: record.stat().st_size},
                }
            document.write_text(json.dumps(text))
        assert checkpointer.load().tree["lr"] == 0.001
        # What says that it is newer, and has lost its checksum, is not taken for one of them.
        record.write_text(json.dumps({**json.loads(record.read_bytes()), "version": 2}))
        text["files"][record.name] = record.stat().st_size
        manifest.write_text(json.dumps(text))
        with pytest.raises(CorruptCheckpoint, match="the checksum of a rank's record is missing"):
            checkpointer.load()
