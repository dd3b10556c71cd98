"""Comparison: what the runs of both sides say together: how many times faster, and is it the same work? Pure.

Runs come in pairs, one of each side right after the other, so that what changes slowly on a machine
(other users, temperature, a filling disk) is the same for both. The logarithm of a pair's ratio is one
observation; the interval is Student's t over these, and its ends are taken back to ratios (a ratio of
geometric means). That is the paired form of what T. Kalibera and R. Jones recommend for comparing
systems ("Quantifying performance changes with effect size confidence intervals", 2012; "Rigorous
benchmarking in reasonable time", ISMM 2013): an effect's size with its interval, not a test.

Stopping early: who looks after each pair and stops as soon as 1 is outside of the interval finds
differences that are not there. So the rule looks at the interval's width alone, and stops when it is narrow
(Y. S. Chow and H. Robbins, "On the asymptotic theory of fixed-width sequential confidence intervals
for the mean", 1965): the chance of covering the truth then stays near what is said. With at least
`PAIRS_LEAST` pairs, simulation finds 93 to 95 % for 95 (tests/insight/test_ab_statistics.py).

A program with several processes that read opens files in an order that depends on which of them was quicker:
then each process's own order is compared. A loader that reads ahead opens files when it likes, and some twice:
then only which files they are can be compared.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.insight.ab.running import AbOptions, MeasuredRun

PAIRS_LEAST: Final = 6
"""Pairs before a width is believed: fewer happen to lie close together too often."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How many times as long one side takes as the other.

    Attributes:
        ratio: the first side's time over the second's, geometric mean of pairs: 2 is twice as fast.
        low: the truth lies between this ...
        high: ... and that, with this confidence; 0 and infinity where one pair says nothing.
        confidence: 0.95: of 100 intervals found in this way, 95 hold the truth.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    confidence: float = 0.95

    @property
    def half_width(self) -> float:
        """Half of the interval's width as a fraction: 0.05 is 5 % to either side."""
        if self.low <= 0 or math.isinf(self.high):
            return math.inf
        return math.sqrt(self.high / self.low) - 1

    @property
    def faster(self) -> bool:
        """Whether the second side is faster, for all that the interval allows."""
        return self.low > 1

    @property
    def slower(self) -> bool:
        """Whether it is slower, for all that the interval allows."""
        return self.high < 1


