"""Text: a comparison as people read it, in lines of at most 80 columns. Pure."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from typing import TYPE_CHECKING

from headrace.base.text import bytes_text, counted, labelled, percent_text, printable, seconds_text
from headrace.insight.ab.comparison import Agreement, EndReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.insight.ab.comparison import Comparison, Interval, Match, Measure

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
    what = command_text(comparison.command)
    ratio = comparison.wall.ratio
    how = f"{counted(len(comparison.pairs), 'pair')}, {_state(comparison)}"
    if ratio is None:
        return f"nothing is known yet of {what}: no pair of runs was finished."
    if not comparison.same_work:
        return f"the two sides did not do the same, so {what} cannot be compared: see below."
    if ratio.pairs == 1:
        return f"{what}: {_times(ratio.ratio)} in the only pair, {_state(comparison)}: one pair shows nothing."
    between = f"{_number(ratio.low)} to {_number(ratio.high)}, 95 %"
    who = "headrace's DataLoader" if comparison.options.drop_in else "headrace"
    if ratio.faster:
        return f"{who} makes {what} {_number(ratio.ratio)} x faster ({between}), {how}."
    because = _because(comparison)
    if ratio.slower:
        between = f"{_number(1 / ratio.high)} to {_number(1 / ratio.low)}, 95 %"
        slower = f"{_number(1 / ratio.ratio)} x slower ({between})"
        return f"not faster: {who} makes {what} {slower}, {how}{because}."
    return f"not faster: {what} shows no difference in {how} ({between}){because}."


def _because(comparison: Comparison) -> str:
    share = comparison.reading_share
    if share is None:
        return ""
    percent = "less than 1 %" if share < 0.01 else f"{100 * share:.0f} %"
    if comparison.compute_bound:
        return f", because it is compute bound: reading was {percent} of its time"
    return f"; reading was {percent} of its time"


def _state(comparison: Comparison) -> str:
    simulated = comparison.options.simulate
    state = "cold" if comparison.options.cold else "warm"
    return f"{state}, on simulated {simulated}" if simulated else state


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


def progress(run: str, wall_s: float, opens: int) -> str:
    """A line for a run that has ended."""
    return f"{run}: {seconds_text(wall_s)}, {opens:,} files opened"


# -- the table ---------------------------------------------------------------------------------------


def _table(comparison: Comparison) -> list[str]:
    rows = [f"{'median of a run':<{_LABEL}}{'without':>12}{'with':>12}   without / with (95 %)"]
    for measure in comparison.measures:
        if measure.without is None or measure.with_ is None:
            continue
        rows.append(
            f"{measure.name:<{_LABEL}}{_figure(measure, measure.without):>12}"
            f"{_figure(measure, measure.with_):>12}   {_ratio_text(measure.ratio)}".rstrip()
        )
    return rows


def _figure(measure: Measure, value: float) -> str:
    if measure.unit == "s":
        return seconds_text(value)
    if measure.unit == "B":
        return bytes_text(value)
    return f"{value:,.0f}"


def _ratio_text(ratio: Interval | None) -> str:
    if ratio is None:
        return ""
    if ratio.pairs == 1 or math.isinf(ratio.high):
        return _number(ratio.ratio)
    return f"{_number(ratio.ratio)}  ({_number(ratio.low)} to {_number(ratio.high)})"


# -- what it is worth ----------------------------------------------------------------------------------


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [
        ("data", _data(comparison)),
        ("served", _served(comparison)),
        ("same reads?", _order(comparison)),
        ("same result?", _outcome(comparison)),
    ]
    facts.append(("cold?" if comparison.options.cold else "warm?", _cached(comparison)))
    late = comparison.later_start_s or 0.0
    if late > _LATE_LEAST * (comparison.wall.with_ or 0.0):
        facts.append(("start", f"headrace takes {seconds_text(late)} longer to begin, once a run"))
    if comparison.noise is not None:
        noise = percent_text(comparison.noise)
        facts.append(("noise", f"runs without headrace differ by {noise} of their time"))
    share = percent_text(comparison.recording_share)
    facts.append(("recording", f"noting what is opened takes {share} of a run, on both sides"))
    if comparison.ended is not EndReason.PAIRS:
        facts.append(("ended", comparison.ended.value))
    if comparison.rewritten:
        some = ", ".join(map(_name, comparison.rewritten[:3]))
        more = " ..." if len(comparison.rewritten) > 3 else ""
        text = f"each run writes the same files, the last one's remain: {some}{more}"
        facts.append(("written", text))
    if comparison.left:
        names = ", ".join(comparison.left)
        facts.append(("left behind", f"runs left processes behind, which were ended: {names}"))
    if comparison.learned.uses_headrace:
        facts.append(("remark", "the command uses headrace by itself, on both sides"))
    facts += [("remark", text) for text in comparison.remarks]
    dropped = comparison.learned.reading.dropped
    if dropped:
        facts.append(("not noted", f"{dropped:,} opens that the log had no room for"))
    return [(label, text) for label, text in facts if text]


def _data(comparison: Comparison) -> str:
    files = len(comparison.learned.reading.files)
    folders = ", ".join(_name(os.fsencode(root)) for root in comparison.roots[:3])
    more = f" and {len(comparison.roots) - 3} more" if len(comparison.roots) > 3 else ""
    return f"{files:,} files below {folders}{more}"


def _served(comparison: Comparison) -> str:
    """Where the opens of headrace's side went, in its last run."""
    opens = comparison.pairs[-1][1].ran.opens
    copies, disk = opens.get("copy", 0), opens.get("tier_copy", 0)
    if not opens:
        return ""
    others = opens.get("original", 0) + opens.get("unknown", 0)
    text = f"with headrace {copies - disk:,} opens from memory, {others:,} from the storage"
    return f"{text}, {disk:,} from local disk" if disk else text


