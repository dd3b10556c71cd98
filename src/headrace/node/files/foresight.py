"""Foresight: which files a program opens next, by all that is known of its order. Pure.

Orders are believed in this sequence, the first one that the program keeps to: what the user gave (a file
of paths, or a seed), the program's last epoch, the last epoch of an earlier run, and the sorted order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.node.files.epochs import Epochs
from headrace.node.files.follower import Follower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["Foresight", "GivenOrder"]


@dataclass(frozen=True, slots=True, eq=False)
class GivenOrder:
    """What the user says of the order.

    Attributes:
        epochs: the files of each epoch, by number; begun again after the last one.
        seed: or the seed of `headrace.order.Shuffled` over all files, sorted by path.
    """

    epochs: Sequence[NDArray[np.int64]] = ()
    seed: int | None = None

    def order_of(self, files: int) -> tuple[str, Callable[[int], NDArray[np.int64]]] | None:
        """Its name, and the order of each epoch; None: nothing is given."""
        if self.epochs:
            return "given", lambda epoch: self.epochs[epoch % len(self.epochs)]
        if self.seed is not None and files:
            from headrace.order import Shuffled

            shuffled = Shuffled(files, seed=self.seed)
            return "seed", lambda epoch: shuffled.indices(epoch, 0, files)
        return None


class Foresight:
    """Watches opens and says what comes.

    Args:
        files: how many there are; they are numbered from 0 in the order of their paths.
        given: what the user says.
        earlier: the order of an earlier run of the same job.

    Attributes:
        learned: the last epoch's order; None: none has ended.
        divergences: how often the program left the order that it was believed to keep to.
    """

    def __init__(
        self,
        files: int,
        given: GivenOrder | None = None,
        earlier: NDArray[np.int64] | None = None,
    ) -> None:
        self._files = files
        self._epochs = Epochs(files)
        self._followers: dict[str, Follower] = {}
        self.learned: NDArray[np.int64] | None = None
        self.divergences = 0
        known = given.order_of(files) if given is not None else None
        if known is not None:
            self._followers[known[0]] = Follower(files, known[1], following=True)
        self._followers["learned"] = _same_again(files, np.empty(0, np.int64), following=False)
        if earlier is not None:
            self._followers["earlier run"] = _same_again(files, earlier, following=False)
        every = np.arange(files, dtype=np.int64)
        self._followers["sorted"] = _same_again(files, every, following=False)

    @property
    def epochs(self) -> int:
        """Epochs that have ended."""
        return self._epochs.ended

    @property
    def opened(self) -> int:
        """Files opened in the epoch so far."""
        return self._epochs.opened

    def opened_mask(self) -> NDArray[np.bool_]:
        """Which files were opened in the epoch so far."""
        return self._epochs.opened_mask()

    def worth_keeping(self) -> NDArray[np.int64] | None:
        """The order for a later run: of the last epoch, or of one that is well under way."""
        if self.learned is not None:
            return self.learned
        return self._epochs.order() if 2 * self.opened > self._files else None

    @property
    def order(self) -> str:
        """Which order the program keeps to; '': none that is known."""
        return next((name for name, one in self._followers.items() if one.following), "")

    def note(self, opened: NDArray[np.int64]) -> None:
        """Take in what was opened, in order; int64 numbers of files."""
        best = self._best()
        for one in self._followers.values():
            one.note(opened)
        if best is not None and not best.following:
            self.divergences += 1
        ended = self._epochs.note(opened)
        if ended is not None:
            self._learn(ended)

    def _learn(self, ended: NDArray[np.int64]) -> None:
        """An epoch has ended: the next one may be like it."""
        self.learned = ended
        before = self._followers["learned"]
        if before.following:  # it goes on in what it knows already
            return
        after = _same_again(self._files, ended, following=True)
        after.note(self._epochs.order())
        self._followers["learned"] = after

    def coming(self, count: int) -> NDArray[np.int64]:
        """The next files, at most so many; none where no order is known."""
        best = self._best()
        return best.coming(count) if best is not None else np.empty(0, np.int64)

    def until(self, files: NDArray[np.int64], grace: int = 0) -> NDArray[np.int64] | None:
        """Opens until each of these files is next opened, see `Follower.until`; None: not known."""
        best = self._best()
        return best.until(files, grace) if best is not None else None

    def _best(self) -> Follower | None:
        return next((one for one in self._followers.values() if one.following), None)


def _same_again(files: int, order: NDArray[np.int64], *, following: bool) -> Follower:
    return Follower(files, lambda _: order, following=following)
