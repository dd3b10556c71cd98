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

People read it as text, in lines of at most 80 columns.
"""

from __future__ import annotations

import math
import os
import shlex
import statistics
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.base.text import (
    bytes_text,
    count_text,
    counted,
    labelled,
    percent_text,
    printable,
    seconds_text,
)
from headrace.insight.ab.running import Agreement, compare_orders, worst

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.insight.ab.running import AbOptions, Match, MeasuredRun

CONFIDENCE: Final = 0.95  # of 100 intervals found in this way, 95 hold the truth

PAIRS_LEAST: Final = 6
"""Pairs before a width is believed: fewer happen to lie close together too often."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How many times as long one side takes as the other."""

    ratio: float
    """The first side's time over the second's, geometric mean of pairs: 2 is twice as fast."""
    low: float  # the truth lies between this ...
    high: float  # ... and that, with `CONFIDENCE`; 0 and infinity where one pair says nothing
    pairs: int

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


_T95: Final = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788,
    2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip
"""Student's t, two-sided 95 %, of 1 to 20 degrees of freedom."""


def t_95(freedom: int) -> float:
    """Student's t, two-sided 95 %: of more than 20 degrees of freedom by its expansion around the normal's."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval_of(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """The interval of first/second, figures of pairs in one order; None without a pair, or above 0."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} figures, expected pairs")
    if not first or min(*first, *second) <= 0:
        return None
    logs = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), 0.0, math.inf, 1)
    deviation = statistics.stdev(logs)
    half = t_95(len(logs) - 1) * deviation / math.sqrt(len(logs))
    ends = math.exp(mean - half), math.exp(mean + half)
    return Interval(math.exp(mean), *ends, len(logs))


def is_narrow(interval: Interval | None, half_width: float) -> bool:
    """Whether more pairs are not worth their time."""
    if interval is None or interval.pairs < PAIRS_LEAST:
        return False
    return interval.half_width <= half_width


# -- comparison --------------------------------------------------------------------------------------

_NOTHING_MOST = 0.05  # reading that is less than this share of the time is nothing to win from


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
        interval = {n: getattr(ratio, n) for n in ("ratio", "low", "high")} if ratio else {}
        return {"name": name, "unit": unit, "without": without, "with": with_, **interval}


@dataclass(slots=True)
class Comparison:
    """A command with and without headrace."""

    command: list[str]
    options: AbOptions
    roots: list[str]
    learned: MeasuredRun  # the first run, which is not measured
    pairs: list[tuple[MeasuredRun, MeasuredRun]] = field(default_factory=list)
    """Runs in pairs, the one without headrace first, however they were run."""
    ended: EndReason = EndReason.PAIRS
    recording_s: float = 0.0  # what noting an open and its reads costs, per file
    remote: list[str] = field(default_factory=list)
    """File systems whose servers have a memory of their own."""

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
        first, second = zip(*known, strict=True)
        medians = statistics.median(first), statistics.median(second)
        return Measure(name, unit, *medians, interval_of(first, second))

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
    def waits_otherwise(self) -> bool:
        """Whether most of the time was neither reading nor computing."""
        ran = [each.ran for pair in self.pairs for each in pair]
        return self.compute_bound and sum(r.cpu_s for r in ran) < 0.4 * sum(r.wall_s for r in ran)

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
            "measures": [measure.document() for measure in self.measures], "confidence": CONFIDENCE,
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


COLUMNS = 80
_COMMAND_MAX = 40
_LABEL = 22
_MARGIN = 13
_LATE_LEAST = 0.05  # a later start is worth a line when it is so much of a run


def command_text(command: Sequence[str]) -> str:
    """A command as it would be typed, shortened: files by their names alone."""
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in command]
    text = printable(shlex.join(word or "/" for word in words))
    return text if len(text) <= _COMMAND_MAX else text[: _COMMAND_MAX - 3].rstrip() + "..."


def sentence(comparison: Comparison) -> str:
    """The result."""
    what, ratio = command_text(comparison.command), comparison.wall.ratio
    options = comparison.options
    state = "cold" if options.cold else "warm"
    state += f", on simulated {options.simulate}" if options.simulate else ""
    if ratio is None:
        return f"nothing is known yet of {what}: no pair of runs was finished."
    if not comparison.same_work:
        return f"the two sides did not do the same, so {what} cannot be compared: see below."
    if ratio.pairs == 1:
        faster = ratio.ratio >= 1
        times = _number(ratio.ratio if faster else 1 / ratio.ratio)
        how = f"{times} x as {'fast' if faster else 'slow'} in the only pair, {state}"
        return f"{what}: {how}: one pair shows nothing."
    how = f"{counted(len(comparison.pairs), 'pair')}, {state}"
    who = "headrace's DataLoader" if options.drop_in else "headrace"
    between = f"{_number(ratio.low)} to {_number(ratio.high)}, 95 %"
    if ratio.faster:
        return f"{who} makes {what} {_number(ratio.ratio)} x faster ({between}), {how}."
    because, share = "", comparison.reading_share
    if share is not None:
        because = "; "
        if comparison.compute_bound:
            what_for = (
                "waits for something else" if comparison.waits_otherwise else "is compute bound"
            )
            because = f", because it {what_for}: "
        percent = "less than 1" if share < 0.01 else f"{100 * share:.0f}"
        because += f"reading was {percent} % of its time"
    if ratio.slower:
        between = f"{_number(1 / ratio.high)} to {_number(1 / ratio.low)}, 95 %"
        slower = f"{_number(1 / ratio.ratio)} x slower ({between})"
        return f"not faster: {who} makes {what} {slower}, {how}{because}."
    return f"not faster: {what} shows no difference in {how} ({between}){because}."


