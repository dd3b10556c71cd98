"""Pipeline: the `tf.data` graph around a run.

    begin -> batches (Python, one call a batch) -> decode -> transform -> made -> prefetch -> count
                                                                              asked ----------^

Everything stands inside one `flat_map`, so that each iterator begins a run of its own and all its
stages know the run's number. The last stage counts: it runs when the consumer asks for a batch, and
nothing of ours takes batches ahead behind it, so that the loader's state is exact at every step. TensorFlow's
own clock says when each batch was asked for, and when it had been made.

TensorFlow keeps each Python function that a graph calls until the process ends. Ours therefore know
the loader weakly, and the `tf.data.Dataset` keeps it (or the graph in which that was made), as its
iterators and all that is made of it keep the data set: a loader that nobody holds any more lets go
of its files and buffers.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import ref

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from headrace.frameworks.tensorflow.elements import Elements
    from headrace.plane import Batch, Loader
    from headrace.plane.batch_trace import BatchTrace


class _Taken(NamedTuple):
    """A batch that TensorFlow took, and what its delivery is counted with."""

    asked: NDArray[np.int64]
    epoch: int
    samples: int
    nbytes: int
    reads: dict[str, int]
    trace: BatchTrace


class Run:
    """The passes of one iterator. A new run ends the one before.

    Args:
        loader: gives order, cursor and reader.
        epochs: epochs to go through, the rest of the current one included; None: for ever.
        decodes: TensorFlow decodes the samples; else it only cuts or copies them.

    Attributes:
        error: what ended it, which reaches TensorFlow's user as text only.
    """

    def __init__(self, loader: Loader, epochs: int | None, *, decodes: bool = False) -> None:
        self.error: Exception | None = None
        self._loader = loader
        self._decodes = decodes
        self._pass = loader.begin()
        self._epochs_left = epochs
        self._begin = self._pass.epoch, self._pass.begin
        self._taken: deque[_Taken] = deque()
        self._step = 0
        self._delivered_s = 0.0

    def batches(self) -> Generator[Batch, None, None]:
        """Yield the batches of the run, ahead of their delivery.

        Raises:
            HeadraceError: a sample cannot be read and `on_error` is `raise`.
        """
        first, begin = self._begin
        epochs = (
            count(first) if self._epochs_left is None else range(first, first + self._epochs_left)
        )
        try:
            for epoch in epochs:
                yield from self._epoch(epoch, begin)
                begin = 0
        except GeneratorExit:  # TensorFlow's iterator was left early
            self._rest()
            raise

    def _epoch(self, epoch: int, begin: int) -> Generator[Batch, None, None]:
        slices = self._loader.slices
        spans = (slices.span(step, begin) for step in range(slices.steps(begin)))
        fetched = self._loader.reader.stream(self._loader.order, epoch, spans)
        try:
            for one in fetched:
                batch = one.batch
                if self._decodes:
                    one.trace.decoding_s = time.perf_counter()
                self._taken.append(
                    _Taken(one.asked, epoch, len(batch), batch.nbytes, one.reads, one.trace),
                )
                yield batch
        finally:
            fetched.close()

    @property
    def next_delivery(self) -> tuple[NDArray[np.int64], int] | None:
        """Indices and epoch of the batch that would be delivered next, if it was taken."""
        return (self._taken[0].asked, self._taken[0].epoch) if self._taken else None

    def delivered(self, asked_unix_s: float, made_unix_s: float) -> None:
        """Count the next batch: the consumer has it.

        Args:
            asked_unix_s: when the consumer asked for it, as TensorFlow's clock has it.
            made_unix_s: when TensorFlow had made it.

        Raises:
            RuntimeError: a newer run began, or the loader was closed or went elsewhere.
        """
        self._pass.check()
        taken, stats = self._taken.popleft(), self._loader.stats
        got_s, unix_s = time.perf_counter(), time.time()
        asked_s = max(self._delivered_s, got_s - max(0.0, unix_s - asked_unix_s))
        made_s = got_s - max(0.0, unix_s - made_unix_s)
        if self._decodes:
            # Nothing is copied on the way from there to here: while TensorFlow has further batches to
            # decode, a batch that waits to be counted waits for a thread that decodes those.
            taken.trace.decoded_s = got_s if self._taken else made_s
        else:
            taken.trace.collated_s = made_s
        stats.count(taken.samples, taken.nbytes, taken.reads, got_s - asked_s)
        place = self._pass.delivered(self._step, taken.asked)
        stats.steps.add(place, len(taken.asked), (asked_s, got_s), taken.trace)
        self._delivered_s = got_s
        self._step += 1
        if self._step == self._pass.steps:
            self._end_epoch()

    def _rest(self) -> None:
        """Nothing is asked for any more; and nothing is to be said of it if another run has begun."""
        with contextlib.suppress(RuntimeError):
            self._pass.check()
            self._loader.stats.rest()

    def _end_epoch(self) -> None:
        self._pass.finish()
        self._step = 0
        if self._epochs_left is not None:
            self._epochs_left -= 1
        self._loader.stats.rest()
        if self._epochs_left != 0:
            self._pass = self._loader.begin()


CUT_AT_A_TIME = 2
"""Batches that are cut into strings at a time: one thread copies 2 to 3 GB/s into fresh memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What happens to a batch between the reader and the consumer."""

    elements: Elements
    """What crosses into TensorFlow."""

    decode: Callable[..., Any] | None
    """`decode(bytes)` or `decode(bytes, seed)`: TensorFlow functions of one sample."""

    transform: Callable[[Any], Any] | None
    """From data set to data set: one element out for each that goes in, in order."""

    prefetch: int
    """Finished batches that wait to be taken."""

    endless: bool
    """Whether a run never ends."""


def takes_seed(decode: Callable[..., Any] | None) -> bool:
    """Whether a function of a sample wants the sample's random seed too."""
    if decode is None:
        return False
    parameters = inspect.signature(decode).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) > 1


