"""Threads of a program in C that share what they opened."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import headrace
from capi.library import Failed

if TYPE_CHECKING:
    from pathlib import Path

    from capi.library import Library

SAMPLES = 1_041
EPOCHS = 3


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_threads_that_share_a_sequence_read_each_epoch_exactly_once(
    library: Library, tmp_path: Path, count: int
):
    """What each got is counted: every sample once an epoch, and one end of each epoch for each thread."""
    store = tmp_path / "s.hr"
    headrace.pack(((f"{i:06d}", b"%d" % i) for i in range(SAMPLES)), store)
    mount = library.mount(store)
    sequence = library.sequence(mount, seed=7)
    delivered: Counter[tuple[int, int]] = Counter()
    ends: Counter[int] = Counter()
    errors: list[Failed] = []
    together = threading.Barrier(count)

    def take() -> None:
        try:
            together.wait()
            mine: list[tuple[int, int]] = []
            told: list[int] = []
            for epoch in range(EPOCHS):
                while (batch := library.batch(sequence, 16)) is not None:
                    mine += [(batch.epoch, index) for index, _, _ in batch.content()]
                    library.release(batch)
                told.append(epoch)
            delivered.update(mine)
            ends.update(told)
        except Failed as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.call("hr_sequence_close", sequence)
    library.call("hr_unmount", mount)
    assert not errors
    assert sum(delivered.values()) == SAMPLES * EPOCHS
    assert delivered == {(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)}
    assert ends == dict.fromkeys(range(EPOCHS), count)
