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

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.frameworks.tensorflow.elements import Elements
    from headrace.frameworks.tensorflow.run import Run

__all__ = ["Runs", "Steps", "pipeline", "takes_seed"]


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
        made = tf.data.Dataset.from_generator(
            batches, args=(number,), output_signature=steps.elements.signature
        )
        return _counted(_finished(made, steps), count, number)

    made = tf.data.Dataset.from_tensors(0).flat_map(of_run)
    if steps.endless:
        made = made.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    made = made.with_options(_options())
    # In a graph the data set is used longer than its Python object lives.
    keeper = made if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    keeper.headrace_runs = (*getattr(keeper, "headrace_runs", ()), runs)
    return made


def _finished(made: Any, steps: Steps) -> Any:
    if steps.elements.cuts:
        made = made.map(steps.elements.arrived, num_parallel_calls=CUT_AT_A_TIME)
    if steps.decode is not None:
        made = made.map(_decoded(steps.decode), num_parallel_calls=tf.data.AUTOTUNE)
    if steps.transform is not None:
        made = steps.transform(made)
    made = made.map(lambda *element: (tf.timestamp(), element))
    return made.prefetch(steps.prefetch) if steps.prefetch else made


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