def report(comparison: Comparison) -> str:
    """The result, the figures behind it, and what they are worth; many lines."""
    lines = textwrap.wrap(sentence(comparison), COLUMNS)
    if not comparison.pairs:
        return "\n".join(lines)
    lines += ["", *_table(comparison), ""]
    for label, text in _facts(comparison):
        lines += labelled(label, text, margin=_MARGIN)
    if advice := _advice(comparison):
        lines += ["", *textwrap.wrap(f"next: {advice}", COLUMNS, subsequent_indent="      ")]
    return "\n".join(lines)


def _table(comparison: Comparison) -> Iterator[str]:
    yield f"{'median of a run':<{_LABEL}}{'without':>12}{'with':>12}   ratio of pairs (95 %)"
    for measure in comparison.measures:
        if measure.without is None or measure.with_ is None:
            continue
        text = {"s": seconds_text, "B": bytes_text}.get(measure.unit, count_text)
        row = f"{measure.name:<{_LABEL}}{text(measure.without):>12}{text(measure.with_):>12}"
        if (ratio := measure.ratio) is not None:
            row += f"   {_number(ratio.ratio)}"
            if not math.isinf(ratio.high):
                row += f"  ({_number(ratio.low)} to {_number(ratio.high)})"
        yield row


def _facts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """What was compared and how sure that is, each with its label."""
    learned = comparison.learned
    folders = [_name(os.fsencode(root)) for root in comparison.roots]
    more = f" and {len(folders) - 3} more" if len(folders) > 3 else ""
    yield "data", f"{len(learned.reading.files):,} files below {', '.join(folders[:3])}{more}"
    # Where the opens of headrace's side went, in its last run.
    if opens := comparison.pairs[-1][1].ran.opens:
        copies, disk = opens.get("copy", 0), opens.get("tier_copy", 0)
        others = opens.get("original", 0) + opens.get("unknown", 0)
        served = f"with headrace {copies - disk:,} opens from memory, {others:,} from the storage"
        yield "served", f"{served}, {disk:,} from local disk" if disk else served
    yield "same reads?", _order(comparison)
    yield "same result?", _outcome(comparison)
    yield "cold?" if comparison.options.cold else "warm?", _cached(comparison)
    late = comparison.later_start_s or 0.0
    if late > _LATE_LEAST * (comparison.wall.with_ or 0.0):
        yield "start", f"headrace takes {seconds_text(late)} longer to begin, once a run"
    if comparison.noise is not None:
        noise = percent_text(comparison.noise)
        yield "noise", f"runs without headrace differ by {noise} of their time"
    share = percent_text(comparison.recording_share)
    yield "recording", f"noting what is opened takes {share} of a run, on both sides"
    if comparison.ended is not EndReason.PAIRS:
        yield "ended", comparison.ended.value
    if rewritten := comparison.rewritten:
        some = ", ".join(map(_name, rewritten[:3])) + (" ..." if len(rewritten) > 3 else "")
        yield "written", f"each run writes the same files, the last one's remain: {some}"
    if comparison.left:
        names = ", ".join(comparison.left)
        yield "left behind", f"runs left processes behind, which were ended: {names}"
    if learned.uses_headrace:
        yield "remark", "the command uses headrace by itself, on both sides"
    ours = [run.ran for _, run in comparison.pairs]
    for text in dict.fromkeys(text for ran in ours for text in (*ran.unseen, *ran.notes)):
        yield "remark", text
    if dropped := learned.reading.dropped:
        yield "not noted", f"{dropped:,} opens that the log had no room for"


def _order(comparison: Comparison) -> str:
    order, own, learned = comparison.order, comparison.own_order, comparison.learned
    assert order is not None  # there is a pair
    if order.in_order:
        each = " in each process" if order.sameness is Agreement.BY_PROCESS else ""
        return f"yes: {order.opens:,} opens of the same files in the same order{each}"
    if order.sameness is Agreement.AHEAD:
        hint = "; --compare REGEX shows whether batches are the same"
        files = f"the same {len(learned.reading.files):,} files, read ahead"
        return f"yes: {files}{'' if comparison.options.compare else hint}"
    other_order = order.sameness is Agreement.OTHER_ORDER
    if learned.uses_headrace and not other_order:
        return "not known: what headrace's own loader has read ahead is not opened again"
    if own is not None and own.sameness is order.sameness:
        what = "the same files, but" if other_order else "other files, and"
        unseeded = "in another order each time, also without headrace: it is not seeded"
        return f"not known: {what} {unseeded}"
    if other_order:
        return f"the same files; in another order, by up to {order.moved:,} places"
    names = [f"only without: {_name(name)}" for name in order.only_first[:1]]
    names += [f"only with: {_name(name)}" for name in order.only_second[:1]]
    return f"NO: not the same files were opened ({'; '.join(names)})"


