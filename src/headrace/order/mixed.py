"""Mixed: an order over several data sets by proportion; which data set comes at each position is computed.

After any number of positions, every source has had its share of them, to the nearest whole number give or take
one. Nothing is drawn and nothing is stored. Two sources share positions as evenly as whole numbers can: after m
positions the first has had `a * m` of them, rounded (a Sturmian word). More sources are shared out by a binary
tree of such pairs, from the top down. So the source at a position, and how often each came before, take as many
divisions as the tree is deep, at position 10^12 as at 0.

How far a count can be from its exact share follows from the tree: half a sample at each pair on the way down,
of which a source inherits what its share in each pair is. The tree is chosen to keep that small
(`Pattern.error_max`): 0.5 for two sources, below 1 for three and for most of a few. Where it is 1 or more and
the proportions have a common denominator of at most 2^22, one period of the pattern is computed and kept
instead: by Tijdeman's rule, after which no count of n sources is ever further than 1 - 1 / (2n - 2) from its
share. Longer periods would take too much memory, and the rule has no shortcut to a far position: there the
tree stays, with an `error_max` that was never above 1.1 in all that we tried.

A source's own samples come in an order of their own, with its own epochs: the k-th time that a source comes, it
gives its k-th sample, on through the epochs of the mixture. So each source's samples all come once before any
comes again, whatever the proportions and wherever the mixture's epochs end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd
from operator import ge, sub
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from headrace import _native
from headrace.errors import OrderError, StateMismatch
from headrace.order.hash import SAMPLES_MAX
from headrace.order.order import EPOCH_MAX, SEED_MAX, Order, checked, digest_of
from headrace.order.randomness import Randomness
from headrace.order.state import OrderState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

Stop = Literal["first", "last", "never"]  # when an epoch of a mixture ends, see `Mixed.stop`
PARTS_MAX = 1 << 30
"""The most parts that proportions are counted in: products of two fit 64 bits, and 10^-9 is exact enough."""

SOURCES_MAX = 10_000  # as `kPeriodSourcesMax` in native/core/mixture.h
_GROUPS_MAX = 9
"""The tree's upper part is the best of all trees over so many groups: 3^9 steps, some 20 ms."""

_PERIOD_MAX = 1 << 22
"""As `kPeriodMax` in native/core/mixture.h: the longest period that is kept, 8 MB and at most 16 MB of
sums, computed in some tenths of a second."""

_ROOMS = (1.0, 1.05, 1.1, 1.2, 1.4)
"""Half samples that sources may inherit, tried one after another: nearly always the first can be kept to."""

_AHEAD = 8192  # positions that are computed together where they are asked for one after another
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two nodes of the tree, which share its positions: of each `whole` of them, the first has `part`."""

    first: _Pair | int
    second: _Pair | int
    parts: int  # of all sources below it
    part: int
    whole: int

    def firsts(self, positions: int) -> int:
        """How many of so many positions the first has."""
        return (2 * positions * self.part + self.whole) // (2 * self.whole)

    def firsts_range(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """The same for `low` to `high` positions, both included."""
        rounds, rest = divmod(low, self.whole)  # what is left is small: products fit 64 bits
        left = np.arange(rest, rest + high - low + 1, dtype=np.int64)
        left *= 2 * self.part
        left += self.whole
        left //= 2 * self.whole
        left += rounds * self.part
        return left


class Pattern:
    """Which source comes at each position, by fixed proportions. Immutable; made by `pattern_of`.

    No source's count is ever further from its exact share than `error_max`.
    """

    def __init__(self, parts: tuple[int, ...]) -> None:
        self.parts = parts
        trees: list[tuple[float, int, _Pair | int]] = []
        for room in _ROOMS:
            tree = _best_tree(parts, room)
            trees.append((_error_max(tree, parts), len(trees), tree))
            if trees[-1][0] < 1.0 or sum(parts) <= _PERIOD_MAX:
                break
        self.error_max, _, self._root = min(trees, key=lambda one: one[:2])
        self._period: _Period | None = None
        if self.error_max >= 1.0 and sum(parts) <= _PERIOD_MAX:
            self._period = _Period(parts)
            self.error_max = 1.0 - 1.0 / (2 * sum(part > 0 for part in parts) - 2)

    def counts(self, positions: int) -> list[int]:
        """Return how often each source came at the first so many positions."""
        if self._period is not None:
            return self._period.counts(positions)
        counts = [0] * len(self.parts)
        todo: list[tuple[_Pair | int, int]] = [(self._root, positions)]
        while todo:
            node, number = todo.pop()
            if isinstance(node, int):
                counts[node] = number
                continue
            first = node.firsts(number)
            todo += [(node.first, first), (node.second, number - first)]
        return counts

    def sources(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the number of the source at positions `start` to `stop - 1`; int32."""
        if self._period is not None:
            return self._period.sources(start, stop)
        numbers = np.empty(stop - start, np.int32)
        todo: list[tuple[_Pair | int, int, int, npt.NDArray[np.int64]]]
        todo = [(self._root, start, stop, np.arange(stop - start))]
        while todo:
            node, low, high, places = todo.pop()
            if isinstance(node, int):
                numbers[places] = node
            elif low < high:
                firsts = node.firsts_range(low, high)
                of_first = np.diff(firsts) == 1
                begin, end = int(firsts[0]), int(firsts[-1])
                todo.append((node.first, begin, end, places[of_first]))
                todo.append((node.second, low - begin, high - end, places[~of_first]))
        return numbers


