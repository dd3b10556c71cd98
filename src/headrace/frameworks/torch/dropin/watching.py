"""Watching: the read-ahead's eyes and ears in the process that fetches samples.

It is told which indices come, from the batches that wait; and which sample is being fetched, by the
index list itself: torch fetches a batch by going through its list of indices, and the list that we
hand it reports each step. Nothing stands between torch and the user's data set.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from torch.utils import data as torch_data

from headrace.frameworks.torch.dropin.tuning import tuned
from headrace.plane.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.control import TuningHandle
    from headrace.frameworks.torch.dropin.messages import Reading

__all__ = ["AHEAD_VARIABLE", "READS_AHEAD", "Watcher", "nothing_to_read"]

READS_AHEAD = "files are read ahead"
"""What a watcher says while nothing is in the way."""

REST_BATCHES_MAX = 1024
"""Where nothing is read ahead, batches go unwatched: first few, then up to this many in a row."""


AHEAD_VARIABLE: Final = "HEADRACE_AHEAD"
"""At 0 nothing is read ahead: each file is opened by whoever wants it, as torch does."""


def nothing_to_read(dataset: Any, *, map_style: bool) -> str | None:
    """Say why a data set's files cannot be read ahead, or None: they may."""
    if not map_style:
        return "an iterable data set does not say what it will read"
    if type(dataset) is torch_data.TensorDataset:
        return "the data set's samples are in memory"
    if os.environ.get(AHEAD_VARIABLE, "1") == "0":
        return f"{AHEAD_VARIABLE} is 0"
    return None


class Watcher:
    """Feeds a `ReadAhead` with what is known. Makes it in the process that fetches, when it fetches.

    Args:
        dataset: the user's, map-style.
        reading: how.
    """

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self._dataset = dataset
        self._reading = reading
        self._ahead: ReadAhead | None = None
        self._tuning: TuningHandle | None = None
        self._made = False
        self._pid = os.getpid()
        self._foretold = 0  # batches said to come that have not come
        self._rest = 0  # batches that are left unwatched
        self._rest_next = 4
        self._said: str | None = None
        # Subset goes through the list one by one; what another __getitems__ does with it is its own
        # affair, and it gets what torch would give it.
        self._steps = not hasattr(dataset, "__getitems__") or type(dataset) is torch_data.Subset

    @property
    def wants_more(self) -> bool:
        """Whether it helps to know of batches long before they are asked for."""
        return self._ahead is not None and not self._rest and self._ahead.why_off is None

    @property
    def waited_s(self) -> float:
        """How long opens have waited for reads that were under way."""
        return 0.0 if self._ahead is None else self._ahead.figures.wait_s

    def foretold(self, batches: Sequence[Any]) -> None:
        """Say which batches will come later, in their order."""
        self._foretold += len(batches)
        for batch in batches:
            self._say(batch)

    def arrived(self, batch: Any) -> None:
        """Say that a batch came, which waits now."""
        if self._foretold:
            self._foretold -= 1  # tasks come in the order in which they were foretold
        else:
            self._say(batch)

    def epoch(self) -> None:
        """Say that an epoch begins."""
        self._foretold = 0

    def watched(self, index: Any) -> Any:
        """Return what torch is to fetch: equal to `index`, and reports each sample if it can."""
        ahead = self._ahead
        if ahead is None or not self._steps or type(index) is not list or self._rests(ahead):
            return index
        if ahead.dozing and not ahead.planned:
            return index
        if ahead.reads:
            if self._tuning is None:
                self._tuning = tuned(ahead)
            self._tuning.wake()
        return _Steps(index, ahead)

    def news(self) -> str | None:
        """Return `READS_AHEAD`, or why nothing is read ahead, when that changed."""
        if self._ahead is None:
            says = "the data set's length is unknown" if self._made else None
        else:
            says = self._ahead.why_off or READS_AHEAD
        if says == self._said:
            return None
        self._said = says
        return says

    def explain(self) -> str:
        """One line on what was read ahead."""
        return "nothing was read ahead yet" if self._ahead is None else self._ahead.explain()

    def close(self) -> None:
        """End reading ahead."""
        if self._tuning is not None:
            self._tuning.close()
        if self._ahead is not None:
            self._ahead.close()

    def __del__(self) -> None:
        # With the loader: whoever serves opens would be kept, and `open` replaced, for ever. At the
        # interpreter's end modules are gone already.
        if not sys.is_finalizing() and os.getpid() == self._pid:
            self.close()

    def _say(self, batch: Any) -> None:
        if not self._made:
            self._made = True
            self._ahead = ReadAhead.for_dataset(
                self._dataset, self._reading.options, log=self._reading.log
            )
        if self._ahead is not None and not self._rest:
            self._ahead.coming(batch if isinstance(batch, (list, tuple)) else [batch])

    def _rests(self, ahead: ReadAhead) -> bool:
        if self._rest:
            self._rest -= 1
            return True
        if ahead.why_off is not None:
            self._rest = self._rest_next
            self._rest_next = min(2 * self._rest_next, REST_BATCHES_MAX)
        return False


class _Steps(list[Any]):
    """A batch's indices. Going through them tells the read-ahead which sample is fetched."""

    def __init__(self, indices: list[Any], ahead: ReadAhead) -> None:
        super().__init__(indices)
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        sample = self._ahead.sample
        for index in super().__iter__():
            with sample(index):
                yield index

    def __reduce__(self) -> Any:
        return list, (self[:],)
