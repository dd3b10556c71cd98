"""A daemon that lies: whatever it says of a batch, what a client looks at lies inside its mapping."""

from __future__ import annotations

import os

import numpy as np

from headrace.node.mapped import LeaseLedger, Mappings
from headrace.node.wire import (
    Buffers,
    ReplyStatus,
    Retired,
    Samples,
    WireError,
    decode_reply,
    encode,
)

SIZE = 4096
SAMPLES, PARTS = 3, 2


def seeds() -> list[bytes]:
    offsets = np.arange(6, dtype=np.int64) * 10
    lengths = np.full(6, 10, np.int64)
    good = Samples(
        1, ReplyStatus.OK, "", 1, 100, offsets.tobytes(), lengths.tobytes(),
        np.zeros(3, np.int64).tobytes(), 0,
    )  # fmt: skip
    return [encode(m)[4:] for m in (good, Buffers([(1, SIZE)]), Retired([1]))]


def one_input(data: bytes) -> str:
    mappings = Mappings(LeaseLedger())
    fd = os.memfd_create("fuzz")
    try:
        os.ftruncate(fd, SIZE)
        mappings.add([(1, SIZE)], [fd])
        message = decode_reply(data)
        if isinstance(message, Buffers):
            mappings.add(message.buffers, [fd] * min(len(message.buffers), 1))
        elif isinstance(message, Retired):
            mappings.retire(message.buffers)
        elif isinstance(message, Samples):
            batch = mappings.batch(message, np.arange(SAMPLES), PARTS)
            assert len(batch.data) <= SIZE
            for at, size in zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=True):
                assert 0 <= at <= at + size <= len(batch.data)
                bytes(batch.data[at : at + size])
        else:
            return "refused"
    except WireError:
        return "refused"
    finally:
        os.close(fd)
    return "accepted"
