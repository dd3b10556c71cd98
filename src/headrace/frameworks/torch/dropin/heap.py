"""Heap: memory of samples that were freed stays with the process, for the next batch.

A batch of samples as `bytes` is tens of megabytes in pieces of a hundred kilobytes. The C library gives
the heap's free end back to the system as soon as it is longer than twice the largest block that it ever
mapped and freed: in a process without large blocks, with every batch. Faulting the pages in again costs
more than reading the files (0.8 instead of 0.3 CPU s/GB on the test machine).
"""

from __future__ import annotations

import numpy as np

__all__ = ["keep_freed_memory"]

_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""glibc learns from blocks of up to 32 MiB (DEFAULT_MMAP_THRESHOLD_MAX), its own head included."""


def keep_freed_memory() -> None:
    """Free a large block, untouched: from then on the heap keeps up to 64 MiB that are free.

    It is what any program comes to that ever frees a tensor of this size; nothing is set, and whoever
    set the C library's thresholds has them still. Costs microseconds.
    """
    np.empty(_BLOCK_BYTES, np.uint8)