class Runs(Protocol):
    """Whoever begins runs and knows them by number; the data set keeps it."""

    def begin_run(self) -> int:
        """Begin a run and return its number."""

    def run_of(self, number: int) -> Run:
        """Return the run with a number."""


def pipeline(runs: Runs, steps: Steps) -> Any:
    """Return the `tf.data.Dataset` of finished batches.

    Args:
        runs: begins runs, and knows them.
        steps: what happens to each batch.
    """
    known = ref(runs)
    elements = steps.elements  # without the user's functions, and what those know

    def found() -> Runs:
        runs = known()
        if runs is None:
            raise RuntimeError("the loader is gone: keep it, or the data set that it gave")
        return runs

    def started() -> Any:
        return np.int64(found().begin_run())

    def batches(number: Any) -> Iterator[Any]:
        run = found().run_of(int(number))
        try:
            for batch in run.batches():
                yield elements.crossing(batch)
        except Exception as e:
            run.error = e  # TensorFlow hands on its text only
            raise

    def count(number: Any, asked_s: Any, made_s: Any) -> Any:
        found().run_of(int(number)).delivered(float(asked_s), float(made_s))
        return number

    def of_run(_: Any) -> Any:
        number = tf.numpy_function(started, [], tf.int64)
        number.set_shape(())
        dataset = tf.data.Dataset.from_generator(
            batches, args=(number,), output_signature=steps.elements.signature
        )
        return _counted(_finished(dataset, steps), count, number)

    dataset = tf.data.Dataset.from_tensors(0).flat_map(of_run)
    if steps.endless:
        dataset = dataset.apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )
    dataset = dataset.with_options(_options())
    # In a graph the data set is used longer than its Python object lives.
    keeper = dataset if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    keeper.headrace_runs = (*getattr(keeper, "headrace_runs", ()), runs)
    return dataset


def _finished(dataset: Any, steps: Steps) -> Any:
    if steps.elements.cuts:
        dataset = dataset.map(steps.elements.arrived, num_parallel_calls=CUT_AT_A_TIME)
    if steps.decode is not None:
        dataset = dataset.map(_decoded(steps.decode), num_parallel_calls=tf.data.AUTOTUNE)
    if steps.transform is not None:
        dataset = steps.transform(dataset)
    dataset = dataset.map(lambda *element: (tf.timestamp(), element))
    return dataset.prefetch(steps.prefetch) if steps.prefetch else dataset


def _counted(finished: Any, count: Callable[..., Any], number: Any) -> Any:
    # What is zipped is asked in turn: the clock first, and then the batch.
    asked = tf.data.Dataset.counter().map(lambda _: tf.timestamp())
    return tf.data.Dataset.zip((asked, finished)).map(
        lambda asked_s, made: _after(count, (number, asked_s, made[0]), made[1])
    )


def _options() -> Any:
    options = tf.data.Options()
    # Batches that TensorFlow took ahead behind the counting stage would count as delivered.
    options.experimental_optimization.inject_prefetch = False
    # Ranks share the samples already; Python's own stages cannot be sharded anyway.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return options


def _after(count: Callable[..., Any], told: tuple[Any, ...], element: tuple[Any, ...]) -> Any:
    whole = element if len(element) > 1 else element[0]
    with tf.control_dependencies([tf.numpy_function(count, told, tf.int64)]):
        return tf.nest.map_structure(tf.identity, whole, expand_composites=True)


def _decoded(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a whole batch that decodes each of its samples."""

    def decode_batch(data: Any, labels: Any, *seeds: Any) -> Any:
        samples = (data, *seeds)
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), samples)
        outputs = tf.function(decode).get_concrete_function(*specs).structured_outputs
        signature = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs)
        decoded = tf.map_fn(lambda one: decode(*one), samples, fn_output_signature=signature)
        return decoded, labels

    return decode_batch
