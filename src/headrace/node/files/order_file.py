"""Order files: which files a program opens, one path a line, all epochs one after another.

A line is an absolute path, or one relative to a root. Lines that name no known file are counted and left
out. An epoch ends where a file comes again; after the last epoch the first one follows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["OrderFile", "read_order_file"]

LINES_MAX = 1 << 27
"""More are not read: 90 epochs of ImageNet are 115 million."""

_LINE_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True, eq=False)
class OrderFile:
    """What an order file says.

    Attributes:
        epochs: the files of each epoch, int64.
        unknown: lines that name no known file.
        first_unknown: the first of them.
    """

    epochs: tuple[NDArray[np.int64], ...]
    unknown: int = 0
    first_unknown: bytes = b""


def read_order_file(
    path: bytes, roots: Sequence[tuple[bytes, bytes]], find: Callable[[bytes], int], files: int
) -> OrderFile:
    """Read an order file.

    Args:
        path: of the file.
        roots: (as it may be spelled, resolved path).
        find: a file's number by its path below a resolved root; -1: there is none.
        files: how many there are.

    Raises:
        OSError: it cannot be read.
    """
    epochs: list[NDArray[np.int64]] = []
    seen = np.zeros(files, bool)
    now: list[int] = []
    unknown, first = 0, b""
    with open(path, "rb") as lines:
        for count, line in enumerate(lines):
            name = line.rstrip(b"\r\n")
            if count >= LINES_MAX:
                break
            if not name:
                continue
            number = _number(name, roots, find) if len(line) <= _LINE_BYTES_MAX else -1
            if number < 0:
                unknown, first = unknown + 1, first or name[:256]
                continue
            if seen[number]:
                epochs.append(np.array(now, np.int64))
                seen[now] = False
                now = []
            seen[number] = True
            now.append(number)
    if now:
        epochs.append(np.array(now, np.int64))
    return OrderFile(tuple(epochs), unknown, first)


def _number(name: bytes, roots: Sequence[tuple[bytes, bytes]], find: Callable[[bytes], int]) -> int:
    if not name.startswith(b"/"):
        for _, resolved in roots:
            if (number := find(os.path.normpath(os.path.join(resolved, name)))) >= 0:
                return number
        return -1
    name = os.path.normpath(name)
    for spelled, resolved in roots:
        top = spelled.rstrip(b"/")
        if name.startswith(top + b"/") and (number := find(resolved + name[len(top) :])) >= 0:
            return number
    return find(name)
