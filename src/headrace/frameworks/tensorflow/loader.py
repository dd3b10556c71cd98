"""Loader: headrace's order and exact resume, as a TensorFlow user expects them.

`Loader.dataset()` is a `tf.data.Dataset` of whole batches; the loader itself goes into
`tf.train.Checkpoint` beside the model. This is the `tf.data` graph around a pass through the data:

    begin -> batches (Python, one call a batch) -> decode -> transform -> clock -> prefetch -> count
                                                                              asked -----------^

Everything stands inside one `flat_map`, so that each iterator begins a pass of its own (`Passes`) and all its
stages know its number. The last stage counts: it runs when the consumer asks for a batch, and
nothing of ours takes batches ahead behind it, so that the loader's state is exact at every step. TensorFlow's
own clock says when each batch was asked for, and when it was complete.

TensorFlow keeps each Python function that a graph calls until the process ends. Ours therefore know
the loader weakly, and the `tf.data.Dataset` keeps it (or the graph in which that stands), as its
iterators and all that derives from it keep the data set: a loader that nobody holds any more lets go
of its files and buffers.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import numpy as np
import tensorflow as tf

from headrace import api
from headrace.errors import OrderError
from headrace.frameworks.tensorflow.elements import Elements, Form
from headrace.frameworks.view import LoaderView, decode_error, takes_two
from headrace.plane.images import Images

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from os import PathLike

    from headrace.api import OrderName
    from headrace.order import Order
    from headrace.plane import Batch
    from headrace.plane import Loader as StoreReader
    from headrace.plane.batch import OnError
    from headrace.plane.pipeline import Delivery
    from headrace.store import Store

PREFETCH = 2
"""Finished batches that wait: one to hide a slow one, one more while it is taken."""

CUT_AT_A_TIME = 2
"""Batches that are cut into strings at a time: one thread copies 2 to 3 GB/s into fresh memory."""


# TensorFlow is not typed, so for the type checker this is a subclass of Any.
class Loader(LoaderView, tf.train.experimental.PythonState):  # type: ignore[misc]
    """Batches of a store in exact headrace order, for TensorFlow.

    Each iterator of `dataset()` goes through the rest of the current epoch (or through `epochs`),
    and the next one through the next: `model.fit(loader.dataset(), epochs=3)` sees three different
    orders. Put the loader into `tf.train.Checkpoint(model=model, data=loader)`: it is saved as the
    number of batches that were delivered, so that a restored run goes on with the next one.

    Args:
        store: an open store, or the path of one (or of a folder, a tar, ...).
        batch_size: samples per batch and rank.
        order: `shuffled`, `sequential`, `blocked`, `balanced` or an `Order`; see `headrace.loader`.
        seed: another seed, another sequence of epochs and of decoders' seeds.
        elements: `strings`, `rows` or `buffer`: what a batch is; see the how-to page.
        decode: a TensorFlow function of one sample, `decode(bytes)` or `decode(bytes, seed)`. `seed`
            is int64, shape (2,), for `tf.image.stateless_random_*`: it depends on seed, epoch and
            index only. What it returns must have one shape for all samples. Batches become
            (decoded, labels). Or `headrace.Images`: native threads decode pictures before they cross, and
            batches are (pixels, labels) without another copy.
        transform: from `tf.data.Dataset` to `tf.data.Dataset`; for stages that take batches ahead
            (`prefetch`, parallel `map`). It must give one element for each, in order.
        epochs: epochs that one iterator goes through; None: for ever.
        prefetch: finished batches that wait to be taken.
        rank: this process's place among `world_size`; not given, found out by `dataset()`: as
            tf.distribute, torchrun, TF_CONFIG, MPI or Slurm say, else 0 of 1.
        world_size: processes that share the samples.
        tail: `exact`, `pad` or `drop`; see `headrace.loader`. With the last two all batches have one
            static size.
        parts: parts to read of samples that have several; all if empty.
        on_error: `raise`, or `skip` samples that cannot be read and record them.
        options: fields of `headrace.config.ReaderOptions`, and `decode_threads`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        ValueError: an unknown order, part, option or form of elements.
    """

    def __init__(
        self,
        store: Store | str | PathLike[str],
        batch_size: int,
        *,
        order: OrderName | Order = "shuffled",
        seed: int = 0,
        elements: Form = "strings",
        decode: Callable[..., Any] | Images | None = None,
        transform: Callable[[Any], Any] | None = None,
        epochs: int | None = 1,
        prefetch: int = PREFETCH,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Literal["drop", "pad", "exact"] | None = None,
        parts: Sequence[str] = (),
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is {epochs}, expected at least 1, or None")
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}, expected at least 0")
        images, function = (decode, None) if isinstance(decode, Images) else (None, decode)
        if function is not None and elements != "strings":
            raise ValueError(f"elements is {elements!r}, but decode takes 'strings'")
        self._loader = api.loader(
            store,
            batch_size,
            order=order,
            seed=seed,
            rank=rank,
            world_size=world_size,
            tail=tail,
            parts=parts,
            on_error=on_error,
            decode=images,
            **options,
        )
        seeded = function is not None and takes_two(function)
        self._elements = Elements(
            elements,
            self._loader.reader.part_names,
            None,
            self._loader.order.seed if seeded else None,
            images,
        )
        self._decode = function
        self._transform = transform
        self._prefetch = prefetch
        self._epochs = epochs
        self._all_equal = on_error == "raise"
        self._run: Passes | None = None
        self._runs = 0

    def dataset(self) -> Any:
        """Return the `tf.data.Dataset` of batches.

        Only one iterator at a time gets batches: a new one ends those before it.

        Raises:
            RankError: nobody says which rank this is, or two disagree.
        """
        slices = self._loader.share.decide()
        if self._all_equal and slices.tail != "exact":
            self._elements.samples = slices.batch_size
        return self._pipeline()

    def _pipeline(self) -> Any:
        """Return the `tf.data.Dataset` of finished batches."""
        reference = ref(self)
        elements = self._elements  # without the user's functions, and what those know
        finish = partial(_finished, elements, self._decode, self._transform, self._prefetch)

        def alive() -> Loader:
            loader = reference()
            if loader is None:
                raise RuntimeError("the loader is gone: keep it, or the data set that it gave")
            return loader

        def started() -> Any:
            return np.int64(alive().begin_run())

        def batches(number: Any) -> Iterator[Any]:
            run = alive().run_of(int(number))
            try:
                for batch in run.batches():
                    yield elements.crossing(batch)
            except Exception as e:
                run.error = e  # TensorFlow hands on its text only
                raise

        def count(number: Any, asked_s: Any, made_s: Any) -> Any:
            alive().run_of(int(number)).delivered(float(asked_s), float(made_s))
            return number

        def of_run(_: Any) -> Any:
            number = tf.numpy_function(started, [], tf.int64)
            number.set_shape(())
            dataset = tf.data.Dataset.from_generator(
                batches, args=(number,), output_signature=elements.signature
            )
            # What is zipped is asked in turn: the clock first, and then the batch.
            asked = tf.data.Dataset.counter().map(lambda _: tf.timestamp())
            return tf.data.Dataset.zip((asked, finish(dataset))).map(
                lambda asked_s, done: _after(count, (number, asked_s, done[0]), done[1])
            )

        dataset = tf.data.Dataset.from_tensors(0).flat_map(of_run)
        if self._epochs is None:
            dataset = dataset.apply(
                tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            )
        options = tf.data.Options()
        # Batches that TensorFlow took ahead behind the counting stage would count as delivered.
        options.experimental_optimization.inject_prefetch = False
        # Ranks share the samples already; Python's own stages cannot be sharded anyway.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = dataset.with_options(options)
        # In a graph the data set is used longer than its Python object lives.
        keeper = dataset if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        keeper.headrace_loaders = (*getattr(keeper, "headrace_loaders", ()), self)
        return dataset

    def __iter__(self) -> Iterator[Any]:
        """Iterate over `dataset()`, with headrace's own errors instead of TensorFlow's.

        Raises:
            HeadraceError: a sample cannot be read.
            DecodeError: `decode` failed; names the sample.
        """
        return _OwnErrors(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next iterator; those made before end.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        super().load_state_dict(state)
        self._loader.end_pass()

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Go on in this mixture's proportions from a state of other ones; iterators made before end."""
        super().continue_from(state)
        self._loader.end_pass()

    def serialize(self) -> str:
        """Return the state as `tf.train.Checkpoint` saves it."""
        return json.dumps(self.state_dict())

    def deserialize(self, string_value: str | bytes) -> None:
        """Go on where `tf.train.Checkpoint` saved.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        try:
            state = json.loads(string_value)
        except ValueError as e:
            raise OrderError(f"the checkpoint's loader state is not JSON: {e}") from e
        self.load_state_dict(state)

    def begin_run(self) -> int:
        """Begin a run for an iterator of `dataset()`, which calls it, and return its number."""
        self._run = Passes(self._loader, self._epochs, decodes=self._decode is not None)
        self._runs += 1
        return self._runs

    def run_of(self, number: int) -> Passes:
        """Return the run with a number, for the iterators of `dataset()`.

        Raises:
            RuntimeError: a newer one began.
        """
        if self._run is None or number != self._runs:
            raise RuntimeError("this iterator ended when a new one was made")
        return self._run

    def _cause_of(self, failure: Any) -> Exception | None:
        """Return the error behind one of TensorFlow's, with its fields."""
        if self._run is None:
            return None
        if self._run.error is not None and type(self._run.error).__name__ in str(failure):
            return self._run.error
        if self._decode is None or not self._run.taken:
            return None
        # Decode the failed batch again, sample by sample, to name the one that fails.
        delivery = self._run.taken[0]
        batch = self._loader.reader.fetch(delivery.asked, delivery.value).batch
        data, _, *seeds = self._elements.of(batch)
        for i, index in enumerate(batch.indices.tolist()):
            one = {k: v[i] for k, v in data.items()} if isinstance(data, dict) else data[i]
            try:
                self._decode(tf.nest.map_structure(tf.constant, one), *(s[i] for s in seeds))
            except tf.errors.OpError as e:
                return decode_error(index, self._loader.source.names[index], e.message, "")
        return None


