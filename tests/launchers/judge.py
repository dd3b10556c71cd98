"""Judge: what all processes of a run consumed together, from the files that they left."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["SAMPLES", "WRONG", "Ended", "Outcome", "outcome", "table", "verdicts"]

SAMPLES = 600
WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launcher ended.

    Attributes:
        code: its exit status.
        text: what it and the ranks printed.
    """

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one loader delivered under one launcher.

    Attributes:
        launcher: by its name in the matrix.
        loader: by its name in `scripts/consumed.py`.
        exit: the launcher's exit status.
        shares: what each process consumed, in its order; in no order of processes.
        text: what was printed.
    """

    launcher: str
    loader: str
    exit: int
    shares: tuple[tuple[int, ...], ...]
    text: str

    @property
    def counts(self) -> Counter[int]:
        """How often each sample was delivered."""
        return Counter(number for share in self.shares for number in share)

    @property
    def delivered(self) -> int:
        """Samples, counted each time."""
        return self.counts.total()

    @property
    def unique(self) -> int:
        """Different samples."""
        return len(self.counts)

    @property
    def is_exactly_once(self) -> bool:
        """Every sample once over all processes, and a good end."""
        return self.exit == 0 and self.counts == Counter(range(SAMPLES))

    @property
    def is_refused(self) -> bool:
        """A bad end, with an error of ours that says why."""
        return self.exit != 0 and re.search(r"headrace\.errors\.\w+: \S", self.text) is not None

    def __str__(self) -> str:
        """All that a test that fails has to say."""
        sizes = sorted(len(share) for share in self.shares)
        return (
            f"{self.launcher}, {self.loader}: {self.delivered} of {SAMPLES} delivered by processes of "
            f"{sizes}, {self.unique} different, exit {self.exit}\n{self.text[-6000:]}"
        )


def outcome(launcher: str, loader: str, ended: Ended, out: Path) -> Outcome:
    """Read what a loader's processes left."""
    shares = [
        tuple(json.loads(path.read_text())) for path in sorted(out.glob(f"{loader}-[0-9]*.json"))
    ]
    return Outcome(launcher, loader, ended.code, tuple(sorted(shares)), ended.text)


def verdicts(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, str]]:
    """Judge what one launcher's loaders delivered.

    A store's loader and a distributed sampler deliver every sample once, or refuse. Without a sampler,
    torch's own loader under the same launcher says what is right: the same samples in the same processes.
    """
    own = {outcome.loader: outcome for outcome in outcomes}
    return [(outcome, _verdict(outcome, own.get("torch"))) for outcome in outcomes]


def _verdict(outcome: Outcome, reference: Outcome | None) -> str:
    if outcome.is_refused:
        return "refused" if not outcome.shares else WRONG
    if outcome is reference:
        return "the reference" if outcome.exit == 0 else WRONG
    if outcome.loader == "drop-in" and reference is not None:
        same = outcome.exit == 0 and outcome.shares == reference.shares
        return "as torch" if same else WRONG
    return "once" if outcome.is_exactly_once else WRONG


def table(rows: Iterable[tuple[Outcome, str]]) -> str:
    """The matrix as text in columns: outcomes, each with its verdict."""
    head = ("launcher", "loader", "ranks", "delivered", "unique", "twice", "exit", "verdict")
    lines = [head]
    for outcome, verdict in rows:
        counts = (len(outcome.shares), outcome.delivered, outcome.unique)
        numbers = (*counts, outcome.delivered - outcome.unique, outcome.exit)
        lines.append((outcome.launcher, outcome.loader, *map(str, numbers), verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 2 <= i <= 6 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
