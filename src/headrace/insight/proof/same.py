"""Same: whether two runs delivered in the same order, and the first step at which they did not.

Runs may have had other numbers of ranks and other batches: what is compared is the sequence of all ranks
together, at the positions where steps of both runs end. Where the order is not headrace's, each rank's
steps are compared one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.insight.proof.epochs import place
from headrace.insight.proof.history import histories

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.insight.proof.history import History
    from headrace.trace import Run

__all__ = ["Difference", "Sameness", "same_order"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part."""

    what: str
    """For people."""
    epoch: int | None = None
    positions: tuple[int, int] | None = None
    a: str = ""
    """Rank and step in the first run."""
    b: str = ""


@dataclass(frozen=True, slots=True)
class Sameness:
    """Two runs beside each other."""

    a: str
    b: str
    positions: int
    """That were compared, over all epochs."""
    epochs: int
    first: Difference | None
    """The first difference; None: as far as both went, they had the same order."""

    @property
    def holds(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.first is None and self.positions > 0

    def document(self) -> dict[str, Any]:
        """For JSON."""
        first = self.first
        return {
            "a": self.a, "b": self.b, "same": self.holds, "positions": self.positions, "epochs": self.epochs,
            "first_difference": None if first is None else {
                "what": first.what, "epoch": first.epoch, "a": first.a, "b": first.b,
                "from": first.positions[0] if first.positions else None,
                "to": first.positions[1] if first.positions else None,
            },
        }  # fmt: skip


def same_order(a: Run, b: Run) -> Sameness:
    """Compare the order of two runs, as far as both went."""
    positions = epochs = 0
    for one, other in zip_longest(histories(a.ranks), histories(b.ranks)):
        if one is None or other is None:
            path, loader = (a.path, one) if one is not None else (b.path, other)
            where = loader.about.source if loader is not None else ""
            first = Difference(f"only {path} has a loader of {where}")
            return Sameness(a.path, b.path, positions, epochs, first)
        if (data := _other_data(one, other)) is not None:
            return Sameness(a.path, b.path, positions, epochs, data)
        for epoch in sorted(set(one.epochs) & set(other.epochs)):
            compared, found = _compare(one, other, epoch)
            positions, epochs = positions + compared, epochs + 1
            if found is not None:
                return Sameness(a.path, b.path, positions, epochs, found)
    return Sameness(a.path, b.path, positions, epochs, None)


def _other_data(a: History, b: History) -> Difference | None:
    if a.about.fingerprint != b.about.fingerprint:
        return Difference(
            f"they had other data: {a.about.source} ({a.about.fingerprint[:16]}) and "
            f"{b.about.source} ({b.about.fingerprint[:16]})"
        )
    return None


def _compare(a: History, b: History, epoch: int) -> tuple[int, Difference | None]:
    """Compare an epoch: how many positions, and the first difference."""
    if not a.about.order or not b.about.order:
        return _by_rank(_rows(a, epoch), _rows(b, epoch), epoch)
    one, other = _Prefix(_rows(a, epoch)), _Prefix(_rows(b, epoch))
    ends, at_one, at_other = np.intersect1d(
        one.ends, other.ends, assume_unique=True, return_indices=True
    )
    wrong = np.flatnonzero(one.sums[at_one] != other.sums[at_other])
    if not len(wrong):
        return int(ends[-1]) if len(ends) else 0, None
    first = int(wrong[0])
    begin = int(ends[first - 1]) if first else 0
    end = int(ends[first])
    if len(one.ends) == len(other.ends) and np.array_equal(one.ends, other.ends):
        begin = int(one.rows["begin"][at_one[first]])
    what = f"epoch {epoch}: other samples at positions {begin:,} to {end - 1:,}"
    return begin, Difference(what, epoch, (begin, end), one.at(begin), other.at(begin))


class _Prefix:
    """The deliveries from an epoch's beginning to the first gap, and their hashes added up."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        rows = rows[rows["samples"] > 0]
        ends = rows["begin"] + rows["samples"].astype(np.uint64)
        expected = np.concatenate([np.zeros(1, np.uint64), ends])[:-1] if len(rows) else ends
        gaps = np.flatnonzero(rows["begin"] != expected)
        whole = int(gaps[0]) if len(gaps) else len(rows)
        self.rows, self.ends = rows[:whole], ends[:whole]
        self.sums = np.cumsum(self.rows["order_hash"], dtype=np.uint64)

    def at(self, position: int) -> str:
        """Which delivery a position came with."""
        found = int(np.searchsorted(self.ends, np.uint64(position), side="right"))
        return place(self.rows[found]) if found < len(self.rows) else ""


def _rows(history: History, epoch: int) -> NDArray[np.void]:
    rows = np.concatenate([p.deliveries for p in history.epochs[epoch]])
    return rows[np.argsort(rows["begin"], kind="stable")]


def _by_rank(a: NDArray[np.void], b: NDArray[np.void], epoch: int) -> tuple[int, Difference | None]:
    """Each rank's steps, one by one: positions of other orders are of the rank alone."""
    compared = 0
    for rank in sorted({*a["rank"].tolist()} & {*b["rank"].tolist()}):
        one, other = (rows[rows["rank"] == rank] for rows in (a, b))
        many = min(len(one), len(other))
        wrong = np.flatnonzero(
            (one["order_hash"][:many] != other["order_hash"][:many])
            | (one["samples"][:many] != other["samples"][:many])
        )
        if len(wrong):
            first = int(wrong[0])
            what = f"epoch {epoch}: other samples at rank {rank}, step {int(one['step'][first])}"
            return compared + first, Difference(
                what, epoch, None, place(one[first]), place(other[first])
            )
        compared += int(one["samples"][:many].sum())
    return compared, None
