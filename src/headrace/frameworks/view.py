"""View: what the adapters of all frameworks have in common.

`LoaderView` shows where a store's loader stands and what it delivered. The functions below say what an
element is: a sample's bytes as decoders get them, rows of equal length, and the error for a sample that does
not decode.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.lifetime import Closing
from headrace.errors import DecodeError
from headrace.plane.images import ImageBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from headrace.order import Order
    from headrace.plane import Batch, Loader, LoaderStats
    from headrace.plane.batch import Skipped
    from headrace.plane.decoding import Decoding
    from headrace.plane.images import Images
    from headrace.plane.stage import Stage
    from headrace.plane.tiers import CacheReport


class LoaderView(Closing):
    """What a framework's loader over a store has in common with `headrace.Loader`.

    A class that inherits it sets `_loader` and delivers the batches in the framework's way.
    """

    _loader: Loader

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch; the same on every rank."""
        return len(self._loader)

    def __repr__(self) -> str:
        from headrace.plane.loader import loader_line

        return loader_line(self._loader, type(self).__name__)

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        from headrace.plane.loader import loader_card

        return loader_card(self._loader, type(self).__name__)

    @property
    def order(self) -> Order:
        """Which sample comes when."""
        return self._loader.order

    @property
    def epoch(self) -> int:
        """The epoch that is under way or, between epochs, the one that comes next."""
        return self._loader.epoch

    @property
    def position(self) -> int:
        """Global positions of this epoch that were delivered."""
        return self._loader.position

    @property
    def order_hash(self) -> str:
        """16 hex digits over what this rank delivered in this epoch; see `headrace.Loader`."""
        return self._loader.order_hash

    @property
    def last_order_hash(self) -> str | None:
        """The order hash of the last epoch that was delivered to its end, or None."""
        return self._loader.last_order_hash

    @property
    def stats(self) -> LoaderStats:
        """What was delivered, and how long the consumer waited for it (in TensorFlow: by its clock)."""
        return self._loader.stats

    @property
    def skipped(self) -> list[Skipped]:
        """Samples that were left out so far, in the order in which that was noticed."""
        return self._loader.skipped

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The tiers and limits that batches pass, the lowest first; none before this process reads."""
        return self._loader.stages

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes read so far by where they came from: `ram`, `disk` (the cache) and `source`."""
        return self._loader.bytes_by_tier

    @property
    def cache(self) -> CacheReport | None:
        """How far the cache in `cache_dir` is; None without one, or before reading began."""
        return self._loader.cache

    @property
    def decoding(self) -> Decoding | None:
        """The stage that makes pixels, which counts its `fallbacks`; None without `Images`."""
        return self._loader.decoding

    def explain(self) -> str:
        """Say what was waited for, what shows it, and what to do; `headrace.explain` has it as values."""
        from headrace.control.explain import explain

        return str(explain(self))

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next iterator. Not needed: epochs advance by themselves."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: plain values, under 300 bytes as JSON."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, with the next iterator; exactly what is left is delivered.

        Raises:
            StateMismatch: the state belongs to other data or another order.
            OrderError: the state is damaged.
        """
        self._loader.load_state_dict(state)

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Go on in this mixture's proportions from a state of other ones; see `headrace.Loader`."""
        self._loader.continue_from(state)

    def close(self) -> None:
        """End reading ahead. Batches stay valid; the loader can be used again."""
        self._loader.close()


def sample_data(batch: Any, i: int) -> Any:
    """The bytes of a batch's i-th sample; a dict of them by part, where several parts are read."""
    if batch.offsets.ndim == 1:
        return batch[i]
    return {name: batch[i, name] for name in batch.part_names}


def takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function wants a second positional argument; builtins without signature do not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) > 1


def decode_error(
    index: int, name: str, why: str, instead: str = ", or pass on_error='skip'"
) -> DecodeError:
    """The error for a sample that the user's decode function refused."""
    return DecodeError(
        f"decoding sample {index} ({name!r}) failed: {why}.",
        next_step=f"Mend the sample or the decode function{instead}.",
        index=index,
        name=name,
    )


def check_form(form: str, forms: Sequence[str], part_names: Sequence[str]) -> None:
    """Check what `elements` is, as far as that can be done without a batch.

    Raises:
        ValueError: an unknown form, or rows of several parts.
    """
    if form not in forms:
        raise ValueError(f"elements is {form!r}, expected one of {forms}")
    if form == "rows" and len(part_names) > 1:
        raise ValueError(f"elements is 'rows', but several parts are read: {tuple(part_names)}")


def check_pixels(form: str, usual: str, decode: Images) -> None:
    """Check that nobody asks for bytes in a form where `decode` makes pixels of them, or for two labels each.

    Raises:
        ValueError: `elements` is another than the default, or pictures would be mixed.
    """
    if decode.mask is not None or decode.boxes is not None:
        raise ValueError("elements have no place for masks and boxes: iterate headrace.loader")
    if decode.mixup or decode.cutmix:
        raise ValueError(
            "mixup and cutmix give each picture two labels, for which elements have no place: mix in the "
            "training step, or iterate headrace.loader"
        )
    if form != usual:
        raise ValueError(
            f"elements is {form!r}, and decode is {decode!r}, which makes pixels: leave it out"
        )


def pixels_of(batch: Batch, images: Images) -> NDArray[Any]:
    """The pixels of a batch over its own buffer, shape (samples, ...).

    bfloat16 has the type of `ml_dtypes`, which TensorFlow and JAX bring along.
    """
    assert isinstance(batch, ImageBatch), "a loader with Images delivers pixels"
    if images.dtype != "bfloat16":
        return batch.pixels
    import ml_dtypes

    return batch.pixels.view(ml_dtypes.bfloat16)


def rows_of(batch: Batch, instead: str) -> NDArray[np.uint8]:
    """Samples of equal length as uint8, shape (samples, length); no copy where they lie one after the other.

    Raises:
        ValueError: the lengths differ; says what to do `instead`.
    """
    if len(batch) == 0:
        return np.empty((0, 0), np.uint8)
    length = int(batch.lengths[0])
    if (batch.lengths != length).any():
        low, high = int(batch.lengths.min()), int(batch.lengths.max())
        raise ValueError(
            f"elements is 'rows', but lengths are {low} to {high} bytes, expected all equal: {instead}"
        )
    if (np.diff(batch.offsets) == length).all():
        start = int(batch.offsets[0])
        return batch.data[start : start + len(batch) * length].reshape(len(batch), length)
    rows = np.empty((len(batch), length), np.uint8)
    for row, offset in zip(rows, batch.offsets, strict=True):
        row[:] = batch.data[offset : offset + length]
    return rows
