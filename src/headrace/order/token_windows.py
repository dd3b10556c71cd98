"""Windows: which tokens of which documents make one row of a batch, and in which order rows come.

Documents lie one behind the other, numbered as the store's samples. `CutWindows` cuts that row of tokens every
`length` tokens, wherever a document ends. `BestFitWindows` puts whole documents together so that windows are
nearly full. Window w is in both a pure function of the documents' sizes, so any rank may ask for any of them.
The order in which windows come is `Windows`: a keyed permutation, in constant memory.

A window has `length + 1` places, and its last token is the first of the next one: `length` inputs have as
many targets, and no target is lost between windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, cast, get_args

import numpy as np

from headrace import _native
from headrace.errors import OrderError
from headrace.order.hash import SAMPLES_MAX, Purpose, derive_key, keyed
from headrace.order.order import SEED_MAX, Order, checked
from headrace.order.randomness import Randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    Sizes = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    """Tokens of each of some documents, given their numbers; both int64, shape (documents,)."""

Packing = Literal["cut", "best-fit"]
"""How documents become windows.

* cut: all tokens one behind the other, cut every `length` tokens; what is left at the end is left out.
* best-fit: whole documents, where each fits best; only longer ones are cut. The rest of a window is padding.
"""

_BLOCK: Final = 16
"""Documents between two of the sums that `CutWindows` keeps: half a byte a document."""

_PACKED_TOGETHER: Final = 1 << 16
"""Documents that `BestFitWindows` packs together: more would hardly fill windows better."""

_PACKED_LENGTH_MAX: Final = 1 << 24
"""The longest window that documents are packed into: the packer takes 8 bytes for each place of it."""

_AT_ONCE: Final = 1 << 20  # documents whose sizes are asked for at once


@dataclass(frozen=True, eq=False)
class Windows(Order):
    """Every window once an epoch, shuffled by a keyed permutation or one after the other. O(1) memory.

    Raises OrderError if a number is out of bounds, or the packing is unknown.
    """

    samples: int  # the number of windows in the data

    window_tokens: int  # inputs of a window

    pack: Packing = "cut"  # how documents become windows

    seed: int = 0  # another seed, another sequence of epochs

    shuffle: bool = True  # whether windows come in random order

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checked("samples", self.samples, 1, SAMPLES_MAX))
        tokens = checked("window_tokens", self.window_tokens, 1, SAMPLES_MAX)
        object.__setattr__(self, "window_tokens", tokens)
        object.__setattr__(self, "seed", checked("seed", self.seed, 0, SEED_MAX))
        if self.pack not in get_args(Packing):
            raise OrderError(f"pack is {self.pack!r}, expected 'cut' or 'best-fit'")

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON."""
        return {
            "mode": "windows", "samples": self.samples, "window_tokens": self.window_tokens,
            "pack": self.pack, "shuffle": self.shuffle, "seed": self.seed,
        }  # fmt: skip

    def randomness(self) -> Randomness:
        """Return 1 for both measures, or 0 without shuffling."""
        return Randomness.of_shuffled() if self.shuffle else Randomness.of_sequential()

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        key = derive_key(self.seed, Purpose.TOKENS, epoch)
        return keyed(self.samples, key).range(start, stop)


class Pieces(NamedTuple):
    """What some windows consist of; all int64, shape (pieces,), ordered by row and place."""

    row: npt.NDArray[np.int64]  # which of the windows that were asked for
    place: npt.NDArray[np.int64]  # where in the window its first token stands
    document: npt.NDArray[np.int64]  # the document's number
    start: npt.NDArray[np.int64]  # its first token within the document
    size: npt.NDArray[np.int64]  # tokens, at least one

    def of(self, bounds: npt.NDArray[np.int64], row: int) -> Pieces:
        """Those between two bounds, their rows counted from `row` on."""
        some = Pieces._make(column[bounds[0] : bounds[1]] for column in self)
        return some._replace(row=some.row - row)


