"""Epochs: whether the deliveries of an epoch were each sample exactly once, and what is wrong if not.

Positions prove that nothing is missing or doubled; hashes prove that at each position there was the sample
that the order has there. A step that left samples out has the hash of what was asked for, and fewer samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.insight.proof.expected import length_of, sums_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.insight.proof.history import History, Passage
    from headrace.order import Order

__all__ = ["EpochProof", "Finding", "State", "check_epoch", "place"]

FINDINGS_MAX: Final = 20
"""Of each kind that are told one by one; the rest are counted."""


class State(StrEnum):
    """What is known of an epoch."""

    WHOLE = "whole"
    """Every position came exactly once."""
    RUNNING = "running"
    """So did all up to where the run stands, or ended: its last epoch."""
    LEFT = "left early"
    """So did all up to where the loop left it, and another epoch came after it."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    """`missing`, `doubled`, `other samples`, `left out`, `outside`."""
    epoch: int
    positions: tuple[int, int]
    """From, to (exclusive)."""
    where: str
    """Rank and step, for people."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind, "epoch": self.epoch, "from": self.positions[0], "to": self.positions[1],
            "where": self.where,
        }  # fmt: skip


@dataclass(slots=True)
class EpochProof:
    """An epoch, and how it went."""

    epoch: int
    state: State = State.WHOLE
    positions: int = 0
    """That were delivered, each once, from the beginning on."""
    length: int = 0
    steps: int = 0
    padded: int = 0
    """Samples that came again to fill the last step."""
    dropped: int = 0
    """Samples that did not fill a last step of all ranks, and were dropped as `tail="drop"` says."""
    left_out: int = 0
    """Samples that could not be delivered and were skipped."""
    order_hash: int = 0
    resumed_at: tuple[int, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    more: int = 0
    """Findings beyond those that are told."""

    def add(self, finding: Finding) -> None:
        """Add one, or count it."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.more += 1


def check_epoch(
    history: History, epoch: int, passages: Sequence[Passage], order: Order | None, *, last: bool
) -> EpochProof:
    """Check one epoch.

    Args:
        history: of the loader.
        epoch: its number.
        passages: those that count; together they are the epoch.
        order: None: only positions are checked.
        last: no later epoch was begun.
    """
    about = history.about
    proof = EpochProof(epoch, length=about.length)
    proof.resumed_at = tuple(p.begin for p in passages[1:])
    rows = np.concatenate([p.deliveries for p in passages])
    rows = rows[np.argsort(rows["begin"], kind="stable")]
    proof.steps = len(rows)
    inside = _outside(
        proof, rows, about.length + max(1, about.batch_size) * passages[-1].world_size
    )
    lengths = _lengths(inside, epoch, order, about.batch_size, proof)
    if last and history.attempts[passages[-1].attempt].cut:
        together = _not_ahead(inside, passages[-1])
        inside, lengths = inside[together], lengths[together]
    proof.order_hash = int(np.sum(inside["order_hash"], dtype=np.uint64))
    end = _cover(proof, inside, lengths, about.length)
    _end(proof, end, passages[-1], about.tail, last=last)
    if proof.findings:
        proof.state = State.WRONG
    return proof


_PADDING_MOST: Final = 1 << 28
"""Positions past an epoch's end that a step of all ranks may fill."""


def _outside(proof: EpochProof, rows: NDArray[np.void], limit: int) -> NDArray[np.void]:
    """What lies where no epoch reaches is told, and left aside."""
    inside = (rows["begin"] <= limit) & (rows["samples"] <= limit)
    for row in rows[~inside]:
        begin = int(row["begin"])
        proof.add(Finding("outside", proof.epoch, (begin, begin + int(row["samples"])), place(row)))
    return rows[inside]


def place(row: np.void) -> str:
    """Where a delivery was, for people."""
    attempt = int(row["attempt"])
    begun = f" of attempt {attempt + 1}" if attempt else ""
    return f"rank {int(row['rank'])}, step {int(row['step'])}{begun}"


def _lengths(
    rows: NDArray[np.void], epoch: int, order: Order | None, batch_size: int, proof: EpochProof
) -> NDArray[np.uint64]:
    """How many positions each delivery took, and whether its samples were the order's."""
    lengths: NDArray[np.uint64] = rows["samples"].astype(np.uint64)
    if order is None or not len(rows):
        return lengths
    begins = rows["begin"]
    sums = sums_at(order, epoch, np.concatenate([begins, begins + lengths]))
    asked = sums[len(rows) :] - sums[: len(rows)]
    for number, at in enumerate(np.flatnonzero(asked != rows["order_hash"])):
        begin, count = int(begins[at]), int(lengths[at])
        took = None
        if number < _SEARCHED_MOST:
            most = max(count, min(batch_size, _BATCH_MOST))
            took = length_of(order, epoch, begin, (count, most), int(rows["order_hash"][at]))
        if took is not None:  # more was asked for than came
            lengths[at] = took
            proof.left_out += took - count
            proof.add(Finding("left out", epoch, (begin, begin + took), place(rows[at])))
        else:
            proof.add(Finding("other samples", epoch, (begin, begin + count), place(rows[at])))
    return lengths


_SEARCHED_MOST: Final = 20_000
_BATCH_MOST: Final = 1 << 20
"""Samples may have been left out of so many steps, of so many samples; beyond that, they count as others."""


def _cover(
    proof: EpochProof, rows: NDArray[np.void], lengths: NDArray[np.uint64], length: int
) -> int:
    """Go along the positions: what is missing or doubled; returns where they end."""
    some = lengths > 0  # an exact tail may give a rank nothing
    rows, lengths = rows[some], lengths[some]
    ends = rows["begin"] + lengths
    reached = (
        np.concatenate([[np.uint64(0)], np.maximum.accumulate(ends)])[:-1] if len(rows) else ends
    )
    for at in np.flatnonzero(rows["begin"] != reached):
        begin, before = int(rows["begin"][at]), int(reached[at])
        if begin > before:
            where = f"before {place(rows[at])}"
            proof.add(Finding("missing", proof.epoch, (before, begin), where))
        else:
            until = min(before, int(ends[at]))
            if begin < until:
                where = place(rows[at])
                if len(proof.findings) < FINDINGS_MAX:  # the rest is only counted
                    other = rows[np.flatnonzero(ends[:at] > rows["begin"][at])[0]]
                    where = f"{place(other)} and {where}"
                proof.add(Finding("doubled", proof.epoch, (begin, until), where))
    end = int(ends.max()) if len(rows) else 0
    proof.padded = max(0, end - length)
    proof.positions = min(end, length)
    return end


def _end(proof: EpochProof, end: int, passage: Passage, tail: str, *, last: bool) -> None:
    """What it means that the positions end there."""
    left = proof.length - end
    if left < 0 and tail != "pad":
        proof.add(Finding("outside", proof.epoch, (proof.length, end), "the end of the epoch"))
    elif tail == "drop" and 0 < left < passage.world_size * _batch(passage):
        proof.dropped = left
    elif left > 0:
        proof.state = State.RUNNING if last else State.LEFT


def _batch(passage: Passage) -> int:
    return int(passage.deliveries["samples"].max()) if len(passage.deliveries) else 1


def _not_ahead(rows: NDArray[np.void], passage: Passage) -> NDArray[np.bool_]:
    """Which deliveries all ranks had come to where the run was cut off; some were a few steps ahead."""
    mine = rows["attempt"] == passage.attempt
    steps = rows["step"].astype(np.int64)
    ends = [int(steps[mine & (rows["rank"] == rank)].max(initial=-1)) for rank in passage.ranks]
    together: NDArray[np.bool_] = ~mine | (steps <= min(ends, default=0))
    return together
