"""Position: where data sets and samplers that have a state of their own stand.

Torch's way with them is a convention: an object with `state_dict()` and `load_state_dict()`. A data set
may follow it, its iterator, or a data set that is its own iterator. What is loaded when matters, since
`iter()` resets most of them: first the data set, then `iter()`, then the iterator.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.data.dataloader import _InfiniteConstantSampler
from torch.utils.data.distributed import DistributedSampler

from headrace import _native
from headrace.errors import StateMismatch
from headrace.order import combine_hashes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.frameworks.torch.dropin.progress import WorkerMark


ALL = 1 << 62
"""Every batch of the epoch."""

# These draw all their random numbers before they give the first index.
_DRAWS_AT_ONCE = (
    torch_data.SequentialSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
    DistributedSampler,
    # A fixed order, given as it is.
    list,
    tuple,
    range,
)


def batches_drawable(batch_sampler: Any) -> int:
    """Return how many batches of an epoch may be drawn before their time; 0: none.

    Once the first batch was drawn in its time, that is: with it the random numbers are.
    """
    if type(batch_sampler) is not torch_data.BatchSampler:
        return 0
    sampler = batch_sampler.sampler
    if type(sampler) in _DRAWS_AT_ONCE:
        return ALL
    if type(sampler) is not torch_data.RandomSampler:
        return 0
    if sampler.generator is None:
        return ALL  # it has a generator of its own, which nobody sees
    if sampler.replacement or sampler.num_samples > len(sampler.data_source):
        return 0
    # It draws from the user's generator once more when it is exhausted: that has to wait.
    return int((sampler.num_samples - 1) // batch_sampler.batch_size)


def is_stateful(thing: Any) -> bool:
    """Whether something says where it stands, and can be put there."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


GIVE_THE_SAME = (
    "Give the loader the data, order, seeds, batch size, rank and world size that it was saved with, or begin "
    "the epoch anew without the state."
)


@dataclass(slots=True)
class Drawn:
    """What samplers gave in an epoch: whoever draws it again can tell whether it is the same."""

    samples: int = 0
    """-1: an older state does not say."""

    order_hash: int = 0
    """Over positions and indices that are numbers or text; see `headrace.order.order_hash`."""

    def add(self, index: Any) -> tuple[int, int, int]:
        """Count a batch's index or indices.

        Returns:
            The position of its first sample, how many there are, and their order hash; 0: they are neither
            numbers nor text.
        """
        many, first = index if isinstance(index, (list, tuple)) else [index], self.samples
        self.samples += len(many)
        try:
            indices = np.asarray(many, dtype=np.int64).ravel()
        except (TypeError, ValueError, OverflowError):
            if not all(isinstance(one, str) for one in many):
                return first, len(many), 0
            indices = np.asarray([zlib.crc32(one.encode(errors="replace")) for one in many])
        hashed = _native.order_hash(first, indices)
        self.order_hash = combine_hashes(self.order_hash, hashed)
        return first, len(many), hashed

    def add_content(self, content: int) -> None:
        """Count what a batch of an iterable data set holds."""
        self.order_hash = combine_hashes(self.order_hash, content)

    def check(self, again: Drawn) -> None:
        """Compare with what was drawn again.

        Raises:
            StateMismatch: something else was drawn, so what is left of the epoch is something else, too.
        """
        if self.samples >= 0 and self != again:
            raise StateMismatch(
                f"this epoch begins with {again.samples} samples of order hash {again.order_hash:016x}, and "
                f"the state was saved after {self.samples} of order hash {self.order_hash:016x}: going on "
                "would repeat samples and miss others.",
                next_step=GIVE_THE_SAME,
            )

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"samples": self.samples, "order_hash": f"{self.order_hash:016x}"}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Drawn:
        """Return what `plain` was made of."""
        return cls(int(plain["samples"]), int(plain["order_hash"], 16))


CONTENT_MAX = 4096
"""Values of a batch that tell it from others."""


def content_of(batch: Any) -> int:
    """Return a number that tells a batch from others by its labels and names; 0: it has none.

    Whole numbers, text and bytes alone: random augmentation changes pixels, and a data set may do that with
    generators of its own.
    """
    values: list[Any] = []
    waiting, left = [batch], CONTENT_MAX
    while waiting and left > 0:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one[:CONTENT_MAX]
        elif isinstance(one, torch.Tensor):
            if one.layout is torch.strided and one.dtype in {torch.int64, torch.int32, torch.int16}:
                waiting.append(one.flatten()[:left].cpu().numpy())
        elif isinstance(one, np.ndarray):
            if one.dtype.kind in "iU" and one.size:
                some = one.ravel()[:left]
                values.append(zlib.crc32(some.tobytes()))
                left -= some.size
        elif isinstance(one, (bytes, int, str)):
            values.append(zlib.crc32(one[:CONTENT_MAX]) if isinstance(one, bytes) else one)
            left -= 1
    return zlib.crc32(repr(values).encode(errors="replace")) if values else 0


