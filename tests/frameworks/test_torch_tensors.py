"""Batches that nobody decodes: tensors over headrace's own memory."""

from __future__ import annotations

import gc
import os

import numpy as np
import psutil
import pytest
import torch

import headrace as hr
from headrace.frameworks.torch.dataset import TensorBatch, shared_tensor
from headrace.torch import DataLoader

from .decoders import FIXED_BYTES, SAMPLES, content


def test_tensors_lie_over_the_batch_without_a_copy_or_a_warning(store):
    batch = next(iter(hr.loader(store, 32)))
    tensors = TensorBatch.over(batch)
    for name in ("data", "offsets", "lengths", "indices", "labels"):
        array, tensor = getattr(batch, name), getattr(tensors, name)
        assert tensor.data_ptr() == array.ctypes.data
        assert tensor.numpy().dtype == array.dtype
    for i in range(len(batch)):
        assert tensors[i].numpy().tobytes() == content(int(tensors.indices[i]))
        assert tensors[i].data_ptr() == batch.data.ctypes.data + int(batch.offsets[i])
    assert "32 samples" in repr(tensors)


def test_headraces_own_arrays_still_refuse_to_be_written(store):
    """PyTorch knows no read-only tensors; the array that users see is protected as before."""
    batch = next(iter(hr.loader(store, 8)))
    TensorBatch.over(batch)
    with pytest.raises(ValueError, match="read-only"):
        batch.data[0] = 1


def test_writable_strided_and_empty_arrays_are_shared_too():
    array = np.arange(12).reshape(3, 4)[:, ::2]
    tensor = shared_tensor(array)
    tensor[0, 0] = 7
    assert array[0, 0] == 7
    array.flags.writeable = False
    assert shared_tensor(array).data_ptr() == array.ctypes.data
    assert shared_tensor(array).tolist() == array.tolist()
    empty = np.empty((0,), np.int64)
    empty.flags.writeable = False
    assert shared_tensor(empty).shape == (0,)


def test_a_view_keeps_its_bytes_while_the_loader_goes_on(store):
    loader = DataLoader(store, 16, shuffle=True, seed=2)
    kept = [(int(batch.indices[3]), batch[3]) for batch in loader if len(batch) > 3]
    for _ in range(3):
        for _ in loader:
            pass
    loader.close()
    gc.collect()
    for index, view in kept:
        assert view.numpy().tobytes() == content(index)


def test_memory_is_recycled_over_hundreds_of_batches(tmp_path):
    hr.pack((np.random.default_rng(i).bytes(1 << 20) for i in range(64)), tmp_path / "large.hr")
    loader = DataLoader(tmp_path / "large.hr", 8, budget_bytes=32 << 20)
    process = psutil.Process(os.getpid())
    total, after_first = 0, 0
    for epoch in range(25):
        for batch in loader:
            total += int(batch.data[-1] >= 0)
        if epoch == 4:
            after_first = process.memory_info().rss
    assert total == 200
    assert process.memory_info().rss < after_first + (24 << 20)


def test_samples_of_equal_length_are_stacked_as_a_view(equal_path):
    views = 0
    for batch in DataLoader(equal_path, 32, engine="mmap", order="sequential"):
        stacked = batch.stacked()
        assert stacked.shape == (len(batch), FIXED_BYTES)
        assert (stacked == (batch.indices % 256)[:, None]).all()
        low = batch.data.data_ptr()
        views += low <= stacked.data_ptr() < low + batch.data.numel()
    assert views == -(-SAMPLES // 32)


def test_stacking_copies_where_samples_lie_scattered(equal_path):
    batch = next(iter(DataLoader(equal_path, 3)))
    order = torch.tensor([2, 0, 1])
    scattered = TensorBatch(
        batch.data, batch.offsets[order], batch.lengths[order], batch.indices[order],
        batch.labels[order], batch.part_names, 0, 0,
    )  # fmt: skip
    assert (scattered.stacked() == (scattered.indices % 256)[:, None]).all()
    assert (batch.stacked()[0] == batch.indices[0] % 256).all()


def test_stacking_refuses_samples_of_different_lengths(store):
    with pytest.raises(ValueError, match=r"lengths are \d+ to \d+ bytes"):
        next(iter(DataLoader(store, 8))).stacked()


def test_a_batch_moves_to_a_device_as_a_whole(store):
    batch = next(iter(DataLoader(store, 8)))
    moved = batch.to("meta")
    assert moved.data.device.type == "meta"
    assert (moved.epoch, moved.part_names) == (batch.epoch, batch.part_names)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_batches_are_pinned_where_cuda_is(store):
    batch = next(iter(DataLoader(store, 8)))
    assert batch.data.is_pinned()
    assert batch[0].cpu().numpy().tobytes() == content(int(batch.indices[0]))


def test_pinning_is_off_where_cuda_is_not(store):
    assert DataLoader(store, 8).pin_memory == torch.cuda.is_available()


def test_parts_are_named(tmp_path):
    items = [{"data": {"jpg": b"J%d" % i, "txt": b"text"}, "label": i} for i in range(5)]
    hr.pack(items, tmp_path / "parts.hr")
    batch = next(iter(DataLoader(tmp_path / "parts.hr", 5, order="sequential")))
    assert batch[2, "jpg"].numpy().tobytes() == b"J2"
    assert batch.stacked("txt").shape == (5, 4)
    with pytest.raises(ValueError, match="name a part"):
        batch[0]
    with pytest.raises(KeyError, match="png"):
        batch[0, "png"]

    def one(data):
        return len(data["jpg"]) + len(data["txt"])

    lengths, labels = next(iter(DataLoader(tmp_path / "parts.hr", 5, decode=one)))
    assert (lengths.tolist(), sorted(labels.tolist())) == ([6] * 5, list(range(5)))
    (only,) = DataLoader(tmp_path / "parts.hr", 5, parts=["txt"], order="sequential")
    assert only[0].numpy().tobytes() == b"text"
