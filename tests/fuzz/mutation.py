"""Mutation: changes inputs at random, for where atheris is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

_EDGES = (b"\0", b"\x7f", b"\x80", b"\xff", b"\xff" * 8, bytes(8), (1 << 62).to_bytes(8, "little"))


def mutated(rng: random.Random, corpus: list[bytes]) -> bytes:
    """One of the corpus, changed in a few places."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randint(0, len(data))
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del data[at : at + rng.randint(1, 8)]
            case 3:
                edge = rng.choice(_EDGES)
                data[at : at + len(edge)] = edge
            case 4:
                other = rng.choice(corpus)
                data[at:] = other[rng.randint(0, len(other)) :]
            case 5:
                data[at:at] = data[: rng.randint(0, len(data))]
            case _ if data:
                data[at % len(data)] = rng.randrange(256)
    return bytes(data[: 1 << 16])