class _OwnErrors(Iterator[Any]):
    """The elements of a loader's data set, with headrace's own errors instead of TensorFlow's.

    TensorFlow's iterator ends with an error, as if the epoch had: whoever asks again meets the error again.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._elements: Iterator[Any] | None = None
        self._error: Exception | None = None

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self._elements is None:
            self._elements = iter(self._loader.dataset())
        try:
            return next(self._elements)
        except tf.errors.OpError as e:
            self._error = self._loader._cause_of(e) or e  # noqa: SLF001 - its own other half
            raise self._error from (None if self._error is e else e)

    def close(self) -> None:
        """End reading ahead for it; it delivers no more."""
        self._elements = iter(())


def dataset(store: Store | str | PathLike[str], batch_size: int, **arguments: Any) -> Any:
    """Return a `tf.data.Dataset` of whole batches; arguments are those of `Loader`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        ValueError: an unknown order, part, option or form of elements.
    """
    return Loader(store, batch_size, **arguments).dataset()


class Passes:
    """The passes of one iterator. A new run ends the one before.

    `epochs` counts the rest of the current epoch, too; None: for ever. `decodes`: TensorFlow decodes the
    samples; else it only cuts or copies them.

    Attributes:
        taken: batches that TensorFlow took and that were not delivered; the value of each is its epoch.
        error: what ended it, which reaches TensorFlow's user as text only.
    """

    def __init__(self, loader: StoreReader, epochs: int | None, *, decodes: bool = False) -> None:
        self.taken: deque[Delivery] = deque()
        self.error: Exception | None = None
        self._loader = loader
        self._decodes = decodes
        self._pass = loader.begin()
        self._epochs_left = epochs
        self._begin = self._pass.epoch, self._pass.begin
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
            # Nothing is to be said of it if another run has begun.
            with contextlib.suppress(RuntimeError):
                self._pass.check()
                self._loader.stats.rest()
            raise

    def _epoch(self, epoch: int, begin: int) -> Generator[Batch, None, None]:
        slices = self._loader.slices
        spans = (slices.span(step, begin) for step in range(slices.steps(begin)))
        fetched = self._loader.reader.stream(self._loader.order, epoch, spans)
        try:
            for one in fetched:
                if self._decodes:
                    one.trace.decoding_s = time.perf_counter()
                self.taken.append(one.delivery(epoch))
                yield one.batch
        finally:
            fetched.close()

    def delivered(self, asked_unix_s: float, made_unix_s: float) -> None:
        """Count the next batch: the consumer has it.

        Args:
            asked_unix_s: when the consumer asked for it, as TensorFlow's clock has it.
            made_unix_s: when it was complete, likewise.

        Raises:
            RuntimeError: a newer run began, or the loader was closed or went elsewhere.
        """
        self._pass.check()
        delivery = self.taken.popleft()
        got_s, unix_s = time.perf_counter(), time.time()
        asked_s = max(self._delivered_s, got_s - max(0.0, unix_s - asked_unix_s))
        made_s = got_s - max(0.0, unix_s - made_unix_s)
        if self._decodes:
            # Nothing is copied on the way from there to here: while TensorFlow has further batches to
            # decode, a batch that waits to be counted waits for a thread that decodes those.
            delivery.trace.decoded_s = got_s if self.taken else made_s
        else:
            delivery.trace.collated_s = made_s
        self._loader.stats.deliver(self._pass, self._step, delivery, (asked_s, got_s))
        self._delivered_s = got_s
        self._step += 1
        if self._step < self._pass.steps:
            return
        self._pass.finish()
        self._step = 0
        if self._epochs_left is not None:
            self._epochs_left -= 1
        self._loader.stats.rest()
        if self._epochs_left != 0:
            self._pass = self._loader.begin()


def _finished(
    elements: Elements,
    decode: Callable[..., Any] | None,
    transform: Callable[[Any], Any] | None,
    prefetch: int,
    dataset: Any,
) -> Any:
    """The batches that crossed, as the consumer gets them, each with the time when it was complete."""
    if elements.cuts:
        dataset = dataset.map(elements.strings, num_parallel_calls=CUT_AT_A_TIME)
    if decode is not None:
        dataset = dataset.map(_decoded(decode), num_parallel_calls=tf.data.AUTOTUNE)
    if transform is not None:
        dataset = transform(dataset)
    dataset = dataset.map(lambda *element: (tf.timestamp(), element))
    return dataset.prefetch(prefetch) if prefetch else dataset


def _after(count: Callable[..., Any], delivery: tuple[Any, ...], element: tuple[Any, ...]) -> Any:
    """The element, once `count` was called with its delivery."""
    whole = element if len(element) > 1 else element[0]
    with tf.control_dependencies([tf.numpy_function(count, delivery, tf.int64)]):
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