class _Period:
    """One period of a pattern that is computed once, and then comes again and again."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self._parts = np.array(parts, np.int64)
        self._numbers = _native.shared_period(self._parts)
        # Counts at every so many positions: no more numbers than there are positions.
        self._every = max(4096, len(parts))
        starts = range(0, len(self._numbers), self._every)
        pieces = [self._numbers[at : at + self._every] for at in starts]
        each = [np.bincount(piece, minlength=len(parts)) for piece in pieces]
        self._sums = np.cumsum([np.zeros(len(parts), np.int64), *each], axis=0, dtype=np.int32)

    def counts(self, positions: int) -> list[int]:
        rounds, rest = divmod(positions, len(self._numbers))
        blocks = rest // self._every
        begun = np.bincount(self._numbers[blocks * self._every : rest], minlength=len(self._parts))
        counts: list[int] = (rounds * self._parts + self._sums[blocks] + begun).tolist()
        return counts

    def sources(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        at = np.arange(stop - start) + start % len(self._numbers)
        numbers: npt.NDArray[np.int32] = self._numbers.take(at, mode="wrap").astype(np.int32)
        return numbers


@lru_cache(maxsize=64)
def pattern_of(parts: tuple[int, ...]) -> Pattern:
    """Return the pattern of these proportions; the last are kept: a long period takes tenths of a second."""
    return Pattern(parts)


def _error_max(root: _Pair | int, parts: tuple[int, ...]) -> float:
    """Half a sample for the source's own pair, and half of what it inherits, see `_best_tree`."""
    error_max = 0.0
    todo: list[tuple[_Pair | int, float]] = [(root, 0.0)]
    while todo:
        node, above = todo.pop()
        if not isinstance(node, int):
            # The root counts its positions without an error: there is nothing to inherit from it.
            here = above if node is root else above + 1 / node.parts
            todo += [(node.first, here), (node.second, here)]
        elif node is not root:
            error_max = max(error_max, 0.5 + 0.5 * parts[node] * above)
    return error_max


_Group = tuple[int, "_Pair | int", float]
"""Parts, the tree over them, and its room: what its sources can stand of 1/W1 + 1/W2 + ... above it."""


def _best_tree(parts: tuple[int, ...], room: float) -> _Pair | int:
    """Return a tree in which no source inherits more than `room` half samples, if there is one.

    A source of w parts inherits w/W1 + w/W2 + ... half samples from the nodes of W1, W2, ... parts that it lies
    below, the root not counted. So the best tree over a set of sources is the best of all pairs of best trees
    over its subsets, the one with the most room above. Of many sources, neighbours in size are paired first,
    those that keep the most room for their size, until few enough nodes are left to look at all trees.
    """
    groups: list[_Group] = [
        (part, source, room / part) for source, part in enumerate(parts) if part
    ]
    groups.sort(key=lambda group: group[0])
    while len(groups) > _GROUPS_MAX:
        pairs = [_paired(light, heavy) for light, heavy in pairwise(groups)]
        kept = [of_both * above for of_both, _, above in pairs]
        at = kept.index(max(kept))
        groups[at : at + 2] = [pairs[at]]
        groups.sort(key=lambda group: group[0])
    best: dict[int, _Group] = {1 << i: group for i, group in enumerate(groups)}
    whole = (1 << len(groups)) - 1
    for chosen in range(1, whole + 1):
        subsets: list[tuple[float, int, int]] = []
        first = (chosen - 1) & chosen
        while first > (second := chosen ^ first):
            subsets.append((min(best[first][2], best[second][2]), first, second))
            first = (first - 1) & chosen
        if subsets:
            _, first, second = max(subsets)
            best[chosen] = _paired(best[first], best[second])
    return best[whole][1]


