"""Options of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PAIRS", "PAIRS_MOST", "AbOptions"]

PAIRS: Final = 6
"""Pairs unless told otherwise: with runs that differ by 3 % the interval is about 3 % to either side."""

PAIRS_MOST: Final = 40
"""Of `until_confident`, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbOptions:
    """How a command is compared with itself under headrace.

    Attributes:
        pairs: runs of each side, at most; None: `PAIRS`, or `PAIRS_MOST` with `until_confident`, or what
            `seconds` allow.
        seconds: no pair begins that would probably end later than so long after the start.
        cold: what the command reads is put out of the page cache before each run; else into it.
        until_confident: stop when the interval is narrow enough.
        width: what narrow is: half of the interval's width, as a fraction.
        drop_in: the other side is torch's DataLoader exchanged for headrace's, instead of `headrace run`.
        with_order: `headrace run` is told the order that the first run had, instead of learning it.
        roots: folders whose files are served; without any, they are found.
        limit_s: a run that takes longer is an error.
        compare: a regular expression; lines of stdout in which it is found must be the same on both sides.
        compare_files: files that each run writes; they must be the same on both sides.
        simulate: a slow storage that the roots lie on, on both sides.
        stdin: a file that each run reads as its standard input; None: it is empty.
        seed: of the order in which the sides take turns.
    """

    pairs: int | None = None
    seconds: float | None = None
    cold: bool = True
    until_confident: bool = False
    width: float = 0.05
    drop_in: bool = False
    with_order: bool = False
    roots: tuple[str, ...] = ()
    limit_s: float = 3600.0
    compare: str | None = None
    compare_files: tuple[str, ...] = ()
    simulate: str | None = None
    stdin: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pairs is not None and self.pairs < 1:
            raise ValueError(f"{self.pairs} pairs, expected 1 or more")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"{self.seconds:g} seconds, expected more than 0")
        if not 0 < self.width < 1:
            raise ValueError(f"a width of {self.width:g}, expected between 0 and 1: 0.05 is 5 %")
        if self.limit_s <= 0:
            raise ValueError(f"a limit of {self.limit_s:g} s, expected more than 0")
        if self.drop_in and (self.simulate or self.with_order):
            raise ValueError(
                "drop_in reads by itself: no simulated storage, and no order to be told"
            )

    @property
    def pairs_most(self) -> int:
        """Pairs that are run at most."""
        if self.pairs is not None:
            return self.pairs
        return PAIRS_MOST if self.until_confident or self.seconds is not None else PAIRS
