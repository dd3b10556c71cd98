"""Orders that give each sample at most once an epoch: sequential, shuffled, subset, blocked, opportunistic.

`Shuffled`, the default of training, is an exact random permutation of the whole data, another one in
every epoch. No buffer, no window, no list: the place of a sample is computed from (seed, epoch,
position), so an epoch of 2^48 samples starts as fast as one of ten. `Sequential` is for validation, for
export, and for measuring what random order costs. `Subset` is either, of chosen samples.

`Blocked` (the chunk batching of DLFS) is for tiny samples, where one read per sample would be all
overhead. The data is cut into blocks of consecutive samples; the blocks come in an exact random order
each epoch; the samples of `window_blocks` successive blocks are shuffled together. A data plane reads the
blocks of a window whole (`window_at`) and serves samples from memory. What this costs in randomness,
`randomness()` says. When n is not a multiple of the block size, the last block of the data is short. It
takes part in the shuffle like any other: its slot is computed by the inverse permutation, and all
positions behind it move up by what it lacks. So every sample still comes exactly once, in O(1) memory.

`Opportunistic` (DeepIO) is for a first epoch over storage that is being filled: the samples that are near
already are shuffled and served while the others are on their way. What it costs in randomness,
`randomness()` says. From epoch `epochs` on it is a full shuffle. No part of the data comes first twice: a
model that begins every epoch with the same samples, of a few classes perhaps, trains badly. So where more
than one epoch begins with what is near, the samples that are not resident are dealt out at random into parts
as large as the resident one. Epoch e ends with part e + 1, which is then the one in memory, and epoch e + 1
begins with it. When each part has been first, epochs are full shuffles. Which samples are resident is an
argument, not a look at the machine: all ranks must have been told the same. A resumed run is told by its state.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace._native import BlockedOrder, OpportunisticOrder
from headrace.errors import OrderError
from headrace.order.hash import SAMPLES_MAX, Purpose, derive_key, keyed
from headrace.order.order import EPOCH_MAX, SEED_MAX, Order, checked, digest_of
from headrace.order.randomness import Randomness

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Sequential(Order):
    """Index i at position i. O(1) memory.

    Raises:
        OrderError: `samples` is not 1 to 2^48.
    """

    samples: int
    """The number of samples in the data."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))

    @property
    def seed(self) -> int:
        """Always 0: nothing is random."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        return {"mode": "sequential", "samples": self.samples}

    def randomness(self) -> Randomness:
        """Return 0 for both measures."""
        return Randomness.of_sequential()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Shuffled(Order):
    """Every sample once an epoch, in the order of a keyed permutation. O(1) memory.

    Raises:
        OrderError: `samples` is not 1 to 2^48, or `seed` not 0 to 2^64 - 1.
    """

    samples: int
    """The number of samples in the data."""

    seed: int = 0
    """Another seed, another sequence of epochs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))
        object.__setattr__(self, "seed", checked("seed", self.seed, 0, SEED_MAX))

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        return {"mode": "shuffled", "samples": self.samples, "seed": self.seed}

    def randomness(self) -> Randomness:
        """Return 1 for both measures."""
        return Randomness.of_shuffled()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        key = derive_key(self.seed, Purpose.SHUFFLED, epoch)
        return keyed(self.samples, key).range(start, stop)


