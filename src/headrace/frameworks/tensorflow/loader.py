"""Loader: headrace's order and exact resume, as a TensorFlow user expects them.

`Loader.dataset()` is a `tf.data.Dataset` of whole batches; the loader itself goes into
`tf.train.Checkpoint` beside the model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tensorflow as tf

from headrace import api
from headrace.errors import DecodeError, OrderError
from headrace.frameworks.tensorflow.elements import Elements, Form
from headrace.frameworks.tensorflow.pipeline import Run, Steps, pipeline, takes_seed
from headrace.frameworks.view import LoaderView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from headrace.api import OrderName
    from headrace.order import Order
    from headrace.plane.batch import OnError
    from headrace.store import Store

PREFETCH = 2
"""Finished batches that wait: one to hide a slow one, one more while it is taken."""


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
            (decoded, labels).
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
        options: fields of `headrace.config.ReaderOptions`.

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
        decode: Callable[..., Any] | None = None,
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
        if decode is not None and elements != "strings":
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
            **options,
        )
        self._steps = Steps(
            elements=Elements(
                elements,
                self._loader.reader.part_names,
                None,
                self._loader.order.seed if takes_seed(decode) else None,
            ),
            decode=decode,
            transform=transform,
            prefetch=prefetch,
            endless=epochs is None,
        )
        self._all_equal = on_error == "raise"
        self._epochs = epochs
        self._run: Run | None = None
        self._runs = 0

    def dataset(self) -> Any:
        """Return the `tf.data.Dataset` of batches.

        Only one iterator at a time gets batches: a new one ends those before it.

        Raises:
            RankError: nobody says which rank this is, or two disagree.
        """
        slices = self._loader.cursor.share.decide()
        if self._all_equal and slices.tail != "exact":
            self._steps.elements.samples = slices.batch_size
        return pipeline(self, self._steps)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over `dataset()`, with headrace's own errors instead of TensorFlow's.

        Raises:
            HeadraceError: a sample cannot be read.
            DecodeError: `decode` failed; names the sample.
        """
        try:
            yield from self.dataset()
        except tf.errors.OpError as e:
            cause = self._cause_of(e)
            if cause is None:
                raise
            raise cause from e

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next iterator; those made before end.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        super().load_state_dict(state)
        self._loader.cursor.end()

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
        self._run = Run(self._loader, self._epochs, decodes=self._steps.decode is not None)
        self._runs += 1
        return self._runs

    def run_of(self, number: int) -> Run:
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
        if self._steps.decode is None or self._run.next_delivery is None:
            return None
        return self._culprit(*self._run.next_delivery)

    def _culprit(self, asked: Any, epoch: int) -> DecodeError | None:
        """Decode the failed batch again, sample by sample, to name the one that fails."""
        batch = self._loader.reader.fetch(np.asarray(asked), epoch).batch
        data, _, *seeds = self._steps.elements.of(batch)
        assert self._steps.decode is not None
        for i, index in enumerate(batch.indices.tolist()):
            one = {k: v[i] for k, v in data.items()} if isinstance(data, dict) else data[i]
            try:
                self._steps.decode(tf.nest.map_structure(tf.constant, one), *(s[i] for s in seeds))
            except tf.errors.OpError as e:
                name = self._loader.source.names[index]
                return DecodeError(
                    f"decoding sample {index} ({name!r}) failed: {e.message}.",
                    next_step="Mend the sample or the decode function.",
                    index=index,
                    name=name,
                )
        return None


def dataset(store: Store | str | PathLike[str], batch_size: int, **arguments: Any) -> Any:
    """Return a `tf.data.Dataset` of whole batches; arguments are those of `Loader`.

    Raises:
        OrderError: batch size, rank or world size do not fit.
        ValueError: an unknown order, part, option or form of elements.
    """
    return Loader(store, batch_size, **arguments).dataset()
