"""The benchmark's checkpoint writers: the right files and bytes, times, and errors with names."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from headrace.bench.checkpoints import writer_of
from headrace.bench.model import ModelSpec
from headrace.bench.schema import ModelSection
from headrace.errors import CheckpointNotFound, CorruptCheckpoint, VolumeError
from headrace.store import output_file

SPEC = ModelSpec(ModelSection(
    type="transformer", num_layers=4, transformer_vocab_size=500, transformer_hidden_size=64,
    transformer_ffn_hidden_size=128, transformer_num_attention_heads=4, transformer_num_kv_heads=2,
    parallelism_tensor=2, parallelism_pipeline=2, parallelism_zero_stage=1,
))  # fmt: skip


def total_bytes(spec, ranks):
    """Of the whole checkpoint, over the ranks that write it."""
    return sum(spec.share(rank, ranks).nbytes for rank in range(ranks))


@pytest.mark.parametrize("name", ["plain", "fsync", "direct"])
def test_each_rank_writes_dlios_files(tmp_path, name):
    for rank in range(8):
        share = SPEC.share(rank, 8)
        writer = writer_of(name, str(tmp_path), share, rank=rank)
        writer.save(1, 3)
        times = writer.wait()
        assert times.nbytes == share.nbytes
        assert 0 < times.blocking_s == times.total_s
        assert writer.load(1, 3) == share.nbytes
        writer.close()
    files = list((tmp_path / "global_epoch1_step3").iterdir())
    assert sum(f.stat().st_size for f in files) == total_bytes(SPEC, 8)
    assert {f.name for f in files} == {
        n for r in range(8) for n in (*SPEC.share(r, 8).model, *SPEC.share(r, 8).optimizer)
    }


def test_no_two_checkpoints_have_the_same_bytes(tmp_path):
    share = ModelSpec(ModelSection(model_size_bytes=5000)).share(0, 1)
    writer = writer_of("plain", str(tmp_path), share)
    for epoch, step in ((1, 1), (1, 2), (2, 1)):
        writer.save(epoch, step)
    digests = {hashlib.sha256(f.read_bytes()).digest() for f in tmp_path.rglob("*.pt")}
    assert len(digests) == 3


def test_headraces_own_writer_saves_in_the_background(tmp_path):
    writers = [
        writer_of("headrace", str(tmp_path / "t"), SPEC.share(r, 4), rank=r, world_size=4,
                  local=str(tmp_path / "l"))
        for r in range(4)
    ]  # fmt: skip
    for writer in writers:
        writer.save(2, 10)
    for rank, writer in enumerate(writers):
        times = writer.wait()
        assert times.nbytes == SPEC.share(rank, 4).nbytes
        assert 0 < times.blocking_s < times.total_s
    for rank, writer in enumerate(writers):
        assert writer.load(2, 10) == SPEC.share(rank, 4).nbytes
        writer.close()


def test_memory_does_not_grow_with_the_model(tmp_path):
    import resource

    share = ModelSpec(ModelSection(model_size_bytes=300 << 20)).share(0, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer = writer_of("direct", str(tmp_path), share)
    writer.save(1, 1)
    assert writer.wait().nbytes == 300 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_what_is_missing_or_short_is_named(tmp_path):
    share = ModelSpec(ModelSection(model_size_bytes=5000)).share(0, 1)
    writer = writer_of("fsync", str(tmp_path), share)
    with pytest.raises(CheckpointNotFound, match=r"global_epoch1_step1/model_states-0\.pt"):
        writer.load(1, 1)
    writer.save(1, 1)
    path = next(Path(tmp_path).rglob("*.pt"))
    os.truncate(path, 4999)
    with pytest.raises(CorruptCheckpoint, match="has 4,999 bytes, expected 5,000"):
        writer.load(1, 1)


def test_a_full_disk_is_one_error(tmp_path, monkeypatch):
    calls = []

    def full(fd, data):
        calls.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output_file.os, "write", full)
    writer = writer_of(
        "direct", str(tmp_path), ModelSpec(ModelSection(model_size_bytes=5000)).share(0, 1)
    )
    with pytest.raises(VolumeError, match=r"model_states-0\.pt: the disk is full"):
        writer.save(1, 1)
    assert calls
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
