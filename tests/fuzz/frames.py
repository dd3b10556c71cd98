"""Streams cut anywhere: the same bodies however the bytes come, and bounded memory meanwhile."""

from __future__ import annotations

import random

from fuzz import wire as bodies
from headrace.node.wire import Splitter, WireError

FRAME_BYTES_MAX = 4096


def seeds() -> list[bytes]:
    frames = [len(body).to_bytes(4, "little") + body for body in bodies.seeds()]
    return [*frames, b"".join(frames)]


def _bodies(data: bytes, cuts: random.Random | None) -> tuple[list[bytes], bool]:
    splitter, found, at = Splitter(FRAME_BYTES_MAX), [], 0
    try:
        while at < len(data):
            size = cuts.randint(1, 9) if cuts else len(data)
            found += splitter.feed(data[at : at + size])
            at += size
            assert len(splitter._pending) < FRAME_BYTES_MAX + 4 + size
    except WireError:
        return found, False
    assert splitter.partial == bool(splitter._pending)
    return found, True


def one_input(data: bytes) -> str:
    # `found +=` of a generator that raises keeps what it gave before.
    whole, fine = _bodies(data, None)
    pieces, also = _bodies(data, random.Random(len(data)))
    assert (whole, fine) == (pieces, also)
    assert sum(map(len, whole)) + 4 * len(whole) <= len(data)
    return "accepted" if fine and whole else "refused"
