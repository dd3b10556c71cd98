"""Reads the extents of a batch from objects: neighbours together, all ranges at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import SourceChanged, SourceError
from headrace.io.objects.failure import Failure

if TYPE_CHECKING:
    from headrace.io.objects.transport import Found
    from headrace.store.sources.scan import Scan

GAP_BYTES = 128 << 10
"""A gap up to this long is read rather than skipped, as by the native reader (`remote_gap_bytes`).
Extents come in the order of their source here, so there are few gaps and no bound on them together."""

RANGE_BYTES = 8 << 20


class ObjectExtents:
    """What was fetched of one batch's extents.

    Args:
        scan: where they lie.
        first: the first extent.
        last: the one after the last.
    """

    def __init__(self, scan: Scan, first: int, last: int) -> None:
        self._scan = scan
        columns = scan.columns
        volume = columns.volume[first:last].astype(np.int64)
        offset = columns.offset[first:last].astype(np.int64)
        length = columns.length[first:last].astype(np.int64)
        starts: list[tuple[int, int]] = []
        self._failures: dict[int, Failure] = {}
        self._place = np.zeros(last - first, np.int64)
        self._first = first
        begin = end = -1
        at_volume = -1
        for k in np.lexsort((offset, volume)).tolist():
            here, stop = int(offset[k]), int(offset[k] + length[k])
            if volume[k] != at_volume or here > end + GAP_BYTES or stop - begin > RANGE_BYTES:
                begin, end, at_volume = here, stop, int(volume[k])
                starts.append((at_volume, begin))
            end = max(end, stop)
            self._place[k] = len(starts) - 1
        ends = np.zeros(len(starts), np.int64)
        np.maximum.at(ends, self._place, offset + length)
        self._spans = [
            (v, b, memoryview(bytearray(int(e) - b)))
            for (v, b), e in zip(starts, ends, strict=True)
        ]
        self._fetch()

    def read(self, extent: int, view: memoryview) -> None:
        """Copies one extent.

        Raises:
            SourceError: its range could not be read.
        """
        place = int(self._place[extent - self._first])
        failure = self._failures.get(place)
        if failure is not None:
            raise source_error(failure)
        _, begin, data = self._spans[place]
        start = int(self._scan.columns.offset[extent]) - begin
        view[:] = data[start : start + len(view)]

    def _fetch(self) -> None:
        engine: Any = self._scan.objects
        wanted = [place for place, (_, _, data) in enumerate(self._spans) if len(data)]
        outcomes: list[Found | Failure] = engine.fetch_many(
            [
                (self._scan.volumes[v].path, begin, data)
                for v, begin, data in (self._spans[place] for place in wanted)
            ]
        )
        for place, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._failures[place] = outcome


def source_error(failure: Failure) -> SourceError:
    """A failed read as what packing and indexing can skip or raise."""
    error = failure.to_error()
    kind = SourceChanged if failure.fault.kind in ("changed", "missing") else SourceError
    return kind(
        error.message, path=error.path, offset_bytes=error.offset_bytes, next_step=error.next_step
    )
