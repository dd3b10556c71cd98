"""Turns: which side runs when. Pure.

Blocks of two pairs, ABBA or BAAB as a coin says: each side is first as often as second, and what grows
steadily while the comparison runs weighs on both alike.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Side", "turns"]


class Side(StrEnum):
    """How a run is made."""

    WITHOUT = "without"
    WITH = "with"


def turns(seed: int) -> Iterator[tuple[Side, Side]]:
    """Pairs without an end, each with its order.

    Args:
        seed: the same gives the same.
    """
    draw = random.Random(seed)  # noqa: S311 - a coin
    while True:
        order = [Side.WITHOUT, Side.WITH]
        if draw.random() < 0.5:
            order.reverse()
        yield order[0], order[1]
        yield order[1], order[0]