def _paired(first: _Group, second: _Group) -> _Group:
    parts = first[0] + second[0]
    common = gcd(first[0], parts)
    pair = _Pair(first[1], second[1], parts, first[0] // common, parts // common)
    return parts, pair, min(first[2], second[2]) - 1 / parts


@dataclass(frozen=True, eq=False)
class Mixed(Order):
    """Samples of several sources by proportion. Memory for a few thousand positions.

    Indices count through the sources: those of the first come first. With each epoch the pattern begins anew,
    and each source's own samples go on where the last epoch left off.

    Raises:
        OrderError: a number is out of bounds, proportions do not fit, or the epoch would have no end, or no
            sample.
    """

    orders: tuple[Order, ...]
    """Each source's own order; its epochs are the source's own."""

    phases: tuple[tuple[int, tuple[int, ...]], ...]
    """Proportions from a position of the epoch on, the first from 0: whole numbers, one for each source."""

    seed: int = 0
    """What the sources' seeds were derived from; kept in states."""

    stop: Stop | int = "first"
    """An epoch ends when the `first` source, or the `last`, has given all its samples `repeats` times; `never`
    (after 2^48); or after so many samples."""

    repeats: tuple[int, ...] = ()
    """Epochs of its own after which a source has given all, for `first` and `last`; 1 each by default."""

    block: int = 1
    """Successive positions that come from one source: a batch of one rank, or 1."""

    since: int = 0
    """The epoch that `drawn` is of."""

    drawn: tuple[int, ...] = ()
    """Samples that each source had given when that epoch began; none by default."""

    samples: int = field(init=False)
    epoch_samples: int = field(init=False)
    _bases: tuple[int, ...] = field(init=False, repr=False)
    _counts: tuple[int, ...] = field(init=False, repr=False)
    _ahead: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count = len(self.orders)
        checked("the number of sources", count, 1, SOURCES_MAX)
        ends = tuple(accumulate(order.samples for order in self.orders))
        values: dict[str, Any] = {
            "seed": checked("seed", self.seed, 0, SEED_MAX),
            "block": checked("block", self.block, 1, SAMPLES_MAX),
            "since": checked("since", self.since, 0, EPOCH_MAX),
            "repeats": tuple(self.repeats) or (1,) * count,
            "drawn": tuple(self.drawn) or (0,) * count,
            "samples": checked("samples", ends[-1], 1, SAMPLES_MAX),
            "_bases": (0, *ends[:-1]),
            "_ahead": {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for name, numbers, low in (("repeats", self.repeats, 1), ("drawn", self.drawn, 0)):
            if len(numbers) != count:
                raise OrderError(f"{name} has {len(numbers)} numbers, expected {count}")
            for number in numbers:
                checked(name, number, low, SAMPLES_MAX**2)
        starts = [start for start, _ in self.phases]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise OrderError(f"phases begin at {starts[:8]}, expected 0 and ascending positions")
        for start, parts in self.phases:
            if len(parts) != count or not any(parts) or min(parts) < 0:
                raise OrderError(
                    f"the proportions from {start} on are {parts[:8]} for {count} sources"
                )
            if start % self.block:
                raise OrderError(
                    f"a phase begins at {start}, expected whole batches of {self.block}"
                )
        units = self._units_of_epoch()
        if units == 0:
            raise OrderError(
                f"an epoch of the mixture has no whole batch of {self.block} samples of one source",
                next_step="Use smaller batches, more repeats, or mix within batches.",
            )
        object.__setattr__(self, "epoch_samples", units * self.block)
        object.__setattr__(self, "_counts", tuple(self.counts(self.epoch_samples)))

    @property
    def length(self) -> int:
        """The number of positions in an epoch, see `stop`."""
        return self.epoch_samples

    @property
    def error_max(self) -> float:
        """No source's count is ever further than this from its exact share, within a phase; in blocks."""
        return max(pattern_of(parts).error_max for _, parts in self.phases)

    def describe(self) -> dict[str, Any]:
        """Say what identifies the sequence, ready for JSON; of `drawn`, states tell."""
        return {
            "mode": "mixed",
            "samples": self.samples,
            "seed": self.seed,
            "sources": [order.describe() for order in self.orders],
            "phases": [[start, list(parts)] for start, parts in self.phases],
            "length": self.length,
            "block": self.block,
        }

    def randomness(self) -> Randomness:
        """Return the means of the sources' own, by how often each comes in an epoch."""
        each = [order.randomness() for order in self.orders]
        shares = [count / self.length for count in self._counts]
        level = sum(share * one.level for share, one in zip(shares, each, strict=True))
        bits = sum(share * one.entropy_share for share, one in zip(shares, each, strict=True))
        return Randomness(level, bits, "mean of the sources' levels; which comes when is fixed")

    # -- counting ----------------------------------------------------------------------------------

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source come before a position of an epoch."""
        units, rest = divmod(position, self.block)
        counts = [number * self.block for number in self._units(units)]
        if rest:
            counts[int(self._sources(units, units + 1)[0])] += rest
        return counts

    def drawn_at(self, epoch: int, position: int) -> tuple[int, ...]:
        """Return how many samples of each source come before a position of the run.

        Raises:
            OrderError: the epoch lies before the one that this order begins with.
        """
        if epoch < self.since:
            raise OrderError(
                f"epoch is {epoch}, but these proportions begin with epoch {self.since}"
            )
        epochs = epoch - self.since
        return tuple(
            drawn + epochs * whole + now
            for drawn, whole, now in zip(
                self.drawn, self._counts, self.counts(position), strict=True
            )
        )

    def _units(self, units: int) -> list[int]:
        """How often each source comes in the first so many blocks."""
        counts = [0] * len(self.orders)
        for parts, low, high in self._spans(0, units):
            for source, number in enumerate(pattern_of(parts).counts(high - low)):
                counts[source] += number
        return counts

    def _spans(self, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The phases that blocks `start` to `stop - 1` fall into: proportions, and blocks from there on.

        Bounds are counted from the beginning of the phase for `start`, and so is the end.
        """
        for i, (first, parts) in enumerate(self.phases):
            low = first // self.block
            high = self.phases[i + 1][0] // self.block if i + 1 < len(self.phases) else stop
            begin, end = max(start, low), min(stop, high)
            if begin < end:
                yield parts, begin - low, end - low

    def _sources(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return np.concatenate(
            [pattern_of(parts).sources(low, high) for parts, low, high in self._spans(start, stop)]
        )

    def _units_of_epoch(self) -> int:
        longest = SAMPLES_MAX // self.block
        if self.stop == "never":
            return longest
        if isinstance(self.stop, int):
            units, rest = divmod(checked("stop", self.stop, 1, SAMPLES_MAX), self.block)
            if rest:
                raise OrderError(
                    f"stop is {self.stop}, expected whole batches of {self.block} samples"
                )
            return units
        if self.stop not in get_args(Stop):
            raise OrderError(f"stop is {self.stop!r}, expected a number or one of {get_args(Stop)}")
        own = [
            order.length * repeats for order, repeats in zip(self.orders, self.repeats, strict=True)
        ]
        drawn_ever = self._units(longest)
        if self.stop == "last":
            quotas = [-(-number // self.block) for number in own]
            never = [i for i, quota in enumerate(quotas) if drawn_ever[i] < quota]
            if never:
                raise OrderError(
                    f"stop is 'last', but source {never[0]} is never exhausted by its proportions",
                    next_step="Give it a proportion above 0, or stop='first'.",
                )
            return self._first_units(longest, lambda now: all(map(ge, now, quotas)))
        quotas = [number // self.block for number in own]
        if 0 in quotas:
            return 0
        return self._first_units(longest, lambda now: any(map(ge, now, quotas)))

    def _first_units(self, longest: int, is_reached: Callable[[list[int]], bool]) -> int:
        """The smallest number of blocks after which the counts are what is asked for."""
        low, high = 0, longest
        while low < high:
            middle = (low + high) // 2
            if is_reached(self._units(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    # -- samples -----------------------------------------------------------------------------------

    def source_of(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the number of the source that each index is of; int64, shaped like `indices`."""
        return np.searchsorted(np.array(self._bases), np.asarray(indices, np.int64), "right") - 1

    def _indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Whoever asks for batch after batch without a gap is given them out of what was computed together.

        That takes a third of the time. With several ranks there are gaps, and each batch is computed alone.
        """
        ahead: npt.NDArray[np.int64]
        ahead_of, first, ahead = self._ahead.get("indices", (-1, 0, _NOTHING))
        if epoch == ahead_of and first <= start and stop <= first + len(ahead):
            return ahead[start - first : stop - first].copy()
        goes_on = self._ahead.get("stop") == (epoch, start)
        self._ahead["stop"] = epoch, stop
        if not goes_on or stop - start >= _AHEAD:
            return self._computed(epoch, start, stop)
        last = min(start + _AHEAD, self.length)
        ahead = self._computed(epoch, start, last)
        self._ahead["stop"] = epoch, last
        self._ahead["indices"] = epoch, start, ahead
        return ahead[: stop - start].copy()

    def _computed(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        first, last = start // self.block, (stop - 1) // self.block + 1
        sources = self._sources(first, last)
        if self.block > 1:
            skipped = start - first * self.block
            sources = np.repeat(sources, self.block)[skipped : skipped + stop - start]
        grouped = np.argsort(sources, kind="stable")
        counts = np.bincount(sources, minlength=len(self.orders))
        drawn = self.drawn_at(epoch, start)
        indices, at = np.empty(stop - start, np.int64), 0
        for source in np.flatnonzero(counts).tolist():
            number = int(counts[source])
            own = self._own(source, drawn[source], drawn[source] + number)
            indices[grouped[at : at + number]] = own + self._bases[source]
            at += number
        return indices

    def _own(self, source: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples that a source gives from its `start`-th draw on, through its own epochs."""
        order, pieces = self.orders[source], []
        while start < stop:
            epoch, position = divmod(start, order.length)
            epoch &= EPOCH_MAX  # a small source may come that often; its orders begin again
            number = min(stop - start, order.length - position)
            pieces.append(order.indices(epoch, position, position + number))
            start += number
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    # -- states ------------------------------------------------------------------------------------

    def basis(self, epoch: int, position: int) -> tuple[int, ...]:
        """What a state holds beside the digest: samples of each source that came before, and their orders."""
        return (*self.drawn_at(epoch, position), self._orders_digest())

    def _orders_digest(self) -> int:
        """Identify the sources' orders: a place in one means nothing in another. 32 bits."""
        return int(digest_of(",".join(order.digest() for order in self.orders).encode())[:8], 16)

    def resumed(self, epoch: int, position: int, basis: tuple[int, ...]) -> Mixed:
        """Return the order that goes on where each source had given so many samples.

        Raises:
            StateMismatch: the state belongs to another kind of order, or to other proportions.
        """
        counts = self.counts(min(position, self.length))
        drawn = tuple(map(sub, basis[:-1], counts))
        if len(basis) != len(self.orders) + 1 or min(drawn) < 0:
            raise StateMismatch(
                f"state has samples of {len(basis) - 1} sources ({basis[:8]}), this order has "
                f"{len(self.orders)}, of which {counts[:8]} come before position {position}.",
                next_step="Resume with the mixture that the state was saved with.",
            )
        return replace(self, since=epoch, drawn=drawn)

    def grown_from(self, before: Mixed, epoch: int) -> Mixed:
        """Return this order from an epoch on, where `before` was followed until then.

        Args:
            before: of the same sources, some of which have more samples now.
            epoch: the first of this order. A source that has grown begins an epoch of its own there, in which
                its old samples and the new ones come once each; the others go on where they stood.
        """
        drawn = (
            number if own == old else -(-number // old.length) * own.length
            for number, own, old in zip(
                before.drawn_at(epoch, 0), self.orders, before.orders, strict=True
            )
        )
        return replace(self, since=epoch, drawn=tuple(drawn))

    def continue_from(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state from which a run goes on in these proportions, with the samples that come next.

            loader.load_state_dict(loader.order.continue_from(state))

        `Loader.continue_from` does both, and knows states of data that was followed as it grew.

        Args:
            state: of a loader of the same sources in other proportions. Its epoch ends there; one of these
                proportions begins.

        Raises:
            StateMismatch: it is the state of no mixture, or of one of other sources or orders of theirs.
            OrderError: the state is damaged.
        """
        loaded = OrderState.from_dict(state)
        count = len(self.orders)
        if len(loaded.basis) != count + 1:
            raise StateMismatch(
                f"state has {len(loaded.basis)} numbers that say where sources stand, one of this mixture has "
                f"{count + 1} (where it is followed, {2 * count + 1}).",
                next_step="Continue from the state of a mixture of the same sources; of one that was "
                "followed, by loader.continue_from(state) with follow=True.",
            )
        if loaded.basis[-1] != self._orders_digest():
            raise StateMismatch(
                "the sources' samples came in other orders (another kind, seed, length of windows, or number "
                "of samples): where each source stood means nothing in these.",
                next_step="Change the proportions alone, or start anew.",
            )
        return replace(
            loaded, epoch=loaded.epoch + 1, position=0, order_hash=0, order_digest=self.digest()
        ).to_dict()