def _outcome(comparison: Comparison) -> str:
    agree, options = comparison.outcomes_agree, comparison.options
    if agree is None:
        return "not known: the output differs between runs without headrace already"
    if not agree:
        return f"NO: {_difference(comparison)}"
    what = ["exit status 0"]
    if options.compare is not None:
        lines = len(comparison.pairs[0][0].outcome.lines)
        what.append(f"{counted(lines, 'line')} of output that match {options.compare!r}")
    what += [_name(os.fsencode(path)) for path in options.compare_files]
    more = "" if len(what) > 1 else " (--compare REGEX compares what it prints)"
    return f"yes: {', '.join(what)} on both sides{more}"


def _difference(comparison: Comparison) -> str:
    for a, b in comparison.pairs:
        lines, others = a.outcome.lines, b.outcome.lines
        for one, other in zip(lines, others, strict=False):
            if one != other:
                return f"without headrace it prints {one!r}, with it {other!r}"
        if len(lines) != len(others):
            return f"{len(lines)} lines match without headrace, {len(others)} with"
        files = zip(a.outcome.files, b.outcome.files, strict=True)
        for path, (one_file, other_file) in zip(
            comparison.options.compare_files, files, strict=True
        ):
            if one_file != other_file:
                return f"{_name(os.fsencode(path))} is not the same"
    return "the exit status"


def _cached(comparison: Comparison) -> str:
    looks = [run.before for pair in comparison.pairs for run in pair if run.before is not None]
    shares = [cached.share for cached in looks]
    known = [share for share in shares if share is not None]
    if len(known) < len(shares) or not known:
        return "the kernel does not tell what lies in memory"
    if not comparison.options.cold:
        return f"{100 * min(known):.0f} % of the files' bytes were in memory before each run"
    text = f"{percent_text(max(known))} of the files' bytes were in memory before a run"
    remaining = next((c.not_cold[0] for c in looks if c.not_cold), None)
    if remaining is not None and max(known) > 0.01:
        text += f"; {_name(remaining[0])}: {remaining[1]}"
    text += " (names and sizes of files stay cached)"
    if comparison.remote:
        text += f"; the server of {', '.join(comparison.remote)} has a memory that cannot be emptied here"
    return text


_READING_MUCH: Final = 0.5  # of the time: where it is less, more pairs do not find what is slow


def _advice(comparison: Comparison) -> str:
    """What may be done where nothing was won, the likeliest first."""
    ratio, options = comparison.wall.ratio, comparison.options
    if ratio is None or ratio.faster or not comparison.same_work:
        return ""
    late = comparison.later_start_s or 0.0
    lost_s = statistics.median(b.ran.wall_s - a.ran.wall_s for a, b in comparison.pairs)
    if comparison.compute_bound:
        # Decoding computes, too: here it cannot be told from the model.
        return (
            "most of the time neither reads nor computes: it waits, for a sleep, a lock or the network. "
            'Profile dataset[i] (the documentation\'s "How to read a verdict" shows how).'
            if comparison.waits_otherwise
            else "the time goes into computing, the model's or the decoding of samples: HEADRACE_VERDICT=1 "
            "with headrace's DataLoader, or `headrace doctor` on the data, tells which; decoding may go to "
            "native threads (decode=)."
        )
    if late > 0 and 2 * late > abs(lost_s):
        return (
            f"headrace takes {seconds_text(late)} longer to begin, which so short a run cannot win back: "
            "give it more to do, and see the line `after the first read`."
        )
    if not options.cold:
        return "its files are in memory already; --cold shows what happens when they are not."
    reading = comparison.learned.reading
    each_once = len(reading.files) == len(reading.opens)
    if each_once and not (options.drop_in or options.with_order):
        return (
            "each file is read once, and headrace learns the order from a first pass: run more "
            "epochs, tell it the order (--with-order), or change one import (--drop-in)."
        )
    wide = ratio.half_width > options.width
    more = "the interval is wide: --until-confident runs more pairs" if wide else ""
    share = comparison.reading_share
    if share is not None and share < _READING_MUCH:
        more = (
            f"{1 - share:.0%} of the time is not reading: HEADRACE_VERDICT=1 with headrace's DataLoader, or "
            'hr.explain(loader), tells what it is (the documentation\'s "How to read a verdict")'
        ) + (f"; and {more}" if more else "")
    return f"{more}." if more else ""


def _number(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _name(path: bytes) -> str:
    """A path as it can be printed, from here where it lies below."""
    return printable(os.fsdecode(path).removeprefix(os.path.join(os.getcwd(), "")))
