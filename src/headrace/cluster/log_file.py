"""Log file: what a job printed, while it prints it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["follow_file", "read_file"]

_PIECE_BYTES = 1 << 16
_POLL_S = 0.1


def read_file(path: Path) -> Iterator[bytes]:
    """What a file holds now, piece by piece.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as f:
        while piece := f.read(_PIECE_BYTES):
            yield piece


def follow_file(path: Path, is_over: Callable[[], bool]) -> Iterator[bytes]:
    """What a file holds and comes to hold, until it is over and all is read.

    The file may come late. If it is shorter than what was read (a job that was requeued writes anew), it is
    read from its beginning.

    Args:
        path: the file.
        is_over: whether nothing will be written any more; asked after each look that found nothing new.
    """
    position = 0
    while True:
        over = is_over()  # before the look: what came before the end is seen
        try:
            with path.open("rb") as f:
                if f.seek(0, 2) < position:
                    position = 0
                f.seek(position)
                while piece := f.read(_PIECE_BYTES):
                    position += len(piece)
                    yield piece
        except FileNotFoundError:
            pass
        if over:
            return
        time.sleep(_POLL_S)