def _order(comparison: Comparison) -> str:
    order = comparison.order
    if order is None:
        return "not known"
    same = f"{order.opens:,} opens of the same files in the same order"
    if order.in_order:
        each = " in each process" if order.sameness is Agreement.BY_PROCESS else ""
        return f"yes: {same}{each}"
    if order.sameness is Agreement.AHEAD:
        files = f"the same {len(comparison.learned.reading.files):,} files, read ahead"
        hint = "; --compare REGEX shows whether batches are the same"
        return f"yes: {files}{'' if comparison.options.compare else hint}"
    if (why := _why_not_known(comparison, order)) is not None:
        return f"not known: {why}"
    if order.sameness is Agreement.OTHER_ORDER:
        return f"the same files; in another order, by up to {order.moved:,} places"
    names = [f"only without: {_name(name)}" for name in order.only_first[:1]]
    names += [f"only with: {_name(name)}" for name in order.only_second[:1]]
    return f"NO: not the same files were opened ({'; '.join(names)})"


def _why_not_known(comparison: Comparison, order: Match) -> str | None:
    if comparison.learned.uses_headrace and order.sameness is Agreement.OTHER_FILES:
        return "what headrace's own loader has read ahead is not opened again"
    own = comparison.own_order
    if own is None or own.sameness is not order.sameness:
        return None
    what = "the same files, but" if order.sameness is Agreement.OTHER_ORDER else "other files, and"
    return f"{what} in another order each time, also without headrace: it is not seeded"


def _outcome(comparison: Comparison) -> str:
    agree, options = comparison.outcomes_agree, comparison.options
    first = comparison.pairs[0][0].outcome
    what = ["exit status 0"]
    if options.compare is not None:
        what.append(f"{len(first.lines)} lines of output that match {options.compare!r}")
    what += [_name(os.fsencode(path)) for path in options.compare_files]
    text = ", ".join(what)
    if agree:
        more = "" if len(what) > 1 else " (--compare REGEX compares what it prints)"
        return f"yes: {text} on both sides{more}"
    if agree is None:
        return "not known: the output differs between runs without headrace already"
    return f"NO: {_difference(comparison)}"


def _difference(comparison: Comparison) -> str:
    for a, b in comparison.pairs:
        for one, other in zip(a.outcome.lines, b.outcome.lines, strict=False):
            if one != other:
                return f"without headrace it prints {one!r}, with it {other!r}"
        if len(a.outcome.lines) != len(b.outcome.lines):
            return (
                f"{len(a.outcome.lines)} lines match without headrace, {len(b.outcome.lines)} with"
            )
        for path, one_file, other_file in zip(
            comparison.options.compare_files, a.outcome.files, b.outcome.files, strict=True
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
    if late > 0 and 2 * late > abs(comparison.lost_s):
        return (
            f"headrace takes {seconds_text(late)} longer to begin, which so short a run cannot win back: "
            "give it more to do, and see the line `after the first read`."
        )
    if comparison.compute_bound:
        return "the time goes into computing: a faster decoder, more workers or a larger GPU help."
    if not options.cold:
        return "its files are in memory already; --cold shows what happens when they are not."
    if comparison.each_file_once and not (options.drop_in or options.with_order):
        return (
            "each file is read once, and headrace learns the order from a first pass: run more "
            "epochs, tell it the order (--with-order), or change one import (--drop-in)."
        )
    wide = ratio.half_width > options.width
    return "the interval is wide: --until-confident runs more pairs." if wide else ""


# -- numbers -------------------------------------------------------------------------------------------


def _times(ratio: float) -> str:
    if ratio >= 1:
        return f"{_number(ratio)} x as fast"
    return f"{_number(1 / ratio)} x as slow"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _name(path: bytes) -> str:
    """A path as it can be printed, from here where it lies below."""
    text = os.fsdecode(path)
    here = os.path.join(os.getcwd(), "")
    text = text.removeprefix(here)
    return printable(text)
