"""A comparison in words: each kind of result, in 80 columns, as people read it."""

from __future__ import annotations

import json
import re

import pytest

from headrace.insight.ab.comparison import (
    COLUMNS,
    Comparison,
    EndReason,
    command_text,
    report,
    sentence,
)
from headrace.insight.ab.experiment import Cached
from headrace.insight.ab.one_run import Ran
from headrace.insight.ab.running import AbOptions, MeasuredRun, Outcome, RunReads, Side

FILES = (b"/data/1.png", b"/data/2.png")


def run(
    side, wall_s, *, start_s=1.0, busy_share=0.8, files=FILES, lines=(), left=(), mapped=0, cpu=0.5
):
    began_ns = 10**12
    first_ns = began_ns + int(start_s * 1e9)
    ended_ns = began_ns + int(wall_s * 1e9)
    busy_ns = int((ended_ns - first_ns) * busy_share)
    ran = Ran(
        wall_s=wall_s, ended_ns=ended_ns, cpu_s=wall_s * cpu, peak_bytes=5 << 20,
        storage_bytes=10**7, status=0, signal=0, left=list(left),
    )  # fmt: skip
    reading = RunReads(
        tuple((1, path) for path in files), frozenset(), first_ns, 1000, busy_ns, 1, mapped
    )
    before = Cached(nbytes=1000, resident=0)
    return MeasuredRun(1, side, ran, reading, before, Outcome(0, tuple(lines), ()))


def comparison(without, with_, **options):
    learned = run(Side.WITHOUT, 1.5)
    found = Comparison(["python", "train.py"], AbOptions(**options), ["/data"], learned)
    found.pairs = list(zip(without, with_, strict=True))
    return found


def of_times(without, with_, *, ours=None, theirs=None, **options):
    return comparison(
        [run(Side.WITHOUT, wall_s, **(theirs or {})) for wall_s in without],
        [run(Side.WITH, wall_s, **(ours or {})) for wall_s in with_],
        **options,
    )


def text_of(found):
    text = report(found)
    assert max(map(len, text.splitlines())) <= COLUMNS
    json.dumps(found.document())
    return re.sub(r"\s+", " ", text)


def test_faster():
    found = of_times([4.6, 4.7, 4.5, 4.6, 4.6, 4.6], [2.0, 2.0, 2.0, 2.02, 1.98, 2.0])
    assert sentence(found) == (
        "headrace makes python train.py 2.30 x faster (2.26 to 2.34, 95 %), 6 pairs, cold."
    )
    assert "next:" not in text_of(found)


def test_by_one_import():
    found = of_times([4.6, 4.7, 4.5], [2.0, 2.0, 2.0], drop_in=True, cold=False)
    assert sentence(found).startswith("headrace's DataLoader makes python train.py 2.30 x faster")
    assert sentence(found).endswith("3 pairs, warm.")


def test_compute_bound():
    found = of_times([4.0, 4.1, 4.0], [4.0, 4.0, 4.1], theirs={"busy_share": 0.012})
    assert re.fullmatch(
        r"not faster: python train\.py shows no difference in 3 pairs, cold \(0\.9\d to 1\.0\d, 95 %\), "
        r"because it is compute bound: reading was 1 % of its time\.",
        sentence(found),
    )
    assert "next: the time goes into computing" in text_of(found)
    late = of_times(
        [2.0, 2.1, 2.0], [3.0, 3.1, 3.0], ours={"start_s": 2.0}, theirs={"busy_share": 0.002}
    )
    assert "`headrace doctor` on the data, tells which" in text_of(late)


def test_what_neither_reads_nor_computes_waits():
    sleeps = {"busy_share": 0.012, "cpu": 0.1}
    found = of_times([4.0, 4.1, 4.0], [4.0, 4.0, 4.1], theirs=sleeps, ours=sleeps)
    assert "because it waits for something else: reading was 1 % of its time" in sentence(found)
    assert "next: most of the time neither reads nor computes" in text_of(found)


