"""Feeders: one thread for each accelerator that waits for its batches and notes when each was there.

What is there already is taken by the loop's own thread, if the engine can tell.

A feeder waits for one batch at a time, when it is permitted to. Engines that read ahead are permitted when
the batch before is taken; the others when the accelerator is idle, as a training loop asks its loader.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.bench.emulate.engines.base import Delivered, Source

__all__ = ["Arrival", "Feeder"]


class Arrival:
    """A batch that is there, or why there is none.

    Attributes:
        number: of the accelerator, among those of this process.
        at_s: when it was there, of `time.perf_counter`; perhaps before it was asked for.
        asked_s: when it was asked for.
    """

    __slots__ = ("asked_s", "at_s", "batch", "error", "number")

    def __init__(
        self,
        number: int,
        asked_s: float,
        batch: Delivered | None,
        error: BaseException | None,
        at_s: float,
    ) -> None:
        self.at_s = at_s
        self.number = number
        self.asked_s = asked_s
        self.batch = batch
        self.error = error


class Feeder:
    """Feeds one accelerator for one epoch.

    Args:
        number: of the accelerator, among those of this process.
        source: its batches.
        inbox: where arrivals go.
    """

    def __init__(self, number: int, source: Source, inbox: SimpleQueue[Arrival]) -> None:
        self._number = number
        self._source = source
        self._poll: Callable[[], Delivered | None] | None = getattr(source, "poll", None)
        self._inbox = inbox
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._feed, name=f"headrace-bench-{number}", daemon=True
        )
        self._thread.start()

    def poll(self) -> Arrival | None:
        """The next batch if it is there, by the calling thread; None: `permit`, and it comes to the inbox.

        Errors as the source's. Only while nothing is permitted: the source is one thread's at a time.
        """
        asked_s = time.perf_counter()
        batch = None if self._poll is None else self._poll()
        return None if batch is None else _arrival(self._number, asked_s, batch)

    def permit(self) -> None:
        """Let it wait for one more batch."""
        self._permits.put(True)

    def close(self, seconds: float = 5.0) -> None:
        """End the thread; one that is stuck in a read is left behind."""
        self._permits.put(False)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._source.close()

    def _feed(self) -> None:
        while self._permits.get():
            asked_s = time.perf_counter()
            try:
                batch = self._source.next()
            except BaseException as e:  # noqa: BLE001 - raised in the loop's thread
                self._inbox.put(Arrival(self._number, asked_s, None, e, time.perf_counter()))
                return
            self._inbox.put(_arrival(self._number, asked_s, batch))


def _arrival(number: int, asked_s: float, batch: Delivered) -> Arrival:
    at_s = time.perf_counter() if batch.at_s is None else batch.at_s
    return Arrival(number, asked_s, batch, None, at_s)
