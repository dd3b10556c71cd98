"""The name tree in plain Python: the slow side of the equivalence tests."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from headrace.store.directory import duplicate_name, split_names
from headrace.store.format import NAMES_PER_BLOCK


def build_levels_reference(blob, offsets):
    """`build_levels` in plain Python."""
    names = split_names(blob, offsets)
    ranks = None
    if any(a >= b for a, b in pairwise(names)):
        order = sorted(range(len(names)), key=names.__getitem__)
        names = [names[i] for i in order]
        ranks = np.array(order, np.int64)
        for a, b in pairwise(names):
            if a == b:
                raise duplicate_name(a)
    levels = []
    while names:
        levels.append(_front_code(names))
        if len(names) <= NAMES_PER_BLOCK:
            break
        names = names[::NAMES_PER_BLOCK]
    return ranks, levels


def _front_code(names: list[bytes]):
    blob = bytearray()
    offsets = [0]
    for start in range(0, len(names), NAMES_PER_BLOCK):
        block = names[start : start + NAMES_PER_BLOCK]
        blob += _varint(len(block[0])) + block[0]
        for before, name in pairwise(block):
            shared = _common_prefix(before, name)
            blob += _varint(shared) + _varint(len(name) - shared) + name[shared:]
        offsets.append(len(blob))
    return np.array(offsets, np.uint64), np.frombuffer(bytes(blob), np.uint8)


def _common_prefix(a: bytes, b: bytes) -> int:
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
