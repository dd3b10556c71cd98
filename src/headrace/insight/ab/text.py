"""Text: a comparison as people read it, in lines of at most 80 columns. Pure."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import textwrap
from typing import TYPE_CHECKING

from headrace.base.text import (
    bytes_text,
    count_text,
    counted,
    labelled,
    percent_text,
    printable,
    seconds_text,
)
from headrace.insight.ab.comparison import Agreement, EndReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.insight.ab.comparison import Comparison

COLUMNS = 80
_COMMAND_MAX = 40
_LABEL = 22
_MARGIN = 13
_LATE_LEAST = 0.05
"""A later start is worth a line when it is so much of a run."""


def command_text(command: Sequence[str]) -> str:
    """A command as it would be typed, shortened: files by their names alone."""
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in command]
    text = printable(shlex.join(word or "/" for word in words))
    return text if len(text) <= _COMMAND_MAX else text[: _COMMAND_MAX - 3].rstrip() + "..."


def sentence(comparison: Comparison) -> str:
    """The result."""
    what, ratio, options = (
        command_text(comparison.command),
        comparison.wall.ratio,
        comparison.options,
    )
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
        because = (
            f"reading was {'less than 1' if share < 0.01 else f'{100 * share:.0f}'} % of its time"
        )
        because = (
            f", because it is compute bound: {because}"
            if comparison.compute_bound
            else f"; {because}"
        )
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
    yield f"{'median of a run':<{_LABEL}}{'without':>12}{'with':>12}   without / with (95 %)"
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
        what.append(f"{lines} lines of output that match {options.compare!r}")
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


def _advice(comparison: Comparison) -> str:
    """What may be done where nothing was won, the likeliest first."""
    ratio, options = comparison.wall.ratio, comparison.options
    if ratio is None or ratio.faster or not comparison.same_work:
        return ""
    late = comparison.later_start_s or 0.0
    lost_s = statistics.median(b.ran.wall_s - a.ran.wall_s for a, b in comparison.pairs)
    if late > 0 and 2 * late > abs(lost_s):
        return (
            f"headrace takes {seconds_text(late)} longer to begin, which so short a run cannot win back: "
            "give it more to do, and see the line `after the first read`."
        )
    if comparison.compute_bound:
        return "the time goes into computing: a faster decoder, more workers or a larger GPU help."
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
    return "the interval is wide: --until-confident runs more pairs." if wide else ""


def _number(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _name(path: bytes) -> str:
    """A path as it can be printed, from here where it lies below."""
    return printable(os.fsdecode(path).removeprefix(os.path.join(os.getcwd(), "")))