@dataclass(frozen=True, eq=False)
class Subset(Order):
    """Chosen samples alone, each once an epoch: the training or the validation part of one store.

    Memory: 8 bytes per chosen sample.

    Args:
        chosen: indices of samples, each once, shape (k,).
        samples: the number of samples in the data.
        seed: another seed, another sequence of epochs.
        shuffle: False: in the given order, in every epoch.

    Raises:
        OrderError: nothing is chosen, a sample twice, or one that is not there; or the seed is out of bounds.
    """

    chosen: InitVar[npt.ArrayLike]
    samples: int
    seed: int = 0
    shuffle: bool = True
    chosen_digest: str = field(init=False)
    _chosen: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self, chosen: npt.ArrayLike) -> None:
        given = np.asarray(chosen)
        if given.ndim != 1 or not given.size or given.dtype.kind not in "iu":
            raise OrderError(
                f"chosen has shape {given.shape} and type {given.dtype}, expected indices of samples",
            )
        samples = checked("samples", self.samples, 1, SAMPLES_MAX)
        if int(given.min()) < 0 or int(given.max()) >= samples:
            wrong = given.min() if given.min() < 0 else given.max()
            raise OrderError(f"chosen has {wrong}, expected indices from 0 to {samples - 1}")
        array = np.array(given, np.int64)
        if np.unique(array).size < array.size:
            raise OrderError("chosen has samples more than once, expected each once")
        if self.shuffle not in {False, True}:
            raise OrderError(f"shuffle is {self.shuffle!r}, expected True or False")
        values = {
            "samples": samples,
            "seed": checked("seed", self.seed, 0, SEED_MAX),
            "shuffle": bool(self.shuffle),
            "chosen_digest": digest_of(array.data),
            "_chosen": array,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def length(self) -> int:
        """The number of chosen samples."""
        return self._chosen.size

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON; the chosen by their digest."""
        return {
            "mode": "subset", "samples": self.samples, "seed": self.seed, "shuffle": self.shuffle,
            "length": self.length, "chosen": self.chosen_digest,
        }  # fmt: skip

    def randomness(self) -> Randomness:
        """Return that of the chosen samples' order: a full shuffle's, or 0."""
        return Randomness.of_shuffled() if self.shuffle else Randomness.of_sequential()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return self._chosen[start:stop].copy()
        key = derive_key(self.seed, Purpose.SHUFFLED, epoch)
        return self._chosen[keyed(self.length, key).range(start, stop)]


@dataclass(frozen=True, eq=False)
class Blocked(Order):
    """Every sample once an epoch; blocks shuffled, samples shuffled in windows. O(1) memory.

    Raises:
        OrderError: `samples`, `block_samples` or `window_blocks` is not 1 to 2^48, or `seed` not
            0 to 2^64 - 1.
    """

    samples: int
    """The number of samples in the data."""

    block_samples: int
    """Consecutive samples that are read together. A few hundred kB of samples per block reads at
    the speed of sequential access."""

    window_blocks: int
    """Blocks whose samples are shuffled together, and so must be in memory together."""

    seed: int = 0
    """Another seed, another sequence of epochs."""

    _native: BlockedOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("samples", "block_samples", "window_blocks"):
            object.__setattr__(self, name, checked(name, getattr(self, name), 1, SAMPLES_MAX))
        object.__setattr__(self, "seed", checked("seed", self.seed, 0, SEED_MAX))
        native = BlockedOrder(self.samples, self.block_samples, self.window_blocks, self.seed)
        object.__setattr__(self, "_native", native)

    @property
    def blocks(self) -> int:
        """The number of blocks, the short one included."""
        return -(-self.samples // self.block_samples)

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        return {
            "mode": "blocked",
            "samples": self.samples,
            "block_samples": self.block_samples,
            "window_blocks": self.window_blocks,
            "seed": self.seed,
        }

    def randomness(self) -> Randomness:
        """Return DeepIO's level and the entropy share for these blocks and windows."""
        return Randomness.of_blocked(self.samples, self.block_samples, self.window_blocks)

    def window_at(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the positions (start, stop) of the window that holds `position`.

        Raises:
            ValueError: the epoch or the position is out of bounds.
        """
        epoch = checked("epoch", epoch, 0, EPOCH_MAX)
        position = checked("position", position, 0, self.length - 1)
        return self._native.window_at(epoch, position)

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._native.indices(epoch, start, stop)


_RANGES_SAVED_MAX: Final = 256
"""Of resident samples in a state, 4 kB at most; a run with more goes on with the same `Opportunistic` only."""


@dataclass(frozen=True, eq=False)
class Opportunistic(Order):
    """Every sample once an epoch, the resident ones first. Memory for the ranges only.

    Raises:
        OrderError: the ranges overlap, are not ascending or leave the data; `samples`, `seed` or
            `epochs` is out of bounds.
    """

    samples: int
    """The number of samples in the data."""

    resident: tuple[tuple[int, int], ...]
    """Ranges (first, behind the last) of samples that come first, ascending."""

    seed: int = 0
    """Another seed, another sequence of epochs."""

    epochs: int = 1
    """Epochs that begin with what is near: the resident samples, then what the epoch before ended with. Later
    ones are a full shuffle, as are those after which every part has been first."""

    _native: OpportunisticOrder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))
        object.__setattr__(self, "seed", checked("seed", self.seed, 0, SEED_MAX))
        object.__setattr__(self, "epochs", checked("epochs", self.epochs, 0, EPOCH_MAX + 1))
        ranges = tuple((int(a), int(b)) for a, b in self.resident if b > a)
        ends = [0, *(x for pair in ranges for x in pair), self.samples]
        if ends != sorted(ends):
            raise OrderError(
                f"the resident ranges are {ranges[:4]}..., expected ascending ones in 0 to "
                f"{self.samples}"
            )
        object.__setattr__(self, "resident", ranges)
        native = OpportunisticOrder(self.samples, ranges, self.seed, self.epochs)
        object.__setattr__(self, "_native", native)

    @property
    def resident_samples(self) -> int:
        """How many samples come first."""
        return sum(b - a for a, b in self.resident)

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        ranges = np.array(self.resident, "<i8").tobytes()
        return {
            "mode": "opportunistic",
            "samples": self.samples,
            "resident_samples": self.resident_samples,
            "resident": digest_of(ranges),
            "epochs": self.epochs,
            "seed": self.seed,
            # Where only one epoch begins so, the sequence is that of older versions, and so is its digest.
            **({"parts": self._native.parts} if self._native.parts > 1 else {}),
        }

    def basis(self, epoch: int, position: int) -> tuple[int, ...]:  # noqa: ARG002
        """How many ranges, and their ends: nobody can find them again in the page cache; none of too many."""
        ends = [end for pair in self.resident for end in pair]
        return (len(self.resident), *ends) if len(self.resident) <= _RANGES_SAVED_MAX else ()

    def saved_with(self, basis: tuple[int, ...]) -> Opportunistic:
        """Return this order over the ranges of a state."""
        ends = basis[1:]
        if not basis or len(ends) != 2 * basis[0]:
            return self
        try:
            return replace(self, resident=tuple(zip(ends[::2], ends[1::2], strict=True)))
        except OrderError as e:
            e.next_step = "The state is damaged: use an earlier checkpoint."
            raise

    def resumed(self, epoch: int, position: int, basis: tuple[int, ...]) -> Order:
        """Return the order of a state: over its ranges."""
        if basis and len(basis) != 1 + 2 * basis[0]:
            return super().resumed(epoch, position, basis)
        return self.saved_with(basis)

    def randomness(self) -> Randomness:
        """Return DeepIO's level and the entropy share of the first epoch; later ones have no less."""
        first, last = self._native.part(0), self._native.part(1)
        return Randomness.of_opportunistic(
            self.samples, first[1] - first[0], last[1] - last[0] if self._native.parts > 1 else 0
        )

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._native.indices(epoch, start, stop)