@functools.lru_cache(maxsize=1024)
def t_quantile(chance: float, freedom: int) -> float:
    """Student's t: the value up to which lies `chance`, between 0 and 1, of the distribution."""
    if not 0 < chance < 1 or freedom < 1:
        raise ValueError(
            f"chance {chance}, {freedom} degrees of freedom: expected 0..1, and 1 or more"
        )
    # With t = sqrt(freedom) tan(angle), the density of angles is a power of their cosine.
    angles = np.linspace(-np.pi / 2, np.pi / 2, _ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(chance * cumulative[-1], cumulative, angles)
    return float(np.sqrt(freedom) * np.tan(angle))


_ANGLES: Final = 200_001


def interval_of(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95
) -> Interval | None:
    """The interval of first/second, figures of pairs in the same order.

    Returns:
        None where there is no pair, or a figure is not above 0.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} figures, expected pairs")
    if not first or min(*first, *second) <= 0:
        return None
    logs = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), 0.0, math.inf, 1, confidence)
    deviation = statistics.stdev(logs)
    half = t_quantile((1 + confidence) / 2, len(logs) - 1) * deviation / math.sqrt(len(logs))
    ends = math.exp(mean - half), math.exp(mean + half)
    return Interval(math.exp(mean), *ends, len(logs), confidence)


def is_narrow(interval: Interval | None, half_width: float) -> bool:
    """Whether more pairs are not worth their time."""
    if interval is None or interval.pairs < PAIRS_LEAST:
        return False
    return interval.half_width <= half_width


# -- order check -------------------------------------------------------------------------------------


class Agreement(StrEnum):
    """How much two runs agree, best first."""

    SAME = "same order"
    BY_PROCESS = "same order in each process"
    AHEAD = "same files, read ahead"
    OTHER_ORDER = "same files, another order"
    OTHER_FILES = "other files"


@dataclass(frozen=True, slots=True)
class Match:
    """What two runs have in common.

    Attributes:
        opens: of the first run.
        moved: how far an open is from its place in the first run, at most; 0 in the same order.
        only_first: files that the second did not open as often, a few of them.
        only_second: files that the first did not open as often, a few of them.
    """

    sameness: Agreement
    opens: int
    moved: int = 0
    only_first: tuple[bytes, ...] = ()
    only_second: tuple[bytes, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether each process opened the same files in the same order."""
        return self.sameness in (Agreement.SAME, Agreement.BY_PROCESS)


_NAMES_MAX = 3


def compare_orders(
    first: Sequence[tuple[int, bytes]], second: Sequence[tuple[int, bytes]], *, ahead: bool = False
) -> Match:
    """Compare the opens of two runs: (process, path) by time; `ahead`: one reads ahead, only files count."""
    paths, others = [path for _, path in first], [path for _, path in second]
    if ahead:
        paths, others = sorted(set(paths)), sorted(set(others))
    if paths == others:
        return Match(Agreement.AHEAD if ahead else Agreement.SAME, len(first))
    counts, other_counts = Counter(paths), Counter(others)
    if counts != other_counts:
        some = [
            tuple(sorted(more)[:_NAMES_MAX])
            for more in (counts - other_counts, other_counts - counts)
        ]
        return Match(Agreement.OTHER_FILES, len(first), 0, *some)
    places = defaultdict[bytes, deque[int]](deque)
    for place, path in enumerate(others):
        places[path].append(place)
    moved = max(abs(place - places[path].popleft()) for place, path in enumerate(paths))
    same = _by_process(first) == _by_process(second)
    return Match(Agreement.BY_PROCESS if same else Agreement.OTHER_ORDER, len(paths), moved)


def _by_process(opens: Sequence[tuple[int, bytes]]) -> Counter[tuple[bytes, ...]]:
    """What each process opened; their numbers differ from run to run."""
    paths = defaultdict[int, list[bytes]](list)
    for process, path in opens:
        paths[process].append(path)
    return Counter(map(tuple, paths.values()))


def worst(matches: Iterable[Match]) -> Match | None:
    """The one that agrees least; None of none."""
    ranks = list(Agreement)
    return max(matches, key=lambda m: (ranks.index(m.sameness), m.moved), default=None)


# -- comparison --------------------------------------------------------------------------------------

_NOTHING_MOST = 0.05
"""Reading that is less than this share of the time is nothing to win from."""


class EndReason(StrEnum):
    """Why no more pairs were run."""

    PAIRS = "all pairs were run"
    SECONDS = "the time was over"
    NARROW = "the interval was narrow enough"
    INTERRUPTED = "interrupted"
    FAILED = "a run failed"


class Measure(NamedTuple):
    """A figure of runs: the median of each side (None: not known), and the ratio of the pairs."""

    name: str
    unit: str
    without: float | None
    with_: float | None
    ratio: Interval | None

    def document(self) -> dict[str, Any]:
        """For JSON."""
        name, unit, without, with_, ratio = self
        interval = (
            {} if ratio is None else {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
        )
        return {"name": name, "unit": unit, "without": without, "with": with_, **interval}


@dataclass(slots=True)
class Comparison:
    """A command with and without headrace.

    Attributes:
        learned: the first run, which is not measured.
        pairs: runs in pairs, the one without headrace first, however they were run.
        recording_s: what noting an open and its reads costs, per file.
        remote: file systems whose servers have a memory of their own.
    """

    command: list[str]
    options: AbOptions
    roots: list[str]
    learned: MeasuredRun
    pairs: list[tuple[MeasuredRun, MeasuredRun]] = field(default_factory=list)
    ended: EndReason = EndReason.PAIRS
    recording_s: float = 0.0
    remote: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[MeasuredRun]:
        """All of them, the first one too."""
        return [self.learned, *(run for pair in self.pairs for run in pair)]

    # -- how long ----------------------------------------------------------------------------------

    @property
    def wall(self) -> Measure:
        """The time from start to end: what people wait for, and what is judged."""
        return self._measure("wall time", "s", lambda run: run.ran.wall_s)

    @property
    def measures(self) -> list[Measure]:
        """All of them."""
        return [
            self.wall,
            self._measure("after the first read", "s", lambda run: run.after_first_read_s),
            self._measure("CPU time", "s", lambda run: run.ran.cpu_s),
            self._measure("private memory", "B", lambda run: run.ran.peak_bytes),
            self._measure("read from storage", "B", lambda run: run.ran.storage_bytes),
            self._measure("files opened", "", lambda run: len(run.reading.opens)),
        ]

    def _measure(
        self, name: str, unit: str, figure: Callable[[MeasuredRun], float | None]
    ) -> Measure:
        pairs = [(figure(a), figure(b)) for a, b in self.pairs]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not known:
            return Measure(name, unit, None, None, None)
        first, second = [a for a, _ in known], [b for _, b in known]
        ratio = interval_of(first, second)
        return Measure(name, unit, statistics.median(first), statistics.median(second), ratio)

    @property
    def noise(self) -> float | None:
        """How much runs without headrace differ among themselves: standard deviation over the mean."""
        times = [a.ran.wall_s for a, _ in self.pairs]
        if len(times) < 2:
            return None
        return statistics.stdev(times) / statistics.fmean(times)

    @property
    def recording_share(self) -> float:
        """Of the quicker side's time, what noting its opens costs; the other side pays the same."""
        opens = len(self.learned.reading.opens)
        times = [run.ran.wall_s for pair in self.pairs for run in pair]
        return self.recording_s * opens / min(times) if times else 0.0

    # -- the same work? ----------------------------------------------------------------------------

    @property
    def order(self) -> Match | None:
        """The worst of the pairs."""
        ahead = self.options.drop_in or self.learned.uses_headrace
        return worst(
            compare_orders(a.reading.opens, b.reading.opens, ahead=ahead) for a, b in self.pairs
        )

    @property
    def own_order(self) -> Match | None:
        """The same of runs without headrace among themselves: whether the command is seeded at all."""
        alone = [a for a, _ in self.pairs]
        first = self.learned.reading.opens
        return worst(compare_orders(first, run.reading.opens) for run in alone)

    @property
    def outcomes_agree(self) -> bool | None:
        """Whether what is compared of the outputs is the same; None: it differs without headrace already."""
        firsts = [self.learned.outcome, *(a.outcome for a, _ in self.pairs)]
        if any(outcome != firsts[0] for outcome in firsts):
            return None
        return all(a.outcome == b.outcome for a, b in self.pairs)

    @property
    def same_work(self) -> bool:
        """Whether nothing says that the sides did different things."""
        order, own = self.order, self.own_order
        files = order is None or order.sameness is not Agreement.OTHER_FILES
        unsteady = own is not None and own.sameness is Agreement.OTHER_FILES
        # What a loader of headrace's serves from memory nobody opens: that shows nothing.
        hidden = self.learned.uses_headrace
        return (files or unsteady or hidden) and self.outcomes_agree is not False

    # -- why, and what else ------------------------------------------------------------------------

    @property
    def reading_share(self) -> float | None:
        """Of the time after the first read, without headrace, what went into reading; None: not seen."""
        shares = [a.reading_share for a, _ in self.pairs]
        known = [share for share in shares if share is not None]
        return statistics.median(known) if known and len(known) == len(shares) else None

    @property
    def later_start_s(self) -> float | None:
        """How much later the first read comes with headrace, which is started too; None: not known."""
        starts = [
            [run.ran.wall_s - (run.after_first_read_s or 0.0) for run in pair]
            for pair in self.pairs
        ]
        return statistics.median(b - a for a, b in starts) if starts else None

    @property
    def compute_bound(self) -> bool:
        """Whether there was next to nothing to win."""
        share = self.reading_share
        return share is not None and share < _NOTHING_MOST

    @property
    def rewritten(self) -> list[bytes]:
        """Files that more than one run wrote."""
        counts = Counter(path for run in self.runs for path in run.reading.written)
        return sorted(path for path, count in counts.items() if count > 1)

    @property
    def left(self) -> list[str]:
        """Names of processes that runs left behind."""
        return sorted({name for run in self.runs for name in run.ran.left})

    def document(self) -> dict[str, Any]:
        """For JSON."""
        order, own = self.order, self.own_order
        return {
            "command": self.command, "roots": self.roots,
            "treatment": "drop-in" if self.options.drop_in else "run", "cold": self.options.cold,
            "simulated": self.options.simulate, "ended": self.ended.value, "pairs": len(self.pairs),
            "measures": [measure.document() for measure in self.measures], "confidence": 0.95,
            "noise": self.noise, "reading_share": self.reading_share,
            "recording_share": self.recording_share,
            "order": None if order is None else order.sameness.value,
            "moved": None if order is None else order.moved,
            "seeded": None if own is None else own.in_order, "outcomes_agree": self.outcomes_agree,
            "same_work": self.same_work, "rewritten": list(map(os.fsdecode, self.rewritten)),
            "left_behind": self.left, "runs": [_run_document(run) for pair in self.pairs for run in pair],
        }  # fmt: skip


def _run_document(run: MeasuredRun) -> dict[str, Any]:
    before = run.before
    return {
        "pair": run.number, "side": run.side.value, "wall_s": run.ran.wall_s,
        "after_first_read_s": run.after_first_read_s, "cpu_s": run.ran.cpu_s,
        "peak_bytes": run.ran.peak_bytes, "storage_bytes": run.ran.storage_bytes,
        "opens": len(run.reading.opens), "files": len(run.reading.files),
        "read_bytes": run.reading.nbytes, "resident_before": None if before is None else before.share,
        "status": run.ran.status,
    }  # fmt: skip
