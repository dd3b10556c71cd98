"""Decode functions that spawned workers can import."""

from __future__ import annotations

import os
import signal
import struct
import time

import numpy as np
import torch

SAMPLES = 211  # prime: no batch or world size divides it
FIXED_BYTES = 100


def content(index: int) -> bytes:
    """Bytes that name their sample, of very different lengths."""
    random = np.random.default_rng(index)
    return struct.pack("<Q", index) + random.bytes(int(random.integers(0, 9000)))


def index_of(data):
    """The index that the bytes name; checks all of them."""
    (index,) = struct.unpack_from("<Q", data)
    assert bytes(data) == content(index)
    return index


def with_key(data, sample):
    """What a decoder may know: index in the bytes, index, label, epoch, low bits of the key."""
    return torch.tensor(
        [index_of(data), sample.index, sample.label, sample.epoch, sample.key & 0xFFFFFF]
    )


def fail_on_77(data):
    index = index_of(data)
    if index == 77:
        raise ArithmeticError("seventy-seven")
    return index


def die_on_77(data):
    index = index_of(data)
    if index == 77:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def slow(data):
    time.sleep(0.02)
    return index_of(data)


def raw_collate(samples):
    """Bytes differ in length: keep them as a list."""
    return [data.numpy().tobytes() for data, _ in samples], [label for _, label in samples]