class DataState(NamedTuple):
    """What a data set and its iterator say of themselves."""

    dataset: Any = None
    """The data set's `state_dict()`; None: it has none, or is its own iterator."""

    iterator: Any = None
    """The iterator's `state_dict()`; None: it has none."""

    ended: bool = False
    """The iterator has given its last sample."""

    whole: bool = False
    """`dataset` speaks for the iterator too, if the data set is its own: headrace 0.1 kept one state."""

    def plain(self) -> dict[str, Any]:
        """Return it under torchdata's names, where other libraries look for it."""
        return {
            "dataset_state": copy.deepcopy(self.dataset),
            "fetcher_state": {
                "dataset_iter_state": copy.deepcopy(self.iterator),
                "fetcher_ended": self.ended,
            },
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> DataState | None:
        """Return what `plain` was made of; None: nothing had a state.

        Raises:
            KeyError, TypeError: it is damaged.
        """
        if "dataset_state" not in plain:
            earlier = plain.get("dataset")
            return None if earlier is None else cls(dataset=earlier, whole=True)
        fetcher = plain["fetcher_state"]
        state = cls(
            plain["dataset_state"], fetcher["dataset_iter_state"], bool(fetcher["fetcher_ended"])
        )
        return None if state.dataset is None and state.iterator is None else state


class DataPosition:
    """A data set and what torch fetches from it at present."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._stateful = is_stateful(dataset)
        self._fetcher: Any = None
        self._broken = False  # it could not be begun: torch raises that in its turn
        self._placed = False  # by a state, in an epoch that is over when the next one begins

    @property
    def stateful(self) -> bool:
        """Whether there is a state to be taken: the data set's, or its present iterator's."""
        return (self._stateful or self._fetcher is not None) and not self._broken

    def attach(self, fetcher: Any) -> None:
        """Take note of torch's fetcher, which has the iterator. It is kept only for its state."""
        iterator = getattr(fetcher, "dataset_iter", None)
        self._fetcher = fetcher if self._stateful or is_stateful(iterator) else None

    def take(self) -> DataState | None:
        """Return where the data set stands now; None: it does not say. The state is a copy."""
        if not self.stateful:
            return None
        iterator: Any = getattr(self._fetcher, "dataset_iter", None)
        own, iterators = None, None
        if self._stateful and iterator is not self._dataset:
            own = copy.deepcopy(self._dataset.state_dict())
        if is_stateful(iterator):
            iterators = copy.deepcopy(iterator.state_dict())
        return DataState(own, iterators, bool(getattr(self._fetcher, "ended", False)))

    def load_before(self, state: DataState, *, under_way: bool) -> None:
        """Load what has to be there before the data set is asked for its iterator.

        Args:
            state: where the data set stood.
            under_way: within an epoch; otherwise after one, whose iterator is not wanted again.

        Raises:
            StateMismatch: the data set has no state.
        """
        if state.dataset is not None:
            _load(self._dataset, state.dataset, "data set")
        self._placed = True
        if not under_way:
            self.begin_anew()
        if under_way or (state.iterator is None and not state.whole):
            return
        # What the next epoch begins from may be the state of the last one's iterator.
        iterator = iter(self._dataset) if hasattr(self._dataset, "__iter__") else None
        if iterator is self._dataset:
            _load(iterator, state.dataset if state.whole else state.iterator, "data set")

    def load_after(self, state: DataState) -> None:
        """Load what belongs to the new iterator, within an epoch.

        Raises:
            StateMismatch: the iterator has no state.
        """
        fetcher = self._fetcher
        iterator = getattr(fetcher, "dataset_iter", None)
        if state.iterator is not None:
            _load(iterator, state.iterator, "data set's iterator")
        elif state.whole and iterator is self._dataset:
            _load(iterator, state.dataset, "data set")
        if fetcher is not None and hasattr(fetcher, "ended"):
            fetcher.ended = state.ended

    def begin_anew(self) -> None:
        """Say that an epoch begins, which no state was loaded for.

        Hugging Face's streams begin each epoch where they were put once, unless `set_epoch` said that it is
        another one: without a word, all but the rest would be missing.
        """
        if self._placed and getattr(self._dataset, "_starting_state_dict", None) is not None:
            self._dataset._starting_state_dict = None  # noqa: SLF001 - there is no public way
        self._placed = False

    def follow(self, mark: WorkerMark | None) -> None:
        """Attach every fetcher that torch makes for the data set in this process, a worker's.

        Args:
            mark: where the first one goes on from; None: from the beginning.
        """
        position = self
        waiting = [] if mark is None or mark.data is None else [(mark, mark.data)]

        class Fetcher(torch_fetch._IterableDatasetFetcher):  # noqa: SLF001 - the iterator is in there
            def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
                own = dataset is position._dataset
                first, data = waiting.pop() if own and waiting else (None, None)
                position._broken = position._broken or own
                if first is not None and data is not None:
                    position.load_before(data, under_way=first.under_way)
                    if first.snapshot is not None:
                        first.snapshot.restore()  # which the user's methods may have drawn from
                elif own:
                    position.begin_anew()
                super().__init__(dataset, *args, **kwargs)
                if own:
                    position.attach(self)
                if first is not None and data is not None and first.under_way:
                    position.load_after(data)
                    if first.snapshot is not None:
                        first.snapshot.restore()
                position._broken = position._broken and not own

        torch_fetch._IterableDatasetFetcher = Fetcher  # type: ignore[misc] # noqa: SLF001


def sampler_position(index_sampler: Any) -> SamplerPosition | None:
    """Return where the samplers stand; None: they are torch's own, and have no state."""
    inner = index_sampler
    if type(inner) is torch_data.BatchSampler:
        inner = inner.sampler
    plain = type(inner) in _WITHOUT_STATE or not isinstance(index_sampler, Iterable)
    return None if plain else SamplerPosition(index_sampler)


class SamplerPosition:
    """Where a sampler that has a state of its own stands, or its iterator.

    A sampler without one is drawn from again, up to where it stood. Torch's own are among these.

    Args:
        index_sampler: what torch draws from: the loader's batch sampler, or without one its sampler.
    """

    def __init__(self, index_sampler: Any) -> None:
        inner = index_sampler
        if type(inner) is torch_data.BatchSampler:  # it draws no index before its time
            inner = inner.sampler
        self._sampler = inner
        self._stateful = is_stateful(inner)
        self._iterator: Any = None
        self._iterator_state: Any = None
        self._loaded: Mapping[str, Any] | None = None
        self.exhausted = False
        """The epoch's last index was drawn."""
        self.draws_from: Any = self
        """What torch is to draw from: the user's samplers, and we see the iterator."""
        if inner is not index_sampler:
            self.draws_from = torch_data.BatchSampler(
                self, index_sampler.batch_size, index_sampler.drop_last
            )

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._sampler)
        if self._iterator_state is not None:
            _load(self._iterator, self._iterator_state, "sampler's iterator")
        return self._watched(self._iterator)

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self.exhausted = True

    def __len__(self) -> int:
        return len(self._sampler)

    def drawn(self) -> None:
        """Say that it was drawn from."""
        self._loaded = self._iterator_state = None  # not before: torch may make two iterators

    def plain(self) -> Mapping[str, Any] | None:
        """Return where it stands as plain values; None: it does not say."""
        if self._loaded is not None:  # until it is drawn from, it may not know itself
            return copy.deepcopy(self._loaded)
        iterator = self._iterator
        iterators = iterator.state_dict() if is_stateful(iterator) else None
        if not self._stateful and iterators is None:
            return None
        return {
            "state": copy.deepcopy(self._sampler.state_dict()) if self._stateful else None,
            "iterator": copy.deepcopy(iterators),
            "exhausted": self.exhausted,
        }

    def load(self, plain: Mapping[str, Any], *, under_way: bool) -> None:
        """Go on where a state was taken. Called before torch asks for an iterator.

        Raises:
            StateMismatch: the sampler has no state.
        """
        state, over = plain["state"], plain["exhausted"] or not under_way
        if state is not None:
            _load(self._sampler, state, "sampler")
            # After their last index some samplers stand at the next epoch, others at the end of the
            # last one, which the next `iter` would find empty. These are led over that end.
            if over and next(iter(self._sampler), _NOTHING) is not _NOTHING:
                _load(self._sampler, state, "sampler")
        if under_way:
            self._loaded, self.exhausted = plain, plain["exhausted"]
        if not over:
            self._iterator_state = plain["iterator"]


_NOTHING = object()

_WITHOUT_STATE = (
    _InfiniteConstantSampler,
    torch_data.RandomSampler,
    torch_data.SequentialSampler,
    list,
    tuple,
    range,
)


def _load(thing: Any, state: Any, what: str) -> None:
    if not is_stateful(thing):
        raise StateMismatch(
            f"the state has one of a {what}; here the {what} is a {type(thing).__name__}, which has no "
            "load_state_dict().",
            next_step="Load the state with the data set and sampler that it was saved with.",
        )
    thing.load_state_dict(copy.deepcopy(state))
