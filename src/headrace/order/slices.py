"""Slices: which positions each rank takes at each step.

The global sequence of an epoch is cut into global batches of `world_size * batch_size` positions,
and rank r takes the r-th contiguous slice of each. So the sequence that all ranks see together does
not depend on the world size, and a run that stopped after any number of global batches can go on
with another world size: everything here is counted from `from_position`, the global position at
which this run started, and delivers exactly what lies behind it.

Every rank has the same number of steps, whatever the tail.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from headrace.base.job import Rank
from headrace.errors import OrderError, RankError
from headrace.order.order import checked

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headrace.base.job import RankDecision
    from headrace.order.order import Order

_log = logging.getLogger("headrace")

Tail = Literal["drop", "pad", "exact"]
"""What becomes of the positions that do not fill a global batch.

* drop: they are not delivered.
* pad: the batch is filled with positions from the start of the epoch, over and over if need be.
* exact: they are shared out as evenly as possible; a rank's last batch may be smaller, even empty.
"""


@dataclass(frozen=True, slots=True)
class Slices:
    """One rank's share of an epoch.

    Raises:
        OrderError: a number is out of bounds, or `tail` is unknown.
    """

    length: int
    """Positions in an epoch (`Order.length`)."""

    batch_size: int
    """Samples a rank takes at each step."""

    rank: int = 0
    """0 to world_size - 1."""

    world_size: int = 1
    """Ranks that share the sequence."""

    tail: Tail = "exact"
    """See `Tail`. The default neither drops nor repeats a sample."""

    def __post_init__(self) -> None:
        for name, low in (("length", 0), ("batch_size", 1), ("world_size", 1)):
            object.__setattr__(self, name, checked(name, getattr(self, name), low))
        object.__setattr__(self, "rank", checked("rank", self.rank, 0, self.world_size - 1))
        if self.tail not in get_args(Tail):
            raise OrderError(f"tail is {self.tail!r}, expected 'drop', 'pad' or 'exact'")

    @property
    def global_batch(self) -> int:
        """Positions that all ranks together take at a full step."""
        return self.world_size * self.batch_size

    def steps(self, from_position: int = 0) -> int:
        """Return the number of steps left from a global position on; the same for every rank.

        Raises:
            ValueError: the position is not 0 to `length`.
        """
        left = self.length - checked("from_position", from_position, 0, self.length)
        return left // self.global_batch if self.tail == "drop" else -(-left // self.global_batch)

    def span(self, step: int, from_position: int = 0) -> tuple[int, int]:
        """Return (start, stop): the global positions of this rank's batch.

        Only a padded batch reaches past `length`: positions there stand for `position % length`
        (`Order.wrapped` reads them so), but count as themselves in the order hash.

        Raises:
            ValueError: the step is not 0 to `steps(from_position) - 1`.
        """
        begin = from_position + step * self.world_size * self.batch_size
        if step >= 0 <= from_position <= begin <= self.length - self.world_size * self.batch_size:
            begin += self.rank * self.batch_size  # a full step: asked for with every batch
            return begin, begin + self.batch_size
        steps = self.steps(from_position)
        if steps == 0:
            raise OrderError(f"step is {step}, but no step is left from position {from_position}")
        step = checked("step", step, 0, steps - 1)
        first = from_position + step * self.global_batch
        left = self.length - first
        if self.tail == "exact" and left < self.global_batch:
            share, more = divmod(left, self.world_size)
            first += self.rank * share + min(self.rank, more)
            return first, first + share + (self.rank < more)
        first += self.rank * self.batch_size
        return first, first + self.batch_size

    def indices(
        self,
        order: Order,
        epoch: int,
        step: int,
        from_position: int = 0,
    ) -> npt.NDArray[np.int64]:
        """Return the sample indices of this rank's batch; int64, shape (batch_size,), or less in an exact tail.

        Raises:
            ValueError: the order has another length, or the step or epoch is out of bounds.
        """
        if order.length != self.length:
            raise OrderError(f"the order has {order.length} positions, the slices {self.length}")
        return order.wrapped(epoch, *self.span(step, from_position))

    def position_after(self, steps: int, from_position: int = 0) -> int:
        """Return the global position that all ranks have reached after a number of steps.

        This is what a state saves. It never passes `length`: padding is not progress.

        Raises:
            ValueError: `steps` is not 0 to `steps(from_position)`.
        """
        reached = from_position + steps * self.world_size * self.batch_size
        if steps >= 0 <= from_position <= reached <= self.length:
            return reached
        steps = checked("steps", steps, 0, self.steps(from_position))
        return min(from_position + steps * self.global_batch, self.length)


class Share:
    """A loader's slices: provisional until its first epoch begins, then for good.

    Args:
        length: positions in an epoch (`Order.length`).
        batch_size: samples a rank takes at each step.
        ranks: which rank this is.
        tail: see `Tail`; None: `exact` for one rank, `pad` for several.
        alone: why the order is for one rank only; "" if it is for any number.

    Raises:
        OrderError: a number is out of bounds, or `tail` is unknown.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        ranks: RankDecision,
        tail: Tail | None = None,
        alone: str = "",
    ) -> None:
        self.ranks = ranks
        self.length, self.batch_size = length, batch_size
        self._tail = tail
        self._alone = alone
        self.order: Order | None = None  # the loader's, which may go on from a state with another
        self._steps: int | None = None
        self._decided: Slices | None = None
        self._of(Rank(0, 1) if ranks.is_open else ranks.now())

    @property
    def slices(self) -> Slices:
        """Which positions are this rank's; as things stand, while no epoch has begun.

        Raises:
            RankError: nobody says which rank this is, or two disagree.
        """
        return self._of(self.ranks.now()) if self._decided is None else self._decided

    def steps_text(self) -> str:
        """`, 36 steps an epoch`; nothing while that is not known."""
        try:
            return f", {self.slices.steps():,} steps an epoch"
        except RankError:
            return ""

    def __len__(self) -> int:
        """Steps of an epoch, as things stand."""
        self._steps = self.slices.steps()
        return self._steps

    def decide(self) -> Slices:
        """Which positions are this rank's from now on; asked whenever an epoch begins.

        Raises:
            RankError: nobody says which rank this is, two disagree, or it is another than it was.
        """
        rank = self.ranks.decide()
        if self._decided is None:
            self._decided = self._of(rank)
            self._remark(self._decided, rank)
        return self._decided

    def resize(self, length: int) -> None:
        """From now on an epoch has so many positions; which rank this is, stays."""
        self.length = length
        if self._decided is not None:
            self._decided = replace(self._decided, length=length)

    def facts(self) -> dict[str, object]:
        """For those who record a run that has begun."""
        slices, order = self.slices, self.order
        known = {"order": order.describe(), "order_digest": order.digest()} if order else {}
        return {"rank": slices.rank, "world_size": slices.world_size, "tail": slices.tail, **known}

    def _of(self, rank: Rank) -> Slices:
        if self._alone and rank.world_size > 1:
            raise OrderError(self._alone)
        tail = self._tail or ("exact" if rank.world_size == 1 else "pad")
        return Slices(self.length, self.batch_size, rank.rank, rank.world_size, tail)

    def _remark(self, slices: Slices, rank: Rank) -> None:
        """Say once what may surprise: samples that come twice, a length that was another one."""
        steps = slices.steps()
        if self._steps not in {None, steps}:
            _log.warning(
                "len(loader) was %d when it was asked for, before the processes were joined; as %s it is %d.",
                self._steps, rank, steps,
            )  # fmt: skip
        twice = steps * slices.global_batch - slices.length
        if self._tail is None and slices.tail == "pad" and twice > 0 and rank.is_first:
            _log.warning(
                "%s samples do not fill %s steps of %d ranks with %d samples each: %s samples come twice "
                "in an epoch. tail='exact' gives each once (the last batch is smaller), tail='drop' "
                "leaves %s out, tail='pad' says that it is meant so.",
                f"{slices.length:,}", f"{steps:,}", slices.world_size, slices.batch_size, f"{twice:,}",
                f"{slices.length % slices.global_batch:,}",
            )  # fmt: skip