class WindowPlan(Protocol):
    """Which pieces of documents make a window."""

    windows: int  # how many there are
    tokens: int  # tokens of all documents

    def pieces(self, windows: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of these windows; int64, shape (windows,), each below `windows`."""


class JoinedPlan:
    """The windows of several plans, one plan's behind the other's: of each source of a mixture.

    `documents` are how many each source has.
    """

    def __init__(self, plans: Sequence[WindowPlan], documents: Sequence[int]) -> None:
        self.plans = tuple(plans)
        self.windows = sum(plan.windows for plan in plans)
        self.tokens = sum(plan.tokens for plan in plans)
        self._starts = np.array([0, *accumulate(plan.windows for plan in plans)][:-1], np.int64)
        self._documents = [0, *accumulate(documents)][:-1]

    def source_of(self, windows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The number of the plan that each window is of; int64, shaped like `windows`."""
        return np.searchsorted(self._starts, np.asarray(windows, np.int64), "right") - 1

    def pieces(self, windows: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of these windows."""
        if len(self.plans) == 1:
            return self.plans[0].pieces(windows)
        source, pieces = self.source_of(windows), []
        for number in np.unique(source).tolist() or [0]:  # of no windows, the first's none
            rows = np.flatnonzero(source == number)
            own = self.plans[number].pieces(windows[rows] - self._starts[number])
            pieces.append(
                own._replace(row=rows[own.row], document=own.document + self._documents[number])
            )
        if len(pieces) == 1:
            return cast("Pieces", pieces[0])
        # Rows stand in the order of their windows again; each keeps its pieces one behind the other.
        joined = [np.concatenate(column) for column in zip(*pieces, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return Pieces._make(column[order] for column in joined)


def plan_windows(pack: Packing, documents: int, sizes: Sizes, length: int) -> WindowPlan:
    """Plan windows of `length` inputs over all documents.

    `sizes` gives their sizes in tokens; it is asked once for all of them, later for some. Raises OrderError
    if the length is no positive number, or the packing is unknown.
    """
    length = checked("length", length, 1, SAMPLES_MAX)
    if pack not in get_args(Packing):
        raise OrderError(f"pack is {pack!r}, expected 'cut' or 'best-fit'")
    if pack == "best-fit" and length > _PACKED_LENGTH_MAX:
        raise OrderError(
            f"length is {length:,}, expected at most {_PACKED_LENGTH_MAX:,} to pack whole documents"
        )
    return (CutWindows if pack == "cut" else BestFitWindows)(documents, sizes, length)


def _walk(documents: int, sizes: Sizes, step: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    for first in range(0, documents, step):
        last = min(first + step, documents)
        yield first, sizes(np.arange(first, last, dtype=np.int64))


class CutWindows:
    """All tokens one behind the other, cut every `length` tokens."""

    def __init__(self, documents: int, sizes: Sizes, length: int) -> None:
        self._documents, self._sizes, self._length = documents, sizes, length
        sums = [np.zeros(1, np.int64)]
        for _, counts in _walk(documents, sizes, _AT_ONCE):
            blocks = np.add.reduceat(counts, np.arange(0, len(counts), _BLOCK))
            sums.append(sums[-1][-1] + np.cumsum(blocks))
        self._starts = np.concatenate(sums)  # tokens before each block, and all of them
        self.tokens = int(self._starts[-1])
        self.windows = max(0, self.tokens - 1) // length

    def pieces(self, windows: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of these windows."""
        cut = self._starts, _BLOCK, self._documents, self._length, windows
        sizes = self._sizes(_native.cut_documents(*cut))
        return Pieces(*_native.cut_windows(*cut, sizes))


class BestFitWindows:
    """Whole documents, the longest first, each where the least room is left that it fits into.

    Blocks of documents are packed by themselves. A document that is longer than a window is cut into windows
    and a rest. The plan is kept: six bytes a document, eight a window.
    """

    def __init__(self, documents: int, sizes: Sizes, length: int) -> None:
        self._sizes, self._length = sizes, length
        self.tokens = 0
        offsets, numbers, bounds, windows = [], [], [np.zeros(1, np.int64)], [0]
        for _, counts in _walk(documents, sizes, _PACKED_TOGETHER):
            self.tokens += int(counts.sum())
            # A rest of one token would be no input: it is the last target of the piece before.
            cuts = np.where(counts > 0, np.maximum(1, -(-(counts - 1) // length)), 0)
            document = np.repeat(np.arange(len(counts)), cuts)
            number = np.arange(len(document)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
            size = np.minimum(counts[document] - number * length, length + 1)
            longest = np.argsort(-size, kind="stable")
            window = _native.best_fit(size[longest], length + 1)
            placed = longest[np.argsort(window, kind="stable")]
            offsets.append(document[placed].astype(np.uint16))
            numbers.append(number[placed].astype(np.uint32))
            in_each = np.bincount(window)
            bounds.append(bounds[-1][-1] + np.cumsum(in_each))
            windows.append(windows[-1] + len(in_each))
        self._offset = np.concatenate([*offsets, np.empty(0, np.uint16)])
        self._number = np.concatenate([*numbers, np.empty(0, np.uint32)])
        self._bounds = np.concatenate(bounds)  # pieces before each window, and all of them
        self._blocks = np.array(windows)  # windows before each block of documents
        self.windows = windows[-1]

    def pieces(self, windows: npt.NDArray[np.int64]) -> Pieces:
        """The pieces of these windows."""
        block = np.searchsorted(self._blocks, windows, "right") - 1
        first = self._bounds[windows]
        number = self._bounds[windows + 1] - first
        stops = np.cumsum(number)
        row = np.repeat(np.arange(len(windows)), number)
        piece = np.arange(len(row)) + np.repeat(first - (stops - number), number)
        document = block[row] * _PACKED_TOGETHER + self._offset[piece]
        start = self._number[piece].astype(np.int64) * self._length
        count = np.minimum(self._sizes(document) - start, self._length + 1)
        sums = np.cumsum(count) - count
        return Pieces(row, sums - np.repeat(sums[stops - number], number), document, start, count)