def test_slower_because_of_its_start():
    found = of_times([2.0, 2.1, 2.0], [3.0, 3.1, 3.0], ours={"start_s": 2.0})
    assert "not faster: headrace makes python train.py 1.49 x slower" in sentence(found)
    assert "next: headrace takes 1 s longer to begin" in text_of(found)
    assert "start headrace takes 1 s longer to begin, once a run" in text_of(found)


def test_a_reading_share_that_cannot_be_seen_is_not_said():
    found = of_times([2.0, 2.1], [2.0, 2.1], theirs={"mapped": 1, "busy_share": 0.0})
    assert found.reading_share is None
    assert "reading was" not in text_of(found)


def test_warm_and_each_file_once_are_advised():
    assert "--cold shows" in text_of(of_times([4.0, 4.1], [4.0, 4.1], cold=False))
    assert "tell it the order (--with-order)" in text_of(of_times([4.0, 4.1], [4.0, 4.1]))
    twice = {"files": FILES + FILES}
    found = of_times([4.0, 5.0, 6.0], [6.0, 5.0, 4.0], ours=twice, theirs=twice)
    found.learned = run(Side.WITHOUT, 1.5, files=FILES + FILES)
    assert "next: the interval is wide: --until-confident" in text_of(found)


def test_where_little_is_reading_the_verdict_is_pointed_to():
    twice = {"files": FILES + FILES}
    found = of_times(
        [4.0, 5.0, 6.0], [6.0, 5.0, 4.0], ours=twice, theirs={**twice, "busy_share": 0.11}
    )
    found.learned = run(Side.WITHOUT, 1.5, files=FILES + FILES)
    share = found.reading_share
    assert f"next: {1 - share:.0%} of the time is not reading: HEADRACE_VERDICT=1" in text_of(found)
    assert (
        'documentation\'s "How to read a verdict"); and the interval is wide: --until-confident'
        in text_of(found)
    )


def test_one_pair_and_none():
    assert sentence(of_times([4.0], [2.0])) == (
        "python train.py: 2.00 x as fast in the only pair, cold: one pair shows nothing."
    )
    none = of_times([], [])
    none.ended = EndReason.INTERRUPTED
    assert text_of(none) == "nothing is known yet of python train.py: no pair of runs was finished."


def test_what_is_not_the_same_is_said_before_any_number():
    found = of_times([4.0, 4.0], [2.0, 2.0], ours={"lines": ["loss 2"]}, theirs={"lines": ["loss 1"]},
                     compare="loss")  # fmt: skip
    found.learned = run(Side.WITHOUT, 1.5, lines=["loss 1"])
    assert found.outcomes_agree is False
    assert sentence(found).startswith("the two sides did not do the same")
    assert "it prints 'loss 1', with it 'loss 2'" in text_of(found)
    fewer = of_times([4.0], [2.0], theirs={"lines": ["loss 1"]}, compare="loss")
    fewer.learned = run(Side.WITHOUT, 1.5, lines=["loss 1"])
    assert "1 lines match without headrace, 0 with" in text_of(fewer)


def test_other_circumstances_are_told():
    found = of_times([4.0, 4.1], [2.0, 2.1], ours={"left": ["server"]})
    found.ended, found.remote = EndReason.NARROW, ["lustre"]
    found.pairs[0][0].before.resident = 900
    found.pairs[0][0].before.not_cold = [(b"/data/1\x1b.png", "it lies on tmpfs, which is memory")]
    text = text_of(found)
    assert "runs left processes behind, which were ended: server" in text
    assert "the interval was narrow enough" in text
    assert "the server of lustre has a memory that cannot be emptied here" in text
    assert "90.0 % of the files' bytes were in memory before a run" in text
    assert r"/data/1\x1b.png: it lies on tmpfs" in text
    found.pairs[0][0].before.resident = None
    assert "the kernel does not tell" in text_of(found)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["/usr/bin/python3", "/home/a/train.py", "photos"], "python3 train.py photos"),
        (["python", "-c", "print(1); " * 30], "python -c 'print(1); print(1); print(..."),
        (["cat", "a\x1b[31m\nb"], r"cat 'a\x1b[31m\nb'"),
    ],
)
def test_commands_are_short_and_harmless(command, text):
    assert command_text(command) == text
    assert len(command_text(command)) <= 40
