"""Elements: what a batch is for JAX: arrays in a dict, under `data`, `labels` and `indices`.

numpy arrays lie over headrace's buffer without a copy, and JAX's CPU arrays lie over those without
another: `jax.device_put` shares memory that is aligned to 64 bytes.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headrace.errors import DecodeError
from headrace.frameworks.view import decode_error, rows_of, sample_data
from headrace.plane.batch import Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.plane import Batch
    from headrace.plane.batch import OnError
    from headrace.plane.batch_trace import BatchTrace

Form = Literal["rows", "buffer"]
"""`rows`: `data` is uint8, shape (samples, length), for samples of equal length; no copy where they
lie one after the other. `buffer`: `data` is uint8, shape (bytes,), and `offsets` and `lengths` say
where the samples lie in it; never a copy."""


def arrays_of(batch: Batch, form: Form) -> dict[str, Any]:
    """Return a batch as numpy arrays, see `Form`.

    Raises:
        ValueError: `rows` of samples that differ in length.
    """
    common = {"labels": batch.labels, "indices": batch.indices}
    if form == "rows":
        return {"data": rows_of(batch, "give decode=, or take 'buffer'"), **common}
    return {"data": batch.data, "offsets": batch.offsets, "lengths": batch.lengths, **common}


class StackingDecoder:
    """Decodes the samples of a batch in threads and stacks the results.

    Args:
        function: `decode(data)`; data is a read-only memoryview of the sample's bytes (a dict of
            them by part, where several parts are read). Returns an array, or a dict or tuple of
            arrays, of the same shapes for all samples.
        threads: how many samples are decoded at a time; 0 decodes in the caller's thread.
        names: the store's names, for errors.
        on_error: what to do with a sample that cannot be decoded.
        skipped: takes what was left out.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        threads: int,
        names: Sequence[str],
        on_error: OnError,
        skipped: list[Skipped],
    ) -> None:
        self._function = function
        self._names = names
        self._on_error = on_error
        self._skipped = skipped
        self._pool = ThreadPoolExecutor(threads, "headrace-decode") if threads else None

    def __call__(self, batch: Batch, trace: BatchTrace) -> dict[str, Any]:
        """Return the decoded batch, and stamp its trace.

        Raises:
            DecodeError: the function failed; names the sample.
            ValueError: no sample is left.
        """
        places = range(len(batch))
        one_by_one = self._pool.map if self._pool else map
        trace.decoding_s = time.perf_counter()
        timed = list(one_by_one(lambda i: self._timed(batch, i), places))
        trace.decoded_s = time.perf_counter()
        trace.work_s, trace.cpu_s = sum(each[1] for each in timed), sum(each[2] for each in timed)
        results = [each[0] for each in timed]
        for result in results:
            if not isinstance(result, DecodeError):
                continue
            if self._on_error == "raise":
                raise result
            self._skipped.append(Skipped(result.index, result.name, str(result)))
        kept = [i for i in places if not isinstance(results[i], DecodeError)]
        if not kept:
            raise ValueError(
                "a batch has no samples: all were skipped; see `skipped` of the iterator",
            )
        element = {
            "data": _stacked([results[i] for i in kept]),
            "labels": batch.labels[kept],
            "indices": batch.indices[kept],
        }
        trace.collated_s = time.perf_counter()
        return element

    def empty(self, one: Batch) -> dict[str, Any]:
        """Return a batch without samples, shaped like a batch of the one sample that is given.

        Raises:
            DecodeError: the function failed on it.
        """
        sample = self._decode(one, 0)
        if isinstance(sample, DecodeError):
            raise sample
        return {
            "data": _stacked([sample], 0),
            "labels": one.labels[:0],
            "indices": one.indices[:0],
        }

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, batch: Batch, i: int) -> tuple[Any, float, float]:
        """A decoded sample, and the seconds and the processor seconds that it took."""
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        result = self._decode(batch, i)
        return result, time.perf_counter() - began_s, time.thread_time() - cpu_s

    def _decode(self, batch: Batch, i: int) -> Any:
        try:
            return self._function(sample_data(batch, i))
        except Exception as e:  # noqa: BLE001 - it is raised, or recorded, where the batch is made
            index = int(batch.indices[i])
            error = decode_error(index, self._names[index], f"{type(e).__name__}: {e}")
            error.__cause__ = e
            return error


def _stacked(samples: list[Any], count: int | None = None) -> Any:
    """Of `samples`, the first `count`: shapes are known where none is wanted."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: _stacked([sample[key] for sample in samples], count) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked(list(each), count) for each in zip(*samples, strict=True))
    return np.stack(samples)[:count]


def on_device(element: dict[str, Any], place: Any) -> dict[str, Any]:
    """Return a batch as JAX arrays; `indices` stay with the host, which counts with them.

    Args:
        element: numpy arrays.
        place: a `jax.Device`, or a `jax.sharding.Sharding` whose first axis is the batch: then the
            result is the global array of which this process holds its share.
    """
    import jax

    def put(array: Any) -> Any:
        if isinstance(place, jax.sharding.Sharding):
            return jax.make_array_from_process_local_data(place, array)
        return jax.device_put(array, place)

    return {
        key: value if key == "indices" else jax.tree.map(put, value)
        for key, value in element.items()
    }
